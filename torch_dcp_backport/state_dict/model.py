"""Get a model's state, and what a model state dict must be."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Optional, Union

import torch
from torch import nn

from torch_dcp_backport.state_dict.collect import full_or_cpu
from torch_dcp_backport.state_dict.fqn import FLAT_PARAM, Names, get_fqns
from torch_dcp_backport.state_dict.options import StateDictInfo


def own_method(obj: Union[nn.Module, torch.optim.Optimizer], api: str) -> Callable[..., Any]:
    """`obj.state_dict` or the like, even where torch's `_patch_model_state_dict` replaced it.

    What it replaced stands in a set in torch's own module; calling that from here would not end.
    """
    call = getattr(obj, api)
    stock = sys.modules.get("torch.distributed.checkpoint.state_dict")
    if stock is not None and call in stock._patched_state_dict:
        return functools.partial(getattr(type(obj), api), self=obj)
    return call  # type: ignore[no-any-return]


@torch.no_grad()
def get_model_state(model: nn.Module, info: StateDictInfo) -> dict[str, Any]:
    if not info.handle_model:
        return {}
    with info.fsdp_context():
        state: dict[str, Any] = own_method(model, "state_dict")()
    names = Names(model, info.dsd_fqn_modifiers)
    for key in list(state):
        # Hooks may have added keys that are no names.
        fqn = key if names.are_plain and key in info.fqn_param_mapping else canonical(model, key, info)
        if fqn != key:
            state[fqn] = state.pop(key)
    if info.submodule_prefixes:
        state = below(state, info.submodule_prefixes, keep=info.keep_submodule_prefixes)
    if info.ignore_frozen_params:
        for name, param in model.named_parameters():
            if not param.requires_grad:
                for fqn in get_fqns(model, name):
                    state.pop(fqn, None)
    for key in [key for key, value in state.items() if torch.is_tensor(value) and value.is_meta]:
        del state[key]
    result: dict[str, Any] = full_or_cpu(state, info)
    return result


def canonical(model: nn.Module, key: str, info: StateDictInfo) -> str:
    """The FQN of a key of `model.state_dict()`.

    Raises:
        RuntimeError: a key that differs from its FQN by more than DDP's and the compiler's prefixes.
    """
    (fqn,) = get_fqns(model, key, dsd_fqn_modifiers=info.dsd_fqn_modifiers)
    if fqn != key and [part for part in key.split(".") if part not in ("module", "_orig_mod")] != [
        part for part in fqn.split(".") if part not in ("module", "_orig_mod")
    ]:
        raise RuntimeError(f"the state dict has an unexpected key {key}; its FQN would be {fqn}")
    return fqn


def below(state: Mapping[str, Any], prefixes: Iterable[str], keep: bool) -> dict[str, Any]:
    """The entries of the submodules with these prefixes."""
    return {
        fqn if keep else fqn[len(prefix) :]: value
        for fqn, value in state.items()
        for prefix in prefixes
        if fqn.startswith(prefix)
    }


def complaint_about(state: Mapping[Any, Any], info: StateDictInfo) -> Optional[str]:
    """Why a model state dict cannot be one that this call gives or takes; None where it can."""
    if not isinstance(state, Mapping):
        return f"not a state dict but a {type(state).__name__}"
    may_be_empty = (
        info.submodule_prefixes
        or info.ignore_frozen_params
        or (info.cpu_offload and info.full_state_dict)
        or not info.strict
        or info.broadcast_from_rank0
    )
    if info.handle_model and not state and not may_be_empty:
        return "the model state dict is empty" + (
            ". If only rank 0 holds it, set broadcast_from_rank0=True" if info.full_state_dict else ""
        )
    for key in state:
        if FLAT_PARAM in str(key):
            return f"{key} contains {FLAT_PARAM}, which happens where the model is not the root FSDP module"
    return None


def unflatten_model_state(model: nn.Module, state_dict: Optional[Mapping[Any, Any]]) -> Mapping[str, Any]:
    """The deprecated form {submodule: its state dict} as one state dict with FQNs; None as an empty one."""
    if state_dict is None:
        return {}
    if not isinstance(state_dict, Mapping) or not any(isinstance(key, nn.Module) for key in state_dict):
        return state_dict
    warnings.warn(
        # Programs and test suites filter by torch's own first words.
        "Passing model_state_dict as a ``Dict[nn.Module, Dict[str, Any]]`` is deprecated: use one state dict "
        "with FQNs as keys.",
        FutureWarning,
        stacklevel=3,
    )
    names = {module: name for name, module in model.named_modules()}
    result: dict[str, Any] = {}
    for module, part in state_dict.items():
        if module in names:
            (prefix,) = get_fqns(model, names[module])
            result.update({f"{prefix}.{key}": value for key, value in part.items()})
    return result
