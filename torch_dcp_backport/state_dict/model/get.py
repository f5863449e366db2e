"""Get a model's state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from torch_dcp_backport.state_dict.collect import full_or_cpu
from torch_dcp_backport.state_dict.fqn import ModelNames, get_fqns
from torch_dcp_backport.state_dict.options import StateDictInfo
from torch_dcp_backport.state_dict.patched import original_method


@torch.no_grad()
def get_model_state(model: nn.Module, info: StateDictInfo) -> dict[str, Any]:
    if not info.handle_model:
        return {}
    with info.fsdp_context():
        state: dict[str, Any] = original_method(model, "state_dict")()
    names = ModelNames(model, info.dsd_fqn_modifiers)
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
    for key in [key for key, value in state.items() if torch.is_tensor(value) and is_meta(value)]:
        del state[key]
    result: dict[str, Any] = full_or_cpu(state, info)
    return result


def canonical(model: nn.Module, key: str, info: StateDictInfo) -> str:
    """The FQN of a key of `model.state_dict()`.

    Raises:
        RuntimeError: a key that differs from its FQN by more than DDP's and the compiler's prefixes.
    """
    (fqn,) = get_fqns(model, key, dsd_fqn_modifiers=info.dsd_fqn_modifiers)
    if fqn != key and without_wrappers(key) != without_wrappers(fqn):
        raise RuntimeError(f"the state dict has an unexpected key {key}; its FQN would be {fqn}")
    return fqn


def is_meta(value: torch.Tensor) -> bool:
    # FSDP1 without a mesh: a ShardedTensor of which this rank has no row raises when it is asked.
    return value.is_meta if not hasattr(value, "local_shards") or value.local_shards() else False


def without_wrappers(name: str) -> list[str]:
    return [step for step in name.split(".") if step not in ("module", "_orig_mod")]


def below(state: Mapping[str, Any], prefixes: Iterable[str], keep: bool) -> dict[str, Any]:
    """The entries of the submodules with these prefixes."""
    return {
        fqn if keep else fqn[len(prefix) :]: value
        for fqn, value in state.items()
        for prefix in prefixes
        if fqn.startswith(prefix)
    }
