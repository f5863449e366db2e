"""The way of every box from any spread to any other, against a whole tensor; all ranks in one process."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_dcp_backport.transfer import Box, Layout, Mesh
from torch_dcp_backport.transfer._src.exchange import ExchangePlan, Route
from torch_dcp_backport.transfer._src.layout import whole
from torch_dcp_backport.transfer._src.spread import (
    Along,
    Boxes,
    Spread,
    holders_of,
    intersection,
    problems_of_spreads,
    spread_of,
    ways_of,
)

RANKS = tuple(range(6))


@st.composite
def layouts(draw: Any, shape: tuple[int, ...]) -> Layout:
    mesh_shape = draw(st.sampled_from([(1,), (2,), (3,), (6,), (2, 2), (2, 3), (3, 2), (1, 4)]))
    count = torch.Size(mesh_shape).numel()
    one = st.none() if not shape else st.none() | st.tuples(st.integers(0, len(shape) - 1), st.just(1))
    placements = tuple(draw(one) for _ in mesh_shape)
    return Layout(shape, Mesh(mesh_shape, tuple(draw(st.permutations(RANKS))[:count])), placements)


@st.composite
def lists(draw: Any, shape: tuple[int, ...], covering: bool) -> Boxes:
    """A grid of the tensor with random cuts; each cell on random ranks."""
    cuts = [sorted({0, extent, *draw(st.lists(st.integers(0, extent), max_size=2))}) for extent in shape]
    by_rank: dict[int, list[Box]] = {}
    for cell in itertools.product(*(list(zip(ends, ends[1:])) for ends in cuts)):
        box = Box(tuple(start for start, _ in cell), tuple(stop - start for start, stop in cell))
        for rank in draw(st.sets(st.sampled_from(RANKS), min_size=int(covering), max_size=3)):
            by_rank.setdefault(rank, []).append(box)
    return spread_of(shape, by_rank)


@st.composite
def pairs(draw: Any) -> tuple[Spread, Spread]:
    shape = tuple(draw(st.lists(st.integers(1, 7), max_size=3)))
    every = Layout(shape)
    have = draw(layouts(shape) | lists(shape, True) | st.just(every))
    return have, draw(layouts(shape) | lists(shape, False) | st.just(every))


@st.composite
def boxes_in(draw: Any, shape: tuple[int, ...]) -> Box:
    ends = [sorted((draw(st.integers(0, extent)), draw(st.integers(0, extent)))) for extent in shape]
    return Box(tuple(start for start, _ in ends), tuple(stop - start for start, stop in ends))


@settings(deadline=None)
@given(st.data())
def test_what_is_found_along_an_axis_is_what_a_look_at_every_box_finds(data: Any) -> None:
    boxes = boxes_in(tuple(data.draw(st.lists(st.integers(1, 7), max_size=3))))
    some, asked = data.draw(st.lists(boxes, max_size=12)), data.draw(boxes)
    items = dict(enumerate(some))
    found = list(Along(items, items.__getitem__).common(asked))
    every = {number: intersection(box, asked) for number, box in items.items()}
    assert dict(found) == {number: common for number, common in every.items() if common is not None}
    assert len(found) == len(dict(found))


@settings(deadline=None, max_examples=300)
@given(pairs())
def test_every_rank_gets_what_it_wants_once_and_nothing_else(pair: tuple[Spread, Spread]) -> None:
    have, want = pair
    values = torch.arange(torch.Size(have.shape).numel()).view(have.shape)
    limits = whole(have.shape)
    held, wanted = holders_of(have, RANKS), holders_of(want, RANKS)
    ways = {rank: ways_of(have, want, RANKS, rank) for rank in RANKS}
    for rank in RANKS:
        assert problems_of_spreads(have, want, RANKS, rank) == []
        mine = torch.zeros(have.shape, dtype=torch.bool)
        for box, holders in held.items():
            if rank in holders:
                mine[box.within(limits)] = True
        got = torch.zeros(have.shape, dtype=torch.int64)
        filled = torch.full(have.shape, -1)
        for peer, box in ((peer, box) for peer, boxes in ways[rank].receives.items() for box in boxes):
            assert box in ways[peer].sends[rank]
            assert any(
                peer in holders and values[outer.within(limits)].numel() and covers(outer, box)
                for outer, holders in held.items()
            ), "from a rank that holds it"
            assert not mine[box.within(limits)].any(), "what a rank holds does not travel"
            got[box.within(limits)] += 1
            filled[box.within(limits)] = values[box.within(limits)]
        for box in ways[rank].own:
            assert mine[box.within(limits)].all()
            got[box.within(limits)] += 1
            filled[box.within(limits)] = values[box.within(limits)]
        expected = torch.zeros(have.shape, dtype=torch.int64)
        for box, takers in wanted.items():
            if rank in takers:
                expected[box.within(limits)] = 1
        assert torch.equal(got, expected)
        assert torch.equal(filled[expected > 0], values[expected > 0])


@settings(deadline=None, max_examples=100)
@given(st.lists(pairs(), min_size=1, max_size=4))
def test_both_ends_of_a_pair_have_the_same_boxes_in_the_same_order(
    found: list[tuple[Spread, Spread]],
) -> None:
    routes = {number: Route(*pair, torch.float32) for number, pair in enumerate(found)}
    plans = {rank: ExchangePlan(routes, RANKS, rank) for rank in RANKS}
    for one, other in itertools.permutations(RANKS, 2):
        assert list(plans[one].sends(other)) == list(plans[other].receives(one))


def covers(outer: Box, box: Box) -> bool:
    return all(
        a <= b and b + n <= a + m for a, m, b, n in zip(outer.offset, outer.size, box.offset, box.size)
    )


def test_replicas_serve_their_neighbours() -> None:
    # Two hosts of four ranks hold the same.
    ranks = tuple(range(8))
    have = Layout((8,), Mesh((2, 4), ranks), (None, (0, 1)))
    want = Layout((8,), Mesh((2, 4), ranks), (None, None))
    for rank in ranks:
        host = {0, 1, 2, 3} if rank < 4 else {4, 5, 6, 7}
        assert set(ways_of(have, want, ranks, rank).receives) == host - {rank}


def boxes(*by_rank: tuple[int, int]) -> Boxes:
    """Rank r holds elements start to stop of a vector of 8."""
    return Boxes((8,), tuple((rank, (Box((a,), (b - a,)),)) for rank, (a, b) in enumerate(by_rank)))


@pytest.mark.parametrize(
    ("have", "want", "what"),
    [
        (boxes((0, 4), (4, 7)), Layout((8,)), "no rank holds all of"),
        (boxes((0, 5), (4, 8)), Layout((8,)), "boxes that are held overlap"),
        (boxes((0, 5), (5, 9)), Layout((8,)), "is held outside the tensor"),
        (boxes((0, 8)), boxes((0, 5), (4, 8)), "boxes that are wanted overlap"),
        (boxes((0, 8)), Layout((9,)), "wrong shape"),
        (
            Layout((8,)),
            Layout((8,), Mesh((2,), (5, 6)), ((0, 1),)),
            "wanted by ranks outside the process group",
        ),
    ],
)
def test_what_is_wrong_with_a_spread_is_said(have: Spread, want: Spread, what: str) -> None:
    assert what in "\n".join(map(str, problems_of_spreads(have, want, RANKS, 0)))


def test_a_gap_that_nobody_wants_is_none() -> None:
    have, want = boxes((0, 4), (4, 7)), boxes((2, 6))
    assert problems_of_spreads(have, want, RANKS, 0) == []
