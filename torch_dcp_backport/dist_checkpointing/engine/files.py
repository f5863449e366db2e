"""Files and folders that are on disk when a call returns, and reads that are complete or an error.

Every step that a crash can fall between goes through `step`, where tests make it fall.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Optional, Union

#: Called before every step of a save that a crash could come before: the seam of tests.
on_step: Optional[Callable[[str], None]] = None


def step(name: str) -> None:
    if on_step is not None:
        on_step(name)


#: A folder, and its entries.
Entries = tuple[Path, Sequence["os.DirEntry[str]"]]


class Damaged(Exception):
    """A file does not hold what was saved."""


def create(path: Path) -> int:
    """Make a new file and open it for writing; a file or a link of its name is removed before.

    A folder that another program prepared may hold a link, or another name of the user's file, in its place:
    neither is ever written through.

    Raises:
        OSError: it cannot be made, or another process made it at the same moment (EEXIST).
    """
    path.unlink(missing_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o666)


#: The most bytes of a small file that names others: a manifest of 100,000 files has about 10 MiB.
MOST_SMALL = 64 * 2**20


def opened(path: Path) -> int:
    """Open a regular file for reading.

    The open of a pipe would wait for a writer, and a device may have bytes without end.

    Raises:
        OSError: it cannot be read, or is a pipe, a device, a socket or a folder.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "is no regular file", str(path))
    return fd


def read_whole(path: Path, most: int = MOST_SMALL) -> bytes:
    """Return the bytes of a regular file.

    Raises:
        OSError: as `opened`; or the file has more than `most` bytes, which are not read.
    """
    with open(opened(path), "rb") as file:
        nbytes = os.fstat(file.fileno()).st_size
        # `read` takes memory for all that it is asked for: the file's size, and what was added since.
        data = file.read(nbytes + 1) if nbytes <= most else b""
        data += file.read(most + 1 - nbytes) if len(data) > nbytes else b""
    if nbytes > most or len(data) > most:
        raise OSError(errno.EFBIG, f"has {nbytes} bytes, where {most} are the most", str(path))
    return data


def write_all(fd: int, data: Union[bytes, bytearray, memoryview], offset: int) -> None:
    """Write all of the bytes: a single call may write less."""
    view = memoryview(data)
    while view.nbytes:
        done = os.pwrite(fd, view, offset)
        view, offset = view[done:], offset + done


class Source:
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


class Memory(Source):
    """A part of a file that was read."""

    def __init__(self, data: bytearray, name: str) -> None:
        super().__init__(-1, name)
        self.data = memoryview(data)

    def end(self) -> int:
        return self.data.nbytes

    def fill(self, target: memoryview, offset: int) -> None:
        part = self.data[offset : offset + target.nbytes]
        if part.nbytes < target.nbytes:
            raise Damaged(f"{self.name}: an entry of a record is outside of it")
        target[:] = part


def check_writable(folder: Path) -> None:
    """Ask whether files can be made in a folder, and make none.

    Raises:
        OSError: they cannot (EACCES, EROFS).
    """
    # The rights of this moment: those that a process has given up for good are the same.
    is_effective = os.access in os.supports_effective_ids
    if not os.access(folder, os.W_OK | os.X_OK, effective_ids=is_effective):
        code = errno.EROFS if os.statvfs(folder).f_flag & os.ST_RDONLY else errno.EACCES
        raise OSError(code, os.strerror(code), str(folder))


def reserve(fd: int, length: int) -> None:
    """Have the disk's room for a file before its first byte, where the file system can.

    Raises:
        OSError: there is no room.
    """
    if length and hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(fd, 0, length)
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise


#: The errors of file systems without such a call; a lack of room fails the write itself then.
UNSUPPORTED = frozenset((errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENOTSUP))


def sync_folder(folder: Path) -> None:
    """Have the names in a folder on disk, where the file system can."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
    finally:
        os.close(fd)


def publish(path: Path, data: bytes, is_synced: bool = True) -> None:
    """Give a small file all of its content at once: readers see the old content, or all of the new.

    The only way in which this package writes a small file into a folder: a link in its place is replaced, and
    its target is not touched.

    Args:
        is_synced: have it on disk before it gets its name; else a loss of power may leave it empty.
    """
    draft = path.with_name(f"{path.name}.new")
    step(f"write {path.name}")
    with open(create(draft), "wb") as file:
        file.write(data)
        if is_synced:
            file.flush()
            step(f"sync {path.name}")
            os.fsync(file.fileno())
    step(f"rename {path.name}")
    os.replace(draft, path)


def walk(top: Path, on_error: Optional[Callable[[OSError], None]] = None) -> Iterator[Entries]:
    """Yield each folder from the top down, with its entries by name. Links are not followed.

    Folders may be nested deeper than Python's calls may be, which `os.walk` of Python 3.11 does not outlive.

    Args:
        on_error: called where a folder cannot be listed; by default it counts as empty.
    """
    waiting = [top]
    while waiting:
        folder = waiting.pop()
        entries: list[os.DirEntry[str]] = []
        try:
            with os.scandir(folder) as listed:
                entries = sorted(listed, key=lambda entry: entry.name)
        except OSError as error:
            if on_error is not None:
                on_error(error)
        below = [entry for entry in entries if entry.is_dir(follow_symlinks=False)]
        waiting += [Path(entry.path) for entry in reversed(below)]
        yield folder, entries


def remove(paths: Sequence[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)
