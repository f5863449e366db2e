"""`.metadata`, torch's index of a checkpoint: as an `Index` of plain values, to bytes and back.

Checks all that it reads. Ours is torch's pickle with checksums: of every record in an attribute that torch
passes over, and of the pickle itself behind its end.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
import operator
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, NamedTuple, Optional

import torch

from torch_dcp_backport.dist_checkpointing._src import columns, packed, sharded_tensor, unpickle
from torch_dcp_backport.dist_checkpointing._src.body import Words, bytes_to_words
from torch_dcp_backport.dist_checkpointing._src.columns import FORMAT, ORIGINAL, OURS
from torch_dcp_backport.dist_checkpointing._src.packed import TRAILER, PackedBlock
from torch_dcp_backport.dist_checkpointing._src.unpickle import (
    FOREIGN,
    METADATA,
    Refused,
    SafeUnpickler,
    TensorEntry,
)
from torch_dcp_backport.transfer import Along, Box, gc_context, intersection

NAME = ".metadata"
#: No file and no tensor has more bytes; beyond it sums of sizes do not fit into a file offset.
LARGEST = 2**62
#: Of a tensor its dtype, its shape, and its boxes with the bytes of their values.
Form = tuple[torch.dtype, tuple[int, ...], list[tuple[Box, int]]]


class RecordPlace(NamedTuple):
    """The place of a record."""

    file: str
    offset: int
    length: int
    #: Of a tensor's values, or of all bytes of another record; None where it was not computed.
    crc: Optional[int] = None


class Chunk(NamedTuple):
    """A stored box of a tensor."""

    box: Box
    place: RecordPlace
    #: The shape of its record, where the box is a part of it: these elements, from `start` on.
    record: Optional[tuple[int, ...]] = None
    start: int = 0

    @property
    def size(self) -> tuple[int, ...]:
        """The shape of the record."""
        return self.box.size if self.record is None else self.record


CHUNK_BOX: Callable[[Chunk], Box] = operator.attrgetter("box")


class Stored:
    """A tensor in a checkpoint."""

    def __init__(
        self,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        chunks: Sequence[Chunk],
        original: Optional[tuple[int, ...]] = None,
    ) -> None:
        self.dtype = dtype
        self.shape = shape
        #: The global shape of a tensor of flattened ranges, which is stored folded (see `sharded_tensor`).
        self.original = original
        self.chunks = chunks
        #: To look among them, where there are more than a few.
        self._along: Optional[Along[Chunk]] = None
        if len(chunks) > 8:
            self._along = Along(chunks, CHUNK_BOX)
            self.chunks = self._along.items

    def parts_of(self, box: Box) -> Iterator[tuple[Chunk, Box]]:
        """Yield the chunks that have elements of a box, each with the part that it has."""
        chunks = self.chunks if self._along is None else self._along.near(box)
        for chunk in chunks:
            if chunk.box == box:
                # No other chunk is needed: most loads are of the boxes that were saved.
                yield chunk, chunk.box
                return
        for chunk in chunks:
            part = intersection(chunk.box, box)
            if part is not None:
                yield chunk, part

    def unfolded(self) -> Stored:
        """Return the same records as boxes of the tensor before it was folded; itself where it was not."""
        if self.original is None:
            return self
        chunks = [
            Chunk(run.box, chunk.place, chunk.size, run.start)
            for chunk in self.chunks
            for part, start in self._cells_of(chunk.box)
            for run in sharded_tensor.unfolded(part, self.shape[:-1], self.original)
            for run in [run._replace(start=run.start + start)]
        ]
        return Stored(self.dtype, self.original, chunks)

    @staticmethod
    def _cells_of(box: Box) -> Iterator[tuple[Box, int]]:
        """Yield the parts of a folded box that are in one cell each, with the places where they begin."""
        extent = box.size[-1]
        for number, cell in enumerate(itertools.product(*map(range, box.size[:-1]))):
            places = tuple(map(sum, zip(cell, box.offset)))
            yield sharded_tensor.folded(places, box.offset[-1], box.offset[-1] + extent), number * extent


class ColumnBlock:
    """Tensors of a packed index that are stored alike: a chunk is made when it is asked for."""

    def __init__(self, block: PackedBlock, files: Sequence[str], sums: Words, sums_at: int) -> None:
        """`sums`: of all records; from `sums_at` on those of this block, a row for each tensor."""
        self.block = block
        self._names = files
        self._sums, self._sums_at = sums, sums_at

    @functools.cached_property
    def boxes(self) -> list[Box]:
        return list(packed.boxes_of(self.block))

    @functools.cached_property
    def columns(self) -> dict[Box, int]:
        """Box -> its number."""
        return {box: number for number, box in enumerate(self.boxes)}

    @functools.cached_property
    def along(self) -> Along[int]:
        return Along(range(len(self.boxes)), self.boxes.__getitem__)

    def chunk(self, tensor: int, column: int) -> Chunk:
        block, count = self.block, len(self.block.keys)
        file = block.files[column]
        file = file if file >= 0 else block.spread[(-1 - file) * count + tensor]
        offset = block.offsets[block.which[column] * count + tensor]
        crc = self._sums[self._sums_at + tensor * len(block.lengths) + column]
        place = RecordPlace(self._names[file], offset, block.lengths[column], crc)
        return Chunk(self.boxes[column], place)

    def ends(self) -> Iterator[tuple[str, int]]:
        """Yield the ends of last records in files."""
        block, count = self.block, len(self.block.keys)
        columns = [block.offsets[at : at + count] for at in range(0, len(block.offsets), count)]
        lasts = list(map(max, columns))
        for length, which, file in zip(block.lengths, block.which, block.files):
            if file >= 0:
                yield self._names[file], lasts[which] + length
                continue
            ends: dict[int, int] = {}
            spread = block.spread[(-1 - file) * count : -file * count]
            for number, offset in zip(spread, columns[which]):
                ends[number] = max(ends.get(number, 0), offset + length)
            yield from ((self._names[number], end) for number, end in ends.items())


class ColumnChunks(Sequence[Chunk]):
    """The chunks of a tensor in a block."""

    def __init__(self, block: ColumnBlock, tensor: int) -> None:
        self._block = block
        self._tensor = tensor

    def __len__(self) -> int:
        return len(self._block.block.lengths)

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [self[place] for place in range(*number.indices(len(self)))]
        if not -len(self) <= number < len(self):
            raise IndexError(number)
        return self._block.chunk(self._tensor, number % len(self))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


class ColumnStored(Stored):
    """A tensor of a packed index."""

    def __init__(self, block: ColumnBlock, tensor: int) -> None:
        facts = block.block
        super().__init__(facts.dtype, facts.shape, (), facts.original)
        self.chunks = ColumnChunks(block, tensor)
        self._block, self._tensor = block, tensor

    def parts_of(self, box: Box) -> Iterator[tuple[Chunk, Box]]:
        column = self._block.columns.get(box)
        if column is not None:
            chunk = self._block.chunk(self._tensor, column)
            yield chunk, chunk.box
            return
        for column, part in self._block.along.common(box):
            yield self._block.chunk(self._tensor, column), part


class Index:
    """The tensors and objects of a checkpoint, and their places."""

    def __init__(self) -> None:
        self.tensors: dict[str, Stored] = {}
        #: Records that are no tensors.
        self.objects: dict[str, RecordPlace] = {}
        #: Whether the records have our form and checksums.
        self.is_ours = False
        #: The planner's data of plain torch; None in Megatron's.
        self.planner_data: Any = None
        #: All keys as torch has them, which a load without a state dict keeps; none where that is not known.
        self.order: list[str] = []
        #: (bytes, checksum) of `common.pt`, in ours.
        self.common: Optional[tuple[int, int]] = None
        #: The blocks of its tensors, where it was packed.
        self.blocks: Optional[list[ColumnBlock]] = None
        #: Whether its file has torch's index, too.
        self.torch_metadata = True

    def places(self) -> Iterator[tuple[str, RecordPlace]]:
        """Yield (key, place) of every record."""
        for key, stored in self.tensors.items():
            for chunk in stored.chunks:
                yield key, chunk.place
        yield from self.objects.items()

    def unfolded(self, keys: Iterable[str]) -> Index:
        """Return the same checkpoint, with some tensors as they were before they were folded."""
        index = copy.copy(self)
        index.tensors = {**self.tensors, **{key: self.tensors[key].unfolded() for key in keys}}
        return index

    @functools.cached_property
    def ends(self) -> dict[str, int]:
        """File -> the end of its last record."""
        places: Iterable[RecordPlace] = (place for _, place in self.places())
        ends: dict[str, int] = {}
        if self.blocks is not None:
            places = self.objects.values()
            for block in self.blocks:
                for file, end in block.ends():
                    ends[file] = max(ends.get(file, -1), end)
        for file, offset, length, _ in places:
            ends[file] = max(ends.get(file, -1), offset + length)
        return ends


class StoredBlock(columns.Block):
    """Tensors of an index."""

    def __init__(
        self, keys: Sequence[str], tensors: Sequence[Stored], numbers: Mapping[str, int], is_packed: bool
    ) -> None:
        """Args:
        numbers: of the files.
        is_packed: whether `packed` returns the block, of which tensors have records of the same lengths.
        """
        first = tensors[0]
        boxes = [chunk.box for chunk in first.chunks]
        super().__init__(keys, first.dtype, first.shape, first.original, boxes)
        self._numbers = numbers
        self._places = [[chunk.place for chunk in stored.chunks] for stored in tensors]
        self._is_packed = is_packed

    def places(self) -> Iterator[tuple[int, int, int]]:
        for place in itertools.chain.from_iterable(self._places):
            yield self._numbers[place.file], place.offset, place.length

    def longest(self) -> int:
        return max((place.length for places in self._places for place in places), default=0)

    def packed(self) -> Optional[PackedBlock]:
        if not self._is_packed:
            return None
        columns = list(zip(*self._places))
        count = len(columns)
        return PackedBlock(
            self.keys,
            self.dtype,
            self.shape,
            self.original,
            array("q", (number for box in self.boxes for number in (*box.offset, *box.size))),
            array("q", (column[0].length for column in columns)),
            array("q", range(count)),
            # Each box has a column of its own: the first one is -1.
            array("q", range(-1, -count - 1, -1)),
            array("q", (place.offset for column in columns for place in column)),
            array("q", (self._numbers[place.file] for column in columns for place in column)),
        )

    def crcs(self) -> Words:
        return array("I", (place.crc or 0 for places in self._places for place in places))


def listing_of(index: Index, is_packed: bool = False) -> columns.Listing:
    """Return what the `.metadata` of an index lists; `is_packed`: as of `StoredBlock`."""
    numbers: dict[str, int] = {}
    for _, place in index.places():
        numbers.setdefault(place.file, len(numbers))
    alike: dict[Any, list[str]] = {}
    for key, stored in index.tensors.items():
        boxes = tuple(chunk.box for chunk in stored.chunks)
        alike.setdefault((stored.dtype, stored.shape, stored.original, boxes), []).append(key)
    return columns.Listing(
        [
            StoredBlock(keys, [index.tensors[key] for key in keys], numbers, is_packed)
            for keys in alike.values()
        ],
        [
            columns.ObjectPlace(key, numbers[place.file], place.offset, place.length, place.crc or 0)
            for key, place in index.objects.items()
        ],
        list(numbers),
        index.order or [*index.tensors, *index.objects],
        index.planner_data,
        index.common,
    )


def to_bytes(index: Index, torch_metadata: bool = True) -> bytes:
    """Return the content of `.metadata`, with torch's index or with the packed one alone."""
    listing = listing_of(index, is_packed=not torch_metadata)
    return b"".join(columns.Content(listing, torch_metadata=torch_metadata))


