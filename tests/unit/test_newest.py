"""tools/newest.py with registries that answer anything."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"
PINS = {"torch": "2.15.0", "peft": "0.21.2"}


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.syspath_prepend(str(TOOLS))
    module: ModuleType = importlib.import_module("newest")
    monkeypatch.setattr(module, "PINS", tmp_path / "newest.txt")
    (tmp_path / "newest.txt").write_text("torch==2.15.0\npeft==0.21.2\n")
    return module


def answer(tool: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, code: int = 0) -> None:
    """Let the registry answer: a program in the place of uv, which keeps what it was asked."""
    uv = tmp_path / "uv"
    uv.write_text(
        f"#!{sys.executable}\nimport sys\nopen({str(tmp_path / 'asked')!r}, 'w').write(sys.stdin.read())\n"
        f"(sys.stderr if {code} else sys.stdout).write({text!r})\nsys.exit({code})\n"
    )
    uv.chmod(0o755)
    monkeypatch.setattr(tool.lanes, "uv_made", lambda: str(uv))


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        ("torch==2.15.0\npeft==0.21.2\nnumpy==2.4.0\n", 0, "The lane newest is the registry's newest."),
        ("torch==2.16.0\npeft==0.21.2\n", 0, "torch 2.15.0 -> 2.16.0"),
        ("peft==0.100\ntorch==2.15.1+cu132\n", 0, "torch 2.15.0 -> 2.15.1+cu132\n  peft 0.21.2 -> 0.100"),
        ("torch==2.13.0\npeft==0.21.2\n", 0, "offers torch 2.13.0, older than the pins"),
        ("peft==0.21.2\n", 0, "nobody knows whether the lane newest is the newest: its answer has no torch"),
        ("<html>sign in</html>", 0, "its answer has no torch, peft"),
        ("no network", 2, "nobody knows whether the lane newest is the newest: no network"),
    ],
)
def test_what_the_registry_has_is_said_and_fails_nothing(
    tool: Any, monkeypatch: Any, tmp_path: Path, capsys: Any, text: str, code: int, says: str
) -> None:
    answer(tool, monkeypatch, tmp_path, text, code)
    assert tool.main(["look"]) == 0
    said = capsys.readouterr().out
    assert says in said
    assert ("WARNING" in said) == ("is the registry's" not in said)
    assert (tmp_path / "asked").read_text().split() == ["torch", "peft"]


def test_a_machine_without_uv_or_time_is_said(tool: Any, monkeypatch: Any, capsys: Any) -> None:
    for error in (OSError("no venv"), subprocess.TimeoutExpired("uv", 120)):

        def fails(error: Exception = error) -> str:
            raise error

        monkeypatch.setattr(tool.lanes, "uv_made", fails)
        assert tool.main(["look"]) == 0
        assert (
            f"WARNING: nobody knows whether the lane newest is the newest: {error}" in capsys.readouterr().out
        )


TRIES = "import os, sys; print(open(os.environ['LANES_NEWEST']).read()); sys.exit({code})"


@pytest.mark.parametrize("code", [0, 3])
def test_the_pins_are_raised_where_the_command_succeeds(
    tool: Any, monkeypatch: Any, tmp_path: Path, capfd: Any, code: int
) -> None:
    answer(tool, monkeypatch, tmp_path, "peft==0.21.1\ntorch==2.16.0\n")
    before, after = "torch==2.15.0\npeft==0.21.2\n", "torch==2.16.0\npeft==0.21.2\n"
    assert tool.main(["take", "--", sys.executable, "-c", TRIES.format(code=code)]) == code
    assert after in capfd.readouterr().out  # what the command had
    assert tool.PINS.read_text() == (before if code else after)


def test_nothing_is_tried_where_there_is_nothing_newer_or_no_answer(
    tool: Any, monkeypatch: Any, tmp_path: Path
) -> None:
    command = ["take", "--", "/not/there"]
    answer(tool, monkeypatch, tmp_path, "torch==2.15.0\npeft==0.21.2\n")
    assert tool.main(command) == 0
    answer(tool, monkeypatch, tmp_path, "no network", 2)
    assert tool.main(command) == 1


def test_the_lane_is_made_of_the_pins_or_of_what_is_tried(tmp_path: Path) -> None:
    (tmp_path / "tried").write_text("torch==9.9.9\n")
    for variable, first in (
        ("", (TOOLS / "newest.txt").read_text().split()),
        (tmp_path / "tried", ["torch==9.9.9"]),
    ):
        done = subprocess.run(
            [sys.executable, "-c", "import json, lanes; print(json.dumps(lanes.LANES['newest']))"],
            env={"PYTHONPATH": str(TOOLS), "LANES_NEWEST": str(variable), "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert json.loads(done.stdout)[: len(first)] == first


def test_what_is_left_to_the_newest_lane_is_run_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))
    lanes = importlib.import_module("lanes")
    run = re.search(r"^NEWEST = ((?:.*\\\n)*.*)", (TOOLS.parent / "Makefile").read_text(), re.MULTILINE)
    assert run is not None
    assert set(lanes.LEFT_TO_NEWEST) <= set(run[1].replace("\\\n", " ").split())
