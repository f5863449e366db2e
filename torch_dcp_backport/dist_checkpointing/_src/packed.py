"""The index of a checkpoint as few bytes: what ranks of a load get, in place of all of `.metadata`.

A save puts it into its `.metadata`, beside what torch reads, and near the end: any program that writes that
file anew, or copies it, leaves it out or takes it along. Tensors that are alike are one entry, with a column
of offsets for all files that have their records at the same places.
"""

from __future__ import annotations

import functools
import json
import math
import operator
import os
import struct
import sys
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

import torch

from torch_dcp_backport.dist_checkpointing._src.body import Words
from torch_dcp_backport.dist_checkpointing._src.unpickle import Refused
from torch_dcp_backport.publish import disk
from torch_dcp_backport.transfer import Box

#: Begins the last value in a `.metadata`, and tells where its packed index and its checksums are.
MARK = b"torch_dcp_backport packed 1 "
#: Places and bytes of the index and of the checksums; their CRC32s; the common state.
FOOT = struct.Struct("<QQQQIIqI")
TRAILER = b"torch_dcp_backport crc32 "
#: Instructions behind the foot: the dictionaries end, and the pickle.
END = b"uub."
#: Up to so many bytes of `.metadata` are read to verify all of it; of more only the index, with its own sums.
VERIFIED = 2**30
BLOCK = 2**22


class Packed(NamedTuple):
    """The index as it is in a file, and as it is sent."""

    data: bytes
    #: The checksums of records, 4 bytes each.
    sums: bytes
    #: Bytes and checksum of the common state.
    common: Optional[tuple[int, int]]


class PackedBlock(NamedTuple):
    """Tensors that are stored alike, and the places of their records, in columns of 64 bits."""

    keys: Sequence[str]
    dtype: torch.dtype
    shape: tuple[int, ...]
    original: Optional[tuple[int, ...]]
    #: Of each box its offset and its size, along each axis.
    boxes: Words
    #: Of each box the bytes of a record, the number of its column of offsets, and its file.
    lengths: Words
    which: Words
    #: The number of the file; below zero, of a column of files for the tensors: -1 is the first one.
    files: Words
    #: The different columns, one behind the other: an offset for each tensor.
    offsets: Words
    #: The same of files, where tensors are in different ones.
    spread: Words


def foot_of(
    index: bytes, index_at: int, sums: tuple[int, int, int], common: Optional[tuple[int, int]]
) -> bytes:
    """Return the last value of a `.metadata`.

    Args:
        sums: where the checksums of records begin, their bytes, and the checksum of these.
        common: bytes and checksum of the common state.
    """
    nbytes, crc = common or (-1, 0)
    sums_at, sum_bytes, sums_crc = sums
    index_crc = zlib.crc32(index)
    foot = FOOT.pack(index_at, len(index), sums_at, sum_bytes, index_crc, sums_crc, nbytes, crc)
    return MARK + foot + zlib.crc32(foot).to_bytes(4, "little")


FOOT_BYTES = len(MARK) + FOOT.size + 4


