"""The ranks' parts of a sharded state dict, as rows; and the findings of all rows together.

Pure functions of all ranks' rows. Must never see a value.
"""

from __future__ import annotations

import functools
import hashlib
import math
import pickle
import weakref
from array import array
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Optional, Union

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


class Outline:
    """The keys of a rank's rows, and of each the number of its form.

    Ranks of a regular cut (FSDP, HSDP, DDP, tensor parallelism) have the same one: it is sent once, and kept
    once. What is left of each rank's table, its forms, is as long as the list of different shapes.
    """

    def __init__(self, keys: Sequence[str], numbers: Words, digest: bytes = b"") -> None:
        self.keys = keys
        self.numbers = numbers
        #: The same bytes for the same outline.
        self.digest = digest or hashlib.blake2b(pickle.dumps((list(keys), numbers)), digest_size=16).digest()

    @functools.cached_property
    def rows_by_form(self) -> list[Words]:
        """The numbers of each form's rows."""
        rows = [array("I") for _ in range(max(self.numbers, default=-1) + 1)]
        for row, form in enumerate(self.numbers):
            rows[form].append(row)
        return rows

    @functools.cached_property
    def rows_by_key(self) -> dict[str, list[int]]:
        """The numbers of each key's rows."""
        rows: dict[str, list[int]] = {}
        for row, key in enumerate(self.keys):
            rows.setdefault(key, []).append(row)
        return rows

    def rows_of(self, rows: Union[Words, int]) -> Words:
        """Return rows that are told as such, or as the form of which they are all."""
        return self.rows_by_form[rows] if isinstance(rows, int) else rows

    def __reduce__(self) -> tuple[Any, ...]:
        return _outline_of, (self.digest, list(self.keys), self.numbers)


#: Digest -> the outline, as long as it is used: a thousand ranks send the same one.
_outlines: weakref.WeakValueDictionary[bytes, Outline] = weakref.WeakValueDictionary()


def _outline_of(digest: bytes, keys: Sequence[str], numbers: Words) -> Outline:
    outline = _outlines.get(digest)
    if outline is None:
        outline = _outlines[digest] = Outline(keys, numbers, digest)
    return outline


class Rows(Sequence[Row]):
    """A rank's rows, made when they are looked at: an outline, and the forms (a row without its key)."""

    def __init__(self, outline: Outline, forms: Sequence[tuple[Any, ...]]) -> None:
        self.outline = outline
        self.forms = forms

    def __len__(self) -> int:
        return len(self.outline.keys)

    def __getitem__(self, number: Any) -> Any:
        return Row._make((self.outline.keys[number], *self.forms[self.outline.numbers[number]]))

    def __iter__(self) -> Iterator[Row]:
        forms = self.forms
        return (
            Row._make((key, *forms[number])) for key, number in zip(self.outline.keys, self.outline.numbers)
        )


class RowTable(NamedTuple):
    """A rank's rows."""

    tensors: Sequence[Row]
    objects: Sequence[ObjectRow] = ()

    def rows(self) -> Rows:
        """Return the rows of tensors as an outline and forms."""
        if isinstance(self.tensors, Rows):
            return self.tensors
        forms: dict[tuple[Any, ...], int] = {}
        numbers = array("I", (forms.setdefault(row[1:], len(forms)) for row in self.tensors))
        return Rows(Outline([row.key for row in self.tensors], numbers), list(forms))

    def __reduce__(self) -> tuple[Any, ...]:
        rows = self.rows()
        return table_of, (rows.outline, rows.forms, list(map(tuple, self.objects)))


def table_of(outline: Outline, forms: Sequence[tuple[Any, ...]], objects: Iterable[Any]) -> RowTable:
    return RowTable(Rows(outline, forms), [ObjectRow(*row) for row in objects])


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


class Alike(NamedTuple):
    """The tables of all ranks, and their tensors by kinds."""

    #: Ranks with equal outlines share them.
    tables: Mapping[int, RowTable]
    kinds: list[Kind]
    #: Of each kind's first tensor, its boxes with their holders.
    cells: list[dict[Box, list[HeldRow]]]
    #: Outline -> of each row of an example which of the rows of its tensor it is.
    places: Mapping[Outline, list[int]]

    def which(self, held: HeldRow) -> int:
        return self.places[self.tables[held.rank].rows().outline][held.number]


def alike_of(tables: Mapping[int, RowTable]) -> Alike:
    """Return the tables with the kinds of their tensors; each kind is looked at once."""
    tables = with_outlines(tables)
    kinds = kinds_of(tables)
    few = examples_of(tables, kinds)
    cells = cells_of(few)
    places: dict[Outline, list[int]] = {}
    for rank, table in few.items():
        outline = tables[rank].rows().outline
        if outline not in places:
            seen: Counter[str] = Counter()
            places[outline] = []
            for row in table.tensors:
                places[outline].append(seen[row.key])
                seen[row.key] += 1
    return Alike(tables, kinds, [cells.get(kind.keys[0], {}) for kind in kinds], places)


