"""The cases that tools/gpu.py names are those that its ranks have: others would never run."""

from __future__ import annotations

import ast
import importlib.util
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
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = importlib.util.spec_from_file_location("gpu", TOOLS / "gpu.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu", module)
    spec.loader.exec_module(module)
    return module


def test_every_case_of_a_room_is_named_and_every_named_one_is_there(gpu: Any) -> None:
    assert set(gpu.ROOMS) == cases_of("gpu_rooms")
    assert len(set(gpu.ROOMS)) == len(gpu.ROOMS)


def test_every_other_case_is_named_and_every_named_one_is_there(gpu: Any) -> None:
    assert {*gpu.COMPARED, *gpu.OPTIMIZER, *gpu.OURS, *gpu.PROBES} == cases_of("gpu_ranks")
