"""Get optimizer states under the names of the model's parameters.

No optimizer is changed, but a fresh one gets its first states.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Optional

import torch
from torch import nn
from torch.optim import Optimizer

from torch_dcp_backport import compat
from torch_dcp_backport.state_dict import fsdp1
from torch_dcp_backport.state_dict.collect import full_or_cpu
from torch_dcp_backport.state_dict.form import GROUPS, PARAMS, STATE, check_params, renamed_params
from torch_dcp_backport.state_dict.fqn import ModelNames
from torch_dcp_backport.state_dict.optim.flat import flatten_optim_state
from torch_dcp_backport.state_dict.optim.initial import first_states, init_optim_state, kind_of, params_of
from torch_dcp_backport.state_dict.options import StateDictInfo
from torch_dcp_backport.state_dict.patched import original_method
from torch_dcp_backport.transfer import warn_once

logger = logging.getLogger("torch_dcp_backport.state_dict.optimizer")


@torch.no_grad()
def get_optim_state(model: nn.Module, optimizers: Sequence[Optimizer], info: StateDictInfo) -> dict[str, Any]:
    if not info.handle_optim:
        return {}
    result: dict[str, Any] = {STATE: {}, GROUPS: []}
    params = Params(model)
    for optim in optimizers:
        check_params(optim, info.fqn_param_mapping)
    for optim in optimizers:
        init_optim_state(optim)
        if info.fsdp_modules:
            state = with_first_states(optim, own_state(optim))
            warn_of_left_out(optim, state)
            named = fsdp1.named_state(model, optim, state, info)
        else:
            named = with_first_states(optim, named_state(params, optim))
            warn_of_left_out(optim, named)
        if named:
            result[STATE].update(named[STATE])
            result[GROUPS].extend(named[GROUPS])
    if info.flatten_optimizer_state_dict:
        result = flatten_optim_state(result)
    return full_or_cpu(result, info)  # type: ignore[no-any-return]


class Params:
    """The parameters of a model, named in one walk for all optimizers of a call."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @functools.cached_property
    def fqns(self) -> dict[torch.Tensor, str]:
        names = ModelNames(self.model)
        fqns: dict[torch.Tensor, str] = {}
        for name, param in self.model.named_parameters():
            (fqns[param],) = names.fqns(name)
        return fqns


def own_state(optim: Optimizer) -> dict[str, Any]:
    """`optim.state_dict()`, which has states and groups.

    Raises:
        KeyError: it has none, as that of an optimizer that wraps another one.
    """
    state: dict[str, Any] = original_method(optim, "state_dict")()
    lacking = [key for key in (STATE, GROUPS) if key not in state]
    if lacking:
        raise KeyError(
            f"state_dict() of {type(optim).__name__} has no {' and no '.join(map(repr, lacking))}, but "
            f"{sorted(map(str, state))}; if it wraps an optimizer, give that one"
        )
    return state


def warn_of_left_out(optim: Optimizer, state: Mapping[str, Any]) -> None:
    """Warn of what an optimizer's own state dict has and a state dict by FQN has no place for."""
    others = sorted(str(key) for key in state if key not in (STATE, GROUPS))
    if others:
        warn_once(
            logger,
            f"state_dict() of {type(optim).__name__} has {', '.join(map(repr, others))}, "
            "which the state dict by FQN leaves out, as torch's does: save it beside",
        )


def named_state(params: Params, optim: Optimizer) -> dict[str, Any]:
    """`optim.state_dict()` with FQNs for parameter numbers."""
    state = own_state(optim)
    numbered = dict(enumerate(params_of(optim)))
    check_params(optim, params.fqns)
    fqns = {number: params.fqns[param] for number, param in numbered.items()}
    for number in (*state[STATE], *(number for group in state[GROUPS] for number in group[PARAMS])):
        if number not in fqns:
            raise KeyError(f"parameter {number} of {type(optim).__name__} is not a parameter of the model")
    laid = {number: laid_as(numbered.get(number), states) for number, states in state[STATE].items()}
    return renamed_params({**state, STATE: laid}, fqns.__getitem__)


def params_by_fqn(optim: Optimizer, named: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """FQN -> parameter, of an optimizer and its `named_state`."""
    return {
        fqn: param
        for fqns, group in zip(named[GROUPS], optim.param_groups)
        for fqn, param in zip(fqns[PARAMS], group[PARAMS])
    }


def laid_as(param: Optional[torch.Tensor], states: Any) -> Any:
    """Return the states of a parameter; those that are cut as the parameter is get its placements.

    Operations with `out=` forget up to torch 2.7 that FSDP2 over TP cuts in another order (_StridedShard):
    their results (AMSGrad's maximum) would be put together permuted.
    """
    if not isinstance(param, compat.DTensor) or not isinstance(states, dict):
        return states
    return {
        name: compat.wrap_local(compat.local_part(value), param)
        if isinstance(value, compat.DTensor) and compat.is_cut_as(value, param)
        else value
        for name, value in states.items()
    }


def with_first_states(optim: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """A state dict, by FQN or number, with first states for parameters that never had a gradient.

    A reader finds the same keys then, whichever parameters were used so far. Only where these states train
    as none would; the optimizer does not get them.
    """
    kind = kind_of(optim)
    if kind is None or not kind.neutral:
        return state
    params = params_by_fqn(optim, state)
    # FSDP1's parameters of other ranks are empty on this one, used or not.
    bare = {param for fqn, param in params.items() if not state[STATE].get(fqn) and param.numel()}
    first = first_states(optim, bare) if bare else {}
    if not first:
        return state
    states = dict(state[STATE])
    # In the order of the parameters: on another rank others may be without.
    ordered: dict[str, Any] = {}
    for fqn, param in params.items():
        saved = states.pop(fqn, None)
        if param in first or saved is not None:
            ordered[fqn] = first.get(param, saved)
    return {**state, STATE: {**ordered, **states}}
