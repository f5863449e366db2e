"""Plans of earlier saves: each rank's share, and its place. Kept as bytes, and never with a value.

A plan is used again where every rank's table is what it was, by a digest at every save.
"""

from __future__ import annotations

import functools
import hashlib
import heapq
import itertools
import pickle
import threading
from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Optional, Union

import torch

from torch_dcp_backport.dist_checkpointing._src.body import Output, Records, Words
from torch_dcp_backport.dist_checkpointing._src.columns import (
    KEPT,
    LEAST,
    Beginning,
    Block,
    Columns,
    Content,
    Listing,
    ObjectPlace,
)
from torch_dcp_backport.dist_checkpointing._src.packed import PackedBlock
from torch_dcp_backport.dist_checkpointing._src.records import form_of
from torch_dcp_backport.dist_checkpointing._src.table import (
    Alike,
    HeldRow,
    Kind,
    Outline,
    Row,
    RowTable,
    packed_rows,
)
from torch_dcp_backport.transfer import Box

# --- shares ---
#
# Pure functions of what all ranks have. Must never see a value.


#: Smaller pieces of a replica are not worth a record of their own.
SMALLEST = 256 * 1024
#: Bytes of a box that is read faster than its file is opened.
SMALL = 16 * 1024
#: A replica is cut until a piece is at most this part of a rank's mean share.
FINE = 20


class Item(NamedTuple):
    """A box that a rank writes of one of its rows."""

    number: int
    box: Box


class WriteShare(NamedTuple):
    """The boxes and objects that a rank writes."""

    tensors: list[Item]
    #: Numbers of rows of its table.
    objects: list[int]


class PackedItem(NamedTuple):
    """A box that a rank writes of each of some rows, which are alike."""

    box: Box
    #: The numbers of the rows; or of a form, of which it is every row.
    rows: Union[Words, int]


class PackedShare(NamedTuple):
    """A share as it is sent: a regular cut has an item for each shape, however many tensors there are."""

    items: list[PackedItem]
    objects: list[int]

    def share_of(self, outline: Outline) -> WriteShare:
        """Return the share of a rank whose table has this outline."""
        items = [Item(number, box) for box, rows in self.items for number in outline.rows_of(rows)]
        # As the state dict has them: neighbours there are read together.
        items.sort(key=lambda item: (item.number, item.box.offset))
        return WriteShare(items, self.objects)


class Stripe(NamedTuple):
    """Boxes of a kind that have as many holders each: the same of them writes a tensor's part of each box.

    Under HSDP the shards of a tensor are all written by one replica.
    """

    boxes: list[Box]
    #: Of each box, in an order that all boxes have: (rank, which of the rank's rows of a tensor).
    holders: list[list[tuple[int, int]]]
    #: Number of a holder -> the tensors of the kind that it writes; None for all of them.
    chosen: dict[int, Optional[Words]]


class Piece(NamedTuple):
    """A box of some tensors of a kind that one rank writes."""

    kind: int
    #: The number of the box among those of its kind.
    column: int
    rank: int
    box: Box
    #: The numbers of the tensors in the kind; None for all of them.
    tensors: Optional[Words]
    #: Of the rank's table.
    rows: Words


