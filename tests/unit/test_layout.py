"""Boxes and chunks against a brute-force reference."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_dcp_backport import compat
from torch_dcp_backport.transfer import Box, Layout, Mesh, Problem
from torch_dcp_backport.transfer._src.chunks import ALIGNMENT, capacity_of, chunk_bytes, chunks
from torch_dcp_backport.transfer._src.errors import compose, spell
from torch_dcp_backport.transfer._src.layout import split_order, splits_of, whole

shapes = st.lists(st.integers(0, 9), min_size=0, max_size=3).map(tuple)


@st.composite
def layouts(draw: Any) -> Layout:
    shape = draw(shapes)
    mesh_shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple))
    one = (
        st.none()
        if not shape
        else st.one_of(st.none(), st.tuples(st.integers(0, len(shape) - 1), st.just(1)))
    )
    placements = tuple(draw(one) for _ in mesh_shape)
    count = len(list(itertools.product(*map(range, mesh_shape))))
    return Layout(shape, Mesh(mesh_shape, tuple(draw(st.permutations(range(count))))), placements)


def by_chunk(layout: Layout, coordinate: tuple[int, ...]) -> torch.Tensor:
    """torch.chunk along every mesh dimension, left to right: what DTensor's Shard does."""
    tensor = torch.arange(torch.Size(layout.shape).numel()).view(layout.shape)
    for extent, index, placement in zip(layout.mesh.shape, coordinate, layout.placements):
        if placement is not None:
            parts = tensor.chunk(extent, dim=placement[0])
            empty = tensor.narrow(placement[0], 0, 0)
            tensor = parts[index] if index < len(parts) else empty
    return tensor


@settings(deadline=None)
@given(layouts())
def test_box_is_what_torch_chunk_gives(layout: Layout) -> None:
    tensor = torch.arange(torch.Size(layout.shape).numel()).view(layout.shape)
    for position, coordinate in enumerate(itertools.product(*map(range, layout.mesh.shape))):
        box = layout.box(layout.mesh.ranks[position])
        assert box is not None
        want = by_chunk(layout, coordinate)
        assert torch.equal(tensor[box.within(whole(layout.shape))], want)


@settings(deadline=None)
@given(layouts())
def test_first_holders_cover_everything_once(layout: Layout) -> None:
    seen = torch.zeros(layout.shape, dtype=torch.int64)
    for rank in layout.mesh.ranks:
        box = layout.box(rank)
        if layout.is_first_holder(rank):
            seen[box.within(whole(layout.shape))] += 1
    assert (seen == 1).all()


def test_a_rank_outside_the_mesh_holds_nothing() -> None:
    assert Layout((4,), Mesh((2,), (1, 3)), ((0, 1),)).box(0) is None


def test_fsdp_over_tp_cuts_tp_first() -> None:
    layout = Layout((8, 2), Mesh((2, 2), (0, 1, 2, 3)), ((0, 2), (0, 1)))
    # mesh [fsdp, tp]: rank 1 is fsdp 0, tp 1; TP gives it rows 4-7, FSDP the first half of those.
    assert layout.box(1) == Box((4, 0), (2, 2))
    assert [layout.box(rank).offset[0] for rank in range(4)] == [0, 4, 2, 6]


def test_three_cuts_of_one_dimension() -> None:
    assert split_order((2, 3, 5), ((0, 15), (0, 5), (0, 1))) == [2, 1, 0]
    assert split_order((2, 3, 5), ((0, 1), (0, 5), (0, 1))) == [0, 2, 1]


def test_a_split_factor_that_cannot_be_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="split factor 3"):
        split_order((2, 2), ((0, 3), (0, 1)))


boxes = st.lists(
    st.tuples(
        st.lists(st.integers(0, 40), min_size=0, max_size=3).map(tuple).map(whole),
        st.sampled_from([torch.int8, torch.bfloat16, torch.float32, torch.float64, torch.complex128]),
    ),
    max_size=6,
)


@settings(deadline=None)
@given(boxes, st.integers(1, 20).map(lambda n: n * 64))
def test_chunks_carry_every_element_once_and_fit(items: list[tuple[Box, torch.dtype]], capacity: int) -> None:
    seen = [torch.zeros(box.size, dtype=torch.int64) for box, _ in items]
    for pieces in chunks(((key, box, dtype) for key, (box, dtype) in enumerate(items)), capacity):
        assert pieces
        end = 0
        for piece in pieces:
            assert piece.start >= end
            assert piece.start % ALIGNMENT == 0
            assert piece.nbytes == piece.box.numel * items[piece.key][1].itemsize
            end = piece.start + piece.nbytes
            seen[piece.key][piece.box.within(items[piece.key][0])] += 1
        assert end <= capacity
        assert chunk_bytes(pieces) <= capacity
    assert all((one == 1).all() for one in seen)


def test_rounds_grow_with_bytes_not_with_tensors() -> None:
    small = [(key, whole((4, 4)), torch.float32) for key in range(4000)]
    total = 4000 * 64
    assert len(list(chunks(small, 2**16))) == -(-total // 2**16)


@settings(deadline=None)
@given(st.integers(0, 10**9), st.integers(1, 2000))
def test_buffers_fit_the_budget(budget: int, parts: int) -> None:
    capacity = capacity_of(budget, parts)
    assert capacity % ALIGNMENT == 0
    assert capacity * (parts + 1) <= max(budget, ALIGNMENT * (parts + 1))


def test_ranks_are_spelled_in_runs() -> None:
    assert spell([3]) == "rank 3"
    assert spell([0, 1, 2, 5, 7, 6]) == "ranks 0-2, 5-7"


def test_the_same_finding_of_many_ranks_stands_once() -> None:
    problem = Problem("wrong shape", "w", "(5,)", "(4,)")
    text = compose("cannot load", [(rank, problem) for rank in range(8)])
    assert text.count("wrong shape") == 1
    assert "ranks 0-7: wrong shape: w (expected (4,), got (5,))" in text


def test_a_long_list_is_cut_and_counted() -> None:
    text = compose("cannot load", [(0, Problem("missing", str(index))) for index in range(100)])
    assert "100 problem(s)" in text
    assert "and 80 more" in text


@pytest.mark.skipif(not compat.HAS_STRIDED, reason="torch 2.4 has no strided shard")
def test_a_strided_shard_is_not_taken_for_the_plain_one_that_equals_it() -> None:
    plain, strided = compat.Shard(0), compat.placement_types._StridedShard(0, split_factor=2)
    for _ in range(2):
        assert splits_of((2, 2), (plain, plain)) == ((0, 1), (0, 1))
        assert splits_of((2, 2), (strided, plain)) == ((0, 2), (0, 1))