def from_packed(data: packed.Packed) -> Index:
    """Return the index that is packed.

    Raises:
        Refused: it is damaged.
    """
    unpacked = packed.from_bytes(data.data)
    index = Index()
    index.is_ours, index.common, index.planner_data, index.order = True, data.common, {}, unpacked.order
    files = [file_name(name) for name in unpacked.files]
    sums = bytes_to_words(data.sums)
    count = sum(len(block.keys) * len(block.lengths) for block in unpacked.blocks)
    if len(sums) != count + len(unpacked.objects):
        raise Refused("it has not as many checksums as records")
    index.blocks, at = [], 0
    tensors: dict[str, Stored] = {}
    for block in unpacked.blocks:
        index.blocks.append(ColumnBlock(block, files, sums, at))
        at += len(block.keys) * len(block.lengths)
        for number, key in enumerate(block.keys):
            tensors[key] = ColumnStored(index.blocks[-1], number)
    for (key, file, offset, length), crc in zip(unpacked.objects, sums[count:]):
        index.objects[key] = RecordPlace(files[file], offset, length, crc)
    index.tensors = {key: tensors[key] for key in index.order if key in tensors}
    return index


def from_bytes(data: bytes) -> Index:
    """Return the index in the content of a `.metadata`.

    Raises:
        Refused: it is damaged, names classes that it has no use for, or is of a later format.
    """
    end = len(data) - len(TRAILER) - 4
    # First of all: a single bit can make an unpickler ask for gigabytes.
    if data[end:-4] == TRAILER and data[-4:] != zlib.crc32(data[:end]).to_bytes(4, "big"):
        raise Refused("its checksum is wrong")
    if data.startswith(columns.ALONE):
        alone = packed.index_in(len(data), lambda at, nbytes: data[at : at + nbytes], is_verified=True)
        if alone is None:
            raise Refused("its checksum is wrong")
        index = from_packed(alone)
        index.torch_metadata = False
        return index
    with gc_context():
        return unpickle.with_stack_for(data, lambda: _from_bytes(data))


