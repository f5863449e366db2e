"""What the last save or load of this process wrote or read, and how long each part of it took.

Only counts: must never decide anything, and never talk to other ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Optional

from torch_dcp_backport.dist_checkpointing.engine.writer import Output
from torch_dcp_backport.transfer.report import Tally

logger = logging.getLogger("torch_dcp_backport.dist_checkpointing")


@dataclass(frozen=True)
class Report:
    """One save or load, as this rank saw it."""

    #: "save" or "load".
    operation: str
    #: Records that this rank wrote, or of which it read a part.
    records: int
    #: Bytes that it wrote to, or asked of, files of records.
    nbytes: int
    files: int
    #: phase -> seconds.
    seconds: Mapping[str, float]

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {value:.3f} s" for name, value in self.seconds.items())
        verb = "written to" if self.operation == "save" else "read from"
        what = f"{self.records} records, {self.nbytes} bytes {verb} {self.files} files"
        return f"{self.operation}: {what}; {parts}"


_last: Optional[Report] = None


def close(tally: Tally, records: int, nbytes: int, files: int) -> None:
    """The call ended well: this is the last report now."""
    global _last
    _last = Report(tally.operation, records, nbytes, files, dict(tally.seconds))
    logger.info("%s", _last)


def close_save(tally: Tally, output: Output) -> None:
    """As `close`, of what this rank wrote."""
    records = [*output.tensors, *output.objects]
    close(tally, len(records), sum(entry.length for entry in records), 1 if records else 0)


def last_report() -> Optional[Report]:
    """The report of this process's last save or load that ended well; None before the first."""
    return _last
