"""Messages of bytes within a process group, and the roll call: the ranks that have reached an agreement.

Knows no tensors but the bytes that it sends.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from torch_dcp_backport import compat
from torch_dcp_backport.transfer._src.errors import UNCHANGED, as_transfer_error, spell
from torch_dcp_backport.transfer._src.groups import (
    Group,
    backend_of,
    comm_device_type,
    device_in,
    group_ranks,
    info_of,
    is_silent,
)
from torch_dcp_backport.transfer._src.lanes import is_collective

#: Up to so many bytes take one message: a collective's cost is its start.
BLOCK = 32 * 1024
LENGTH = 8
#: A source may announce so many bytes: no rank allocates more on its word. A key takes about 100.
MOST = 2 * 2**30

#: Bytes of each rank in one gathering of messages: most are shorter.
HEAD = 1024
#: Bytes of all ranks in one gathering of what is left of longer ones.
MOST_GATHERED = 16 * 2**20

#: (`dist.isend` or `dist.irecv`, the buffer, the global rank of the peer)
Message = tuple[Callable[..., Any], torch.Tensor, int]


def post(messages: Sequence[Message], group: Group) -> Sequence[Any]:
    """Start point-to-point messages.

    Always as a batch: NCCL would make a communicator for each pair of ranks otherwise.
    """
    if not messages:
        return ()
    works: Sequence[Any] = dist.batch_isend_irecv(
        [dist.P2POp(operation, buffer, peer, group) for operation, buffer, peer in messages]
    )
    return works


def finish(works: Sequence[Any]) -> None:
    for work in works:
        work.wait()


def broadcast_bytes(data: bytes, group: Group) -> bytes:
    """The first rank's bytes, on every rank of the group."""
    source = group_ranks(group)[0]

    def failure_text() -> str:
        missing = absent(group) if dist.get_rank() == source else []
        who = f"; {spell(missing)} did not come" if missing else ""
        return f"{UNCHANGED}; the inventory of rank {source} did not arrive everywhere{who}"

    check_in(group)
    with as_transfer_error(failure_text):
        return broadcast_from_first(data, group)


def broadcast_from_first(data: bytes, group: Group) -> bytes:
    """As `broadcast_bytes`, within another agreement: its error is the backend's own."""
    if is_silent(group):
        return data
    source, device = group_ranks(group)[0], device_for(group)
    is_source = dist.get_rank() == source
    block = torch.zeros(BLOCK, dtype=torch.uint8, device=device)
    if is_source:
        head = (len(data).to_bytes(LENGTH, "big") + data)[:BLOCK]
        block[: len(head)].copy_(tensor_of(head))
    dist.broadcast(block, src=source, group=group)
    received = head if is_source else bytes_of(block)
    length = int.from_bytes(received[:LENGTH], "big")
    if length > MOST:
        raise ValueError(f"an inventory of {length} bytes, where {MOST} are the most")
    left = length - (BLOCK - LENGTH)
    if left > 0:
        rest = torch.empty(left, dtype=torch.uint8, device=device)
        if is_source:
            rest.copy_(tensor_of(data[-left:]))
        dist.broadcast(rest, src=source, group=group)
        if not is_source:
            received += bytes_of(rest)
    return data if is_source else received[LENGTH : LENGTH + length]


def share_bytes(data: bytes, sizes: Mapping[int, int], group: Group) -> dict[int, bytes]:
    """The bytes of some ranks, on every rank of the group.

    To the first rank, and from there to all at once: the number of messages in a row is the same for any
    number of ranks. Where collectives are better, from each sender to all.

    Args:
        data: this rank's bytes, where it is one of the senders.
        sizes: the senders, and how many bytes each has; the same on every rank.
    """
    if is_silent(group):
        return dict.fromkeys(sizes, data)
    first, rank, device = group_ranks(group)[0], dist.get_rank(), device_for(group)
    buffer = torch.empty(sum(sizes.values()), dtype=torch.uint8, device=device)
    parts = dict(zip(sizes, torch.split(buffer, list(sizes.values()))))
    if rank in parts:
        parts[rank].copy_(tensor_of(data))
    if takes_collectives(group):
        works = [
            dist.broadcast(part, sender, group, async_op=True)
            for sender, part in parts.items()
            if part.numel()
        ]
        finish(works)
        return {sender: bytes_of(part) for sender, part in parts.items()}
    if rank == first:
        finish(post([(dist.irecv, part, sender) for sender, part in parts.items() if sender != first], group))
    elif rank in parts:
        finish(post([(dist.isend, parts[rank], first)], group))
    dist.broadcast(buffer, src=first, group=group)
    return {sender: bytes_of(part) for sender, part in parts.items()}


def gather_rows(row: torch.Tensor, group: Group) -> torch.Tensor:
    """Every rank's row of bytes, on every rank, in the order of the group; rows have one length.

    Args:
        row: on the device of the group's messages.
    """
    ranks = group_ranks(group)
    rows = torch.empty(len(ranks) * row.numel(), dtype=torch.uint8, device=row.device)
    compat.all_gather_rows(rows, row, group)
    return rows.view(len(ranks), -1)


