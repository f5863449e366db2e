"""Blocks of sharded tensors, out of the rows of an all-gather into the whole tensor."""

from __future__ import annotations

import itertools
import math
from typing import Optional

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_dcp_backport.transfer import Box, Layout, Mesh
from torch_dcp_backport.transfer._src.chunks import chunk_bytes, chunks, cut_of
from torch_dcp_backport.transfer._src.grid import grids_of, largest_block, moves_of
from torch_dcp_backport.transfer._src.layout import whole
from torch_dcp_backport.transfer._src.memory import part_of
from torch_dcp_backport.transfer._src.spread import intersection
from torch_dcp_backport.transfer._src.staging import Views

Placement = Optional[tuple[int, int]]


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Layout, tuple[int, ...]]:
    """A layout, and the ranks of a group that holds its mesh, in any order."""
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
    mesh_shape = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    placements: list[Placement] = [
        draw(st.one_of(st.none(), st.tuples(st.integers(0, len(shape) - 1), st.just(1)))) for _ in mesh_shape
    ]
    if len(placements) > 1 and placements[-1] is not None and draw(st.booleans()):
        # As FSDP2 over TP has it: cuts after the dimension to its right.
        placements[-2] = placements[-1][0], mesh_shape[-1]
    count = math.prod(mesh_shape)
    world = list(range(count + draw(st.integers(0, 2))))
    members = draw(st.one_of(st.just(world[:count]), st.permutations(world).map(lambda all: all[:count])))
    ranks = draw(st.one_of(st.just(world), st.permutations(world)))
    return Layout(shape, Mesh(mesh_shape, tuple(members)), tuple(placements)), tuple(ranks)


@settings(max_examples=400, deadline=None)
@given(layouts(), st.sampled_from([16, 48, 4096]), st.sampled_from([torch.int64, torch.bfloat16]))
def test_rows_become_the_whole_tensor(
    given_layout: tuple[Layout, tuple[int, ...]], capacity: int, dtype: torch.dtype
) -> None:
    layout, ranks = given_layout
    full = torch.arange(math.prod(layout.shape)).view(layout.shape).to(dtype)
    # Not dense, as a user's memory may be.
    target = torch.full((*layout.shape, 2), -1, dtype=dtype)[..., 0]
    for pieces in chunks([("key", whole(largest_block(layout)), dtype)], capacity):
        nbytes = chunk_bytes(pieces)
        rows = torch.full((len(ranks) * nbytes,), 0xEE, dtype=torch.uint8)
        for place, rank in enumerate(ranks):
            box = layout.box(rank)
            if box is None or not layout.is_first_holder(rank):
                continue
            local, block = full[box.within(whole(layout.shape))], whole(box.size)
            views = Views(rows[place * nbytes : (place + 1) * nbytes])
            for piece in pieces:
                part = intersection(piece.box, block)
                if part is not None:
                    views(cut_of(piece, part)).copy_(part_of(local, block, part))
        views = Views(rows)
        for piece in pieces:
            for cut, part_of_target in moves_of(layout, ranks, piece, nbytes, target):
                part_of_target.copy_(views(cut))
    assert torch.equal(target, full)


@settings(max_examples=200, deadline=None)
@given(layouts())
def test_grids_hold_every_block_once(given_layout: tuple[Layout, tuple[int, ...]]) -> None:
    layout, _ = given_layout
    mesh = layout.mesh
    assert mesh is not None
    found: list[Box] = []
    for grid in grids_of(layout):
        for block in grid.alone():
            offset = [0] * len(layout.shape)
            for span in block.spans:
                offset[span.dim] += span.first * span.rows
            if math.prod(grid.size):
                found.append(Box(tuple(offset), grid.size))
    boxes = (layout.box(rank) for rank in mesh.ranks if layout.is_first_holder(rank))
    expected = [box for box in boxes if box is not None and box.numel]
    assert sorted(found, key=str) == sorted(expected, key=str)


@pytest.mark.parametrize("world", [8, 1024, 8192])
def test_copies_do_not_grow_with_the_ranks(world: int) -> None:
    """Whole shards are one copy, the short one at the end another."""
    ranks = tuple(range(world))
    layout = Layout((32000, 4), Mesh((world,), ranks), ((0, 1),))
    pieces = list(itertools.chain(*chunks([("key", whole(largest_block(layout)), torch.bfloat16)], 2**20)))
    target = torch.empty(layout.shape, dtype=torch.bfloat16, device="meta")
    copies = [move for piece in pieces for move in moves_of(layout, ranks, piece, 2**20, target)]
    assert len(copies) <= 2 * len(pieces)
