"""The bytes of a record, when the pickle that describes its tensor is known: a zip of stored entries.

Must never import torch: the process that writes a save in the background has none.
"""

from __future__ import annotations

import functools
import struct
import sys
import zlib
from array import array
from typing import TYPE_CHECKING, NamedTuple

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
