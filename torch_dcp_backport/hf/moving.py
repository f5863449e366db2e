"""Moves of windows of HF tensors between the first rank and the ranks that hold their blocks.

Knows shares and the call; must never allocate a full tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Optional

import torch.distributed as dist

from torch_dcp_backport.hf.blocks import Share, Window, clipped
from torch_dcp_backport.transfer import Box, Call, Problem, TransferError, raise_together
from torch_dcp_backport.transfer.chunks import Key
from torch_dcp_backport.transfer.consensus import agree_on_mesh
from torch_dcp_backport.transfer.errors import DOUBTFUL, UNCHANGED, Finding
from torch_dcp_backport.transfer.exchange import Route
from torch_dcp_backport.transfer.groups import Group, backend_of
from torch_dcp_backport.transfer.lanes import Lane, lane_of
from torch_dcp_backport.transfer.memories import Memories, Memory, move
from torch_dcp_backport.transfer.plan import Agreement, Table, Terms
from torch_dcp_backport.transfer.spread import Boxes


def groups_of(group: Group = None) -> tuple[Group, ...]:
    """Return the groups of a call; none in a process without a process group."""
    return (group,) if dist.is_initialized() else ()


def first_rank(call: Call) -> int:
    return call.ranks[0] if call.groups else call.rank


#: Name -> value as text; all must be the same on every rank.
Common = Mapping[str, str]
NOTHING: Common = {}


def agree(
    call: Call, condition: str = "", note: object = None, device: str = "", common: Common = NOTHING
) -> Agreement:
    """Agree by `Call.agree`, for ranks that want nothing of a transfer; also in a process without groups.

    Raises:
        RuntimeError: some rank has problems, or another value in `common`; on every rank.
    """
    if not call.groups:
        call.raise_alone()
        return Agreement([Table({}, (call.rank,), note=note)], 0, device or "cpu")
    terms = Terms(device=device, condition=f"{condition} {common}", note=(common, note))
    agreement = call.agree({}, terms)
    # Every rank computes the same findings from the same tables.
    common_by_rank = {rank: table.note[0] for table in agreement.tables for rank in table.ranks}
    raise_together(call.title, differences(common_by_rank))
    tables = [table._replace(note=table.note[1]) for table in agreement.tables]
    return agreement._replace(tables=tables)


def differences(common_by_rank: Mapping[int, Common]) -> list[Finding]:
    """Return a finding of each rank for each value that is not the first rank's."""
    first, expected = next(iter(common_by_rank.items()))
    findings = []
    for rank, own in common_by_rank.items():
        for name in {**expected, **own}:
            got, value = own.get(name, "nothing"), expected.get(name, "nothing")
            if got != value:
                problem = Problem("not the same on every rank", name, got, f"{value} as on rank {first}")
                findings.append((rank, problem))
    return findings


def publish(call: Call, inventory: Optional[Mapping[Any, object]]) -> dict[Any, Any]:
    """Publish by `Call.publish`; also in a process without groups."""
    if call.groups:
        return call.publish(inventory)
    call.raise_alone()
    return dict(inventory or {})


def settle(call: Call, so_far: str = UNCHANGED, lost: str = "") -> None:
    """Raise the problems that came up on any rank while data moved, on every rank.

    Args:
        so_far: a text about what was written on some rank; the same on every rank.
        lost: the text to use instead if a rank is gone; "" uses `so_far`.

    Raises:
        RuntimeError: some rank has problems, and nothing was changed.
        TransferError: some rank has problems after something was written.
    """
    findings, _ = agree_on_mesh(call.findings, call.groups, so_far=lost or so_far)
    kind = RuntimeError if so_far == UNCHANGED else TransferError
    raise_together(call.title, findings, call.cause, kind, so_far)


