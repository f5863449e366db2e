"""From the source rank to every rank's shards, in bounded chunks.

Where messages between two ranks are cheap, each rank receives its own boxes once: from the source, or from
the first holder of its box, which passes it on to the replicas. What every rank wants whole is broadcast.

On an accelerator's backend all tensors are: each rank keeps its parts. The source packs each tensor once, not
once for each rank, and no rank has a peer, for which the backend would keep buffers.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, Optional, Protocol

import torch
import torch.distributed as dist

from torch_dcp_backport.transfer._src.call import Call
from torch_dcp_backport.transfer._src.chunks import (
    Key,
    KeyedBox,
    Piece,
    capacity_of,
    chunk_bytes,
    chunks,
    collective_capacity,
    in_turn,
    moved,
    slots_of,
)
from torch_dcp_backport.transfer._src.delivery import Delivery, Relay, Window
from torch_dcp_backport.transfer._src.engine import Engine
from torch_dcp_backport.transfer._src.groups import backend_of, source_of
from torch_dcp_backport.transfer._src.lanes import Lane, lane_of
from torch_dcp_backport.transfer._src.layout import Box, Mesh
from torch_dcp_backport.transfer._src.plan import Agreement

#: Of the Python objects that say where a tensor goes, on a rank: with thousands of small tensors as much as
#: the buffers. The staging budget is for both.
PLAN_BYTES = 1536

RelayGroups = Mapping[Mesh, Sequence[dist.ProcessGroup]]


class Reader(Protocol):
    """The full tensors of the source."""

    def piece(self, key: Key, box: Box, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the part in a box of a tensor; any device, any strides.

        Args:
            key: the key of the tensor.
            box: the part.
            shape: the shape that the tensor had in the inventory.

        Raises:
            RuntimeError: the tensor has another shape by now.
        """

    def release(self) -> None:
        """Drop what was read: nothing of it is needed any more."""


class Offer(NamedTuple):
    """The source's tensors, as this rank knows them.

    Args:
        inventory: the result of `call.publish`.
        reader: on the source, it returns the values; None on other ranks.
        by_window: whether the source reads a tensor anew every time, so that it goes to every rank before the
            next one is read; the same on every rank.
    """

    inventory: Mapping[Key, object]
    reader: Optional[Reader] = None
    by_window: bool = False


class Target(NamedTuple):
    """The destination of a rank's box of a key.

    Args:
        tensor: the local tensor, written in place; it has the shape of the box.
        box: this rank's box of the global tensor.
    """

    tensor: torch.Tensor
    box: Box


@torch.no_grad()
def scatter(
    call: Call,
    offer: Offer,
    targets: Mapping[Key, Target],
    agreement: Agreement,
    relay_groups: Optional[RelayGroups] = None,
) -> None:
    """Fill every rank's targets from the first rank of the call's group. Collective.

    Args:
        call: the call; its problems are why this rank could not make its targets.
        offer: the source's inventory, and on the source the reader of its values.
        targets: this rank's destinations, one for each key that it wants.
        agreement: the result of `call.agree_on_wants`.
        relay_groups: the process groups of each dimension of the meshes that this rank is in, where its terms
            say that it relays; None where the source sends to every replica itself.

    Raises:
        RuntimeError: some rank has no room for its targets or its buffers; before anything was written,
            and on every rank if 1 MiB or more moves.
        TransferError: a rank is gone, or the group's timeout is over; says what was under way and what
            was already written.

    Example:
        Within a process group:

        >>> import torch
        >>> from torch_dcp_backport.transfer import Box, Call, Target, TensorInfo, Want, layout_of, scatter
        >>> from torch_dcp_backport.transfer import Offer
        >>> class Reader:
        ...     def piece(self, key, box, shape):
        ...         return torch.arange(4.0)[box.within(Box((0,), shape))]
        ...     def release(self):
        ...         pass
        >>> local = torch.empty(4)
        >>> layout = layout_of(local)
        >>> with Call("cannot load", "scatter") as call:
        ...     inventory = call.publish({"w": TensorInfo((4,), torch.float32)})
        ...     agreement = call.agree_on_wants({"w": Want(layout, local.dtype)})
        ...     targets = {"w": Target(local, layout.box(call.rank))}
        ...     scatter(call, Offer(inventory, Reader()), targets, agreement)
        >>> local.tolist()
        [0.0, 1.0, 2.0, 3.0]
    """
    engine = Scatter(call, offer, targets, agreement, relay_groups)
    engine.run(engine.delivery.nbytes)
    call.tally.tensors += len(targets)
    call.tally.close()


