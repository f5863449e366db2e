"""A rank of tools/gpu.py: its device, and what is measured of a case."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

import torch
from torch.distributed.device_mesh import init_device_mesh

from torch_dcp_backport import transfer
from torch_dcp_backport.regression import meter

MIB = 2**20


@dataclass
class Place:
    """This rank, its device, and what was measured of the current case."""

    kind: str
    rank: int
    world: int
    store: Any
    #: MiB of the large model.
    mib: int
    measured: dict[str, Any] = field(default_factory=dict)
    said: int = 0
    #: Bytes that are left to each rank while a case is timed; None: all that there are.
    room: Optional[int] = None

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0) if self.kind == "cuda" else torch.device("cpu")

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def mesh(self) -> Any:
        return init_device_mesh(self.kind, (self.world,))

    def synchronize(self) -> None:
        if self.kind == "cuda":
            torch.cuda.synchronize()

    def told(self, key: str, value: Any) -> list[Any]:
        """Return what every rank says under a key; through the store, for it is no message of the group."""
        self.store.set(f"told/{key}/{self.rank}", json.dumps(value))
        return [json.loads(self.store.get(f"told/{key}/{rank}")) for rank in range(self.world)]

    def outside(self) -> Optional[int]:
        """Bytes of the GPU outside torch's allocators of all ranks; all ranks wait here for each other.

        Through the store: a message of the process group would change what is measured.
        """
        self.synchronize()
        self.said += 1
        reserved = torch.cuda.memory_reserved() if self.kind == "cuda" else 0
        self.store.set(f"reserved/{self.said}/{self.rank}", str(reserved))
        total = sum(int(self.store.get(f"reserved/{self.said}/{rank}")) for rank in range(self.world))
        result = None
        if self.kind == "cuda":
            free, every = torch.cuda.mem_get_info()
            result = every - free - total
        # No rank goes on before each has read.
        self.store.set(f"read/{self.said}/{self.rank}", "")
        self.store.wait([f"read/{self.said}/{rank}" for rank in range(self.world)])
        return result

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Measure what is inside: seconds, memory outside torch, torch's own peak, the transfer's report."""
        is_on_gpu = self.kind == "cuda"
        if is_on_gpu:
            torch.cuda.empty_cache()
        before, last = self.outside(), transfer.last_report()
        with self.filled():
            if is_on_gpu:
                torch.cuda.reset_peak_memory_stats()
                allocated = torch.cuda.memory_allocated()
            start = time.perf_counter()
            yield
            self.synchronize()
            self.measured["seconds"] = time.perf_counter() - start
            if is_on_gpu:
                self.measured["peak"] = torch.cuda.max_memory_allocated() - allocated
        after, report = self.outside(), transfer.last_report()
        if before is not None and after is not None:
            self.measured.update(outside=after, added=after - before)
        if report is not None and report is not last:
            names = ("operation", "bytes_sent", "bytes_received", "chunks", "rounds", "staging_bytes")
            self.measured["report"] = {name: getattr(report, name) for name in names}
            self.measured["report"]["seconds"] = dict(report.seconds)

    @contextlib.contextmanager
    def filled(self) -> Iterator[None]:
        """Fill the GPU (on the CPU: limit this process) so that each rank has its room and no more.

        After an error it stays filled, until the process ends.
        """
        if self.room is None:
            yield
            return
        if self.kind == "cpu":
            with meter.data_limit(self.room):
                yield
            return
        torch.cuda.set_per_process_memory_fraction(1.0, 0)
        self.outside()
        filler = None
        if self.is_first:
            free, _ = torch.cuda.mem_get_info()
            filler = torch.empty(free - self.room * self.world, dtype=torch.uint8, device=self.device)
            self.measured["filled"], self.measured["left"] = filler.numel(), torch.cuda.mem_get_info()[0]
        self.outside()
        yield
        self.outside()
        del filler
        torch.cuda.empty_cache()
        self.outside()


@contextlib.contextmanager
def shared_folder(place: Place, name: str) -> Iterator[Path]:
    if place.is_first:
        place.store.set(f"folder/{name}", tempfile.mkdtemp(prefix=f"gpu-{name}-"))
    folder = Path(place.store.get(f"folder/{name}").decode())
    try:
        yield folder
    finally:
        place.outside()
        if place.is_first:
            shutil.rmtree(folder, ignore_errors=True)
