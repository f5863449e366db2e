"""The calls of this room, whose agreements raise its own exception."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from torch_dcp_backport.dist_checkpointing.core import CheckpointingException
from torch_dcp_backport.transfer import Call, Group, groups_of, members


def begin(title: str, operation: str, group: Group = None, *, is_alone: bool = False) -> Call:
    """Begin a call over a process group; of this process alone where there is none, or with `is_alone`."""
    return Call(title, operation, () if is_alone else groups_of(group), kind=CheckpointingException)


def world_size(group: Group) -> int:
    """Return the number of ranks of a group; 1 without a process group, and on a rank outside of it."""
    return max(dist.get_world_size(group), 1) if dist.is_initialized() else 1


def as_problems_of(everyone: Group, group: Group, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose errors are problems of this rank in the call of a wider group.

    An error that the ranks of a narrower group agreed on is not known to the others.

    Args:
        everyone: the group of the call.
        group: the group in which the function is collective.
    """

    def call(*args: Any) -> Any:
        try:
            return function(*args)
        except CheckpointingException as error:
            if members(group) is members(everyone):
                raise
            raise RuntimeError(str(error)) from error

    return call
