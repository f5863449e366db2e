"""Which ranks hold, or want, which boxes of a tensor; and the way of every box from a holder to a taker.

Pure functions of what all ranks know: both ends of a message derive it alone, and nothing is asked.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Optional, Union

from torch_dcp_backport.transfer.layout import Box, Layout, whole

#: box -> the ranks that hold it, in the order of the group.
Holders = dict[Box, tuple[int, ...]]


@dataclass(frozen=True)
class Boxes:
    """A tensor of which some ranks hold listed boxes: stored chunks, slices of a fused parameter.

    Two boxes of a tensor are equal (then they are replicas) or have nothing in common.
    """

    shape: tuple[int, ...]
    #: (global rank, its boxes), by rank; ranks that hold nothing may be left out.
    by_rank: tuple[tuple[int, tuple[Box, ...]], ...]

    @functools.cached_property
    def signature(self) -> str:
        """The same text on every rank that sees the same boxes."""
        rows = ";".join(
            f"{rank}:" + ",".join(f"{box.offset}{box.size}" for box in boxes) for rank, boxes in self.by_rank
        )
        return f"{self.shape}[{rows}]"


#: A mesh layout (one rank and every rank are such, too), or a list of boxes for each rank.
Spread = Union[Layout, Boxes]


def holders_of(spread: Spread, ranks: tuple[int, ...]) -> Holders:
    """The boxes of a spread that are not empty, each with those of `ranks` that hold it."""
    if isinstance(spread, Boxes):
        listed = dict(spread.by_rank)
        pairs = ((rank, box) for rank in ranks for box in listed.get(rank, ()))
    else:
        pairs = ((rank, box) for rank in ranks for box in (spread.box(rank),) if box is not None)
    found: dict[Box, list[int]] = {}
    for rank, box in pairs:
        if box.numel:
            found.setdefault(box, []).append(rank)
    return {box: tuple(holders) for box, holders in found.items()}


class Fault(NamedTuple):
    """What is wrong with a spread, as a `Problem` says it."""

    what: str
    got: str
    expected: str


class Ways(NamedTuple):
    """What one rank sends, receives and keeps of a tensor that goes from one spread to another."""

    #: peer -> boxes, in the same order on both sides.
    sends: dict[int, tuple[Box, ...]]
    receives: dict[int, tuple[Box, ...]]
    #: Boxes that this rank wants and holds: they never travel.
    own: tuple[Box, ...]


def ways_of(have: Spread, want: Spread, ranks: tuple[int, ...], rank: int) -> Ways:
    """The ways of a tensor, as `rank` sees them.

    Every box that a rank wants and does not hold comes once, from the nearest of its holders.
    """
    position = {member: index for index, member in enumerate(ranks)}
    sources, takers = holders_of(have, ranks), holders_of(want, ranks)
    sends: dict[int, list[Box]] = {}
    receives: dict[int, list[Box]] = {}
    own: list[Box] = []
    for held in boxes_of(sources, rank):
        for wanted, wanting in takers.items():
            part = common(held, wanted)
            if part is None:
                continue
            for taker in wanting:
                if taker not in sources[held] and nearest(sources[held], taker, position) == rank:
                    sends.setdefault(taker, []).append(part)
    for wanted in boxes_of(takers, rank):
        for held, holders in sources.items():
            part = common(held, wanted)
            if part is None:
                continue
            if rank in holders:
                own.append(part)
            else:
                receives.setdefault(nearest(holders, rank, position), []).append(part)
    return Ways(in_order(sends), in_order(receives), tuple(own))


def in_order(by_peer: dict[int, list[Box]]) -> dict[int, tuple[Box, ...]]:
    return {
        peer: tuple(sorted(boxes, key=lambda box: (box.offset, box.size))) for peer, boxes in by_peer.items()
    }


def boxes_of(holders: Holders, rank: int) -> list[Box]:
    return [box for box, members in holders.items() if rank in members]


def nearest(holders: Sequence[int], taker: int, position: dict[int, int]) -> int:
    """The holder in the smallest aligned block (of 2, 4, 8 ... ranks of the group) that the taker is in, too.

    Hosts are such blocks, and neighbours across their border are not near.
    """
    return min(holders, key=lambda holder: position[holder] ^ position[taker])


def common(one: Box, other: Box) -> Optional[Box]:
    """What two boxes have in common; None where that is nothing."""
    offset = tuple(map(max, one.offset, other.offset))
    ends = (min(a + m, b + n) for a, m, b, n in zip(one.offset, one.size, other.offset, other.size))
    size = tuple(end - start for end, start in zip(ends, offset))
    return Box(offset, size) if all(extent > 0 for extent in size) else None


def faults_of(have: Spread, want: Spread, ranks: tuple[int, ...], rank: int) -> list[Fault]:
    """What is wrong with the way between two spreads; coverage only of what `rank` wants."""
    if have.shape != want.shape:
        return [Fault("wrong shape", f"{want.shape}", f"{have.shape}")]
    faults = []
    for name, spread in (("held", have), ("wanted", want)):
        strangers = sorted(set(members_of(spread)) - set(ranks))
        if strangers:
            faults.append(Fault(f"{name} by ranks outside the process group", f"{strangers}", "none"))
        if isinstance(spread, Boxes):
            faults += faults_of_boxes(name, spread)
    # A mesh holds every element.
    if not faults and isinstance(have, Boxes):
        sources = holders_of(have, ranks)
        for wanted in boxes_of(holders_of(want, ranks), rank):
            parts = (common(held, wanted) for held in sources)
            covered = sum(part.numel for part in parts if part is not None)
            if covered != wanted.numel:
                faults.append(
                    Fault(f"no rank holds all of {wanted}", f"{covered} elements", f"{wanted.numel} elements")
                )
    return faults


def members_of(spread: Spread) -> Sequence[int]:
    """The global ranks that a spread names; none where it is for every rank."""
    if isinstance(spread, Boxes):
        return [rank for rank, boxes in spread.by_rank if boxes]
    return spread.mesh.ranks if spread.mesh is not None else ()


def faults_of_boxes(name: str, spread: Boxes) -> list[Fault]:
    limits = whole(spread.shape)
    distinct = list(dict.fromkeys(box for _, boxes in spread.by_rank for box in boxes if box.numel))
    outside = [box for box in distinct if len(box.size) != len(limits.size) or common(box, limits) != box]
    if outside:
        return [Fault(f"{box} is {name} outside the tensor", f"{box}", f"{spread.shape}") for box in outside]
    return [
        Fault(f"boxes that are {name} overlap", f"{one} and {other}", "equal boxes, or nothing in common")
        for one, other in overlaps(distinct)
    ]


def overlaps(boxes: Iterable[Box]) -> list[tuple[Box, Box]]:
    """Pairs of different boxes with elements in common; for each box at most the first one."""
    reaching: list[Box] = []
    found = []
    for box in sorted(boxes, key=lambda box: (box.offset, box.size)):
        if box.size:
            reaching = [other for other in reaching if other.offset[0] + other.size[0] > box.offset[0]]
        hit = next((other for other in reaching if common(other, box) is not None), None)
        if hit is not None:
            found.append((hit, box))
        reaching.append(box)
    return found
