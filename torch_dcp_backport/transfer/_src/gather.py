"""From every rank's shards to whole tensors on one rank or on all, in bounded chunks."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Optional

import torch
import torch.distributed as dist

from torch_dcp_backport.transfer._src.allgather import AllGather, Held
from torch_dcp_backport.transfer._src.call import Call
from torch_dcp_backport.transfer._src.chunks import (
    Key,
    KeyedBox,
    box_bytes,
    capacity_of,
    chunk_bytes,
    chunks,
    in_turn,
    slots_of,
    total_bytes,
)
from torch_dcp_backport.transfer._src.consensus import common_device
from torch_dcp_backport.transfer._src.engine import Engine
from torch_dcp_backport.transfer._src.errors import Problem, out_of_order, spell_doing, spell_key
from torch_dcp_backport.transfer._src.groups import Group, backend_of, note_device
from torch_dcp_backport.transfer._src.lanes import Lane, is_collective, lane_of
from torch_dcp_backport.transfer._src.layout import misfit, whole
from torch_dcp_backport.transfer._src.memory import has_slices, is_freed
from torch_dcp_backport.transfer._src.plan import Agreement, Terms, Want

TITLE = "cannot gather"


@torch.no_grad()
def gather(
    held: Mapping[Key, Held],
    make: Callable[[Key], torch.Tensor],
    *,
    to: Optional[int] = None,
    group: Group = None,
    staging_bytes: Optional[int] = None,
) -> dict[Key, torch.Tensor]:
    """Return whole tensors of every key, on one rank or on every rank. Collective.

    Every rank of the group calls with the same keys, dtypes and layouts; replicas travel once.

    Args:
        held: key -> this rank's local tensor and its layout.
        make: called with a key, on a receiving rank; allocates the whole tensor.
        to: the global rank that receives; None is every rank.
        group: the process group; it must contain every rank of the layouts. None is the default group.
        staging_bytes: the most bytes of staging buffers on any rank; None is the budget of `configure`.

    Returns:
        key -> whole tensor; empty on ranks that receive nothing.

    Raises:
        RuntimeError: the ranks hold different keys, dtypes or layouts, or a local tensor is not its
            rank's box; on every rank.
        ValueError: `staging_bytes` is not a staging budget.
        TransferError: a rank is gone, or the group's timeout is over.

    Example:
        Within a process group:

        >>> import torch
        >>> from torch_dcp_backport.transfer import Held, gather, layout_of
        >>> tensor = torch.arange(3)
        >>> gather({"w": Held(tensor, layout_of(tensor))}, lambda key: torch.empty_like(tensor), to=0)
        {'w': tensor([0, 1, 2])}
    """
    with Call(TITLE, "gather", [group]) as call:
        note_device(group, (tensor for tensor, _ in held.values()))
        agreement = agree_on_all(held, call, staging_bytes)
        out: dict[Key, torch.Tensor] = {}
        with call.tally.phase("prepare"), call.room_for("whole tensors"):
            if to in (None, call.rank):
                out.update((key, make(key)) for key in held)
        if call.problems:
            out.clear()
        engine_of(call, agreement, held, out, to).run(
            sum(math.prod(layout.shape) * tensor.dtype.itemsize for tensor, layout in held.values())
        )
        call.tally.tensors = len(held)
        call.tally.close()
        return out


def engine_of(
    call: Call,
    agreement: Agreement,
    held: Mapping[Key, Held],
    out: Mapping[Key, torch.Tensor],
    to: Optional[int],
) -> Engine:
    backend, count = backend_of(call.group, agreement.device), len(call.ranks)
    if lane_of(backend, senders=count, wanted_by=count if to is None else 1) is Lane.ALL_GATHER or to is None:
        return AllGather(call, agreement, held, out, is_copied=not is_collective(backend))
    return Gather(call, agreement, held, out, to)


class Gather(Engine):
    """One gather to one rank under way, by a message for each chunk."""

    def __init__(
        self,
        call: Call,
        agreement: Agreement,
        held: Mapping[Key, Held],
        out: Mapping[Key, torch.Tensor],
        to: int,
    ) -> None:
        sources = {key: (tensor, layout.own_box(call.rank)) for key, (tensor, layout) in held.items()}
        targets = {key: (tensor, whole(tuple(tensor.shape))) for key, tensor in out.items()}
        super().__init__(call, agreement, sources, targets)
        self.held = held
        self.to = to
        self.slots = slots_of(call.ranks)

    def failure_text(self) -> str:
        verb, pieces = self.doing
        return f"{TITLE}: broken off while {spell_doing(verb, (piece.key for piece in pieces))}"

    def boxes_of(self, sender: int) -> Iterator[KeyedBox]:
        """The boxes that `sender` contributes: of those that several ranks hold, the first holder's only."""
        for key, (tensor, layout) in self.held.items():
            box = layout.box(sender) if layout.is_first_holder(sender) else None
            if box is not None:
                yield key, box, tensor.dtype

    def boxes_of_all(self, senders: Iterable[int]) -> Iterator[KeyedBox]:
        return (box for sender in senders for box in self.boxes_of(sender))

    def whole_boxes(self) -> Iterator[KeyedBox]:
        return ((key, whole(layout.shape), tensor.dtype) for key, (tensor, layout) in self.held.items())

    def staging_bytes(self, budget: int) -> int:
        count, size = self.sizes(budget)
        return count * size

    def sizes(self, budget: int) -> tuple[int, int]:
        """(buffers, bytes of one)."""
        if self.to != self.rank:
            return 2, min(self.portion(budget), total_bytes(self.boxes_of(self.rank)))
        return self.slots, min(self.portion(budget), total_bytes(self.whole_boxes()))

    def portion(self, budget: int) -> int:
        return capacity_of(budget, self.slots)

    def move(self, budget: int) -> None:
        self.ring = self.staging.ring(*self.sizes(budget))
        if self.to == self.rank:
            self.receive(self.portion(budget))
        else:
            self.give(self.to, self.portion(budget))
        self.ring.drain()

    def give(self, to: int, portion: int) -> None:
        self.tally.meter.expect(lambda: box_bytes(self.boxes_of(self.rank)))
        for pieces in chunks(self.boxes_of(self.rank), portion):
            self.send(to, pieces)
            self.tally.rounds += 1

    def receive(self, portion: int) -> None:
        """A chunk of each sender in turn."""
        senders = [rank for rank in self.ranks if rank != self.rank]
        self.tally.meter.expect(lambda: box_bytes(self.boxes_of_all(senders)))
        for number, rank, pieces in in_turn({rank: chunks(self.boxes_of(rank), portion) for rank in senders}):
            buffer = self.ring.take(chunk_bytes(pieces))
            self.doing = f"receiving from rank {rank}", pieces
            works = self.post([(dist.irecv, buffer, rank)])
            self.ring.use(functools.partial(self.arrive, buffer, pieces, works, rank))
            self.tally.rounds = number
        # Meanwhile the last chunks travel.
        self.copy_own(self.boxes_of(self.rank))


