"""Reads boxes of stored tensors into tensors: only the bytes that are needed, verified, in bounded memory.

`pread`, never `mmap`: a file that is cut short, or a disk's error, would end the process there.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Optional, Union

import torch

from torch_dcp_backport import compat
from torch_dcp_backport.dist_checkpointing._src import foreign
from torch_dcp_backport.dist_checkpointing._src.body import bytes_to_words
from torch_dcp_backport.dist_checkpointing._src.files import BytesSource, Damaged, OpenFiles, ReadSource
from torch_dcp_backport.dist_checkpointing._src.metadata import Chunk, RecordPlace
from torch_dcp_backport.dist_checkpointing._src.records import LARGEST, extent_of, form_of, pieces
from torch_dcp_backport.dist_checkpointing._src.values import Unloadable, loads
from torch_dcp_backport.dist_checkpointing._src.writer import bytes_of, is_flat
from torch_dcp_backport.transfer import Box, part_of, row_major

#: Bytes that are read and then checksummed while they are still in the processor's cache.
BLOCK = 2**20
#: Records of so many bytes are read with one call.
LITTLE = 32 * 1024


class Read(NamedTuple):
    """A part of a chunk, and the tensor that it is read into."""

    key: str
    chunk: Chunk
    part: Box
    #: Of the checkpoint.
    dtype: torch.dtype
    #: Holds `holds`, of which the part is a part.
    target: torch.Tensor
    holds: Box

    @property
    def base(self) -> int:
        """The offset of the chunk in the values of its record, in bytes."""
        return self.chunk.start * self.dtype.itemsize


class RecordValues:
    """The bytes of a record's values in a file, and their verification."""

    #: Reads of whole multiples of it are verified; with 1, only reads of everything in order.
    grain = 1

    def __init__(self, source: ReadSource, at: int, nbytes: int, crc: Optional[int]) -> None:
        self.source = source
        self.at = at
        self.nbytes = nbytes
        self.crc = crc
        #: Everything up to here was read in order, and has this checksum.
        self._upto, self._sum = 0, 0

    def read(self, start: int, target: memoryview) -> None:
        """Fill `target` with the bytes from `start` on, and verify them.

        Raises:
            Damaged: the checksum is wrong.
        """
        self.source.fill(target, self.at + start)
        self.check(start, target)

    def check(self, start: int, data: memoryview) -> None:
        if start == self._upto:
            self._sum = zlib.crc32(data, self._sum)
            self._upto += data.nbytes
            if self._upto == self.nbytes and self.crc is not None and self._sum != self.crc:
                raise self.damaged()

    def damaged(self) -> Damaged:
        return Damaged(f"{self.source.name}: values from byte {self.at} on are damaged (wrong checksum)")


class Verified(RecordValues):
    """Values with a table of checksums: every run of grains is verified."""

    def __init__(
        self, source: ReadSource, at: int, nbytes: int, crc: int, grain: int, table: Sequence[int]
    ) -> None:
        super().__init__(source, at, nbytes, crc)
        self.grain = grain
        self.table = table

    def check(self, start: int, data: memoryview) -> None:
        first, last = start // self.grain, -(-(start + data.nbytes) // self.grain) - 1
        before = self.table[first - 1] if first else 0
        if zlib.crc32(data, before) != self.table[last]:
            raise self.damaged()


class VerifiedValues(RecordValues):
    """Values that were read in full, and verified."""

    def __init__(self, source: ReadSource, at: int, data: memoryview) -> None:
        super().__init__(source, at, data.nbytes, None)
        self.data = data

    def read(self, start: int, target: memoryview) -> None:
        target[:] = self.data[start : start + target.nbytes]


def neighbours(reads: Iterable[Read]) -> Iterator[tuple[int, int, list[Read]]]:
    """Yield (start, stop, reads): little records that lie side by side from start to stop, as far as BLOCK.

    A large record is among them, and its bytes are not.
    """
    group: list[Read] = []
    start = stop = 0
    for read in sorted(reads, key=lambda read: read.chunk.place.offset):
        place = read.chunk.place
        end = place.offset + (place.length if place.length <= LITTLE else 0)
        if place.offset > stop or end - start > BLOCK:
            if group:
                yield start, stop, group
            group, start, stop = [], place.offset, place.offset
        group.append(read)
        stop = max(stop, end)
    if group:
        yield start, stop, group


