"""Whole tensors, tensors on the CPU, or both in place of those of a nested state dict.

No tree is ever changed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, Optional

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._state_dict_utils import _all_gather_sharded_tensor

from torch_dcp_backport import compat
from torch_dcp_backport.state_dict.options import StateDictInfo
from torch_dcp_backport.state_dict.tree import Path, leaves, rebuild
from torch_dcp_backport.transfer import (
    Held,
    Layout,
    Mesh,
    Placement,
    device_in,
    gather,
    group_ranks,
    has_slices,
    layout_of,
    mesh_of,
)

Group = Optional[dist.ProcessGroup]


def full_or_cpu(state_dict: Any, info: StateDictInfo) -> Any:
    """`state_dict` as `full_state_dict` and `cpu_offload` ask for it.

    With both, global rank 0 alone gets it and the other ranks get an empty dict.
    """
    if info.full_state_dict:
        to = (0,) if info.cpu_offload and dist.is_initialized() else None
        return full_tree(state_dict, to, info.cpu_offload)
    if info.cpu_offload:
        return rebuild(state_dict, lambda _, value: value.cpu() if torch.is_tensor(value) else value)
    return state_dict


def full_tree(
    tree: Any,
    to: Optional[Collection[int]],
    cpu_offload: bool,
    *,
    group: Optional[dist.ProcessGroup] = None,
    device: Optional[torch.device] = None,
) -> Any:
    """`tree` with whole tensors in place of shards, on the global ranks `to` or on every rank.

    Other ranks get {}, or None where the tree is no dict. A rank outside a DTensor's mesh keeps its
    empty local tensor. `group` and `device` are for ShardedTensors.
    """
    values = leaves(tree, opens=lambda _: True)
    dtensors = {path: value for path, value in values.items() if isinstance(value, compat.DTensor)}
    gathered: dict[Path, torch.Tensor] = {}
    for span, shards in by_group(dtensors):
        gathered.update(full_tensors(shards, span, to, cpu_offload))
    keep = to is None or dist.get_rank() in to

    def leaf(path: Path, value: Any) -> Any:
        if path in dtensors:
            value = gathered[path] if path in gathered else compat.local_part(value).detach()
        elif isinstance(value, ShardedTensor):
            # FSDP1's legacy kind; a collective, so every rank takes part. Not part of the leak.
            shards = value.local_shards()
            shard_device = shards[0].tensor.device if shards else torch.device("cpu")
            value = _all_gather_sharded_tensor(value, group, device).to(shard_device)
        return value.cpu() if cpu_offload and keep and torch.is_tensor(value) else value

    result = rebuild(tree, leaf)
    if keep:
        return result
    return {} if isinstance(tree, Mapping) else None


class GatheredShards(NamedTuple):
    """A DTensor that is gathered."""

    tensor: compat.DTensor
    #: Its layout on the ranks of the group that gathers it; None where its placements give none.
    layout: Optional[Layout]


def by_group(tensors: Mapping[Path, compat.DTensor]) -> list[tuple[Group, dict[Path, GatheredShards]]]:
    """The tensors by the process group whose ranks hold one copy of them; None where no group does.

    Tensors on a mesh without this rank are left out. A gather spans the mesh dimensions that shard and no
    others, as torch's does: a replica of HSDP may call alone.
    """
    rank, world = (dist.get_rank(), group_ranks()) if tensors else (0, ())
    shards: dict[Any, tuple[Group, dict[Path, GatheredShards]]] = {}
    #: By mesh and placements: the tensors of a span are gathered together.
    spans: dict[Any, tuple[Any, Group, Optional[Mesh], tuple[Placement, ...]]] = {}
    for path, tensor in tensors.items():
        if rank not in mesh_of(tensor.device_mesh).coordinates:
            continue
        layout = layout_or_none(tensor)
        if layout is None:
            shards.setdefault(None, (None, {}))[1][path] = GatheredShards(tensor, None)
            continue
        shapeless = layout.mesh, layout.placements
        if shapeless not in spans:
            group, line = span_of(tensor, layout, world)
            key = frozenset(group_ranks(group)) if group is not None else None
            spans[shapeless] = key, group, line.mesh, line.placements
        key, group, mesh, placements = spans[shapeless]
        part = GatheredShards(tensor, Layout(layout.shape, mesh, placements))
        shards.setdefault(key, (group, {}))[1][path] = part
    return list(shards.values())


def span_of(tensor: compat.DTensor, layout: Layout, world: Sequence[int]) -> tuple[Group, Layout]:
    """The group that shards a tensor of this layout, and its layout on the ranks of that group."""
    mesh = layout.mesh
    assert mesh is not None, "a DTensor has a mesh"
    dims = [
        dim
        for dim, (extent, placement) in enumerate(zip(mesh.shape, layout.placements))
        if placement is not None and extent > 1
    ]
    if len(dims) <= 1:
        dim = dims[0] if dims else 0
        group = tensor.device_mesh.get_group(dim)
        ranks = group_ranks(group)
        line = Layout(layout.shape, Mesh((len(ranks),), ranks), (layout.placements[dim],))
        return dist.group.WORLD if set(ranks) == set(world) else group, line
    # Several dimensions have a group where they are the whole mesh and its ranks are the world.
    is_all = not layout.replica_dims and set(mesh.ranks) == set(world)
    return (dist.group.WORLD, layout) if is_all else (None, layout)


def full_tensors(
    tensors: Mapping[Path, GatheredShards],
    group: Group,
    to: Optional[Collection[int]],
    cpu_offload: bool,
) -> dict[Path, torch.Tensor]:
    keep = to is None or dist.get_rank() in to
    gathered: dict[Path, torch.Tensor] = {}
    moving: dict[Path, Held] = {}
    for path, (tensor, layout) in tensors.items():
        local = compat.arrived(compat.local_part(tensor)).detach()
        if group is None or layout is None or not has_slices(local):
            # Several dimensions of a larger mesh have no group, and making one would need ranks that are not
            # in this call. DTensor goes dimension by dimension, on the device of its mesh. A wrapper (8-bit
            # states, a FakeTensor) knows itself how it is gathered, and stays one.
            value = compat.on_mesh_device(tensor).full_tensor()
            if keep:
                gathered[path] = value.cpu() if cpu_offload else value
        elif layout.is_sharded:
            moving[path] = Held(local, layout)
        elif keep:
            local = compat.arrived(local)
            kind = "cpu" if cpu_offload else tensor.device_mesh.device_type
            gathered[path] = local if local.device.type == kind else local.to(compat.current_device(kind))

    def make(path: Any) -> torch.Tensor:
        like = tensors[path].tensor
        local = compat.local_part(like).device
        kind = "cpu" if cpu_offload else like.device_mesh.device_type
        device = local if local.type == kind else device_in(group, kind)
        return torch.empty(like.shape, dtype=like.dtype, device=device)

    members = group_ranks(group) if moving else ()
    if to is None or set(members) <= set(to):
        receivers: list[Optional[int]] = [None]
    else:
        # With no receiver among the members no rank keeps the result, and nothing needs to travel.
        receivers = [rank for rank in members if rank in to]
    for receiver in receivers if moving else ():
        gathered.update(gather(moving, make, to=receiver, group=group))  # type: ignore[arg-type]
    return gathered


def layout_or_none(tensor: compat.DTensor) -> Optional[Layout]:
    """The layout of a tensor; None for placements that do not say where elements live (partial sums)."""
    try:
        return layout_of(tensor)
    except compat.AmbiguousLayout:
        raise
    except NotImplementedError:
        return None
