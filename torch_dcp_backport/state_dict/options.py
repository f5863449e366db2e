"""The options of a call, and the facts about its model that come with them once they are verified.

No state dict is read or written here.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, Optional, Union

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from torch_dcp_backport import compat
from torch_dcp_backport.state_dict import fsdp1
from torch_dcp_backport.state_dict.fqn import (
    FQN_MODIFIERS,
    ExtraState,
    ModelNames,
    get_fqns,
    walk_model_state,
)

FQNS_T = set[str]
"""The names of a parameter in the model without its wrappers (FQNs): several if it is tied."""
Submodules = Optional[set[nn.Module]]
ParamMapping = dict[Union[str, torch.Tensor], Union[FQNS_T, torch.Tensor]]


@dataclass
class StateDictOptions:
    """The options of the get and set functions: upstream's fields, in upstream's order.

    Args:
        full_state_dict: whole tensors instead of shards. A get gathers every shard. A set takes whole
            tensors, and each rank takes its own slice.
        cpu_offload: a get returns tensors on the CPU; with `full_state_dict` on global rank 0 alone, and the
            other ranks get an empty dict. A set makes parameters on the meta device on the CPU.
        ignore_frozen_params: leave parameters without `requires_grad` out of a get.
        keep_submodule_prefixes: deprecated, as `submodules` is; whether keys keep the submodule's prefix.
        strict: make a missing or an unexpected key an error.
        broadcast_from_rank0: in a set, only global rank 0 holds the state dict; the other ranks pass an empty
            one. Requires `full_state_dict`.
        flatten_optimizer_state_dict: optimizer states under flat keys ("state.FQN.exp_avg").
        dsd_fqn_modifiers: name of a method by which a module declares renamed children (upstream: since
            torch 2.7).

    Example:
        >>> from torch import nn
        >>> from torch_dcp_backport.state_dict import StateDictOptions, get_model_state_dict
        >>> model = nn.Linear(2, 3)
        >>> model.bias.requires_grad = False
        >>> list(get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True)))
        ['weight']
    """

    full_state_dict: bool = field(default=False)
    cpu_offload: bool = field(default=False)
    ignore_frozen_params: bool = field(default=False)
    keep_submodule_prefixes: bool = field(default=True)
    strict: bool = field(default=True)
    broadcast_from_rank0: bool = field(default=False)
    flatten_optimizer_state_dict: bool = field(default=False)
    dsd_fqn_modifiers: str = FQN_MODIFIERS


OPTIONS = tuple(option.name for option in fields(StateDictOptions))


@dataclass
class StateDictInfo(StateDictOptions):
    """The options of one call, and the facts about its model that `verify_options` finds."""

    #: parameter or buffer -> its FQNs, and FQN -> parameter or buffer.
    fqn_param_mapping: ParamMapping = field(default_factory=dict)
    #: The same, of those that have several FQNs.
    shared_params_mapping: ParamMapping = field(default_factory=dict)
    submodule_prefixes: set[str] = field(default_factory=set)
    handle_model: bool = True
    handle_optim: bool = True
    #: Makes FSDP1's own state_dict() return the asked-for kind.
    fsdp_context: Callable[[], Any] = contextlib.nullcontext
    #: FSDP1 modules; FSDP2 has none of them.
    fsdp_modules: list[nn.Module] = field(default_factory=list)


def verify_options(
    model: nn.Module,
    optims: tuple[torch.optim.Optimizer, ...],
    optim_only: bool,
    *,
    submodules: Submodules = None,
    options: Optional[StateDictOptions] = None,
) -> StateDictInfo:
    """Check the options of a call against its model.

    Raises:
        RuntimeError: an optimizer call without optimizers.
        ValueError: `broadcast_from_rank0` without `full_state_dict`.
    """
    if submodules:
        warnings.warn(
            # Programs and test suites filter by torch's own first words.
            "Getting submodules only model/optim state_dict is deprecated: filter the keys of the returned "
            "state dict instead.",
            FutureWarning,
            stacklevel=3,
        )
    info = info_of(model, optims, optim_only, submodules=submodules, options=options)
    info.fqn_param_mapping, info.shared_params_mapping = map_parameters(model, info.dsd_fqn_modifiers)
    return info


def info_of(
    model: nn.Module,
    optims: tuple[torch.optim.Optimizer, ...],
    optim_only: bool,
    *,
    submodules: Submodules = None,
    options: Optional[StateDictOptions] = None,
) -> StateDictInfo:
    """As `verify_options`, without the mappings of parameters: a load of a model alone asks for none."""
    if optim_only and not optims:
        raise RuntimeError("This call is about optimizers, but none was passed.")
    # An instance of torch's own class, made before activation, lacks the newer fields.
    asked = {name: getattr(options, name) for name in OPTIONS if hasattr(options, name)}
    if asked.get("broadcast_from_rank0") and not asked.get("full_state_dict"):
        raise ValueError("full_state_dict must be True when broadcast_from_rank0 is True.")

    compat.reshard(model)
    fsdp_modules: list[nn.Module] = list(FullyShardedDataParallel.fsdp_modules(model))
    info = StateDictInfo(
        **asked,
        submodule_prefixes=prefixes_of(model, submodules or set()),
        handle_model=not optim_only,
        handle_optim=bool(optims),
        fsdp_modules=fsdp_modules,
    )
    if fsdp_modules:
        info.fsdp_context = functools.partial(fsdp1.state_dict_type, model, info)
    return info


def map_parameters(model: nn.Module, modifiers: str) -> tuple[ParamMapping, ParamMapping]:
    """Both directions of parameter <-> FQNs, and the part of it that is about shared parameters."""
    by_tensor: dict[torch.Tensor, FQNS_T] = {}
    mapping: ParamMapping = {}
    shared: ParamMapping = {}
    names = ModelNames(model, modifiers)
    for name, value in walk_model_state(model, modifiers):
        if isinstance(value, ExtraState):
            continue
        fqns = names.fqns(name)
        fqns_so_far = by_tensor.setdefault(value, set())
        if fqns_so_far:
            shared[value] = fqns_so_far
        fqns_so_far |= fqns
        mapping[value] = fqns_so_far
        mapping.update(dict.fromkeys(fqns, value))
    for tensor, fqns in by_tensor.items():
        if tensor in shared:
            shared.update(dict.fromkeys(fqns, tensor))
    return mapping, shared


def prefixes_of(model: nn.Module, submodules: set[nn.Module]) -> set[str]:
    return {
        f"{fqn}."
        for name, module in (model.named_modules() if submodules else ())
        if module in submodules
        for fqn in get_fqns(model, name)
    }
