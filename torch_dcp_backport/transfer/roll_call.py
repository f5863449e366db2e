"""Who has come to a call: said in passing through the store, and asked where the call breaks off.

One message that nobody waits for. Must never raise: what it finds out is only said.
"""

from __future__ import annotations

import contextlib

import torch.distributed as dist

from torch_dcp_backport import compat
from torch_dcp_backport.transfer.groups import Group, about, members


class Roll:
    """The agreements of the groups with these ranks."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        #: How many agreements have come about; the same on ranks that are in step.
        self.agreed = 0
        #: The same count, as this rank has last told the others.
        self.told = -1
        self.name = f"torch_dcp_backport/{hash(ranks)}"

    def place(self, rank: int) -> str:
        return f"{self.name}/{rank}"


#: By the store, too: a process group that was made anew begins anew.
_rolls: dict[tuple[int, tuple[int, ...]], Roll] = {}


def come(group: Group) -> None:
    """This rank takes part in what comes next."""
    with contextlib.suppress(Exception):
        roll = _roll_of(group)
        if roll.told != roll.agreed:
            roll.told = roll.agreed
            compat.default_store().set(roll.place(dist.get_rank()), str(roll.agreed))


def agreed(group: Group) -> None:
    with contextlib.suppress(Exception):
        _roll_of(group).agreed += 1


def absent(group: Group) -> list[int]:
    """The group's ranks that have not come; nothing where that is not known."""
    missing: list[int] = []
    with contextlib.suppress(Exception):
        roll, store = _roll_of(group), compat.default_store()
        count = str(roll.agreed).encode()
        places = {rank: roll.place(rank) for rank in roll.ranks if rank != dist.get_rank()}
        missing = [
            rank for rank, place in places.items() if not store.check([place]) or store.get(place) != count
        ]
    return missing


def _roll_of(group: Group) -> Roll:
    known = about(members(group))
    if known.roll is None:
        key = id(compat.default_store()), known.ranks
        known.roll = _rolls.setdefault(key, Roll(known.ranks))
    roll: Roll = known.roll
    return roll
