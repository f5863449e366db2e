"""Views of FSDP1's ShardedTensors as DTensors of the same memory, where it has no device mesh.

A write into either is a write into both. Must never touch FSDP2, nor FSDP1 with a mesh.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel

from torch_dcp_backport import compat
from torch_dcp_backport.dist_checkpointing import CheckpointingException
from torch_dcp_backport.transfer import group_ranks, layout_of

Groups = dict[dist.ProcessGroup, dist.ProcessGroup]


def as_dtensors(state: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """Return a state dict of a model or its optimizers with DTensors for ShardedTensors. Not collective.

    Raises:
        CheckpointingException: the spread of a tensor over the ranks is not known.
    """
    replicas: dict[Any, Any] = {}
    for module in FullyShardedDataParallel.fsdp_modules(model):
        # HYBRID_SHARD: shards over `process_group`, their replicas over `_inter_node_pg`.
        if getattr(module, "_inter_node_pg", None) is not None:
            replicas[module.process_group] = module._inter_node_pg
    converted: dict[str, Any] = _converted(dict(state), Meshes(replicas), "")
    return converted


class Meshes:
    """The meshes of a state dict, each made once."""

    def __init__(self, replicas: Groups) -> None:
        self.replicas = replicas
        self.made: dict[tuple[dist.ProcessGroup, str], DeviceMesh] = {}

    def of(self, group: dist.ProcessGroup, kind: str) -> DeviceMesh:
        mesh = self.made.get((group, kind))
        if mesh is None:
            mesh = self.made[group, kind] = _mesh_of(group, self.replicas.get(group), kind)
        return mesh


def _converted(value: Any, meshes: Meshes, path: str) -> Any:
    if isinstance(value, dict):
        return type(value)(
            (key, _converted(part, meshes, f"{path}.{key}" if path else str(key)))
            for key, part in value.items()
        )
    if isinstance(value, list):
        return [_converted(part, meshes, path) for part in value]
    return _dtensor_of(value, meshes, path) if hasattr(value, "local_shards") else value


def _dtensor_of(tensor: Any, meshes: Meshes, path: str) -> torch.Tensor:
    # `tensor.shape` would warn.
    shards, shape = tensor.local_shards(), tuple(tensor.metadata().size)
    if shards:
        local = shards[0].tensor
    else:
        # There are fewer rows than ranks, and none is left for this rank: its shard is empty.
        facts = tensor.metadata()
        device = facts.shards_metadata[0].placement.device()
        local = torch.empty((0, *shape[1:]), dtype=facts.tensor_properties.dtype, device=device)
    mesh = meshes.of(tensor._process_group, local.device.type)
    placements = (*[compat.Replicate()] * (mesh.ndim - 1), compat.Shard(0))
    stride = torch.empty(shape, device="meta").stride()
    view = compat.as_dtensor(local, mesh, placements, torch.Size(shape), stride)
    box = layout_of(view).own_box(dist.get_rank())
    parts = [(tuple(shard.metadata.shard_offsets), tuple(shard.metadata.shard_sizes)) for shard in shards]
    if parts != ([(box.offset, box.size)] if box.numel else []):
        raise CheckpointingException(
            f"{path}: FSDP1 has {parts} of {shape} on this rank, not {box} (give it a device_mesh)"
        )
    return view


def _mesh_of(group: dist.ProcessGroup, replicas: Any, kind: str) -> DeviceMesh:
    if replicas is None:
        return DeviceMesh.from_group(group, kind)
    shard_ranks, replica_ranks = group_ranks(group), group_ranks(replicas)
    # As torch makes them: the shards next to each other, their replicas as far apart as there are shards.
    grid = torch.arange(len(shard_ranks) * len(replica_ranks)).view(-1, len(shard_ranks))
    row, column = divmod(dist.get_rank(), len(shard_ranks))
    if grid[row:].numel() == 0 or [grid[row].tolist(), grid[:, column].tolist()] != [
        list(shard_ranks),
        list(replica_ranks),
    ]:
        raise CheckpointingException(
            f"HYBRID_SHARD over the ranks {list(shard_ranks)} and {list(replica_ranks)}, which are no grid "
            "of all ranks: give FSDP1 a device_mesh"
        )
    return DeviceMesh.from_group([replicas, group], kind, mesh=grid, mesh_dim_names=("replicate", "shard"))
