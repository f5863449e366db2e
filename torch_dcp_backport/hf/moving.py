"""A window of HF tensors between the first rank and the ranks that hold its blocks.

Knows shares and the call; must never allocate a whole tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Optional

import torch.distributed as dist

from torch_dcp_backport.hf.blocks import Share, Window, clipped
from torch_dcp_backport.transfer import Call, Problem, TransferError, raise_together
from torch_dcp_backport.transfer.chunks import Key
from torch_dcp_backport.transfer.consensus import agree_on_mesh
from torch_dcp_backport.transfer.errors import UNCHANGED, Finding
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


def settle(call: Call, so_far: str = UNCHANGED) -> None:
    """Raise the problems that came up on any rank while data moved, on every rank.

    Args:
        so_far: what was written on some rank; the same on every rank.

    Raises:
        RuntimeError: some rank has problems, and nothing was changed.
        TransferError: some rank has problems after something was written.
    """
    findings, _ = agree_on_mesh(call.findings, call.groups, so_far=so_far)
    kind = RuntimeError if so_far == UNCHANGED else TransferError
    raise_together(call.title, findings, call.cause, kind, so_far)


def send_window(call: Call, agreement: Agreement, share: Share, window: Window, read: Memory) -> None:
    """Bring a window from the first rank, which reads it, to every rank's parts."""
    have = {key: at_first(call, share, window, key) for key in window}
    want = {key: clipped(share.spreads[key], pieces) for key, pieces in window.items()}
    move(call, agreement, _routes(share, have, want), Memories(read, share.view))


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
