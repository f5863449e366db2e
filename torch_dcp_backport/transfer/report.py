"""What the last transfer of this process moved, and how long each part of it took.

Only counts: must never decide anything, and never talk to other ranks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Optional

from torch_dcp_backport.transfer import settings
from torch_dcp_backport.transfer.progress import Meter

logger = logging.getLogger("torch_dcp_backport.transfer")


@dataclass(frozen=True)
class Report:
    """One transfer, as this rank saw it."""

    #: "scatter" (load from rank 0), "gather" (save), "slice" (load of a dict on every rank), "reshard",
    #: "fill" (from files) or "collect" (to files).
    operation: str
    #: Tensors that this rank received, or gave.
    tensors: int
    #: Bytes of tensors that this rank handed to the backend and got from it, without padding.
    bytes_sent: int
    bytes_received: int
    #: Buffers of tensors that this rank handed to the backend and got from it.
    chunks: int
    #: Chunks per receiver, the most that anyone needs. Grows with bytes / budget, not with the tensors.
    rounds: int
    #: Peak bytes of this rank's staging buffers, and the budget that all ranks agreed on.
    staging_bytes: int
    staging_budget: int
    #: phase -> seconds: "inventory" (what the source has), "agree" (what all want), "prepare"
    #: (memory), "move".
    seconds: Mapping[str, float]

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {value:.3f} s" for name, value in self.seconds.items())
        return (
            f"{self.operation}: {self.tensors} tensors, sent {self.bytes_sent} and received "
            f"{self.bytes_received} bytes in {self.chunks} chunks and {self.rounds} rounds, "
            f"staging {self.staging_bytes} of {self.staging_budget} bytes; {parts}"
        )


REPORTED = tuple(one.name for one in fields(Report))


@dataclass
class Tally:
    """A report while it grows."""

    operation: str
    tensors: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    chunks: int = 0
    rounds: int = 0
    staging_bytes: int = 0
    staging_budget: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.meter = Meter(self.operation, settings.progress())

    def sent(self, nbytes: int) -> None:
        self.bytes_sent += nbytes
        self.chunks += 1
        self.meter.add(nbytes)

    def received(self, nbytes: int) -> None:
        self.bytes_received += nbytes
        self.chunks += 1
        self.meter.add(nbytes)

    def phase(self, name: str) -> Phase:
        return Phase(self.seconds, name)

    def close(self) -> None:
        """The transfer ended well: this is the last report now."""
        global _last
        _last = Report(*[getattr(self, name) for name in REPORTED])
        logger.info("%s", _last)


class Phase:
    """Counts the seconds of a part of a transfer. No generator: small loads feel what those cost."""

    def __init__(self, seconds: dict[str, float], name: str) -> None:
        self.seconds = seconds
        self.name = name

    def __enter__(self) -> None:
        self.start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        spent = time.perf_counter() - self.start
        self.seconds[self.name] = self.seconds.get(self.name, 0.0) + spent


_last: Optional[Report] = None


def last_report() -> Optional[Report]:
    """The report of this process's last transfer that ended well; None before the first.

    A call that moves model and optimizer, or tensors on several meshes, makes several transfers.
    """
    return _last
