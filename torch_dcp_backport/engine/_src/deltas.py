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
from torch_dcp_backport.transfer import Box, Call, Group, Layout, Terms, groups_of, layout_of, members

TITLE = "cannot export what has changed"
#: Bytes of an element -> the integer that its bytes are compared as: two NaNs may be equal.
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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

    Args:
        tensors: DTensors, or tensors that every rank holds.
        dtype: the dtype of floating tensors; None is their own.
        device: the device of the parts.
    """
    for name, tensor in tensors.items():
        local, spec = tensor.detach(), ShardSpec(tuple(tensor.shape))
        if isinstance(tensor, compat.DTensor):
            local = compat.local_part(tensor)
            spec = ShardSpec(tuple(tensor.shape), tensor.device_mesh, tuple(tensor.placements))
        local = local.to(device, dtype if local.is_floating_point() else None)
        yield Shard(name, local.reshape(-1), spec)


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
        #: Why there is nothing to compare with.
        self.missing = "prime_delta_snapshots() was not called"
        self.groups: dict[tuple[int, ...], Any] = {}

    def prime(self, found: Iterator[Shard]) -> None:
        """Take the values of all shards as those that were exported last. Not collective."""
        for shard in found:
            last = self.last.get(shard.name)
            if last is None or last.shape != shard.values.shape or last.dtype != shard.values.dtype:
                last = torch.empty_like(shard.values, device="cpu", pin_memory=self.is_pinned)
                self.last[shard.name] = last
            last.copy_(shard.values)
        self.missing = ""

    @torch.no_grad()
    def changes(self, tensors: Mapping[str, torch.Tensor], found: Iterator[Shard]) -> Iterator[Change]:
        """Yield of each tensor what differs from the last export, which this one becomes. Collective.

        Raises:
            RuntimeError: nothing to compare with, or ranks with other tensors; on every rank.
        """
        layouts = {name: layout_of(tensor) for name, tensor in tensors.items()}
        with Call(TITLE, "delta", groups_of()) as call:
            with call.guard():
                if self.missing:
                    raise RuntimeError(self.missing)
            shapes = {name: str(layout.shape) for name, layout in layouts.items()}
            call.agree(terms=Terms(common=shapes))
        self.missing = "the last export was not read to its end: send the whole, and prime_delta_snapshots()"
        rank = dist.get_rank() if dist.is_initialized() else 0
        for shard in found:
            layout = layouts[shard.name]
            last = self.last[shard.name]
            group = self.group_of(shard.spec, layout)
            # Of plain tensors the first rank's count: each rank has them all.
            counts = layout.is_first_holder(rank) if layout.mesh is not None else rank == 0
            changed = differing(shard.values, last) if counts else torch.empty(0, dtype=torch.int64)
            positions = within_whole(changed.to(shard.values.device), layout.own_box(rank), layout.shape)
            values = shard.values[changed.to(shard.values.device)]
            last.copy_(shard.values)
            number = torch.tensor([len(values)])
            slots = [(shard.name, layout.shape)]
            yield Change(slots, str(values.dtype).partition(".")[2], number, positions, values, group)
        self.missing = ""

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


def differing(values: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """Return the places of elements whose bytes are others than before."""
    last = last.to(values.device)
    kind = INTEGERS.get(values.element_size())
    if kind is not None:
        return (values.view(kind) != last.view(kind)).nonzero().flatten()
    halves = [part.view(torch.uint8).view(len(values), -1) for part in (values, last)]
    return (halves[0] != halves[1]).any(1).nonzero().flatten()


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
