"""Plans of earlier saves: each rank's share, and its place. Kept as bytes, and never with a value.

A plan is used again where every rank's table is what it was, by a digest at every save.
"""

from __future__ import annotations

import functools
import hashlib
import heapq
import pickle
import threading
from array import array
from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, Optional

from torch_dcp_backport.dist_checkpointing._src import metadata
from torch_dcp_backport.dist_checkpointing._src.body import Output, Words
from torch_dcp_backport.dist_checkpointing._src.metadata import Chunk, Index, RecordPlace, Stored
from torch_dcp_backport.dist_checkpointing._src.table import Cells, RowTable
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

    def __reduce__(self) -> tuple[Any, ...]:
        rows = [(item.number, item.box.offset, item.box.size) for item in self.tensors]
        return _share_of, (rows, self.objects)


def _share_of(rows: list[Any], objects: list[int]) -> WriteShare:
    # Layers have the same boxes.
    box_of = functools.lru_cache(maxsize=None)(Box)
    return WriteShare([Item(number, box_of(offset, size)) for number, offset, size in rows], objects)


def shares_of(
    tables: Mapping[int, RowTable], cells: Cells, balanced: bool = True, fixed: Collection[str] = ()
) -> dict[int, WriteShare]:
    """Return the share of each rank.

    Args:
        balanced: let any rank that holds a box write it, or a part of it; else its main replica.
        fixed: keys whose boxes their main replicas write in any case.
    """
    shares = {rank: WriteShare([], []) for rank in tables}
    load = dict.fromkeys(tables, 0)
    shared: list[tuple[int, Box, Holders]] = []
    total = 0
    for key, boxes in cells.items():
        for box, rows in boxes.items():
            nbytes = box.numel * rows[0].row.dtype.itemsize
            total += nbytes
            by_rank = {held.rank: held.number for held in reversed(rows)}
            if len(by_rank) == 1 or not balanced or not nbytes or key in fixed:
                shares[rows[0].rank].tensors.append(Item(rows[0].number, box))
                load[rows[0].rank] += nbytes
            else:
                holders = Holders(rows[0].rank, rows[0].row.dtype.itemsize, by_rank)
                shared.append((nbytes, box, holders))
    grain = max(total // (len(tables) * FINE), SMALLEST)
    # Every rank reads a small value that all of them hold (AdamW's step counters), from each file that has
    # one. So one rank writes those, as many as leave the balance as it is.
    spare = dict.fromkeys(tables, grain)
    pieces: list[tuple[int, Box, Holders]] = []
    for nbytes, box, holders in shared:
        if nbytes <= SMALL and spare[holders.main] >= nbytes:
            spare[holders.main] -= nbytes
            load[holders.main] += nbytes
            shares[holders.main].tensors.append(Item(holders.numbers[holders.main], box))
            continue
        for part in cut(box, min(-(-nbytes // grain), 4 * len(holders.numbers))):
            pieces.append((part.numel * holders.itemsize, part, holders))
    # The largest first, each to the holder with the least so far; its own order among equals keeps it stable.
    pieces.sort(key=lambda piece: -piece[0])
    queues: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for nbytes, box, holders in pieces:
        rank = least_loaded(holders, load, queues)
        load[rank] += nbytes
        shares[rank].tensors.append(Item(holders.numbers[rank], box))
    assigned: set[str] = set()
    for rank, table in tables.items():
        for number, row in enumerate(table.objects):
            if row.is_main and row.unique_key not in assigned:
                assigned.add(row.unique_key)
                shares[rank].objects.append(number)
    for share in shares.values():
        # As the state dict has them: neighbours there are read together.
        share.tensors.sort(key=lambda item: (item.number, item.box.offset))
    return shares


class Holders:
    """The ranks that hold a box, with the number of its row in each one's table."""

    def __init__(self, main: int, itemsize: int, numbers: Mapping[int, int]) -> None:
        self.main = main
        self.itemsize = itemsize
        self.numbers = numbers
        self.ranks = tuple(sorted(numbers))


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


class RecordLines(NamedTuple):
    """The place of a rank's records: file, offsets and lengths."""

    file: str
    offsets: Words
    lengths: Words


class Description:
    """The data from which the first rank writes `.metadata` of a plan, once and again."""

    def __init__(self, tables: Mapping[int, RowTable], shares: Mapping[int, WriteShare]) -> None:
        #: Until they were used; then as bytes, for a million objects would be looked at by every garbage
        #: collection, and only where objects may change in size.
        self._fresh: Optional[tuple[Mapping[int, RowTable], Mapping[int, WriteShare]]] = tables, shares
        #: Two threads may save by one plan.
        self._lock = threading.Lock()
        self._frozen = b""
        self._template: Optional[metadata.Template] = None
        self._lines: dict[int, RecordLines] = {}
        #: Of each rank's records among all checksums.
        self._places: dict[int, Words] = {}

    def to_bytes(self, outputs: Mapping[int, Output], common: tuple[int, int]) -> bytes:
        """Return the content of `.metadata` for the records that the ranks have written by this plan."""
        with self._lock:
            lines = {rank: lines_of(output) for rank, output in outputs.items()}
            if self._template is None or lines != self._lines:
                # Objects may have other sizes than they had.
                tables, shares = self._fresh or pickle.loads(self._frozen)
                index = index_of(tables, shares, outputs)
                index.is_ours, index.common = True, common
                template = metadata.Template(index)
                numbers = {(place.file, place.offset): number for number, place in enumerate(template.places)}
                places = {
                    rank: array("I", (numbers[line.file, offset] for offset in line.offsets))
                    for rank, line in lines.items()
                }
                template.places.clear()
                if self._fresh and any(share.objects for share in shares.values()):
                    self._frozen = pickle.dumps((dict(tables), dict(shares)))
                # Nothing fails from here on: a plan is as it was, or has all of this.
                self._template, self._lines, self._places, self._fresh = template, lines, places, None
            sums = array("I", bytes(4 * sum(map(len, self._places.values()))))
            for rank, own in self._places.items():
                output = outputs[rank]
                for number, entry in zip(own, (*output.tensors, *output.objects)):
                    sums[number] = entry.crc
            return self._template.filled(sums, common)


def lines_of(output: Output) -> RecordLines:
    records = (*output.tensors, *output.objects)
    offsets, lengths = (array("Q", column) for column in list(zip(*records))[:2] or ((), ()))
    return RecordLines(output.file, offsets, lengths)


def index_of(
    tables: Mapping[int, RowTable], shares: Mapping[int, WriteShare], outputs: Mapping[int, Output]
) -> Index:
    """Return the index of a save: the place of every box of every tensor, and of the objects."""
    index = Index()
    chunks: dict[str, list[Chunk]] = {}
    for table in tables.values():
        for row in table.tensors:
            if row.key not in chunks:
                chunks[row.key] = []
                index.tensors[row.key] = Stored(row.dtype, row.shape, chunks[row.key], row.original)
    for rank, share in shares.items():
        output = outputs[rank]
        for item, written in zip(share.tensors, output.tensors):
            key = tables[rank].tensors[item.number].key
            chunks[key].append(Chunk(item.box, RecordPlace(output.file, *written)))
        for number, written in zip(share.objects, output.objects):
            index.objects[tables[rank].objects[number].unique_key] = RecordPlace(output.file, *written)
    return index


class KeptPlan(NamedTuple):
    """A plan as one rank keeps it."""

    #: The same on every rank that has this plan, and of no other.
    number: bytes
    #: This rank's share, and what it shares with other ranks, pickled.
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
    return hashlib.blake2b(pickle.dumps((table, rank, options)), digest_size=32).digest()


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
