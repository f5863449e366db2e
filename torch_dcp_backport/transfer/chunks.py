"""Boxes packed into chunks of bounded size; every rank derives the same chunks from the same boxes."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from torch_dcp_backport.transfer.layout import Box, row_of

Key = Hashable
#: A box of a key's tensor, and the dtype that travels.
KeyedBox = tuple[Key, Box, torch.dtype]

#: Every piece of a chunk starts at a multiple of this, so that it can be viewed as any dtype.
ALIGNMENT = 16
MOST_SLOTS = 8
#: Larger chunks would only take longer to fill before they travel, and leave the processor's caches.
LARGEST_CHUNK = 4 * 2**20


class Piece(NamedTuple):
    """A part of a tensor in a chunk."""

    key: Key
    box: Box
    dtype: torch.dtype
    #: In bytes, from the start of the chunk.
    start: int
    nbytes: int


def chunks(boxes: Iterable[KeyedBox], capacity: int) -> Iterator[list[Piece]]:
    """Pack boxes into chunks of at most `capacity` bytes.

    Small boxes share a chunk, whatever their dtypes; large ones are cut along their outermost dimensions.
    """
    pieces: list[Piece] = []
    used = 0
    for key, box, dtype in boxes:
        itemsize = dtype.itemsize
        left = [box] if box.numel else []
        while left:
            part = left.pop()
            nbytes = part.numel * itemsize
            room = capacity - used
            if nbytes <= room:
                pieces.append(Piece(key, part, dtype, used, nbytes))
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


def box_bytes(boxes: Iterable[KeyedBox]) -> int:
    return sum(box.numel * dtype.itemsize for _, box, dtype in boxes)


def total_bytes(boxes: Iterable[KeyedBox]) -> int:
    """Bytes of boxes, each padded: no chunk of them is larger."""
    return sum(aligned(box.numel * dtype.itemsize) for _, box, dtype in boxes)


def round_sizes(boxes_by_rank: Iterable[Iterable[KeyedBox]], capacity: int) -> list[int]:
    """Bytes per rank of each round: that of the rank that needs most in it."""
    sizes: list[int] = []
    for boxes in boxes_by_rank:
        for number, pieces in enumerate(chunks(boxes, capacity)):
            if number == len(sizes):
                sizes.append(0)
            sizes[number] = max(sizes[number], chunk_bytes(pieces))
    return sizes


def in_turn(streams: Mapping[int, Iterator[list[Piece]]]) -> Iterator[tuple[int, int, list[Piece]]]:
    """(round from 1 on, rank, chunk): in every round a chunk of each rank that has one left."""
    waiting, number = dict(streams), 1
    while waiting:
        for rank in list(waiting):
            pieces = next(waiting[rank], None)
            if pieces is None:
                del waiting[rank]
            else:
                yield number, rank, pieces
        number += 1


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def slots_of(ranks: Sequence[int]) -> int:
    """Chunks under way at most, on the rank that sends to all or receives from all.

    The other ranks have two: one that travels, and one that is filled or emptied meanwhile.
    """
    return max(2, min(2 * (len(ranks) - 1), MOST_SLOTS))


def capacity_of(staging_bytes: int, buffers: int) -> int:
    """Bytes of one of so many buffers. One more is left free for what the backend needs meanwhile."""
    return max(min(staging_bytes // (buffers + 1), LARGEST_CHUNK) // ALIGNMENT * ALIGNMENT, ALIGNMENT)
