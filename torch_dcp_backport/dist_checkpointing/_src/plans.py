"""Plans of earlier saves: each rank's share, and its place. Kept as bytes, and never with a value.

A plan is used again where every rank's table is what it was, by a digest at every save.
"""

from __future__ import annotations

import hashlib
import pickle
import threading
from array import array
from collections import OrderedDict
from collections.abc import Mapping
from typing import NamedTuple, Optional

from torch_dcp_backport.dist_checkpointing._src import metadata
from torch_dcp_backport.dist_checkpointing._src.assign import WriteShare
from torch_dcp_backport.dist_checkpointing._src.body import Output
from torch_dcp_backport.dist_checkpointing._src.metadata import Chunk, Index, RecordPlace, Stored
from torch_dcp_backport.dist_checkpointing._src.table import RowTable
from torch_dcp_backport.dist_checkpointing._src.zipped import Words

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
            return self._to_bytes(outputs, common)

    def _to_bytes(self, outputs: Mapping[int, Output], common: tuple[int, int]) -> bytes:
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
