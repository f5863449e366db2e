"""What a step has changed: each rank's shards, and their elements that differ from the last export.

Never holds a whole tensor. Positions and values are those of the tensors that `whole_tensors` gives.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Optional

import torch
import torch.distributed as dist

from torch_dcp_backport import compat
from torch_dcp_backport.engine._src.export import cast_dtype
from torch_dcp_backport.hf import unchecked
from torch_dcp_backport.transfer import (
    Agreement,
    Box,
    Call,
    Group,
    Layout,
    Problem,
    Terms,
    Want,
    describe,
    groups_of,
    members,
    misfit,
    out_of_order,
    raise_together,
)

TITLE = "cannot export what has changed"
NEVER = "prime_delta_snapshots() was not called"
HALF = "the last prime_delta_snapshots() did not come to its end: call it again on every rank"
REFUSED = "the last export was refused: send the whole, and prime_delta_snapshots() on every rank"
NOT_READ = "the last export was not read to its end: send the whole, and prime_delta_snapshots()"
CHANGED = "not as it was primed (prime_delta_snapshots() has to be called again)"
#: What ranks agree on besides the tensors. Of ranks that primed at other times, one lost changes.
PRIMES = "calls of prime_delta_snapshots() since the last export"
#: Bytes of an element -> the integer that its bytes are compared as: two NaNs may be equal.
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


@dataclasses.dataclass(frozen=True)
class ShardSpec:
    """The place of a rank's shard in its tensor, with the fields of verl's class of this name.

    Args:
        full_shape: the shape of the whole tensor.
        mesh: the `DeviceMesh` of a DTensor; None where each rank holds the whole.
        placements: the placements of a DTensor.
        place, gather_group, contributes, to_hf_chunk, hf_slots: verl's, for tensors that no mesh describes.
    """

    full_shape: tuple[int, ...]
    mesh: Any = None
    placements: Optional[tuple[Any, ...]] = None
    place: Any = None
    gather_group: Group = None
    contributes: bool = True
    to_hf_chunk: Any = None
    hf_slots: Any = None


class Shard(NamedTuple):
    """This rank's part of a tensor, flat."""

    name: str
    values: torch.Tensor
    spec: ShardSpec


class Change(NamedTuple):
    """The elements of a tensor that this rank found changed, as verl's `delta_sharded` gathers them.

    Args:
        slots: name and shape of the tensor, as a list of one.
        dtype: the name of its dtype.
        counts: the number of elements, as a tensor of one.
        positions: their places in the flat tensor.
        values: their values.
        group: the ranks that together hold the tensor; None where this one has all of it.
    """

    slots: list[tuple[str, tuple[int, ...]]]
    dtype: str
    counts: torch.Tensor
    positions: torch.Tensor
    values: torch.Tensor
    group: Group


@torch.no_grad()
def shards(
    tensors: Mapping[str, torch.Tensor], dtype: Optional[torch.dtype], device: torch.device
) -> Iterator[Shard]:
    """Yield this rank's part of each tensor, in the order of the names. Not collective.

    Where nothing is cast, moved or made dense, the part is the tensor's own memory.

    Args:
        tensors: DTensors, or tensors that every rank holds.
        dtype: the dtype of floating tensors; None is their own.
        device: the device of the parts.
    """
    for name, tensor in tensors.items():
        local, spec = tensor.detach(), ShardSpec(tuple(tensor.shape))
        if isinstance(tensor, compat.DTensor):
            local = compat.arrived(compat.local_part(tensor))
            spec = ShardSpec(tuple(tensor.shape), tensor.device_mesh, tuple(tensor.placements))
        # Bytes are compared: a conjugate or negative that torch has not computed yet has others' bytes.
        local = local.to(device, cast_dtype(local.dtype, dtype)).resolve_conj().resolve_neg()
        yield Shard(name, local.reshape(-1).contiguous(), spec)


