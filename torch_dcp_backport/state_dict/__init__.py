"""The fixed `torch.distributed.checkpoint.state_dict`: upstream's names and signatures.

An ordinary library on any torch >= 2.4. It knows nothing of patching; `torch_dcp_backport` puts
these functions into torch's module where torch's own are broken.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Optional, Union

import torch
from torch import nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.nn.modules.module import _IncompatibleKeys

from torch_dcp_backport.compat import DTensor
from torch_dcp_backport.state_dict import load_state as _load_state
from torch_dcp_backport.state_dict import model as _model
from torch_dcp_backport.state_dict import optim as _optimizer
from torch_dcp_backport.state_dict.collect import full_or_cpu as _maybe_full_or_cpu_state_dict
from torch_dcp_backport.state_dict.cpu_copy import check_state_dict_similarity as _check_state_dict_similarity
from torch_dcp_backport.state_dict.cpu_copy import copy_state_dict as _copy_state_dict
from torch_dcp_backport.state_dict.cpu_copy import create_cpu_state_dict as _create_cpu_state_dict
from torch_dcp_backport.state_dict.cpu_copy import offload_state_dict_to_cpu as _offload_state_dict_to_cpu
from torch_dcp_backport.state_dict.fqn import ExtraState as _EXTRA_STATE
from torch_dcp_backport.state_dict.fqn import get_fqns as _get_fqns
from torch_dcp_backport.state_dict.fqn import walk_model_state as _iterate_valid_model_state
from torch_dcp_backport.state_dict.helpers import broadcast_state_dict as _broadcast_state_dict
from torch_dcp_backport.state_dict.helpers import distribute_state_dict as _distribute_state_dict
from torch_dcp_backport.state_dict.helpers import distribute_tensors as _distribute_tensors
from torch_dcp_backport.state_dict.helpers import gather_state_dict as _gather_state_dict
from torch_dcp_backport.state_dict.model import own_method as _state_dict_fn
from torch_dcp_backport.state_dict.optim import flatten_optim_state as _flatten_optim_state_dict
from torch_dcp_backport.state_dict.optim import unflatten_optim_state as _unflatten_optim_state_dict
from torch_dcp_backport.state_dict.options import FQNS_T, StateDictOptions, Submodules
from torch_dcp_backport.state_dict.options import StateDictInfo as _StateDictInfo
from torch_dcp_backport.state_dict.options import info_of as _info_of
from torch_dcp_backport.state_dict.options import verify_options as _verify_options
from torch_dcp_backport.state_dict.patched import replace_methods as _replace_methods

PrimitiveType = Union[DTensor, ShardedTensor, torch.Tensor, int, float, str]
ValueType = Union[PrimitiveType, list[PrimitiveType], tuple[PrimitiveType], dict[str, "ValueType"]]
DictValueType = dict[str, ValueType]
ListDictValueType = list[DictValueType]
OptimizerStateType = dict[str, Union[DictValueType, ListDictValueType]]

_OptimizerTuple = tuple[torch.optim.Optimizer, ...]
_Optimizers = Union[torch.optim.Optimizer, Iterable[torch.optim.Optimizer]]

__all__ = [
    "StateDictOptions",
    "get_model_state_dict",
    "set_model_state_dict",
    "get_optimizer_state_dict",
    "set_optimizer_state_dict",
    "get_state_dict",
    "set_state_dict",
    "OptimizerStateType",
    "ValueType",
    "PrimitiveType",
    "ListDictValueType",
    "DictValueType",
    "FQNS_T",
]


# --- public ----------------------------------------------------------------------------------


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
    with _gc_context():
        info = _verify_options(model, (), optim_only=False, submodules=submodules, options=options)
        state = _get_model_state_dict(model, info)
        _verify_state_dict(state, {}, info)
        return state


def get_optimizer_state_dict(
    model: nn.Module,
    optimizers: _Optimizers,
    *,
    submodules: Submodules = None,
    options: Optional[StateDictOptions] = None,
) -> OptimizerStateType:
    """The state dict of one or several optimizers of `model`, with FQNs for parameter numbers.

    States that do not exist yet are given as the first step would find them: all of an optimizer that has
    neither states nor gradients, which then has them too; of torch's own also those of single parameters,
    where that trains as having none.

    Returns:
        {"state": {FQN: {name: value}}, "param_groups": [...]}, or one flat dict with
        `flatten_optimizer_state_dict`.
    """
    with _gc_context():
        optims = _as_tuple(optimizers)
        info = _verify_options(model, optims, optim_only=True, submodules=submodules, options=options)
        state = _get_optim_state_dict(model, optims, info)
        _verify_state_dict({}, state, info)
        return state


def get_state_dict(
    model: nn.Module,
    optimizers: _Optimizers,
    *,
    submodules: Submodules = None,
    options: Optional[StateDictOptions] = None,
) -> tuple[dict[str, ValueType], OptimizerStateType]:
    """(`get_model_state_dict`, `get_optimizer_state_dict`) in one call."""
    with _gc_context():
        optims = _as_tuple(optimizers)
        info = _verify_options(model, optims, optim_only=False, submodules=submodules, options=options)
        model_state = _get_model_state_dict(model, info)
        optim_state = _get_optim_state_dict(model, optims, info)
        _verify_state_dict(model_state, optim_state, info)
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
    state = _unflatten_model_state_dict(model, model_state_dict)
    with _gc_context():
        info = _info_of(model, (), optim_only=False, options=options)
        return _load_state.load_model_state(model, state, info, _model.complaint_about(state, info))


def set_optimizer_state_dict(
    model: nn.Module,
    optimizers: _Optimizers,
    optim_state_dict: OptimizerStateType,
    *,
    options: Optional[StateDictOptions] = None,
) -> None:
    """Load a state dict of `get_optimizer_state_dict`, nested or flat, into one or several optimizers.

    Options and errors are those of `set_model_state_dict`.
    """
    with _gc_context():
        optims = _as_tuple(optimizers)
        info = _verify_options(model, optims, optim_only=True, options=options)
        complaint = _optimizer.complaint_about(optim_state_dict, info)
        _load_state.load_optim_state(model, optims, optim_state_dict, info, complaint)


def set_state_dict(
    model: nn.Module,
    optimizers: _Optimizers,
    *,
    model_state_dict: Mapping[str, ValueType],
    optim_state_dict: OptimizerStateType,
    options: Optional[StateDictOptions] = None,
) -> _IncompatibleKeys:
    """Load model and optimizers as one: with `full_state_dict` nothing is written before all is known to fit.

    Options, result and errors are those of `set_model_state_dict`. What a model's or an optimizer's own
    loading code does comes last, optimizers first; the error of one that fails says what was written.
    """
    state = _unflatten_model_state_dict(model, model_state_dict)
    with _gc_context():
        optims = _as_tuple(optimizers)
        # Only rank 0 knows whether there is a model state to load.
        broadcast = options is not None and options.broadcast_from_rank0
        info = _verify_options(model, optims, optim_only=not state and not broadcast, options=options)
        return _load_state.load_state(model, optims, state, optim_state_dict, info)


def _as_tuple(optimizers: _Optimizers) -> _OptimizerTuple:
    return (optimizers,) if isinstance(optimizers, torch.optim.Optimizer) else tuple(optimizers)


# --- private names that others call, with torch 2.6's signatures -------------------------------


@contextlib.contextmanager
def _gc_context() -> Iterator[None]:
    """No garbage collection meanwhile: a state dict's many small objects would trigger it over and over."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _verify_state_dict(
    model_state_dict: Mapping[str, Any], optim_state_dict: Mapping[str, Any], info: _StateDictInfo
) -> None:
    for complaint in (
        _model.complaint_about(model_state_dict, info),
        _optimizer.complaint_about(optim_state_dict, info),
    ):
        if complaint:
            raise RuntimeError(complaint)


