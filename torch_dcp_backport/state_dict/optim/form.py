"""The form of an optimizer state dict: its keys, and the names of its parameters.

Nothing is read from or written to an optimizer here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Optional

import torch

from torch_dcp_backport.transfer import Problem

if TYPE_CHECKING:
    from torch_dcp_backport.state_dict.options import StateDictInfo

STATE, GROUPS, PARAMS = "state", "param_groups", "params"


def problem_with(state: Optional[Mapping[Any, Any]], info: StateDictInfo) -> Optional[Problem]:
    """Why an optimizer state dict cannot be one that this call gives or takes; None where it can."""
    # None is as good as an empty one: accelerate gives it where rank 0 alone has read the file.
    if state is not None and not isinstance(state, Mapping):
        return Problem(f"not a state dict but a {type(state).__name__}")
    may_be_empty = (info.cpu_offload and info.full_state_dict) or info.broadcast_from_rank0
    if info.handle_optim and not state and not may_be_empty:
        return Problem("the optimizer state dict is empty")
    return None


def is_numbered(state: Mapping[str, Any]) -> bool:
    """Whether a nested state dict numbers its parameters, as torch.optim's own do."""
    names = [name for group in state[GROUPS] for name in group[PARAMS]] or list(state[STATE])
    return bool(names) and all(isinstance(name, int) for name in names)


def fqns_of(param: torch.Tensor, info: StateDictInfo) -> Iterable[str]:
    """The names of one of the optimizer's parameters.

    Raises:
        KeyError: the model does not have it.
    """
    names = info.fqn_param_mapping.get(param)
    if not isinstance(names, (set, frozenset)):
        raise KeyError(
            f"a parameter of shape {tuple(param.shape)} of the optimizer is not one of the model's"
        )
    return names
