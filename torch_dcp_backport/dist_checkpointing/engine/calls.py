"""The calls of this room, whose meetings raise its own exception."""

from __future__ import annotations

from torch_dcp_backport.dist_checkpointing.core import CheckpointingException
from torch_dcp_backport.transfer import Call
from torch_dcp_backport.transfer.groups import Group, groups_of


def begin(title: str, operation: str, group: Group = None, *, is_alone: bool = False) -> Call:
    """Begin a call over a process group; of this process alone where there is none, or with `is_alone`."""
    return Call(title, operation, () if is_alone else groups_of(group), kind=CheckpointingException)
