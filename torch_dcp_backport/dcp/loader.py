"""`dcp.load` that leaves the caller's objects in the caller's dict; loads that need no dict.

Must never write into the caller's dict before everything is read.
"""

from __future__ import annotations

import os
import warnings
from typing import Any, Callable, Optional, TypeVar, Union, cast

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.logger import _dcp_method_logger
from torch.distributed.checkpoint.planner import LoadPlanner
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import StorageReader

Function = TypeVar("Function", bound=Callable[..., Any])
# Torch's words: users filter warnings by them.
ALONE = "torch.distributed is unavailable or uninitialized"
OTHER_KEYS = "Detected mismatched keys in state dict after all gather! This behavior is unsupported."

stock: Any = state_dict_loader  # by attribute: other tools may replace its private names


def with_positions(function: Function) -> Function:
    """Let the reader be the second argument by position, as torch 2.2 had it; warn of that."""
    return cast(Function, stock._api_bc_check(function))


@_dcp_method_logger(log_exceptions=True)
@with_positions
def load(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: Union[str, os.PathLike[str], None] = None,
    storage_reader: Optional[StorageReader] = None,
    planner: Optional[LoadPlanner] = None,
    process_group: Optional[dist.ProcessGroup] = None,
) -> None:
    """Fill a state dict, in place, from a checkpoint.

    Args:
        state_dict: its tensors are written into, its `Stateful` objects get what was loaded by their
            `load_state_dict` and stay in it, and its other values are replaced.
        checkpoint_id: the folder or the name of the checkpoint, as the storage has it.
        storage_reader: reads the checkpoint; by default chosen by `checkpoint_id`.
        planner: decides what is read; by default a `DefaultLoadPlanner`.
        process_group: the ranks that load; by default all.

    Raises:
        CheckpointException: a rank failed; on every rank.
    """
    alone = not (dist.is_available() and dist.is_initialized())
    if alone:
        warnings.warn(f"{ALONE}, assuming the intent is to load in a single process.", stacklevel=2)
    with stock._profile():
        reader = stock._storage_setup(storage_reader, checkpoint_id, reader=True)
        keys = list(state_dict) if alone else shared_keys(state_dict, process_group)
        # Each is asked for its state, and given one, in the order that all ranks have.
        given = {key: state_dict[key] for key in keys if key in state_dict}
        loaded = {
            key: value.state_dict() if isinstance(value, Stateful) else value for key, value in given.items()
        }
        stock._load_state_dict(
            state_dict=loaded,
            storage_reader=reader,
            process_group=process_group,
            no_dist=alone,
            planner=planner,
        )
        for key, value in given.items():
            if isinstance(value, Stateful):
                value.load_state_dict(loaded[key])
            else:
                state_dict[key] = loaded[key]


def load_state_dict_from_keys(
    keys: Optional[Union[set[str], str]] = None,
    *,
    checkpoint_id: Union[str, os.PathLike[str], None] = None,
    storage_reader: Optional[StorageReader] = None,
    process_group: Optional[dist.ProcessGroup] = None,
) -> dict[str, Any]:
    """Return a part of a checkpoint, as a nested state dict, or all of it.

    Torch takes no keys for the empty set, and returns nothing.
    https://github.com/pytorch/pytorch/pull/150058

    Args:
        keys: of the values, or keys above them; None for all.
        checkpoint_id: the folder or the name of the checkpoint, as the storage has it.
        storage_reader: reads the checkpoint; by default chosen by `checkpoint_id`.
        process_group: the ranks that load; by default all.
    """
    alone = not (dist.is_available() and dist.is_initialized())
    if alone:
        warnings.warn(f"{ALONE}, assuming the intent is to load in a single process.", stacklevel=2)
    reader = stock._storage_setup(storage_reader, checkpoint_id, reader=True)
    found: dict[str, Any] = {}
    stock._load_state_dict(
        state_dict=found,
        storage_reader=reader,
        process_group=process_group,
        no_dist=alone,
        planner=stock._EmptyStateDictLoadPlanner(keys={keys} if isinstance(keys, str) else keys),
    )
    return found


def shared_keys(state_dict: dict[str, Any], group: Optional[dist.ProcessGroup]) -> list[str]:
    """Return the keys of all ranks, sorted; warn where this rank has others."""
    keys: list[str] = stock._all_gather_keys(state_dict, group)
    if keys != sorted(state_dict):
        warnings.warn(OTHER_KEYS, stacklevel=3)
    return keys
