"""The boxes of a tensor by the ranks that hold or want them, and the way of each from a holder to a taker.

Pure functions of what all ranks know: both ends of a message derive it alone, and nothing is asked.
"""

from __future__ import annotations

import functools
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, Optional, TypeVar, Union

from torch_dcp_backport.transfer._src.errors import Problem
from torch_dcp_backport.transfer._src.layout import Box, Layout, whole

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


def spread_of(shape: tuple[int, ...], by_rank: Mapping[int, Iterable[Box]]) -> Boxes:
    """Return the boxes of a tensor that ranks hold or want, each box once for a rank.

    Args:
        shape: the shape of the full tensor.
        by_rank: global rank -> its boxes, in elements of the full tensor.

    Example:
        >>> from torch_dcp_backport.transfer import Box, spread_of
        >>> top, bottom = Box((0, 0), (1, 2)), Box((1, 0), (1, 2))
        >>> spread = spread_of((2, 2), {1: [bottom], 0: [top, top]})
        >>> [(rank, len(boxes)) for rank, boxes in spread.by_rank]
        [(0, 1), (1, 1)]
    """
    rows = ((rank, tuple(dict.fromkeys(by_rank[rank]))) for rank in sorted(by_rank))
    return Boxes(shape, tuple(rows))


#: A mesh layout (one rank and every rank are such, too), or a list of boxes for each rank.
Spread = Union[Layout, Boxes]


def holders_of(spread: Spread, ranks: tuple[int, ...]) -> Holders:
    """The boxes of a spread that are not empty, each with those of `ranks` that hold it."""
    if isinstance(spread, Boxes):
        listed = dict(spread.by_rank)
        pairs = ((rank, box) for rank in ranks for box in listed.get(rank, ()))
    else:
        pairs = ((rank, box) for rank in ranks for box in (spread.box(rank),) if box is not None)
    ranks_by_box: dict[Box, list[int]] = {}
    for rank, box in pairs:
        if box.numel:
            ranks_by_box.setdefault(box, []).append(rank)
    return {box: tuple(holders) for box, holders in ranks_by_box.items()}


class Ways(NamedTuple):
    """The boxes of a tensor that one rank sends, receives and keeps, from one spread to another."""

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
            part = intersection(held, wanted)
            if part is None:
                continue
            for taker in wanting:
                if taker not in sources[held] and nearest(sources[held], taker, position) == rank:
                    sends.setdefault(taker, []).append(part)
    for wanted in boxes_of(takers, rank):
        for held, holders in sources.items():
            part = intersection(held, wanted)
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


def intersection(a: Box, b: Box) -> Optional[Box]:
    """The elements that two boxes have in common; None where they have none."""
    offset = tuple(map(max, a.offset, b.offset))
    ends = (min(i + m, j + n) for i, m, j, n in zip(a.offset, a.size, b.offset, b.size))
    size = tuple(end - start for end, start in zip(ends, offset))
    return Box(offset, size) if all(extent > 0 for extent in size) else None


T = TypeVar("T")


class Along(Generic[T]):
    """What has a box of one tensor, by place: what has elements in common with another box is found at once.

    Must not look at all of it for each box: there may be a hundred thousand chunks, or hundreds of experts.
    """

    def __init__(self, items: Iterable[T], box_of: Callable[[T], Box]) -> None:
        #: In the order in which their boxes begin along the axis on which most of them are apart.
        self.items = list(items)
        self._box_of = box_of
        boxes = list(map(box_of, self.items))
        starts = [set(along) for along in zip(*(box.offset for box in boxes))]
        #: None for a tensor without dimensions.
        self._axis = max(range(len(starts)), key=lambda axis: len(starts[axis]), default=None)
        if self._axis is not None:
            axis = self._axis
            self.items.sort(key=lambda item: box_of(item).offset[axis])
            self._starts = sorted(box.offset[axis] for box in boxes)
            self._longest = max(box.size[axis] for box in boxes)

    def near(self, box: Box) -> list[T]:
        """Return the items that may have elements of a box: all that have some are among them."""
        if self._axis is None:
            return self.items
        start, length = box.offset[self._axis], box.size[self._axis]
        first = bisect_right(self._starts, start - self._longest)
        return self.items[first : bisect_left(self._starts, start + length)]

    def common(self, box: Box) -> Iterator[tuple[T, Box]]:
        """Yield the items that have elements of a box, each with the box of these elements."""
        for item in self.near(box):
            common = intersection(self._box_of(item), box)
            if common is not None:
                yield item, common


def problems_of_spreads(have: Spread, want: Spread, ranks: tuple[int, ...], rank: int) -> list[Problem]:
    """The problems of the way between two spreads; of coverage only those of the boxes that `rank` wants."""
    if have.shape != want.shape:
        return [Problem("wrong shape", got=f"{want.shape}", expected=f"{have.shape}")]
    problems = []
    for name, spread in (("held", have), ("wanted", want)):
        strangers = sorted(set(members_of(spread)) - set(ranks))
        if strangers:
            what = f"{name} by ranks outside the process group"
            problems.append(Problem(what, got=f"{strangers}", expected="none"))
        if isinstance(spread, Boxes):
            problems += problems_of_boxes(name, spread)
    # A mesh holds every element.
    if not problems and isinstance(have, Boxes):
        sources = holders_of(have, ranks)
        for wanted in boxes_of(holders_of(want, ranks), rank):
            parts = (intersection(held, wanted) for held in sources)
            covered = sum(part.numel for part in parts if part is not None)
            if covered != wanted.numel:
                what = f"no rank holds all of {wanted}"
                expected = f"{wanted.numel} elements"
                problems.append(Problem(what, got=f"{covered} elements", expected=expected))
    return problems


def members_of(spread: Spread) -> Sequence[int]:
    """The global ranks that a spread names; none where it is for every rank."""
    if isinstance(spread, Boxes):
        return [rank for rank, boxes in spread.by_rank if boxes]
    return spread.mesh.ranks if spread.mesh is not None else ()


def problems_of_boxes(name: str, spread: Boxes) -> list[Problem]:
    limits = whole(spread.shape)
    distinct = list(dict.fromkeys(box for _, boxes in spread.by_rank for box in boxes if box.numel))
    outside = [
        box for box in distinct if len(box.size) != len(limits.size) or intersection(box, limits) != box
    ]
    if outside:
        shape = f"{spread.shape}"
        return [
            Problem(f"{box} is {name} outside the tensor", got=f"{box}", expected=shape) for box in outside
        ]
    what, expected = f"boxes that are {name} overlap", "equal boxes, or nothing in common"
    return [Problem(what, got=f"{a} and {b}", expected=expected) for a, b in overlaps(distinct)]


def overlaps(boxes: Iterable[Box]) -> list[tuple[Box, Box]]:
    """Pairs of different boxes with elements in common; at most one pair for each box."""
    reaching: list[Box] = []
    pairs = []
    for box in sorted(boxes, key=lambda box: (box.offset, box.size)):
        if box.size:
            reaching = [other for other in reaching if other.offset[0] + other.size[0] > box.offset[0]]
        hit = next((other for other in reaching if intersection(other, box) is not None), None)
        if hit is not None:
            pairs.append((hit, box))
        reaching.append(box)
    return pairs
