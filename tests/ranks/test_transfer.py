"""scatter and gather between any two layouts, with small chunks, against slices of the source."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import value_of

from torch_dcp_backport import transfer
from torch_dcp_backport.transfer import Box, Held, Layout, Target, TensorInfo, Want

SHAPES = {"a": (7, 5), "b": (64, 3), "one": (1,), "scalar": (), "none": (0, 4), "deep": (3, 5, 2, 4)}
DTYPES = {
    "a": torch.float32,
    "b": torch.bfloat16,
    "one": torch.int64,
    "scalar": torch.float64,
    "none": torch.int8,
    "deep": torch.bool,
}

PLACEMENTS: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[Any, ...]]] = {
    "shard0": ((4,), (0, 1, 2, 3), ((0, 1),)),
    "replicate": ((4,), (0, 1, 2, 3), (None,)),
    "hsdp": ((2, 2), (0, 1, 2, 3), (None, (0, 1))),
    "shard01": ((2, 2), (0, 1, 2, 3), ((0, 1), (1, 1))),
    "twice": ((2, 2), (0, 1, 2, 3), ((0, 1), (0, 1))),
    "strided": ((2, 2), (0, 1, 2, 3), ((0, 2), (0, 1))),
    "outside": ((2,), (1, 3), ((0, 1),)),
    "backwards": ((4,), (3, 2, 1, 0), ((0, 1),)),
}


def layout(key: str, kind: str) -> Layout:
    shape = SHAPES[key]
    mesh_shape, ranks, placements = PLACEMENTS[kind]
    if len(shape) < 2:
        placements = tuple(None if p is None or p[0] >= len(shape) else p for p in placements)
    return Layout(shape, mesh_shape, ranks, placements)


def full_values() -> dict[str, torch.Tensor]:
    return {
        key: value_of(key, shape, torch.float32).to(DTYPES[key])
        if shape != ()
        else torch.tensor(2.5, dtype=DTYPES[key])
        for key, shape in SHAPES.items()
    }


def scatter_to(api: Any, kinds: list[str], staging: int) -> None:
    """Every rank of its own kind: the demands may differ between ranks."""
    rank = dist.get_rank()
    kind = kinds[rank % len(kinds)]
    values = full_values()
    inventory = transfer.publish(
        {key: TensorInfo(tuple(v.shape), v.dtype) for key, v in values.items()} if rank == 0 else None,
        [],
        "test",
    )
    wants = {key: Want(layout(key, kind), DTYPES[key]) for key in SHAPES}
    targets = {}
    for key, want in wants.items():
        box = want.layout.box(rank)
        if box is not None:
            targets[key] = Target(torch.full(box.size, 1).to(want.dtype), box)
    agreement = transfer.agree(wants, [], "test")
    transfer.scatter(
        (lambda key: values[key]) if rank == 0 else None, inventory, targets, agreement, staging_bytes=staging
    )
    whole = {key: Box((0,) * v.dim(), tuple(v.shape)) for key, v in values.items()}
    for key, target in targets.items():
        assert torch.equal(target.tensor, values[key][target.box.within(whole[key])]), key


def gather_from(api: Any, kind: str, staging: int, to: Any) -> None:
    rank = dist.get_rank()
    values = full_values()
    held = {}
    for key, value in values.items():
        one = layout(key, kind)
        box = one.box(rank) or Box((0,) * value.dim(), (0,) * value.dim())
        whole = Box((0,) * value.dim(), tuple(value.shape))
        held[key] = Held(value[box.within(whole)].clone(), one)
    out = transfer.gather(held, lambda key: torch.full_like(values[key], 1), to=to, staging_bytes=staging)
    if to is not None and rank != to:
        assert out == {}
    else:
        assert list(out) == list(values)
        for key, value in out.items():
            assert torch.equal(value, values[key]), key


def staged_bytes(api: Any, budget: int) -> int:
    """The most bytes of staging that one scatter and one gather allocated."""
    from torch_dcp_backport.transfer.staging import Staging

    allocated = []
    init = Staging.__init__

    def spy(self: Staging, device: torch.device, nbytes: int) -> None:
        init(self, device, nbytes)
        allocated.append(self.store.untyped_storage().nbytes())

    Staging.__init__ = spy
    try:
        scatter_to(api, ["shard0"], budget)
        gather_from(api, "shard0", budget, None)
    finally:
        Staging.__init__ = init
    # A backend may hold freed buffers for a moment, so that a second allocation would count on top.
    assert len(allocated) == 2, f"one allocation for the scatter, one for the gather, but {allocated}"
    return max(allocated)


@pytest.mark.parametrize("staging", [1, 2**20])
@pytest.mark.parametrize("kind", PLACEMENTS)
def test_scatter_gives_every_rank_its_box(ranks, kind, staging):
    ranks(scatter_to, [kind], staging)


def test_scatter_to_ranks_with_different_layouts(ranks):
    ranks(scatter_to, ["shard0", "shard01", "replicate", "strided"], 1)


@pytest.mark.parametrize("to", [None, 0, 2])
@pytest.mark.parametrize("kind", PLACEMENTS)
def test_gather_makes_whole_tensors(ranks, kind, to):
    ranks(gather_from, kind, 1, to)


def test_staging_stays_within_its_budget(ranks):
    # The floor of a buffer is 1 KiB: 5 of them on 4 ranks.
    assert max(ranks(staged_bytes, 6 * 1024)) <= 6 * 1024
