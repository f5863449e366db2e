"""The bytes of a box within a stored, row-major tensor: in pieces of bounded length.

Pure arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch_dcp_backport.dist_checkpointing._src.records import strides_of
from torch_dcp_backport.transfer import Box

#: Bytes of the largest piece that is read at once into a buffer.
LARGEST = 4 * 2**20
#: Up to so many bytes between two runs are read along: another request would cost more.
GAP = 16 * 1024


class RunPiece(NamedTuple):
    """A part of a box, and the range of its bytes in the stored tensor, with those that lie between."""

    box: Box
    start: int
    stop: int


def extent_of(stored: Box, part: Box, itemsize: int) -> tuple[int, int]:
    """Return a part's first byte and the byte behind its last, within the stored box that contains it."""
    if part is stored:
        return 0, part.numel * itemsize
    first = last = 0
    for stride, base, start, size in zip(strides_of(stored.size), stored.offset, part.offset, part.size):
        first += (start - base) * stride
        last += (start - base + size - 1) * stride
    return first * itemsize, (last + 1) * itemsize


def pieces(
    stored: Box, part: Box, itemsize: int, largest: int = LARGEST, gap: int = GAP
) -> Iterator[RunPiece]:
    """Yield pieces of a part that are read with one request each.

    A piece spans at most `largest` bytes (or has one element), and its rows are at most `gap` bytes apart.
    Every byte of the part is in one piece.
    """
    if not part.numel:
        return
    strides = strides_of(stored.size)
    left = [part]
    while left:
        box = left.pop()
        start, stop = extent_of(stored, box, itemsize)
        dim = next((dim for dim, size in enumerate(box.size) if size > 1), None)
        if dim is None:
            yield RunPiece(box, start, stop)
            continue
        pitch = strides[dim] * itemsize
        row = stop - start - (box.size[dim] - 1) * pitch
        is_near = pitch - row <= gap
        if is_near and stop - start <= largest:
            yield RunPiece(box, start, stop)
        elif is_near and row <= largest:
            rows = (largest - row) // pitch + 1
            left += [box.tail(dim, rows), box.head(dim, rows)]
        else:
            left += [box.tail(dim, 1), box.head(dim, 1)]