def _from_bytes(data: bytes) -> Index:
    torch_metadata, length = SafeUnpickler(data, METADATA, FOREIGN).read()
    trailer, ours = data[length:], getattr(torch_metadata, OURS, None)
    expected = TRAILER + zlib.crc32(data[:length]).to_bytes(4, "big")
    if (trailer or ours is not None) and trailer != expected:
        raise Refused("its checksum is wrong")
    try:
        return _index_of(torch_metadata, ours)
    except Refused:
        raise
    except Exception as error:  # an attribute that is not there, a value of another type
        raise Refused(f"it is not torch's metadata: {type(error).__name__}: {error}") from error


def _index_of(torch_metadata: Any, ours: Any) -> Index:
    index = Index()
    index.planner_data = getattr(torch_metadata, "planner_data", None)
    index.order = list(torch_metadata.state_dict_metadata)
    sums: Sequence[Optional[int]] = [None] * len(torch_metadata.storage_data)
    if ours is not None:
        if ours["format"] > FORMAT:
            raise Refused(f"it has format {ours['format']} of a later release; this one knows {FORMAT}")
        sums = bytes_to_words(ours["crc32"])
        index.is_ours, index.common = True, ours["common"]
    if len(sums) != len(torch_metadata.storage_data):
        raise Refused("it has not as many checksums as records")
    places: dict[tuple[str, Optional[tuple[int, ...]]], RecordPlace] = {}
    # Many records have the same offsets in their tensors, and lie in a few files.
    cached = functools.lru_cache(maxsize=None)
    numbers, name_of = cached(_numbers), cached(file_name)
    for (where, info), crc in zip(torch_metadata.storage_data.items(), sums):
        # An offset that the file does not set is the default of torch's class.
        begin = getattr(where, "offset", None)
        offset = None if begin is None else numbers(begin)
        if getattr(info, "transform_descriptors", None):
            raise Refused(f"the record of {where.fqn} is transformed ({info.transform_descriptors})")
        at, length = info.offset, info.length
        if not (type(at) is type(length) is int and at >= 0 and 0 <= length <= LARGEST - at):
            raise Refused(f"not a place: {at}, {length}")
        places[_text(where.fqn), offset] = RecordPlace(name_of(info.relative_path), at, length, crc)
    #: id of an entry -> its form: many tensors have the same entry.
    forms: dict[int, Form] = {}
    known = getattr(torch_metadata, "mcore_data", None)
    for key, entry in torch_metadata.state_dict_metadata.items():
        if isinstance(entry, TensorEntry):
            form = forms.get(id(entry)) or _form_of(key, entry)
            forms[id(entry)] = form
            stored = index.tensors[_text(key)] = _stored_of(key, form, places)
            stored.original = _original_of(key, stored, known.get(key) if isinstance(known, dict) else None)
        else:
            index.objects[_text(key)] = _place_in(places, key, None)
    return index


