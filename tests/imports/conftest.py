"""The `fresh` fixture: run code in a new interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from interpreters import PRELUDE, ROOT, Ended, Fresh


@pytest.fixture
def fresh(tmp_path: Path) -> Fresh:
    """fresh(code) runs it in a new interpreter, in an empty folder, this checkout importable."""

    def run(
        code: str = "",
        *argv: str,
        switch: str | None = None,
        path: str = "",
        flags: tuple[str, ...] = (),
        timeout: float = 300,
    ) -> Ended:
        env = {
            name: value
            for name, value in os.environ.items()
            if name not in ("TORCH_DCP_BACKPORT", "PYTHONWARNINGS")
        }
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (path, str(ROOT))))
        if switch is not None:
            env["TORCH_DCP_BACKPORT"] = switch
        command = ["-c", PRELUDE + textwrap.dedent(code), *argv] if code else list(argv)
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
