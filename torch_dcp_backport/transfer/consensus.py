"""Small metadata between ranks: one rank's bytes for all, and what all ranks' marks come to.

Knows no tensors but the bytes that it sends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from torch_dcp_backport import compat
from torch_dcp_backport.transfer import roll_call
from torch_dcp_backport.transfer.errors import UNCHANGED, spell, told
from torch_dcp_backport.transfer.groups import Group, comm_device_type, group_ranks
from torch_dcp_backport.transfer.post import finish, post

#: What has up to so many bytes takes one message: a collective's cost is its start.
BLOCK = 32 * 1024
LENGTH = 8
#: What a source may announce: nobody allocates more on its word. A key takes about 100 bytes.
MOST = 2 * 2**30


def broadcast_bytes(data: bytes, group: Group) -> bytes:
    """The first rank's bytes, on every rank of the group."""
    source = group_ranks(group)[0]

    def story() -> str:
        missing = roll_call.absent(group) if dist.get_rank() == source else []
        who = f"; {spell(missing)} did not come" if missing else ""
        return f"{UNCHANGED}; the inventory of rank {source} did not arrive everywhere{who}"

    roll_call.come(group)
    with told(story):
        return _broadcast_bytes(data, source, group)


def _broadcast_bytes(data: bytes, source: int, group: Group) -> bytes:
    device = device_for(group)
    is_source = dist.get_rank() == source
    block = torch.zeros(BLOCK, dtype=torch.uint8, device=device)
    if is_source:
        head = (len(data).to_bytes(LENGTH, "big") + data)[:BLOCK]
        block[: len(head)].copy_(torch.frombuffer(bytearray(head), dtype=torch.uint8))
    dist.broadcast(block, src=source, group=group)
    if not is_source:
        head = block.cpu().numpy().tobytes()
    length = int.from_bytes(head[:LENGTH], "big")
    if length > MOST:
        raise ValueError(f"an inventory of {length} bytes, where {MOST} are the most")
    left = length - (BLOCK - LENGTH)
    if left > 0:
        rest = torch.empty(left, dtype=torch.uint8, device=device)
        if is_source:
            rest.copy_(torch.frombuffer(bytearray(data[-left:]), dtype=torch.uint8))
        dist.broadcast(rest, src=source, group=group)
        if not is_source:
            head += rest.cpu().numpy().tobytes()
    return data if is_source else head[LENGTH : LENGTH + length]


def share_bytes(data: bytes, sizes: Mapping[int, int], group: Group) -> dict[int, bytes]:
    """The bytes of some ranks, on every rank of the group.

    To the first rank, and from there to all at once: the number of messages in a row is the same for any
    number of ranks.

    Args:
        data: this rank's, where it is one of them.
        sizes: the ranks, and how many bytes each has; the same on every rank.
    """
    first, rank, device = group_ranks(group)[0], dist.get_rank(), device_for(group)
    every = torch.empty(sum(sizes.values()), dtype=torch.uint8, device=device)
    parts = dict(zip(sizes, torch.split(every, list(sizes.values()))))
    if rank in parts:
        parts[rank].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    if rank == first:
        finish(post([(dist.irecv, part, sender) for sender, part in parts.items() if sender != first], group))
    elif rank in parts:
        finish(post([(dist.isend, parts[rank], first)], group))
    dist.broadcast(every, src=first, group=group)
    return {sender: part.cpu().numpy().tobytes() for sender, part in parts.items()}


def open_lane(device: torch.device, group: Group) -> None:
    """Every rank's first use of the backend of `device`, where the messages so far went through another one.

    Some backends connect in the first call, which has to be everyone's; point-to-point messages are not.
    """
    if device.type != device_for(group).type:
        dist.broadcast(torch.zeros(1, dtype=torch.uint8, device=device), group_ranks(group)[0], group)


class Mark(NamedTuple):
    """What every rank brings to an agreement, and what comes of it."""

    #: Of what is wanted, 16 bytes; of all ranks: not any rank's, unless it is every rank's.
    digest: bytes
    #: Whether something is wrong; of all ranks: with anyone.
    troubled: bool
    #: Whether code outside torch has a part in it that can fail later; of all ranks: anyone's.
    custom: bool = False
    #: The budget; of all ranks: the smallest.
    staging_bytes: int = 0
    #: A device type of up to 15 letters; of all ranks: nothing if it is not the same for all that have one.
    device: str = ""

    def to_bytes(self) -> bytes:
        budget, device = self.staging_bytes.to_bytes(8, "big"), self.device.encode()[:15].ljust(15, b"\0")
        return b"".join((self.digest, bytes([self.troubled, self.custom]), budget, device))

    @classmethod
    def from_bytes(cls, row: bytes) -> Mark:
        budget, device = int.from_bytes(row[18:26], "big"), row[26:].rstrip(b"\0").decode()
        return cls(row[:16], bool(row[16]), bool(row[17]), budget, device)


MARK_BYTES = len(Mark(bytes(16), False).to_bytes())


def common_mark(marks: Sequence[Mark]) -> Mark:
    digests = {mark.digest for mark in marks}
    devices = {mark.device for mark in marks if mark.device}
    return Mark(
        digests.pop() if len(digests) == 1 else bytes(16),
        any(mark.troubled for mark in marks),
        any(mark.custom for mark in marks),
        min(mark.staging_bytes for mark in marks),
        devices.pop() if len(devices) == 1 else "",
    )


def agree_on_mark(mark: Mark, group: Group, so_far: str = UNCHANGED) -> Mark:
    """What all ranks' marks come to, on every rank; `so_far` is said where no agreement comes about.

    To the first rank and back: an all-gather takes as many steps as there are ranks on some backends.
    """
    ranks = group_ranks(group)

    def story() -> str:
        if dist.get_rank() == ranks[0]:
            return f"{so_far}; no agreement with {spell(roll_call.absent(group) or ranks[1:])}"
        return f"{so_far}; no agreement with {spell(ranks[:1])}, which may be waiting for another rank itself"

    roll_call.come(group)
    with told(story):
        common = _agree_on_mark(mark, ranks, group)
    roll_call.agreed(group)
    return common


def _agree_on_mark(mark: Mark, ranks: Sequence[int], group: Group) -> Mark:
    rank, first, device = dist.get_rank(), ranks[0], device_for(group)
    if rank != first:
        own, common = tensor_of(mark, device), torch.empty(MARK_BYTES, dtype=torch.uint8, device=device)
        finish(post([(dist.isend, own, first), (dist.irecv, common, first)], group))
        return mark_of(common)
    others = [torch.empty(MARK_BYTES, dtype=torch.uint8, device=device) for _ in ranks[1:]]
    finish(post([(dist.irecv, buffer, other) for buffer, other in zip(others, ranks[1:])], group))
    result = common_mark([mark, *map(mark_of, others)])
    buffer = tensor_of(result, device)
    finish(post([(dist.isend, buffer, other) for other in ranks[1:]], group))
    return result


def tensor_of(mark: Mark, device: torch.device) -> torch.Tensor:
    return torch.frombuffer(bytearray(mark.to_bytes()), dtype=torch.uint8).to(device)


def mark_of(buffer: torch.Tensor) -> Mark:
    return Mark.from_bytes(bytes(buffer.tolist()))


def device_for(group: Group) -> torch.device:
    return compat.current_device(comm_device_type(group, "cpu"))