class Plan(NamedTuple):
    """The writers of everything, by kinds of tensors. Must never have an object for a box of each tensor."""

    tables: Mapping[int, RowTable]
    kinds: list[Kind]
    #: Of each kind.
    stripes: list[list[Stripe]]
    #: Rank -> the numbers of the objects that it writes.
    objects: dict[int, list[int]]

    def pieces(self) -> Iterator[Piece]:
        """Yield what is written, in an order that is always the same."""
        outlines = {rank: table.rows().outline for rank, table in self.tables.items()}
        for number, (kind, stripes) in enumerate(zip(self.kinds, self.stripes)):
            column = 0
            for stripe in stripes:
                # Ranks with one outline have the same rows.
                known: dict[tuple[Outline, int, int], Words] = {}
                for box, holders in zip(stripe.boxes, stripe.holders):
                    for holder, tensors in stripe.chosen.items():
                        rank, which = holders[holder]
                        outline = outlines[rank]
                        rows = kind.rows[outline][which]
                        if tensors is not None:
                            key = outline, which, holder
                            if key not in known:
                                known[key] = array("I", (rows[tensor] for tensor in tensors))
                            rows = known[key]
                        yield Piece(number, column, rank, box, tensors, rows)
                    column += 1

    def records(self) -> int:
        """Return the number of the tensors' records."""
        return sum(
            len(kind.keys) * len(stripe.boxes)
            for kind, stripes in zip(self.kinds, self.stripes)
            for stripe in stripes
        )

    def shares(self) -> dict[int, PackedShare]:
        """Return what each rank is told."""
        shares = {rank: PackedShare([], self.objects[rank]) for rank in self.tables}
        outlines = {rank: table.rows().outline for rank, table in self.tables.items()}
        forms: dict[tuple[Outline, int], Union[Words, int]] = {}
        for piece in self.pieces():
            outline = outlines[piece.rank]
            rows: Union[Words, int] = piece.rows
            if piece.tensors is None:
                key = outline, id(piece.rows)
                if key not in forms:
                    forms[key] = packed_rows(outline, piece.rows)
                rows = forms[key]
            shares[piece.rank].items.append(PackedItem(piece.box, rows))
        return shares


class ReplicatedBoxes(NamedTuple):
    """Boxes of a kind, of one size, that as many ranks hold each."""

    kind: int
    boxes: list[Box]
    #: As of a stripe.
    holders: list[list[tuple[int, int]]]
    #: The number of the main replica among the holders.
    main: int
    #: Of each box.
    nbytes: int
    #: All holders.
    ranks: set[int]

    def loads(self, load: dict[int, int], holder: int, nbytes: int) -> None:
        """Add the bytes of each box to the load of its holder of a number."""
        for holders in self.holders:
            load[holders[holder][0]] += nbytes


def plan_of(alike: Alike, balanced: bool = True, fixed: Collection[str] = ()) -> Plan:
    """Return the plan of a save.

    Args:
        alike: the tables of all ranks, and the kinds of their tensors.
        balanced: let any rank that holds a box write it, or a part of it; else its main replica.
        fixed: keys whose boxes their main replicas write in any case.
    """
    kinds: list[Kind] = []
    stripes: list[list[Stripe]] = []
    load = dict.fromkeys(alike.tables, 0)
    shared: list[ReplicatedBoxes] = []
    total = 0
    for kind, cells in zip(alike.kinds, alike.cells):
        own = [number for number, key in enumerate(kind.keys) if key in fixed]
        left = sorted(set(range(len(kind.keys))) - set(own)) if own else range(len(kind.keys))
        for numbers, is_free in ((left, balanced), (own, False)):
            if not numbers:
                continue
            part = kind.part(numbers) if own else kind
            alone, groups = writers_of(len(kinds), alike, cells, is_free)
            kinds.append(part)
            stripes.append([alone] if alone.boxes else [])
            shared += groups
            for box, (first, *_) in zip(alone.boxes, alone.holders):
                load[first[0]] += len(numbers) * nbytes_of(box, cells)
            total += len(numbers) * sum(nbytes_of(box, cells) for box in cells)
    for number, stripe in dealt(shared, [len(kind.keys) for kind in kinds], total, load):
        stripes[number].append(stripe)
    objects: dict[int, list[int]] = {rank: [] for rank in alike.tables}
    assigned: set[str] = set()
    for rank, table in alike.tables.items():
        for number, row in enumerate(table.objects):
            if row.is_main and row.unique_key not in assigned:
                assigned.add(row.unique_key)
                objects[rank].append(number)
    return Plan(alike.tables, kinds, stripes, objects)


def nbytes_of(box: Box, cells: Mapping[Box, Sequence[HeldRow]]) -> int:
    return box.numel * cells[box][0].row.dtype.itemsize


