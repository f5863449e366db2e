"""Boxes of tensors from their holders to the ranks that want them, in bounded chunks between pairs of ranks.

A box that its rank holds already never travels, and no box comes twice. In round k every rank sends to the
k-th after it and receives from the k-th before it: each pair has one round, and no rank waits for a rank that
waits for it.

On an accelerator's backend what a single rank holds is broadcast, and each rank keeps its parts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Optional

import torch
import torch.distributed as dist

from torch_dcp_backport.transfer._src.call import Call
from torch_dcp_backport.transfer._src.chunks import (
    Key,
    KeyedBox,
    Piece,
    aligned,
    box_bytes,
    capacity_of,
    chunk_bytes,
    chunks,
    collective_capacity,
    moved,
    total_bytes,
)
from torch_dcp_backport.transfer._src.engine import Engine, Local
from torch_dcp_backport.transfer._src.errors import Problem, spell_key
from torch_dcp_backport.transfer._src.groups import backend_of
from torch_dcp_backport.transfer._src.lanes import Lane, lane_of
from torch_dcp_backport.transfer._src.layout import Box
from torch_dcp_backport.transfer._src.plan import Agreement
from torch_dcp_backport.transfer._src.spread import (
    Spread,
    Ways,
    boxes_of,
    holders_of,
    problems_of_spreads,
    ways_of,
)
from torch_dcp_backport.transfer._src.wire import Message

#: A chunk to send and one to receive, of two steps.
BUFFERS = 4


class Route(NamedTuple):
    """The two spreads of a tensor, and the dtype that travels."""

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
    signatures: dict[Route, str] = {}
    rows = []
    for key, route in routes.items():
        signature = signatures.get(route)
        if signature is None:
            signature = signatures[route] = route.signature
        rows.append(f"{key!r} {signature}")
    return rows


class Alike(NamedTuple):
    """Tensors with the same route: their boxes are derived once."""

    route: Route
    ways: Ways
    keys: list[Key]

    def keyed(self, boxes: Sequence[Box]) -> Iterator[KeyedBox]:
        if boxes:
            for key in self.keys:
                for box in boxes:
                    yield key, box, self.route.dtype


class ExchangePlan:
    """One rank's sends and receives, of all tensors.

    Tensors with the same route follow one another: both ends of a pair come to their boxes in that order, and
    nothing is kept of any single box.
    """

    def __init__(self, routes: Mapping[Key, Route], ranks: tuple[int, ...], rank: int) -> None:
        #: Bytes of all tensors; the same on every rank.
        self.nbytes = sum(route.nbytes for route in routes.values())
        keys_by_route: dict[Route, list[Key]] = {}
        for key, route in routes.items():
            keys_by_route.setdefault(route, []).append(key)
        self.ranks, self.rank = ranks, rank
        self.alike = [
            Alike(route, ways_of(route.have, route.want, ranks, rank), keys)
            for route, keys in keys_by_route.items()
        ]

    def sends(self, peer: int) -> Iterator[KeyedBox]:
        for alike in self.alike:
            yield from alike.keyed(alike.ways.sends.get(peer, ()))

    def receives(self, peer: int) -> Iterator[KeyedBox]:
        for alike in self.alike:
            yield from alike.keyed(alike.ways.receives.get(peer, ()))

    def own(self) -> Iterator[KeyedBox]:
        """The boxes that this rank wants and holds."""
        for alike in self.alike:
            yield from alike.keyed(alike.ways.own)

    @functools.cached_property
    def only_holder(self) -> Optional[int]:
        """The rank that holds all boxes of all tensors; None where there are several."""
        holders = {
            holder
            for alike in self.alike
            for members in holders_of(alike.route.have, self.ranks).values()
            for holder in members
        }
        return holders.pop() if len(holders) == 1 else None

    @functools.cached_property
    def has_one_sender(self) -> bool:
        """Whether a single rank holds everything, and another wants some of it; the same on every rank."""
        takers = {
            taker
            for alike in self.alike
            for members in holders_of(alike.route.want, self.ranks).values()
            for taker in members
        }
        return self.only_holder is not None and bool(takers - {self.only_holder})

    def held(self) -> Iterator[KeyedBox]:
        """The boxes of all ranks that hold some."""
        for alike in self.alike:
            yield from alike.keyed(list(holders_of(alike.route.have, self.ranks)))

    @functools.cached_property
    def wanted(self) -> dict[Key, Sequence[Box]]:
        """The boxes that this rank wants, by key."""
        wanted: dict[Key, Sequence[Box]] = {}
        for alike in self.alike:
            boxes = boxes_of(holders_of(alike.route.want, self.ranks), self.rank)
            wanted.update(dict.fromkeys(alike.keys, boxes))
        return wanted

    @property
    def peers(self) -> set[int]:
        return {peer for alike in self.alike for peer in (*alike.ways.sends, *alike.ways.receives)}

    @property
    def traffic(self) -> int:
        """Bytes that this rank sends and receives."""
        return sum(box_bytes(self.sends(peer)) + box_bytes(self.receives(peer)) for peer in self.peers)

    def largest(self, limit: int) -> int:
        """Bytes that no chunk of this rank exceeds; not more than `limit`."""
        largest = 0
        for peer in self.peers:
            for boxes in (self.sends(peer), self.receives(peer)):
                nbytes = 0
                for _, box, dtype in boxes:
                    nbytes += aligned(box.numel * dtype.itemsize)
                    if nbytes >= limit:
                        return limit
                largest = max(largest, nbytes)
        return largest


def problems_of(routes: Mapping[Key, Route], call: Call) -> list[Problem]:
    """The problems of the spreads, as this rank sees them."""
    problems = {
        route: problems_of_spreads(route.have, route.want, call.ranks, call.rank)
        for route in set(routes.values())
    }
    return [
        problem._replace(key=spell_key(key)) for key, route in routes.items() for problem in problems[route]
    ]


class Exchange(Engine):
    """One exchange under way."""

    def __init__(
        self,
        call: Call,
        agreement: Agreement,
        plan: ExchangePlan,
        sources: Mapping[Key, Local],
        targets: Mapping[Key, Local],
    ) -> None:
        super().__init__(call, agreement, sources, targets)
        self.plan = plan
        lane = lane_of(backend_of(call.group, agreement.device), senders=1)
        self.is_collective = lane is Lane.BROADCAST and plan.has_one_sender

    def staging_bytes(self, budget: int) -> int:
        if self.is_collective:
            return 2 * min(self.capacity_for_all(budget), total_bytes(self.plan.held()))
        return BUFFERS * self.size(budget)

    def capacity_for_all(self, budget: int) -> int:
        """Bytes of one of the two buffers of chunks that go to all."""
        return collective_capacity(budget, 2)

    def size(self, budget: int) -> int:
        return self.plan.largest(capacity_of(budget, BUFFERS))

    def move(self, budget: int) -> None:
        if self.is_collective:
            self.to_all(budget)
        else:
            self.to_each(budget)
        # While the last chunks are under way.
        self.attempt(functools.partial(self.copy_own, self.plan.own()))
        self.ring.drain()
        self.conclude()

    def to_each(self, budget: int) -> None:
        """What each rank wants, from its holders, in messages."""
        plan, ranks = self.plan, self.ranks
        self.tally.meter.expect(lambda: plan.traffic)
        portion = capacity_of(budget, BUFFERS)
        self.ring = self.staging.ring(BUFFERS, self.size(budget))
        place = ranks.index(self.rank)
        peers = plan.peers
        for step in range(1, len(ranks)):
            after, before = ranks[(place + step) % len(ranks)], ranks[(place - step) % len(ranks)]
            if after not in peers and before not in peers:
                continue
            outgoing = chunks(plan.sends(after), portion)
            incoming = chunks(plan.receives(before), portion)
            while self.swap(after, next(outgoing, ()), before, next(incoming, ())):
                self.tally.rounds += 1

    def swap(self, after: int, outgoing: Sequence[Piece], before: int, incoming: Sequence[Piece]) -> bool:
        """One chunk to a rank and one from another, where there are such; False where there are none.

        The ranks come to these steps in the same order, so that a step's messages are one batch everywhere.
        """
        if not outgoing and not incoming:
            return False
        messages: list[Message] = []
        if outgoing:
            messages.append((dist.isend, self.filled(outgoing), after))
        buffer = self.staging.store[:0]
        if incoming:
            buffer = self.ring.take(chunk_bytes(incoming))
            messages.append((dist.irecv, buffer, before))
        self.doing = f"exchanging with ranks {after} and {before}", (*outgoing, *incoming)
        works = self.post(messages)
        if outgoing:
            self.tally.sent(moved(outgoing))
        # Once for both buffers of a step: some backends wait for ever for a message that is over.
        self.ring.use(functools.partial(self.arrive, buffer, incoming, works, before))
        return True

    def to_all(self, budget: int) -> None:
        """Everything from its only holder to all ranks."""
        plan, capacity = self.plan, self.capacity_for_all(budget)
        source = plan.only_holder
        assert source is not None, "the lane is for one holder"
        self.tally.meter.expect(lambda: box_bytes(plan.held()))
        self.ring = self.staging.ring(2, min(capacity, total_bytes(plan.held())))
        for pieces in chunks(plan.held(), capacity):
            self.broadcast(source, pieces)

    def keep(self, buffer: torch.Tensor, pieces: Sequence[Piece]) -> None:
        # The holder copies its own.
        if self.rank != self.plan.only_holder:
            self.keep_parts(buffer, pieces)
            self.tally.received(moved(pieces))

    def kept_boxes(self, key: Key) -> Sequence[Box]:
        return self.plan.wanted[key]

    def filled(self, pieces: Sequence[Piece]) -> torch.Tensor:
        """A chunk to send."""
        chunk = self.ring.take(chunk_bytes(pieces))
        self.attempt(functools.partial(self.pack, chunk, pieces))
        return chunk
