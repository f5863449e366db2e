"""One transfer at a time: ranks tell transfers apart by their order alone."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from torch_dcp_backport.transfer.errors import UNCHANGED
from torch_dcp_backport.transfer.groups import Group

_LOCK = threading.Lock()
#: group -> the thread that uses it, and for what.
_USED: dict[Any, tuple[int, str]] = {}


@contextlib.contextmanager
def exclusive(group: Group, what: str) -> Iterator[None]:
    """The calling thread alone transfers in this group meanwhile (and may do so again inside).

    Waiting for the other thread would not help: another rank may have begun with the other transfer.

    Raises:
        RuntimeError: another thread of this process is in the middle of a transfer in the group.
    """
    if dist.get_world_size(group) == 1:
        yield
        return
    key, mine = group or dist.group.WORLD, (threading.get_ident(), what)
    try:
        with _LOCK:
            used = _USED.setdefault(key, mine)
        if used[0] == mine[0]:
            yield
            return
    finally:
        if _USED.get(key) is mine:
            del _USED[key]
    raise RuntimeError(
        f"{what}: {UNCHANGED}; another thread of this process is in the middle of a transfer in the same "
        f"process group ({used[1]}), and ranks tell transfers apart by their order alone. Make all such "
        "calls from one thread, or one after the other in the same order on every rank"
    )