def writers_of(
    number: int, alike: Alike, cells: Mapping[Box, Sequence[HeldRow]], is_free: bool
) -> tuple[Stripe, list[ReplicatedBoxes]]:
    """Return the boxes of a kind that one rank is to write, and those that any of several may."""
    alone = Stripe([], [], {0: None})
    groups: dict[Any, ReplicatedBoxes] = {}
    for box, rows in cells.items():
        nbytes, main = nbytes_of(box, cells), rows[0].rank
        if not is_free or not nbytes or all(held.rank == main for held in rows):
            alone.boxes.append(box)
            alone.holders.append([(main, alike.which(rows[0]))])
            continue
        # The main row first, where a rank has several.
        by_rank = {held.rank: (held.rank, alike.which(held)) for held in reversed(rows)}
        ranks = sorted(by_rank)
        key: Any = box.size, len(ranks), ranks.index(main)
        # Holders of two boxes write for both, which is fair where no rank holds both.
        if key in groups and not by_rank.keys().isdisjoint(groups[key].ranks):
            key = box
        group = groups.setdefault(key, ReplicatedBoxes(number, [], [], ranks.index(main), nbytes, set()))
        group.boxes.append(box)
        group.holders.append([by_rank[rank] for rank in ranks])
        group.ranks.update(ranks)
    return alone, list(groups.values())


