"""What is asked of a process group many times in a call, and does not change while the group is there.

The one registry by group; must not keep a group alive.
"""

from __future__ import annotations

import weakref
from typing import Any, Optional, cast

import torch.distributed as dist

from torch_dcp_backport import compat

Group = Optional[dist.ProcessGroup]


class About:
    """One process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        #: Global ranks, in group order.
        self.ranks = tuple(dist.get_process_group_ranks(group))
        self._device_types: Optional[list[str]] = None
        #: Of the roll call.
        self.roll: Any = None

    def device_types(self, group: dist.ProcessGroup) -> list[str]:
        if self._device_types is None:
            self._device_types = compat.backend_device_types(group)
        return self._device_types


_about: weakref.WeakKeyDictionary[dist.ProcessGroup, About] = weakref.WeakKeyDictionary()


def about(group: dist.ProcessGroup) -> About:
    found = _about.get(group)
    if found is None:
        found = _about[group] = About(group)
    return found


def members(group: Group) -> dist.ProcessGroup:
    """The group itself; the default group in place of None."""
    return group if group is not None else cast(dist.ProcessGroup, dist.group.WORLD)


def group_ranks(group: Group = None) -> tuple[int, ...]:
    """Global ranks of a group, in group order."""
    asked = members(group)
    if not isinstance(asked, dist.ProcessGroup):  # a number, on a rank outside the group
        return tuple(dist.get_process_group_ranks(asked))
    return about(asked).ranks


def device_types(group: Group) -> list[str]:
    """The device types that messages of `group` can be on."""
    asked = members(group)
    return about(asked).device_types(asked)


def comm_device_type(group: Group, prefer: str) -> str:
    """The device type collectives of `group` run on: `prefer` if it can, else one that it has."""
    kinds = device_types(group)
    if prefer in kinds or not kinds:
        return prefer if kinds else "cpu"
    return "cpu" if "cpu" in kinds else kinds[0]
