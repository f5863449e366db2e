"""The collectives of `dcp.save` and `dcp.load` in a process group that need not have global rank 0.

Ranks of torch.distributed's functions for objects are global, that of the coordinator is its group's.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, Optional

import torch.distributed as dist


def all_gather_keys(local_dict: Mapping[Any, Any], group: Optional[dist.ProcessGroup] = None) -> list[Any]:
    """Return the keys of all ranks of the group, sorted."""
    keys: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(keys, list(local_dict.keys()), group=group)
    return sorted(set(itertools.chain.from_iterable(keys)))


class DistWrapper:
    def broadcast_object(self: Any, object: Any) -> Any:
        """Return the coordinator's object."""
        held = [object]
        if self.use_dist:
            dist.broadcast_object_list(object_list=held, group=self.group, src=global_coordinator(self))
        return held[0]

    def gather_object(self: Any, object: Any) -> Optional[list[Any]]:
        """Return every rank's object on the coordinator, None on other ranks."""
        if not self.use_dist:
            return [object]
        held = [None] * dist.get_world_size(self.group) if self.is_coordinator else None
        dist.gather_object(
            obj=object, object_gather_list=held, dst=global_coordinator(self), group=self.group
        )
        return held

    def scatter_object(self: Any, object_list: Optional[list[Any]]) -> Any:
        """Return this rank's object out of the coordinator's list."""
        if not self.use_dist:
            assert object_list is not None
            return object_list[0]
        held = [None]
        dist.scatter_object_list(
            scatter_object_output_list=held,
            scatter_object_input_list=object_list if self.is_coordinator else None,
            src=global_coordinator(self),
            group=self.group,
        )
        return held[0]


def global_coordinator(wrapper: Any) -> int:
    if wrapper.group is None or wrapper.rank < 0:  # all ranks, or not a rank of the group
        return int(wrapper.coordinator_rank)
    return dist.get_global_rank(wrapper.group, wrapper.coordinator_rank)