def packed_rows(outline: Outline, rows: Words) -> Union[Words, int]:
    """Return the form whose rows these are, where they are all of them."""
    form = outline.numbers[rows[0]]
    return form if outline.rows_by_form[form] == rows else rows


def findings_of(tables: Mapping[int, RowTable]) -> Findings:
    """Return the findings of all tables together: every element has to have one main copy."""
    few = examples(tables)
    if not _findings_of_all(few):
        return []
    return _findings_of_all(tables)


class Kind(NamedTuple):
    """Tensors whose rows are alike on every rank but for their keys: layers have the same boxes."""

    keys: list[str]
    #: Outline -> of each of a key's rows there the numbers, one for each key.
    rows: dict[Outline, list[Words]]

    def part(self, numbers: Sequence[int]) -> Kind:
        """Return some of the tensors."""
        rows = {
            outline: [array("I", (column[number] for number in numbers)) for column in columns]
            for outline, columns in self.rows.items()
        }
        return Kind([self.keys[number] for number in numbers], rows)


def kinds_of(tables: Mapping[int, RowTable]) -> list[Kind]:
    """Return the kinds of all tensors; in each the keys are in the order in which ranks have them.

    Looks at each outline once, however many ranks have it.
    """
    outlines = dict.fromkeys(table.rows().outline for table in tables.values())
    paths: dict[tuple[int, int, int], int] = {}
    # Key -> the number of the rows that it has so far.
    seen: dict[str, int] = {}
    for order, outline in enumerate(outlines):
        for key, form in zip(outline.keys, outline.numbers):
            seen[key] = paths.setdefault((seen.get(key, 0), order, form), len(paths) + 1)
    kinds: dict[int, Kind] = {}
    for key, path in seen.items():
        kinds.setdefault(path, Kind([], {})).keys.append(key)
    for kind in kinds.values():
        for outline in outlines:
            if kind.keys[0] in outline.rows_by_key:
                columns = zip(*(outline.rows_by_key[key] for key in kind.keys))
                kind.rows[outline] = [array("I", column) for column in columns]
    return list(kinds.values())


def with_outlines(tables: Mapping[int, RowTable]) -> dict[int, RowTable]:
    """Return the same tables, in which ranks with the same outline share it."""
    known: dict[bytes, Outline] = {}
    shared = {}
    for rank, table in tables.items():
        rows = table.rows()
        outline = known.setdefault(rows.outline.digest, rows.outline)
        shared[rank] = RowTable(rows if outline is rows.outline else Rows(outline, rows.forms), table.objects)
    return shared


def examples(tables: Mapping[int, RowTable]) -> dict[int, RowTable]:
    """Return the rows of one tensor of each kind: layers are alike, and a problem of one is that of all."""
    tables = with_outlines(tables)
    return examples_of(tables, kinds_of(tables))


def examples_of(tables: Mapping[int, RowTable], kinds: Sequence[Kind]) -> dict[int, RowTable]:
    """Return the rows of each kind's first tensor."""
    numbers: dict[Outline, list[int]] = {}
    for kind in kinds:
        for outline, columns in kind.rows.items():
            numbers.setdefault(outline, []).extend(column[0] for column in columns)
    small = {}
    for rank, table in tables.items():
        rows = table.rows()
        small[rank] = RowTable(
            [rows[number] for number in sorted(numbers.get(rows.outline, ()))], table.objects
        )
    return small


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
        (rank, Problem("a box outside the global tensor", row.key, box_text(row.box), f"shape {row.shape}"))
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
            what = f"{len(main)} main replicas of {box_text(box)}"
            findings.append((ranks[-1], Problem(what, key, f"replica_id 0 on ranks {ranks}", "one")))
        if main:
            mains[box] = ranks[0]
    if findings or (mains and fills(list(mains), shape)):
        return findings
    limits = whole(shape)
    pair = overlapping(mains)
    if pair is not None:
        box, other = pair
        what = f"boxes overlap: {box_text(other)} and {box_text(box)} of rank {mains[box]}"
        return [(mains[other], Problem(what, key))]
    total = sum(box.numel for box in mains)
    if total == limits.numel and mains:
        return []
    lonely = [holders[0] for box, holders in boxes.items() if box not in mains]
    if lonely:
        held = lonely[0]
        got = "no rank has replica_id 0"
        return [(held.rank, Problem(f"no main replica of {box_text(held.row.box)}", key, got, "one"))]
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


def box_text(box: Box) -> str:
    """Return a box as an index: [0:4, 8:16]."""
    spans = (f"{start}:{start + extent}" for start, extent in zip(box.offset, box.size))
    return f"[{', '.join(spans)}]"


def keys_of(tables: Mapping[int, RowTable]) -> Iterator[str]:
    """Yield the keys that some rank has, tensors' and objects'."""
    outlines = dict.fromkeys(table.rows().outline for table in tables.values())
    for outline in outlines:
        yield from outline.keys
    for table in tables.values():
        for entry in table.objects:
            yield entry.unique_key
