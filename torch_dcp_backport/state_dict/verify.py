"""Check the options of a call against its model.

No state dict is read or written here.
"""

from __future__ import annotations

import functools
import warnings
from typing import Optional

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from torch_dcp_backport import compat
from torch_dcp_backport.state_dict.fqn import ExtraState, ModelNames, get_fqns, walk_model_state
from torch_dcp_backport.state_dict.fsdp1 import state_dict_type
from torch_dcp_backport.state_dict.options import (
    FQNS_T,
    OPTIONS,
    ParamMapping,
    StateDictInfo,
    StateDictOptions,
    Submodules,
)


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
        info.fsdp_context = functools.partial(state_dict_type, model, info)
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
