"""The content of `.metadata`, written from columns: no object for a box, and never all of it in memory.

A plain pickle of torch's classes. Its head is made by a pickler, and has what records have in common;
each record behind it is a few instructions of fixed length, which fetch from the head by number. Records are
therefore the rows of a matrix of bytes, in which columns are filled in. Two saves by the same plan differ in
the checksums alone: they come last.
"""

from __future__ import annotations

import functools
import io
import pickle
import struct
import sys
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Optional, Union

import torch
from torch.distributed.checkpoint import filesystem, metadata

from torch_dcp_backport.dist_checkpointing._src import packed
from torch_dcp_backport.dist_checkpointing._src.body import Words, words_to_bytes
from torch_dcp_backport.dist_checkpointing._src.packed import TRAILER, PackedBlock
from torch_dcp_backport.transfer import Box, gc_context

#: The attribute of torch's `Metadata` with our own data.
OURS = "torch_dcp_backport"
#: The format of that data; a higher number is of a later release.
FORMAT = 1
#: Megatron's name for the shape of a tensor that is stored folded.
ORIGINAL = "nd_reformulated_orig_global_shape"
#: Bytes of records that are made at once.
PIECE = 4 * 2**20
#: Up to so many bytes before the checksums are kept for the next save by the same plan; more are made again.
KEPT = 64 * 2**20
#: Records that are made one by one: so many cost as much as a matrix.
FEW = 256
#: From it on a number has no room in four bytes with a sign.
LIMIT31 = 2**31
#: The least bytes that a record takes, with its checksum.
LEAST = 59


def text(value: str) -> bytes:
    """Return the instruction that makes a string."""
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


class Columns(NamedTuple):
    """The places of records: a row for each tensor, a column for each box."""

    #: Numbers of files; 32 bits, as checksums have.
    files: torch.Tensor
    #: 64 bits, as lengths have.
    offsets: torch.Tensor
    lengths: torch.Tensor


class Block:
    """Tensors that are stored alike: of one dtype and shape, in the same boxes."""

    def __init__(
        self,
        keys: Sequence[str],
        dtype: torch.dtype,
        shape: tuple[int, ...],
        original: Optional[tuple[int, ...]],
        boxes: Sequence[Box],
    ) -> None:
        self.keys = keys
        self.dtype = dtype
        self.shape = shape
        #: The global shape of tensors of flattened ranges, which are stored folded.
        self.original = original
        self.boxes = boxes

    @property
    def is_small(self) -> bool:
        return len(self.keys) * len(self.boxes) <= FEW

    def longest(self) -> int:
        """Return the bytes of the longest record."""
        raise NotImplementedError

    def columns(self) -> Columns:
        """Return the places of the records."""
        shape = len(self.keys), len(self.boxes)
        files, *others = (array("q", column) for column in zip(*self.places()))
        tensors = [torch.frombuffer(column, dtype=torch.int64).view(shape) for column in (files, *others)]
        return Columns(tensors[0].to(torch.int32), *tensors[1:])

    def places(self) -> Iterable[tuple[int, int, int]]:
        """Return the file, the offset and the length of each record, tensor by tensor."""
        raise NotImplementedError

    def packed(self) -> Optional[PackedBlock]:
        """Return the block as few numbers; None where nothing is known of them."""
        return None

    def crcs(self) -> Union[Words, torch.Tensor]:
        """Return the checksums of the records, a row for each tensor."""
        raise NotImplementedError


class ObjectPlace(NamedTuple):
    """The place of a record that is no tensor."""

    key: str
    file: int
    offset: int
    length: int
    crc: int


class Listing(NamedTuple):
    """All that a `.metadata` lists."""

    blocks: Sequence[Block]
    objects: Sequence[ObjectPlace]
    files: Sequence[str]
    #: All keys, as torch's functions are to have them.
    order: Iterable[str]
    #: Of torch's planner.
    planner_data: Any
    #: Bytes and checksum of the common state; None where there is none.
    common: Optional[tuple[int, int]]


class Head(NamedTuple):
    """The bytes before the records, and the numbers of what records fetch."""

    data: bytes
    #: id of a value -> its number.
    numbers: Mapping[int, int]
    #: Of each block the offsets of its boxes.
    offsets: Sequence[Sequence[torch.Size]]
    #: The values, which keep their ids.
    values: Any

    def get(self, value: Any) -> bytes:
        """Return the instruction that fetches a value."""
        number = self.numbers[id(value)]
        return b"h%c" % number if number < 256 else b"j" + number.to_bytes(4, "little")

    def column(self, values: Iterable[Any]) -> torch.Tensor:
        numbers = [self.numbers[id(value)] for value in values]
        return torch.tensor(numbers, dtype=torch.int32, device="cpu")


