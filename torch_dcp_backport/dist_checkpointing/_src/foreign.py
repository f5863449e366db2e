"""Finds a tensor's values in a record of torch or Megatron: reads the zip's directory and the description.

Reads a few KiB of a record, never its values.
"""

from __future__ import annotations

import math
import struct
import zlib
from typing import NamedTuple, Optional

import torch

from torch_dcp_backport.dist_checkpointing._src.body import ELSEWHERE
from torch_dcp_backport.dist_checkpointing._src.files import Damaged, ReadSource
from torch_dcp_backport.dist_checkpointing._src.metadata import RecordPlace
from torch_dcp_backport.dist_checkpointing._src.unpickle import Refused, TensorMetadata, TensorReader
from torch_dcp_backport.transfer import row_major

#: Bytes that are read of the end of a record; a directory of torch's has less than 1 KiB.
END = 4096


class ListedEntry(NamedTuple):
    """An entry in a zip's directory."""

    nbytes: int
    crc: int
    #: The offset of its header in the record.
    at: int


class Located(NamedTuple):
    """The place of a record's values."""

    dtype: torch.dtype
    #: In the file.
    at: int
    nbytes: int
    crc: int


def locate(source: ReadSource, place: RecordPlace, size: tuple[int, ...]) -> Optional[Located]:
    """Return the place of the values in a tensor's record; None where they do not lie row-major, dense and
    unchanged in it.

    Args:
        size: the shape that the checkpoint's metadata gives the record.

    Raises:
        Damaged: not a record of a tensor of this shape.
    """
    entries = directory(source, place)
    described = next((name for name in entries if name.endswith("/data.pkl")), None)
    if described is None:
        raise Damaged(f"{place.file}: no tensor's record at byte {place.offset}")
    stem = described[: -len("data.pkl")]
    order = entries.get(f"{stem}byteorder")
    if order is not None and content(source, place, order) != b"little":
        return None
    try:
        value, _ = TensorReader(content(source, place, entries[described])).read()
        if not isinstance(value, TensorMetadata):
            raise Refused(f"it describes a {type(value).__name__}")
    except Refused as error:
        raise Damaged(
            f"{place.file}: the record at byte {place.offset} is no plain tensor: {error}"
        ) from None
    if value.size != size:
        raise Damaged(f"{place.file}: the record at byte {place.offset} has shape {value.size}, not {size}")
    values = entries.get(f"{stem}data/{value.storage}")
    if values is None:
        raise Damaged(f"{place.file}: the record at byte {place.offset} has no values")
    dense = all(extent == 1 or a == b for extent, a, b in zip(size, value.strides, row_major(size)))
    nbytes = math.prod(size) * value.dtype.itemsize
    if not dense or value.offset or value.flags or values.nbytes != nbytes:
        return None
    return Located(value.dtype, place.offset + start_of(source, place, values), nbytes, values.crc)


def directory(source: ReadSource, place: RecordPlace) -> dict[str, ListedEntry]:
    """Return the entries of the zip that a record is.

    Raises:
        Damaged: it is none.
    """
    try:
        return _directory(source, place)
    except (struct.error, UnicodeDecodeError, ValueError, IndexError) as error:
        raise Damaged(f"{place.file}: no record at byte {place.offset} ({error})") from None


def _directory(source: ReadSource, place: RecordPlace) -> dict[str, ListedEntry]:
    size = min(place.length, END)
    tail = source.bytes_at(place.offset + place.length - size, size)
    end = tail.rindex(b"PK\5\6")
    count, nbytes, at = struct.unpack_from("<HII", tail, end + 10)
    if ELSEWHERE in (nbytes, at) or count == 0xFFFF:
        large = tail.rindex(b"PK\6\6", 0, end)
        count, nbytes, at = struct.unpack_from("<QQQ", tail, large + 32)
    if at + nbytes > place.length:
        raise ValueError("its directory is outside of it")
    listing = source.bytes_at(place.offset + at, nbytes)
    entries = {}
    cursor = 0
    for _ in range(count):
        if listing[cursor : cursor + 4] != b"PK\1\2":
            raise ValueError("its directory is damaged")
        method, _, _, crc, packed, length, name_length, extra_length, comment = struct.unpack_from(
            "<HHHIIIHHH", listing, cursor + 10
        )
        (start,) = struct.unpack_from("<I", listing, cursor + 42)
        name_at = cursor + 46
        name = listing[name_at : name_at + name_length].decode()
        extra = bytes(listing[name_at + name_length : name_at + name_length + extra_length])
        length, packed, start = _large_sizes(extra, length, packed, start)
        if method or packed != length:
            raise ValueError(f"{name} is compressed")
        entries[name] = ListedEntry(length, crc, start)
        cursor = name_at + name_length + extra_length + comment
    return entries


def _large_sizes(extra: bytes, length: int, packed: int, start: int) -> tuple[int, int, int]:
    """Return the sizes and the place, from the extra field where they have no room in the entry."""
    values = [length, packed, start]
    cursor = 0
    while cursor + 4 <= len(extra):
        kind, size = struct.unpack_from("<HH", extra, cursor)
        if kind == 1:
            at = cursor + 4
            for number, value in enumerate(values):
                if value == ELSEWHERE:
                    (values[number],) = struct.unpack_from("<Q", extra, at)
                    at += 8
        cursor += 4 + size
    return values[0], values[1], values[2]


def start_of(source: ReadSource, place: RecordPlace, entry: ListedEntry) -> int:
    """Return the offset of an entry's content in the record."""
    header = source.bytes_at(place.offset + entry.at, 30)
    if header[:4] != b"PK\3\4":
        raise Damaged(f"{place.file}: no entry at byte {place.offset + entry.at}")
    name, extra = struct.unpack_from("<HH", header, 26)
    start = entry.at + 30 + int(name) + int(extra)
    if start + entry.nbytes > place.length:
        raise Damaged(f"{place.file}: the record at byte {place.offset} has an entry outside of it")
    return start


def content(source: ReadSource, place: RecordPlace, entry: ListedEntry) -> bytes:
    """Return the content of a small entry, verified.

    Raises:
        Damaged: its checksum is wrong.
    """
    data = bytes(source.bytes_at(place.offset + start_of(source, place, entry), entry.nbytes))
    if zlib.crc32(data) != entry.crc:
        raise Damaged(f"{place.file}: the record at byte {place.offset} is damaged (wrong checksum)")
    return data
