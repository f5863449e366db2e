"""A window of HF tensors between the first rank and the ranks that hold its blocks.

Knows shares and the call; must never allocate a whole tensor.
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
from torch_dcp_backport.transfer.groups import Group
from torch_dcp_backport.transfer.memories import Memories, Memory, move
from torch_dcp_backport.transfer.plan import Agreement, Table, Terms
from torch_dcp_backport.transfer.spread import Boxes


def groups_of(group: Group = None) -> tuple[Group, ...]:
    """The groups of a call: none in a process that was never one of several."""
    return (group,) if dist.is_initialized() else ()


def first_rank(call: Call) -> int:
    return call.ranks[0] if call.groups else call.rank


#: Name -> value, spelled out, of what must be the same on every rank.
Common = Mapping[str, str]
NOTHING: Common = {}


def agree(
    call: Call, condition: str = "", note: object = None, device: str = "", common: Common = NOTHING
) -> Agreement:
    """As `Call.agree`, where nothing is wanted of a transfer; alone, too.

    Raises:
        RuntimeError: some rank has problems, or another value of what is common; on every rank.
    """
    if not call.groups:
        call.raise_alone()
        return Agreement([Table({}, (call.rank,), note=note)], 0, device or "cpu")
    terms = Terms(device=device, condition=f"{condition} {common}", note=(common, note))
    agreement = call.agree({}, terms)
    # Every rank finds the same in the same tables.
    said = {rank: table.note[0] for table in agreement.tables for rank in table.ranks}
    raise_together(call.title, differences(said))
    tables = [table._replace(note=table.note[1]) for table in agreement.tables]
    return agreement._replace(tables=tables)


def differences(said: Mapping[int, Common]) -> list[Finding]:
    """A finding of each rank for each value that is not the first rank's."""
    first, expected = next(iter(said.items()))
    findings = []
    for rank, own in said.items():
        for name in {**expected, **own}:
            got, value = own.get(name, "nothing"), expected.get(name, "nothing")
            if got != value:
                problem = Problem("not the same on every rank", name, got, f"{value} as on rank {first}")
                findings.append((rank, problem))
    return findings


def publish(call: Call, inventory: Optional[Mapping[Any, object]]) -> dict[Any, Any]:
    """As `Call.publish`; alone, too."""
    if call.groups:
        return call.publish(inventory)
    call.raise_alone()
    return dict(inventory or {})


def settle(call: Call, so_far: str = UNCHANGED, lost: str = "") -> None:
    """Raise the problems that came up on any rank while data moved, on every rank.

    Args:
        so_far: what was written on some rank; the same on every rank.
        lost: what an error says instead where a rank is gone; nothing is the same.

    Raises:
        RuntimeError: some rank has problems, and nothing was changed.
        TransferError: some rank has problems after something was written.
    """
    findings, _ = agree_on_mesh(call.findings, call.groups, so_far=lost or so_far)
    kind = RuntimeError if so_far == UNCHANGED else TransferError
    raise_together(call.title, findings, call.cause, kind, so_far)


def send_window(call: Call, agreement: Agreement, share: Share, window: Window, read: Memory) -> None:
    """Bring a window from the first rank, which reads it, to every rank's parts.

    What replicas hold it sends to one of them: twice as many have it after every turn, each from a neighbour.
    """
    want = {key: clipped(share.spreads[key], pieces) for key, pieces in window.items()}
    turns = {key: turns_of(want[key], first_rank(call)) for key in window if key in share.relayed}
    have = {key: at_first(call, share, window, key) for key in window}
    direct = {key: turns[key][0][1] if key in turns else want[key] for key in window}
    move(call, agreement, _routes(share, have, direct), Memories(read, share.view, DOUBTFUL))
    for number in range(1, max(map(len, turns.values()), default=0)):
        routes: dict[Key, Route] = {
            key: Route(*turns[key][number], share.relayed[key]) for key in turns if number < len(turns[key])
        }
        move(call, agreement, routes, Memories(share.view, share.view, DOUBTFUL))


def turns_of(want: Boxes, first: int) -> list[tuple[Boxes, Boxes]]:
    """(who sends, who receives) of every turn; in the first one everything comes from the first rank."""
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
            # Those between two that have it.
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
    """Bring a window to the first rank, into the memory that it gives; cast before it travels.

    Every element comes from the nearest of its holders.
    """
    have = {key: clipped(share.spreads[key], pieces) for key, pieces in window.items()}
    want = {key: at_first(call, share, window, key) for key in window}
    move(call, agreement, _routes(share, have, want), Memories(share.view, write, UNCHANGED))


def at_first(call: Call, share: Share, window: Window, key: str) -> Boxes:
    """The window's pieces of a tensor, whole on the first rank."""
    boxes = tuple(piece.box for piece in window[key])
    return Boxes(share.tensors[key].shape, ((first_rank(call), boxes),))


def _routes(share: Share, have: Mapping[str, Boxes], want: Mapping[str, Boxes]) -> dict[Key, Route]:
    return {key: Route(have[key], want[key], share.tensors[key].dtype) for key in have}