def gather_bytes(data: bytes, group: Group, is_kept: bool = True) -> dict[int, bytes]:
    """Every rank's bytes, of any length, on every rank: global rank -> bytes.

    Args:
        is_kept: whether this rank needs them: one that does not holds no more than one gathering at a time.
    """
    ranks = group_ranks(group)
    if is_silent(group):
        return dict.fromkeys(ranks, data)
    device = device_for(group)

    def rows_of(part: bytes, nbytes: int) -> list[bytes]:
        row = tensor_of(part.ljust(nbytes, b"\0")).to(device)
        rows = gather_rows(row, group)
        return [bytes_of(received) for received in (rows.cpu() if is_kept else ())]

    head = len(data).to_bytes(LENGTH, "big") + data[: HEAD - LENGTH]
    heads = gather_rows(tensor_of(head.ljust(HEAD, b"\0")).to(device), group)
    lengths = [int.from_bytes(bytes_of(row), "big") for row in heads[:, :LENGTH].cpu()]
    received = [bytearray(bytes_of(row)) for row in (heads[:, LENGTH:].cpu() if is_kept else ())]
    longest = max(lengths)
    if longest > MOST:
        raise ValueError(f"a message of {longest} bytes, where {MOST} are the most")
    portion = max(MOST_GATHERED // len(ranks), HEAD)
    for start in range(HEAD - LENGTH, longest, portion):
        nbytes = min(portion, longest - start)
        for whole, row in zip(received, rows_of(data[start : start + nbytes], nbytes)):
            whole += row
    # Not kept, there is nothing in it.
    return {rank: bytes(whole[:length]) for rank, whole, length in zip(ranks, received, lengths)}


def gather_objects(value: object, group: Group) -> list[Any]:
    """Every rank's value, on every rank, in the order of the group; pickled, as torch's own function does.

    torch's takes the current device, which another rank may have, too.
    """
    if takes_collectives(group):
        return [pickle.loads(data) for data in gather_bytes(pickle.dumps(value), group).values()]
    values: list[Any] = [None] * len(group_ranks(group))
    dist.all_gather_object(values, value, group=group)
    return values


def takes_collectives(group: Group) -> bool:
    """Whether small messages of a group are collectives."""
    return is_collective(backend_of(group, comm_device_type(group, "cpu")))


def open_lane(device: torch.device, group: Group) -> None:
    """Use the backend of `device` for the first time, on every rank, where messages so far took another one.

    Some backends connect in the first call, which every rank must make; point-to-point messages are not.
    """
    if device.type != device_for(group).type:
        dist.broadcast(torch.zeros(1, dtype=torch.uint8, device=device), group_ranks(group)[0], group)


def tensor_of(data: bytes) -> torch.Tensor:
    if not data:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().numpy().tobytes()


def device_for(group: Group) -> torch.device:
    """The device of small messages."""
    return device_in(group, comm_device_type(group, "cpu"))


# --- the roll call: an entry in the store that no rank waits for. It never raises; errors' texts have it. ---


@dataclass
class Roll:
    """The agreements of the groups with the same ranks."""

    ranks: tuple[int, ...]
    #: Agreements that succeeded; the same number on ranks that are in step.
    count: int = 0
    #: The count in this rank's entry.
    checked_in: int = -1

    def entry(self, rank: int) -> str:
        return f"torch_dcp_backport/{hash(self.ranks)}/{rank}"


#: By the store, too: a process group that was made anew begins anew.
_rolls: dict[tuple[int, tuple[int, ...]], Roll] = {}


def check_in(group: Group) -> None:
    """Note that this rank has reached the next agreement."""
    with contextlib.suppress(Exception):
        roll = _roll_of(group)
        if roll.checked_in != roll.count:
            roll.checked_in = roll.count
            compat.default_store().set(roll.entry(dist.get_rank()), str(roll.count))


def count_agreement(group: Group) -> None:
    with contextlib.suppress(Exception):
        _roll_of(group).count += 1


def absent(group: Group) -> list[int]:
    """The group's ranks that have not checked in; none where that cannot be found out.

    Ranks that are further are not among them: they have their answers, and may be in the next agreement.
    """
    missing: list[int] = []
    with contextlib.suppress(Exception):
        roll, store = _roll_of(group), compat.default_store()
        entries = {rank: roll.entry(rank) for rank in roll.ranks if rank != dist.get_rank()}
        missing = [
            rank
            for rank, entry in entries.items()
            if not store.check([entry]) or int(store.get(entry)) < roll.count
        ]
    return missing


def _roll_of(group: Group) -> Roll:
    info = info_of(group)
    if info.roll is None:
        key = id(compat.default_store()), info.ranks
        info.roll = _rolls.setdefault(key, Roll(info.ranks))
    roll: Roll = info.roll
    return roll
