"""The ranks' parts of a sharded state dict, as rows; and the findings of all rows together.

Pure functions of all ranks' rows. Must never see a value.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Optional

import torch

from torch_dcp_backport.dist_checkpointing._src.body import Words
from torch_dcp_backport.transfer import Box, Findings, Problem, overlaps, whole

# --- the cover of a tensor ---
#
# Pure arithmetic. Must not look at every pair of boxes: there may be a hundred thousand of them.


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
    return sum(group[0].numel if len(group) == 1 else _covered_by(group) for group in clusters(boxes))


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


def _covered_by(group: Sequence[Box]) -> int:
    """Sum the cover of the other axes over slabs along the first axis."""
    rest = [Box(box.offset[1:], box.size[1:]) for box in group]
    return sum(
        (stop - start) * covered(rest[number] for number in numbers)
        for start, stop, numbers in swept(group, 0)
    )


def swept(boxes: Sequence[Box], axis: int) -> Iterator[tuple[int, int, list[int]]]:
    """Yield (start, stop, the numbers of the boxes there), cut where a box begins or ends along an axis.

    Args:
        boxes: with elements.
        axis: the axis along which they are cut.
    """
    ends = [box.offset[axis] + box.size[axis] for box in boxes]
    later = deque(sorted(range(len(boxes)), key=lambda number: boxes[number].offset[axis]))
    edges = sorted({*ends, *(box.offset[axis] for box in boxes)})
    reaching: list[int] = []
    for start, stop in zip(edges, edges[1:]):
        reaching = [number for number in reaching if ends[number] > start]
        while later and boxes[later[0]].offset[axis] == start:
            reaching.append(later.popleft())
        if reaching:
            yield start, stop, reaching


# --- rows, and findings of all rows ---


class Row(NamedTuple):
    """A box of a global tensor on one rank."""

    key: str
    dtype: torch.dtype
    #: Of the global tensor.
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]
    is_main: bool = True
    #: The lowest rank of the mesh, of a DTensor's box; this rank, of a plain tensor's.
    mesh: Optional[int] = None
    #: The global shape of the tensor, where `shape` is that of the folded tensor (see `sharded_tensor`).
    original: Optional[tuple[int, ...]] = None

    @property
    def box(self) -> Box:
        return Box(self.offset, self.size)


class ObjectRow(NamedTuple):
    """An object of a grid on one rank."""

    key: str
    #: With the place in the grid.
    unique_key: str
    shape: tuple[int, ...]
    is_main: bool = True


class RowTable(NamedTuple):
    """A rank's rows."""

    tensors: Sequence[Row]
    objects: Sequence[ObjectRow] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        # Between ranks: the keys, and of each what it has in common with many others.
        forms: dict[tuple[Any, ...], int] = {}
        numbers = array("I", (forms.setdefault(row[1:], len(forms)) for row in self.tensors))
        keys = [row.key for row in self.tensors]
        return _table_of, (keys, numbers, list(forms), list(map(tuple, self.objects)))


def _table_of(keys: list[str], numbers: Words, forms: list[Any], objects: list[Any]) -> RowTable:
    rows = [Row._make((key, *forms[number])) for key, number in zip(keys, numbers)]
    return RowTable(rows, [ObjectRow(*row) for row in objects])


class HeldRow(NamedTuple):
    """A row, and the rank that has it."""

    rank: int
    #: The number of the row in that rank's table.
    number: int
    row: Row


#: key -> box -> the rows with this box that have elements, the main row first.
Cells = dict[str, dict[Box, list[HeldRow]]]


def cells_of(tables: Mapping[int, RowTable]) -> Cells:
    """Return the distinct boxes of every tensor, each with its holders."""
    cells: Cells = {}
    for rank, table in tables.items():
        for number, row in enumerate(table.tensors):
            boxes = cells.setdefault(row.key, {})
            # A tensor without elements has one box, so that its key is known.
            if 0 not in row.size or 0 in row.shape:
                box = whole(row.shape) if 0 in row.shape else row.box
                boxes.setdefault(box, []).append(HeldRow(rank, number, row))
    for boxes in cells.values():
        for box, holders in boxes.items():
            boxes[box] = sorted(without_twins(holders), key=lambda held: not held.row.is_main)
    return cells


def without_twins(holders: list[HeldRow]) -> list[HeldRow]:
    """Return the same holders, of which those on other meshes than the first are no main replicas.

    A DTensor that is not parallelised along all dimensions of the job's mesh, such as a norm's weight beside
    tensor parallelism, is on several meshes that know nothing of each other, and is one tensor. A plain
    tensor's main replica is that of the first rank, which need not have it (a stage of a pipeline has other
    tensors): then it is that of the lowest rank that has it.
    """
    mains = [held.row.mesh for held in holders if held.row.is_main]
    if not mains and all(held.row.mesh is not None for held in holders):
        lowest = min(holders, key=lambda held: held.rank)
        return [
            held._replace(row=held.row._replace(is_main=True)) if held is lowest else held for held in holders
        ]
    if len(mains) < 2 or None in mains or len(set(mains)) < len(mains):
        return holders
    first = min(mesh for mesh in mains if mesh is not None)
    return [
        held if held.row.mesh == first else held._replace(row=held.row._replace(is_main=False))
        for held in holders
    ]


def findings_of(tables: Mapping[int, RowTable]) -> Findings:
    """Return the findings of all tables together: every element has to have one main copy."""
    few = examples(tables)
    if not _findings_of_all(few):
        return []
    return _findings_of_all(tables)


