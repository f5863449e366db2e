"""The safetensors format: a length of 8 bytes, a JSON header, and behind it the bytes of all tensors.

Knows headers; must never read or write a tensor's values.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Union

import torch

from torch_dcp_backport import compat
from torch_dcp_backport.publish import disk
from torch_dcp_backport.transfer import TensorInfo

#: Bytes of the header's length, little-endian.
LENGTH = 8
#: The safetensors library refuses longer headers.
MOST_HEADER = 100_000_000
METADATA = "__metadata__"
NOT_REGULAR = "not a regular file"
NO_SHAPES: Mapping[str, tuple[int, ...]] = {}
CODES = {dtype: code for code, dtype in compat.STORED_DTYPES.items()}


class FileEntry(NamedTuple):
    """A tensor of a file, and the place of its bytes."""

    info: TensorInfo
    start: int
    stop: int


class FormatError(ValueError):
    """A file that is no complete safetensors file."""


def read_header(path: Union[str, Path]) -> dict[str, FileEntry]:
    """Return the tensors of a file, in the order of their bytes.

    Raises:
        FormatError: the file is cut short, too long or no safetensors file at all, or has a dtype that this
            torch does not.
        OSError: the file cannot be read.
    """
    with opened(path) as file:
        return header_in(file)


@contextlib.contextmanager
def opened(path: Union[str, Path]) -> Iterator[BinaryIO]:
    """Open a file in the context.

    Raises:
        FormatError: it is a pipe, whose open would wait for a writer, a device, or a folder.
        OSError: the file cannot be read.
    """
    try:
        fd = os.open(path, disk.READS)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise FormatError(NOT_REGULAR) from None
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise FormatError(NOT_REGULAR)
    with open(fd, "rb") as file:
        yield file


def header_in(file: BinaryIO) -> dict[str, FileEntry]:
    """Return the tensors of a file that is open, as `read_header` does.

    Raises:
        FormatError, OSError: as `read_header`.
    """
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(LENGTH), "little")
    if size < LENGTH or length > min(MOST_HEADER, size - LENGTH):
        raise FormatError(f"{size} bytes, which cannot hold the header of {length} bytes that it begins with")
    header = parsed(file.read(length))
    begin = LENGTH + length
    entries = {name: entry_of(name, value, begin) for name, value in header.items()}
    ordered = dict(sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)))
    end = begin
    for name, entry in ordered.items():
        if entry.start != end:
            raise FormatError(
                f"{name} begins at byte {entry.start}, and what is before it ends at byte {end}"
            )
        end = entry.stop
    if end != size:
        raise FormatError(f"{size} bytes, where its header speaks of {end}")
    return ordered


def parsed(text: bytes) -> dict[str, Any]:
    """Return name -> entry of the header.

    Raises:
        FormatError: no JSON object of objects, or a name twice.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        if len(set(names)) < len(names):
            raise FormatError(f"a header with {max(names, key=names.count)!r} twice")
        return dict(pairs)

    try:
        header = json.loads(text, object_pairs_hook=unique)
    except FormatError:
        raise
    except (ValueError, RecursionError) as error:
        raise FormatError(f"a header that is no JSON: {error}") from None
    if not isinstance(header, dict):
        raise FormatError("a header that is no JSON object")
    header.pop(METADATA, None)
    for name in header:
        if encodable(name) != name:
            raise FormatError(f"a name with half of a character (a surrogate): {encodable(name)}")
    return header


def encodable(text: str) -> str:
    """Return a text that UTF-8 has: halves of characters, which messages cannot carry, as escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


def entry_of(name: str, value: Any, begin: int) -> FileEntry:
    try:
        code, shape, (start, stop) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise FormatError(f"{name} has no dtype, shape and data_offsets") from None
    if not all(type(number) is int and number >= 0 for number in (*shape, start, stop)):
        raise FormatError(f"{name} has the shape {shape} at {start} to {stop}")
    dtype = compat.STORED_DTYPES.get(code)
    if dtype is None:
        raise FormatError(f"{name} is of the dtype {code!r}, which this torch does not have")
    nbytes = math.prod(shape) * dtype.itemsize
    if stop - start != nbytes:
        raise FormatError(f"{name} has {stop - start} bytes, where {shape} of {dtype} takes {nbytes}")
    return FileEntry(TensorInfo(shape, dtype), begin + start, begin + stop)


def make_header(
    tensors: Mapping[str, TensorInfo], shapes: Mapping[str, tuple[int, ...]] = NO_SHAPES
) -> tuple[bytes, dict[str, FileEntry]]:
    """Return (the first bytes of a file, the places of its tensors).

    Tensors lie in the order of the mapping, but larger elements before smaller ones, so that each tensor
    begins where it can be read without a copy.

    Args:
        shapes: name -> the shape that the file says, where it is not that of `tensors`.

    Raises:
        ValueError: a dtype that the format does not have; more tensors than readers take of a file.
    """
    header: dict[str, Any] = {METADATA: {"format": "pt"}}
    places: dict[str, tuple[int, int]] = {}
    end = 0
    for name, info in sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize):
        if name == METADATA:
            raise ValueError(f"a tensor cannot be called {name}: files have something else there")
        if info.dtype not in CODES:
            raise ValueError(f"{name}: safetensors has no {info.dtype}")
        start, end = end, end + nbytes_of(info)
        header[name] = {
            "dtype": CODES[info.dtype],
            "shape": list(shapes.get(name, info.shape)),
            "data_offsets": [start, end],
        }
        places[name] = start, end
    text = json.dumps(header, separators=(",", ":")).encode()
    # The tensors begin at a multiple of 8: readers map them as they are.
    text += b" " * (-len(text) % LENGTH)
    if len(text) > MOST_HEADER:
        raise ValueError(
            f"{len(tensors)} tensors in a file make a header of {len(text)} bytes, where readers take "
            f"{MOST_HEADER}: write smaller files (Export.file_bytes)"
        )
    begin = LENGTH + len(text)
    entries = {
        name: FileEntry(tensors[name], begin + start, begin + stop) for name, (start, stop) in places.items()
    }
    return len(text).to_bytes(LENGTH, "little") + text, entries


def nbytes_of(info: TensorInfo) -> int:
    return math.prod(info.shape) * info.dtype.itemsize


def is_plain(dtype: torch.dtype) -> bool:
    """Return whether values of a dtype are weights as they are; quantised values also need scales."""
    return dtype.is_floating_point and dtype.itemsize > 1
