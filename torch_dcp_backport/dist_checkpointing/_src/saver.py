"""The process that writes a rank's file beside the training, so that no Python of it runs there.

It reads the rank's copies in shared memory, and writes through the trainer's own descriptor. It is started
for a save and ends with it. A save must never need it: whatever becomes of it, the trainer's thread still has
the copies, and writes them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import socket
import sys
import weakref
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Optional

from torch_dcp_backport.dist_checkpointing._src.body import Output, write_staged
from torch_dcp_backport.dist_checkpointing._src.messages import FAILED, MESSAGE, MOVED, ORDER, Order
from torch_dcp_backport.dist_checkpointing._src.staged import Staged
from torch_dcp_backport.dist_checkpointing._src.writer import hashed, new_file
from torch_dcp_backport.transfer import warn_once

logger = logging.getLogger("torch_dcp_backport.dist_checkpointing")

VARIABLE = "TORCH_DCP_BACKPORT_SAVER"
PROCESS, THREAD = "process", "thread"
#: How the names of Python's programs begin.
INTERPRETERS = "python", "pypy"
PROGRAM = Path(__file__).with_name("saver_process.py")


def choice() -> str:
    """Return who writes saves in the background: what the environment says, or a process.

    Raises:
        ValueError: the environment says something else.
    """
    text = os.environ.get(VARIABLE, "").strip().lower() or PROCESS
    if text not in (PROCESS, THREAD):
        raise ValueError(
            f"{VARIABLE}={os.environ[VARIABLE]!r} is neither {PROCESS} (or unset) nor {THREAD}: it "
            "says which of them writes saves in the background"
        )
    return text


def write(
    path: Path,
    staged: Staged,
    objects: Sequence[bytes],
    moved: Callable[[int], None],
    verify_integrity: bool = False,
    by_process: bool = True,
    stop: Optional[Stop] = None,
) -> Output:
    """Write staged records as `writer.write` does.

    Args:
        by_process: write in a process, if other processes may read the memory.
        stop: set by a caller that no longer waits.

    Raises:
        OSError: as of `writer.write`.
        Stopped: the caller no longer waits.
    """
    stop = stop or Stop()
    stop.check()
    output = Output(path.name, staged.length + sum(map(len, objects)), [], [])
    if not output.nbytes:
        return output
    with new_file(path, output.nbytes) as fd:
        counted = _Counted(moved, stop)
        output = _written(fd, staged, objects, counted, output, by_process and staged.is_shared)
        return hashed(output, path) if verify_integrity else output


def _written(
    fd: int, staged: Staged, objects: Sequence[bytes], counted: _Counted, output: Output, by_process: bool
) -> Output:
    """Write by a process, or here: also where the process does not get to the end of it."""
    if by_process:
        order = Order(staged.memory.nbytes, staged.places, objects, output)
        try:
            with contextlib.closing(_Process()) as process, counted.stop.ending(process):
                process.order(order, staged.memory.fd, fd)
                return process.wait(counted.add)
        except _Gone as error:
            counted.stop.check()
            text = f"the process that writes saves in the background {error}: a thread writes"
            # By chance the same end is a broken pipe or a connection that is reset.
            about = "has ended" if str(error).startswith("has ended") else str(error)
            warn_once(logger, text, about=about)
        counted.begin_again()
    return write_staged(fd, staged.memory.view, staged.places, objects, counted.add, output)


class Stopped(Exception):
    """No caller waits any longer for what was being written."""


class Stop:
    """A caller's word that it no longer waits for a file.

    The process that writes it is ended, and a thread ends at its next block.
    """

    def __init__(self) -> None:
        self.is_set = False
        self._process: Optional[_Process] = None

    def set(self) -> str:
        """Say so; return which process was ended, "" where a thread was writing."""
        self.is_set = True
        process = self._process
        return "" if process is None else process.end()

    def check(self) -> None:
        """Go on only while the caller waits.

        Raises:
            Stopped: it does not.
        """
        if self.is_set:
            raise Stopped("the wait for it is over")

    @contextlib.contextmanager
    def ending(self, process: _Process) -> Iterator[None]:
        """Have `set` end a process in the context."""
        self._process = process
        try:
            self.check()
            yield
        finally:
            self._process = None


class _Counted:
    """Tells the bytes that were written, each of them once, also where they are written again."""

    def __init__(self, moved: Callable[[int], None], stop: Stop) -> None:
        self._moved = moved
        self.stop = stop
        self._reported = self._again = 0

    def begin_again(self) -> None:
        self._again = self._reported

    def add(self, nbytes: int) -> None:
        self.stop.check()
        new = max(nbytes - self._again, 0)
        self._again -= nbytes - new
        self._reported += new
        if new:
            self._moved(new)


class _Gone(Exception):
    """The process could not be started, or has ended; how."""


class _Process:
    """A process that was started for one order."""

    def __init__(self) -> None:
        if getattr(sys, "frozen", False) or not Path(sys.executable or "").name.startswith(INTERPRETERS):
            # A program that has Python in it would start once more.
            raise _Gone(f"cannot be started ({sys.executable or 'nothing'} is no Python interpreter)")
        try:
            self._door, theirs = socket.socketpair()
        except OSError as error:
            raise _Gone(f"cannot be reached ({error})") from error
        _ends.update((self._door, theirs))
        with theirs:
            try:
                # Neither a fork of this process nor its environment of Python: a bare interpreter. In a group
                # of its own, as a Ctrl-C is for the training.
                self._pid = os.posix_spawn(
                    sys.executable,
                    [sys.executable, "-I", "-S", "-B", str(PROGRAM), str(PROGRAM.parents[2])],
                    os.environ,
                    file_actions=[(os.POSIX_SPAWN_DUP2, theirs.fileno(), 0)],
                    setpgroup=0,
                    setsigmask=(),
                    setsigdef=(signal.SIGINT, signal.SIGTERM),
                )
            except Exception as error:
                # Also of an environment that another thread changes, or of an audit hook that forbids it.
                self._door.close()
                raise _Gone(f"cannot be started ({error})") from error
        # Now: if the program takes the status of its processes, the number may be another one's later.
        self._handle: Optional[int] = None
        with contextlib.suppress(OSError, AttributeError):
            self._handle = os.pidfd_open(self._pid)

    def end(self) -> str:
        """Kill the process, if the kernel can do so without mistaking it; return its number in words."""
        with contextlib.suppress(OSError):
            # Our own end may be in a call: the other end, if it runs, hears of this.
            self._door.shutdown(socket.SHUT_RDWR)
        if self._handle is None:
            return f"process {self._pid}, which could not be ended"
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)
        return f"process {self._pid}, which was killed"

    def order(self, order: Order, *fds: int) -> None:
        data = pickle.dumps(order)
        try:
            # Without a signal, which ends a program that has set SIGPIPE to its default.
            rights = socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds)
            self._door.sendmsg([MESSAGE.pack(ORDER, len(data))], [rights], socket.MSG_NOSIGNAL)
            self._door.sendall(data, socket.MSG_NOSIGNAL)
        except OSError as error:
            raise _Gone(f"has ended ({error})") from error

    def wait(self, moved: Callable[[int], None]) -> Output:
        """Return what was written.

        Raises:
            OSError: the process could not write.
        """
        while True:
            kind, number = MESSAGE.unpack(self._read(MESSAGE.size))
            if kind == MOVED:
                moved(number)
                continue
            answer = pickle.loads(self._read(number))
            if kind == FAILED:
                raise OSError(*answer)
            assert isinstance(answer, Output)
            return answer

    def _read(self, nbytes: int) -> bytes:
        data = bytearray()
        while len(data) < nbytes:
            try:
                part = self._door.recv(nbytes - len(data))
            except OSError as error:
                raise _Gone(f"has ended ({error})") from error
            if not part:
                raise _Gone("has ended before its work")
            data += part
        return bytes(data)

    def close(self) -> None:
        """Wait until the process has ended: it must not write any more when the thread does."""
        # Without a listener it ends. A signal could meet another process that has its number now, if the
        # program has taken its status.
        with contextlib.suppress(OSError):
            # Also where a process that the program forks at this moment has the door as well.
            self._door.shutdown(socket.SHUT_RDWR)
        self._door.close()
        with contextlib.suppress(OSError):
            os.waitpid(self._pid, 0)
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


#: Both ends of what this process has open to others.
_ends: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _after_fork() -> None:
    """Close them in a process that the program forked: neither side would see that the other has ended."""
    for end in list(_ends):
        end.close()
    _ends.clear()


os.register_at_fork(after_in_child=_after_fork)