def dealt(
    shared: Sequence[ReplicatedBoxes], counts: Sequence[int], total: int, load: dict[int, int]
) -> Iterator[tuple[int, Stripe]]:
    """Yield the stripes of boxes that several ranks hold, with the numbers of their kinds.

    Args:
        counts: of each kind the number of its tensors.
        total: the bytes of the checkpoint.
        load: the bytes of each rank that are dealt already; those of these stripes are added.
    """
    grain = max(total // (len(load) * FINE), SMALLEST)
    # Every rank reads a small value that all of them hold (AdamW's step counters), from each file that has
    # one. So one rank writes those, as many as leave the balance as it is.
    spare = dict.fromkeys(load, grain)
    stripes: list[tuple[int, ReplicatedBoxes, Stripe, range]] = []
    for group in shared:
        numbers, chosen = range(counts[group.kind]), dict[int, Optional[Words]]()
        if group.nbytes <= SMALL:
            mains = [holders[group.main][0] for holders in group.holders]
            few = min(len(numbers), *(spare[main] // group.nbytes for main in mains))
            if few:
                chosen[group.main] = array("I", numbers[:few])
                numbers = numbers[few:]
                group.loads(load, group.main, few * group.nbytes)
                group.loads(spare, group.main, -few * group.nbytes)
        parts = [cut(box, min(-(-group.nbytes // grain), 4 * len(group.holders[0]))) for box in group.boxes]
        for boxes in zip(*parts):
            nbytes = group.nbytes * boxes[0].numel // group.boxes[0].numel
            stripes.append((nbytes, group, Stripe(list(boxes), group.holders, dict(chosen)), numbers))
    queues: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    # The largest first, each to the holder with the least so far; its own order among equals keeps it stable.
    for nbytes, group, stripe, numbers in sorted(stripes, key=lambda entry: -entry[0]):
        places = {rank: place for place, (rank, _) in enumerate(group.holders[0])}
        holders = Holders(places)
        for number in numbers:
            place = places[least_loaded(holders, load, queues)]
            group.loads(load, place, nbytes)
            words = stripe.chosen.setdefault(place, array("I"))
            assert words is not None, "not all, but some"
            words.append(number)
        yield group.kind, stripe


class Holders:
    """The ranks that hold a box."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self.ranks = tuple(sorted(ranks))


def least_loaded(
    holders: Holders, load: Mapping[int, int], queues: dict[tuple[int, ...], list[tuple[int, int]]]
) -> int:
    """Return the holder with the least load, of equal ones the lowest rank.

    A minimum over all holders for each piece is quadratic in the number of replicas. So each set of holders
    has a heap. Entries may be of earlier loads; loads only grow: a first entry that is right is the least.
    """
    queue = queues.get(holders.ranks)
    if queue is None:
        queue = queues[holders.ranks] = [(load[rank], rank) for rank in holders.ranks]
        heapq.heapify(queue)
    while queue[0][0] != load[queue[0][1]]:
        rank = queue[0][1]
        heapq.heapreplace(queue, (load[rank], rank))
    return queue[0][1]


def cut(box: Box, parts: int) -> list[Box]:
    """Cut a box into about so many pieces along its outermost axis, where a cut costs no shorter runs."""
    dim = next((dim for dim, extent in enumerate(box.size) if extent > 1), None)
    if parts <= 1 or dim is None:
        return [box]
    rows = -(-box.size[dim] // parts)
    pieces = []
    while box.size[dim] > rows:
        pieces.append(box.head(dim, rows))
        box = box.tail(dim, rows)
    return [*pieces, box]


# --- plans of earlier saves ---

#: A model and its average, in turns; each has about 100 bytes for a record.
MOST = 2

Ranks = tuple[int, ...]


class Description:
    """The data from which the first rank writes `.metadata` of a plan, once and again."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        #: The content before the checksums of the last save, and the places that its records had.
        self._last: Optional[tuple[Any, Beginning]] = None

    def content(
        self, outputs: Mapping[int, Output], common: tuple[int, int], torch_metadata: bool = True
    ) -> Content:
        """Return the content of `.metadata` for the records that the ranks have written by this plan."""
        columns = {
            rank: (output.file, Records.of(output.tensors), Records.of(output.objects))
            for rank, output in outputs.items()
        }
        count = sum(len(tensors) for _, tensors, _ in columns.values())
        beginning = Beginning()
        if count * LEAST <= KEPT:
            # Two threads may save by one plan: this is one assignment.
            places = (
                torch_metadata,
                {
                    rank: (file, tensors.places(), objects.places())
                    for rank, (file, tensors, objects) in columns.items()
                },
            )
            if self._last is not None and self._last[0] == places:
                beginning = self._last[1]
            self._last = places, beginning
        listing = listing_of(self.plan, self._pieces, columns, common)
        return Content(listing, beginning, torch_metadata=torch_metadata)

    @functools.cached_property
    def _pieces(self) -> list[list[Numbered]]:
        return numbered(self.plan)

    def to_bytes(self, outputs: Mapping[int, Output], common: tuple[int, int]) -> bytes:
        return b"".join(self.content(outputs, common))


#: Rank -> its file, the records of its tensors, and those of its objects.
RankRecords = Mapping[int, tuple[str, Records, Records]]


class PlannedBlock(Block):
    """Tensors of a plan, and the records that the ranks have written of them."""

    def __init__(
        self, kind: Kind, row: Row, boxes: Sequence[Box], pieces: Sequence[Numbered], written: RecordsByRank
    ) -> None:
        """`pieces`: with the numbers of their records in the ranks' files."""
        super().__init__(kind.keys, row.dtype, row.shape, row.original, boxes)
        self._pieces = pieces
        self._written = written

    def longest(self) -> int:
        return max((form_of(self.dtype, box.size).length for box in self.boxes), default=0)

    def places(self) -> Iterable[tuple[int, int, int]]:
        width = len(self.boxes)
        places = [(0, 0, 0)] * (len(self.keys) * width)
        for piece, numbers in self._pieces:
            file, offsets = self._written.files[piece.rank], self._written.layout(piece.rank)
            # Of one dtype and size: so they have one length.
            length = self._written.length(piece.rank, numbers[0])
            for tensor, number in zip(piece.tensors or range(len(self.keys)), numbers):
                places[tensor * width + piece.column] = file, offsets[number], length
        return places

    def columns(self) -> Columns:
        shape = len(self.boxes), len(self.keys)
        files = torch.empty(shape, dtype=torch.int32, device="cpu")
        offsets = torch.empty(shape, dtype=torch.int64, device="cpu")
        lengths = torch.zeros(shape[0], dtype=torch.int64, device="cpu")
        for piece, numbers in self._pieces:
            where = (piece.column,) if piece.tensors is None else (piece.column, wide(piece.tensors))
            files[where] = self._written.files[piece.rank]
            offsets[where] = self._written.offsets(piece.rank, numbers)
            lengths[piece.column] = self._written.length(piece.rank, numbers[0])
        return Columns(files.t(), offsets.t(), lengths.expand(shape[::-1]))

    def packed(self) -> PackedBlock:
        by_column: list[list[Numbered]] = [[] for _ in self.boxes]
        for entry in self._pieces:
            by_column[entry[0].column].append(entry)
        # Columns of ranks that have the same records at the same places are one.
        known: dict[Any, int] = {}
        lengths, which, files, offsets, spread = (array("q") for _ in range(5))
        for pieces in by_column:
            lengths.append(self._written.length(pieces[0][0].rank, pieces[0][1][0]))
            key = tuple(
                (id(self._written.layout(piece.rank)), id(numbers), id(piece.tensors))
                for piece, numbers in pieces
            )
            if key not in known:
                known[key] = len(known)
                offsets += self._column((self._written.layout(piece.rank) for piece, _ in pieces), pieces)
            which.append(known[key])
            numbers_of_files = [self._written.files[piece.rank] for piece, _ in pieces]
            if len(pieces) == 1 and pieces[0][0].tensors is None:
                files += array("q", numbers_of_files)
                continue
            spread += self._column((Same(number) for number in numbers_of_files), pieces)
            files.append(-len(spread) // len(self.keys))
        boxes = array("q", (number for box in self.boxes for number in (*box.offset, *box.size)))
        columns = boxes, lengths, which, files, offsets, spread
        return PackedBlock(self.keys, self.dtype, self.shape, self.original, *columns)

    def _column(self, values: Iterable[Sequence[int]], pieces: Sequence[Numbered]) -> Words:
        """Return a value for each tensor: of each piece, those of the numbers of its records."""
        column = array("q", bytes(8 * len(self.keys)))
        for own, (piece, numbers) in zip(values, pieces):
            if piece.tensors is None:
                return array("q", map(own.__getitem__, numbers))
            for tensor, number in zip(piece.tensors, numbers):
                column[tensor] = own[number]
        return column

    def crcs(self) -> Union[Words, torch.Tensor]:
        width = len(self.boxes)
        if self.is_small:
            few = array("I", bytes(4 * len(self.keys) * width))
            for piece, numbers in self._pieces:
                own = self._written.records[piece.rank][1].crcs
                for tensor, number in zip(piece.tensors or range(len(self.keys)), numbers):
                    few[tensor * width + piece.column] = own[number]
            return few
        sums = torch.empty((width, len(self.keys)), dtype=torch.int32, device="cpu")
        for piece, numbers in self._pieces:
            where = (piece.column,) if piece.tensors is None else (piece.column, wide(piece.tensors))
            sums[where] = self._written.crcs(piece.rank)[self._written.index(numbers)]
        return sums.t()


class Same(Sequence[int]):
    """The same number for everything."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __len__(self) -> int:
        return 1

    def __getitem__(self, number: Any) -> Any:
        return self.number


class RecordsByRank:
    """The records of all ranks, and their numbers as tensors where many are looked at."""

    def __init__(self, records: RankRecords) -> None:
        self.records = records
        self.files = {rank: number for number, rank in enumerate(records)}
        #: Records at the same places in their files have the same numbers: ranks of a regular cut have.
        self._known: dict[Any, Words] = {}
        self._layouts: dict[int, Words] = {}
        #: id of numbers -> these, which keeps them, as an index.
        self._wide: dict[int, tuple[Any, torch.Tensor]] = {}

    def layout(self, rank: int) -> Words:
        """Return the offsets of a rank's records, which ranks share that have the same ones."""
        layout = self._layouts.get(rank)
        if layout is None:
            records = self.records[rank][1]
            key = records.places()
            layout = self._known.get(key)
            if layout is None:
                layout = self._known[key] = array("q", records.offsets())
            self._layouts[rank] = layout
        return layout

    def index(self, words: Words) -> torch.Tensor:
        """Return numbers as an index of a tensor, made once of the same ones."""
        known = self._wide.get(id(words))
        if known is None:
            known = self._wide[id(words)] = words, wide(words)
        return known[1]

    def offsets(self, rank: int, numbers: Words) -> torch.Tensor:
        return torch.frombuffer(self.layout(rank), dtype=torch.int64)[self.index(numbers)]

    def length(self, rank: int, number: int) -> int:
        records = self.records[rank][1]
        return records.lengths[records.numbers[number]]

    def crcs(self, rank: int) -> torch.Tensor:
        return torch.frombuffer(self.records[rank][1].crcs, dtype=torch.int32)


def wide(words: Words) -> torch.Tensor:
    """Return numbers as an index of a tensor."""
    return torch.frombuffer(words, dtype=torch.int32).long()


def listing_of(
    plan: Plan, pieces: Sequence[Sequence[Numbered]], records: RankRecords, common: Optional[tuple[int, int]]
) -> Listing:
    """Return what the `.metadata` of a save lists: the place of every box of every tensor, and of objects.

    Args:
        pieces: of each kind.
    """
    written = RecordsByRank(records)
    first_by_outline: dict[Outline, RowTable] = {}
    for table in plan.tables.values():
        first_by_outline.setdefault(table.rows().outline, table)
    blocks = []
    for kind, stripes, own in zip(plan.kinds, plan.stripes, pieces):
        outline = next(iter(kind.rows))
        row = first_by_outline[outline].tensors[kind.rows[outline][0][0]]
        boxes = [box for stripe in stripes for box in stripe.boxes]
        blocks.append(PlannedBlock(kind, row, boxes, own, written))
    objects = [
        ObjectPlace(plan.tables[rank].objects[number].unique_key, written.files[rank], *entry)
        for rank, numbers in plan.objects.items()
        for number, entry in zip(numbers, records[rank][2])
    ]
    order = dict.fromkeys(key for outline in first_by_outline for key in outline.keys)
    order.update(dict.fromkeys(place.key for place in objects))
    files = [file for file, _, _ in records.values()]
    return Listing(blocks, objects, files, order, None, common)


#: A piece, with the numbers of its records among those of its rank.
Numbered = tuple[Piece, Words]


def numbered(plan: Plan) -> list[list[Numbered]]:
    """Return what is written of each kind, with the numbers of its records."""
    pieces = list(plan.pieces())
    by_rank: dict[int, list[Piece]] = {}
    for piece in pieces:
        by_rank.setdefault(piece.rank, []).append(piece)
    #: Ranks that write the same rows have the same numbers.
    known: dict[tuple[int, ...], list[Words]] = {}
    numbers: dict[int, Iterator[Words]] = {}
    for rank, own in by_rank.items():
        key = tuple(id(piece.rows) for piece in own)
        split = known.get(key)
        if split is None:
            rows = [(row, piece.box.offset) for piece in own for row in piece.rows]
            places = array("I", bytes(4 * len(rows)))
            for place, number in enumerate(sorted(range(len(rows)), key=rows.__getitem__)):
                places[number] = place
            ends = list(itertools.accumulate(len(piece.rows) for piece in own))
            split = [places[start:end] for start, end in zip([0, *ends], ends)]
            if len({row for row, _ in rows}) == len(rows):
                known[key] = split
        numbers[rank] = iter(split)
    by_kind: list[list[Numbered]] = [[] for _ in plan.kinds]
    for piece in pieces:
        by_kind[piece.kind].append((piece, next(numbers[piece.rank])))
    return by_kind


class KeptPlan(NamedTuple):
    """A plan as one rank keeps it."""

    #: The same on every rank that has this plan, and of no other.
    number: bytes
    #: This rank's share, and what it shares with other ranks, pickled as they were sent.
    share: bytes
    #: Of the first rank, as is the next field: each rank's digest.
    digests: Mapping[int, bytes]
    description: Optional[Description]


_LOCK = threading.Lock()
_kept: OrderedDict[tuple[Ranks, bytes], KeptPlan] = OrderedDict()


def digest_of(table: RowTable, rank: int, *options: bool) -> bytes:
    """Return the same bytes for the same rows of the same rank under the same options.

    Of the same rank: a process can be another rank in a process group that is made anew, and its kept share
    is that of the rank it was.
    """
    rows = table.rows()
    what = rows.outline.digest, rows.forms, table.objects, rank, options
    return hashlib.blake2b(pickle.dumps(what), digest_size=32).digest()


def find(ranks: Ranks, digest: bytes) -> Optional[KeptPlan]:
    with _LOCK:
        plan = _kept.get((ranks, digest))
        if plan is not None:
            _kept.move_to_end((ranks, digest))
        return plan


def keep(ranks: Ranks, digest: bytes, plan: KeptPlan) -> None:
    with _LOCK:
        _kept[ranks, digest] = plan
        _kept.move_to_end((ranks, digest))
        while len(_kept) > MOST:
            _kept.popitem(last=False)


def forget() -> None:
    """Plan anew from now on."""
    with _LOCK:
        _kept.clear()


def number_of(digests: Mapping[int, bytes]) -> bytes:
    return hashlib.blake2b(b"".join(digests[rank] for rank in sorted(digests)), digest_size=16).digest()
