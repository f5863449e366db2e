"""A model and its optimizers as one sharded state dict, and back.

The only module of this room that knows what a model is; nothing else here imports it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any, Optional, Union

import torch
from torch import nn

from torch_dcp_backport.dist_checkpointing.core import CheckpointingException, Folder
from torch_dcp_backport.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor, StateDict
from torch_dcp_backport.dist_checkpointing.options import LoadOptions, SaveOptions
from torch_dcp_backport.dist_checkpointing.serialization import load_made, save_made
from torch_dcp_backport.dist_checkpointing.validation import StrictHandling
from torch_dcp_backport.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch_dcp_backport.transfer.groups import Group

Optimizers = Union[torch.optim.Optimizer, Iterable[torch.optim.Optimizer]]
#: The names under which the two halves stand, as in `dcp.save({"model": ..., "optimizer": ...})`.
MODEL, OPTIMIZER = "model", "optimizer"


def sharded_state_dict(
    model: nn.Module, optimizers: Optimizers = (), *, process_group: Group = None
) -> ShardedStateDict:
    """Return a model's and its optimizers' state for `save` and `load`. Collective where states are made.

    Every tensor is a ShardedTensor whose key is its path, "model.layers.0.weight" or
    "optimizer.state.layers.0.weight.exp_avg"; its data is the local tensor itself. Learning rates and the
    like are common state, taken from the first rank.

    Args:
        model: plain, or parallelised by FSDP2, TP, DDP or several of them.
        optimizers: all of them; states that do not exist yet are made as the first step would find them.
        process_group: the ranks that save or load together, as it is passed to `save` and `load`.
    """
    state: ShardedStateDict = described(state_of(model, optimizers), process_group)
    return state


def save_training_state(
    checkpoint_dir: Folder,
    model: nn.Module,
    optimizers: Optimizers = (),
    *,
    extra: Optional[Mapping[str, Any]] = None,
    process_group: Group = None,
) -> None:
    """Save a model, its optimizers and the values of `extra`. Collective.

    Args:
        checkpoint_dir: a folder that every rank sees; it has to be there.
        extra: a further (sharded) state dict: step, scheduler, ShardedObjects of each rank.

    Raises:
        CheckpointingException: as `save`.
    """
    state = state_of(model, optimizers)

    def make() -> ShardedStateDict:
        clash = sorted({MODEL, OPTIMIZER} & set(extra or {}))
        if clash:
            raise CheckpointingException(f"extra may not have {' and '.join(clash)}, which are written here")
        return {**dict(extra or {}), **described(state, process_group)}

    save_made(make, checkpoint_dir, SaveOptions(process_group=process_group))


def load_training_state(
    checkpoint_dir: Folder,
    model: nn.Module,
    optimizers: Optimizers = (),
    *,
    extra: Optional[Mapping[str, Any]] = None,
    strict: Union[str, StrictHandling] = StrictHandling.RAISE_ALL,
    trust: bool = False,
    process_group: Group = None,
) -> StateDict:
    """Load what `save_training_state` wrote, on any number of ranks and any mesh. Collective.

    Parameters and states are written in place.

    Args:
        extra: further sharded parts to load; common values are returned in any case.
        strict: what to do about keys that only the model or only the checkpoint has. To load a part of a
            checkpoint, such as a model without its optimizer, pass "raise_unexpected".
        trust: make objects of any class, which runs what the file says.

    Returns:
        Everything beside the model and the optimizers: common values, and the parts of `extra`.

    Raises:
        CheckpointingException: as `load`.
    """
    state = state_of(model, optimizers)
    options = LoadOptions(strict=strict, trust=trust, process_group=process_group)
    loaded = load_made(
        lambda _: {**dict(extra or {}), **described(state, process_group)}, checkpoint_dir, options
    )
    if isinstance(loaded, tuple):
        loaded = loaded[0]
    restored = restored_of(state, loaded)
    if OPTIMIZER in state:
        halves = {"model_state_dict": restored[MODEL], "optim_state_dict": restored[OPTIMIZER]}
        set_state_dict(model, optimizers, **halves)
    else:
        set_model_state_dict(model, restored[MODEL])
    return {key: value for key, value in loaded.items() if key not in (MODEL, OPTIMIZER)}


def state_of(model: nn.Module, optimizers: Optimizers) -> dict[str, Any]:
    """Return the two state dicts, with DTensors."""
    all_optimizers = (optimizers,) if isinstance(optimizers, torch.optim.Optimizer) else tuple(optimizers)
    if not all_optimizers:
        return {MODEL: get_model_state_dict(model)}
    model_state, optimizer_state = get_state_dict(model, all_optimizers)
    return {MODEL: model_state, OPTIMIZER: optimizer_state}


def described(value: Any, group: Group, path: str = "") -> Any:
    """Return the same structure with a ShardedTensor for every tensor."""
    if isinstance(value, torch.Tensor):
        return ShardedTensor.from_dtensor(path, value, process_group=group)
    if type(value) in (dict, OrderedDict):
        return {key: described(part, group, joined(path, key)) for key, part in value.items()}
    if type(value) is list:
        return [described(part, group, joined(path, number)) for number, part in enumerate(value)]
    return value


def joined(path: str, name: object) -> str:
    return f"{path}.{name}" if path else str(name)


def restored_of(asked: Any, loaded: Any) -> Any:
    """Return the loaded values, with the tensors that were asked for: they were filled in place.

    Values that only the checkpoint has, such as those of another release's optimizer, are there too.
    """
    if isinstance(asked, torch.Tensor):
        return asked
    if type(asked) in (dict, OrderedDict) and isinstance(loaded, dict):
        parts = {key: restored_of(asked[key], loaded[key]) for key in asked if key in loaded}
        return {**parts, **{key: value for key, value in loaded.items() if key not in asked}}
    if type(asked) is list and isinstance(loaded, list) and len(asked) == len(loaded):
        return [restored_of(part, other) for part, other in zip(asked, loaded)]
    return loaded
