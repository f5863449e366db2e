"""The bytes of a rank's file: records in sequence, and their checksums.

Must never import torch: the process that writes a save in the background has none.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from torch_dcp_backport.dist_checkpointing._src import files
from torch_dcp_backport.dist_checkpointing._src.crc import combined
from torch_dcp_backport.dist_checkpointing._src.zipped import Form, RunningSum
from torch_dcp_backport.publish import disk

#: Bytes that are checksummed and written at once.
BLOCK = 4 * 2**20
#: Records of fewer bytes are put together in memory.
LITTLE = 64 * 1024


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


class Places(NamedTuple):
    """Records whose values lie in one memory, by number."""

    forms: list[Form]
    #: The number of a record's form.
    which: Sequence[int]
    #: Where its values begin in the memory.
    starts: Sequence[int]

    def records(self, memory: memoryview) -> Iterator[tuple[Form, Iterator[memoryview]]]:
        """Yield each record's form and the blocks of its values."""
        for number, start in zip(self.which, self.starts):
            form = self.forms[number]
            yield form, blocks_in(memory[start : start + form.nbytes])


def blocks_in(data: memoryview) -> Iterator[memoryview]:
    """Return bytes in blocks that are multiples of every grain."""
    if len(data) <= BLOCK:
        return iter((data,))
    return (data[start : start + BLOCK] for start in range(0, len(data), BLOCK))


def write(
    fd: int,
    records: Iterable[tuple[Form, Iterator[memoryview]]],
    objects: Sequence[bytes],
    moved: Callable[[int], None],
    output: Output,
) -> Output:
    """Write records in sequence from the start of a file on; return the output with their places.

    Args:
        moved: called with the bytes of values that were written since the last time.

    Raises:
        OSError: a write failed.
    """
    sink = Sink(fd)
    for form, blocks in records:
        disk.step("write record")
        output.tensors.append(write_record(sink, form, blocks, moved))
    for data in objects:
        at = sink.end
        sink.put(data)
        output.objects.append(Written(at, len(data), zlib.crc32(data)))
    sink.flush()
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


def write_record(
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
