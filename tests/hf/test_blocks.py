"""Blocks of a tensor: together they hold every element, or that is a problem. A rank's views of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torch_dcp_backport.hf import Part, Share, gaps
from torch_dcp_backport.transfer import Box, Problem, TensorInfo, spread_of
from torch_dcp_backport.transfer._src import spread


@pytest.mark.parametrize("missing", [0, 1, 4])
def test_a_gap_of_one_element_is_one(missing: int) -> None:
    held = {0: [Box((0, 0), (4, 8))], 1: [Box((4, 0), (3, 8)), Box((7, 0), (1, 8 - missing))]}
    problems: list[Problem] = gaps("key", spread_of((8, 8), held))
    assert [problem.got for problem in problems] == ([f"{64 - missing} elements"] if missing else [])


def share_of(value: torch.Tensor, boxes: list[Box]) -> Share:
    """A share of one rank that holds boxes of `x`, each in memory of its own."""
    parts = [
        Part(box, value[box.within(Box((0,) * value.dim(), tuple(value.shape)))].clone()) for box in boxes
    ]
    info = TensorInfo(tuple(value.shape), value.dtype)
    return Share({"x": info}, {"x": spread_of(info.shape, {0: boxes})}, {"x": parts})


@pytest.mark.parametrize("experts", [16, 128])
@pytest.mark.parametrize("is_first_axis", [True, False])
def test_the_work_for_a_box_does_not_grow_with_a_ranks_experts(
    monkeypatch: pytest.MonkeyPatch, experts: int, is_first_axis: bool
) -> None:
    shape = (experts, 4, 2) if is_first_axis else (4, experts, 2)
    axis = shape.index(experts)
    value = torch.arange(experts * 8).view(shape)

    def box_at(start: int, length: int) -> Box:
        offset, size = [0, 0, 0], list(shape)
        offset[axis], size[axis] = start, length
        return Box(tuple(offset), tuple(size))

    share = share_of(value, [box_at(expert, 1) for expert in reversed(range(experts))])
    looked, native = 0, spread.intersection

    def counted(*boxes: Any) -> Any:
        nonlocal looked
        looked += 1
        return native(*boxes)

    monkeypatch.setattr(spread, "intersection", counted)
    for start in range(0, experts, 2):
        pair = box_at(start, 2)
        found = share.views("x", pair)
        assert sum(part.box.numel for part in found) == pair.numel
        for box, into in found:
            assert torch.equal(into, value[box.within(Box((0, 0, 0), shape))])
    # A pair is two parts, and the memory of each is looked up once more.
    assert experts <= looked <= 4 * experts


def test_views_of_parts_of_unlike_lengths_and_of_a_tensor_without_dimensions() -> None:
    value = torch.arange(60).view(10, 6)
    boxes = [
        Box((0, 0), (7, 3)),
        Box((0, 3), (1, 3)),
        Box((1, 3), (9, 3)),
        Box((7, 0), (3, 3)),
        Box((0, 0), (7, 3)),
    ]
    share = share_of(value, boxes)
    for asked in (Box((0, 0), (10, 6)), Box((6, 2), (2, 3)), Box((0, 5), (1, 1))):
        got = torch.full(asked.size, -1)
        for box, into in share.views("x", asked):
            assert (got[box.within(asked)] == -1).all()
            got[box.within(asked)] = into
        assert torch.equal(got, value[asked.within(Box((0, 0), (10, 6)))])
    scalar = share_of(torch.tensor(3), [Box((), ())])
    assert [int(part.into) for part in scalar.views("x", Box((), ()))] == [3]
    assert int(scalar.view("x", Box((), ()))) == 3
