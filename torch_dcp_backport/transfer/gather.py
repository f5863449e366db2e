"""From everyone's shards to whole tensors on one rank or on all, in bounded chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple, Optional

import torch
import torch.distributed as dist

from torch_dcp_backport import compat
from torch_dcp_backport.transfer.errors import Problem, spell_key
from torch_dcp_backport.transfer.layout import Box, Layout, whole
from torch_dcp_backport.transfer.plan import (
    Group,
    Key,
    Piece,
    Want,
    agree,
    capacity_of,
    chunks,
    misfit,
    round_sizes,
)
from torch_dcp_backport.transfer.report import Tally
from torch_dcp_backport.transfer.staging import Staging, part_of, view_of


class Held(NamedTuple):
    """What a rank holds of a tensor: the local tensor of its box in a layout."""

    tensor: torch.Tensor
    layout: Layout


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
    """
    tally = Tally()
    ranks, rank = compat.group_ranks(group), dist.get_rank()
    wants = {key: Want(one.layout, one.tensor.dtype) for key, one in held.items()}
    with tally.phase("agree"):
        budget = agree_on_all(held, wants, group, staging_bytes)
    with tally.phase("move"):
        receives = to is None or to == rank
        out = {key: make(key) for key in held} if receives else {}
        capacity = capacity_of(budget, len(ranks))
        # Every rank derives every sender's chunks, so that all agree on the rounds without asking.
        sizes = round_sizes((boxes_of(wants, sender) for sender in ranks), capacity)
        streams = [chunks(boxes_of(wants, sender), capacity) for sender in ranks]
        count = len(ranks) + 1 if receives else 1
        staging = Staging(common_device(held, group), count * max(sizes, default=0))
        tally.staging_bytes = staging.nbytes
        for size in sizes:
            parts = [next(stream, []) for stream in streams]
            mine, *others = staging.buffers(count, size)
            give(mine, parts[ranks.index(rank)], held, tally)
            if to is None:
                dist.all_gather(others, mine, group=group)
            else:
                dist.gather(mine, others if receives else None, dst=to, group=group)
            tally.rounds += 1
            for buffer, pieces in zip(others, parts):
                take(buffer, pieces, out, tally)
    tally.tensors = len(held)
    tally.close("gather", budget)
    return out


def agree_on_all(
    held: Mapping[Key, Held], wants: Mapping[Key, Want], group: Group, staging_bytes: Optional[int]
) -> int:
    """The staging budget, where all ranks hold the same keys, dtypes and layouts."""
    misfits = [misfit(key, one.tensor, one.layout) for key, one in held.items()]
    problems = [one for one in misfits if one]
    agreement = agree(wants, problems, "cannot gather", group, staging_bytes=staging_bytes)
    if agreement.by_rank is not None:
        first = compat.group_ranks(group)[0]
        agree(wants, differences(agreement.by_rank[first], wants, first), "cannot gather", group)
    return agreement.staging_bytes


def give(buffer: torch.Tensor, pieces: Iterable[Piece], held: Mapping[Key, Held], tally: Tally) -> None:
    for piece in pieces:
        one = held[piece.key]
        box = one.layout.box(dist.get_rank())
        assert box is not None
        view_of(buffer, piece, one.tensor.dtype).copy_(part_of(one.tensor, box, piece))
        tally.bytes_sent += piece.nbytes


def take(
    buffer: torch.Tensor, pieces: Iterable[Piece], out: Mapping[Key, torch.Tensor], tally: Tally
) -> None:
    for piece in pieces:
        target = out[piece.key]
        part_of(target, whole(tuple(target.shape)), piece).copy_(view_of(buffer, piece, target.dtype))
        tally.bytes_received += piece.nbytes


def boxes_of(wants: Mapping[Key, Want], sender: int) -> Iterator[tuple[Key, Box, int]]:
    """What `sender` contributes: of boxes that several ranks hold, the first holder's only."""
    for key, want in wants.items():
        box = want.layout.box(sender) if want.layout.is_first_holder(sender) else None
        if box is not None:
            yield key, box, want.dtype.itemsize


def common_device(held: Mapping[Key, Held], group: Group) -> torch.device:
    kinds = {one.tensor.device.type for one in held.values()}
    return compat.current_device(compat.comm_device_type(group, kinds.pop() if len(kinds) == 1 else "cpu"))


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
