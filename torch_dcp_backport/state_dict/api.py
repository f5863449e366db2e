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
from torch_dcp_backport.state_dict.options import StateDictInfo, StateDictOptions, Submodules
from torch_dcp_backport.state_dict.verify import info_of, verify_options
from torch_dcp_backport.transfer import gc_context

PrimitiveType = Union[DTensor, ShardedTensor, torch.Tensor, int, float, str]
"""A value of a state dict that has no parts."""
ValueType = Union[PrimitiveType, list[PrimitiveType], tuple[PrimitiveType], dict[str, "ValueType"]]
"""A value of a state dict, nested or not."""
DictValueType = dict[str, ValueType]
"""A state dict of a model, or the state of a parameter."""
ListDictValueType = list[DictValueType]
"""The param groups of an optimizer."""
OptimizerStateType = dict[str, Union[DictValueType, ListDictValueType]]
"""A state dict of an optimizer."""

Optimizers = Union[torch.optim.Optimizer, Iterable[torch.optim.Optimizer]]


def get_model_state_dict(
    model: nn.Module,
    *,
    submodules: Submodules = None,
    options: Optional[StateDictOptions] = None,
) -> dict[str, ValueType]:
    """Return the state dict of `model` under canonical FQNs (those of the model without any wrapper).

    Collective with `full_state_dict`, and for models with FSDP1.

    Args:
        model: a plain model, or one that is parallelised by FSDP2 (`fully_shard`), FSDP1, DDP, TP, or several
            of them.
        submodules: deprecated; only the entries that belong to these modules are returned.
        options: see `StateDictOptions`; None is the defaults.

    Returns:
        FQN -> tensor. Shards are DTensors of the global shape. With `full_state_dict` they are whole tensors;
        with `cpu_offload` as well, ranks other than 0 get an empty dict.

    Raises:
        RuntimeError: the state dict is empty, or has a flattened parameter (then `model` is not the root of
            FSDP1).
        ValueError: `broadcast_from_rank0` without `full_state_dict`.

    Example:
        >>> from torch import nn
        >>> from torch_dcp_backport.state_dict import get_model_state_dict
        >>> state = get_model_state_dict(nn.Linear(2, 3))
        >>> {name: tuple(value.shape) for name, value in state.items()}
        {'weight': (3, 2), 'bias': (3,)}
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
    """Return the state dict of one or several optimizers of `model`, with FQNs for parameter numbers.

    Collective with `full_state_dict`, and for models with FSDP1.

    States that do not exist yet are returned as the first step would find them. If an optimizer has neither
    states nor gradients, all of its states are created, and it keeps them. Of torch's own optimizers the
    missing states of single parameters are returned as well, where training goes on alike without them.

    Args:
        model: the model whose parameters the optimizers update; see `get_model_state_dict`.
        optimizers: one optimizer, or several.
        submodules: deprecated; only the states of parameters of these modules are returned.
        options: see `StateDictOptions`; None is the defaults.

    Returns:
        {"state": {FQN: {name: value}}, "param_groups": [...]}, or one flat dict with
        `flatten_optimizer_state_dict`.

    Raises:
        RuntimeError: no optimizer was passed, or the state dict is empty.
        ValueError: `broadcast_from_rank0` without `full_state_dict`.

    Example:
        >>> import torch
        >>> from torch_dcp_backport.state_dict import get_optimizer_state_dict
        >>> model = torch.nn.Linear(2, 3)
        >>> state = get_optimizer_state_dict(model, torch.optim.Adam(model.parameters()))
        >>> sorted(state["state"]["weight"])
        ['exp_avg', 'exp_avg_sq', 'step']
        >>> state["param_groups"][0]["params"]
        ['weight', 'bias']
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
    """Return the results of `get_model_state_dict` and `get_optimizer_state_dict`, of one call.

    Collective with `full_state_dict`, and for models with FSDP1.

    Args:
        model: see `get_model_state_dict`.
        optimizers: one optimizer of the model, or several; may be empty.
        submodules: deprecated; only the entries that belong to these modules are returned.
        options: see `StateDictOptions`; None is the defaults.

    Returns:
        The model's state dict, and that of its optimizers.

    Raises:
        RuntimeError: a state dict is empty, or as of `get_model_state_dict`.
        ValueError: `broadcast_from_rank0` without `full_state_dict`.

    Example:
        >>> import torch
        >>> from torch_dcp_backport.state_dict import get_state_dict
        >>> model = torch.nn.Linear(2, 3)
        >>> model_state, optim_state = get_state_dict(model, torch.optim.SGD(model.parameters(), lr=0.5))
        >>> sorted(model_state), optim_state["param_groups"][0]["lr"]
        (['bias', 'weight'], 0.5)
    """
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

    Collective with `full_state_dict`. The tensors are whole then, and every rank takes its own slice. With
    `broadcast_from_rank0` as well, only global rank 0 holds them, and no rank ever holds more than its
    shards and the staging buffers (`torch_dcp_backport.transfer`). Parameters on the meta device are
    created. The caller's dict is left as it is.

    Args:
        model: see `get_model_state_dict`.
        model_state_dict: FQN -> tensor, or the value of an extra state. Tensors have the global shape, whole
            or as DTensors; they are cast to the parameters' dtypes.
        options: see `StateDictOptions`; None is the defaults.

    Returns:
        A named tuple of the lists missing_keys and unexpected_keys.

    Raises:
        ValueError: `broadcast_from_rank0` without `full_state_dict`.
        RuntimeError: missing or unexpected keys (with `strict`), wrong shapes or types. With
            `full_state_dict` the message is the same on every rank, before anything was written.

    Example:
        >>> import torch
        >>> from torch_dcp_backport.state_dict import set_model_state_dict
        >>> model = torch.nn.Linear(2, 1)
        >>> set_model_state_dict(model, {"weight": torch.ones(1, 2), "bias": torch.zeros(1)})
        <All keys matched successfully>
        >>> model.weight.tolist()
        [[1.0, 1.0]]
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

    Collective with `full_state_dict`, as `set_model_state_dict` is.

    Args:
        model: the model whose parameters the optimizers update.
        optimizers: one optimizer, or several.
        optim_state_dict: states and options by FQN; of all the optimizers together.
        options: see `StateDictOptions`; None is the defaults.

    Raises:
        ValueError: `broadcast_from_rank0` without `full_state_dict`.
        RuntimeError: no optimizer was passed; missing keys, wrong shapes or types, as of
            `set_model_state_dict`.

    Example:
        >>> import torch
        >>> from torch_dcp_backport.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
        >>> model = torch.nn.Linear(2, 3)
        >>> saved = get_optimizer_state_dict(model, torch.optim.SGD(model.parameters(), lr=0.5))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> set_optimizer_state_dict(model, optimizer, saved)
        >>> optimizer.param_groups[0]["lr"]
        0.5
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

    Collective with `full_state_dict`. Loading code of optimizers and of the model runs last, in this order;
    if it fails, the error says what was written.

    Args:
        model: see `get_model_state_dict`.
        optimizers: one optimizer of the model, or several.
        model_state_dict: as of `set_model_state_dict`; if it is empty, only the optimizers are loaded.
        optim_state_dict: as of `set_optimizer_state_dict`.
        options: see `StateDictOptions`; None is the defaults.

    Returns:
        A named tuple of the model's missing_keys and unexpected_keys.

    Raises:
        ValueError: `broadcast_from_rank0` without `full_state_dict`.
        RuntimeError: missing or unexpected keys (with `strict`), wrong shapes or types.

    Example:
        >>> import torch
        >>> from torch_dcp_backport.state_dict import get_state_dict, set_state_dict
        >>> def new():
        ...     model = torch.nn.Linear(2, 3)
        ...     return model, torch.optim.Adam(model.parameters())
        >>> model_state, optim_state = get_state_dict(*new())
        >>> set_state_dict(*new(), model_state_dict=model_state, optim_state_dict=optim_state)
        <All keys matched successfully>
    """
    state = unflatten_model_state(model, model_state_dict)
    with gc_context():
        optims = as_tuple(optimizers)
        # Only rank 0 knows whether there is a model state to load.
        broadcast = options is not None and options.broadcast_from_rank0
        info = verify_options(model, optims, optim_only=not state and not broadcast, options=options)
        return load_state(model, optims, state, optim_state_dict, info)


def as_tuple(optimizers: Optimizers) -> tuple[torch.optim.Optimizer, ...]:
    if isinstance(optimizers, torch.optim.Optimizer):
        return (optimizers,)
    if not isinstance(optimizers, Iterable):
        raise TypeError(
            f"optimizers is a {type(optimizers).__name__}: expected an Optimizer, or several; "
            "if it wraps one, give that one"
        )
    return tuple(optimizers)


def verify_state_dict(
    model_state_dict: Mapping[str, Any], optim_state_dict: Mapping[str, Any], info: StateDictInfo
) -> None:
    problem = model_problem(model_state_dict, info) or optim_problem(optim_state_dict, info)
    if problem:
        raise RuntimeError(str(problem))