def _form_of(key: str, entry: Any) -> Form:
    shape, dtype = _numbers(entry.size), entry.properties.dtype
    if not isinstance(dtype, torch.dtype):
        raise Refused(f"{key} has no dtype")
    if math.prod(shape) * dtype.itemsize > LARGEST:
        raise Refused(f"{key} of shape {shape} has more bytes than there are")
    boxes = [Box(_numbers(chunk.offsets), _numbers(chunk.sizes)) for chunk in entry.chunks]
    for box in boxes:
        ends = (start + extent for start, extent in zip(box.offset, box.size))
        if not len(box.offset) == len(box.size) == len(shape) or any(map(int.__gt__, ends, shape)):
            raise Refused(f"{key} of shape {shape} has a chunk outside of it: {box}")
    return dtype, shape, [(box, box.numel * dtype.itemsize) for box in boxes]


def _stored_of(key: str, form: Form, places: dict[Any, RecordPlace]) -> Stored:
    dtype, shape, boxes = form
    chunks = []
    for box, nbytes in boxes:
        place = places.get((key, box.offset)) or _place_in(places, key, box.offset)
        if nbytes > place.length:
            raise Refused(f"{key} has more values in {box} than its record of {place.length} bytes has")
        chunks.append(Chunk(box, place))
    return Stored(dtype, shape, chunks)


