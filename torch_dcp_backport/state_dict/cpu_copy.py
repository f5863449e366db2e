"""Copies of a state dict on the CPU: made once and filled again at every save, or made at once.

A copy never shares memory with what it was made from, and never records autograd history.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed._state_dict_utils import CompanionMismatch

from torch_dcp_backport import compat
from torch_dcp_backport.state_dict.destination import local_of
from torch_dcp_backport.state_dict.tree import Path, check_types, rebuild, untouched
from torch_dcp_backport.transfer import spell_key

#: Nested dicts, lists and tuples of tensors and small values.
Tree = dict[str, Any]
CPU = torch.device("cpu")
#: cudaHostRegisterPortable: pinned for every CUDA context of the process.
PORTABLE = 1


@torch.no_grad()
def create_cpu_state_dict(state_dict: Tree, pin_memory: bool = False, share_memory: bool = False) -> Tree:
    """A state dict of the same structure, with new tensors on the CPU whose values mean nothing yet.

    DTensors and ShardedTensors stay such, with new local tensors. Other values are taken over.

    Args:
        state_dict: only looked at.
        pin_memory: page-locked memory, for faster copies from an accelerator. Scalars and empty
            tensors have no use for it.
        share_memory: memory that other processes can map. Together with `pin_memory` it is slow to
            make (CUDA only), meant for copies that live long.
    """
    make = functools.partial(allocate, pin=pin_memory, share=share_memory)

    def leaf(_: Path, value: Any) -> Any:
        return with_locals(value, make) if torch.is_tensor(value) else untouched(value)

    return rebuild(state_dict, leaf)  # type: ignore[no-any-return]


@torch.no_grad()
def copy_state_dict(
    state_dict: Tree,
    copy_state_dict: Tree,
    non_blocking: bool = False,
    type_check: bool = True,
) -> Tree:
    """Copy every tensor of `state_dict` into the one in the same place of `copy_state_dict`.

    Args:
        state_dict: only read.
        copy_state_dict: of the same structure, as `create_cpu_state_dict` makes it.
        non_blocking: the caller waits for the device before reading the copy.
        type_check: refuse values that a checkpoint cannot hold; else they are deep-copied.

    Returns:
        A new dict of dicts with the tensors of `copy_state_dict` and the other values of `state_dict`.

    Raises:
        CompanionMismatch: the two differ in structure, kinds or shapes; before anything was copied.
        ValueError: an unsupported type (type_check).
    """
    if type_check:
        check_types(state_dict)
    targets: dict[Path, torch.Tensor] = {}
    moves: list[tuple[torch.Tensor, torch.Tensor]] = []
    for path, value, target in pairs(state_dict, copy_state_dict):
        if torch.is_tensor(value):
            targets[path] = target
            moves += counterparts_of(path, value, target)
    result = rebuild(state_dict, lambda path, value: targets[path] if path in targets else untouched(value))
    for source, local in moves:
        local.copy_(source, non_blocking=non_blocking)
    return result  # type: ignore[no-any-return]


@torch.no_grad()
def offload_state_dict_to_cpu(
    state_dict: Tree, *, ranks_only: tuple[int, ...] = (), type_check: bool = True
) -> Tree:
    """A copy of `state_dict` on the CPU, also of what is there already: training may go on meanwhile.

    Args:
        state_dict: only read.
        ranks_only: the global ranks that get it, the others get an empty dict; () for all.
        type_check: refuse values that a checkpoint cannot hold; else they are deep-copied.
    """
    if type_check:
        check_types(state_dict)
    if ranks_only and dist.get_rank() not in ranks_only:
        return {} if isinstance(state_dict, Mapping) else None

    def leaf(_: Path, value: Any) -> Any:
        return with_locals(value, detached_copy) if torch.is_tensor(value) else untouched(value)

    return rebuild(state_dict, leaf)  # type: ignore[no-any-return]


def check_state_dict_similarity(state_dict: Tree, compared_state_dict: Tree) -> bool:
    """Whether the two have one structure, and in the same places tensors of one shape, dtype and layout."""
    try:
        for path, value, other in pairs(state_dict, compared_state_dict):
            if torch.is_tensor(value) != torch.is_tensor(other):
                return False
            if torch.is_tensor(value):
                counterparts_of(path, value, other)
                if value.dtype != other.dtype:
                    return False
    except CompanionMismatch:
        return False
    return True


# --- new tensors -----------------------------------------------------------------------------


def with_locals(value: torch.Tensor, make: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """A tensor of the kind and layout of `value` around make(local tensor), which is on the CPU."""
    if isinstance(value, ShardedTensor):
        return sharded_with_locals(value, make)
    if isinstance(value, compat.DTensor):
        return compat.wrap_local(make(compat.local_part(value)), value)
    return make(value)


def detached_copy(value: torch.Tensor) -> torch.Tensor:
    return value.detach().to(CPU, copy=True)


def allocate(like: torch.Tensor, pin: bool, share: bool) -> torch.Tensor:
    if like.dim() == 0:
        return torch.zeros((), dtype=like.dtype, device=CPU)
    pin = pin and like.numel() > 0  # there is no page to lock in an empty tensor
    new = torch.empty(tuple(like.shape), dtype=like.dtype, device=CPU, pin_memory=pin and not share)
    if share:
        new.share_memory_()  # type: ignore[no-untyped-call]
        if pin:
            register(new)
    return new


def register(shared: torch.Tensor) -> None:
    """Pin memory that is mapped already, until the tensor is freed."""
    address = shared.data_ptr()
    code = int(cuda_runtime().cudaHostRegister(address, shared.nbytes, PORTABLE))
    if code:
        raise RuntimeError(f"pinning {shared.nbytes} bytes of shared memory failed with CUDA error {code}")
    # The address only: a reference to the tensor would keep it for ever.
    weakref.finalize(shared, unregister, address)


def cuda_runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def unregister(address: int) -> None:
    code = int(cuda_runtime().cudaHostUnregister(address))
    if code:
        raise RuntimeError(f"unpinning shared memory failed with CUDA error {code}")


def sharded_with_locals(value: ShardedTensor, make: Callable[[torch.Tensor], torch.Tensor]) -> ShardedTensor:
    """The same for FSDP1's kind. A rank without shards has nothing to copy."""
    if not value.local_shards():
        return value
    metadata = copy.deepcopy(value.metadata())
    metadata.tensor_properties.pin_memory = metadata.tensor_properties.requires_grad = False
    for shard_metadata in metadata.shards_metadata:
        shard_metadata.placement._device = CPU  # type: ignore[union-attr]
    shards = []
    for shard in value.local_shards():
        shard_metadata = copy.deepcopy(shard.metadata)
        shard_metadata.placement._device = CPU  # type: ignore[union-attr]
        local = torch.empty(shard_metadata.shard_sizes, dtype=shard.tensor.dtype, device=CPU)
        shards.append(Shard(local, shard_metadata))
    new = ShardedTensor._init_from_local_shards_and_global_metadata(
        shards, metadata, process_group=value._process_group, init_rrefs=value._init_rrefs
    )
    # Only now: a ShardedTensor refuses shards that are pinned although its metadata does not say so.
    for shard, old in zip(new.local_shards(), value.local_shards()):
        shard.tensor = make(old.tensor)
    return new


