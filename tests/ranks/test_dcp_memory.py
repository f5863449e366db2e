"""What `dcp.save`, `dcp.async_save` and `dcp.load` keep once they are over, without a garbage collection.

On torch >= 2.7 these run where torch has the correction.
"""

from __future__ import annotations

import gc
import importlib.util
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version
from pool import on_ranks
from torch.distributed.checkpoint import _nested_dict, _traverse

from torch_dcp_backport.dcp import traverse

TORCH = Version(torch.__version__).release[:2]
AFFECTED = (2, 4) <= TORCH < (2, 7)
open_upstream = pytest.mark.skipif(not AFFECTED, reason="torch >= 2.7 is left as it is")

#: The size of the tensors that are counted; no other has it.
SIZE = 4099


def tensors() -> int:
    return sum(type(thing) is torch.Tensor and thing.numel() == SIZE for thing in gc.get_objects())


@contextmanager
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Made:
    """Makes its state when it is asked, as a model that is sharded does."""

    def state_dict(self) -> dict[str, Any]:
        return {"w": torch.ones(SIZE), "deep": {"list": [torch.ones(SIZE), {"v": torch.ones(SIZE)}]}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["deep"]["list"][1]["v"].sum() == SIZE


CALLS = {
    "save": lambda folder: dcp.save({"made": Made()}, checkpoint_id=folder),
    "save in the background": lambda folder: dcp.async_save({"made": Made()}, checkpoint_id=folder).result(),
    "load": lambda folder: dcp.load({"made": Made()}, checkpoint_id=folder),
}


def gone(collect: bool = False) -> None:
    """Wait for the thread that has saved: it may still be on its way out."""
    end = time.monotonic() + 5
    while tensors() and time.monotonic() < end:
        time.sleep(0.05)
        if collect:
            gc.collect()


@open_upstream
@pytest.mark.parametrize("call", CALLS)
@on_ranks(world=1, broken=AFFECTED, fixture="fixed")
def test_nothing_is_kept(api: Any, tmp_path: Path, call: str) -> None:
    folder = str(tmp_path)
    CALLS["save"](folder)
    CALLS[call](folder)  # whatever is made once
    gone(collect=True)
    with no_collection():
        assert tensors() == 0
        for _ in range(3):
            CALLS[call](folder)
        gone()
        assert tensors() == 0


# --- the walk itself


class Other(Mapping):  # type: ignore[type-arg]
    """A mapping that is no dict."""

    def __init__(self, values: dict[Any, Any]) -> None:
        self.values_by_key = values

    def __getitem__(self, key: Any) -> Any:
        return self.values_by_key[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values_by_key)

    def __len__(self) -> int:
        return len(self.values_by_key)


LEAVES = st.one_of(
    st.integers(), st.text(max_size=2), st.none(), st.builds(lambda: torch.zeros(1)), st.just((1, 2))
)
KEYS = st.one_of(st.text(max_size=2), st.integers(0, 3))
TREES = st.recursive(
    LEAVES,
    lambda below: st.one_of(
        st.lists(below, max_size=3),
        st.lists(below, max_size=2).map(tuple),
        st.dictionaries(KEYS, below, max_size=3),
        st.dictionaries(KEYS, below, max_size=2).map(Other),
    ),
    max_leaves=12,
)
NAMES = [name for name in ("traverse_state_dict", "traverse_state_dict_v_2_3") if hasattr(_traverse, name)]
KEEP = {"tensors": {}, "nothing": {"keep_traversing": None}, "all": {"keep_traversing": lambda value: True}}


@pytest.fixture(scope="module")
def stock() -> Any:
    """Torch's module, executed once more: in that of this process the functions may be ours."""
    spec = importlib.util.spec_from_file_location("stock_traverse", str(_traverse.__file__))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def visits(walk: Any, tree: Any, options: dict[str, Any]) -> list[tuple[Any, int]]:
    seen: list[tuple[Any, int]] = []
    walk(tree, lambda path, value: seen.append((path, id(value))), **options)
    return seen


@pytest.mark.parametrize("keep", KEEP)
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=150, deadline=None)
@given(tree=st.dictionaries(KEYS, TREES, max_size=4))
def test_the_walk_is_torchs(stock: Any, name: str, keep: str, tree: dict[Any, Any]) -> None:
    theirs = getattr(stock, name)
    assert theirs.__module__ == "stock_traverse"
    assert visits(getattr(traverse, name), tree, KEEP[keep]) == visits(theirs, tree, KEEP[keep])


def flattened(api: Any) -> Any:
    names = {"a": {"b": 1, "": [2, {"c": 3}]}, 0: {"x": ()}}
    with pytest.raises(ValueError, match=r"duplicated flatten key a\.b"):
        _nested_dict.flatten_state_dict({"a": {"b": 3}, "a.b": 2})
    return _nested_dict.flatten_state_dict(names)


def test_flattened_names_are_as_before(pools, ranks):
    ours = ranks(flattened, world=1)
    assert pools.get(1, "torch.distributed.checkpoint.state_dict").run(flattened) == ours


@on_ranks(world=0)
def test_a_walk_goes_as_deep_as_torchs(api: Any) -> None:
    """As deep as torch does."""
    from torch.distributed.checkpoint import _traverse

    value: Any = 1
    for _ in range(600):
        value = [value]
    seen: list[Any] = []
    _traverse.traverse_state_dict({"deep": value}, lambda path, leaf: seen.append((path, leaf)))
    assert seen == [(("deep",), value)]
