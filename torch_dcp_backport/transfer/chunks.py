"""Boxes packed into chunks of bounded size; every rank derives the same chunks from the same boxes."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple

from torch_dcp_backport.transfer.layout import Box, row_of

Key = Hashable

#: Every piece of a chunk starts at a multiple of this, so that it can be viewed as any dtype.
ALIGNMENT = 16
MOST_SLOTS = 8
#: Larger chunks would only take longer to fill before they travel, and leave the processor's caches.
LARGEST_CHUNK = 4 * 2**20


class Piece(NamedTuple):
    """A part of one tensor in one chunk."""

    key: Key
    box: Box
    start: int
    nbytes: int


def chunks(boxes: Iterable[tuple[Key, Box, int]], capacity: int) -> Iterator[list[Piece]]:
    """Pack boxes of (key, box, bytes per element) into chunks of at most `capacity` bytes.

    Small boxes share a chunk, whatever their dtypes; large ones are cut along their outermost
    dimensions. Every rank derives the same chunks from the same boxes.
    """
    pieces: list[Piece] = []
    used = 0
    for key, box, itemsize in boxes:
        left = [box] if box.numel else []
        while left:
            part = left.pop()
            nbytes = part.numel * itemsize
            room = capacity - used
            if nbytes <= room:
                pieces.append(Piece(key, part, used, nbytes))
                used += aligned(nbytes)
                continue
            dim, row = row_of(part, itemsize)
            if row > room and (row <= capacity or part.numel == 1):
                yield pieces
                pieces, used = [], 0
                left.append(part)
                continue
            length = max(1, room // row)
            left += [part.tail(dim, length), part.head(dim, length)]
    if pieces:
        yield pieces


def chunk_bytes(pieces: Sequence[Piece]) -> int:
    return aligned(pieces[-1].start + pieces[-1].nbytes) if pieces else 0


def moved(pieces: Sequence[Piece]) -> int:
    """Bytes of tensors in a chunk, without padding."""
    return sum(piece.nbytes for piece in pieces)


def total_bytes(boxes: Iterable[tuple[Key, Box, int]]) -> int:
    """No chunk of these boxes is larger."""
    return sum(aligned(box.numel * itemsize) for _, box, itemsize in boxes)


def round_sizes(streams: Iterable[Iterable[tuple[Key, Box, int]]], capacity: int) -> list[int]:
    """Bytes per rank of each round: that of the rank that needs most in it."""
    sizes: list[int] = []
    for boxes in streams:
        for number, pieces in enumerate(chunks(boxes, capacity)):
            if number == len(sizes):
                sizes.append(0)
            sizes[number] = max(sizes[number], chunk_bytes(pieces))
    return sizes


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def slots_of(ranks: Sequence[int]) -> int:
    """Chunks that the one rank which sends to all, or receives from all, has under way at most.

    The others have two: one that travels, and one that is filled or emptied meanwhile.
    """
    return max(2, min(2 * (len(ranks) - 1), MOST_SLOTS))


def capacity_of(staging_bytes: int, buffers: int) -> int:
    """Bytes of one of so many buffers. One more is left free for what the backend needs meanwhile."""
    return max(min(staging_bytes // (buffers + 1), LARGEST_CHUNK) // ALIGNMENT * ALIGNMENT, ALIGNMENT)
