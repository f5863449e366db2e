"""From everyone's shards to whole tensors on one rank or on all, in bounded chunks."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Optional

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
    round_sizes,
    slots_of,
    total_bytes,
)
from torch_dcp_backport.transfer.consensus import open_lane
from torch_dcp_backport.transfer.errors import Problem, spell_doing, spell_key, told
from torch_dcp_backport.transfer.groups import Group
from torch_dcp_backport.transfer.layout import Box, Layout, whole
from torch_dcp_backport.transfer.plan import Agreement, Want, misfit, ready
from torch_dcp_backport.transfer.post import finish, post
from torch_dcp_backport.transfer.staging import Move, Ring, Staging, part_of

TITLE = "cannot gather"


class Held(NamedTuple):
    """What a rank holds of a tensor: the local tensor of its box in a layout."""

    tensor: torch.Tensor
    layout: Layout


@torch.no_grad()
def gather(
    held: Mapping[Key, Held],
    make: Callable[[Key], torch.Tensor],
    *,
    to: Optional[int] = None,
    group: Group = None,
    staging_bytes: Optional[int] = None,
) -> dict[Key, torch.Tensor]:
    """Whole tensors of every key, on the rank `to` (a global rank) or, with None, on every rank.

    Every rank of the group calls with the same keys, dtypes and layouts; replicas travel once.

    Args:
        held: this rank's local tensors.
        make: allocates a key's whole tensor, on a receiving rank.
        group: the process group; it must contain every rank of the layouts. None is the default one.
        staging_bytes: peak bytes of staging buffers, on any rank; None is the settings'.

    Returns:
        key -> whole tensor; empty on ranks that receive nothing.

    Raises:
        RuntimeError: the ranks hold different keys, dtypes or layouts, or a local tensor is not its
            rank's box; on every rank.
        ValueError: a budget that is none.
        TransferError: a rank is gone, or the group's timeout is over.
    """
    with Call(TITLE, "gather", [group]) as call:
        wants = {key: Want(one.layout, one.tensor.dtype) for key, one in held.items()}
        agreement = agree_on_all(held, wants, call, staging_bytes)
        out: dict[Key, torch.Tensor] = {}
        route = Route(held, out, wants, agreement, to, call)
        with call.tally.phase("prepare"):
            with call.room_for("whole tensors"):
                if to in (None, call.rank):
                    out.update((key, make(key)) for key in held)
            if call.problems:
                out.clear()
            staging, call.tally.staging_budget = ready(
                route.allocate,
                agreement.staging_bytes,
                route.nbytes,
                call.problems,
                TITLE,
                group,
                call.cause,
            )
        with call.tally.phase("move"), told(lambda: f"{TITLE}: broken off while {route.story()}"):
            route.move(staging, call.tally.staging_budget)
        call.tally.tensors = len(held)
        call.tally.close()
        return out


class Route:
    """One gather call: what every rank contributes, and the buffers it passes through."""

    def __init__(
        self,
        held: Mapping[Key, Held],
        out: Mapping[Key, torch.Tensor],
        wants: Mapping[Key, Want],
        agreement: Agreement,
        to: Optional[int],
        call: Call,
    ) -> None:
        self.ranks = call.ranks
        self.rank = call.rank
        self.group = call.group
        self.held, self.out, self.wants = held, out, wants
        self.to = to
        self.device = compat.current_device(agreement.device)
        self.tally = call.tally
        self.slots = slots_of(self.ranks)
        self._rounds: dict[int, list[int]] = {}
        #: What is going on: verb and peer, and the pieces.
        self.doing: tuple[str, Sequence[Piece]] = ("starting", ())

    def story(self) -> str:
        verb, pieces = self.doing
        return spell_doing(verb, [piece.key for piece in pieces])

    def boxes_of(self, sender: int) -> Iterator[tuple[Key, Box, int]]:
        """What `sender` contributes: of boxes that several ranks hold, the first holder's only."""
        for key, want in self.wants.items():
            box = want.layout.box(sender) if want.layout.is_first_holder(sender) else None
            if box is not None:
                yield key, box, want.dtype.itemsize

    def bytes_of(self, senders: Iterable[int]) -> int:
        return sum(box.numel * size for sender in senders for _, box, size in self.boxes_of(sender))

    @property
    def nbytes(self) -> int:
        return sum(math.prod(want.layout.shape) * want.dtype.itemsize for want in self.wants.values())

    def allocate(self, budget: int) -> Staging:
        count, size = self.sizes(budget)
        self.tally.staging_bytes = count * size
        return Staging(self.device, count * size)

    def sizes(self, budget: int) -> tuple[int, int]:
        """(buffers, bytes of one)."""
        if self.to is None:
            largest = max(self.rounds(budget), default=0)
            return 2, largest * (len(self.ranks) + 1)
        if self.to != self.rank:
            return 2, min(self.portion(budget), total_bytes(self.boxes_of(self.rank)))
        boxes = ((key, whole(want.layout.shape), want.dtype.itemsize) for key, want in self.wants.items())
        return self.slots, min(self.portion(budget), total_bytes(boxes))

    def portion(self, budget: int) -> int:
        if self.to is not None:
            return capacity_of(budget, self.slots)
        # Two all-gathers are under way, and a backend may keep a copy of each one's result.
        return capacity_of(budget, 4 * len(self.ranks) + 2)

    def rounds(self, budget: int) -> list[int]:
        """Every rank derives every sender's chunks, so that all agree on the rounds without asking."""
        if budget not in self._rounds:
            boxes = (self.boxes_of(sender) for sender in self.ranks)
            self._rounds[budget] = round_sizes(boxes, self.portion(budget))
        return self._rounds[budget]

    def move(self, staging: Staging, budget: int) -> None:
        open_lane(staging.device, self.group)
        ring = staging.ring(*self.sizes(budget))
        if self.to is None:
            self.to_all(staging, ring, budget)
        elif self.to == self.rank:
            self.receive(staging, ring, self.portion(budget))
        else:
            self.send(staging, ring, self.portion(budget), self.to)

    def send(self, staging: Staging, ring: Ring, portion: int, to: int) -> None:
        self.tally.meter.expect(lambda: self.bytes_of([self.rank]))
        for pieces in chunks(self.boxes_of(self.rank), portion):
            slot = ring.take()
            buffer = slot[: chunk_bytes(pieces)]
            self.give(staging, buffer, pieces)
            self.doing = f"sending to rank {to}", pieces
            ring.use(slot, functools.partial(finish, post([(dist.isend, buffer, to)], self.group)))
            self.tally.rounds += 1
        ring.drain()

    def receive(self, staging: Staging, ring: Ring, portion: int) -> None:
        """A chunk of each sender in turn, until nobody has any more."""
        self.tally.meter.expect(lambda: self.bytes_of(rank for rank in self.ranks if rank != self.rank))
        waiting = {rank: chunks(self.boxes_of(rank), portion) for rank in self.ranks if rank != self.rank}
        while waiting:
            for rank in list(waiting):
                pieces = next(waiting[rank], None)
                if pieces is None:
                    del waiting[rank]
                    continue
                slot = ring.take()
                buffer = slot[: chunk_bytes(pieces)]
                self.doing = f"receiving from rank {rank}", pieces
                works = post([(dist.irecv, buffer, rank)], self.group)
                ring.use(slot, functools.partial(self.arrive, staging, buffer, pieces, works, rank))
            self.tally.rounds += bool(waiting)
        # Meanwhile the last chunks travel.
        self.copy_own()
        ring.drain()

    def to_all(self, staging: Staging, ring: Ring, budget: int) -> None:
        self.tally.meter.expect(lambda: self.bytes_of(self.ranks))
        streams = [chunks(self.boxes_of(sender), self.portion(budget)) for sender in self.ranks]
        for size in self.rounds(budget):
            parts = [next(stream, []) for stream in streams]
            slot = ring.take()
            mine, *others = torch.split(slot[: size * (len(self.ranks) + 1)], size)
            self.give(staging, mine, parts[self.ranks.index(self.rank)])
            self.doing = "gathering", [piece for pieces in parts for piece in pieces]
            work = dist.all_gather(others, mine, group=self.group, async_op=True)
            ring.use(slot, functools.partial(self.arrive_all, staging, others, parts, [work]))
            self.tally.rounds += 1
        self.copy_own()
        ring.drain()

    def arrive_all(
        self,
        staging: Staging,
        buffers: Sequence[torch.Tensor],
        parts: Sequence[Sequence[Piece]],
        works: Sequence[Any],
    ) -> None:
        finish(works)
        for rank, buffer, pieces in zip(self.ranks, buffers, parts):
            if rank != self.rank and pieces:
                self.arrive(staging, buffer, pieces, (), rank)

    def arrive(
        self,
        staging: Staging,
        buffer: torch.Tensor,
        pieces: Sequence[Piece],
        works: Sequence[Any],
        sender: int,
    ) -> None:
        self.doing = f"receiving from rank {sender}", pieces
        finish(works)
        staging.unpack(buffer, self.to_whole(pieces))
        self.tally.received(moved(pieces))

    def to_whole(self, pieces: Iterable[Piece]) -> Iterator[Move]:
        for piece in pieces:
            target = self.out[piece.key]
            yield Move(piece, target.dtype, part_of(target, whole(tuple(target.shape)), piece.box))

    def give(self, staging: Staging, buffer: torch.Tensor, pieces: Sequence[Piece]) -> None:
        if pieces:
            staging.pack(buffer, self.from_held(pieces))
            self.tally.sent(moved(pieces))

    def from_held(self, pieces: Iterable[Piece]) -> Iterator[Move]:
        for piece in pieces:
            one = self.held[piece.key]
            box = one.layout.box(self.rank)
            assert box is not None
            yield Move(piece, one.tensor.dtype, part_of(one.tensor, box, piece.box))

    def copy_own(self) -> None:
        """A receiver's own boxes need no traffic."""
        for key, box, _ in self.boxes_of(self.rank):
            part_of(self.out[key], whole(self.wants[key].layout.shape), box).copy_(self.held[key].tensor)


