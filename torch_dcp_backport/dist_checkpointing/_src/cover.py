"""The cover of a tensor by boxes together: an element that is in several of them counts once.

Pure arithmetic. Must not look at every pair of boxes: there may be a hundred thousand of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Optional

from torch_dcp_backport.transfer import Box, overlaps


def fills(boxes: Sequence[Box], shape: tuple[int, ...]) -> bool:
    """Return whether different boxes are a grid that covers a shape: no two overlap, nothing is left out.

    False where that takes more than a look at each box along each axis.
    """
    cells = 1
    for axis, extent in enumerate(shape):
        cuts = sorted({(box.offset[axis], box.size[axis]) for box in boxes})
        end = 0
        for start, size in cuts:
            if start != end or (not size and extent):
                return False
            end += size
        if end != extent:
            return False
        cells *= len(cuts)
    return cells == len(boxes)


def covered(boxes: Iterable[Box]) -> int:
    """Return the number of elements that are in any of some boxes."""
    return sum(group[0].numel if len(group) == 1 else _swept(group) for group in clusters(boxes))


def overlapping(boxes: Iterable[Box]) -> Optional[tuple[Box, Box]]:
    """Return two different boxes with elements in common; None where there are none."""
    for group in clusters(boxes):
        pairs = overlaps(group) if len(group) > 1 else []
        if pairs:
            return pairs[0]
    return None


def clusters(boxes: Iterable[Box]) -> Iterator[list[Box]]:
    """Yield the different boxes that have elements, in groups that no cut between boxes divides.

    Shards, and shards of shards, are all alone: the rest is looked at box by box.
    """
    left = [list({box for box in boxes if box.numel})]
    while left:
        group = left.pop()
        parts = divided(group) if len(group) > 1 else []
        left += parts
        if group and not parts:
            yield group


def divided(group: Sequence[Box]) -> list[list[Box]]:
    """Return groups that are apart along the axis that makes most of them; none where no axis has a cut."""
    best: list[list[Box]] = []
    for axis in range(len(group[0].size)):
        groups: list[list[Box]] = []
        end = 0
        for box in sorted(group, key=lambda box: box.offset[axis]):
            if not groups or box.offset[axis] >= end:
                groups.append([])
            groups[-1].append(box)
            end = max(end, box.offset[axis] + box.size[axis])
        if len(groups) > max(len(best), 1):
            best = groups
    return best


def _swept(group: Sequence[Box]) -> int:
    """Sum the cover of the other axes over slabs, cut where a box begins or ends along the first axis."""
    waiting = sorted(group, key=lambda box: box.offset[0], reverse=True)
    places = sorted({place for box in group for place in (box.offset[0], box.offset[0] + box.size[0])})
    active: list[Box] = []
    total = 0
    for start, stop in zip(places, places[1:]):
        active = [box for box in active if box.offset[0] + box.size[0] > start]
        while waiting and waiting[-1].offset[0] == start:
            active.append(waiting.pop())
        total += (stop - start) * covered(Box(box.offset[1:], box.size[1:]) for box in active)
    return total
