"""Folders that are made out of readers' sight: each takes the place of its target, or goes.

Runs on one process. Between any two steps the target is as it was, hidden as a whole, or new.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Optional, Union

from torch_dcp_backport.publish import disk

# --- marks of processes ---
#
# Runs on one rank. Must never import torch.


OWNER = "owner.json"
#: Seconds without a change after which a folder counts as abandoned whose process cannot be known to live.
ABANDONED = 3600.0
#: How often within these seconds this process touches its marks.
TIMES = 6
#: The kernel's own id of this start of the machine; the same in all containers of a host.
BOOT = Path("/proc/sys/kernel/random/boot_id")
#: Errors of file systems without locks (Lustre without `-o flock`, NFS without a lock daemon).
NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


class Mark:
    """The mark of this process, a file in the folder that it works on, with its name and a lock of its own.

    The lock is the kernel's: it is seen from every container of the host, and ends with the process. Neither
    a process id of another PID namespace nor a host name, which containers may share, says as much.
    """

    def __init__(self, path: Path) -> None:
        """Write the mark, and keep it young until it is released.

        Raises:
            OSError: it cannot be written.
        """
        self._process = os.getpid()
        new = path.with_name(f"{path.name}.new")
        disk.step(f"write {path.name}")
        fd = disk.create(new)
        try:
            # Before the mark has its name: no other process finds it without its lock.
            seen, is_locked = os.fstat(fd), _locked(fd)
            owner = Owner(
                socket.gethostname(),
                self._process,
                started_at(self._process),
                boot(),
                pid_namespace(),
                (seen.st_dev, seen.st_ino) if is_locked else None,
            )
            disk.write_all(fd, json.dumps(owner._asdict()).encode(), 0)
            disk.step(f"rename {path.name}")
            os.replace(new, path)
        except BaseException:
            disk.close_own(fd)
            raise
        self._fd: Optional[int] = fd
        _keep_young(self)

    def touch(self) -> None:
        """Set the time of the file to now, whatever its folder's name is by now."""
        fd = self._fd
        if fd is not None:
            with contextlib.suppress(OSError):
                os.utime(fd)

    def release(self) -> None:
        """Give up the lock, and let the mark grow old. Does nothing a second time, or after a fork."""
        with _lock:
            _held.discard(self)
        fd, self._fd = self._fd, None
        if fd is not None and self._process == os.getpid():
            with contextlib.suppress(OSError):
                # Also for a process that is being forked at this moment.
                fcntl.flock(fd, fcntl.LOCK_UN)
            disk.close_own(fd)


_held: set[Mark] = set()
#: Whether a thread touches them; it ends once there are none when it looks.
_is_touching = False
_lock = threading.Lock()


def _leave_marks() -> None:
    """Leave the marks to the parent, in a process that was forked; it may make marks of its own."""
    global _is_touching, _lock
    _held.clear()
    _is_touching = False
    # Another thread of the parent may have had it.
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_leave_marks)


def _keep_young(mark: Mark) -> None:
    global _is_touching
    with _lock:
        is_first, _is_touching = not _is_touching, True
        _held.add(mark)
    if is_first:
        try:
            # A daemon: the process does not wait for it.
            threading.Thread(target=_touch, name="marks of folders in hand", daemon=True).start()
        except RuntimeError:
            # No thread can be started: the marks grow old, until the next one.
            with _lock:
                _is_touching = False


def _touch() -> None:
    global _is_touching
    while True:
        time.sleep(ABANDONED / TIMES)
        with _lock:
            marks = tuple(_held)
        for mark in marks:
            mark.touch()
        with _lock:
            if not _held:
                _is_touching = False
                return


class Owner(NamedTuple):
    """The content of a mark. Releases up to 0.1 wrote and read the first three alone."""

    host: str
    pid: int
    started: Optional[str]
    boot: str = ""
    pid_namespace: str = ""
    #: (device, inode) of the mark, if the process has it locked.
    locked: Optional[tuple[int, int]] = None

    def is_running(self) -> Optional[bool]:
        """Return whether the process runs; None where this process cannot tell by its id."""
        is_here = self.host == socket.gethostname()
        if self.started is None or not is_here:
            return None
        now = started_at(self.pid)
        if now == "" != self.started:
            # It runs, as another user's, and since when is hidden.
            return None
        is_same = self.started == now
        if not self.boot:
            # An older release's: its id may be one of another PID namespace. Then its absence says nothing.
            return is_same or None
        is_comparable = (self.boot, self.pid_namespace) == (boot(), pid_namespace())
        return is_same if is_comparable and self.pid_namespace else None

    def is_locking(self, path: Path) -> Optional[bool]:
        """Return whether the process has its mark locked; None where that cannot be known."""
        try:
            fd = disk.opened(path)
        except OSError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return None
        else:
            seen = os.fstat(fd)
            # Under another kernel, or through another mount of a network's disk, a lock may not be seen.
            is_seen = bool(self.boot) and self.boot == boot() and self.locked == (seen.st_dev, seen.st_ino)
            return False if is_seen else None
        finally:
            os.close(fd)