def agree_on_all(
    held: Mapping[Key, Held], wants: Mapping[Key, Want], call: Call, staging_bytes: Optional[int]
) -> Agreement:
    """Budget and device, where all ranks hold the same keys, dtypes and layouts."""
    misfits = [misfit(key, one.tensor, one.layout) for key, one in held.items()]
    call.problems += [one for one in misfits if one]
    kinds = {one.tensor.device.type for one in held.values()}
    device = kinds.pop() if len(kinds) == 1 else ""
    agreement = call.agree(wants, staging_bytes=staging_bytes, device=device)
    if not agreement.is_common:
        first = call.ranks[0]
        call.problems += differences(agreement.of(first), wants, first)
        call.agree(wants)
    return agreement


def differences(theirs: Mapping[Key, Want], mine: Mapping[Key, Want], first: int) -> list[Problem]:
    if list(theirs.items()) == list(mine.items()):
        return []
    found = []
    for key in {**theirs, **mine}:
        a, b = theirs.get(key), mine.get(key)
        if a != b:
            expected = f"{describe(a)} as rank {first}"
            found.append(Problem("held differently", spell_key(key), describe(b), expected))
    return found or [
        Problem("the same keys in another order", got=str(list(mine)[:3]), expected=str(list(theirs)[:3]))
    ]


def describe(want: Optional[Want]) -> str:
    if want is None:
        return "nothing"
    return f"{tuple(want.layout.shape)} {want.dtype} {want.layout.placements}"
