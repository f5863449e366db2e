"""tools/lanes.py where a lane's Python is not on the machine."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from torch_dcp_backport.regression.checks import LIMITED

LANES = Path(__file__).resolve().parents[2] / "tools" / "lanes.py"


def test_a_lane_without_its_python_is_skipped_aloud(tmp_path: Path) -> None:
    shim = tmp_path / "python3.9"  # as pyenv leaves one for a version that is not switched on
    shim.write_text("#!/bin/sh\nexit 127\n")
    shim.chmod(0o755)
    env = {"PATH": str(tmp_path), "PYENV_ROOT": str(tmp_path), "LANES_PYTHON_3_9": str(tmp_path / "gone")}
    command = [sys.executable, str(LANES), "test", "2.6-py3.9"]
    done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
    assert "lane 2.6-py3.9 SKIPPED, nothing was run in it: no Python 3.9 here" in done.stderr
    command[2] = "make"
    done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("no Python 3.9 here: put python3.9 on PATH, or its path into LANES_PYTHON")


def test_what_lanes_leave_out_is_there() -> None:
    spec = importlib.util.spec_from_file_location("lanes", LANES)
    assert spec is not None
    assert spec.loader is not None
    lanes = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(lanes)
    assert set(lanes.LEAVES_OUT) <= set(lanes.LANES)
    assert lanes.LOADS == LIMITED
    for paths in lanes.LEAVES_OUT.values():
        for path in paths:
            name, _, test = path.partition("::")
            file = LANES.parents[1] / name
            assert file.exists()
            assert not test or f"def {test.partition('[')[0]}(" in file.read_text()


def test_files_of_tests_have_names_of_their_own() -> None:
    # Else pytest stops, but only where both are collected: in a whole lane.
    names = [path.name for path in (LANES.parents[1] / "tests").rglob("test_*.py")]
    assert sorted({name for name in names if names.count(name) > 1}) == []
