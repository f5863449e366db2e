"""Drafts in a hidden folder of a fixed name, which one process at a time works in, under a lock.

The lock ends with its process; the next one clears away what that left.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Optional

from torch_dcp_backport.publish import disk
from torch_dcp_backport.publish.drafts import Draft

LOCK, NEW, OLD = ".lock", "new", "old"
#: Errors of file systems without locks (Lustre without `-o flock`, NFS without a lock daemon).
NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


class Room:
    """A hidden folder that a single process at a time works in.

    Its lock ends with the process; on a file system without locks the first to make the file has it.
    """

    def __init__(self, path: Path, target: Path, kept: Collection[str] = ()) -> None:
        """Make and lock the folder, and clear away what a dead process left behind.

        Args:
            kept: names of entries that stay.

        Raises:
            BlockingIOError: another process has it, for an export into the target.
            FileExistsError: no export made the folder of this name.
            OSError: the folder cannot be made or cleared.
        """
        self.path = path
        if path.is_symlink():
            raise FileExistsError(f"{path} is a link, and in the way: remove it")
        path.mkdir(exist_ok=True)
        names = os.listdir(path)
        if names and LOCK not in names:
            raise FileExistsError(f"{path} is in the way, and no export made it: remove it")
        is_first = not (path / LOCK).exists()
        exclusive = os.O_EXCL if is_first else 0
        try:
            lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | exclusive, 0o600)
        except FileExistsError:
            raise busy(target, path) from None
        try:
            take(lock, is_first)
            # The lock of an export that ended just now is no longer there.
            is_mine = os.path.samestat(os.fstat(lock), os.stat(path / LOCK))
        except OSError as error:
            os.close(lock)
            if error.errno in NO_LOCKS:
                what = (
                    f"{path} is of an export that is under way, or was killed: this file system has no locks"
                )
                raise BlockingIOError(f"{what}; remove it if there is none") from None
            if not isinstance(error, (BlockingIOError, FileNotFoundError)):
                raise
            raise busy(target, path) from None
        if not is_mine:
            os.close(lock)
            raise busy(target, path)
        self._lock: Optional[int] = lock
        try:
            self._clear((LOCK, *kept))
        except BaseException:
            # The next export clears away what is left, if it can.
            self._unlock()
            raise

    def leave(self, is_kept: bool = False) -> None:
        """Remove the folder. Does nothing a second time.

        Args:
            is_kept: whether what was taken out of the target stays, for a later export to put back.

        Raises:
            OSError: something in it cannot be removed; the folder can be locked again.
        """
        if self._lock is None:
            return
        try:
            self._clear((LOCK, OLD) if is_kept else (LOCK,))
            if not is_kept:
                (self.path / LOCK).unlink()
        finally:
            self._unlock()
        with contextlib.suppress(OSError):
            # Another export may be in it already.
            self.path.rmdir()

    def _clear(self, kept: Collection[str]) -> None:
        others = [path for path in self.path.iterdir() if path.name not in kept]
        for failure in [failure for path in others for failure in disk.remove_whole(path)]:
            raise failure

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def take(lock: int, is_first: bool) -> None:
    """Take a lock; on a file system without locks it belongs to the process that made its file.

    Raises:
        OSError: another process has it, or may have it.
    """
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in NO_LOCKS or not is_first:
            raise


def busy(target: Path, room: Path) -> BlockingIOError:
    return BlockingIOError(f"another export into {target} is under way, or ended just now ({room})")


class InRoom(Draft):
    """A draft in a room; beside it the room has a place for what it replaces."""

    def __init__(self, path: Path, target: Path, check: Callable[[], None]) -> None:
        """Make the room and the folder in it.

        Args:
            check: called once the room is locked: before that, another process may have changed the target.

        Raises:
            BlockingIOError, FileExistsError, OSError: as `Room`; nothing is left of it.
        """
        self.room = Room(path, target, (OLD,))
        super().__init__(path / NEW, target)
        self.aside = path / OLD
        self._is_in_place = False
        try:
            self.restore()
            check()
            self.folder.mkdir()
        except BaseException:
            self.leave()
            raise

    def restore(self) -> None:
        """Put back what a dead process took out of the target; where that is there again, remove it.

        Raises:
            OSError: it cannot be put back, or removed.
        """
        if not os.path.lexists(self.target) and os.path.lexists(self.aside):
            os.rename(self.aside, self.target)
        for failure in disk.remove_whole(self.aside) if os.path.lexists(self.aside) else ():
            raise failure

    def take_place(self, aside: Optional[Path] = None) -> None:
        super().take_place(aside)
        self._is_in_place = True

    def is_old_needed(self) -> bool:
        """Return whether what was taken out of the target is there alone, for a later draft to put back."""
        return not self._is_in_place and os.path.lexists(self.aside)

    def leave(self) -> None:
        """Remove the room, as far as possible; the next draft clears away the rest."""
        with contextlib.suppress(OSError):
            self.discard()

    def discard(self) -> None:
        self.room.leave(self.is_old_needed())
