"""tools/lanes.py where a lane's Python is not on the machine."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import patience
import pytest

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


HANGS = """
import signal, subprocess, sys
import pathlib

def test_hangs(tmp_path):
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM, signal.SIGTERM])  # what could end it in order
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    pathlib.Path(__file__).with_name("child").write_text(str(child.pid))
    child.wait()
"""


def test_a_run_that_hangs_says_where_and_is_killed_with_what_it_started(tmp_path: Path) -> None:
    lanes = loaded(LANES)
    (tmp_path / "test_hangs.py").write_text(HANGS)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(tmp_path / "test_hangs.py")]
    lanes.make = lambda name: Path(sys.executable)
    with open(tmp_path / "said", "w+b") as said:
        # Long enough for pytest to begin on a busy machine.
        assert lanes.run("2.6", command, said, 20.0) == 124
        said.seek(0)
        assert b"in test_hangs" in said.read()
    stat = Path("/proc", (tmp_path / "child").read_text(), "stat")
    end = time.monotonic() + 60
    # A kill takes effect when the process runs next; dead, it stays until the machine's first process looks.
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_process_that_has_the_id_of_one_that_ended_is_not_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    lanes = loaded(LANES)
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    with subprocess.Popen(sleep) as ended, subprocess.Popen(sleep) as own, subprocess.Popen(sleep) as other:
        found = lanes.descendants(other.pid)
        assert list(found) == [other.pid]
        # A child that ends within the last words, after which the machine gives its id to another program.
        lists = [
            {**lanes.descendants(ended.pid), **lanes.descendants(own.pid), other.pid: found[other.pid] - 1}
        ]
        monkeypatch.setattr(lanes, "descendants", lambda process: lists.pop() if lists else {})
        try:
            lanes.end_all(ended)
            assert own.wait() == -signal.SIGKILL
            assert other.poll() is None
        finally:
            own.kill()
            other.kill()


def loaded(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_lanes_leave_out_is_there() -> None:
    lanes = loaded(LANES)
    assert set(lanes.LEAVES_OUT) <= set(lanes.LANES)
    assert lanes.LOADS == LIMITED
    for paths in lanes.LEAVES_OUT.values():
        for path in paths:
            name, _, test = path.partition("::")
            file = LANES.parents[1] / name
            assert file.exists()
            assert not test or f"def {test.partition('[')[0]}(" in file.read_text()


def test_each_test_is_in_one_share() -> None:
    lanes, shares = (loaded(LANES.with_name(f"{name}.py")) for name in ("lanes", "shares"))
    room, ranks = ("tests/hf/test_files.py::test_a[1]", "tests/ranks/test_files.py::test_a[1]")
    names = [f"{start}{number}" for start in (room, ranks) for number in range(200)]
    runs = {
        name: {lane for lane in lanes.SHARES if shares.is_in(name, list(lanes.SHARES[lane]))}
        for name in names
    }
    for name, of in runs.items():
        once = {"2.4", "current"} if name.startswith(room) else {"2.4", "2.5", "2.7"}
        assert len(of & once) == 1, name
        assert "2.6" in of
    assert {frozenset(of) for of in runs.values()} == {
        frozenset({"2.4", "2.5", "2.6", "2.7"}),
        frozenset({"2.5", "2.6", "2.7", "current"}),
        *(frozenset({lane, "2.6", "current"}) for lane in ("2.4", "2.5", "2.7")),
    }
    for path in (share.partition("=")[0] for of in lanes.SHARES.values() for share in of):
        assert (LANES.parents[1] / path).exists()


def test_files_of_tests_have_names_of_their_own() -> None:
    # Else pytest stops, but only where both are collected: in a whole lane.
    names = [path.name for path in (LANES.parents[1] / "tests").rglob("test_*.py")]
    assert sorted({name for name in names if names.count(name) > 1}) == []


def test_limits_grow_with_the_load_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    for load, factor in ((0.5, 1.0), (8.0, 1.0), (16.0, 2.0), (400.0, patience.MOST)):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        assert patience.factor() == factor


def test_a_run_tells_its_counts_and_each_failure_at_once(tmp_path: Path, capfd, monkeypatch) -> None:
    """Two runs, whose own output is shown at their ends alone."""
    lanes = loaded(LANES)
    monkeypatch.setattr(lanes, "EVERY", 0.0)
    monkeypatch.setattr(lanes, "make", lambda name: Path(sys.executable))
    monkeypatch.setattr(lanes, "python_of", lambda name: (sys.executable, ""))
    (tmp_path / "test_it.py").write_text(
        "import time\ndef test_bad(): assert False\ndef test_good(): time.sleep(5)\n"
    )
    assert lanes.test(["2.6", "current"], [str(tmp_path), "-p", "no:cacheprovider"], 2, False, False) == 1
    said = capfd.readouterr()
    for lane in ("2.6", "current"):
        assert re.search(rf"^=== lane {lane}: FAILED .*test_it.py::test_bad$", said.err, re.MULTILINE)
        assert re.search(rf"{lane}: [12] of 2 tests, 1 failed", said.err)
        before, _, after = said.err.partition(f"=== lane {lane} ends after")
        assert "FAILED" in before
        assert after
    assert said.out.count("1 failed, 1 passed") == 2