def _locked(fd: int) -> bool:
    """Lock a file; return False on a file system that has no locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def boot() -> str:
    """Return the id of this start of the machine; "" where the kernel does not tell."""
    try:
        return BOOT.read_text().strip()
    except OSError:
        return ""


def pid_namespace() -> str:
    """Return the namespace that this process's id is of; "" where /proc is absent, or another namespace's."""
    try:
        is_own = os.readlink("/proc/self") == str(os.getpid())
        return os.readlink("/proc/self/ns/pid") if is_own else ""
    except OSError:
        return ""


def owner_of(path: Path) -> Optional[Owner]:
    """Return the content of a mark; None where it cannot be read."""
    # What another program put there may be any JSON.
    with contextlib.suppress(
        OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, ArithmeticError
    ):
        said = json.loads(disk.read_whole(path))
        locked, pid = said.get("locked"), int(said["pid"])
        if not 0 < pid < 2**31:
            return None
        return Owner(
            str(said["host"]),
            pid,
            None if said["started"] is None else str(said["started"]),
            str(said.get("boot", "")),
            str(said.get("pid_namespace", "")),
            None if locked is None else (int(locked[0]), int(locked[1])),
        )
    return None


def is_alive(draft: Path, name: str = OWNER) -> bool:
    """Return whether a draft may still be written. What cannot be proved to be dead is alive.

    A process of the same PID namespace is known by its id, one of another container of the same host by the
    lock on its mark. Where neither tells (another machine, another start of this one, a file system without
    locks), a draft is alive that has changed not long ago.

    A draft without the mark of its owner is not: it gets its name with the mark.
    """
    path = draft / name
    if not os.path.lexists(path):
        return False
    owner = owner_of(path)
    if owner is not None:
        answers = (ask() for ask in (owner.is_running, lambda: owner.is_locking(path)))
        for is_known in answers:
            if is_known is not None:
                return is_known
    return time.time() - last_change(draft) < ABANDONED


def last_change(folder: Path) -> float:
    return max(walk_times(folder), default=0.0)


def walk_times(folder: Path) -> Iterator[float]:
    for place, entries in disk.walk(folder):
        paths = [str(place), *(entry.path for entry in entries)]
        for path in paths:
            with contextlib.suppress(OSError):
                yield os.lstat(path).st_mtime


def started_at(pid: int) -> Optional[str]:
    """Return the start of a local process, in the kernel's ticks, as process ids are reused.

    None if it is dead; "" if it runs, and its start is hidden.
    """
    with contextlib.suppress(OSError, IndexError):
        state, *facts = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        # Z and X: it has ended, and its parent has not collected it.
        return None if state in "ZX" else facts[18]
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except OSError:
        # Not this user's.
        pass
    return ""


# --- drafts ---


class Move(NamedTuple):
    source: Path
    target: Path
    #: What it does, as `disk.step` names it.
    doing: str = "rename"


def rename_all(moves: Sequence[Move]) -> None:
    """Rename in order, all or none.

    Raises:
        OSError: a rename failed; those before are undone, as far as possible.
    """
    done: list[Move] = []
    try:
        for move in moves:
            disk.step(move.doing)
            os.rename(move.source, move.target)
            done.append(move)
    except BaseException:
        for move in reversed(done):
            with contextlib.suppress(OSError):
                os.rename(move.target, move.source)
        raise


class Draft:
    """A folder that no reader looks for, until it takes the place of its target."""

    def __init__(self, folder: Path, target: Path) -> None:
        self.folder = folder
        self.target = target

    def sync(self, synced: Collection[str] = ()) -> None:
        """Put everything in the folder on disk, but for files that are, by their paths in it.

        Raises:
            OSError: the disk failed.
        """
        disk.sync_tree(self.folder, synced)

    def take_place(self, aside: Optional[Path] = None) -> None:
        """Give the folder its target's name, from which on readers see it. The name is not synced yet.

        Args:
            aside: the name for what is at the target; None where there is nothing, or an empty folder.

        Raises:
            OSError: the target is as it was.
        """
        moves = [Move(self.folder, self.target, "rename the draft")]
        if aside is not None:
            moves.insert(0, Move(self.target, aside, "rename the folder that is replaced"))
        rename_all(moves)

    def discard(self) -> object:
        """Remove the folder with all that was written into it; do nothing where it took its place.

        Raises:
            OSError: something cannot be removed.
        """
        raise NotImplementedError


@contextlib.contextmanager
def discarding(draft: Optional[Draft]) -> Iterator[None]:
    """Discard a draft on an error, as far as possible.

    Args:
        draft: None on ranks that did not make it.
    """
    try:
        yield
    except BaseException:
        if draft is not None:
            with contextlib.suppress(OSError):
                draft.discard()
        raise


# --- hidden drafts ---
#
# Several processes may write drafts of one target, on any machines: the first that is done takes its
# place.

#: A hidden folder: being written (tmp), a draft that was given up (off), replaced by the same step (was),
#: being removed (old).
HIDDEN = re.compile(r"\.(?P<name>.+)\.(?P<kind>tmp|off|was|old)-[0-9a-f]{8}", re.DOTALL)
#: How often a draft is made, where other processes clean up at the same moment.
ATTEMPTS = 20


def hidden_name(path: Path, kind: str) -> Path:
    """Return a new hidden name beside a path."""
    return path.with_name(f".{path.name}.{kind}-{secrets.token_hex(4)}")


def as_kind(hidden: Path, kind: str) -> Path:
    """Return the name that a hidden folder has as another kind."""
    at = hidden.name.rindex("-")
    return hidden.with_name(f"{hidden.name[: at - 3]}{kind}{hidden.name[at:]}")


def make_hidden(target: Path) -> tuple[Path, Mark]:
    """Make the hidden folder of a new draft, with the mark of this process; return both.

    Raises:
        OSError: it cannot be made.
    """
    for attempt in range(ATTEMPTS):
        draft, nameless = hidden_name(target, "tmp"), hidden_name(target, "old")
        mark: Optional[Mark] = None
        disk.step(f"make {draft.name[-12:]}")
        try:
            # Another process may have removed it, as it was empty.
            make_parents(target)
            # Until it has an owner, its name allows any process to remove it.
            nameless.mkdir()
            mark = Mark(nameless / OWNER)
            disk.step(f"name {draft.name[-12:]}")
            os.rename(nameless, draft)
            # A clean-up that took it for nameless may have removed the mark by now.
            os.lstat(draft / OWNER)
            return draft, mark
        except BaseException as error:
            if mark is not None:
                mark.release()
            if isinstance(error, OSError):
                for folder in (nameless, draft):
                    remove_if_empty(folder)
            if not isinstance(error, FileNotFoundError) or attempt == ATTEMPTS - 1:
                raise
            # Another process cleaned up meanwhile.
    raise AssertionError("the last attempt returned or raised")


def make_parents(path: Path) -> None:
    """Make the missing folders above a path, and put their names on disk."""
    absent = [folder for folder in path.parents if not os.path.exists(folder)]
    path.parent.mkdir(parents=True, exist_ok=True)
    for folder in absent:
        disk.sync_folder(folder.parent)


def remove_if_empty(hidden: Path) -> bool:
    """Remove a folder that holds empty folders and the mark of its owner alone; return whether it is gone."""
    if os.path.islink(hidden):
        return False
    for place, entries in reversed(list(disk.walk(hidden))):
        names = {entry.name for entry in entries if not entry.is_dir(follow_symlinks=False)}
        with contextlib.suppress(OSError):
            if place == hidden and not names - {OWNER, f"{OWNER}.new"}:
                disk.remove([hidden / name for name in names])
            os.rmdir(place)
    return not os.path.lexists(hidden)


class DraftGone(FileNotFoundError):
    """Another process removed a draft while this process wrote into it."""


class Hidden(Draft):
    """A draft that `make_hidden` made, in this process or another."""

    def __init__(self, folder: Path, target: Path, mark: Optional[Mark] = None) -> None:
        """`mark`: of this process; None for a draft that another process left."""
        super().__init__(folder, target)
        self.mark = mark

    def check(self) -> None:
        """Find out whether the draft is still there.

        Raises:
            DraftGone: another process removed it, or took its mark away.
        """
        if self.mark is not None and not os.path.lexists(self.folder / OWNER):
            raise DraftGone(
                f"{self.folder}, the draft of {self.target.name}, is gone: another process removed it while "
                "it was written here. A save or a `checkpoint prune` of this release leaves alone what a "
                "process has locked; one of an older release, in another container or on another machine, "
                "may have removed it, or a program that deletes hidden or temporary files"
            )

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """Have an error say that the draft is gone, where it is: any file in it is missing then.

        Raises:
            DraftGone: as `check`.
        """
        try:
            yield
        except Exception:
            self.check()
            raise

    def release(self) -> None:
        """Be done with the draft, which has taken its place or is given up."""
        if self.mark is not None:
            self.mark.release()

    def discard(self) -> list[str]:
        """Give up the draft, and remove it with all that was written into it, as far as possible.

        Its name says first that it is not being written: else its owner's mark would have to say so until it
        is gone. The mark goes last, and stays while anything else does: it is the proof that the draft is
        ours.

        Returns:
            Why parts of it are still there.
        """
        try:
            return self._removed()
        finally:
            self.release()

    def _removed(self) -> list[str]:
        if os.path.islink(self.folder):
            # What it leads to is nobody's draft.
            return [f"{self.folder} is a link"]
        hidden = as_kind(self.folder, "off")
        try:
            disk.step(f"give up {self.folder.name[-12:]}")
            if hidden != self.folder:
                os.rename(self.folder, hidden)
        except FileNotFoundError:
            return []
        except OSError:
            hidden = self.folder
        try:
            parts = [part for part in sorted(hidden.iterdir()) if part.name != OWNER]
        except FileNotFoundError:
            return []
        except OSError as error:
            return [str(error)]
        failures = [failure for part in parts for failure in disk.remove_whole(part)]
        return list(map(str, failures or disk.remove_whole(hidden / OWNER) or disk.remove_whole(hidden)))


# --- folders written in place ---
#
# For folders whose name readers and writers share from the start. Between any two steps the folder is
# nothing to readers, or complete.


def unmark(folder: Path, markers: Sequence[str]) -> None:
    """Take away the files by which readers know the folder, one after the other.

    Raises:
        OSError: one of them cannot be removed.
    """
    for name in markers:
        disk.step(f"remove {name}")
        disk.remove([folder / name])
        disk.sync_folder(folder)


def publish(
    folder: Path, small: Mapping[str, Union[bytes, disk.Pieces]], marker: str, markers: Sequence[str]
) -> None:
    """Write the small files of a folder whose other files are on disk; the marker once all of them are, too.

    Args:
        small: name -> content, or pieces of it, in order; `marker` is one of them.
        markers: as of `unmark`.

    Raises:
        OSError: the folder is unmarked, if the disk allows that.
    """
    try:
        for name, content in small.items():
            if name != marker:
                disk.publish(folder / name, content)
        disk.step("sync folder")
        disk.sync_folder(folder)
        disk.publish(folder / marker, small[marker])
        disk.step("sync marker")
        disk.sync_folder(folder)
        disk.step("done")
    except Exception:
        # Other writers remove their files when they hear of it: no marker may be left by then.
        with contextlib.suppress(OSError):
            unmark(folder, markers)
        raise


# --- drafts under a lock ---
#
# The lock ends with its process; the next one clears away what that left.

LOCK, NEW, OLD = ".lock", "new", "old"


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
            lock = disk.open_own(path / LOCK, os.O_RDWR | os.O_CREAT | exclusive, 0o600)
        except FileExistsError:
            raise busy(target, path) from None
        try:
            take(lock, is_first)
            # The lock of an export that ended just now is no longer there.
            is_mine = os.path.samestat(os.fstat(lock), os.stat(path / LOCK))
        except OSError as error:
            disk.close_own(lock)
            if error.errno in NO_LOCKS:
                what = (
                    f"{path} is of an export that is under way, or was killed: this file system has no locks"
                )
                raise BlockingIOError(f"{what}; remove it if there is none") from None
            if not isinstance(error, (BlockingIOError, FileNotFoundError)):
                raise
            raise busy(target, path) from None
        if not is_mine:
            disk.close_own(lock)
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
            disk.close_own(self._lock)
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
