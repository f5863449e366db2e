"""Boxes packed into chunks of bounded size; every rank derives the same chunks from the same boxes."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from torch_dcp_backport.transfer._src.layout import Box, row_major, row_of

Key = Hashable
#: A box of a key's tensor, and the dtype that travels.
KeyedBox = tuple[Key, Box, torch.dtype]

#: The same for a collective of an accelerator: there are no such caches, and the start takes as long as the
#: bytes of some MiB.
LARGEST_COLLECTIVE = 32 * 2**20

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

    @property
    def size(self) -> tuple[int, ...]:
        return self.box.size

    @property
    def stride(self) -> tuple[int, ...]:
        return row_major(self.box.size)


class StridedPart(NamedTuple):
    """Elements of a chunk at any strides: a part of a piece, or of the pieces of many ranks."""

    key: Key
    dtype: torch.dtype
    #: In bytes, from the start of the chunk.
    start: int
    #: From the first element to behind the last one.
    nbytes: int
    #: In elements.
    size: tuple[int, ...]
    stride: tuple[int, ...]


def cut_of(piece: Piece, box: Box) -> StridedPart:
    """The part of a piece that lies in a box within its own."""
    dtype, stride = piece.dtype, row_major(piece.box.size)
    first = sum((b - a) * step for b, a, step in zip(box.offset, piece.box.offset, stride))
    span = 1 + sum((extent - 1) * step for extent, step in zip(box.size, stride))
    start = piece.start + first * dtype.itemsize
    return StridedPart(piece.key, dtype, start, span * dtype.itemsize, box.size, stride)


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
    return in_steps(min(staging_bytes // (buffers + 1), LARGEST_CHUNK))


def collective_capacity(staging_bytes: int, buffers: int) -> int:
    """The same for an accelerator's collectives, which work in the buffers themselves."""
    return in_steps(min(staging_bytes // buffers, LARGEST_COLLECTIVE))


def in_steps(nbytes: int) -> int:
    return max(nbytes // ALIGNMENT * ALIGNMENT, ALIGNMENT)
