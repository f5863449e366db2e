"""The blocks of a sharded tensor as an all-gather leaves them, in rows, and their places in the whole tensor.

Every rank's row has room for the largest block; behind a smaller one it has no meaning. Blocks of one size
that lie at equal distances are copied in one step, however many ranks they come from: at a thousand ranks a
copy for each would take longer than all messages.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from torch_dcp_backport.transfer._src.chunks import Piece, StridedPart
from torch_dcp_backport.transfer._src.layout import Layout, Mesh, row_major, split_order
from torch_dcp_backport.transfer._src.staging import Move


class Span(NamedTuple):
    """Coordinates of a mesh dimension, and what they cut."""

    first: int = 0
    #: The number of coordinates.
    extent: int = 1
    #: The tensor dimension, and its rows between two coordinates.
    dim: int = 0
    rows: int = 0


class BlockGrid(NamedTuple):
    """Blocks of one size at equal distances."""

    #: One for each mesh dimension.
    spans: tuple[Span, ...]
    #: The extents of each block, in elements.
    size: tuple[int, ...]

    def alone(self) -> Iterator[BlockGrid]:
        """Each block as a grid of its own."""
        for at in itertools.product(*(range(span.first, span.first + span.extent) for span in self.spans)):
            spans = (span._replace(first=first, extent=1) for span, first in zip(self.spans, at))
            yield BlockGrid(tuple(spans), self.size)


def cuts_of(size: int, dim: int, cuts: Sequence[tuple[int, int]]) -> Iterator[tuple[dict[int, Span], int]]:
    """(spans by mesh dimension, rows of each part) of the parts of a tensor dimension that are not empty.

    Args:
        size: rows of the dimension.
        dim: its number.
        cuts: (mesh dimension, its extent), in the order in which they cut; the rule is `torch.chunk`'s.
    """
    if not cuts:
        yield {}, size
        return
    (mesh_dim, extent), *rest = cuts
    step = max(1, -(-size // extent))
    full, left = divmod(size, step)
    for first, count, rows in ((0, full, step), (full, 1, left)):
        if count and rows:
            for spans, length in cuts_of(rows, dim, rest):
                yield {mesh_dim: Span(first, count, dim, step), **spans}, length


@functools.lru_cache(maxsize=4096)
def grids_of(layout: Layout) -> tuple[BlockGrid, ...]:
    """All blocks of a layout, in a few grids; of replicas the first."""
    mesh, placements = layout.mesh, layout.placements
    assert mesh is not None, "a mesh holds the blocks"
    cuts: list[list[tuple[int, int]]] = [[] for _ in layout.shape]
    for mesh_dim in split_order(mesh.shape, placements):
        placement = placements[mesh_dim]
        assert placement is not None, "it cuts"
        cuts[placement[0]].append((mesh_dim, mesh.shape[mesh_dim]))
    parts = [list(cuts_of(size, dim, cuts[dim])) for dim, size in enumerate(layout.shape)]
    grids = []
    for chosen in itertools.product(*parts):
        spans = {mesh_dim: span for spans, _ in chosen for mesh_dim, span in spans.items()}
        row = tuple(spans.get(mesh_dim, Span()) for mesh_dim in range(len(mesh.shape)))
        grids.append(BlockGrid(row, tuple(length for _, length in chosen)))
    return tuple(grids)


class GatheredRows(NamedTuple):
    """The rows of a mesh's ranks in an all-gather."""

    #: Of each rank, as in the mesh.
    numbers: tuple[int, ...]
    #: Between neighbours along each mesh dimension; empty where they are at no equal distances.
    steps: tuple[int, ...]


@functools.lru_cache(maxsize=256)
def rows_of(mesh: Mesh, ranks: tuple[int, ...]) -> GatheredRows:
    place = {rank: number for number, rank in enumerate(ranks)}
    numbers = tuple(place[rank] for rank in mesh.ranks)
    steps = tuple(
        numbers[stride] - numbers[0] if extent > 1 else 0
        for extent, stride in zip(mesh.shape, row_major(mesh.shape))
    )
    coordinates = itertools.product(*map(range, mesh.shape))
    expected = (numbers[0] + sum(map(int.__mul__, at, steps)) for at in coordinates)
    is_even = min(steps, default=0) >= 0 and all(map(int.__eq__, numbers, expected))
    return GatheredRows(numbers, steps if is_even else ())


def moves_of(
    layout: Layout, ranks: tuple[int, ...], piece: Piece, row_bytes: int, target: torch.Tensor
) -> Iterator[Move]:
    """The copies of a piece of every rank's block, out of gathered rows into the whole tensor.

    Args:
        ranks: of the all-gather, in its order.
        piece: a box within the largest block, and its place in each row.
        row_bytes: of a row; a multiple of every element's size.
        target: the whole tensor.
    """
    assert layout.mesh is not None, "a mesh holds the blocks"
    rows, strides = rows_of(layout.mesh, ranks), target.stride()
    offset, dense, itemsize = piece.box.offset, row_major(piece.box.size), piece.dtype.itemsize
    for grid in grids_of(layout):
        size = tuple(min(a, b - c) for a, b, c in zip(piece.box.size, grid.size, offset))
        if any(extent <= 0 for extent in size):
            continue
        for block in (grid,) if rows.steps else grid.alone():
            row, steps = first_row(layout.mesh, block, rows)
            spans = [(span, step) for span, step in zip(block.spans, steps) if span.extent > 1]
            cut_size = (*(span.extent for span, _ in spans), *size)
            cut_stride = (*(step * row_bytes // itemsize for _, step in spans), *dense)
            span = 1 + sum((extent - 1) * step for extent, step in zip(cut_size, cut_stride))
            start = row * row_bytes + piece.start
            cut = StridedPart(piece.key, piece.dtype, start, span * itemsize, cut_size, cut_stride)
            begin = int(target.storage_offset()) + sum(map(int.__mul__, offset, strides))
            begin += sum(span.first * span.rows * strides[span.dim] for span in block.spans if span.rows)
            stride = (*(span.rows * strides[span.dim] for span, _ in spans), *strides)
            yield cut, target.as_strided(cut_size, stride, begin)


def nbytes_of(layout: Layout, piece: Piece) -> int:
    """Bytes of a piece in all ranks' blocks together, without padding."""
    numel = 0
    for grid in grids_of(layout):
        size = (min(a, b - c) for a, b, c in zip(piece.box.size, grid.size, piece.box.offset))
        numel += math.prod(max(0, extent) for extent in size) * math.prod(span.extent for span in grid.spans)
    return numel * piece.dtype.itemsize


def first_row(mesh: Mesh, block: BlockGrid, rows: GatheredRows) -> tuple[int, tuple[int, ...]]:
    """(the row of a grid's first block, the rows between neighbours along each mesh dimension)."""
    at = [span.first for span in block.spans]
    if rows.steps:
        return rows.numbers[0] + sum(map(int.__mul__, at, rows.steps)), rows.steps
    return rows.numbers[sum(map(int.__mul__, at, row_major(mesh.shape)))], (0,) * len(at)


def largest_block(layout: Layout) -> tuple[int, ...]:
    """The size of the first rank's block: no other one is larger in any dimension."""
    assert layout.mesh is not None, "a mesh holds the blocks"
    box = layout.box(layout.mesh.ranks[0])
    assert box is not None, "the rank is in the mesh"
    return box.size
