"""Bytes, chunks and seconds of the last transfer of this process.

Only counts: must never decide anything, and never talk to other ranks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Optional

from torch_dcp_backport.transfer._src import settings
from torch_dcp_backport.transfer._src.settings import Meter

logger = logging.getLogger("torch_dcp_backport.transfer")


@dataclass(frozen=True)
class Report:
    """The record of one transfer, as this rank saw it.

    Args:
        operation: "scatter" (load from rank 0), "gather" (save), "slice" (load of a dict on every rank),
            "reshard", "fill" (from files) or "collect" (to files).
        tensors: the number of tensors that this rank received, or gave.
        bytes_sent: bytes of tensors that this rank handed to the backend, without padding.
        bytes_received: bytes of tensors that this rank got from the backend, without padding.
        chunks: the number of buffers of tensors that this rank handed to the backend and got from it.
        rounds: the largest number of chunks of any receiver. It grows with bytes / budget, not with the
            number of tensors.
        peers_sent: the number of ranks that this rank sent point-to-point messages with tensors to. Backends
            of accelerators keep memory for each, outside torch's allocator; loads and gets there have none.
        peers_received: the number of ranks that this rank got such messages from.
        staging_bytes: the most bytes that this rank's staging buffers had.
        staging_budget: the budget in bytes that all ranks agreed on.
        seconds: phase -> seconds: "inventory" (what the source has), "agree" (what all want), "prepare"
            (memory), "move".
    """

    operation: str
    tensors: int
    bytes_sent: int
    bytes_received: int
    chunks: int
    rounds: int
    peers_sent: int
    peers_received: int
    staging_bytes: int
    staging_budget: int
    seconds: Mapping[str, float]

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {value:.3f} s" for name, value in self.seconds.items())
        return (
            f"{self.operation}: {self.tensors} tensors, sent {self.bytes_sent} and received "
            f"{self.bytes_received} bytes in {self.chunks} chunks and {self.rounds} rounds, "
            f"staging {self.staging_bytes} of {self.staging_budget} bytes; {parts}"
        )


class Tally:
    """A report while it grows."""

    def __init__(self, operation: str) -> None:
        self.operation = operation
        self.tensors = self.bytes_sent = self.bytes_received = self.chunks = self.rounds = 0
        self.peers_sent = self.peers_received = 0
        self._peers: set[tuple[bool, int]] = set()
        self.staging_bytes = self.staging_budget = 0
        self.seconds: dict[str, float] = {}
        self.meter = Meter(operation, settings.progress())

    def sent(self, nbytes: int) -> None:
        self.bytes_sent += nbytes
        self.chunks += 1
        self.meter.add(nbytes)

    def received(self, nbytes: int) -> None:
        self.bytes_received += nbytes
        self.chunks += 1
        self.meter.add(nbytes)

    def met(self, peer: int, *, sends: bool) -> None:
        """Count a message to a rank, or from it.

        Args:
            peer: the global rank.
            sends: whether this rank sends; else it receives.
        """
        if (sends, peer) not in self._peers:
            self._peers.add((sends, peer))
            self.peers_sent += sends
            self.peers_received += not sends

    def phase(self, name: str) -> Phase:
        return Phase(self.seconds, name)

    def close(self) -> None:
        """Make this the last report: the transfer ended well."""
        global _last
        _last = Report(**{field.name: getattr(self, field.name) for field in fields(Report)})
        logger.info("%s", _last)


class Phase:
    """A timer of a part of a transfer. No generator: its cost would show in small loads."""

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
    """Return the report of this process's last transfer that ended well; None before the first.

    A call that moves model and optimizer, or tensors on several meshes, makes several transfers.

    Example:
        Within a process group:

        >>> import torch
        >>> from torch_dcp_backport.transfer import Held, gather, last_report, layout_of
        >>> tensor = torch.ones(2, 3)
        >>> whole = gather({"w": Held(tensor, layout_of(tensor))}, lambda key: torch.empty(2, 3))
        >>> last_report().operation, last_report().tensors
        ('gather', 1)
    """
    return _last