#: What most records fetch is first: small numbers take one byte.
NAMES = "fqn", "offset", "relative_path", "length"
CLASSES = metadata.MetadataIndex, filesystem._StorageInfo, metadata.Metadata
ATTRIBUTES = ("state_dict_metadata", "planner_data", "storage_data", "storage_meta", "mcore_data", OURS)


def head_of(listing: Listing) -> Head:
    """Return the beginning of the pickle: everything but the records."""
    entries: dict[str, Any] = dict.fromkeys(listing.order)
    offsets: list[list[torch.Size]] = []
    # Tensors of many blocks have the same boxes.
    sizes: dict[tuple[int, ...], torch.Size] = {}
    chunks: dict[tuple[Box, ...], list[Any]] = {}
    properties: dict[torch.dtype, Any] = {}
    folded: dict[str, Any] = {}

    def size_of(numbers: tuple[int, ...]) -> torch.Size:
        return sizes.setdefault(numbers, torch.Size(numbers))

    for block in listing.blocks:
        boxes = tuple(block.boxes)
        if boxes not in chunks:
            chunks[boxes] = [
                metadata.ChunkStorageMetadata(size_of(box.offset), size_of(box.size)) for box in boxes
            ]
        kind = properties.setdefault(block.dtype, metadata.TensorProperties(dtype=block.dtype))
        entry = metadata.TensorStorageMetadata(kind, size_of(block.shape), chunks[boxes])
        offsets.append([size_of(box.offset) for box in boxes])
        for key in block.keys:
            entries[key] = entry
            if block.original is not None:
                # Megatron up to 0.15 looks there for the shapes of flattened tensors.
                folded[key] = {ORIGINAL: size_of(block.original)}
    entries.update((place.key, metadata.BytesStorageMetadata()) for place in listing.objects)
    # Planner data of None breaks torch's own dcp_to_torch_save.
    shared = entries, listing.planner_data or {}, metadata.StorageMeta(), folded
    # The key of a block is the one that records fetch, whatever string of the same letters the order has.
    names = [block.keys for block in listing.blocks], [place.key for place in listing.objects]
    values = NAMES, CLASSES, ATTRIBUTES, list(listing.files), names, offsets, shared
    file = io.BytesIO()
    # Not a later one, which lays its bytes out in frames.
    pickler = pickle.Pickler(file, protocol=3)
    pickler.dump(values)
    numbers = {identity: number for identity, (number, _) in pickler.memo.copy().items()}
    # Without the instruction that ends a pickle; the values are dropped, and stay in its memory.
    return Head(file.getvalue()[:-1] + pickle.POP, numbers, offsets, values)


def filled(matrix: torch.Tensor, at: int, column: torch.Tensor) -> None:
    """Fill the bytes of numbers, little-endian, into the rows of a matrix from a place on."""
    data = column.reshape(-1).contiguous().view(torch.uint8).view(*column.shape, column.element_size())
    matrix[..., at : at + column.element_size()] = data.flip(-1) if sys.byteorder == "big" else data


