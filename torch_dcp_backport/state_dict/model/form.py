"""The form of a model state dict: what it may be, and its deprecated form.

No model is read or written here.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Optional

from torch import nn

from torch_dcp_backport.state_dict.fqn import FLAT_PARAM, get_fqns
from torch_dcp_backport.state_dict.options import StateDictInfo
from torch_dcp_backport.transfer import Problem


def problem_with(state: Mapping[Any, Any], info: StateDictInfo) -> Optional[Problem]:
    """Why a model state dict cannot be one that this call gives or takes; None where it can."""
    if not isinstance(state, Mapping):
        return Problem(f"not a state dict but a {type(state).__name__}")
    may_be_empty = (
        info.submodule_prefixes
        or info.ignore_frozen_params
        or (info.cpu_offload and info.full_state_dict)
        or not info.strict
        or info.broadcast_from_rank0
    )
    if info.handle_model and not state and not may_be_empty:
        hint = ". If only rank 0 holds it, set broadcast_from_rank0=True" if info.full_state_dict else ""
        return Problem(f"the model state dict is empty{hint}")
    for key in state:
        if FLAT_PARAM in str(key):
            return Problem(
                f"{key} contains {FLAT_PARAM}, which happens where the model is not the root FSDP module"
            )
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
        stacklevel=2,
    )
    names = {module: name for name, module in model.named_modules()}
    result: dict[str, Any] = {}
    for module, module_state in state_dict.items():
        if module in names:
            (prefix,) = get_fqns(model, names[module])
            result.update({f"{prefix}.{key}": value for key, value in module_state.items()})
    return result
