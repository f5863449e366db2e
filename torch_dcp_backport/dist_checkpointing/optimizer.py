"""Optimizer states sharded as the parameters that they belong to.

Names are those of megatron.core.dist_checkpointing.optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Union

import torch

from torch_dcp_backport.dist_checkpointing._src.sharded_tensor import data_shape
from torch_dcp_backport.dist_checkpointing.core import CheckpointingException
from torch_dcp_backport.dist_checkpointing.dict_utils import nested_values
from torch_dcp_backport.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
    StateDict,
)

#: The end of errors about parameters that are in no part of a state dict.
KEEP_VARS_HINT = (
    " Parameters are recognised by their identity: make the model's state dict with keep_vars=True, or "
    "describe changed parameters by a ShardedTensorFactory."
)

ShardedParameter = Union[ShardedTensor, ShardedTensorFactory]


def get_optim_param_to_id_map(optim_params_iter: Iterable[torch.nn.Parameter]) -> dict[int, int]:
    """Return id of a parameter -> its number in the optimizer's state dict."""
    numbers: dict[int, int] = {}
    for parameter in optim_params_iter:
        numbers.setdefault(id(parameter), len(numbers))
    return numbers


def get_param_id_to_sharded_param_map(
    model_sharded_state_dict: ShardedStateDict, optim_params_iter: Iterable[torch.nn.Parameter]
) -> dict[int, ShardedParameter]:
    """Return number of a parameter in the optimizer's state dict -> its part in the model's.

    Parameters are recognised by their `data`, which has to be the parameter itself.
    """
    numbers = get_optim_param_to_id_map(optim_params_iter)
    parts: dict[int, ShardedParameter] = {}
    for part in nested_values(model_sharded_state_dict):
        if isinstance(part, (ShardedTensor, ShardedTensorFactory)) and id(part.data) in numbers:
            parts[numbers[id(part.data)]] = part
    return parts


def make_sharded_optimizer_tensor(
    model_param: ShardedParameter, optim_param: torch.Tensor, prefix: str
) -> ShardedParameter:
    """Return an optimizer's state, sharded as the parameter is, under the key `{prefix}.{key}`.

    Raises:
        CheckpointingException: it has another shape than the parameter.
    """
    key = f"{prefix}.{model_param.key}"
    if isinstance(model_param, ShardedTensorFactory):
        return replace(model_param, key=key, data=optim_param)
    if tuple(optim_param.shape) != data_shape(model_param):
        raise CheckpointingException(
            f"wrong shape: {key} (expected {data_shape(model_param)} as the parameter has, "
            f"got {tuple(optim_param.shape)})"
        )
    return replace(model_param, key=key, data=optim_param, dtype=optim_param.dtype)


def optim_state_to_sharding_state(
    optim_state_dict: StateDict,
    id_to_sharded_param_map: dict[int, ShardedParameter],
    exclude_keys: tuple[str, ...] = (),
) -> None:
    """Shard the states of an optimizer's state dict as their parameters are, in place.

    Numbers of parameters, which depend on the rank, become values that are not saved.

    Args:
        exclude_keys: names of states that are left out.

    Raises:
        ValueError: a parameter's number that the map does not have; nothing was changed.
        CheckpointingException: a state of another shape than its parameter; nothing was changed.
    """
    states: dict[int, dict[str, Any]] = {}
    for number, values in optim_state_dict["state"].items():
        if number not in id_to_sharded_param_map:
            raise ValueError(
                f"parameter {number} of the optimizer is in no part of the model's state dict."
                f"{KEEP_VARS_HINT}"
            )
        part = id_to_sharded_param_map[number]
        states[number] = {
            name: make_sharded_optimizer_tensor(part, value, f"optimizer.state.{name}")
            for name, value in values.items()
            if name not in exclude_keys
        }
    optim_state_dict["state"] = states
    optim_state_dict["param_groups"] = [
        {**group, "params": LocalNonpersistentObject(group["params"])}
        for group in optim_state_dict["param_groups"]
    ]
