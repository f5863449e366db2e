"""Room for the tensors of a load whose state dict has them on the meta device.

Must never change another value of the caller's dict: what the checkpoint lacks stays there.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

from torch_dcp_backport.compat import DTensor, current_device, from_local


def init_state_dict(state_dict: MutableMapping[Any, Any]) -> None:
    """Put a tensor with memory in the place of each tensor on the meta device, on the group's device.

    Torch 2.4 makes these tensors and drops them: https://github.com/pytorch/pytorch/pull/133256
    Later releases put None in the place of every object that they do not know.

    Raises:
        RuntimeError: a ShardedTensor on the meta device.
    """
    for key, value in state_dict.items():
        made = with_memory(value)
        if made is not value:
            state_dict[key] = made  # of a key that is there: the loop goes on


def with_memory(value: Any) -> Any:
    """Return the value itself, where nothing in it is on the meta device or it can be changed in place."""
    if isinstance(value, torch.Tensor):
        return materialized(value) if is_meta(value) else value
    if isinstance(value, MutableMapping):
        init_state_dict(value)
    elif isinstance(value, list):
        for index, made in enumerate(map(with_memory, value)):
            value[index] = made
    elif isinstance(value, tuple):
        made = [with_memory(each) for each in value]
        if any(new is not old for new, old in zip(made, value)):
            return rebuilt(value, made)
    return value


def is_meta(value: torch.Tensor) -> bool:
    if isinstance(value, ShardedTensor):
        if value.local_shards() and value.local_shards()[0].tensor.is_meta:
            raise RuntimeError(f"Found unsupported type {type(value)} for meta device loading.")
        return False
    return value.device.type == "meta"


def materialized(value: torch.Tensor) -> torch.Tensor:
    if isinstance(value, DTensor):
        device = current_device(value.device_mesh.device_type)
        return from_local(torch.empty_like(value.to_local(), device=device), value)
    kind = dist.distributed_c10d._get_pg_default_device().type
    return torch.empty_like(value, device=current_device(kind))


def rebuilt(value: tuple[Any, ...], values: Iterable[Any]) -> tuple[Any, ...]:
    """Return a tuple of the same class; a named one takes its values one by one."""
    named = hasattr(value, "_fields")
    return type(value)(*values) if named else type(value)(values)
