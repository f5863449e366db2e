"""Work in a process of another PID namespace, as in another container of this machine."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

#: Of Linux's sched.h and mount.h.
NEW_MOUNTS, NEW_PIDS, PRIVATE = 0x00020000, 0x20000000, (1 << 18) | (1 << 14)
#: Seconds after which what should have come has not.
LIMIT = 60


def needed() -> None:
    """Skip where the kernel permits no containers; the reason is loud, as nothing else tries what they do."""
    child = os.fork()
    if not child:
        os._exit(0 if ctypes.CDLL(None).unshare(NEW_PIDS | NEW_MOUNTS) == 0 else 1)
    if os.waitpid(child, 0)[1]:
        pytest.skip("NOTHING OF CONTAINERS WAS TESTED: unshare of PID namespaces is not permitted (be root)")


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + LIMIT
    while not path.exists():
        assert time.monotonic() < deadline, f"no {path.name} in {LIMIT} s"
        time.sleep(0.01)


class Container:
    """A process that is the first of a PID namespace."""

    def __init__(self, work: Callable[[], Any], has_proc: bool = True) -> None:
        """`has_proc`: whether /proc is that of the namespace; else it is that of the machine."""
        reads, writes = os.pipe()
        self._outer = os.fork()
        if not self._outer:
            os.close(reads)
            os.setpgid(0, 0)
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.unshare(NEW_PIDS | NEW_MOUNTS):
                os._exit(70)
            inner = os.fork()
            if inner:
                os.close(writes)
                os._exit(os.waitstatus_to_exitcode(os.waitpid(inner, 0)[1]) & 255)
            try:
                libc.mount(b"none", b"/", None, PRIVATE, None)
                if has_proc and libc.mount(b"proc", b"/proc", b"proc", 0, None):
                    raise OSError(ctypes.get_errno(), "mount of /proc")
                result = True, work()
            except BaseException:
                result = False, traceback.format_exc()
            with os.fdopen(writes, "wb") as file:
                pickle.dump(result, file)
            os._exit(0)
        os.close(writes)
        self._reads = reads

    def result(self) -> Any:
        """Wait for the work, and return what it returned."""
        with os.fdopen(self._reads, "rb") as file:
            data = file.read()
        os.waitpid(self._outer, 0)
        assert data, "the container ended before its work"
        is_done, result = pickle.loads(data)
        assert is_done, result
        return result

    def kill(self) -> None:
        """Kill all processes of the container."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._outer, signal.SIGKILL)
        os.waitpid(self._outer, 0)
        os.close(self._reads)


def inside(work: Callable[[], Any], has_proc: bool = True) -> Any:
    """Do some work in a container of its own, and return its result."""
    return Container(work, has_proc).result()


@contextlib.contextmanager
def stopped_at(step: str, folder: Path) -> Iterator[None]:
    """Have the first step of a name write "came" into a folder, and wait for "go" there."""
    from torch_dcp_backport.publish import disk

    (folder / "came").unlink(missing_ok=True)
    (folder / "go").unlink(missing_ok=True)

    def stop(name: str) -> None:
        if name.startswith(step):
            disk.on_step = None
            (folder / "came").touch()
            wait_for(folder / "go")

    disk.on_step = stop
    try:
        yield
    finally:
        disk.on_step = None
