"""Get optimizer state under the names of the model's parameters.

Of the optimizer nothing is changed, but that a fresh one gets its first states.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.optim import Optimizer

from torch_dcp_backport import compat
from torch_dcp_backport.state_dict.collect import full_or_cpu
from torch_dcp_backport.state_dict.fqn import Names
from torch_dcp_backport.state_dict.model import own_method
from torch_dcp_backport.state_dict.optim.flat import flatten_optim_state
from torch_dcp_backport.state_dict.optim.form import GROUPS, PARAMS, STATE
from torch_dcp_backport.state_dict.optim.initial import first_states, init_optim_state, kind_of
from torch_dcp_backport.state_dict.options import StateDictInfo
from torch_dcp_backport.transfer.groups import group_ranks

COMPILED = "_orig_mod."


@torch.no_grad()
def get_optim_state(model: nn.Module, optimizers: Sequence[Optimizer], info: StateDictInfo) -> dict[str, Any]:
    if not info.handle_optim:
        return {}
    result: dict[str, Any] = {STATE: {}, GROUPS: []}
    for optim in optimizers:
        init_optim_state(optim)
        if info.fsdp_modules:
            named = fsdp1_named_state(model, optim, info)
        else:
            named = with_first_states(optim, named_state(model, optim))
        if named:
            result[STATE].update(named[STATE])
            result[GROUPS].extend(named[GROUPS])
    if info.flatten_optimizer_state_dict:
        result = flatten_optim_state(result)
    return full_or_cpu(result, info)  # type: ignore[no-any-return]


def named_state(model: nn.Module, optim: Optimizer) -> dict[str, Any]:
    """`optim.state_dict()` with FQNs for parameter numbers."""
    state = own_method(optim, "state_dict")()
    number = {
        param: index
        for index, param in enumerate(param for group in optim.param_groups for param in group[PARAMS])
    }
    names: dict[int, str] = {}
    every = Names(model)
    for name, param in model.named_parameters():
        if param in number:
            (fqn,) = every.fqns(name)
            names[number[param]] = fqn

    def name_of(index: int) -> str:
        if index not in names:
            raise KeyError(f"parameter {index} of {type(optim).__name__} is not a parameter of the model")
        return names[index]

    params = {index: param for param, index in number.items()}
    return {
        **state,
        STATE: {name_of(index): laid_as(params[index], value) for index, value in state[STATE].items()},
        GROUPS: [{**group, PARAMS: [name_of(index) for index in group[PARAMS]]} for group in state[GROUPS]],
    }


def laid_as(param: torch.Tensor, states: Any) -> Any:
    """The states of a parameter, those that are cut as it is with its placements.

    Operations with `out=` forget up to torch 2.7 that FSDP2 over TP cuts in another order (_StridedShard):
    what they leave (AMSGrad's maximum) would be put together permuted.
    """
    if not isinstance(param, compat.DTensor) or not isinstance(states, dict):
        return states
    return {
        name: compat.wrap_local(compat.local_part(value), param)
        if isinstance(value, compat.DTensor) and compat.is_cut_as(value, param)
        else value
        for name, value in states.items()
    }


def with_first_states(optim: Optimizer, named: dict[str, Any]) -> dict[str, Any]:
    """The state dict with first states for parameters that never had a gradient.

    A reader finds the same keys then, whichever parameters were used so far. Only where these states train
    as none would; the optimizer does not get them.
    """
    kind = kind_of(optim)
    if kind is None or not kind.neutral:
        return named
    fqn_of = {
        param: fqn
        for packed, group in zip(named[GROUPS], optim.param_groups)
        for fqn, param in zip(packed[PARAMS], group[PARAMS])
    }
    bare = {param for param, fqn in fqn_of.items() if not named[STATE].get(fqn)}
    first = first_states(optim, bare) if bare else {}
    if not first:
        return named
    states = dict(named[STATE])
    # In the order of the parameters: on another rank others may be without.
    ordered: dict[str, Any] = {}
    for param, fqn in fqn_of.items():
        held = states.pop(fqn, None)
        if param in first or held is not None:
            ordered[fqn] = first.get(param, held)
    return {**named, STATE: {**ordered, **states}}


def fsdp1_named_state(model: nn.Module, optim: Optimizer, info: StateDictInfo) -> dict[str, Any]:
    """FSDP1 names its states itself, but keeps the compiler's prefix."""
    state = own_method(optim, "state_dict")()
    with info.fsdp_context():
        state = FullyShardedDataParallel.optim_state_dict(model, optim, state, group=fsdp1_group(info))
    if not state:
        return {}
    return {
        **state,
        STATE: {fqn.replace(COMPILED, ""): value for fqn, value in state[STATE].items()},
        GROUPS: [
            {**group, PARAMS: [fqn.replace(COMPILED, "") for fqn in group[PARAMS]]} for group in state[GROUPS]
        ],
    }


def fsdp1_group(info: StateDictInfo) -> Optional[dist.ProcessGroup]:
    """The group that FSDP1 shards over: its ranks alone take part. None (the default group) for HSDP.

    And where a FlatParameter's states come from global rank 0, which has to be a member then.
    """
    module: Any = info.fsdp_modules[0]
    if module.sharding_strategy in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2):
        return None
    group: dist.ProcessGroup = module.process_group
    return group if module._use_orig_params or 0 in group_ranks(group) else None
