"""The table against itself, against the running torch, and against patches/."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import pytest

from torch_dcp_backport.activation import bindings, replace
from torch_dcp_backport.activation.table import (
    COLLECTIVES,
    DECORATED,
    FILESYSTEM,
    FIRST,
    FIXED_IN,
    FSSPEC,
    LOADER,
    PLANNER,
    RECORDS,
    SHARDS,
    SHARDS_2_4,
    STATE_DICT,
    STATE_DICT_UTILS,
    TABLE,
    TRAVERSE,
    Target,
)

TORCH = tuple(int(part) for part in version("torch").split(".")[:2])
affected = pytest.mark.skipif(
    not FIRST <= TORCH < FIXED_IN, reason="a torch that is not replaced has another layout"
)


def test_no_name_is_listed_twice() -> None:
    places = [(target.module, target.name) for target in TABLE.targets]
    assert len(places) == len(set(places))
    helpers = (STATE_DICT_UTILS, PLANNER, FILESYSTEM, COLLECTIVES, LOADER, TRAVERSE)
    assert TABLE.modules == (*helpers, SHARDS_2_4, FSSPEC, SHARDS, STATE_DICT)
    assert {*TABLE.optional} == {SHARDS_2_4, FSSPEC, SHARDS}
    assert all(FIRST <= target.since < target.until <= FIXED_IN for target in TABLE.targets)


@affected
def test_names_imported_from_the_other_module_are_replaced_in_both() -> None:
    helpers = {target.name for target in TABLE.targets if target.module == STATE_DICT_UTILS}
    imported = {name for name in helpers if hasattr(import_module(STATE_DICT), name)}
    assert {"_broadcast_state_dict", "_gather_state_dict"} <= imported
    assert imported <= {target.name for target in TABLE.targets if target.module == STATE_DICT}


def test_shared_state_stays_torchs() -> None:
    assert "_patched_state_dict" not in {target.name for target in TABLE.targets}
    assert not hasattr(import_module(TABLE.provider), "_patched_state_dict")


def test_records_and_patches_name_each_other() -> None:
    folder = Path(__file__).resolve().parents[2] / "patches"
    written = {path.stem for path in folder.glob("[0-9]*.md")}
    assert {record for target in TABLE.targets for record in target.records} == written
    for record, (_, links) in RECORDS.items():
        (row,) = re.findall(r"^\| Upstream \|(.*)\|$", (folder / f"{record}.md").read_text(), re.MULTILINE)
        assert tuple(re.findall(r"\((https://[^)]*)\)", row)) == links


def test_provider_has_every_name_on_every_torch() -> None:
    found = {(t.module, t.name): replace.replacement_of(t.module, t.name) for t in TABLE.targets}
    assert [place for place, ours in found.items() if ours is None] == []


@affected
@pytest.mark.parametrize("target", TABLE.targets, ids=lambda target: f"{target.module}.{target.name}")
def test_since_is_true_of_this_torch(target: Target) -> None:
    try:
        module = import_module(target.module)
    except ImportError:  # of an earlier torch, or a later
        assert target.module in TABLE.optional
        assert target.since > TORCH or not target.serves(TORCH, False)
        return
    holder = bindings.holder_in(module, target.name)
    assert (target.name.rpartition(".")[2] in bindings.namespace_of(holder)) is (target.since <= TORCH)


@affected
def test_every_public_function_and_class_of_torchs_module_is_replaced() -> None:
    module = import_module(STATE_DICT)
    public = {name for name in module.__all__ if callable(getattr(module, name)) and name[0].islower()}
    listed = {target.name for target in TABLE.targets if target.module == STATE_DICT}
    assert public | {"StateDictOptions"} <= listed


@affected
def test_what_is_not_replaced_is_known() -> None:
    """A function of state_dict.py that is neither replaced nor listed here was forgotten."""
    module = import_module(STATE_DICT)
    listed = {target.name for target in TABLE.targets}
    own = {
        name
        for name, value in vars(module).items()
        if callable(value) and getattr(value, "__module__", None) == STATE_DICT and name not in listed
    }
    assert own == set()


def _layers(value: object) -> int:
    return 0 if not hasattr(value, "__wrapped__") else 1 + _layers(value.__wrapped__)


@affected
@pytest.mark.parametrize("preview", [False, True])
def test_the_whole_set_can_be_planned(preview: bool) -> None:
    """Whether this process has activated or not, stock is torch's and ours takes every call of stock."""
    import torch_dcp_backport

    import_module(STATE_DICT)
    before = torch_dcp_backport.status().outcome
    torch_dcp_backport.deactivate()
    try:
        swaps = replace.plan(TORCH, preview).swaps  # type: ignore[arg-type]
        assert [swap.name for swap in swaps] == [
            t.name
            for t in TABLE.targets
            if (t.since <= TORCH < t.until or (preview and t.until == TORCH))
            and (t.module in sys.modules or t.module not in TABLE.optional)
        ]
        assert [swap.name for swap in swaps if swap.stock is swap.ours] == ["StateDictOptions"]
        layers = {swap.name: _layers(swap.stock) for swap in swaps}
        known = {name: sum(since <= TORCH for since in DECORATED.get(name, ())) for name in layers}
        assert layers == known
    finally:
        if before in ("applied", "pending"):
            torch_dcp_backport.activate()
