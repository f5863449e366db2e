"""From every rank's shards to whole tensors by all-gathers, on every rank or on one: the others drop them.

Every rank plans the same rounds from the largest block of each tensor, whatever the number of ranks. A round
has a row of each rank, and all rows together are within the budget.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Optional

import torch

from torch_dcp_backport import compat
from torch_dcp_backport.transfer._src.call import Call
from torch_dcp_backport.transfer._src.chunks import (
    Key,
    KeyedBox,
    Piece,
    capacity_of,
    chunk_bytes,
    chunks,
    collective_capacity,
    cut_of,
    total_bytes,
)
from torch_dcp_backport.transfer._src.engine import Engine
from torch_dcp_backport.transfer._src.errors import UNCHANGED, spell_doing
from torch_dcp_backport.transfer._src.grid import largest_block, moves_of, nbytes_of
from torch_dcp_backport.transfer._src.layout import Box, Layout, whole
from torch_dcp_backport.transfer._src.plan import Agreement
from torch_dcp_backport.transfer._src.spread import intersection
from torch_dcp_backport.transfer._src.staging import Move, copy_to

#: Rounds under way: one travels while the other is filled or emptied.
BUFFERS = 2


class Held(NamedTuple):
    """A rank's part of a tensor.

    Args:
        tensor: the local tensor; it has the shape of this rank's box.
        layout: the layout of the whole tensor.
    """

    tensor: torch.Tensor
    layout: Layout


class AllGather(Engine):
    """One gather by all-gathers under way."""

    after_failure = UNCHANGED

    def __init__(
        self,
        call: Call,
        agreement: Agreement,
        held: Mapping[Key, Held],
        out: Mapping[Key, torch.Tensor],
        is_copied: bool,
    ) -> None:
        """Set up.

        Args:
            out: whole tensors, on a receiving rank.
            is_copied: whether the backend makes a copy of each round.
        """
        sources = {key: (tensor, whole(tuple(tensor.shape))) for key, (tensor, _) in held.items()}
        super().__init__(call, agreement, sources, {})
        self.layouts = {key: layout for key, (_, layout) in held.items()}
        self.out = out
        self.is_copied = is_copied
        self.is_collective = not is_copied and len(call.ranks) > 1
        self.place = call.ranks.index(call.rank)

    def failure_text(self) -> str:
        verb, pieces = self.doing
        doing = spell_doing(verb, (piece.key for piece in pieces))
        return f"{self.call.title}: broken off while {doing}"

    def blocks(self) -> Iterator[KeyedBox]:
        """The largest block of each tensor, counted from its own beginning."""
        for key, layout in self.layouts.items():
            if layout.mesh is not None:
                yield key, whole(largest_block(layout)), self.sources[key][0].dtype

    def staging_bytes(self, budget: int) -> int:
        return BUFFERS * len(self.ranks) * self.row_bytes(budget)

    def row_bytes(self, budget: int) -> int:
        """Bytes of a rank's row in the largest round."""
        return min(self.portion(budget), total_bytes(self.blocks()))

    def portion(self, budget: int) -> int:
        buffers = BUFFERS * len(self.ranks)
        if self.is_copied:
            return capacity_of(budget, 2 * buffers)
        return collective_capacity(budget, buffers)

    def move(self, budget: int) -> None:
        count = len(self.ranks)
        self.tally.meter.expect(self.expected)
        self.ring = self.staging.ring(BUFFERS, count * self.row_bytes(budget))
        for pieces in chunks(self.blocks(), self.portion(budget)):
            nbytes = chunk_bytes(pieces)
            rows = self.ring.take(count * nbytes)
            own = rows[self.place * nbytes : (self.place + 1) * nbytes]
            self.attempt(functools.partial(self.staging.pack, own, self.own_moves(pieces)))
            own_bytes = self.own_bytes(pieces)
            if own_bytes:
                self.tally.sent(own_bytes)
            self.doing = "gathering", pieces
            work = compat.all_gather_rows(rows, own, self.group, async_op=True)
            self.ring.use(functools.partial(self.arrive_in_rows, rows, nbytes, pieces, work))
            self.tally.rounds += 1
        self.attempt(self.copy_whole)
        self.ring.drain()
        self.conclude()

    def copy_whole(self) -> None:
        """Copy what this rank holds without a mesh."""
        for key, layout in self.layouts.items():
            if layout.mesh is None and key in self.out:
                copy_to(self.out[key], self.read(key, self.sources[key][1]))

    def expected(self) -> int:
        """Bytes that this rank sends and receives."""
        return sum(
            math.prod(layout.shape) * self.sources[key][0].itemsize
            for key, layout in self.layouts.items()
            if layout.mesh is not None
        )

    def own_bytes(self, pieces: Sequence[Piece]) -> int:
        """Bytes of this rank's part of a round, without padding."""
        return sum(part.numel * piece.dtype.itemsize for piece, part in self.own_parts(pieces))

    def own_parts(self, pieces: Sequence[Piece]) -> Iterator[tuple[Piece, Box]]:
        """The parts of a round that this rank gives; replicas other than the first give none."""
        for piece in pieces:
            if self.layouts[piece.key].is_first_holder(self.rank):
                part = intersection(piece.box, self.sources[piece.key][1])
                if part is not None:
                    yield piece, part

    def own_moves(self, pieces: Sequence[Piece]) -> Iterator[Move]:
        """What this rank's row gets."""
        for piece, part in self.own_parts(pieces):
            yield cut_of(piece, part), self.read(piece.key, part)

    def arrive_in_rows(self, rows: torch.Tensor, nbytes: int, pieces: Sequence[Piece], work: Any) -> None:
        self.wait("gathering", pieces, [work])
        self.attempt(functools.partial(self.staging.unpack, rows, self.moves_from(pieces, nbytes)))
        every = sum(nbytes_of(self.layouts[piece.key], piece) for piece in pieces)
        self.tally.received(every - self.own_bytes(pieces))

    def moves_from(self, pieces: Sequence[Piece], nbytes: int) -> Iterator[Move]:
        for piece in pieces:
            target: Optional[torch.Tensor] = self.out.get(piece.key)
            if target is not None:
                yield from moves_of(self.layouts[piece.key], self.ranks, piece, nbytes, target)