def records_of(head: Head, number: int, block: Block, files: torch.Tensor) -> Iterator[bytearray]:
    """Yield the instructions of a block's records.

    Args:
        files: the number by which each file's name is fetched.
    """
    index_class, info_class = (head.get(kind) for kind in CLASSES[:2])
    fqn, offset, path, length = (head.get(name) for name in NAMES)
    places = block.columns()
    is_long = block.longest() >= LIMIT31
    hole = b"\xa5" * 4
    row, holes = b"", []
    for part in (
        index_class + b")\x81}(" + fqn + b"j", hole,
        offset + b"j", hole,
        b"ub" + info_class + b")\x81}(" + path + b"j", hole,
        offset + b"\x8a\x08", hole * 2,
        length + (b"\x8a\x08" if is_long else b"J"), hole * 2 if is_long else hole,
        b"ub",
    ):  # fmt: skip
        if part.startswith(hole):
            holes.append(len(row))
        row += part
    keys, offsets = head.column(block.keys), head.column(head.offsets[number])
    count = max(PIECE // (len(row) * len(block.boxes)), 1)
    for start in range(0, len(block.keys), count):
        rows = slice(start, start + count)
        shape = len(keys[rows]), len(block.boxes)
        data = bytearray(row * (shape[0] * shape[1]))
        matrix = torch.frombuffer(data, dtype=torch.uint8).view(*shape, len(row))
        lengths = places.lengths[rows]
        for at, column in zip(
            holes,
            (
                keys[rows, None].expand(shape),
                offsets.expand(shape),
                files[places.files[rows].long()],
                places.offsets[rows],
                lengths if is_long else lengths.to(torch.int32),
            ),
        ):
            filled(matrix, at, column)
        # One dictionary gets them, piece by piece.
        yield bytearray(pickle.MARK) + data + pickle.SETITEMS


def records_of_few(head: Head, number: int, block: Block, files: Sequence[bytes]) -> list[bytes]:
    """Return the instructions of a small block's records, for which a matrix is too much work.

    Args:
        files: the instruction that fetches each file's name.
    """
    index_class, info_class = (head.get(kind) for kind in CLASSES[:2])
    fqn, offset, path, length = (head.get(name) for name in NAMES)
    first, then = index_class + b")\x81}(" + fqn, b"ub" + info_class + b")\x81}(" + path
    offset_next, length_next = offset + b"\x8a\x08", length + b"\x8a\x08"
    offsets = [offset + head.get(value) + then for value in head.offsets[number]]
    keys = (first + head.get(key) for key in block.keys)
    return [
        begin
        + files[file]
        + offset_next
        + start.to_bytes(8, "little")
        + length_next
        + nbytes.to_bytes(8, "little")
        + b"ub"
        for begin, (file, start, nbytes) in zip(
            (key + box for key in keys for box in offsets), block.places()
        )
    ]


def listed(records: Sequence[bytes]) -> bytes:
    """Return the instructions that put records into the dictionary of all."""
    return b"".join((pickle.MARK, *records, pickle.SETITEMS)) if records else b""


def eight(number: int) -> bytes:
    """Return the instruction that makes a number of any size that fits into eight bytes."""
    return b"\x8a\x08" + struct.pack("<q", number)


def records_of_objects(head: Head, listing: Listing) -> bytes:
    index_class, info_class = (head.get(kind) for kind in CLASSES[:2])
    fqn, offset, path, length = (head.get(name) for name in NAMES)
    data = [pickle.MARK]
    for place in listing.objects:
        data += [index_class, b")\x81}(", fqn, head.get(place.key), offset, b"Nub"]
        data += [info_class, b")\x81}(", path, head.get(listing.files[place.file])]
        data += [offset, eight(place.offset), length, eight(place.length), b"ub"]
    return b"".join((*data, pickle.SETITEMS)) if listing.objects else b""


def before_sums(listing: Listing) -> Iterator[Union[bytes, bytearray]]:
    """Yield the content up to the packed index: the same for every save by one plan."""
    with gc_context():
        head = head_of(listing)
    entries, planner_data, storage_meta, folded = head.values[-1]
    names = [head.get(name) for name in ATTRIBUTES]
    yield head.data
    yield b"".join(
        (
            head.get(metadata.Metadata), b")\x81}(",
            names[0], head.get(entries), names[1], head.get(planner_data), names[3], head.get(storage_meta),
            names[4], head.get(folded), names[2], b"}",
        )
    )  # fmt: skip
    files, names_of_files = head.column(listing.files), [head.get(name) for name in listing.files]
    few: list[bytes] = []
    for number, block in enumerate(listing.blocks):
        if block.is_small:
            few += records_of_few(head, number, block, names_of_files)
            continue
        # In the order of the blocks, as the checksums are.
        yield listed(few)
        few = []
        yield from records_of(head, number, block, files)
    yield listed(few)
    yield records_of_objects(head, listing)
    yield names[5] + HEAD_OF_OURS


def bytes_head(nbytes: int) -> bytes:
    """Return the beginning of the instruction that makes so many bytes."""
    return b"B" + struct.pack("<I", nbytes) if nbytes < 2**32 else b"\x8e" + struct.pack("<Q", nbytes)


def packed_of(listing: Listing) -> bytes:
    """Return the packed index; nothing where a block has none, or torch's planner has data of its own."""
    blocks = [block.packed() for block in listing.blocks]
    known = [block for block in blocks if block is not None]
    if listing.planner_data or len(known) != len(blocks):
        return b""
    objects = ((place.key, place.file, place.offset, place.length) for place in listing.objects)
    return packed.to_bytes(known, objects, listing.files, listing.order)


def sums_of(listing: Listing) -> Iterator[Union[bytes, bytearray]]:
    """Yield the checksums of records, in the order of the records."""
    few = array("I")
    for block in listing.blocks:
        sums = block.crcs()
        if not isinstance(sums, torch.Tensor):
            few += sums
            continue
        yield words_to_bytes(few)
        few = array("I")
        data = bytearray(sums.numel() * 4)
        filled(torch.frombuffer(data, dtype=torch.uint8).view(*sums.shape, 4), 0, sums)
        yield data
    yield words_to_bytes(few)
    yield struct.pack(f"<{len(listing.objects)}I", *(place.crc for place in listing.objects))


HEAD_OF_OURS = b"}(" + text("format") + b"K%c" % FORMAT
#: The content up to the packed index where torch's index is left out. Torch's readers unpickle the file, and
#: would take an index without tensors for a checkpoint without any. So the first instruction imports a module
#: of a name that is the reason: the import fails, and its error gives the name. A dot or a slash would not be
#: a part of it.
ALONE = (
    b"\x80\x03cthis checkpoint was saved with torch_metadata=False and has no index for readers of torch: "
    b"load it with torch_dcp_backport's dist_checkpointing, or give dcp load its CheckedReader as the "
    b"storage_reader\nMetadata\n)\x81}(" + text(OURS) + HEAD_OF_OURS
)


class Beginning:
    """The content up to the checksums, where it was kept, and what is known of it."""

    #: None where it was not kept.
    data: Optional[bytes] = None
    index: bytes = b""


class Content:
    """The content of a `.metadata`: made when it is iterated, in pieces."""

    def __init__(
        self, listing: Listing, beginning: Optional[Beginning] = None, *, torch_metadata: bool = True
    ) -> None:
        """Make nothing yet.

        Args:
            beginning: of a content that differs in its checksums alone; filled where it is small.
            torch_metadata: whether torch's index is in it; without it every block has to be packed.
        """
        self._listing = listing
        self._torch_metadata = torch_metadata
        self._beginning = beginning or Beginning()

    @functools.cached_property
    def index(self) -> bytes:
        """The packed index; empty where there is none."""
        if self._beginning.data is not None:
            return self._beginning.index
        return packed_of(self._listing)

    @property
    def sum_bytes(self) -> int:
        """The bytes of the records' checksums."""
        count = sum(len(block.keys) * len(block.boxes) for block in self._listing.blocks)
        return 4 * (count + len(self._listing.objects))

    @property
    def sent_bytes(self) -> int:
        """The bytes that a load sends to each rank."""
        if self.index:
            return len(self.index) + self.sum_bytes
        return sum(map(len, self))

    def __iter__(self) -> Iterator[Union[bytes, bytearray]]:
        crc = at = 0
        index, sum_bytes = self.index, self.sum_bytes
        head = text("crc32") + bytes_head(sum_bytes)
        for piece in self._begin():
            crc, at = zlib.crc32(piece, crc), at + len(piece)
            yield piece
        if index:
            # Before the checksums: all up to these is the same for each save by one plan.
            name = text("packed") + bytes_head(len(index))
            index_at = at + len(name)
            head = name + index + head
        crc, at = zlib.crc32(head, crc), at + len(head)
        yield head
        sums_crc = 0
        for piece in sums_of(self._listing):
            crc, sums_crc = zlib.crc32(piece, crc), zlib.crc32(piece, sums_crc)
            yield piece
        common = self._listing.common
        end = text("common") + (b"N" if common is None else b"".join(map(eight, common)) + b"\x86")
        if index:
            foot = packed.foot_of(index, index_at, (at, sum_bytes, sums_crc), common)
            end += text("foot") + bytes_head(len(foot)) + foot
        end += packed.END
        yield end + TRAILER + zlib.crc32(end, crc).to_bytes(4, "big")

    def _begin(self) -> Iterator[Union[bytes, bytearray]]:
        if self._beginning.data is not None:
            yield self._beginning.data
            return
        kept: list[Union[bytes, bytearray]] = []
        nbytes = 0
        for piece in before_sums(self._listing) if self._torch_metadata else (ALONE,):
            nbytes += len(piece)
            if nbytes <= KEPT:
                kept.append(piece)
            else:
                kept.clear()
            yield piece
        if nbytes <= KEPT:
            self._beginning.index = self.index
            self._beginning.data = b"".join(kept)