def agree_on_all(held: Mapping[Key, Held], call: Call, staging_bytes: Optional[int]) -> Agreement:
    """Budget and device, where all ranks hold the same keys, dtypes and layouts."""
    misfits = [misfit(key, tensor, layout, call.rank) for key, (tensor, layout) in held.items()]
    call.problems += [problem for problem in misfits if problem]
    call.problems += [
        Problem("a tensor whose memory was freed", spell_key(key))
        for key, (tensor, _) in held.items()
        if has_slices(tensor) and is_freed(tensor)
    ]
    wants = {key: Want(layout, tensor.dtype) for key, (tensor, layout) in held.items()}
    device = common_device(tensor.device.type for tensor, _ in held.values())
    agreement = call.agree_on_wants(wants, Terms(device), staging_bytes=staging_bytes)
    if not agreement.is_common:
        first = call.ranks[0]
        call.problems += differences(agreement.table_of(first).wants, wants, first)
        call.agree_on_wants(wants)
    return agreement


def differences(expected: Mapping[Key, Want], wants: Mapping[Key, Want], first: int) -> list[Problem]:
    """Problems of this rank's wants, where they are not those of the first rank."""
    if list(expected.items()) == list(wants.items()):
        return []
    problems = [
        Problem(
            "held differently",
            spell_key(key),
            describe(wants.get(key)),
            f"{describe(expected.get(key))} as rank {first}",
        )
        for key in {**expected, **wants}
        if expected.get(key) != wants.get(key)
    ]
    return problems or [out_of_order(expected, wants, first)]


def describe(want: Optional[Want]) -> str:
    """Return shape, dtype and layout as text."""
    if want is None:
        return "nothing"
    layout = want.layout
    # With the mesh: on two meshes all else may be the same.
    mesh = f" {layout.placements} on mesh {layout.mesh.signature}" if layout.mesh else ""
    return f"{tuple(layout.shape)} {want.dtype}{mesh}"
