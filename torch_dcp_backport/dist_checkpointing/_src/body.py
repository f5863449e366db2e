"""The bytes of a rank's file: records in sequence, and their checksums.

Must never import torch: the process that writes a save in the background has none.
"""

from __future__ import annotations

import functools
import itertools
import struct
import sys
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch_dcp_backport.publish import disk

# --- sums of parts ---
#
# CRC32 is the rest of a division of polynomials over bits; behind a part, others multiply it by a power
# of x.


#: CRC-32/ISO-HDLC, as zlib's: bit 31 stands for x**0.
POLYNOMIAL = 0xEDB88320
ONE = 1 << 31


def combined(first: int, second: int, nbytes: int) -> int:
    """Return the CRC32 of two runs of bytes in sequence, of which the second has `nbytes`."""
    return _product(_shift(nbytes), first) ^ second


@functools.lru_cache(maxsize=1024)
def _shift(nbytes: int) -> int:
    """Return x to the power of the bits in so many bytes."""
    result, square = ONE, ONE >> 8
    while nbytes:
        if nbytes & 1:
            result = _product(square, result)
        square = _product(square, square)
        nbytes >>= 1
    return result


def _product(a: int, b: int) -> int:
    result = 0
    while a:
        if a & ONE:
            result ^= b
        a = a << 1 & 0xFFFFFFFF
        b = b >> 1 ^ (POLYNOMIAL if b & 1 else 0)
    return result


# --- records ---
#
# Must never import torch: the process that writes a save in the background has none.

if TYPE_CHECKING:
    Words = array[int]
else:  # which no Python before 3.12 can look up
    Words = array

#: Values begin at a multiple of this within a record, as torch aligns them.
ALIGNMENT = 64
#: From so many bytes of values on, a record has a table of checksums, so that parts can be verified.
SMALL = 16 * 1024
#: Bytes of values between two checksums, where the table stays below LONGEST.
GRAIN = 4096
LONGEST = 2**20
#: Stands for a number that is elsewhere, with eight bytes; and the least number that is.
ELSEWHERE = 0xFFFFFFFF
LIMIT32 = ELSEWHERE
#: The offset of an entry's checksum in its header, and in the directory.
CRC_IN_HEADER, CRC_IN_LISTING = 14, 16
#: 1980-01-01, the first day of the zip format.
DATE = 0x21
#: A zip's extra field that only takes room; torch uses the same id.
PADDING = 0x4246


class ZipEntry(NamedTuple):
    """An entry of a zip."""

    name: str
    nbytes: int
    crc: int
    #: The offset of its header in the record.
    at: int
    #: Bytes of padding in its header, at least 4, or none.
    padding: int = 0

    @property
    def is_large(self) -> bool:
        return self.nbytes >= LIMIT32

    def sizes(self) -> bytes:
        """Return the extra field with the sizes that have no room in the header."""
        return struct.pack("<HHQQ", 1, 16, self.nbytes, self.nbytes) if self.is_large else b""

    def header(self) -> bytes:
        extra = self.sizes()
        if self.padding:
            extra += struct.pack("<HH", PADDING, self.padding - 4) + bytes(self.padding - 4)
        return b"PK\3\4" + self._common(len(extra)) + self.name.encode() + extra

    def listing(self) -> bytes:
        """Return the entry as it is in the directory at the end of the zip."""
        extra, at = self.sizes(), self.at
        if at >= LIMIT32:
            extra, at = self._with_place(), ELSEWHERE
        rest = struct.pack("<HHHII", 0, 0, 0, 0, at)
        return (
            b"PK\1\2" + struct.pack("<H", 45) + self._common(len(extra)) + rest + self.name.encode() + extra
        )

    def _with_place(self) -> bytes:
        sizes = struct.pack("<QQ", self.nbytes, self.nbytes) if self.is_large else b""
        return struct.pack("<HH", 1, len(sizes) + 8) + sizes + struct.pack("<Q", self.at)

    def _common(self, extra: int) -> bytes:
        size = ELSEWHERE if self.is_large else self.nbytes
        return struct.pack(
            "<HHHHHIIIHH", 45, 0, 0, 0, DATE, self.crc, size, size, len(self.name.encode()), extra
        )


