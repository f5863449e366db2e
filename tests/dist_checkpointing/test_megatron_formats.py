"""Checkpoints between this room and megatron-core itself, both ways: boxes, flattened ranges, objects.

Megatron's save and load ask for CUDA in a few calls, which are stand-ins here; no tensor is on a GPU.
"""

from __future__ import annotations

import importlib
import multiprocessing
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from flattening import Grid, parts, wrong
from packaging.version import Version

from torch_dcp_backport.dist_checkpointing import ShardedObject, ShardedTensor, load_common_state_dict

THEIRS = "megatron.core.dist_checkpointing"
pytest.importorskip(THEIRS)
BOXES, HALVES, ROWS, ONE = Grid(2, False), Grid(2), Grid(4), Grid(1)
#: Release 0.16 took flattened ranges away.
HAS_RANGES = Version(version("megatron-core")).release < (0, 16)
ranges = pytest.mark.skipif(not HAS_RANGES, reason="this Megatron has no flattened ranges")


def megatron() -> Any:
    """The package itself, in a process whose writers are processes of their own."""
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    return importlib.import_module(THEIRS)


def state_of(module: Any, grid: Grid, filled: bool) -> dict[str, Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    state = parts(module.ShardedTensor, grid, filled)
    rng = module.ShardedObject("rng", {"rank": rank} if filled else None, (world,), (rank,), 0)
    return {
        "optimizer": state,
        "rng": rng,
        "iteration": 7 if filled else 0,
        "args": {"lr": 0.5, "betas": [0.9, 0.95]},
    }


class Ours:
    """The two classes, as a module has them."""

    ShardedTensor, ShardedObject = ShardedTensor, ShardedObject


def saved_by_them(room: Any, folder: Path, grid: Grid) -> None:
    module = megatron()
    module.save(state_of(module, grid, True), folder)


def saved_by_us(room: Any, folder: Path, grid: Grid, is_theirs: bool) -> None:
    room.save(state_of(megatron() if is_theirs else Ours, grid, True), folder)


def loaded_by_them(room: Any, folder: Path, grid: Grid) -> list[str]:
    module = megatron()
    return faults(module.load(state_of(module, grid, False), folder), grid)


def loaded_by_us(room: Any, folder: Path, grid: Grid, is_theirs: bool) -> list[str]:
    state = state_of(megatron() if is_theirs else Ours, grid, False)
    return faults(room.load(state, folder), grid)


def faults(result: dict[str, Any], grid: Grid) -> list[str]:
    found = wrong(result["optimizer"], grid)
    rest = {key: value for key, value in result.items() if key != "optimizer"}
    if rest != {"rng": {"rank": dist.get_rank()}, "iteration": 7, "args": {"lr": 0.5, "betas": [0.9, 0.95]}}:
        found.append(repr(rest))
    return found


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (BOXES, ROWS._replace(is_flat=False)),
        pytest.param(HALVES, HALVES, marks=ranges),
        pytest.param(HALVES, ROWS, marks=ranges),
    ],
)
def test_we_load_what_megatron_saved(ranks: Any, tmp_path: Path, old: Grid, new: Grid) -> None:
    ranks(saved_by_them, tmp_path, old)
    assert ranks(loaded_by_us, tmp_path, new, False) == [[]] * 4
    assert ranks(loaded_by_us, tmp_path, new, True) == [[]] * 4
    assert load_common_state_dict(tmp_path)["iteration"] == 7


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (BOXES, ROWS._replace(is_flat=False)),
        pytest.param(HALVES, HALVES, marks=ranges),
        pytest.param(HALVES, ROWS, marks=ranges),
        pytest.param(ROWS, ONE, marks=ranges),
    ],
)
@pytest.mark.parametrize("is_theirs", [False, True], ids=["our classes", "Megatron's classes"])
def test_megatron_loads_what_we_saved(
    ranks: Any, tmp_path: Path, old: Grid, new: Grid, is_theirs: bool
) -> None:
    ranks(saved_by_us, tmp_path, old, is_theirs)
    assert ranks(loaded_by_them, tmp_path, new) == [[]] * 4


def coordinates(room: Any) -> list[list[Any]]:
    """What both say of the places of the same parts."""
    said = []
    for kind in (ShardedTensor, megatron().ShardedTensor):
        facts: list[Any] = []
        for part in parts(kind, HALVES, True).values():
            facts += [part.local_chunk_offset_in_global(), part.max_allowed_chunks(), part.global_slice()]
            places = (*part.local_coordinates(), *part.global_coordinates())
            # A prepended axis has one number.
            facts += [place if isinstance(place, int) else place.tolist() for place in places]
            facts += [
                (one.local_shape, one.global_shape, one.global_offset, one.flattened_range, one.data.tolist())
                for length in (1, 2)
                for one in part.narrow(0, 0, length)
            ]
        for part in parts(kind, BOXES, True).values():
            facts += [
                (tuple(one.local_shape), one.global_shape, one.global_offset, one.data.tolist())
                for one in (*part.narrow(0, 1, 1), *part.narrow(part.data.dim() - 1, 0, 2))
            ]
        said.append(facts)
    return said


@ranges
def test_places_are_those_that_megatron_says(ranks: Any) -> None:
    for ours, theirs in ranks(coordinates):
        assert ours == theirs
