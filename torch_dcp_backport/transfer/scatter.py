"""From the source rank to everyone's shards: each rank receives its own boxes, in bounded chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Optional

import torch
import torch.distributed as dist

from torch_dcp_backport import compat
from torch_dcp_backport.transfer.layout import Box, whole
from torch_dcp_backport.transfer.plan import (
    Agreement,
    Group,
    Key,
    Piece,
    TensorInfo,
    broadcast_object,
    capacity_of,
    chunk_bytes,
    chunks,
    round_sizes,
)
from torch_dcp_backport.transfer.report import Tally
from torch_dcp_backport.transfer.staging import Staging, part_of, view_of

Read = Callable[[Key], torch.Tensor]


class Target(NamedTuple):
    """Where a rank's box of a key goes: a local tensor of the box's shape, written in place."""

    tensor: torch.Tensor
    box: Box


def scatter(
    read: Optional[Read],
    inventory: Mapping[Key, object],
    targets: Mapping[Key, Target],
    agreement: Agreement,
    *,
    group: Group = None,
    tally: Optional[Tally] = None,
) -> None:
    """Fill every rank's targets from the group's first rank.

    Args:
        read: on the source, the full tensor of a key (any device, any strides; only sliced).
        inventory: what `publish` returned.
        targets: this rank's destinations, one for each key that it wants.
        agreement: what `agree` returned.
        group: the process group; its first rank is the source. None is the default group.
        tally: of the phases so far; a new one where there were none.
    """
    tally = tally if tally is not None else Tally()
    route = Route(read, inventory, targets, agreement, group, tally)
    with tally.phase("move"):
        capacity = capacity_of(agreement.staging_bytes, len(route.ranks))
        kind, sizes = route.schedule(capacity)
        common = route.common_chunks(capacity)
        each = max(sizes, default=0) * (len(route.ranks) + 1 if route.rank == route.source else 1)
        staging = Staging(compat.current_device(kind), max([each, *map(chunk_bytes, common)]))
        tally.staging_bytes = staging.nbytes
        route.send_common(staging, common)
        route.send_own(staging, sizes, capacity)
        del staging  # needed no more; on the meta device the source's own shards take memory only now
        route.copy_own()
    tally.tensors = len(targets)
    tally.close("scatter", agreement.staging_bytes)


class Route:
    """One scatter call: who gets what, and the buffers it passes through."""

    def __init__(
        self,
        read: Optional[Read],
        inventory: Mapping[Key, object],
        targets: Mapping[Key, Target],
        agreement: Agreement,
        group: Group,
        tally: Tally,
    ) -> None:
        self.ranks = compat.group_ranks(group)
        self.rank = dist.get_rank()
        self.source = self.ranks[0]
        self.group = group
        self.read = read
        self.targets = targets
        self.agreement = agreement
        self.tally = tally
        self.tensors = {key: info for key, info in inventory.items() if isinstance(info, TensorInfo)}
        self.common = {key for key in self.tensors if self.wanted_whole_by_all(key)}

    def wanted_whole_by_all(self, key: Key) -> bool:
        if self.agreement.by_rank is None:
            want = self.agreement.mine.get(key)
            return want is not None and want.layout.held_whole_by(self.ranks)
        wants = [self.agreement.of(rank).get(key) for rank in self.ranks]
        return all(want is not None and want.layout.held_whole_by(self.ranks) for want in wants)

    def boxes_of(self, rank: int) -> Iterator[tuple[Key, Box, int]]:
        """What only the source can give to `rank`, apart from what everyone gets."""
        wants = self.agreement.of(rank)
        for key, info in self.tensors.items():
            want = wants.get(key)
            box = want.layout.box(rank) if want is not None and key not in self.common else None
            if box is not None:
                yield key, box, info.dtype.itemsize

    def schedule(self, capacity: int) -> tuple[str, list[int]]:
        """The source's choice for all: the device type of the buffers, and each round's bytes per rank."""
        choice = None
        if self.rank == self.source:
            kinds = {target.tensor.device.type for target in self.targets.values()}
            kind = compat.comm_device_type(self.group, kinds.pop() if len(kinds) == 1 else "cpu")
            choice = kind, round_sizes((self.boxes_of(rank) for rank in self.ranks[1:]), capacity)
        kind, sizes = broadcast_object(choice, self.group)
        return kind, sizes

    def copy_own(self) -> None:
        """The source's own boxes need no traffic."""
        if self.rank == self.source:
            for key, target in self.targets.items():
                target.tensor.copy_(self.full(key)[target.box.within(whole(self.tensors[key].shape))])

    def common_chunks(self, capacity: int) -> list[list[Piece]]:
        """What every rank wants whole (DDP, plain modules, replicas)."""
        boxes = (
            (key, whole(info.shape), info.dtype.itemsize)
            for key, info in self.tensors.items()
            if key in self.common
        )
        return list(chunks(boxes, capacity))

    def send_common(self, staging: Staging, common: Iterable[Sequence[Piece]]) -> None:
        """Broadcast once."""
        for pieces in common:
            (buffer,) = staging.buffers(1, chunk_bytes(pieces))
            if self.rank == self.source:
                self.pack(buffer, pieces)
            dist.broadcast(buffer, src=self.source, group=self.group)
            self.tally.rounds += 1
            if self.rank != self.source:
                self.unpack(buffer, pieces)

    def send_own(self, staging: Staging, sizes: Sequence[int], capacity: int) -> None:
        """Everything else goes to its rank alone, one part per rank in each round."""
        if self.rank != self.source:
            stream = chunks(self.boxes_of(self.rank), capacity)
            for size in sizes:
                (own,) = staging.buffers(1, size)
                dist.scatter(own, None, src=self.source, group=self.group)
                self.tally.rounds += 1
                self.unpack(own, next(stream, []))
            return
        streams = [chunks(self.boxes_of(rank), capacity) for rank in self.ranks[1:]]
        for size in sizes:
            # The source's own part is never filled; scatter wants one all the same.
            own, *parts = staging.buffers(len(self.ranks) + 1, size)
            for part, stream in zip(parts[1:], streams):
                self.pack(part, next(stream, []))
            dist.scatter(own, parts, src=self.source, group=self.group)
            self.tally.rounds += 1

    def full(self, key: Key) -> torch.Tensor:
        assert self.read is not None, "only the source reads"
        return self.read(key).detach()

    def pack(self, buffer: torch.Tensor, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            info = self.tensors[piece.key]
            source = part_of(self.full(piece.key), whole(info.shape), piece)
            view_of(buffer, piece, info.dtype).copy_(source)
            self.tally.bytes_sent += piece.nbytes

    def unpack(self, buffer: torch.Tensor, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            target = self.targets[piece.key]
            part_of(target.tensor, target.box, piece).copy_(
                view_of(buffer, piece, self.tensors[piece.key].dtype)
            )
            self.tally.bytes_received += piece.nbytes
