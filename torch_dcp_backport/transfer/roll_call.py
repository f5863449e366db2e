"""Who never came to an agreement, asked through the store once it has failed.

Must cost nothing while all is well, and must never raise: what it finds out is only said.
"""

from __future__ import annotations

import contextlib
import time

import torch.distributed as dist

from torch_dcp_backport import compat
from torch_dcp_backport.transfer.post import Group

#: How long the first rank waits for the others to fail as well, and for the first of them, in seconds.
WINDOW, FIRST = 3.0, 1.0
PAUSE = 0.25

#: The group's ranks -> how many agreements have come about; the same on all ranks that are in step.
_agreed: dict[tuple[int, ...], int] = {}


def agreed(group: Group) -> None:
    ranks = tuple(compat.group_ranks(group))
    _agreed[ranks] = _agreed.get(ranks, 0) + 1


def absent(group: Group) -> list[int]:
    """For every rank after a failure; on the group's first, the few that have not failed here as well.

    Where most have not, they may only wait longer, as they do where a rank dies: then nobody is named.
    """
    missing: list[int] = []
    with contextlib.suppress(Exception):
        missing = _call(group)
    return missing


def _call(group: Group) -> list[int]:
    store, ranks = compat.default_store(), tuple(compat.group_ranks(group))
    place = f"torch_dcp_backport/{hash(ranks)}/{_agreed.get(ranks, 0)}"
    if dist.get_rank() != ranks[0]:
        store.set(f"{place}/{dist.get_rank()}", "here")
        return []
    others = list(ranks[1:])
    missing, began = others, time.monotonic()
    while missing and time.monotonic() - began < (FIRST if missing == others else WINDOW):
        time.sleep(PAUSE)
        missing = [rank for rank in missing if not store.check([f"{place}/{rank}"])]
    return missing if 2 * len(missing) <= len(others) else []