# --- two state dicts, side by side -----------------------------------------------------------


def pairs(value: Any, other: Any, path: Path = ()) -> Iterator[tuple[Path, Any, Any]]:
    """Yield (path, value, the other tree's value) of everything in two trees of one structure.

    Raises:
        CompanionMismatch: they are not of one structure.
    """
    if isinstance(value, Mapping):
        if not isinstance(other, Mapping) or set(value) != set(other):
            raise mismatch(path, keys_text(value), keys_text(other))
        for key, child in value.items():
            yield from pairs(child, other[key], (*path, key))
    elif isinstance(value, (list, tuple)):
        if not isinstance(other, (list, tuple)) or len(value) != len(other):
            raise mismatch(path, f"a list of {len(value)}", keys_text(other))
        for index, (child, other_child) in enumerate(zip(value, other)):
            yield from pairs(child, other_child, (*path, index))
    else:
        yield path, value, other


def counterparts_of(path: Path, value: torch.Tensor, other: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The local tensors of `value`, each with its counterpart in `other`.

    Raises:
        CompanionMismatch: `other` is not a tensor of the same kind, shape and layout.
    """
    if not alike(value, other):
        raise mismatch(path, describe(value), describe(other))
    locals_, counterparts = locals_of(value), locals_of(other)
    shapes = [tuple(local.shape) for local in locals_]
    other_shapes = [tuple(local.shape) for local in counterparts]
    if shapes != other_shapes:
        raise mismatch(path, f"local shapes {shapes}", f"{other_shapes}")
    return list(zip(locals_, counterparts))


def alike(value: torch.Tensor, other: Any) -> bool:
    """Same kind, same shape, and DTensors spread over the same ranks in the same way; on any device."""
    for kind in (ShardedTensor, compat.DTensor):
        if isinstance(value, kind) is not isinstance(other, kind):
            return False
    if not torch.is_tensor(other) or value.size() != other.size():
        return False
    if not isinstance(value, compat.DTensor) or not isinstance(other, compat.DTensor):
        return True
    mesh, other_mesh = value.device_mesh, other.device_mesh
    if mesh is not other_mesh and not torch.equal(mesh.mesh, other_mesh.mesh):
        return False
    return mesh.size() == 1 or tuple(value.placements) == tuple(other.placements)


def locals_of(value: torch.Tensor) -> list[torch.Tensor]:
    if isinstance(value, ShardedTensor):
        return [shard.tensor for shard in value.local_shards()]
    return [local_of(value)]


def describe(value: object) -> str:
    if isinstance(value, ShardedTensor):
        return f"a ShardedTensor of {tuple(value.size())}"
    if isinstance(value, compat.DTensor):
        ranks = value.device_mesh.mesh.tolist()
        return f"a DTensor of {tuple(value.shape)} {value.placements} on ranks {ranks}"
    return f"a tensor of {tuple(value.shape)}" if torch.is_tensor(value) else f"a {type(value).__name__}"


def keys_text(value: object) -> str:
    if isinstance(value, Mapping):
        return f"keys {sorted(map(str, value))[:8]}"
    if isinstance(value, (list, tuple)):
        return f"a list of {len(value)}"
    return describe(value)


def mismatch(path: Path, expected: str, got: str) -> CompanionMismatch:
    where = spell_key(path) if path else "at the top"
    return CompanionMismatch(f"the copy has another structure, {where}: expected {expected}, got {got}")
