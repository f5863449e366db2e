"""docs/compatibility.md's table is what the lanes have run, as they are now."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("compatibility")


def test_the_table_is_what_is_recorded(tool: Any) -> None:
    assert tool.recorded()
    page = tool.PAGE.read_text()
    assert page == tool.written(page, tool.recorded()), "make compatibility writes it anew"


def test_what_is_recorded_ran_in_the_lanes_as_they_are(tool: Any) -> None:
    said = [line for name, facts in tool.recorded().items() for line in tool.stale(name, facts)]
    assert said == [], "run the lane, and then make compatibility"


PASSED = {"tests/hf/test_a.py": 3, "tests/unit/test_b.py": 2}


def facts(torch: str = "2.6.0+cu124", python: str = "3.11.7", **passed: int) -> dict[str, Any]:
    return {"python": python, "packages": {"torch": torch}, "passed": passed or PASSED}


def test_the_last_run_of_a_file_counts_and_other_releases_do_not(tool: Any, tmp_path: Path) -> None:
    runs = {
        "2.6@1": facts(),
        "2.6@2": facts(**{"tests/hf/test_a.py": 4}),
        "2.6@3": facts(**{"../tmp/test_c.py": 9}),  # of the tests of tools/lanes.py
        "2.7@1": facts("2.6.0"),
        "parrot@1": facts(),
    }
    for number, (name, found) in enumerate(runs.items()):
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(found))
        os.utime(path, (number, number))
    record = tool.taken({"2.5": facts("2.5.1"), "2.4": facts("2.4.0")}, tmp_path)
    assert record == {"2.5": facts("2.5.1"), "2.6": facts(**{**PASSED, "tests/hf/test_a.py": 4})}
    assert "| `2.6` | 2.6.0+cu124 | 3.11.7 |  | hf 4, unit 2 |" in tool.table(record)
    # Another Python made the lane anew.
    path.with_name("2.6@9.json").write_text(json.dumps(facts(python="3.12.1", **{"tests/hf/test_a.py": 1})))
    assert tool.taken(record, tmp_path)["2.6"]["passed"] == {"tests/hf/test_a.py": 1}


SUITE = "def test_one(): pass\ndef test_two(): pass\n"


@pytest.mark.parametrize(
    ("suite", "arguments", "passed"),
    [
        (SUITE, [], {"test_it.py": 2}),
        (SUITE + "def test_three(): assert False\n", [], None),
        (SUITE, ["-k", "one"], None),
        (SUITE, ["test_it.py::test_one"], None),
    ],
)
def test_a_run_is_recorded_unless_it_fails_or_chooses(
    tmp_path: Path, suite: str, arguments: list[str], passed: dict[str, int] | None
) -> None:
    (tmp_path / "test_it.py").write_text(suite)
    record = tmp_path / "ran" / "2.6@0.json"
    record.parent.mkdir()
    record.write_text("of the run before")
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "tools.ran", "-p", "no:cacheprovider", *arguments],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "LANES_RAN": str(record),
            "LANES_PACKAGES": "pytest parrot",
        },
        stdout=subprocess.DEVNULL,
    )
    if passed is None:
        assert not record.exists()
    else:
        found = json.loads(record.read_text())
        assert found["passed"] == passed
        assert found["packages"] == {"pytest": pytest.__version__}
