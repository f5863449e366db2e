"""Boxes of tensors from whoever holds them to whoever wants them, in bounded chunks between pairs of ranks.

What a rank holds already never travels, and nothing comes twice. In round k every rank sends to the k-th
after it and receives from the k-th before it: each pair has one round, and no rank waits for one that waits
for it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from torch_dcp_backport import compat
from torch_dcp_backport.transfer.call import Call
from torch_dcp_backport.transfer.chunks import (
    Key,
    Piece,
    capacity_of,
    chunk_bytes,
    chunks,
    moved,
    total_bytes,
)
from torch_dcp_backport.transfer.consensus import open_lane
from torch_dcp_backport.transfer.errors import Problem, spell_broken_off, spell_key, told
from torch_dcp_backport.transfer.layout import Box
from torch_dcp_backport.transfer.memory import is_same_view
from torch_dcp_backport.transfer.plan import Agreement, ready
from torch_dcp_backport.transfer.post import Message, finish, post
from torch_dcp_backport.transfer.spread import Spread, Ways, faults_of, ways_of
from torch_dcp_backport.transfer.staging import Move, Ring, Staging

#: A chunk to send and one to receive, of two steps.
BUFFERS = 4
Part = Callable[[Key, Box], torch.Tensor]
#: (key, box, bytes of an element)
Stream = Iterator[tuple[Key, Box, int]]


class Route(NamedTuple):
    """Where a tensor is, where it goes, and as what it travels."""

    have: Spread
    want: Spread
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.have.shape) * self.dtype.itemsize

    @property
    def signature(self) -> str:
        return f"{self.dtype} {self.have.signature} {self.want.signature}"


def rows_of(routes: Mapping[Key, Route]) -> list[str]:
    """A line for each tensor: the same on ranks that pass the same keys with the same routes."""
    known: dict[Route, str] = {}
    rows = []
    for key, route in routes.items():
        text = known.get(route)
        if text is None:
            text = known[route] = route.signature
        rows.append(f"{key!r} {text}")
    return rows


class Alike(NamedTuple):
    """Tensors with the same route: their boxes are looked for once."""

    route: Route
    ways: Ways
    keys: list[Key]

    def nbytes(self, boxes: Iterable[Box]) -> int:
        return sum(box.numel for box in boxes) * self.route.dtype.itemsize * len(self.keys)


class Plan:
    """What one rank sends and receives, of all tensors.

    Tensors with the same route follow one another: both ends of a pair come to their boxes in that order, and
    nothing is kept of any single box.
    """

    def __init__(self, routes: Mapping[Key, Route], ranks: tuple[int, ...], rank: int) -> None:
        self.routes = routes
        keys: dict[Route, list[Key]] = {}
        for key, route in routes.items():
            keys.setdefault(route, []).append(key)
        self.alike = [
            Alike(route, ways_of(route.have, route.want, ranks, rank), keys) for route, keys in keys.items()
        ]

    def sends(self, peer: int) -> Stream:
        for alike in self.alike:
            yield from stream(alike, alike.ways.sends.get(peer, ()))

    def receives(self, peer: int) -> Stream:
        for alike in self.alike:
            yield from stream(alike, alike.ways.receives.get(peer, ()))

    def own(self) -> Stream:
        """What this rank wants and holds."""
        for alike in self.alike:
            yield from stream(alike, alike.ways.own)

    @property
    def peers(self) -> set[int]:
        return {peer for alike in self.alike for peer in (*alike.ways.sends, *alike.ways.receives)}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors; the same on every rank."""
        return sum(route.nbytes for route in self.routes.values())

    @property
    def traffic(self) -> int:
        """Bytes that this rank sends and receives."""
        return sum(
            alike.nbytes(boxes)
            for alike in self.alike
            for boxes in (*alike.ways.sends.values(), *alike.ways.receives.values())
        )

    def largest(self, most: int) -> int:
        """No chunk of this rank is larger; not more than `most`."""
        found = 0
        for peer in self.peers:
            for boxes in (self.sends(peer), self.receives(peer)):
                found = max(found, total_bytes(until(boxes, most)))
        return min(found, most)


def stream(alike: Alike, boxes: Sequence[Box]) -> Stream:
    if boxes:
        itemsize = alike.route.dtype.itemsize
        for key in alike.keys:
            for box in boxes:
                yield key, box, itemsize


def until(boxes: Stream, nbytes: int) -> Stream:
    """The boxes up to that with which they come to so many bytes."""
    left = nbytes
    for key, box, itemsize in boxes:
        yield key, box, itemsize
        left -= box.numel * itemsize
        if left <= 0:
            return


def problems_of(routes: Mapping[Key, Route], call: Call) -> list[Problem]:
    """What is wrong with the spreads, as this rank sees them."""
    found: list[Problem] = []
    known: dict[tuple[Spread, Spread], Any] = {}
    for key, route in routes.items():
        pair = route.have, route.want
        if pair not in known:
            known[pair] = faults_of(*pair, call.ranks, call.rank)
        found += [Problem(fault.what, spell_key(key), fault.got, fault.expected) for fault in known[pair]]
    return found


