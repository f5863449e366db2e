"""A window of HF tensors between the first rank and the ranks that hold its blocks.

Knows shares and the call; must never allocate a whole tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Optional

import torch
import torch.distributed as dist

from torch_dcp_backport.hf.blocks import Share, Window, clipped
from torch_dcp_backport.transfer import Box, Call, Problem, TransferError, raise_together
from torch_dcp_backport.transfer.chunks import Key
from torch_dcp_backport.transfer.consensus import agree_on_mesh
from torch_dcp_backport.transfer.errors import UNCHANGED, Finding, spell_doing
from torch_dcp_backport.transfer.exchange import Exchange, Plan, Route
from torch_dcp_backport.transfer.groups import Group
from torch_dcp_backport.transfer.plan import Agreement, Table, Terms
from torch_dcp_backport.transfer.spread import Boxes
from torch_dcp_backport.transfer.staging import copy_to


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


#: Gives the memory of a box of an HF tensor.
Memory = Callable[[str, Box], torch.Tensor]


def send_window(call: Call, agreement: Agreement, share: Share, window: Window, read: Memory) -> None:
    """Bring a window from the first rank, which reads it, to every rank's parts."""
    have = {key: at_first(call, share, window, key) for key in window}
    want = {key: clipped(share.spreads[key], pieces) for key, pieces in window.items()}
    _move(call, agreement, _routes(share, have, want), Memories(read, share.view))


def bring_window(call: Call, agreement: Agreement, share: Share, window: Window, write: Memory) -> None:
    """Bring a window to the first rank, into the memory that it gives; cast before it travels.

    Every element comes from the nearest of its holders.
    """
    have = {key: clipped(share.spreads[key], pieces) for key, pieces in window.items()}
    want = {key: at_first(call, share, window, key) for key in window}
    _move(call, agreement, _routes(share, have, want), Memories(share.view, write, UNCHANGED))


def at_first(call: Call, share: Share, window: Window, key: str) -> Boxes:
    """The window's pieces of a tensor, whole on the first rank."""
    boxes = tuple(piece.box for piece in window[key])
    return Boxes(share.tensors[key].shape, ((first_rank(call), boxes),))


def _routes(share: Share, have: Mapping[str, Boxes], want: Mapping[str, Boxes]) -> dict[Key, Route]:
    return {key: Route(have[key], want[key], share.tensors[key].dtype) for key in have}


class Memories(NamedTuple):
    """Where boxes come from, and where they go."""

    source: Memory
    target: Memory
    #: What an exchange that breaks off leaves; by itself it names what was written.
    left: str = ""


class Blocks(Exchange):
    """An exchange of boxes in memory that callables give."""

    def __init__(self, call: Call, agreement: Agreement, plan: Plan, memories: Memories) -> None:
        super().__init__(call, agreement, plan, {}, {})
        self.source, self.target, self.left = memories

    def story(self) -> str:
        if not self.left:
            return super().story()
        verb, pieces = self.doing
        doing = spell_doing(verb, (piece.key for piece in pieces))
        return f"{self.call.title}: broken off while {doing}; {self.left}"

    def read(self, key: Key, box: Box) -> torch.Tensor:
        return self.source(str(key), box)

    def write(self, key: Key, box: Box) -> torch.Tensor:
        return self.target(str(key), box)


@torch.no_grad()
def _move(call: Call, agreement: Agreement, routes: Mapping[Key, Route], memories: Memories) -> None:
    if call.groups:
        plan = Plan(routes, call.ranks, call.rank)
        Blocks(call, agreement, plan, memories).run(plan.nbytes)
        return
    for key, box, _ in Plan(routes, (call.rank,), call.rank).own():
        copy_to(memories.target(str(key), box), memories.source(str(key), box))
