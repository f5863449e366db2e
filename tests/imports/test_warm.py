"""The interpreters that tests are forked from, where one of them stands still."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
import warm

ROOT = Path(__file__).resolve().parents[2]


def test_an_interpreter_that_does_not_answer_costs_one_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm, "ANSWERS", 1.0)
    interpreters = warm.Interpreters(ROOT)
    try:
        stuck = interpreters.process.pid
        env = interpreters.environment(None)
        assert interpreters.run("print(1)", (), env, tmp_path, 60)[:2] == (0, "1\n")
        os.kill(stuck, signal.SIGSTOP)
        with pytest.raises(subprocess.TimeoutExpired):
            interpreters.run("print(2)", (), env, tmp_path, 60)
        assert interpreters.run("print(3)", (), env, tmp_path, 60)[:2] == (0, "3\n")
        with pytest.raises(ProcessLookupError):
            os.kill(stuck, 0)
    finally:
        interpreters.close()
