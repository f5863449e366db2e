"""From the source rank to everyone's shards: each rank receives its own boxes once, in bounded chunks.

What every rank wants whole is broadcast. Everything else goes from the source to the first holder of its
box alone, who passes it on to the replicas.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, Optional, Protocol

import torch
import torch.distributed as dist

from torch_dcp_backport import compat
from torch_dcp_backport.transfer.call import Call
from torch_dcp_backport.transfer.chunks import Key, Piece, capacity_of, chunk_bytes, chunks, moved, slots_of
from torch_dcp_backport.transfer.consensus import open_lane
from torch_dcp_backport.transfer.delivery import Delivery, Relay, Window
from torch_dcp_backport.transfer.errors import spell_broken_off, told
from torch_dcp_backport.transfer.layout import Box, Mesh
from torch_dcp_backport.transfer.plan import Agreement, Want, ready
from torch_dcp_backport.transfer.post import finish, post
from torch_dcp_backport.transfer.staging import Move, Ring, Staging, copy_to, part_of

END = object()


class Reader(Protocol):
    """What the source holds."""

    def piece(self, key: Key, box: Box, shape: tuple[int, ...]) -> torch.Tensor:
        """The part in a box of a tensor that has this shape; any device, any strides.

        Raises:
            RuntimeError: the tensor has another shape by now.
        """

    def release(self) -> None:
        """Nothing of what was read is needed any more."""


class Target(NamedTuple):
    """Where a rank's box of a key goes: a local tensor of the box's shape, written in place."""

    tensor: torch.Tensor
    box: Box


@torch.no_grad()
def scatter(
    call: Call,
    reader: Optional[Reader],
    inventory: Mapping[Key, object],
    targets: Mapping[Key, Target],
    agreement: Agreement,
    *,
    relays: Optional[Mapping[Mesh, Sequence[dist.ProcessGroup]]] = None,
    by_window: bool = False,
) -> None:
    """Fill every rank's targets from the first rank of the call's group.

    Args:
        call: its problems are why this rank could not make its targets.
        reader: on the source, the full tensors.
        inventory: what `call.publish` returned.
        targets: this rank's destinations, one for each key that it wants.
        agreement: what `call.agree` returned.
        relays: the process groups of each dimension of the meshes that this rank is in, where it has told
            `call.agree` that it relays; else the source sends to every replica itself.
        by_window: the source reads a tensor anew every time, so that it goes to every rank before the next
            one is read; the same on every rank.

    Raises:
        RuntimeError: some rank has no room for its targets or its buffers; before anything was written,
            and on every rank if 1 MiB or more moves.
        TransferError: a rank is gone, or the group's timeout is over; says what was under way and what
            was already written.
    """
    delivery = Delivery(call.ranks, call.rank, inventory, agreement, by_window)
    route = Route(call, reader, targets, delivery, relays)
    with call.tally.phase("prepare"):
        staging, call.tally.staging_budget = ready(
            route.allocate,
            agreement.staging_bytes,
            delivery.nbytes,
            call.problems,
            call.title,
            call.group,
            call.cause,
        )
    with call.tally.phase("move"), told(lambda: f"{call.title}: {route.story()}"):
        route.move(staging, call.tally.staging_budget)
    call.tally.tensors += len(targets)
    call.tally.close()


class Route:
    """One scatter call under way: the buffers that it passes through."""

    def __init__(
        self,
        call: Call,
        reader: Optional[Reader],
        targets: Mapping[Key, Target],
        delivery: Delivery,
        relays: Optional[Mapping[Mesh, Sequence[dist.ProcessGroup]]],
    ) -> None:
        self.rank = call.rank
        self.source = call.ranks[0]
        self.group = call.group
        self.reader = reader
        self.targets = targets
        self.delivery = delivery
        self.groups = relays
        self.tally = call.tally
        self.slots = slots_of(call.ranks)
        self.is_alone = len(call.ranks) == 1
        #: The source's own copies, made while it sends.
        self.own: Iterator[int] = iter(())
        #: What is going on: verb and peer, and the pieces.
        self.doing: tuple[str, Sequence[Piece]] = ("starting", ())
        self.written: dict[Key, None] = {}

    def story(self) -> str:
        verb, pieces = self.doing
        return spell_broken_off(self.rank, (verb, (piece.key for piece in pieces)), list(self.written))

    # --- movement ---

    def allocate(self, budget: int) -> Staging:
        nbytes = 0
        if not self.is_alone:
            count, size, common_size = self.sizes(budget)
            nbytes = max(count * size, 2 * common_size)
        self.tally.staging_bytes = nbytes
        return Staging(compat.current_device(self.delivery.agreement.device), nbytes)

    def sizes(self, budget: int) -> tuple[int, int, int]:
        """(buffers for what is this rank's own, bytes of one, bytes of one of the two for common chunks)."""
        count = self.slots if self.rank == self.source else 2
        own, common = self.delivery.largest
        return count, min(own, capacity_of(budget, self.slots)), min(common, capacity_of(budget, 2))

    def move(self, staging: Staging, budget: int) -> None:
        self.tally.meter.expect(self.delivery.expected)
        if not self.is_alone:
            open_lane(staging.device, self.group)
        for window in self.delivery.windows:
            if self.rank == self.source:
                self.own = self.copy_own(window)
            if not self.is_alone:
                self.move_window(staging, budget, window)
            deque(self.own, maxlen=0)
            if self.reader is not None:
                self.reader.release()

    def move_window(self, staging: Staging, budget: int, window: Window) -> None:
        count, size, common_size = self.sizes(budget)
        if window.common:
            common = chunks(self.delivery.boxes_for_all(window.common), capacity_of(budget, 2))
            self.send_common(staging, common, common_size)
        portion = capacity_of(budget, self.slots)
        last = next(reversed(window.ways), None)
        for relay, keys in window.ways.items():
            ring = staging.ring(count, size)
            if self.rank == self.source:
                self.send(staging, ring, portion, relay, keys)
            elif self.delivery.takes_part(relay):
                deque(self.take(staging, ring, portion, relay, keys), maxlen=0)
            if relay is last:
                # The last chunks are still under way.
                deque(self.own, maxlen=0)
            ring.drain()

    def send_common(self, staging: Staging, common: Iterable[Sequence[Piece]], size: int) -> None:
        """What every rank wants whole (DDP, plain modules, replicas): broadcast once."""
        ring = staging.ring(2, size)
        for pieces in common:
            slot = ring.take()
            buffer = slot[: chunk_bytes(pieces)]
            if self.rank == self.source:
                self.pack(staging, buffer, pieces, self.rank)
                self.tally.sent(moved(pieces))
            self.doing = f"broadcasting from rank {self.source}", pieces
            work = dist.broadcast(buffer, src=self.source, group=self.group, async_op=True)
            ring.use(slot, functools.partial(self.arrive, staging, buffer, pieces, [work], (), self.source))
            self.tally.rounds += 1
        ring.drain()

    def send(
        self, staging: Staging, ring: Ring, portion: int, relay: Optional[Relay], keys: Sequence[Key]
    ) -> None:
        """The source's side: a chunk to each receiver in turn, until nobody needs any more."""
        delivery = self.delivery
        waiting = {rank: chunks(delivery.boxes_of(rank, keys), portion) for rank in delivery.receivers(relay)}
        own = self.take(staging, ring, portion, relay, keys) if delivery.takes_part(relay) else iter(())
        busy = True
        while busy:
            busy = False
            for rank in list(waiting):
                pieces = next(waiting[rank], None)
                if pieces is None:
                    del waiting[rank]
                    continue
                busy = True
                slot = ring.take()
                buffer = slot[: chunk_bytes(pieces)]
                self.pack(staging, buffer, pieces, rank)
                self.doing = f"sending to rank {rank}", pieces
                works = post([(dist.isend, buffer, rank)], self.group)
                self.tally.sent(moved(pieces))
                ring.use(slot, functools.partial(self.finish_sending, works, rank, pieces))
            # After the others' chunks: where the source is not the first of its replicas, it waits for one.
            busy |= next(own, END) is not END
            self.tally.rounds += busy
            copied = 0
            while copied < portion:
                copied += next(self.own, portion)

    def finish_sending(self, works: Sequence[Any], rank: int, pieces: Sequence[Piece]) -> None:
        self.doing = f"sending to rank {rank}", pieces
        finish(works)

    def take(
        self, staging: Staging, ring: Ring, portion: int, relay: Optional[Relay], keys: Sequence[Key]
    ) -> Iterator[None]:
        """A rank's own chunks, one per step: from the source or the replica before it, to those behind it."""
        before, behind = self.neighbours(relay)
        for pieces in chunks(self.delivery.boxes_of(self.rank, keys), portion):
            slot = ring.take()
            buffer = slot[: chunk_bytes(pieces)]
            works: Sequence[Any]
            peer = before[1] if before is not None else self.source
            self.doing = f"receiving from rank {peer}", pieces
            if before is not None:
                group, first = before
                works = [dist.broadcast(buffer, src=first, group=group, async_op=True)]
            elif self.rank == self.source:
                self.pack(staging, buffer, pieces, self.rank)
                works = []
            else:
                works = post([(dist.irecv, buffer, self.source)], self.group)
            ring.use(slot, functools.partial(self.arrive, staging, buffer, pieces, works, behind, peer))
            if self.rank != self.source:
                self.tally.rounds += 1
            yield

    def neighbours(
        self, relay: Optional[Relay]
    ) -> tuple[Optional[tuple[dist.ProcessGroup, int]], list[dist.ProcessGroup]]:
        """(the group and rank that own chunks come from, the groups that they are passed on to)."""
        if relay is None:
            return None, []
        assert self.groups is not None, "a relay needs groups"
        groups, (before, behind) = self.groups[relay.mesh], relay.neighbours(self.rank)
        return before and (groups[before[0]], before[1]), [groups[dim] for dim in behind]

    def arrive(
        self,
        staging: Staging,
        buffer: torch.Tensor,
        pieces: Sequence[Piece],
        works: Sequence[Any],
        behind: Sequence[dist.ProcessGroup],
        peer: int,
    ) -> None:
        """A chunk is there: pass it on, and empty it."""
        self.doing = f"receiving from rank {peer}", pieces
        finish(works)
        onward = []
        for group in behind:
            onward.append(dist.broadcast(buffer, src=self.rank, group=group, async_op=True))
            self.tally.sent(moved(pieces))
        if self.rank != self.source:
            staging.unpack(buffer, self.to_targets(pieces))
            self.tally.received(moved(pieces))
        if onward:
            self.doing = "passing on to replicas", pieces
            finish(onward)

    def to_targets(self, pieces: Iterable[Piece]) -> Iterator[Move]:
        for piece in pieces:
            key, target = piece.key, self.targets[piece.key]
            self.written[key] = None
            dtype = self.delivery.dtype_for(key, self.delivery.agreement.mine[key].dtype)
            yield Move(piece, dtype, part_of(target.tensor, target.box, piece.box))

    def pack(self, staging: Staging, buffer: torch.Tensor, pieces: Iterable[Piece], rank: int) -> None:
        staging.pack(buffer, self.from_source(pieces, self.delivery.agreement.of(rank)))

    def from_source(self, pieces: Iterable[Piece], wants: Mapping[Key, Want]) -> Iterator[Move]:
        for piece in pieces:
            dtype = self.delivery.dtype_for(piece.key, wants[piece.key].dtype)
            yield Move(piece, dtype, self.piece(piece.key, piece.box))

    def copy_own(self, window: Window) -> Iterator[int]:
        """The source's own boxes need no traffic: one copy per step, and its bytes."""
        keys = (
            self.targets
            if len(self.delivery.windows) == 1
            else (*window.common, *chain(*window.ways.values()))
        )
        for key in keys:
            target = self.targets.get(key)
            if target is None or not target.box.numel:
                continue
            self.written[key] = None
            copy_to(target.tensor, self.piece(key, target.box))
            yield target.tensor.nbytes

    def piece(self, key: Key, box: Box) -> torch.Tensor:
        assert self.reader is not None, "only the source reads"
        return self.reader.piece(key, box, self.delivery.tensors[key].shape)