@torch.no_grad()
def exchange(call: Call, plan: Plan, agreement: Agreement, read: Part, write: Part) -> None:
    """Move every box to the ranks that want it.

    Args:
        call: what the ranks agreed in; `call.problems` are what has come up since.
        agreement: of budget and device.
        read: gives the part of a tensor in a box that this rank holds.
        write: gives the part of a destination in a box that this rank wants; written in place.

    Raises:
        RuntimeError: some rank has no room for its buffers; before anything was written, on every rank (if
            1 MiB or more moves).
        TransferError: a rank is gone, or the group's timeout is over.
    """
    Exchange(call, plan, agreement, read, write).run()


class Exchange:
    """One exchange under way."""

    def __init__(self, call: Call, plan: Plan, agreement: Agreement, read: Part, write: Part) -> None:
        self.call = call
        self.plan = plan
        self.agreement = agreement
        self.read = read
        self.write = write
        #: What is going on, and the pieces.
        self.doing: tuple[str, Sequence[Piece]] = ("starting", ())
        self.written: dict[Key, None] = {}

    def run(self) -> None:
        call, tally = self.call, self.call.tally
        with tally.phase("prepare"):
            staging, tally.staging_budget = ready(
                self.allocate,
                self.agreement.staging_bytes,
                self.plan.nbytes,
                call.problems,
                call.title,
                call.group,
                call.cause,
            )
        with tally.phase("move"), told(lambda: f"{call.title}: {self.story()}"):
            self.move(staging, tally.staging_budget)

    def story(self) -> str:
        verb, pieces = self.doing
        return spell_broken_off(self.call.rank, (verb, (piece.key for piece in pieces)), list(self.written))

    def allocate(self, budget: int) -> Staging:
        nbytes = BUFFERS * self.size(budget)
        self.call.tally.staging_bytes = nbytes
        return Staging(compat.current_device(self.agreement.device), nbytes)

    def size(self, budget: int) -> int:
        return self.plan.largest(capacity_of(budget, BUFFERS))

    def move(self, staging: Staging, budget: int) -> None:
        plan, ranks = self.plan, self.call.ranks
        self.call.tally.meter.expect(lambda: plan.traffic)
        if len(ranks) > 1:
            open_lane(staging.device, self.call.group)
        portion = capacity_of(budget, BUFFERS)
        ring = staging.ring(BUFFERS, self.size(budget))
        place = ranks.index(self.call.rank)
        peers = plan.peers
        for step in range(1, len(ranks)):
            after, before = ranks[(place + step) % len(ranks)], ranks[(place - step) % len(ranks)]
            if after not in peers and before not in peers:
                continue
            outgoing = chunks(plan.sends(after), portion)
            incoming = chunks(plan.receives(before), portion)
            while self.pass_on(staging, ring, after, next(outgoing, ()), before, next(incoming, ())):
                self.call.tally.rounds += 1
        # While the last chunks are under way.
        self.copy_own()
        ring.drain()

    def pass_on(
        self,
        staging: Staging,
        ring: Ring,
        after: int,
        outgoing: Sequence[Piece],
        before: int,
        incoming: Sequence[Piece],
    ) -> bool:
        """One chunk to the one rank and one from the other, where there are such; False where there are none.

        The ranks come to these steps in the same order, so that a step's messages are one batch everywhere.
        """
        if not outgoing and not incoming:
            return False
        messages: list[Message] = []
        buffers = []
        filled = staging.store[:0]
        if outgoing:
            buffers.append(ring.take())
            chunk = buffers[-1][: chunk_bytes(outgoing)]
            staging.pack(chunk, self.from_here(outgoing))
            messages.append((dist.isend, chunk, after))
        if incoming:
            buffers.append(ring.take())
            filled = buffers[-1][: chunk_bytes(incoming)]
            messages.append((dist.irecv, filled, before))
        self.doing = f"exchanging with ranks {after} and {before}", (*outgoing, *incoming)
        works = post(messages, self.call.group)
        if outgoing:
            self.call.tally.sent(moved(outgoing))
        # Once for all buffers of a step: some backends wait for ever for a message that is over.
        ring.use(buffers[0], functools.partial(self.arrive, staging, filled, incoming, works, before))
        for buffer in buffers[1:]:
            ring.use(buffer, lambda: None)
        return True

    def arrive(
        self,
        staging: Staging,
        chunk: torch.Tensor,
        pieces: Sequence[Piece],
        works: Sequence[Any],
        before: int,
    ) -> None:
        """A step's messages are over: empty what came."""
        self.doing = f"receiving from rank {before}", pieces
        finish(works)
        if pieces:
            staging.unpack(chunk, self.to_here(pieces))
            self.call.tally.received(moved(pieces))

    def from_here(self, pieces: Iterable[Piece]) -> Iterator[Move]:
        for piece in pieces:
            yield Move(piece, self.plan.routes[piece.key].dtype, self.read(piece.key, piece.box))

    def to_here(self, pieces: Iterable[Piece]) -> Iterator[Move]:
        for piece in pieces:
            self.written[piece.key] = None
            yield Move(piece, self.plan.routes[piece.key].dtype, self.write(piece.key, piece.box))

    def copy_own(self) -> None:
        for key, box, _ in self.plan.own():
            source, target = self.read(key, box), self.write(key, box)
            # A tensor may stay where it is.
            if not is_same_view(source, target):
                self.written[key] = None
                target.copy_(source)
