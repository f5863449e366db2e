"""Facts about process groups: asked for many times in a call, and constant while the group is there.

The one registry by group; must not keep a group alive.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Hashable, Iterable, Iterator
from typing import Any, Optional, cast

import torch
import torch.distributed as dist

from torch_dcp_backport import compat
from torch_dcp_backport.transfer._src.errors import UNCHANGED
from torch_dcp_backport.transfer._src.lanes import SILENT
from torch_dcp_backport.transfer._src.once import warn_once

Group = Optional[dist.ProcessGroup]


class GroupInfo:
    """The facts about one process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        #: Global ranks, in group order.
        self.ranks = tuple(dist.get_process_group_ranks(group))
        #: Device types that messages can be on; looked up when first asked for.
        self.device_types: Optional[list[str]] = None
        #: Device type -> the backend that carries messages there.
        self.backends: dict[str, str] = {}
        #: Accelerator type -> the device of this rank's tensors, as last seen.
        self.devices: dict[str, torch.device] = {}
        #: Thread and title of the transfer under way.
        self.claim: Optional[tuple[int, str]] = None
        #: The state that `wire` keeps for this group.
        self.roll: Any = None


_LOCK = threading.Lock()
_infos: weakref.WeakKeyDictionary[dist.ProcessGroup, GroupInfo] = weakref.WeakKeyDictionary()


def info_of(group: Group) -> GroupInfo:
    group = members(group)
    info = _infos.get(group)
    if info is None:
        info = GroupInfo(group)
        with _LOCK:  # two threads at once must not each have a claim of their own
            info = _infos.setdefault(group, info)
    return info


def members(group: Group) -> dist.ProcessGroup:
    """The group itself; the default group in place of None."""
    return group if group is not None else cast(dist.ProcessGroup, dist.group.WORLD)


def group_ranks(group: Group = None) -> tuple[int, ...]:
    """Global ranks of a group, in group order."""
    group = members(group)
    if not isinstance(group, dist.ProcessGroup):  # a number, on a rank outside the group
        return tuple(dist.get_process_group_ranks(group))
    return info_of(group).ranks


def device_types(group: Group) -> list[str]:
    """The device types that messages of `group` can be on."""
    info = info_of(group)
    if info.device_types is None:
        info.device_types = compat.backend_device_types(members(group))
    return info.device_types


def comm_device_type(group: Group, preferred: str) -> str:
    """The device type that collectives of `group` run on: the preferred one if they can."""
    types = device_types(group)
    if preferred in types or not types:
        return preferred if types else "cpu"
    return "cpu" if "cpu" in types else types[0]


def backend_of(group: Group, kind: str) -> str:
    """The name of the backend that carries a group's messages on a device type."""
    known = info_of(group).backends
    if kind not in known:
        known[kind] = compat.backend_name(members(group), kind)
    return known[kind]


def groups_of(group: Group = None) -> tuple[Group, ...]:
    """The groups of a call over one group; none in a process without a process group."""
    return (group,) if group is not None or dist.is_initialized() else ()


def is_first(group: Group = None) -> bool:
    """Whether this rank is the first of a group; so is a process without a process group."""
    return not dist.is_initialized() or dist.get_rank(group) == 0


def warn_on_first(
    log: logging.Logger, text: str, group: Group = None, about: Optional[Hashable] = None
) -> None:
    """Log a warning on the first rank of a group alone, once in its process; no message, and no call.

    Args:
        log: the logger.
        text: the warning; what it is of concerns every rank.
        group: the process group; None is the default group.
        about: what the warning is of, where its text differs from time to time.
    """
    if is_first(group):
        warn_once(log, text, about)


def is_silent(group: Group) -> bool:
    """Whether messages of a group move nothing: what a rank would receive is in none of its buffers.

    Such a rank takes its own words for those of all ranks.
    """
    return backend_of(group, comm_device_type(group, "cpu")) in SILENT


def source_of(group: Group) -> int:
    """The rank whose dict all ranks of a group load: the first one; this one where messages move nothing."""
    rank = dist.get_rank()
    return rank if is_silent(group) else group_ranks(group)[0]


def note_device(group: Group, values: Iterable[object]) -> None:
    """Note the accelerator that this rank's tensors are on, for its messages in a group.

    The current device is not asked: nobody needs to have set it, and two ranks with messages on one device
    are an error of NCCL ("Duplicate GPU").
    """
    for value in values:
        if not isinstance(value, torch.Tensor):
            continue
        device = (compat.local_part(value) if isinstance(value, compat.DTensor) else value).device
        if device.type not in ("cpu", "meta"):
            info_of(group).devices[device.type] = device
            return


def device_in(group: Group, kind: str) -> torch.device:
    """This rank's device of a type: its tensors', else that which the group is bound to, else the current."""
    if kind in ("cpu", "meta"):
        return torch.device(kind)
    device = info_of(group).devices.get(kind)
    if device is None:
        device = compat.bound_device(members(group))
    return device if device is not None and device.type == kind else compat.current_device(kind)


@contextlib.contextmanager
def exclusive(group: Group, title: str) -> Iterator[None]:
    """A context: the calling thread alone transfers in this group, and may do so again inside.

    Ranks tell transfers apart by their order alone.
    Waiting for the other thread would not help: another rank may have begun with the other transfer.

    Raises:
        RuntimeError: another thread of this process is in the middle of a transfer in the group.
    """
    if dist.get_world_size(group) == 1:
        yield
        return
    info = info_of(group)
    claim = threading.get_ident(), title
    try:
        with _LOCK:
            holder = info.claim = info.claim or claim
        if holder[0] == claim[0]:
            yield
            return
    finally:
        if info.claim is claim:
            info.claim = None
    raise RuntimeError(
        f"{title}: {UNCHANGED}; another thread of this process is in the middle of a transfer in the same "
        f"process group ({holder[1]}), and ranks tell transfers apart by their order alone. Make all such "
        "calls from one thread, or one after the other in the same order on every rank"
    )