def send_window(call: Call, agreement: Agreement, share: Share, window: Window, read: Memory) -> None:
    """Bring a window from the first rank, which reads it, to every rank's parts.

    A replicated block goes to a single holder: after every turn twice as many have it, from a neighbour. If
    the window is broadcast, all have it at once.
    """
    want = {key: clipped(share.spreads[key], pieces) for key, pieces in window.items()}
    relayed = () if goes_to_all(call, agreement) else share.relayed
    turns = {key: turns_of(want[key], first_rank(call)) for key in window if key in relayed}
    have = {key: at_first(call, share, window, key) for key in window}
    direct = {key: turns[key][0][1] if key in turns else want[key] for key in window}
    move(call, agreement, _routes(share, have, direct), Memories(read, share.view, DOUBTFUL))
    for number in range(1, max(map(len, turns.values()), default=0)):
        routes: dict[Key, Route] = {
            key: Route(*turns[key][number], share.relayed[key]) for key in turns if number < len(turns[key])
        }
        move(call, agreement, routes, Memories(share.view, share.view, DOUBTFUL))


def goes_to_all(call: Call, agreement: Agreement) -> bool:
    """Return whether the first rank broadcasts the tensors that it sends."""
    count = len(call.ranks) if call.groups else 1
    return count > 1 and lane_of(backend_of(call.group, agreement.device), senders=1) is Lane.BROADCAST


def turns_of(want: Boxes, first: int) -> list[tuple[Boxes, Boxes]]:
    """Return (senders' boxes, receivers' boxes) of every turn; in the first all comes from the first rank."""
    holders: dict[Box, list[int]] = {}
    for rank, boxes in want.by_rank:
        for box in boxes:
            holders.setdefault(box, []).append(rank)
    turns: list[tuple[dict[int, list[Box]], dict[int, list[Box]]]] = [({}, {})]
    for box, ranks in holders.items():
        others = [rank for rank in ranks if rank != first]
        for rank in others[:1] + [rank for rank in ranks if rank == first]:
            turns[0][1].setdefault(rank, []).append(box)
        step, number = 1 << (len(others) - 1).bit_length() if others else 0, 1
        while step > 1:
            # The ranks halfway between two that have the block.
            step //= 2
            if number == len(turns):
                turns.append(({}, {}))
            for part, start in zip(turns[number], (0, step)):
                for rank in others[start :: 2 * step]:
                    part.setdefault(rank, []).append(box)
            number += 1
    return [(_boxes(want.shape, senders), _boxes(want.shape, receivers)) for senders, receivers in turns]


def _boxes(shape: tuple[int, ...], by_rank: Mapping[int, Sequence[Box]]) -> Boxes:
    return Boxes(shape, tuple((rank, tuple(boxes)) for rank, boxes in sorted(by_rank.items())))


def bring_window(call: Call, agreement: Agreement, share: Share, window: Window, write: Memory) -> None:
    """Bring a window to the first rank, into the memory of `write`; it is cast before it travels.

    Every element comes from the nearest of its holders.
    """
    have = {key: clipped(share.spreads[key], pieces) for key, pieces in window.items()}
    want = {key: at_first(call, share, window, key) for key in window}
    move(call, agreement, _routes(share, have, want), Memories(share.view, write, UNCHANGED))


def bring_to_all(call: Call, agreement: Agreement, share: Share, window: Window, write: Memory) -> None:
    """Bring a window to every rank, into the memory of its `write`."""
    have = {key: clipped(share.spreads[key], pieces) for key, pieces in window.items()}
    want = {}
    for key, pieces in window.items():
        boxes = tuple(piece.box for piece in pieces)
        want[key] = Boxes(share.tensors[key].shape, tuple((rank, boxes) for rank in have_ranks(call)))
    move(call, agreement, _routes(share, have, want), Memories(share.view, write, UNCHANGED))


def have_ranks(call: Call) -> tuple[int, ...]:
    """Return the ranks of a call; this one alone in a process without groups."""
    return call.ranks if call.groups else (call.rank,)


def at_first(call: Call, share: Share, window: Window, key: str) -> Boxes:
    """Return the window's pieces of a tensor as boxes of the first rank."""
    boxes = tuple(piece.box for piece in window[key])
    return Boxes(share.tensors[key].shape, ((first_rank(call), boxes),))


def _routes(share: Share, have: Mapping[str, Boxes], want: Mapping[str, Boxes]) -> dict[Key, Route]:
    return {key: Route(have[key], want[key], share.tensors[key].dtype) for key in have}
