"""Whose process writes a folder, or uploads it, and whether that one still lives; on this machine or another.

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

OWNER = "owner.json"
#: Seconds without a change after which what another machine has in hand is taken for abandoned.
ABANDONED = 3600.0
#: How often within them what this process has in hand is made to look changed.
TIMES = 6
_marks: set[Path] = set()
_lock = threading.Lock()


def mark(path: Path) -> None:
    """Write that this process has a folder in hand, by a file in it."""
    owner = {"host": socket.gethostname(), "pid": os.getpid(), "started": started_at(os.getpid())}
    path.write_text(json.dumps(owner))


def keep_young(path: Path) -> None:
    """Touch a mark now and then, until it is gone: what changes nothing else for long is not abandoned."""
    with _lock:
        is_first = not _marks
        _marks.add(path)
    if is_first:
        try:
            # A daemon: nobody waits for it.
            threading.Thread(target=_touch, name="marks of folders in hand", daemon=True).start()
        except RuntimeError:
            # Without threads it grows old.
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
                os.utime(path)
            except OSError:
                gone.add(path)
        with _lock:
            _marks.difference_update(gone)
            if not _marks:
                return


def is_alive(draft: Path, name: str = OWNER) -> bool:
    """Whether a draft may still be written: its process of this machine runs, or it changed a while ago."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        owner = json.loads((draft / name).read_text())
        if owner["host"] == socket.gethostname():
            return bool(owner["started"] == started_at(owner["pid"]))
    return time.time() - last_change(draft) < ABANDONED


def last_change(folder: Path) -> float:
    return max(walk_times(folder), default=0.0)


def walk_times(folder: Path) -> Iterator[float]:
    for path in [folder, *folder.rglob("*")]:
        with contextlib.suppress(OSError):
            yield path.stat().st_mtime


def started_at(pid: int) -> Optional[str]:
    """When a process of this machine began, in the kernel's ticks: numbers of processes are used again."""
    with contextlib.suppress(OSError, IndexError):
        state, *facts = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        # Dead, and its parent has not asked.
        return None if state in "ZX" else facts[18]
    with contextlib.suppress(OSError):
        os.kill(pid, 0)
        return ""
    return None
