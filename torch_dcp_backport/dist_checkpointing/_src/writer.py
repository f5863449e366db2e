"""Writes one rank's share of a checkpoint into its file: every record at its place, checksummed, on disk.

Runs in one thread without a collective. Holds at most one block beside the caller's tensors.
"""

from __future__ import annotations

import os
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

import torch

from torch_dcp_backport import compat
from torch_dcp_backport.dist_checkpointing._src import files, integrity
from torch_dcp_backport.dist_checkpointing._src.crc import combined
from torch_dcp_backport.dist_checkpointing._src.records import Form, RunningSum, form_of
from torch_dcp_backport.dist_checkpointing._src.runs import pieces
from torch_dcp_backport.publish import disk
from torch_dcp_backport.transfer import (
    Box,
    as_bytes,
    has_slices,
    is_dense,
    is_freed,
    layout_text,
    part_of,
    whole,
)

#: Bytes that are copied and checksummed at once.
BLOCK = 4 * 2**20
#: Records of fewer bytes are put together in memory.
LITTLE = 64 * 1024
#: Dtypes that numpy and memoryview have, too.
SHARED = frozenset(
    (
        *(torch.float64, torch.float32, torch.float16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
)
#: The most axes of an array up to numpy 1.26.
MOST_AXES = 32


class WriteWork(NamedTuple):
    """A box to be written, and the tensor that holds it."""

    data: torch.Tensor
    #: The box that `data` holds.
    holds: Box
    box: Box

    @property
    def form(self) -> Form:
        return form_of(self.data.dtype, self.box.size)

    @property
    def part(self) -> torch.Tensor:
        return part_of(self.data, self.holds, self.box)


class Written(NamedTuple):
    """The place of a written record, and its checksum."""

    offset: int
    length: int
    crc: int


class Output(NamedTuple):
    """The file and the records that a rank wrote."""

    file: str
    nbytes: int
    tensors: list[Written]
    objects: list[Written]
    #: The CRC32 of the file.
    crc: int = 0
    #: Its SHA-256, where that was asked for.
    sha256: str = ""

    def __reduce__(self) -> tuple[Any, ...]:
        columns = [[array("Q", column) for column in zip(*part)] for part in (self.tensors, self.objects)]
        return _output_of, ((self.file, self.nbytes, self.crc, self.sha256), *columns)


def _output_of(facts: tuple[str, int, int, str], *columns: Any) -> Output:
    file, nbytes, crc, sha256 = facts
    tensors, objects = (list(map(Written._make, zip(*part))) for part in columns)
    return Output(file, nbytes, tensors, objects, crc, sha256)


def write(
    path: Path,
    tensors: Sequence[WriteWork],
    objects: Sequence[bytes],
    moved: Callable[[int], None],
    is_hashed: bool = False,
) -> Output:
    """Write records in sequence into a new file, and have it on disk.

    Args:
        moved: called with the bytes of values that were written since the last time.
        is_hashed: return the file's SHA-256, too; the file is read again for that.

    Raises:
        OSError: no room, known before the first byte where the file system can tell, or a failed write.
    """
    forms = [work.form for work in tensors]
    total = sum(form.length for form in forms) + sum(map(len, objects))
    output = Output(path.name, total, [], [])
    if not tensors and not objects:
        return output
    disk.step(f"create {path.name}")
    fd = disk.create(path)
    try:
        files.reserve(fd, total)
        sink = Sink(fd)
        block: Optional[torch.Tensor] = None
        for work, form in zip(tensors, forms):
            disk.step("write record")
            part = work.part
            if is_flat(part):
                blocks = flat_blocks(part)
            else:
                block = compat.host_buffer(BLOCK) if block is None else block
                blocks = blocks_of(work, block)
            output.tensors.append(write_tensor(sink, form, blocks, moved))
        for data in objects:
            at = sink.end
            sink.put(data)
            output.objects.append(Written(at, len(data), zlib.crc32(data)))
        sink.flush()
        if is_hashed:
            # In order: a record's head is written after its values.
            output = output._replace(sha256=integrity.digest_of(path))
        disk.step(f"sync {path.name}")
        os.fsync(fd)
    finally:
        os.close(fd)
    return output._replace(crc=sink.crc)


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

    def put(self, data: bytes) -> None:
        self.crc = zlib.crc32(data, self.crc)
        self._waiting += data
        if len(self._waiting) > LITTLE:
            self.flush()

    def put_large(self, data: memoryview) -> None:
        """Write data at once, not as `put`; its checksum is counted by `fill`."""
        self.flush()
        files.write_all(self.fd, data, self._flushed)
        self._flushed += data.nbytes

    def skip(self, nbytes: int) -> int:
        """Leave room that `fill` will fill, and return its offset."""
        self.flush()
        self._flushed += nbytes
        return self._flushed - nbytes

    def fill(self, data: bytes, at: int, behind: int) -> None:
        """Fill the room, with `behind` as the checksum of the data that was put behind it."""
        files.write_all(self.fd, data, at)
        self.crc = combined(zlib.crc32(data, self.crc), behind, self.end - at - len(data))

    def flush(self) -> None:
        files.write_all(self.fd, self._waiting, self._flushed)
        self._flushed += len(self._waiting)
        self._waiting = bytearray()


def write_tensor(
    sink: Sink, form: Form, blocks: Iterator[memoryview], moved: Callable[[int], None]
) -> Written:
    at = sink.end
    if not form.grain:
        data = next(blocks, b"")
        crc = zlib.crc32(data)
        head, tail = form.ends(crc)
        sink.put(b"".join((head, data, tail)))
        moved(form.nbytes)
        return Written(at, form.length, crc)
    total = RunningSum(form.grain)
    if form.length <= LITTLE:
        data = next(blocks)
        total.add(data)
        sink.put(b"".join((form.head(total.crc), data, form.tail(total.crc, total.table))))
        moved(form.nbytes)
    else:
        # The head has the checksum of the values behind it.
        at = sink.skip(form.at)
        for part in blocks:
            total.add(part)
            sink.put_large(part)
            moved(part.nbytes)
        sink.fill(form.head(total.crc), at, total.crc)
        sink.put(form.tail(total.crc, total.table))
    return Written(at, form.length, total.crc)


def why_not_readable(tensor: torch.Tensor) -> str:
    """Return why a tensor has no values that could be saved; "" where it has them."""
    if tensor.is_meta:
        return "on the meta device"
    if not has_slices(tensor):
        return layout_text(tensor)
    return "its memory was freed" if is_freed(tensor) else ""


def is_flat(part: torch.Tensor) -> bool:
    """Return whether a tensor lies in host memory as it lies in a file."""
    return part.is_cpu and is_dense(part)


def flat_blocks(part: torch.Tensor) -> Iterator[memoryview]:
    """Return the values of a tensor that lies as in a file, in blocks that are multiples of every grain."""
    data = bytes_of(part)
    if len(data) <= BLOCK:
        return iter((data,))
    return (data[start : start + BLOCK] for start in range(0, len(data), BLOCK))


def blocks_of(work: WriteWork, block: torch.Tensor) -> Iterator[memoryview]:
    """Yield the values in row-major order, in blocks that are multiples of every grain, but for the last."""
    full_box, grain = whole(work.box.size), work.form.grain or 1
    filled = 0
    for piece in pieces(full_box, full_box, work.data.dtype.itemsize, BLOCK // 2, 0):
        size = piece.stop - piece.start
        if filled + size > BLOCK:
            # The bytes behind the last full grain go to the front of the next block.
            left = filled % grain
            yield bytes_of(block[: filled - left])
            block[:left].copy_(block[filled - left : filled].clone())
            filled = left
        target = block[filled : filled + size].view(work.data.dtype).view(piece.box.size)
        target.copy_(part_of(work.data, work.holds, shifted(piece.box, work.box)))
        filled += size
    if filled:
        yield bytes_of(block[:filled])


def shifted(box: Box, by: Box) -> Box:
    return Box(tuple(start + base for start, base in zip(box.offset, by.offset)), box.size)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the host that requires no gradient.

    Raises:
        RuntimeError: it was freed.
    """
    if tensor.dtype in SHARED and tensor.numel() and tensor.dim() <= MOST_AXES and not is_freed(tensor):
        # Views of a tensor cost twice as much as its array, which does not ask whether its memory is there.
        return memoryview(tensor.numpy()).cast("B")  # type: ignore[arg-type]
    array: Any = as_bytes(tensor).numpy()
    return memoryview(array)
