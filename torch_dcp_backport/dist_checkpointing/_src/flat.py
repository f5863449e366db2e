"""Runs of a flattened box, as Megatron's distributed optimizer holds them before release 0.16.

A run of the elements of a box, in row-major order, is a few boxes: nothing else has to know of runs. In a
checkpoint it lies folded: a tensor [X, Y] of boxes [x, y] is a tensor [X / x, Y / y, x * y], cut along its
last axis. Pure arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch_dcp_backport.transfer import Box


class Run(NamedTuple):
    """A box whose elements follow each other in a flattened box."""

    box: Box
    #: The place of its first element.
    start: int


def runs(box: Box, start: int, stop: int, base: int = 0) -> Iterator[Run]:
    """Yield the fewest boxes that have the elements `start` to `stop` of a box, in order.

    At most two for each axis but the first, and one more.

    Args:
        base: the place of the box's first element.
    """
    if start >= stop:
        return
    if (start, stop) == (0, box.numel):
        yield Run(box, base)
        return
    dim = next(dim for dim, extent in enumerate(box.size) if extent > 1)
    row = box.numel // box.size[dim]
    first, last = start // row, -(-stop // row)
    if last - first == 1:
        inner = box.tail(dim, first).head(dim, 1)
        yield from runs(inner, start - first * row, stop - first * row, base + first * row)
        return
    if start % row:
        yield from runs(box.tail(dim, first).head(dim, 1), start % row, row, base + first * row)
        first += 1
    full_end = stop // row
    if full_end > first:
        yield Run(box.tail(dim, first).head(dim, full_end - first), base + first * row)
    if stop % row:
        yield from runs(box.tail(dim, full_end).head(dim, 1), 0, stop % row, base + full_end * row)


def folded_shape(grid: tuple[int, ...], numel: int) -> tuple[int, ...]:
    """Return the shape in which a checkpoint has a tensor of so many boxes of so many elements."""
    return (*grid, numel)


def folded(cell: tuple[int, ...], start: int, stop: int) -> Box:
    """Return the box of a folded tensor that holds a run of one cell."""
    return Box((*cell, start), (*(1 for _ in cell), stop - start))


def unfolded(part: Box, grid: tuple[int, ...], shape: tuple[int, ...]) -> Iterator[Run]:
    """Yield the boxes of a tensor that a box of the folded tensor holds; places count from the part's start.

    Args:
        part: a box with an extent of 1 along every axis but the last.
        grid: the number of equal boxes that each axis of the tensor is cut into.
        shape: of the tensor.
    """
    size = tuple(extent // parts for extent, parts in zip(shape, grid))
    cell = Box(tuple(place * extent for place, extent in zip(part.offset, size)), size)
    start = part.offset[-1]
    yield from runs(cell, start, start + part.size[-1], -start)
