"""One message from every rank to the first one, and one back to each: bytes of any length.

A rank that is gone costs the others no hang: the first rank hears of it and can still answer the rest.
"""

from __future__ import annotations

import pickle
from typing import Any, NamedTuple, Optional

import torch
import torch.distributed as dist

from torch_dcp_backport.transfer._src.groups import Group, group_ranks, source_of
from torch_dcp_backport.transfer._src.wire import (
    LENGTH,
    MOST,
    absent,
    broadcast_from_first,
    bytes_of,
    check_in,
    count_agreement,
    device_for,
    finish,
    gather_bytes,
    post,
    takes_collectives,
    tensor_of,
)


class Heard(NamedTuple):
    """The messages that the first rank received, by global rank, and the ranks that are gone or late."""

    messages: dict[int, bytes]
    gone: tuple[int, ...] = ()


def ask(data: bytes, group: Group) -> Optional[Heard]:
    """Send this rank's bytes to the first rank of the group, which gets everyone's; None on the others.

    Raises:
        RuntimeError: the first rank is gone.
    """
    ranks, rank = group_ranks(group), dist.get_rank()
    check_in(group)
    if takes_collectives(group):
        # A rank that is gone leaves all to the group's timeout: no part of a collective fails alone.
        messages = gather_bytes(data, group)
        return Heard(messages) if rank == source_of(group) else None
    if rank != ranks[0]:
        _send(data, ranks[0], group)
        return None
    others = ranks[1:]
    sizes = _receive(dict.fromkeys(others, LENGTH), group)
    lengths = {other: _length(message) for other, message in sizes.items()}
    messages = _receive(lengths, group)
    messages[rank] = data
    silent = [other for other in others if other not in messages]
    # After a timeout gloo closes all connections, also those of ranks that are not late.
    late = set(absent(group)).intersection(silent) if silent else set()
    return Heard(messages, tuple(other for other in silent if other in late or not late))


def answer(answers: Optional[dict[int, bytes]], group: Group) -> bytes:
    """Send each rank its bytes from the first rank, which passes all of them; the others pass None.

    Raises:
        RuntimeError: the first rank is gone.
    """
    ranks, rank = group_ranks(group), dist.get_rank()
    if takes_collectives(group):
        own = answer_to_all(answers, group)
        count_agreement(group)
        return own
    if rank != ranks[0]:
        size = _receive({ranks[0]: LENGTH}, group).get(ranks[0])
        message = None if size is None else _receive({ranks[0]: _length(size)}, group).get(ranks[0])
        if message is None:
            raise RuntimeError(f"no answer from rank {ranks[0]}")
        count_agreement(group)
        return message
    assert answers is not None, "the first rank answers"
    for other in ranks[1:]:
        if other in answers:
            try:
                _send(answers[other], other, group)
            except RuntimeError:
                # It is gone; the next question tells. The other ranks wait for their answers.
                continue
    count_agreement(group)
    return answers[rank]


def answer_to_all(answers: Optional[dict[int, bytes]], group: Group) -> bytes:
    """As `answer`, in one broadcast: equal answers travel once."""
    rank, data = dist.get_rank(), b""
    if answers is not None:
        distinct = dict.fromkeys(answers.values())
        number = {message: index for index, message in enumerate(distinct)}
        data = pickle.dumps((list(distinct), {other: number[text] for other, text in answers.items()}))
    messages, number_by_rank = pickle.loads(broadcast_from_first(data, group))
    return bytes(messages[number_by_rank[rank]])


def _length(message: bytes) -> int:
    length = int.from_bytes(message, "big")
    if length > MOST:
        raise ValueError(f"a message of {length} bytes, where {MOST} are the most")
    return length


def _send(data: bytes, peer: int, group: Group) -> None:
    device = device_for(group)
    for part in (len(data).to_bytes(LENGTH, "big"), data):
        if part:
            buffer = tensor_of(part).to(device)
            finish(post([(dist.isend, buffer, peer)], group))


def _receive(lengths: dict[int, int], group: Group) -> dict[int, bytes]:
    """So many bytes from each of some ranks; without those that are gone."""
    device = device_for(group)
    buffers = {
        peer: torch.empty(length, dtype=torch.uint8, device=device) for peer, length in lengths.items()
    }
    awaited = [(dist.irecv, buffer, peer) for peer, buffer in buffers.items() if buffer.numel()]
    gone: set[int] = set()
    works: list[tuple[int, Any]] = []
    for message in awaited:
        # One by one: where a peer is gone, some backends raise here, for it alone.
        try:
            works += [(message[2], work) for work in post([message], group)]
        except RuntimeError:
            gone.add(message[2])
    for peer, work in works:
        try:
            work.wait()
        except RuntimeError:
            gone.add(peer)
    return {peer: bytes_of(buffer) for peer, buffer in buffers.items() if peer not in gone}