class Form:
    """The layout of the record of a contiguous tensor."""

    def __init__(self, nbytes: int, description: bytes) -> None:
        """`nbytes`: of the values. `description`: the pickle of the tensor."""
        self.nbytes = nbytes
        self._entries: list[ZipEntry] = []
        self._front = b""
        for name, content in (
            ("data.pkl", description),
            ("byteorder", sys.byteorder.encode()),
            ("version", b"3\n"),
        ):
            entry = ZipEntry(f"archive/{name}", len(content), zlib.crc32(content), len(self._front))
            self._entries.append(entry)
            self._front += entry.header() + content
        bare = ZipEntry("archive/data/0", self.nbytes, 0, len(self._front))
        padding = -(len(self._front) + len(bare.header())) % ALIGNMENT
        #: The values, from the start of the record; four bytes are the least that padding takes.
        self._values = bare._replace(padding=padding + ALIGNMENT if 0 < padding < 4 else padding)
        self.at = len(self._front) + len(self._values.header())
        #: Bytes of values between two checksums; 0 where the record has no table, and is verified at once.
        self.grain = 0
        if self.nbytes > SMALL:
            self.grain = GRAIN
            while 4 * -(-self.nbytes // self.grain) > LONGEST:
                self.grain *= 2
        self.tail_bytes = len(self.tail(0, bytes(self.table_bytes)))
        self.length = self.at + self.nbytes + self.tail_bytes

    @property
    def table_bytes(self) -> int:
        return 4 * -(-self.nbytes // self.grain) if self.grain else 0

    @functools.cached_property
    def _little(self) -> tuple[bytes, bytes, bytes, bytes]:
        """The bytes around the two checksums of a record without a table: only the checksums differ."""
        head, tail = self.head(0), self._tail(0, b"")
        at, behind = len(self._front) + CRC_IN_HEADER, tail.index(self._values.listing()) + CRC_IN_LISTING
        return head[:at], head[at + 4 :], tail[:behind], tail[behind + 4 :]

    def head(self, crc: int) -> bytes:
        """Return the bytes before the values."""
        return self._front + self._values._replace(crc=crc).header()

    def tail(self, crc: int, table: bytes) -> bytes:
        """Return the bytes behind the values: the table of checksums, and the zip's directory."""
        return self._tail(crc, table) if self.grain else self.ends(crc)[1]

    def ends(self, crc: int) -> tuple[bytes, bytes]:
        """Return (head, tail) of a record without a table: a hundred thousand of them share a template."""
        before, middle, behind, end = self._little
        word = crc.to_bytes(4, "little")
        return b"".join((before, word, middle)), b"".join((behind, word, end))

    def _tail(self, crc: int, table: bytes) -> bytes:
        entries, at = [*self._entries, self._values._replace(crc=crc)], self.at + self.nbytes
        parts = []
        if self.grain:
            name = f"archive/.data/crc32-{self.grain}"
            entries.append(ZipEntry(name, len(table), zlib.crc32(table), at))
            parts = [entries[-1].header(), table]
            at += len(parts[0]) + len(table)
        listing = b"".join(entry.listing() for entry in entries)
        return b"".join((*parts, listing, ending(len(entries), len(listing), at)))

    def table_in(self, tail: bytes) -> bytes:
        """Return the table of checksums within a tail."""
        if not self.grain:
            return b""
        at = len(ZipEntry(f"archive/.data/crc32-{self.grain}", 0, 0, 0).header())
        return tail[at : at + self.table_bytes]


def ending(count: int, nbytes: int, at: int) -> bytes:
    """Return the end of a zip whose directory has `count` entries in `nbytes` bytes from `at` on."""
    large, at_in_32_bits = b"", at
    if at >= LIMIT32:
        end = struct.pack("<QHHIIQQQQ", 44, 45, 45, 0, 0, count, count, nbytes, at)
        large, at_in_32_bits = b"PK\6\6" + end + b"PK\6\7" + struct.pack("<IQI", 0, at + nbytes, 1), ELSEWHERE
    return large + b"PK\5\6" + struct.pack("<HHHHIIH", 0, 0, count, count, nbytes, at_in_32_bits, 0)


class RunningSum:
    """The checksum of a record's values, and its table, while they are written.

    An entry of the table is the checksum of everything up to there: one pass over the bytes gives both the
    record's checksum and the table, and one checksum over any run of grains is enough to verify them.
    """

    def __init__(self, grain: int) -> None:
        self.grain = grain
        self.crc = 0
        self._table = array("I")

    def add(self, data: memoryview) -> None:
        """Count the next bytes; all but the last have a multiple of the grain."""
        if not self.grain:
            self.crc = zlib.crc32(data, self.crc)
            return
        crc, append = self.crc, self._table.append
        for start in range(0, len(data), self.grain):
            crc = zlib.crc32(data[start : start + self.grain], crc)
            append(crc)
        self.crc = crc

    @property
    def table(self) -> bytes:
        return words_to_bytes(self._table)


def words_to_bytes(words: Words) -> bytes:
    """Return checksums as bytes, little-endian on every machine."""
    if sys.byteorder == "big":
        words = array("I", words)
        words.byteswap()
    return words.tobytes()


def bytes_to_words(data: bytes) -> Words:
    words = array("I")
    words.frombytes(data)
    if sys.byteorder == "big":
        words.byteswap()
    return words


# --- a rank's file ---

#: Bytes that are checksummed and written at once.
BLOCK = 4 * 2**20
#: Records of fewer bytes are put together in memory.
LITTLE = 64 * 1024


class RecordInfo(NamedTuple):
    """The place of a written record, and its checksum."""

    offset: int
    length: int
    crc: int


class Records(Sequence[RecordInfo]):
    """The places and checksums of written records, in columns: the first rank has those of all ranks."""

    def __init__(self, start: int, lengths: Words, numbers: Words, crcs: Words, gaps: Words) -> None:
        #: The offset of the first record; the others follow it, but for gaps.
        self.start = start
        #: The different lengths, and of each record the number of its length.
        self.lengths = lengths
        self.numbers = numbers
        self.crcs = crcs
        #: The bytes before each record that are no record's; empty where there are none.
        self.gaps = gaps

    @classmethod
    def of(cls, records: Sequence[RecordInfo]) -> Records:
        if isinstance(records, Records):
            return records
        numbers: dict[int, int] = {}
        column = [numbers.setdefault(entry.length, len(numbers)) for entry in records]
        start = end = records[0].offset if records else 0
        gaps = array("q")
        for entry in records:
            gaps.append(entry.offset - end)
            end = entry.offset + entry.length
        code = "B" if len(numbers) < 2**8 else "I"
        crcs = array("I", (entry.crc for entry in records))
        return cls(start, array("Q", numbers), array(code, column), crcs, gaps if any(gaps) else array("q"))

    def offsets(self) -> Iterator[int]:
        """Yield the offset of each record."""
        at, lengths = self.start, self.lengths
        for number, gap in zip(self.numbers, self.gaps or itertools.repeat(0)):
            at += gap
            yield at
            at += lengths[number]

    def places(self) -> tuple[int, bytes, bytes, bytes]:
        """Return what is equal for records at the same places, whatever their checksums."""
        return self.start, self.lengths.tobytes(), self.numbers.tobytes(), self.gaps.tobytes()

    def __len__(self) -> int:
        return len(self.crcs)

    def __iter__(self) -> Iterator[RecordInfo]:
        lengths = (self.lengths[number] for number in self.numbers)
        return map(RecordInfo, self.offsets(), lengths, self.crcs)

    def __getitem__(self, number: Any) -> Any:
        return list(self)[number]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        return Records, (self.start, self.lengths, self.numbers, self.crcs, self.gaps)


class Output(NamedTuple):
    """The file and the records that a rank wrote."""

    file: str
    nbytes: int
    tensors: Sequence[RecordInfo]
    objects: Sequence[RecordInfo]
    #: The CRC32 of the file.
    crc: int = 0
    #: Its SHA-256, where that was asked for.
    sha256: str = ""

    def __reduce__(self) -> tuple[Any, ...]:
        columns = Records.of(self.tensors), Records.of(self.objects)
        return Output, (self.file, self.nbytes, *columns, self.crc, self.sha256)


class Places(NamedTuple):
    """Records whose values lie in one memory, by number."""

    forms: list[Form]
    #: The number of a record's form.
    which: Sequence[int]
    #: Where its values begin in the memory.
    starts: Sequence[int]


def blocks_in(data: memoryview) -> Iterator[memoryview]:
    """Return bytes in blocks that are multiples of every grain."""
    if len(data) <= BLOCK:
        return iter((data,))
    return (data[start : start + BLOCK] for start in range(0, len(data), BLOCK))


def write_staged(
    fd: int,
    memory: memoryview,
    places: Places,
    objects: Sequence[bytes],
    moved: Callable[[int], None],
    output: Output,
) -> Output:
    """Write records whose values lie in one memory, from the start of a file on, and objects behind them.

    Args:
        moved: called with the bytes of values that were written since the last time.

    Returns:
        The output with the places of all that was written.

    Raises:
        OSError: a write failed.
    """
    sink, tensors = Sink(fd), list[RecordInfo]()
    for number, start in zip(places.which, places.starts):
        form = places.forms[number]
        blocks = blocks_in(memory[start : start + form.nbytes])
        tensors.append(sink.put_record(form, blocks, moved))
    return sink.ended(objects, output._replace(tensors=tensors))


class Sink:
    """A file that is written from its start on; little data waits until it is worth a call."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        #: Of everything before `end`.
        self.crc = 0
        self._waiting = bytearray()
        self._flushed = 0

    @property
    def end(self) -> int:
        return self._flushed + len(self._waiting)

    def put_record(
        self, form: Form, blocks: Iterator[memoryview], moved: Callable[[int], None]
    ) -> RecordInfo:
        """Write the record of a tensor from the blocks of its values; return its place."""
        disk.step("write record")
        at = self.end
        if not form.grain:
            data = next(blocks, b"")
            crc = zlib.crc32(data)
            head, tail = form.ends(crc)
            self.put(b"".join((head, data, tail)))
            moved(form.nbytes)
            return RecordInfo(at, form.length, crc)
        total = RunningSum(form.grain)
        if form.length <= LITTLE:
            data = next(blocks)
            total.add(data)
            self.put(b"".join((form.head(total.crc), data, form.tail(total.crc, total.table))))
            moved(form.nbytes)
        else:
            # The head has the checksum of the values behind it.
            at = self.skip(form.at)
            for part in blocks:
                total.add(part)
                self.put_large(part)
                moved(part.nbytes)
            self.fill(form.head(total.crc), at, total.crc)
            self.put(form.tail(total.crc, total.table))
        return RecordInfo(at, form.length, total.crc)

    def ended(self, objects: Sequence[bytes], output: Output) -> Output:
        """Write objects behind the records; return the output with their places, and the file's checksum."""
        written = []
        for data in objects:
            written.append(RecordInfo(self.end, len(data), zlib.crc32(data)))
            self.put(data)
        self.flush()
        return output._replace(objects=written, crc=self.crc)

    def put(self, data: bytes) -> None:
        self.crc = zlib.crc32(data, self.crc)
        self._waiting += data
        if len(self._waiting) > LITTLE:
            self.flush()

    def put_large(self, data: memoryview) -> None:
        """Write data at once, not as `put`; its checksum is counted by `fill`."""
        self.flush()
        disk.write_all(self.fd, data, self._flushed)
        self._flushed += data.nbytes

    def skip(self, nbytes: int) -> int:
        """Leave room that `fill` will fill, and return its offset."""
        self.flush()
        self._flushed += nbytes
        return self._flushed - nbytes

    def fill(self, data: bytes, at: int, behind: int) -> None:
        """Fill the room, with `behind` as the checksum of the data that was put behind it."""
        disk.write_all(self.fd, data, at)
        self.crc = combined(zlib.crc32(data, self.crc), behind, self.end - at - len(data))

    def flush(self) -> None:
        disk.write_all(self.fd, self._waiting, self._flushed)
        self._flushed += len(self._waiting)
        self._waiting = bytearray()
