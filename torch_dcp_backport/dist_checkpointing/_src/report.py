"""The records, bytes and seconds of the last save or load of this process.

Only counts: must never decide anything, and never talk to other ranks.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Optional

from torch_dcp_backport.dist_checkpointing._src.body import Output
from torch_dcp_backport.transfer import Tally

logger = logging.getLogger("torch_dcp_backport.dist_checkpointing")


@dataclass(frozen=True)
class StorageReport:
    """The record of one save or load, as this rank saw it.

    Args:
        operation: "save" or "load".
        records: the number of records that this rank wrote, or of which it read a part.
        nbytes: bytes that this rank wrote to, or asked of, files of records.
        files: the number of these files.
        seconds: phase -> seconds.
        blocked: seconds for which the caller waited.
        hidden: seconds for which the caller went on while a thread wrote.
    """

    operation: str
    records: int
    nbytes: int
    files: int
    seconds: Mapping[str, float]
    blocked: float = 0.0
    hidden: float = 0.0

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {value:.3f} s" for name, value in self.seconds.items())
        verb = "written to" if self.operation == "save" else "read from"
        what = f"{self.records} records, {self.nbytes} bytes {verb} {self.files} files"
        caller = f"; blocked {self.blocked:.3f} s, hidden {self.hidden:.3f} s" if self.hidden else ""
        return f"{self.operation}: {what}; {parts}{caller}"


class Clock:
    """The seconds for which the caller of a save or load waits, in one call or several."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.go_on()

    def go_on(self) -> None:
        self._began = time.perf_counter()

    def stop(self) -> float:
        """Return all seconds so far."""
        self.seconds += time.perf_counter() - self._began
        return self.seconds


_last: Optional[StorageReport] = None
_waited: contextvars.ContextVar[float] = contextvars.ContextVar("waited", default=0.0)


@contextlib.contextmanager
def waited(seconds: float) -> Iterator[None]:
    """Count so many seconds of waiting for threads into the reports of saves that end in this context."""
    token = _waited.set(seconds)
    try:
        yield
    finally:
        _waited.reset(token)


def close(
    tally: Tally, records: int, nbytes: int, files: int, blocked: float, behind: Optional[float] = None
) -> None:
    """Make a report of a call that ended well: it is the last report now.

    Args:
        blocked: seconds of the caller in the calls themselves.
        behind: seconds of a thread that wrote; None where the caller did.
    """
    global _last
    wait = 0.0 if behind is None else _waited.get()
    hidden = max((behind or 0.0) - wait, 0.0)
    _last = StorageReport(
        tally.operation, records, nbytes, files, dict(tally.seconds), blocked + wait, hidden
    )
    logger.info("%s", _last)


def close_save(tally: Tally, output: Output, blocked: float, behind: Optional[float] = None) -> None:
    """Make the report of a save, as `close` does, from this rank's output."""
    records = [*output.tensors, *output.objects]
    nbytes = sum(entry.length for entry in records)
    close(tally, len(records), nbytes, 1 if records else 0, blocked, behind)


def storage_report() -> Optional[StorageReport]:
    """Return the report of this process's last save or load that ended well; None before the first.

    It counts records and files. `transfer.last_report` counts what ranks sent to each other.

    Example:
        >>> import os, torch
        >>> from torch_dcp_backport import dist_checkpointing
        >>> os.mkdir("step_1")
        >>> weight = dist_checkpointing.ShardedTensor.from_rank_offsets("w", torch.arange(4))
        >>> dist_checkpointing.save({"w": weight, "step": 1}, "step_1")
        >>> report = dist_checkpointing.storage_report()
        >>> report.operation, report.records, report.nbytes >= 32  # 4 elements of 8 bytes
        ('save', 1, True)
    """
    return _last
