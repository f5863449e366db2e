"""The cases that tools/gpu.py names are those that its ranks have: others would never run."""

from __future__ import annotations

import ast
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"


def cases_of(module: str) -> set[str]:
    """The keys of a module's `CASES`; it is not imported, for its torch has to be newer than 2.4."""
    tree = ast.parse((TOOLS / f"{module}.py").read_text())
    (table,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "CASES"
    )
    assert isinstance(table, ast.Dict)
    return {key.value for key in table.keys if isinstance(key, ast.Constant)}


@pytest.fixture
def gpu() -> dict[str, Any]:
    return runpy.run_path(str(TOOLS / "gpu.py"))


def test_every_case_of_a_room_is_named_and_every_named_one_is_there(gpu: dict[str, Any]) -> None:
    assert set(gpu["ROOMS"]) == cases_of("gpu_rooms")
    assert len(set(gpu["ROOMS"])) == len(gpu["ROOMS"])


def test_every_other_case_is_named_and_every_named_one_is_there(gpu: dict[str, Any]) -> None:
    assert {*gpu["COMPARED"], *gpu["OPTIMIZER"], *gpu["OURS"], *gpu["PROBES"]} == cases_of("gpu_ranks")


@pytest.mark.parametrize(
    ("programs", "problem"),
    [
        (["pass", "pass"], ""),
        (["import time; time.sleep(60)", "raise SystemExit(3)"], "exit code 3"),
        (["import os; os.abort()", "pass"], "signal SIGABRT"),
        (["import time; time.sleep(60)"], "killed after 2 s"),
    ],
)
def test_programs_end_well_or_the_first_that_does_not_is_told(
    gpu: dict[str, Any], programs: list[str], problem: str
) -> None:
    processes = [subprocess.Popen([sys.executable, "-Sc", program]) for program in programs]
    try:
        gpu["problem_of"].__globals__["GRACE_SECONDS"] = 0.2
        assert gpu["problem_of"](processes, 2.0) == problem
    finally:
        for process in processes:
            process.kill()
            process.wait()