class Scatter(Engine):
    """One scatter under way."""

    def __init__(
        self,
        call: Call,
        offer: Offer,
        targets: Mapping[Key, Target],
        agreement: Agreement,
        relay_groups: Optional[RelayGroups],
    ) -> None:
        super().__init__(call, agreement, {}, targets)
        self.reader = offer.reader
        lane = lane_of(backend_of(call.group, agreement.device), senders=1)
        self.is_collective = lane is Lane.BROADCAST and len(call.ranks) > 1
        self.delivery = Delivery(call.ranks, call.rank, offer.inventory, agreement, offer.by_window, lane)
        #: Keys whose targets the source fills from the chunks: they are on another device than what it reads.
        self.crossing: set[Key] = set()
        self.relay_groups = relay_groups
        self.source = source_of(call.group)
        self.is_source = call.rank == self.source
        self.slots = slots_of(call.ranks)

    def source_part(self, key: Key, box: Box) -> torch.Tensor:
        assert self.reader is not None, "only the source reads"
        return self.reader.piece(key, box, self.delivery.tensors[key].shape)

    def pack(self, buffer: torch.Tensor, pieces: Iterable[Piece]) -> None:
        if not self.is_collective:
            super().pack(buffer, pieces)
            return
        parts = [(piece, self.read(piece.key, piece.box)) for piece in pieces]
        for piece, part in parts:
            target = self.targets.get(piece.key)
            if target is not None and target[0].device == buffer.device != part.device:
                self.crossing.add(piece.key)
        self.staging.pack(buffer, parts)

    def unpack(self, buffer: torch.Tensor, pieces: Sequence[Piece]) -> None:
        # The source copies its own boxes.
        if not self.is_source:
            super().unpack(buffer, pieces)

    def keep(self, buffer: torch.Tensor, pieces: Sequence[Piece]) -> None:
        if not self.is_collective:
            self.unpack(buffer, pieces)
            return
        self.keep_parts(buffer, pieces)
        if not self.is_source:
            self.tally.received(moved(pieces))

    def kept_boxes(self, key: Key) -> Sequence[Box]:
        """As the engine's. The source's own come from chunks where they would cross to its device once more.

        Its others may share memory with what it still has to read.
        """
        if key not in self.targets or (self.is_source and key not in self.crossing):
            return ()
        return (self.targets[key][1],)

    def staging_bytes(self, budget: int) -> int:
        if len(self.ranks) == 1:
            return 0
        count, size, common_size = self.sizes(budget)
        return max(count * size, 2 * common_size)

    def sizes(self, budget: int) -> tuple[int, int, int]:
        """(buffers of own chunks, bytes of such a buffer, bytes of one of the two for common chunks)."""
        own, common = self.delivery.largest
        count = self.slots if self.is_source else 2
        return count, min(own, self.capacity(budget, self.slots)), min(common, self.capacity_for_all(budget))

    def capacity(self, budget: int, buffers: int) -> int:
        """Bytes of one of so many buffers, beside the plans of all tensors; the same on every rank."""
        return capacity_of(budget - self.plan_bytes(budget), buffers)

    def plan_bytes(self, budget: int) -> int:
        return min(PLAN_BYTES * len(self.delivery.tensors), budget // 2)

    def capacity_for_all(self, budget: int) -> int:
        """Bytes of one of the two buffers of chunks that go to all."""
        if self.is_collective:
            return collective_capacity(budget - self.plan_bytes(budget), 2)
        return self.capacity(budget, 2)

    def move(self, budget: int) -> None:
        self.tally.meter.expect(self.delivery.expected)
        for window in self.delivery.windows:
            own = self.own_boxes(window)
            if len(self.ranks) > 1:
                self.move_window(window, own, budget)
            self.attempt(functools.partial(self.copy_own, own))
            if self.reader is not None:
                self.reader.release()
        self.conclude()

    def own_boxes(self, window: Window) -> Iterator[KeyedBox]:
        """The source's own boxes, which need no traffic."""
        for key in chain(window.common, *window.ways.values()) if self.is_source else ():
            if key in self.targets:
                tensor, box = self.targets[key]
                if box.numel and key not in self.crossing:
                    yield key, box, tensor.dtype

    def move_window(self, window: Window, own: Iterator[KeyedBox], budget: int) -> None:
        count, size, common_size = self.sizes(budget)
        if window.common:
            self.ring = self.staging.ring(2, common_size)
            for pieces in self.delivery.chunks_for_all(window.common, self.capacity_for_all(budget)):
                self.broadcast(self.source, pieces)
            self.ring.drain()
        last = next(reversed(window.ways), None)
        for relay, keys in window.ways.items():
            self.ring = self.staging.ring(count, size)
            self.move_along(relay, keys, own, self.capacity(budget, self.slots))
            if relay is last:
                # The last chunks are still under way.
                self.copy_own(own)
            self.ring.drain()

    def move_along(
        self, relay: Optional[Relay], keys: Sequence[Key], own: Iterator[KeyedBox], portion: int
    ) -> None:
        """Send a chunk to each receiver in turn, on the source, and take this rank's own chunks."""
        delivery = self.delivery
        receivers = delivery.receivers(relay) if self.is_source else []
        streams = {rank: chunks(delivery.boxes_of(rank, keys), portion) for rank in receivers}
        if delivery.takes_part(relay):
            # Behind the other ranks': a source that is not the first of its replicas waits for one of them.
            streams[self.rank] = chunks(delivery.boxes_of(self.rank, keys), portion)
        before, behind = self.neighbours(relay)
        rounds = 0
        for number, rank, pieces in in_turn(streams):
            if 0 < rounds < number:
                self.copy_own(own, portion)
            rounds = number
            if rank == self.rank:
                self.take(pieces, before, behind)
            else:
                self.send(rank, pieces)
        self.copy_own(own, portion)
        self.tally.rounds += rounds

    def take(
        self,
        pieces: Sequence[Piece],
        before: Optional[tuple[dist.ProcessGroup, int]],
        behind: Sequence[dist.ProcessGroup],
    ) -> None:
        """An own chunk: from the source or the replica before this one, to the replicas behind it."""
        peer = before[1] if before is not None else self.source
        buffer = self.ring.take(chunk_bytes(pieces))
        self.doing = f"receiving from rank {peer}", pieces
        works: Sequence[Any] = ()
        if before is not None:
            works = [dist.broadcast(buffer, src=peer, group=before[0], async_op=True)]
        elif self.is_source:
            self.pack(buffer, pieces)
        else:
            works = self.post([(dist.irecv, buffer, peer)])
        self.ring.use(functools.partial(self.arrive, buffer, pieces, works, peer, behind))

    def neighbours(
        self, relay: Optional[Relay]
    ) -> tuple[Optional[tuple[dist.ProcessGroup, int]], list[dist.ProcessGroup]]:
        """(group and rank that own chunks come from, groups along which they are passed on)."""
        if relay is None or self.rank not in relay.mesh.coordinates:
            return None, []
        assert self.relay_groups is not None, "a relay needs groups"
        groups, (before, behind) = self.relay_groups[relay.mesh], relay.neighbours(self.rank)
        return before and (groups[before[0]], before[1]), [groups[dim] for dim in behind]