class RecordReader:
    """Reads the wanted parts of a checkpoint's records."""

    def __init__(
        self,
        folder: Union[Path, OpenFiles],
        is_ours: bool,
        moved: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Read nothing yet.

        Args:
            folder: the checkpoint's; or its files, of which some may be open and stay so.
            is_ours: whether this package wrote it.
            moved: called with the bytes of values that were read since the last time.
        """
        self.files = folder if isinstance(folder, OpenFiles) else OpenFiles(folder, most=0)
        self.is_ours = is_ours
        self.moved = moved
        #: Bytes that were asked of files, and the names of these.
        self.bytes_read = 0
        self.names: set[str] = set()
        self._buffer: Optional[torch.Tensor] = None

    @contextmanager
    def open(self, name: str) -> Iterator[ReadSource]:
        with self.files.open(name) as source:
            self.names.add(name)
            try:
                yield source
            finally:
                self.bytes_read += source.nbytes

    def read(self, reads: Iterable[Read]) -> None:
        """Read parts of tensors, in the order in which they are stored.

        Raises:
            Damaged: a record is not what was saved; its tensor may be overwritten in part.
        """
        by_file: dict[str, list[Read]] = {}
        for read in reads:
            by_file.setdefault(read.chunk.place.file, []).append(read)
        for name in sorted(by_file):
            with self.open(name) as source:
                for start, stop, group in neighbours(by_file[name]):
                    source.read_ahead(start, stop - start)
                    for read in group:
                        self.read_part(source, read)

    def read_part(self, source: ReadSource, read: Read) -> None:
        try:
            values = self.own_values(source, read) if self.is_ours else self.foreign_values(source, read)
            if values is None:
                self.read_by_torch(source, read)
            elif not self.read_run(values, read):
                self.read_pieces(values, read)
        except Damaged as error:
            raise Damaged(f"{read.key}: {error}") from None
        self.moved(read.part.numel * read.dtype.itemsize)

    def own_values(self, source: ReadSource, read: Read) -> RecordValues:
        """Return the values of a record of ours, once every bit around them is as it has to be."""
        place, form = read.chunk.place, form_of(read.dtype, read.chunk.size)
        crc, at = place.crc or 0, place.offset + form.at
        if form.length != place.length:
            raise Damaged(f"{source.name}: the record has {place.length} bytes, not {form.length}")
        if place.length <= LITTLE:
            head = tail = source.bytes_at(place.offset, place.length)
            values = memoryview(head)[form.at : form.at + form.nbytes]
            table = form.table_in(bytes(tail[-form.tail_bytes :])) if form.grain else b""
            crc_read = zlib.crc32(values)
        else:
            head = source.bytes_at(place.offset, form.at)
            tail = source.bytes_at(at + form.nbytes, form.tail_bytes)
            table = form.table_in(bytes(tail))
            # The values are verified against the table when they are read.
            crc_read = bytes_to_words(table)[-1]
        ends = (form.head(crc), form.tail(crc, table)) if form.grain else form.ends(crc)
        if crc_read != crc or not head.startswith(ends[0]) or not tail.endswith(ends[1]):
            raise Damaged(f"{source.name}: the record at byte {place.offset} is damaged (wrong checksum)")
        if place.length <= LITTLE:
            return VerifiedValues(source, at, values)
        return Verified(source, at, form.nbytes, crc, form.grain, bytes_to_words(table))

    def foreign_values(self, source: ReadSource, read: Read) -> Optional[RecordValues]:
        """Return the values of a record of torch or Megatron; None where only torch can read them."""
        located = foreign.locate(source, read.chunk.place, read.chunk.size)
        if located is None:
            return None
        if located.dtype != read.dtype:
            raise Damaged(f"{source.name}: a record has {located.dtype}, not {read.dtype}")
        values = RecordValues(source, located.at, located.nbytes, located.crc)
        if located.nbytes > LITTLE:
            return values
        # From the bytes that were read ahead, where they were.
        data = memoryview(source.bytes_at(located.at, located.nbytes))
        values.check(0, data)
        return VerifiedValues(source, located.at, data)

    def read_run(self, values: RecordValues, read: Read) -> bool:
        """Read a part that is one run of bytes in the file and in memory, without a copy; else do nothing."""
        target = part_of(read.target, read.holds, read.part)
        if target.dtype != read.dtype or not is_flat(target):
            return False
        if isinstance(values, VerifiedValues) and read.part is read.chunk.box and read.chunk.record is None:
            bytes_of(target)[:] = values.data
            return True
        begin, end = extent_of(read.chunk.box, read.part, read.dtype.itemsize)
        if end - begin != read.part.numel * read.dtype.itemsize:
            return False
        memory, grain = bytes_of(target), values.grain
        begin, end = begin + read.base, end + read.base
        start = begin
        while start < end:
            # Blocks end at multiples of their size, so that all but the first and the last are whole grains.
            stop = min((start // BLOCK + 1) * BLOCK, end)
            first, last = start // grain * grain, min(-(-stop // grain) * grain, values.nbytes)
            if (first, last) == (start, stop):
                values.read(start, memory[start - begin : stop - begin])
            else:
                data = self.buffer(last - first)
                values.read(first, data)
                memory[start - begin : stop - begin] = data[start - first : stop - first]
            start = stop
        return True

    def read_pieces(self, values: RecordValues, read: Read) -> None:
        """Read a part through a buffer: with gaps, to another dtype, or to another device."""
        stored, itemsize, grain = read.chunk.box, read.dtype.itemsize, values.grain
        for piece in pieces(stored, read.part, itemsize):
            piece = piece._replace(start=piece.start + read.base, stop=piece.stop + read.base)
            first, last = piece.start // grain * grain, min(-(-piece.stop // grain) * grain, values.nbytes)
            data = self.buffer(last - first)
            values.read(first, data)
            assert self._buffer is not None, "it was just made"
            typed = self._buffer[piece.start - first : piece.stop - first].view(read.dtype)
            source = typed.as_strided(piece.box.size, row_major(stored.size))
            part_of(read.target, read.holds, piece.box).copy_(source)

    def read_by_torch(self, source: ReadSource, read: Read) -> None:
        """Read a record whose values do not lie row-major and dense: in full, as torch does."""
        place = read.chunk.place
        data = source.bytes_at(place.offset, place.length)
        verify_entries(data, source.name)
        try:
            value = loads(bytes(data))
        except Unloadable as error:
            raise Damaged(f"{source.name}: the record at byte {place.offset}: {error}") from None
        if not isinstance(value, torch.Tensor) or value.dtype != read.dtype:
            what = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
            raise Damaged(f"{source.name}: a record has {what}, not {read.dtype}")
        chunk = read.chunk
        if chunk.record is not None:
            value = value.reshape(-1)[chunk.start : chunk.start + chunk.box.numel].view(chunk.box.size)
        part_of(read.target, read.holds, read.part).copy_(part_of(value, chunk.box, read.part))

    def read_object(self, place: RecordPlace) -> bytes:
        """Return the bytes of a record that is no tensor, verified.

        Raises:
            Damaged: a checksum is wrong.
        """
        with self.open(place.file) as source:
            return self.object_in(source, place)

    def object_in(self, source: ReadSource, place: RecordPlace) -> bytes:
        """Return what `read_object` does, of a file that is open.

        Raises:
            Damaged: a checksum is wrong.
        """
        data = source.bytes_at(place.offset, place.length)
        verify_object(data, place)
        return bytes(data)

    def buffer(self, nbytes: int) -> memoryview:
        if self._buffer is None or self._buffer.numel() < nbytes:
            self._buffer = None
            self._buffer = compat.host_buffer(max(nbytes, LARGEST // 4))
        return bytes_of(self._buffer[:nbytes])


def verify_object(data: Union[bytes, bytearray], place: RecordPlace) -> None:
    """Compare the bytes of a record that is no tensor with its checksums.

    Raises:
        Damaged: a checksum is wrong.
    """
    if place.crc is None:
        verify_entries(data, place.file)
    elif zlib.crc32(data) != place.crc:
        raise Damaged(f"{place.file}: the record at byte {place.offset} is damaged (wrong checksum)")


def verify_entries(record: Union[bytes, bytearray], name: str) -> None:
    """Compare every entry of a record of torch's with its checksum.

    Raises:
        Damaged: a checksum is wrong.
    """
    source, place = BytesSource(record, name), RecordPlace(name, 0, len(record))
    for entry in foreign.directory(source, place).values():
        foreign.content(source, place, entry)
