"""The forms of state dicts: the keys of an optimizer's, what either may be, and the model's deprecated form.

No model and no optimizer is read or written here.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Optional

import torch
from torch import nn

from torch_dcp_backport.state_dict.fqn import FLAT_PARAM, get_fqns
from torch_dcp_backport.state_dict.options import StateDictInfo
from torch_dcp_backport.transfer import Problem

STATE, GROUPS, PARAMS = "state", "param_groups", "params"


def model_problem(state: Mapping[Any, Any], info: StateDictInfo) -> Optional[Problem]:
    """The problem of a model state dict that a call can neither give nor take; None where it can."""
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


def optim_problem(state: Optional[Mapping[Any, Any]], info: StateDictInfo) -> Optional[Problem]:
    """The problem of an optimizer state dict that a call can neither give nor take; None where it can."""
    # None counts as empty: accelerate gives it where rank 0 alone has read the file.
    if state is not None and not isinstance(state, Mapping):
        return Problem(f"not a state dict but a {type(state).__name__}")
    may_be_empty = (info.cpu_offload and info.full_state_dict) or info.broadcast_from_rank0
    if info.handle_optim and not state and not may_be_empty:
        return Problem("the optimizer state dict is empty")
    return None


def unflatten_model_state(model: nn.Module, state_dict: Optional[Mapping[Any, Any]]) -> Mapping[str, Any]:
    """The deprecated form {submodule: its state dict} as one state dict with FQNs; {} for None."""
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


def is_numbered(state: Mapping[str, Any]) -> bool:
    """Whether a nested state dict numbers its parameters, as torch.optim's own do."""
    names = [name for group in state[GROUPS] for name in group[PARAMS]] or list(state[STATE])
    return bool(names) and all(isinstance(name, int) for name in names)


def renamed_params(state: Mapping[str, Any], name_of: Callable[[Any], str]) -> dict[str, Any]:
    """A nested optimizer state dict with `name_of(name)` for the name of every parameter."""
    return {
        **state,
        STATE: {name_of(name): states for name, states in state[STATE].items()},
        GROUPS: [{**group, PARAMS: list(map(name_of, group[PARAMS]))} for group in state[GROUPS]],
    }


def check_params(optim: torch.optim.Optimizer, names: Mapping[Any, Any]) -> None:
    """Check that the model has the parameters of an optimizer.

    Args:
        names: the model's: parameter -> its name or names; other keys do not matter.

    Raises:
        KeyError: the model lacks some. Most often `fully_shard` has replaced them since (accelerate#3855).
    """
    params = [param for group in optim.param_groups for param in group[PARAMS]]
    strays = [(number, param) for number, param in enumerate(params) if param not in names]
    if not strays:
        return
    number, param = strays[0]
    own = set(params)
    others = (
        name if isinstance(name, str) else min(name)
        for other, name in names.items()
        if isinstance(other, nn.Parameter) and other not in own and other.shape == param.shape
    )
    instead = next(others, None)
    hint = f"; the model's {instead!r} has this shape and no optimizer state" if instead else ""
    raise KeyError(
        f"parameter {number} of {type(optim).__name__}, of shape {tuple(param.shape)}, is not a parameter of "
        f"the model{hint} ({len(strays)} of {len(params)} parameters are not the model's). fully_shard, "
        "parallelize_module and to_empty replace parameters: make the optimizer after them"
    )


def named_params(
    group: Mapping[str, Any], info: StateDictInfo, is_saved: Callable[[str], object]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (FQN, parameter) of one of the optimizer's groups.

    Of a shared parameter's names, those that the state dict has: it holds the one that was saved. The model
    has to have the parameters (`check_params`).
    """
    for param in group[PARAMS]:
        fqns = info.fqn_param_mapping[param]
        assert isinstance(fqns, (set, frozenset))
        for fqn in sorted(fqns):
            if fqn not in info.shared_params_mapping or is_saved(fqn):
                yield fqn, param
