"""Marks of the process that writes or uploads a folder, and whether it still runs, here or elsewhere.

Runs on one rank. Must never import torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Optional

from torch_dcp_backport.publish import disk

OWNER = "owner.json"
#: Seconds without a change after which a folder of another machine counts as abandoned.
ABANDONED = 3600.0
#: How often within these seconds this process touches its marks.
TIMES = 6
_marks: set[Path] = set()
_lock = threading.Lock()


def mark(path: Path) -> None:
    """Write a mark of this process, a file in the folder that it works on."""
    owner = {"host": socket.gethostname(), "pid": os.getpid(), "started": started_at(os.getpid())}
    disk.publish(path, json.dumps(owner).encode(), is_synced=False)


def keep_young(path: Path) -> None:
    """Touch a mark now and then until it is gone, so that its folder does not look abandoned."""
    with _lock:
        is_first = not _marks
        _marks.add(path)
    if is_first:
        try:
            # A daemon: the process does not wait for it.
            threading.Thread(target=_touch, name="marks of folders in hand", daemon=True).start()
        except RuntimeError:
            # No thread can be started: the mark grows old.
            with _lock:
                _marks.clear()


def _touch() -> None:
    while True:
        time.sleep(ABANDONED / TIMES)
        with _lock:
            paths = tuple(_marks)
        gone = set()
        for path in paths:
            try:
                os.utime(path, follow_symlinks=False)
            except OSError:
                gone.add(path)
        with _lock:
            _marks.difference_update(gone)
            if not _marks:
                return


def is_alive(draft: Path, name: str = OWNER) -> bool:
    """Return whether a draft may still be written: its process runs here, or it changed not long ago.

    A draft without the mark of its owner is not: it gets its name with the mark.
    """
    if not os.path.lexists(draft / name):
        return False
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        owner = json.loads(disk.read_whole(draft / name))
        if owner["host"] == socket.gethostname():
            return bool(owner["started"] == started_at(int(owner["pid"])))
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
    """Return the start of a local process, in the kernel's ticks, as process ids are reused; None if dead."""
    with contextlib.suppress(OSError, IndexError):
        state, *facts = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        # Z and X: it has ended, and its parent has not collected it.
        return None if state in "ZX" else facts[18]
    with contextlib.suppress(OSError):
        os.kill(pid, 0)
        return ""
    return None
