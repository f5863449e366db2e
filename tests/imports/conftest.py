"""The `fresh` fixture: run code in a new interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from interpreters import PRELUDE, ROOT, Ended, Fresh
from warm import STDLIB, Interpreters


@pytest.fixture(scope="session")
def warm() -> Iterator[Interpreters]:
    interpreters = Interpreters(ROOT)
    yield interpreters
    interpreters.close()


@pytest.fixture
def fresh(tmp_path: Path, request: pytest.FixtureRequest) -> Fresh:
    """fresh(code) runs it in a new interpreter, in an empty folder, this checkout importable.

    Code runs in a fork of one that has executed what it begins with; `anew`: in a new process.
    """

    def run(
        code: str = "",
        *argv: str,
        switch: str | None = None,
        path: str = "",
        flags: tuple[str, ...] = (),
        timeout: float = 300,
        anew: bool = False,
    ) -> Ended:
        env = {
            name: value
            for name, value in os.environ.items()
            if name not in ("TORCH_DCP_BACKPORT", "PYTHONWARNINGS")
        }
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (path, str(ROOT))))
        if switch is not None:
            env["TORCH_DCP_BACKPORT"] = switch
        program = PRELUDE + textwrap.dedent(code)
        if code and not flags and not anew and STDLIB is not None:
            warm: Interpreters = request.getfixturevalue("warm")
            return Ended(*warm.run(program, argv, env, tmp_path, timeout))
        command = ["-c", program, *argv] if code else list(argv)
        done = subprocess.run(
            [sys.executable, *flags, *command],
            env=env,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        return Ended(done.returncode, done.stdout, done.stderr)

    return run