def _unflatten_model_state_dict(model: nn.Module, state_dict: Mapping[Any, Any]) -> Mapping[str, Any]:
    return _model.unflatten_model_state(model, state_dict)


def _get_model_state_dict(model: nn.Module, info: _StateDictInfo) -> dict[str, ValueType]:
    return _model.get_model_state(model, info)


def _load_model_state_dict(
    model: nn.Module, state_dict: Mapping[str, ValueType], info: _StateDictInfo
) -> _IncompatibleKeys:
    return _load_state.load_model_state(model, state_dict, info)


def _init_optim_state(optim: torch.optim.Optimizer) -> None:
    _optimizer.init_optim_state(optim)


def _get_optim_state_dict(
    model: nn.Module, optimizers: _OptimizerTuple, info: _StateDictInfo
) -> OptimizerStateType:
    return _optimizer.get_optim_state(model, optimizers, info)


def _split_optim_state_dict(
    model: nn.Module, optim: torch.optim.Optimizer, optim_state_dict: OptimizerStateType, info: _StateDictInfo
) -> OptimizerStateType:
    return _optimizer.split_optim_state(optim, optim_state_dict, info)


def _load_optim_state_dict(
    model: nn.Module,
    optimizers: _OptimizerTuple,
    state_dict: OptimizerStateType,
    info: _StateDictInfo,
) -> None:
    _load_state.load_optim_state(model, optimizers, state_dict, info)


def _patch_model_state_dict(model: nn.Module, *, options: Optional[StateDictOptions] = None) -> None:
    """`model.state_dict()` and `model.load_state_dict()` become `get_` and `set_model_state_dict`."""
    get = functools.partial(get_model_state_dict, model, options=options)
    _replace_methods([model], get, functools.partial(set_model_state_dict, model, options=options))


def _patch_optimizer_state_dict(
    model: nn.Module, *, optimizers: _Optimizers, options: Optional[StateDictOptions] = None
) -> None:
    """The same for optimizers: each one's methods get and load the state of all of them."""
    optims = _as_tuple(optimizers)
    get = functools.partial(get_optimizer_state_dict, model, optims, options=options)
    _replace_methods(optims, get, functools.partial(set_optimizer_state_dict, model, optims, options=options))
