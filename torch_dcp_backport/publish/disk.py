"""Files and folders that are on disk when a call returns, and reads that are complete or an error.

Every step that a crash can fall between goes through `step`, where tests make it fall.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Optional, Union

#: The content of a file, from its start on.
Pieces = Iterable[Union[bytes, bytearray]]
#: Called before every step of a save that a crash could come before: the seam of tests.
on_step: Optional[Callable[[str], None]] = None


def step(name: str) -> None:
    if on_step is not None:
        on_step(name)


#: A folder, and its entries.
Entries = tuple[Path, Sequence["os.DirEntry[str]"]]
#: The most bytes of a small file that names others: a manifest of 100,000 files has about 10 MiB.
MOST_SMALL = 64 * 2**20
#: The errors of file systems without such a call; a lack of room fails the write itself then.
UNSUPPORTED = frozenset((errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENOTSUP))


# --- files of this process alone ---
#
# A program forks while a save writes in a thread: its data loader's workers. Their copies of a descriptor
# would keep a lock, and the room of a removed file, for as long as they live, and O_CLOEXEC closes nothing at
# a fork. So the child closes them.

#: (path, descriptor) of each; without a descriptor while the file is opened or closed.
_own: dict[object, tuple[str, Optional[int]]] = {}


def open_own(path: Path, flags: int, mode: int = 0o666, dir_fd: Optional[int] = None) -> int:
    """Open a file that no process has which is forked from this one; `close_own` closes it.

    Args:
        path, flags, mode, dir_fd: as of `os.open`.

    Raises:
        OSError: it cannot be opened.
    """
    key, text = object(), os.path.abspath(path)
    _own[key] = text, None
    try:
        fd = os.open(path, flags, mode, dir_fd=dir_fd)
    except BaseException:
        _own.pop(key, None)
        raise
    _own[key] = text, fd
    return fd


def close_own(fd: int) -> None:
    """Close a file of `open_own`; do nothing in a process that was forked since, which has it no longer."""
    for key, (text, held) in list(_own.items()):
        if held == fd:
            _own[key] = text, None
            try:
                os.close(fd)
            finally:
                _own.pop(key, None)
            return


def _close_in_child() -> None:
    fds = {fd for _, fd in _own.values() if fd is not None}
    # Where the parent was just opening or closing a file, its number is not known.
    unknown = {os.path.realpath(text) for text, fd in _own.values() if fd is None}
    _own.clear()
    for name in os.listdir("/proc/self/fd") if unknown and os.path.isdir("/proc/self/fd") else ():
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}") in unknown:
                fds.add(int(name))
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


os.register_at_fork(after_in_child=_close_in_child)


def create(path: Path) -> int:
    """Make a new file, and open it as `open_own` does; a file or a link of its name is removed before.

    A folder that another program prepared may hold a link, or another name of the user's file, in its place:
    neither is ever written through.

    Raises:
        OSError: it cannot be made, or another process made it at the same moment (EEXIST).
    """
    path.unlink(missing_ok=True)
    return open_own(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0))


@contextlib.contextmanager
def created(path: Path) -> Iterator[int]:
    """Make a new file as `create` does, and close it at the end of the context."""
    fd = create(path)
    try:
        yield fd
    finally:
        close_own(fd)


def reserve(fd: int, nbytes: int) -> bool:
    """Have the disk's room for a file before its first byte; return False where the file system cannot.

    Raises:
        OSError: there is no room.
    """
    if nbytes and not hasattr(os, "posix_fallocate"):
        return False
    try:
        if nbytes:
            os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        return False
    return True


def write_all(fd: int, data: Union[bytes, bytearray, memoryview], offset: int) -> None:
    """Write all of the bytes at a place in a file: a single call may write less."""
    view = memoryview(data)
    while view.nbytes:
        done = os.pwrite(fd, view, offset)
        view, offset = view[done:], offset + done


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


READS = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC


def opened(path: Path) -> int:
    """Open a regular file for reading.

    The open of a pipe would wait for a writer, and a device may have bytes without end.

    Raises:
        OSError: it cannot be read, or is a pipe, a device, a socket or a folder.
    """
    fd = os.open(path, READS)
    try:
        check_regular(fd, path)
    except OSError:
        os.close(fd)
        raise
    return fd


def opened_own(path: Path) -> int:
    """Open a regular file as `opened` does, for this process alone: `close_own` closes it.

    Raises:
        OSError: as `opened`.
    """
    fd = open_own(path, READS)
    try:
        check_regular(fd, path)
    except OSError:
        close_own(fd)
        raise
    return fd


def check_regular(fd: int, path: Path) -> None:
    """Refuse an open file that is a pipe, a device, a socket or a folder.

    Raises:
        OSError: naming it.
    """
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise OSError(errno.EINVAL, "is no regular file", str(path))


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


def write(path: Path, data: bytes, is_synced: bool = True) -> None:
    """Write a small file where no reader looks yet, such as in a draft; a link in its place is replaced.

    Args:
        is_synced: have its bytes on disk; its name is there once its folder is synced.
    """
    _write(path, data, is_synced, path.name)


def publish(path: Path, data: Union[bytes, Pieces], is_synced: bool = True) -> None:
    """Give a small file all of its content at once: readers see the old content, or all of the new.

    A link in its place is replaced, and its target is not touched.

    Args:
        data: the content; or pieces of it, where it is large.
        is_synced: have it on disk before it gets its name; else a loss of power may leave it empty.
    """
    draft = path.with_name(f"{path.name}.new")
    _write(draft, data, is_synced, path.name)
    step(f"rename {path.name}")
    os.replace(draft, path)


def _write(path: Path, data: Union[bytes, Pieces], is_synced: bool, name: str) -> None:
    step(f"write {name}")
    with created(path) as fd:
        at = 0
        for piece in (data,) if isinstance(data, bytes) else data:
            write_all(fd, piece, at)
            at += len(piece)
        if is_synced:
            step(f"sync {name}")
            os.fsync(fd)


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


def sync_file(path: Path) -> None:
    """Put a file on disk; pipes, links to nowhere and the like have nothing there."""
    if not os.path.isfile(path):
        return
    fd = opened(path)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_tree(folder: Path, synced: Collection[str] = ()) -> None:
    """Put the files below a folder on disk, but for those that are, and then the names of all."""
    paths, folders = list[Path](), list[Path]()
    for place, entries in walk(folder):
        folders.append(place)
        paths += [Path(entry.path) for entry in entries if not entry.is_dir(follow_symlinks=False)]
    paths = [path for path in paths if path.relative_to(folder).as_posix() not in synced]
    # Disks sync several files at once in the time of a single file.
    with ThreadPoolExecutor(8) as pool:
        deque(pool.map(sync_file, paths), 0)
        deque(pool.map(sync_folder, folders), 0)


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


def remove_whole(path: Path) -> list[Exception]:
    """Remove a file, or a folder with all that is in it, as far as possible; return why it is still there."""
    try:
        step(f"remove {path.name}")
        if os.path.islink(path) or not os.path.isdir(path):
            path.unlink(missing_ok=True)
        else:
            shutil.rmtree(path)
    except (OSError, RecursionError) as error:
        with contextlib.suppress(OSError, RecursionError):
            shutil.rmtree(path, ignore_errors=True)
        # Another process may clean up, too.
        return [error] if os.path.lexists(path) else []
    return []
