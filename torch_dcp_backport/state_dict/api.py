"""The public functions, with upstream's names and signatures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Optional, Union

import torch
from torch import nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.nn.modules.module import _IncompatibleKeys

from torch_dcp_backport.compat import DTensor
from torch_dcp_backport.state_dict.form import model_problem, optim_problem, unflatten_model_state
from torch_dcp_backport.state_dict.load_state import load_model_state, load_optim_state, load_state
from torch_dcp_backport.state_dict.model.get import get_model_state
from torch_dcp_backport.state_dict.optim.get import get_optim_state
from torch_dcp_backport.state_dict.options import (
    StateDictInfo,
    StateDictOptions,
    Submodules,
    info_of,
    verify_options,
)
from torch_dcp_backport.transfer.collector import gc_context

PrimitiveType = Union[DTensor, ShardedTensor, torch.Tensor, int, float, str]
ValueType = Union[PrimitiveType, list[PrimitiveType], tuple[PrimitiveType], dict[str, "ValueType"]]
DictValueType = dict[str, ValueType]
ListDictValueType = list[DictValueType]
OptimizerStateType = dict[str, Union[DictValueType, ListDictValueType]]

Optimizers = Union[torch.optim.Optimizer, Iterable[torch.optim.Optimizer]]


def get_model_state_dict(
    model: nn.Module,
    *,
    submodules: Submodules = None,
    options: Optional[StateDictOptions] = None,
) -> dict[str, ValueType]:
    """The state dict of `model` under canonical FQNs (those of the model without any wrapper).

    Args:
        model: plain, or parallelised by FSDP2 (`fully_shard`), FSDP1, DDP, TP, or several of them.
        submodules: deprecated; only what belongs to these modules.
        options: see `StateDictOptions`.

    Returns:
        FQN -> tensor. Shards are DTensors of the global shape, or whole tensors with
        `full_state_dict`; then with `cpu_offload` too, ranks other than 0 get an empty dict.
    """
    with gc_context():
        info = verify_options(model, (), optim_only=False, submodules=submodules, options=options)
        state = get_model_state(model, info)
        verify_state_dict(state, {}, info)
        return state


def get_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    submodules: Submodules = None,
    options: Optional[StateDictOptions] = None,
) -> OptimizerStateType:
    """The state dict of one or several optimizers of `model`, with FQNs for parameter numbers.

    States that do not exist yet are as the first step would find them: all of an optimizer that has
    neither states nor gradients, which then has them too; of torch's own optimizers also those of single
    parameters, where they train as with none.

    Returns:
        {"state": {FQN: {name: value}}, "param_groups": [...]}, or one flat dict with
        `flatten_optimizer_state_dict`.
    """
    with gc_context():
        optims = as_tuple(optimizers)
        info = verify_options(model, optims, optim_only=True, submodules=submodules, options=options)
        state = get_optim_state(model, optims, info)
        verify_state_dict({}, state, info)
        return state


def get_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    submodules: Submodules = None,
    options: Optional[StateDictOptions] = None,
) -> tuple[dict[str, ValueType], OptimizerStateType]:
    """(`get_model_state_dict`, `get_optimizer_state_dict`) in one call."""
    with gc_context():
        optims = as_tuple(optimizers)
        info = verify_options(model, optims, optim_only=False, submodules=submodules, options=options)
        model_state = get_model_state(model, info)
        optim_state = get_optim_state(model, optims, info)
        verify_state_dict(model_state, optim_state, info)
        return model_state, optim_state


def set_model_state_dict(
    model: nn.Module,
    model_state_dict: Mapping[str, ValueType],
    *,
    options: Optional[StateDictOptions] = None,
) -> _IncompatibleKeys:
    """Load a state dict with canonical FQNs into `model`.

    With `full_state_dict` the tensors are whole and every rank takes its own slice; with
    `broadcast_from_rank0` too, only global rank 0 holds them and no rank ever holds more than its
    shards and the staging buffers (`torch_dcp_backport.transfer`). Parameters on the meta device
    are created. The caller's dict is left as it is.

    Returns:
        (missing_keys, unexpected_keys).

    Raises:
        ValueError: `broadcast_from_rank0` without `full_state_dict`.
        RuntimeError: missing or unexpected keys (strict), wrong shapes or types. With
            `full_state_dict` the same message on every rank, before anything was written.
    """
    state = unflatten_model_state(model, model_state_dict)
    with gc_context():
        info = info_of(model, (), optim_only=False, options=options)
        return load_model_state(model, state, info, model_problem(state, info))


def set_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    optim_state_dict: OptimizerStateType,
    *,
    options: Optional[StateDictOptions] = None,
) -> None:
    """Load a state dict of `get_optimizer_state_dict`, nested or flat, into one or several optimizers.

    Options and errors are those of `set_model_state_dict`.
    """
    with gc_context():
        optims = as_tuple(optimizers)
        info = verify_options(model, optims, optim_only=True, options=options)
        load_optim_state(model, optims, optim_state_dict, info, optim_problem(optim_state_dict, info))


def set_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    model_state_dict: Mapping[str, ValueType],
    optim_state_dict: OptimizerStateType,
    options: Optional[StateDictOptions] = None,
) -> _IncompatibleKeys:
    """Load model and optimizers as one: with `full_state_dict` nothing is written before all is known to fit.

    Options, result and errors are those of `set_model_state_dict`. Loading code of optimizers and of the
    model runs last, in this order; if it fails, the error says what was written.
    """
    state = unflatten_model_state(model, model_state_dict)
    with gc_context():
        optims = as_tuple(optimizers)
        # Only rank 0 knows whether there is a model state to load.
        broadcast = options is not None and options.broadcast_from_rank0
        info = verify_options(model, optims, optim_only=not state and not broadcast, options=options)
        return load_state(model, optims, state, optim_state_dict, info)


def as_tuple(optimizers: Optimizers) -> tuple[torch.optim.Optimizer, ...]:
    return (optimizers,) if isinstance(optimizers, torch.optim.Optimizer) else tuple(optimizers)


def verify_state_dict(
    model_state_dict: Mapping[str, Any], optim_state_dict: Mapping[str, Any], info: StateDictInfo
) -> None:
    problem = model_problem(model_state_dict, info) or optim_problem(optim_state_dict, info)
    if problem:
        raise RuntimeError(str(problem))