class Deltas:
    """The last exported values of this rank's shards, on the host."""

    def __init__(self, is_pinned: bool) -> None:
        """Remember nothing yet.

        Args:
            is_pinned: whether the values are in pinned memory.
        """
        self.is_pinned = is_pinned
        #: Of floating tensors; None is their own.
        self.dtype: Optional[torch.dtype] = None
        self.last: dict[str, torch.Tensor] = {}
        #: Name -> shape, dtype and layout; another object after each `prime`.
        self.primed: dict[str, str] = {}
        #: Completed calls of `prime` since the last agreement.
        self.primes = 0
        #: Why there is nothing to compare with.
        self.missing = NEVER
        self.groups: dict[tuple[int, ...], Any] = {}

    def prime(
        self, tensors: Mapping[str, torch.Tensor], dtype: Optional[torch.dtype], device: torch.device
    ) -> None:
        """Take the values of all shards as those that were exported last. Not collective.

        Args:
            tensors: name -> tensor.
            dtype: the dtype of floating tensors, of later exports, too; None is their own.
            device: the device of the parts.
        """
        # First of all: a prime that breaks leaves values of two moments.
        self.missing = HALF
        self.dtype, self.primed = dtype, {}
        for name in self.last.keys() - tensors.keys():
            del self.last[name]
        for shard in shards(tensors, dtype, device):
            last = self.last.get(shard.name)
            if last is None or last.shape != shard.values.shape or last.dtype != shard.values.dtype:
                last = torch.empty_like(shard.values, device="cpu", pin_memory=self.is_pinned)
                self.last[shard.name] = last
            last.copy_(shard.values)
        self.primed = {name: self.text_of(tensor) for name, tensor in tensors.items()}
        self.primes += 1
        self.missing = ""

    @torch.no_grad()
    def changes(self, tensors: Mapping[str, torch.Tensor], device: torch.device) -> Iterator[Change]:
        """Yield of each tensor what differs from the last export, which this one becomes. Collective.

        Args:
            tensors: name -> tensor.
            device: the device of positions and values.

        Raises:
            RuntimeError: nothing to compare with, tensors that are not as they were primed, or ranks that
                differ; on every rank. Or `prime` was called while this export was read.
        """
        layouts = self.begin(tensors)
        primed, rank = self.primed, dist.get_rank() if dist.is_initialized() else 0
        for shard in shards(tensors, self.dtype, device):
            if self.primed is not primed:
                raise RuntimeError(
                    f"{TITLE}: prime_delta_snapshots() was called before its end: {shard.name}"
                )
            layout = layouts[shard.name]
            last = self.last[shard.name]
            group = self.group_of(shard.spec, layout)
            # Of plain tensors the first rank's count: each rank has them all.
            counts = layout.is_first_holder(rank) if layout.mesh is not None else rank == 0
            changed = differing(shard.values, last) if counts else torch.empty(0, dtype=torch.int64)
            positions = within_whole(changed.to(shard.values.device), layout.own_box(rank), layout.shape)
            values = picked(shard.values, changed.to(shard.values.device))
            last.copy_(shard.values)
            number = torch.tensor([len(values)])
            slots = [(shard.name, layout.shape)]
            yield Change(slots, str(values.dtype).partition(".")[2], number, positions, values, group)
        if self.primed is primed:
            self.missing = ""

    def begin(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, Layout]:
        """Return the layouts, where every rank can export, and all have primed the same. Collective.

        Raises:
            RuntimeError: as of `changes`; on every rank, and all have to prime again.
        """
        missing, primes = self.missing, self.primes
        # A refusal holds for every rank until it primes again: none goes on from an older moment than others.
        self.missing, self.primes = REFUSED, 0
        layouts: dict[str, Layout] = {}
        now: dict[str, str] = {}
        with Call(TITLE, "delta", groups_of()) as call:
            for name, tensor in tensors.items():
                with call.guard(name):
                    layouts[name], local = unchecked(tensor)
                    now[name] = self.text_of(tensor)
                    problem = misfit(name, local, layouts[name], call.rank)
                    call.problems += [problem] if problem else []
            if missing:
                call.problems.append(Problem(missing))
            elif not call.problems:
                call.problems += changed_since(self.primed, now)
            raise_where_orders_differ(call.agree_on_wants(terms=Terms(common={**now, PRIMES: str(primes)})))
        self.missing = NOT_READ
        return layouts

    def text_of(self, tensor: torch.Tensor) -> str:
        layout, local = unchecked(tensor)
        return describe(Want(layout, cast_dtype(local.dtype, self.dtype)))

    def group_of(self, spec: ShardSpec, layout: Layout) -> Group:
        """Return the ranks that together hold a tensor, this one among them; None where it holds all."""
        dims = [dim for dim, placement in enumerate(layout.placements) if placement is not None]
        if not dims:
            return None
        if len(dims) == 1:
            group: Group = spec.mesh.get_group(dims[0])
            return group
        # FSDP2 over TP: each copy of the model has a group, which every rank makes in the same order.
        ranks = spec.mesh.mesh
        others = [dim for dim in range(ranks.dim()) if dim not in dims]
        copies = ranks.permute(*others, *dims).reshape(-1, math.prod(ranks.shape[dim] for dim in dims))
        made = [self.group_with(tuple(sorted(copy))) for copy in copies.tolist()]
        own = dist.get_rank()
        found: Group = next(group for copy, group in zip(copies.tolist(), made) if own in copy)
        return found

    def group_with(self, ranks: tuple[int, ...]) -> Any:
        everyone = members(None)
        if ranks == tuple(range(dist.get_world_size())):
            return everyone
        if ranks not in self.groups:
            self.groups[ranks] = dist.new_group(list(ranks))
        return self.groups[ranks]


