"""A nested state dict, turned into whole and/or CPU tensors as the options ask.

Never changes the tree it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._state_dict_utils import _gather_state_dict

from torch_dcp_backport import compat
from torch_dcp_backport.state_dict.options import StateDictInfo
from torch_dcp_backport.transfer import Held, Layout, gather, layout_of

Path = tuple[object, ...]


class Index(int):
    """A step of a path into a list, as opposed to an integer key of a dict."""


def full_or_cpu(state_dict: Any, info: StateDictInfo) -> Any:
    """`state_dict` as `full_state_dict` and `cpu_offload` ask for it.

    With both, global rank 0 alone gets it and the other ranks get an empty dict.
    """
    if info.full_state_dict:
        to = 0 if info.cpu_offload and dist.is_initialized() else None
        return whole_tree(state_dict, to, info.cpu_offload)
    if info.cpu_offload:
        return rebuild(state_dict, lambda _, value: value.cpu() if torch.is_tensor(value) else value)
    return state_dict


def whole_tree(tree: Any, to: Optional[int], cpu_offload: bool) -> Any:
    """`tree` with whole tensors in place of DTensors, on the global rank `to` or on every rank."""
    everything = leaves(tree, opens=lambda _: True)
    sharded = {path: value for path, value in everything.items() if isinstance(value, compat.DTensor)}
    whole: dict[Path, torch.Tensor] = {}
    for group, tensors in by_group(sharded):
        whole.update(whole_tensors(tensors, group, to, cpu_offload))

    keep = to is None or dist.get_rank() == to

    def leaf(path: Path, value: Any) -> Any:
        if path in sharded:
            return whole.get(path)
        if isinstance(value, ShardedTensor):
            # FSDP1's legacy kind; a collective, so every rank takes part. Not part of the leak.
            value = _gather_state_dict({"value": value})["value"]
        return value.cpu() if cpu_offload and keep and torch.is_tensor(value) else value

    result = rebuild(tree, leaf)
    return result if keep else {}


def by_group(
    tensors: Mapping[Path, compat.DTensor],
) -> list[tuple[Optional[dist.ProcessGroup], dict[Path, compat.DTensor]]]:
    """The tensors by the process group that spans their mesh; None where no group does."""
    world = set(compat.group_ranks()) if tensors else set()
    parts: dict[Any, tuple[Optional[dist.ProcessGroup], dict[Path, compat.DTensor]]] = {}
    for path, tensor in tensors.items():
        mesh = tensor.device_mesh
        _, ranks = compat.mesh_ranks(mesh)
        group = None
        if set(ranks) == world:
            group = dist.group.WORLD
        elif mesh.ndim == 1:
            group = mesh.get_group(0)
        parts.setdefault(frozenset(ranks), (group, {}))[1][path] = tensor
    return list(parts.values())


def whole_tensors(
    tensors: Mapping[Path, compat.DTensor],
    group: Optional[dist.ProcessGroup],
    to: Optional[int],
    cpu_offload: bool,
) -> dict[Path, torch.Tensor]:
    keep = to is None or dist.get_rank() == to
    found: dict[Path, torch.Tensor] = {}
    moving: dict[Path, Held] = {}
    for path, tensor in tensors.items():
        layout = layout_or_none(tensor)
        local = compat.local_part(tensor).detach()
        if group is None or layout is None:
            # A mesh of several dimensions inside the world has no group of its own to gather in, and
            # making one would need ranks that are not here; DTensor goes dimension by dimension.
            value = tensor.full_tensor()
            if keep:
                found[path] = value.cpu() if cpu_offload else value
        elif layout.is_sharded:
            moving[path] = Held(local, layout)
        elif keep:
            kind = "cpu" if cpu_offload else tensor.device_mesh.device_type
            found[path] = local if local.device.type == kind else local.to(compat.current_device(kind))

    def make(path: Any) -> torch.Tensor:
        like = tensors[path]
        device = compat.current_device("cpu" if cpu_offload else like.device_mesh.device_type)
        return torch.empty(like.shape, dtype=like.dtype, device=device)

    # Where rank 0 is not a member nobody keeps the result, and nothing needs to travel.
    if moving and (to is None or to in compat.group_ranks(group)):
        found.update(gather(moving, make, to=to, group=group))  # type: ignore[arg-type]
    return found


def layout_or_none(tensor: compat.DTensor) -> Optional[Layout]:
    """None for a tensor whose placements do not say where its elements live (partial sums)."""
    try:
        return layout_of(tensor)
    except NotImplementedError:
        return None


def rebuild(tree: Any, leaf: Callable[[Path, Any], Any], path: Path = ()) -> Any:
    """A copy of nested dicts, lists and tuples with `leaf(path, value)` for every other value."""
    if isinstance(tree, Mapping):
        return {key: rebuild(value, leaf, (*path, key)) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        items = [rebuild(value, leaf, (*path, index)) for index, value in enumerate(tree)]
        return tuple(items) if isinstance(tree, tuple) else items
    return leaf(path, tree)


def leaves(tree: Any, opens: Callable[[Sequence[Any]], bool]) -> dict[Path, Any]:
    """path -> value of a nested dict; lists are opened only where `opens(list)` says so."""
    found: dict[Path, Any] = {}

    def visit(path: Path, value: Any) -> None:
        if isinstance(value, Mapping) and value:
            for key, one in value.items():
                visit((*path, key), one)
        elif isinstance(value, (list, tuple)) and opens(value):
            for index, one in enumerate(value):
                visit((*path, Index(index)), one)
        else:
            found[path] = value

    visit((), tree)
    return found
