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
import pickle
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import PurePosixPath
from typing import Any, NamedTuple, Optional

import torch
from torch.distributed.checkpoint import filesystem, metadata

from torch_dcp_backport.dist_checkpointing._src import sharded_tensor, unpickle
from torch_dcp_backport.dist_checkpointing._src.body import Words, bytes_to_words, words_to_bytes
from torch_dcp_backport.dist_checkpointing._src.unpickle import (
    FOREIGN,
    METADATA,
    Refused,
    SafeUnpickler,
    TensorEntry,
)
from torch_dcp_backport.transfer import Along, Box, gc_context, intersection

NAME = ".metadata"
#: The attribute of torch's `Metadata` with our own data.
OURS = "torch_dcp_backport"
#: The format of that data; a higher number is of a later release.
FORMAT = 1
#: No file and no tensor has more bytes; beyond it sums of sizes do not fit into a file offset.
LARGEST = 2**62
#: Megatron's name for the shape of a tensor that is stored folded.
ORIGINAL = "nd_reformulated_orig_global_shape"
#: Stands for a byte of a checksum that is not known yet; and so do numbers that are pickled with eight bytes.
HOLE = b"\xa5"
UNKNOWN = (2**62 + 1, 2**62 + 2)
LONG = pickle.LONG1 + b"\x08"
TRAILER = b"torch_dcp_backport crc32 "
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
        ends: dict[str, int] = {}
        for _, (file, offset, length, _) in self.places():
            if offset + length > ends.get(file, -1):
                ends[file] = offset + length
        return ends


class Template:
    """The content of `.metadata` but for its checksums: saved again and again, it differs in these alone."""

    def __init__(self, index: Index) -> None:
        """`index.common` says whether there is a common state."""
        #: Of the records, in the order of their checksums.
        self.places: list[RecordPlace] = []
        with gc_context():
            torch_metadata = self._torch_metadata_of(index)
            count = len(self.places)
            common = None if index.common is None else UNKNOWN
            setattr(torch_metadata, OURS, {"format": FORMAT, "crc32": HOLE * 4 * count, "common": common})
            self._data = pickle.dumps(torch_metadata)
        # They are pickled last: no bytes behind them are alike.
        self._sums_at = self._data.rindex(HOLE * 4 * count)
        self._common_at = [self._data.rindex(LONG + eight(number)) + len(LONG) for number in common or ()]

    def _torch_metadata_of(self, index: Index) -> Any:
        entries: dict[str, Any] = {}
        places: dict[Any, Any] = {}
        # Layers have the same boxes, and are alike: each kind is made and pickled once.
        boxes: dict[Box, Any] = {}
        kinds: dict[Any, Any] = {}
        properties = functools.lru_cache(maxsize=None)(lambda dtype: metadata.TensorProperties(dtype=dtype))
        for key, stored in index.tensors.items():
            chunks = []
            for chunk in stored.chunks:
                known = boxes.get(chunk.box)
                if known is None:
                    sizes = torch.Size(chunk.box.offset), torch.Size(chunk.box.size)
                    known = boxes[chunk.box] = metadata.ChunkStorageMetadata(*sizes)
                chunks.append(known)
                places[metadata.MetadataIndex(key, known.offsets)] = info_of(chunk.place)
                self.places.append(chunk.place)
            kind = stored.dtype, stored.shape, *map(id, chunks)
            if kind not in kinds:
                shape = torch.Size(stored.shape)
                kinds[kind] = metadata.TensorStorageMetadata(properties(stored.dtype), shape, chunks)
            entries[key] = kinds[kind]
        for key, place in index.objects.items():
            entries[key] = metadata.BytesStorageMetadata()
            places[metadata.MetadataIndex(key)] = info_of(place)
            self.places.append(place)
        entries = {key: entries[key] for key in index.order or entries}
        # Planner data of None breaks torch's own dcp_to_torch_save.
        result: Any = metadata.Metadata(entries, planner_data=index.planner_data or {}, storage_data=places)
        result.storage_meta = metadata.StorageMeta()
        # Megatron up to 0.15 looks there for the shapes of flattened tensors.
        result.mcore_data = {
            key: {ORIGINAL: torch.Size(stored.original)}
            for key, stored in index.tensors.items()
            if stored.original is not None
        }
        return result

    def filled(self, sums: Words, common: Optional[tuple[int, int]]) -> bytes:
        """Return the content.

        Args:
            sums: the checksum of every record, in the order of `places`.
            common: bytes and checksum of the common state, where there is one.
        """
        data, words = bytearray(self._data), words_to_bytes(sums)
        data[self._sums_at : self._sums_at + len(words)] = words
        for at, number in zip(self._common_at, common or ()):
            data[at : at + 8] = eight(number)
        return b"".join((data, TRAILER, zlib.crc32(data).to_bytes(4, "big")))


def eight(number: int) -> bytes:
    return number.to_bytes(8, "little")


def to_bytes(index: Index) -> bytes:
    """Return the content of `.metadata`."""
    template = Template(index)
    return template.filled(array("I", (place.crc or 0 for place in template.places)), index.common)


def info_of(place: RecordPlace) -> Any:
    return filesystem._StorageInfo(place.file, place.offset, place.length)


def from_bytes(data: bytes) -> Index:
    """Return the index in the content of a `.metadata`.

    Raises:
        Refused: it is damaged, names classes that it has no use for, or is of a later format.
    """
    end = len(data) - len(TRAILER) - 4
    # First of all: a single bit can make an unpickler ask for gigabytes.
    if data[end:-4] == TRAILER and data[-4:] != zlib.crc32(data[:end]).to_bytes(4, "big"):
        raise Refused("its checksum is wrong")
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
