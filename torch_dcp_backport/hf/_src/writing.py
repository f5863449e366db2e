"""The files of an export, for every rank that writes into them: the places of tensors, and their bytes.

Must never publish anything, nor make a file that is there.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

import torch

from torch_dcp_backport import compat
from torch_dcp_backport.hf._src.blocks import Part
from torch_dcp_backport.hf._src.format import FileEntry, is_plain, make_header, nbytes_of
from torch_dcp_backport.hf._src.source import SINGLE
from torch_dcp_backport.publish import disk, drafts
from torch_dcp_backport.transfer import Box, Piece, TensorInfo, as_bytes, is_dense, part_of

#: Flag of Linux's `sync_file_range`: begin, and wait for nothing.
SYNC_FILE_RANGE_WRITE = 2
#: Bytes of a run in a file; of shorter runs the pages at both ends are too great a part.
LONG_RUN = 256 * 2**10


def planned(
    tensors: Mapping[str, TensorInfo], file_bytes: int, tag: str = "", single: str = SINGLE
) -> dict[str, list[str]]:
    """Return file name -> HF keys, in order: as many as `file_bytes` hold, or a single larger tensor.

    Args:
        single: the name of the file, where all keys are in one.
    """
    files: list[list[str]] = []
    room = 0
    for key, info in tensors.items():
        if not files or nbytes_of(info) > room:
            files.append([])
            room = file_bytes
        files[-1].append(key)
        room -= nbytes_of(info)
    if len(files) == 1:
        return {single: files[0]}
    stem, count = f"model-{tag}" if tag else "model", len(files)
    return {f"{stem}-{number:05d}-of-{count:05d}.safetensors": keys for number, keys in enumerate(files, 1)}


class SharedFolder(NamedTuple):
    """The folder of files under way, and the facts by which another process knows that it sees the same."""

    folder: str
    #: The part of the files' names that belongs to this export.
    tag: str
    boot: str
    device: int
    inode: int


class Files:
    """The safetensors files of an export, and the place of each tensor in them.

    The same on every rank but for the files that this process has open.
    """

    def __init__(
        self,
        tensors: Mapping[str, TensorInfo],
        file_bytes: int,
        tag: str = "",
        single: str = SINGLE,
        shapes: Optional[Mapping[str, tuple[int, ...]]] = None,
    ) -> None:
        """Describe the files; none is made yet.

        Args:
            shapes: HF key -> the shape that its file says, where boxes are those of another view.

        Raises:
            ValueError: a dtype that safetensors does not have.
        """
        self.tag = tag
        #: File name -> its first bytes, and its size.
        self.headers: dict[str, tuple[bytes, int]] = {}
        #: HF key -> its file, and its place in the file.
        self.places: dict[str, tuple[str, FileEntry]] = {}
        for name, keys in planned(tensors, file_bytes, tag, single).items():
            header, entries = make_header({key: tensors[key] for key in keys}, shapes or {})
            size = max((entry.stop for entry in entries.values()), default=len(header))
            self.headers[name] = header, size
            self.places.update((key, (name, entry)) for key, entry in entries.items())
        self._open: dict[str, int] = {}
        #: Whether written values are looked at.
        self.is_watching = False
        #: HF keys of tensors with written values that are not finite, of those that this process has seen.
        self.not_finite: set[str] = set()

    @property
    def names(self) -> list[str]:
        return list(self.headers)

    def make(self, folder: Path) -> None:
        """Make the files with their headers, and reserve room for all tensors.

        Raises:
            OSError: there is no room, the disk failed.
        """
        for name, (header, size) in self.headers.items():
            file = disk.open_own(folder / name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            self._open[name] = file
            reserve(file, size)
            disk.write_all(file, header, 0)

    def shared_folder(self, folder: Path) -> Optional[SharedFolder]:
        """Return the facts by which other processes join the files; None where they could not be sure."""
        try:
            boot, stat = drafts.boot(), os.stat(folder)
        except OSError:
            return None
        return SharedFolder(str(folder), self.tag, boot, stat.st_dev, stat.st_ino) if boot else None

    def join(self, shared_folder: SharedFolder) -> bool:
        """Open the files of another process; return whether they are in the same folder on this machine.

        On another machine, which may cache parts of the same pages, they are not opened.
        """
        try:
            folder = os.open(shared_folder.folder, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            return False
        try:
            stat = os.fstat(folder)
            if (drafts.boot(), stat.st_dev, stat.st_ino) != (
                shared_folder.boot,
                shared_folder.device,
                shared_folder.inode,
            ):
                return False
            for name in self.names:
                self._open[name] = disk.open_own(Path(name), os.O_RDWR, dir_fd=folder)
        except OSError:
            self.close()
            return False
        finally:
            os.close(folder)
        return True

    def write(self, key: str, offset: int, data: memoryview) -> None:
        """Write bytes of a tensor, from the byte at `offset` on.

        Raises:
            OSError: the disk failed.
        """
        name, entry = self.places[key]
        disk.write_all(self._open[name], data, entry.start + offset)
        start_flushing(self._open[name], entry.start + offset, len(data))

    def write_box(self, key: str, box: Box, data: memoryview) -> None:
        """Write the bytes of a box, which are contiguous in `data`.

        Raises:
            OSError: the disk failed.
        """
        name, entry = self.places[key]
        file, (shape, dtype) = self._open[name], entry.info
        if self.is_watching and is_plain(dtype) and not is_finite(data, dtype):
            self.not_finite.add(key)
        length = run_of(box, shape) * dtype.itemsize
        places = [entry.start + start * dtype.itemsize for start in starts_of(box, shape)]
        for number, place in enumerate(places):
            disk.write_all(file, data[number * length : (number + 1) * length], place)
        if len(places) == 1:
            start_flushing(file, places[0], length)

    def sync(self, first: int = 0, step: int = 1) -> None:
        """Wait until every `step`-th file is on the disk.

        Raises:
            OSError: the disk failed.
        """
        for name in self.names[first::step]:
            os.fsync(self._open[name])

    def close(self) -> None:
        """Close all files. Does nothing a second time.

        Raises:
            OSError: something that was written is not in a file; all are closed.
        """
        with contextlib.ExitStack() as files:
            while self._open:
                files.callback(disk.close_own, self._open.popitem()[1])


def is_finite(data: memoryview, dtype: torch.dtype) -> bool:
    """Return whether all of a buffer's values are numbers, and none is infinite."""
    if not len(data):
        return True
    return all(map(math.isfinite, torch.aminmax(torch.frombuffer(data, dtype=dtype))))


