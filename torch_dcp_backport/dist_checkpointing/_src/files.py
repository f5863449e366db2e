"""Files of records that are read: a read fills its target, or is an error."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Optional, Union

from torch_dcp_backport.publish import disk
from torch_dcp_backport.transfer import Problem

#: The most files that a load keeps open between the look at them and the read.
MOST_OPEN = 1024


class Damaged(Exception):
    """A file does not hold what was saved."""


class ReadSource:
    """A file that is read from, and the count of bytes that were read."""

    def __init__(self, fd: int, name: str) -> None:
        self.fd = fd
        self.name = name
        self.nbytes = 0
        #: Bytes that were read ahead, and their offset.
        self._ahead, self._ahead_at = bytearray(), 0

    def end(self) -> int:
        return os.fstat(self.fd).st_size

    def fill(self, target: memoryview, offset: int) -> None:
        """Fill `target` with the bytes from `offset` on.

        Raises:
            Damaged: the file ends before.
        """
        self.nbytes += target.nbytes
        while target.nbytes:
            done = os.preadv(self.fd, [target], offset)
            if not done:
                raise Damaged(f"{self.name} ends at byte {offset}, where {target.nbytes} more were saved")
            target, offset = target[done:], offset + done

    def bytes_at(self, offset: int, length: int) -> bytearray:
        """Return some bytes; no memory is taken for them where the file does not have them.

        Raises:
            Damaged: the file ends before.
        """
        start = offset - self._ahead_at
        if start >= 0 and start + length <= len(self._ahead):
            return self._ahead[start : start + length]
        if offset + length > self.end():
            raise Damaged(f"{self.name} ends at byte {self.end()}, where {offset + length} were saved")
        data = bytearray(length)
        self.fill(memoryview(data), offset)
        return data

    def read_ahead(self, offset: int, length: int) -> None:
        """Read bytes that `bytes_at` will return; do nothing where the file does not have them all."""
        if length and offset + length <= self.end():
            self._ahead, self._ahead_at = self.bytes_at(offset, length), offset


class BytesSource(ReadSource):
    """A part of a file that was read."""

    def __init__(self, data: Union[bytes, bytearray], name: str) -> None:
        super().__init__(-1, name)
        self.data = memoryview(data)

    def end(self) -> int:
        return self.data.nbytes

    def fill(self, target: memoryview, offset: int) -> None:
        part = self.data[offset : offset + target.nbytes]
        if part.nbytes < target.nbytes:
            raise Damaged(f"{self.name}: an entry of a record is outside of it")
        target[:] = part


class OpenFiles:
    """The files of a checkpoint that a load reads: each is opened once, and looked at by its descriptor.

    A network file system asks its server for each open. What a file was when the ranks agreed on the load, it
    is when it is read, whatever has its name then.
    """

    def __init__(self, folder: Path, most: Optional[int] = None) -> None:
        """Open nothing yet.

        Args:
            folder: the checkpoint's.
            most: how many files stay open at the same time; others are opened anew for each use. None is an
                eighth of the files that this process may open.
        """
        self.folder = folder
        self._most = most_open() if most is None else most
        self._fds: dict[str, int] = {}

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(self, *_: object) -> None:
        while self._fds:
            disk.close_own(self._fds.popitem()[1])

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[ReadSource]:
        """Yield a file, which stays open if there is room.

        Raises:
            OSError: it cannot be read.
        """
        # The right to see a file is not the right to read it.
        fd = self._fds.get(name)
        if fd is None:
            fd = disk.opened_own(self.folder / name)
            if len(self._fds) < self._most:
                self._fds[name] = fd
        try:
            yield ReadSource(fd, name)
        finally:
            if name not in self._fds:
                disk.close_own(fd)

    def problems(self, needed: Iterable[tuple[str, str]], ends: Mapping[str, int]) -> Iterator[Problem]:
        """Open files, and yield the problems of those that are not there, or end before a record.

        Args:
            needed: (a key, the name of the file that has a record of it).
            ends: name -> where its last record ends.
        """
        keys: dict[str, str] = {}
        for key, name in needed:
            keys.setdefault(name, key)
        for name, key in keys.items():
            try:
                with self.open(name) as source:
                    size = source.end()
            except OSError as error:
                yield Problem(f"{name} cannot be read", key, str(error))
                continue
            if size < ends[name]:
                yield Problem(f"{name} is cut short", key, f"{size} bytes", f"at least {ends[name]}")


def most_open() -> int:
    """Return how many files a load may keep open: an eighth of what this process may, which has others."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_OPEN if limit == resource.RLIM_INFINITY else min(limit // 8, MOST_OPEN)
