"""One transfer at a time: ranks tell transfers apart by their order alone."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch.distributed as dist

from torch_dcp_backport.transfer.errors import UNCHANGED
from torch_dcp_backport.transfer.groups import Group, info_of

_LOCK = threading.Lock()


@contextlib.contextmanager
def exclusive(group: Group, title: str) -> Iterator[None]:
    """A context: the calling thread alone transfers in this group, and may do so again inside.

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