def changed_since(primed: Mapping[str, str], now: Mapping[str, str]) -> list[Problem]:
    """Return a problem for each tensor that is new, gone, or of another shape, dtype or layout."""
    return [
        Problem(CHANGED, name, now.get(name, "nothing"), primed.get(name, "nothing"))
        for name in {**primed, **now}
        if primed.get(name) != now.get(name)
    ]


def raise_where_orders_differ(agreement: Agreement) -> None:
    """Raise, on every rank, where ranks agree on all but the order: they would gather other tensors."""
    first, *others = agreement.tables
    orders = [(table.ranks, out_of_order(first.common, table.common, first.ranks[0])) for table in others]
    raise_together(TITLE, [(rank, problem) for ranks, problem in orders for rank in ranks])


def differing(values: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """Return the places of elements whose bytes are others than before."""
    differ = integers_of(values) != integers_of(last.to(values.device))
    return (differ.any(1) if differ.dim() > 1 else differ).nonzero().flatten()


def picked(values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return the elements at some places; of floats of 8 bits, too, which not every torch can pick."""
    return integers_of(values)[places].view(values.dtype).flatten()


def integers_of(values: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a flat, dense tensor as one integer for each element; of 16 bytes as two."""
    size = values.element_size()
    integers = values.view(INTEGERS[size])
    return integers.view(len(values), 2) if size == 16 else integers


def within_whole(positions: torch.Tensor, box: Box, shape: tuple[int, ...]) -> torch.Tensor:
    """Return places in a flat whole tensor of places in the flat part of it that is a box.

    int32, which is what verl sends, where the tensor has no more elements than that counts.
    """
    kind = torch.int32 if math.prod(shape) <= torch.iinfo(torch.int32).max else torch.int64
    if box.size[1:] == shape[1:]:
        start = box.offset[0] * math.prod(shape[1:]) if shape else 0
        return (positions + start).to(kind)
    found, stride = torch.zeros_like(positions), 1
    for size, offset, extent in zip(reversed(box.size), reversed(box.offset), reversed(shape)):
        # An empty box has no positions.
        size = max(size, 1)
        found += (positions % size + offset) * stride
        positions = positions.div(size, rounding_mode="floor")
        stride *= extent
    return found.to(kind)