def run_of(box: Box, shape: tuple[int, ...]) -> int:
    """Return the number of a box's elements that are contiguous in the tensor."""
    run = 1
    for extent, length in zip(reversed(box.size), reversed(shape)):
        run *= extent
        if extent != length:
            break
    return run


def starts_of(box: Box, shape: tuple[int, ...]) -> Iterator[int]:
    """Yield the position in the tensor of the first element of each run of a box."""
    if not box.numel:
        return
    inner = len(shape)
    while inner and box.size[inner - 1] == shape[inner - 1]:
        inner -= 1
    # The innermost dimension that is cut is part of each run: only those before it make several runs.
    outer = max(inner - 1, 0)
    steps = [1] * len(shape)
    for dim in reversed(range(len(shape) - 1)):
        steps[dim] = steps[dim + 1] * shape[dim + 1]
    base = sum(start * step for start, step in zip(box.offset, steps))
    for place in itertools.product(*(range(extent) for extent in box.size[:outer])):
        yield base + sum(index * step for index, step in zip(place, steps))


class HostBytes:
    """Gives the bytes of tensors as a file has them: the memory itself where it is so, else a small copy."""

    def __init__(self, nbytes: int) -> None:
        """Remember `nbytes`, the size of the largest tensor."""
        self._nbytes = nbytes
        self._copy: Optional[torch.Tensor] = None

    def __call__(self, part: torch.Tensor, dtype: torch.dtype) -> memoryview:
        if not part.is_cpu or part.dtype != dtype or not is_dense(part):
            part = self._room(tuple(part.shape), dtype).copy_(part)
        return memoryview(as_bytes(part).numpy().data)

    def of_parts(self, piece: Piece, parts: Sequence[Part]) -> memoryview:
        """Return the bytes of a piece that several parts make up."""
        data = self._room(piece.box.size, piece.dtype)
        for box, part in parts:
            part_of(data, piece.box, box).copy_(part)
        return memoryview(as_bytes(data).numpy().data)

    def _room(self, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if self._copy is None:
            self._copy = compat.host_buffer(self._nbytes)
        return self._copy[: math.prod(size) * dtype.itemsize].view(dtype).view(size)


def reserve(file: int, size: int) -> None:
    """Take the room of a file now: later a full disk would be an error in the middle.

    Raises:
        OSError: there is too little room.
    """
    if not disk.reserve(file, size):
        os.ftruncate(file, size)


def start_flushing(file: int, offset: int, nbytes: int) -> None:
    """Let the kernel begin to put a part of a file on the disk: the sync at the end waits for less of it.

    A hint, on Linux alone, and of long runs: pages that another rank fills, too, would go to the disk several
    times. Errors of the disk are left to the sync.
    """
    flush = _sync_file_range()
    if flush is not None and nbytes >= LONG_RUN:
        flush(file, offset, nbytes, SYNC_FILE_RANGE_WRITE)


@functools.lru_cache(maxsize=1)
def _sync_file_range() -> Any:
    flush: Any = getattr(ctypes.CDLL(None), "sync_file_range", None) if sys.platform == "linux" else None
    if flush is not None:
        flush.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return flush
