"""Private names of torch that need code of their own here, with torch 2.6's signatures."""

from __future__ import annotations

import functools
from typing import Any, Optional

import torch
from torch import nn

from torch_dcp_backport.state_dict.api import (
    Optimizers,
    OptimizerStateType,
    ValueType,
    as_tuple,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch_dcp_backport.state_dict.optim.absent import raise_missing
from torch_dcp_backport.state_dict.optim.flat import unflatten_optim_state
from torch_dcp_backport.state_dict.optim.initial import Beginning
from torch_dcp_backport.state_dict.optim.split import split_optim_state
from torch_dcp_backport.state_dict.options import StateDictInfo, StateDictOptions
from torch_dcp_backport.state_dict.patched import replace_methods


def split_optim_state_dict(
    model: nn.Module, optim: torch.optim.Optimizer, optim_state_dict: OptimizerStateType, info: StateDictInfo
) -> dict[str, Any]:
    beginning = Beginning(optim)
    part = split_optim_state(beginning, optim_state_dict, info)
    raise_missing([beginning])
    return part


def unflatten_optim_state_dict(
    optim: torch.optim.Optimizer, state_dict: dict[str, ValueType], info: StateDictInfo
) -> dict[str, Any]:
    beginning = Beginning(optim)
    part = unflatten_optim_state(beginning, state_dict, info)
    raise_missing([beginning])
    return part


def patch_model_state_dict(model: nn.Module, *, options: Optional[StateDictOptions] = None) -> None:
    """Make `model.state_dict()` and `model.load_state_dict()` `get_` and `set_model_state_dict`."""
    get = functools.partial(get_model_state_dict, model, options=options)
    replace_methods([model], get, functools.partial(set_model_state_dict, model, options=options))


def patch_optimizer_state_dict(
    model: nn.Module, *, optimizers: Optimizers, options: Optional[StateDictOptions] = None
) -> None:
    """The same for optimizers: each one's methods get and load the states of all of them."""
    optims = as_tuple(optimizers)
    get = functools.partial(get_optimizer_state_dict, model, optims, options=options)
    replace_methods(optims, get, functools.partial(set_optimizer_state_dict, model, optims, options=options))
