"""This rank's part of a tensor: of a DTensor on any mesh, or of a plain tensor.

Reads layouts only; moves nothing.
"""

from __future__ import annotations

from typing import NamedTuple, Optional, Union

import torch
import torch.distributed as dist

from torch_dcp_backport import compat
from torch_dcp_backport.dist_checkpointing.core import CheckpointingException
from torch_dcp_backport.transfer import Box, Group, Layout, group_ranks, layout_of, misfit


class TensorPart(NamedTuple):
    """This rank's part of a tensor."""

    #: In the shape of the box.
    local: torch.Tensor
    box: Box
    #: Zeros for the main copy.
    replica: Union[int, tuple[int, ...]]
    #: The lowest rank of the mesh; this rank for a plain tensor.
    mesh: Optional[int] = None


def part_of_this_rank(key: str, tensor: torch.Tensor, group: Group = None) -> TensorPart:
    """Return this rank's part. A plain tensor is the same on every rank of the group.

    Raises:
        NotImplementedError: a placement that does not say where elements live (Partial).
        CheckpointingException: a local tensor that is not the shard that its placements say.
    """
    layout, rank = layout_of(tensor), dist.get_rank() if dist.is_initialized() else 0
    local = compat.arrived(compat.local_part(tensor)) if isinstance(tensor, compat.DTensor) else tensor
    problem = misfit(key, local, layout, rank)
    if problem is not None:
        raise CheckpointingException(str(problem))
    local, box = local.detach(), layout.own_box(rank)
    if tuple(local.shape) != box.size:
        # It has no elements, and another shape than the empty box.
        local = local.new_empty(box.size)
    return TensorPart(
        local, box, replica_of(layout, rank, group), min(layout.mesh.ranks) if layout.mesh else rank
    )


def replica_of(layout: Layout, rank: int, group: Group = None) -> Union[int, tuple[int, ...]]:
    """Return the number of this copy: its place in the group, or along the mesh dimensions of replicas."""
    if layout.mesh is None:
        return group_ranks(group).index(rank) if dist.is_initialized() else 0
    coordinate = layout.mesh.coordinates.get(rank)
    if coordinate is None:
        return 1  # outside the mesh the box is empty
    return tuple(coordinate[dim] for dim in layout.replica_dims) or 0