def examples(tables: Mapping[int, RowTable]) -> dict[int, RowTable]:
    """Return the rows of one tensor of each kind: layers are alike, and a problem of one is that of all."""
    kinds: dict[Any, int] = {}
    # Key -> the number of the kind that its rows so far make.
    seen: dict[str, int] = {}
    for rank, table in tables.items():
        for row in table.tensors:
            key = row[0]
            seen[key] = kinds.setdefault((seen.get(key, 0), rank, row[1:]), len(kinds) + 1)
    chosen = set({kind: key for key, kind in seen.items()}.values())
    return {
        rank: RowTable([row for row in table.tensors if row.key in chosen], table.objects)
        for rank, table in tables.items()
    }


def _findings_of_all(tables: Mapping[int, RowTable]) -> Findings:
    findings = unwritable(tables)
    if findings:
        return findings
    cells = cells_of(tables)
    shapes = {row.key: row.shape for table in tables.values() for row in table.tensors}
    for key, boxes in cells.items():
        findings += _findings_of_tensor(key, shapes[key], boxes)
    return [*findings, *_findings_of_objects(tables)]


def unwritable(tables: Mapping[int, RowTable]) -> Findings:
    """Return findings of rows that no checkpoint can hold, also where nothing else is checked."""
    return disagreements(tables) or [
        (rank, Problem("a box outside the global tensor", row.key, spelled(row.box), f"shape {row.shape}"))
        for rank, table in tables.items()
        for row in table.tensors
        if is_outside(row)
    ]


def is_outside(row: Row) -> bool:
    return 0 not in row.size and any(
        start < 0 or start + extent > limit for start, extent, limit in zip(row.offset, row.size, row.shape)
    )


def disagreements(tables: Mapping[int, RowTable]) -> Findings:
    """Return findings of tensors that have another dtype or global shape on another rank."""
    findings: Findings = []
    known: dict[str, tuple[int, Row]] = {}
    for rank, table in tables.items():
        for row in table.tensors:
            first, other = known.setdefault(row.key, (rank, row))
            for what, got, expected in (
                ("another dtype than on another rank", row.dtype, other.dtype),
                ("another global shape than on another rank", row.shape, other.shape),
                ("another shape of a flattened tensor than on another rank", row.original, other.original),
            ):
                if got != expected:
                    findings.append((rank, Problem(what, row.key, f"{got}", f"{expected} as rank {first}")))
    return findings


def _findings_of_tensor(key: str, shape: tuple[int, ...], boxes: Mapping[Box, Sequence[HeldRow]]) -> Findings:
    findings: Findings = []
    mains: dict[Box, int] = {}
    for box, holders in boxes.items():
        main = [held for held in holders if held.row.is_main]
        ranks = [held.rank for held in main]
        if len(main) > 1 and 0 not in shape:
            what = f"{len(main)} main replicas of {spelled(box)}"
            findings.append((ranks[-1], Problem(what, key, f"replica_id 0 on ranks {ranks}", "one")))
        if main:
            mains[box] = ranks[0]
    if findings or (mains and fills(list(mains), shape)):
        return findings
    limits = whole(shape)
    pair = overlapping(mains)
    if pair is not None:
        box, other = pair
        what = f"boxes overlap: {spelled(other)} and {spelled(box)} of rank {mains[box]}"
        return [(mains[other], Problem(what, key))]
    total = sum(box.numel for box in mains)
    if total == limits.numel and mains:
        return []
    lonely = [holders[0] for box, holders in boxes.items() if box not in mains]
    if lonely:
        held = lonely[0]
        got = "no rank has replica_id 0"
        return [(held.rank, Problem(f"no main replica of {spelled(held.row.box)}", key, got, "one"))]
    rank = next(iter(mains.values()), 0)
    what = f"no rank has all of shape {shape}"
    return [(rank, Problem(what, key, f"{total} elements", f"{limits.numel} elements"))]


def _findings_of_objects(tables: Mapping[int, RowTable]) -> Findings:
    findings: Findings = []
    mains: dict[str, list[int]] = {}
    grids: dict[str, tuple[int, tuple[int, ...], set[str]]] = {}
    for rank, table in tables.items():
        for row in table.objects:
            mains.setdefault(row.unique_key, []).extend([rank] if row.is_main else [])
            first, shape, places = grids.setdefault(row.key, (rank, row.shape, set()))
            places.add(row.unique_key)
            if shape != row.shape:
                what = "another grid of objects than on another rank"
                findings.append((rank, Problem(what, row.key, f"{row.shape}", f"{shape} as rank {first}")))
    for unique_key, ranks in mains.items():
        if len(ranks) > 1:
            what = f"{len(ranks)} main replicas of an object"
            findings.append((ranks[-1], Problem(what, unique_key, f"on ranks {ranks}", "one")))
        elif not ranks:
            rank = grids[unique_key.partition("/")[0]][0]
            findings.append((rank, Problem("no main replica of an object", unique_key, "none", "one")))
    for key, (rank, shape, places) in grids.items():
        if not findings and len(places) != math.prod(shape):
            got, expected = f"{len(places)} objects", f"{math.prod(shape)} objects"
            findings.append((rank, Problem("objects are missing from the grid", key, got, expected)))
    return findings


def spelled(box: Box) -> str:
    """Return a box as an index: [0:4, 8:16]."""
    spans = (f"{start}:{start + extent}" for start, extent in zip(box.offset, box.size))
    return f"[{', '.join(spans)}]"


def keys_of(tables: Mapping[int, RowTable]) -> Iterator[str]:
    """Yield the keys that some rank has, tensors' and objects'."""
    for table in tables.values():
        for row in table.tensors:
            yield row.key
        for entry in table.objects:
            yield entry.unique_key