def _original_of(key: str, stored: Stored, facts: Any) -> Optional[tuple[int, ...]]:
    """Return the shape of a tensor that is stored folded, as Megatron has it; None for other tensors."""
    if not isinstance(facts, dict) or facts.get(ORIGINAL) is None:
        return None
    shape, grid = _numbers(facts[ORIGINAL]), stored.shape[:-1]
    cell = math.prod(extent // parts if parts else 0 for extent, parts in zip(shape, grid))
    if len(shape) != len(grid) or 0 in grid or any(map(int.__mod__, shape, grid)) or cell != stored.shape[-1]:
        raise Refused(f"{key} of shape {stored.shape} cannot be flattened boxes of a tensor of shape {shape}")
    return shape


def _place_in(places: dict[Any, RecordPlace], key: str, offset: Optional[tuple[int, ...]]) -> RecordPlace:
    place = places.get((key, offset))
    if place is None:
        raise Refused(f"it does not say where {key} is stored (offset {offset})")
    return place


def _numbers(values: Any) -> tuple[int, ...]:
    numbers = tuple(values)
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise Refused(f"not sizes: {numbers}")
    return numbers


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise Refused(f"not a key: {value!r}")
    return value


def file_name(value: Any) -> str:
    """Return a path within the checkpoint's folder.

    Raises:
        Refused: it is none.
    """
    path = PurePosixPath(_text(value))
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in value:
        raise Refused(f"a file outside the checkpoint's folder: {value!r}")
    return str(value)
