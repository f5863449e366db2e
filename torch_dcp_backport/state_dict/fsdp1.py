"""FSDP1: its own code names, gathers and loads its states.

Nothing here is for FSDP2 (`fully_shard`).
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any, Optional

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from torch.optim import Optimizer

from torch_dcp_backport.state_dict.form import renamed_params
from torch_dcp_backport.state_dict.fqn import COMPILED_PREFIX, ModelNames
from torch_dcp_backport.state_dict.options import StateDictInfo
from torch_dcp_backport.transfer import group_ranks


@contextlib.contextmanager
def state_dict_type(model: nn.Module, info: StateDictInfo) -> Iterator[None]:
    """FSDP1's switch between full and sharded state dicts, without its deprecation warning."""
    offload = info.cpu_offload
    if info.full_state_dict:
        kind = StateDictType.FULL_STATE_DICT
        # What is whole on the CPU already, FSDP1 before torch 2.15 does not copy when asked to bring it
        # there, and frees it: the process dies as it is read.
        modules = FullyShardedDataParallel.fsdp_modules(model)
        is_there = {module.compute_device.type for module in modules if module.compute_device} == {"cpu"}
        config: Any = FullStateDictConfig(offload_to_cpu=offload and not is_there, rank0_only=offload)
        optim_config: Any = FullOptimStateDictConfig(
            offload_to_cpu=offload, rank0_only=offload or info.broadcast_from_rank0
        )
    else:
        kind = StateDictType.SHARDED_STATE_DICT
        config = ShardedStateDictConfig(offload_to_cpu=offload)
        optim_config = ShardedOptimStateDictConfig(offload_to_cpu=offload)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="FSDP.state_dict_type", category=FutureWarning)
        with FullyShardedDataParallel.state_dict_type(model, kind, config, optim_config):
            yield


def named_state(
    model: nn.Module, optim: Optimizer, state: dict[str, Any], info: StateDictInfo
) -> dict[str, Any]:
    """`state` of `optim.state_dict()` by FQN, which FSDP1 gives with the compiler's prefix."""
    with info.fsdp_context():
        state = FullyShardedDataParallel.optim_state_dict(model, optim, state, group=group_of(info))
    return renamed_params(state, lambda fqn: fqn.replace(COMPILED_PREFIX, "")) if state else {}


def state_to_load(
    model: nn.Module, optim: Optimizer, state: dict[str, Any], info: StateDictInfo
) -> dict[str, Any]:
    """The states of FlatParameters, which FSDP1 makes of those under FQNs with the compiler's prefix."""
    prefixed: dict[str, str] = {}
    names = ModelNames(model)
    for name, _ in model.named_parameters():
        fqns, prefixed_fqns = names.fqns(name), names.fqns(name, skip_compiler_prefix=False)
        if fqns != prefixed_fqns:
            (fqn,), (prefixed_fqn,) = fqns, prefixed_fqns
            prefixed[fqn] = prefixed_fqn
    if state:
        state = renamed_params(state, lambda fqn: prefixed.get(fqn, fqn))
    with info.fsdp_context():
        return FullyShardedDataParallel.optim_state_dict_to_load(model, optim, state, group=group_of(info))


HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)


def group_of(info: StateDictInfo) -> Optional[dist.ProcessGroup]:
    """The group that FSDP1 shards over: its ranks alone take part. None (the default group) for HSDP.

    None, too, where a FlatParameter's states come from global rank 0 and it is no member.
    """
    module: Any = info.fsdp_modules[0]
    if module.sharding_strategy in HYBRID:
        return None
    group: dist.ProcessGroup = module.process_group
    return group if module._use_orig_params or 0 in group_ranks(group) else None


def groups_of(info: StateDictInfo) -> list[Optional[dist.ProcessGroup]]:
    """The groups over which the ranks of a load agree: those of the model, and global rank 0 if it sends."""
    if info.broadcast_from_rank0 and group_of(info) is None:
        return [None]
    module: Any = info.fsdp_modules[0]
    return [module.process_group, *([module._inter_node_pg] if module.sharding_strategy in HYBRID else [])]
