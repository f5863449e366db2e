"""Who has come to a call: said in passing through the store, and asked where the call breaks off.

One message that nobody waits for. Must never raise: what it finds out is only said.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch.distributed as dist

from torch_dcp_backport import compat
from torch_dcp_backport.transfer.post import Group

Key = tuple[int, tuple[int, ...]]

#: The store and a group's ranks -> how many agreements have come about; the same on ranks that are in step.
_agreed: dict[Key, int] = {}
#: The same count, as this rank has last told the others.
_told: dict[Key, int] = {}


def come(group: Group) -> None:
    """This rank takes part in what comes next."""
    with contextlib.suppress(Exception):
        store, key = _store_and_key(group)
        count = _agreed.get(key, 0)
        if _told.get(key) != count:
            _told[key] = count
            store.set(_place(key, dist.get_rank()), str(count))


def agreed(group: Group) -> None:
    with contextlib.suppress(Exception):
        _, key = _store_and_key(group)
        _agreed[key] = _agreed.get(key, 0) + 1


def absent(group: Group) -> list[int]:
    """The group's ranks that have not come; nothing where that is not known."""
    missing: list[int] = []
    with contextlib.suppress(Exception):
        store, key = _store_and_key(group)
        count = str(_agreed.get(key, 0)).encode()
        places = {rank: _place(key, rank) for rank in key[1] if rank != dist.get_rank()}
        missing = [
            rank for rank, place in places.items() if not store.check([place]) or store.get(place) != count
        ]
    return missing


def _store_and_key(group: Group) -> tuple[Any, Key]:
    """By store: a process group that was made anew begins anew."""
    store = compat.default_store()
    return store, (id(store), tuple(compat.group_ranks(group)))


def _place(key: Key, rank: int) -> str:
    return f"torch_dcp_backport/{hash(key[1])}/{rank}"