def read(path: Path) -> Optional[Packed]:
    """Return the packed index in a `.metadata`; None where it has none that is whole, or is damaged.

    Raises:
        OSError: it cannot be read.
    """
    with open(disk.opened(path), "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        return index_in(size, functools.partial(bytes_at, file.fileno()), is_verified=size <= VERIFIED)


def index_in(size: int, part: Callable[[int, int], bytes], is_verified: bool) -> Optional[Packed]:
    """Return the packed index in the bytes of a `.metadata`; None as `read` does.

    Args:
        size: how many bytes there are.
        part: returns bytes from a place on, so many; fewer where they end.
        is_verified: whether the checksum of all of them is compared.
    """
    behind = len(END) + len(TRAILER) + 4
    if size < FOOT_BYTES + behind:
        return None
    data = part(size - FOOT_BYTES - behind, FOOT_BYTES + behind)
    foot, crc = data[len(MARK) : FOOT_BYTES - 4], data[FOOT_BYTES - 4 : FOOT_BYTES]
    if not data.startswith(MARK) or zlib.crc32(foot).to_bytes(4, "little") != crc:
        return None
    if data[FOOT_BYTES:-4] != END + TRAILER:
        return None
    if is_verified and sum_of(part, size - len(TRAILER) - 4) != data[-4:]:
        return None
    *places, index_crc, sums_crc, nbytes, common_crc = FOOT.unpack(foot)
    if max(map(sum, (places[:2], places[2:]))) > size:
        return None
    index, sums = (part(*place) for place in (places[:2], places[2:]))
    if (zlib.crc32(index), zlib.crc32(sums)) != (index_crc, sums_crc):
        return None
    return Packed(index, sums, None if nbytes < 0 else (nbytes, common_crc))


def bytes_at(fd: int, offset: int, nbytes: int) -> bytes:
    """Return bytes of a file; fewer where it ends."""
    pieces: list[bytes] = []
    while nbytes:
        piece = os.pread(fd, min(nbytes, 2**30), offset)
        if not piece:
            break
        pieces.append(piece)
        offset, nbytes = offset + len(piece), nbytes - len(piece)
    return b"".join(pieces)


def sum_of(part: Callable[[int, int], bytes], nbytes: int) -> bytes:
    crc = 0
    for start in range(0, nbytes, BLOCK):
        crc = zlib.crc32(part(start, min(BLOCK, nbytes - start)), crc)
    return crc.to_bytes(4, "big")


# --- to bytes and back ---


def to_bytes(
    blocks: Sequence[PackedBlock],
    objects: Iterable[tuple[str, int, int, int]],
    files: Sequence[str],
    order: Iterable[str],
) -> bytes:
    """Return an index as bytes.

    Args:
        objects: key, number of the file, offset and length.
        order: all keys.
    """
    arrays: list[bytes] = []
    facts = []
    for block in blocks:
        columns = block[4:]
        arrays += [little(column).tobytes() for column in columns]
        facts.append(
            {
                "keys": list(block.keys),
                "dtype": str(block.dtype).partition(".")[2],
                "shape": block.shape,
                "original": block.original,
                "counts": [len(column) for column in columns],
            }
        )
    listed = list(objects)
    names = [key for block in blocks for key in block.keys] + [key for key, *_ in listed]
    numbers = {key: number for number, key in enumerate(names)}
    head = json.dumps(
        {"blocks": facts, "objects": listed, "files": files, "order": [numbers[key] for key in order]},
        # As escapes two surrogates of a key would be read as one character.
        ensure_ascii=False,
    ).encode("utf-8", "surrogatepass")
    # Numbers behind it begin at multiples of their size.
    head += b" " * (-len(head) % 8)
    # Not compressed: few bytes could then ask for much memory.
    return b"".join((struct.pack("<Q", len(head)), head, *arrays))


def little(numbers: Words) -> Words:
    """Return numbers with their bytes swapped on a machine that is not little-endian, as files are."""
    if sys.byteorder == "big":
        numbers = array("q", numbers)
        numbers.byteswap()
    return numbers


class Unpacked(NamedTuple):
    """What an index has, checked."""

    blocks: list[PackedBlock]
    objects: list[tuple[str, int, int, int]]
    files: list[str]
    order: list[str]


#: No file has more bytes.
LARGEST = 2**62


def from_bytes(data: bytes) -> Unpacked:
    """Return the index in bytes.

    Raises:
        Refused: they are none, or contradict themselves.
    """
    try:
        return _from_bytes(data)
    except Refused:
        raise
    except Exception as error:  # whatever damaged bytes lead to
        raise Refused(f"it has no packed index: {type(error).__name__}: {error}") from error


def _from_bytes(data: bytes) -> Unpacked:
    (length,) = struct.unpack_from("<Q", data)
    facts: Mapping[str, Any] = json.loads(bytes(data[8 : 8 + length]).decode("utf-8", "surrogatepass"))
    at = 8 + length
    blocks = []
    for fact in facts["blocks"]:
        dtype: Any = getattr(torch, fact["dtype"], None)
        shape = tuple(map(int, fact["shape"]))
        original = None if fact["original"] is None else tuple(map(int, fact["original"]))
        columns = []
        for count in fact["counts"]:
            columns.append(little(array("q", data[at : at + 8 * count])))
            at += 8 * count
        block = PackedBlock(fact["keys"], dtype, shape, original, *columns)
        check(block, len(facts["files"]))
        blocks.append(block)
    objects = [(key, int(file), int(start), int(nbytes)) for key, file, start, nbytes in facts["objects"]]
    names = [key for block in blocks for key in block.keys] + [key for key, *_ in objects]
    if not all(type(name) is str for name in names) or len(set(names)) != len(names):
        raise Refused("its keys are none, or twice there")
    for _, file, start, nbytes in objects:
        if not (0 <= file < len(facts["files"]) and start >= 0 and 0 <= nbytes <= LARGEST - start):
            raise Refused(f"not a place: {start}, {nbytes}")
    return Unpacked(blocks, objects, list(facts["files"]), [names[number] for number in facts["order"]])


def check(block: PackedBlock, files: int) -> None:
    """Compare the numbers of a block with each other.

    Raises:
        Refused: they contradict each other.
    """
    count, axes, keys = len(block.lengths), len(block.shape), len(block.keys)
    if not isinstance(block.dtype, torch.dtype) or math.prod(block.shape) * block.dtype.itemsize > LARGEST:
        raise Refused(f"{block.keys[:1]} has no dtype, or more bytes than there are")
    is_right = (len(block.boxes), len(block.which), len(block.files)) == (2 * axes * count, count, count)
    is_right = is_right and not (len(block.offsets) % keys or len(block.spread) % keys)
    is_right = is_right and within(block.which, 0, len(block.offsets) // keys)
    is_right = is_right and within(block.files, -(len(block.spread) // keys), files)
    is_right = is_right and within(block.spread, 0, files)
    is_right = is_right and within(block.offsets, 0, LARGEST) and within(block.lengths, 0, LARGEST)
    for box, length in zip(boxes_of(block), block.lengths) if is_right else ():
        ends = (start + extent for start, extent in zip(box.offset, box.size))
        is_inside = min((*box.offset, *box.size), default=0) >= 0 and not any(
            map(operator.gt, ends, block.shape)
        )
        is_right = is_right and is_inside and box.numel * block.dtype.itemsize <= length
    if not is_right or (block.original is not None and len(block.original) != axes - 1):
        raise Refused(f"its places of {block.keys[:1]} contradict each other")


def within(values: Words, start: int, stop: int) -> bool:
    return not values or start <= min(values) <= max(values) < stop


def boxes_of(block: PackedBlock) -> Iterator[Box]:
    """Yield the boxes of a block."""
    axes, numbers = len(block.shape), block.boxes
    for at in range(0, 2 * axes * len(block.lengths), 2 * axes) if axes else [0] * len(block.lengths):
        yield Box(tuple(numbers[at : at + axes]), tuple(numbers[at + axes : at + 2 * axes]))
