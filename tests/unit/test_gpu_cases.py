"""The cases that tools/gpu.py names are those that its ranks have: others would never run."""

from __future__ import annotations

import argparse
import ast
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"


def cases_of(module: str, name: str = "CASES") -> set[str]:
    """The keys of a module's table of cases; it is not imported, for its torch has to be newer than 2.4."""
    tree = ast.parse((TOOLS / f"{module}.py").read_text())
    (table,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name
    )
    assert isinstance(table, ast.Dict)
    return {key.value for key in table.keys if isinstance(key, ast.Constant)}


@pytest.fixture
def gpu() -> dict[str, Any]:
    return runpy.run_path(str(TOOLS / "gpu.py"))


def test_every_case_of_a_room_is_named_and_every_named_one_is_there(gpu: dict[str, Any]) -> None:
    assert set(gpu["ROOMS"]) == cases_of("gpu_rooms")
    assert len(set(gpu["ROOMS"])) == len(gpu["ROOMS"])


def test_every_case_of_the_shim_is_named_and_every_named_one_is_there(gpu: dict[str, Any]) -> None:
    named = [case for group in ("SHIM_COMPARED", "SHIM_ALONE", "SHORT", "BESIDE") for case in gpu[group]]
    assert set(named) == cases_of("gpu_shim")
    assert len(set(named)) == len(named)


def test_every_call_is_named_and_every_named_one_is_there(gpu: dict[str, Any]) -> None:
    assert {*gpu["COMPARED"], *gpu["OPTIMIZER"]} == cases_of("gpu_calls", "CALLS")


def test_every_other_case_is_named_and_every_named_one_is_there(gpu: dict[str, Any]) -> None:
    assert {*gpu["OURS"], *gpu["PROBES"]} == cases_of("gpu_ranks")


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_what_runs_on_an_old_torch_is_a_case_and_no_case_is_left_out(
    gpu: dict[str, Any], world: int, device: str
) -> None:
    args = argparse.Namespace(old=True, device=device, cases=None, seconds=1.0, only=None)
    run = gpu["Run"](args, Path())
    steps = gpu["old_rank_steps"](run, world)
    asked = {case for step in [*steps, gpu["stock_calls"](run)] for case, _, _ in step.cases}
    every = cases_of("gpu_calls", "CALLS") | cases_of("gpu_shim") | {"errors"}
    assert asked <= every
    assert len({step.name for step in steps}) == len(steps)
    assert world > 2 or {case for step in steps for case, _, _ in step.cases} == every


def test_a_torch_that_is_not_old_is_refused_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(
        "from types import SimpleNamespace as S\n__version__, cuda = '2.11.0', S(is_available=lambda: True)"
    )
    done = subprocess.run(
        [sys.executable, str(TOOLS / "gpu.py"), "--old", "--json", str(tmp_path / "gpu.json")],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    (line,) = done.stdout.splitlines()
    assert "torch 2.4 to 2.6" in line
    assert line.endswith("; here is torch 2.11.0")
    assert not (tmp_path / "gpu.json").exists()


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
