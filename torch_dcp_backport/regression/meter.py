"""This process's memory: the kernel's or the accelerator's figures, and the bytes that tensors keep alive.

Must never hold on to what it measures and must never guess: a figure that is not known is None.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = object  # tools look annotations up at run time; processes without torch are measured, too

MIB = 1 << 20
INTERVAL = 0.01  # seconds between two samples of a Watch


def _status(name: str) -> int | None:
    try:
        with open("/proc/self/status") as lines:
            for line in lines:
                if line.startswith(name + ":"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def resident() -> int | None:
    return _status("VmRSS")


def peak_resident() -> int | None:
    """Return the highest resident memory since the process began, or since `forget_peak`."""
    return _status("VmHWM")


def private_data() -> int | None:
    """Return the memory that RLIMIT_DATA counts: private and writable, touched or not."""
    return _status("VmData")


def trim() -> None:
    """Give back what the allocator kept of freed memory: using it again would not show."""
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


def forget_peak() -> bool:
    try:
        with open("/proc/self/clear_refs", "w") as handle:
            handle.write("5")
    except OSError:
        return False
    return True


@contextlib.contextmanager
def data_limit(room: int) -> Iterator[None]:
    """Let this process have `room` bytes of private memory more than it has now, not a byte beyond."""
    import resource  # not on every system that torch runs on

    now = private_data()
    if now is None:
        raise RuntimeError("this system does not tell how much private memory a process has (no /proc)")
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = now + room
    resource.setrlimit(
        resource.RLIMIT_DATA, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard)
    )
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def local(tensor: Tensor) -> Tensor:
    """Return a DTensor's own part; any other tensor itself. `to_local` would go through autograd."""
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def own_bytes(tensor: Tensor) -> int:
    part = local(tensor)
    return part.numel() * part.element_size()


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the storages behind the local parts, each storage counted once."""
    storages = {}
    for tensor in tensors:
        storage = local(tensor).untyped_storage()
        if storage.device.type != "meta":
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def live_storages() -> dict[tuple[str, int], tuple[int, str]]:
    """Return (device, address) -> (bytes, a tensor that holds it) of every storage that Python reaches.

    A view keeps its full storage alive, and counts as such. Storages that only C++ holds (autograd's saved
    tensors, a gradient that no code read) are not seen.
    """
    import torch

    plain = torch.Tensor.__torch_dispatch__
    gc.collect()
    storages: dict[tuple[str, int], tuple[int, str]] = {}
    for candidate in gc.get_objects():
        # By type: isinstance would wake up lazy modules and proxies. Wrappers such as DTensor hold others.
        if not issubclass(type(candidate), torch.Tensor) or type(candidate).__torch_dispatch__ is not plain:
            continue
        # Sparse tensors have no storage of their own, nor has a tensor that is being freed.
        with contextlib.suppress(NotImplementedError, RuntimeError):
            storage = candidate.untyped_storage()
            if storage.device.type != "meta" and storage.nbytes():
                holder = f"{tuple(candidate.shape)} {candidate.dtype}".replace("torch.", "")
                storages[str(storage.device), storage.data_ptr()] = storage.nbytes(), holder
    return storages


@dataclass(frozen=True)
class Gauge:
    """Functions that read memory; a figure that is not known there is None."""

    held: Callable[[], int | None]
    highest: Callable[[], int | None]  # since `forget`
    forget: Callable[[], bool]  # the highest so far, if that can be done
    synchronize: Callable[[], object]  # waits for work under way


HOST = Gauge(resident, peak_resident, forget_peak, lambda: None)


def gauge(kind: str) -> Gauge:
    """Return the kernel's figures for the CPU, else this process's allocations on its current device."""
    if kind == "cpu":
        return HOST
    from torch_dcp_backport import compat

    module = compat.device_module(kind)
    device = compat.current_device(kind)  # by name: another thread has a current device of its own

    def ask(name: str) -> int | None:
        value: int | None = getattr(module, name)(device) if hasattr(module, name) else None
        return value

    def forget() -> bool:
        ask("reset_peak_memory_stats")
        return hasattr(module, "reset_peak_memory_stats")

    return Gauge(
        held=lambda: ask("memory_allocated"),
        highest=lambda: ask("max_memory_allocated"),
        forget=forget,
        synchronize=lambda: ask("synchronize"),
    )


@dataclass
class Watch:
    """Memory while a block runs; all figures are bytes above the block's beginning."""

    gauge: Gauge = HOST
    peak: int | None = None  # set by `stop_peak`; None where that is not known
    after: int | None = None  # at the block's end
    history: list[tuple[float, int]] = field(default_factory=list)  # (seconds, bytes)
    marks: dict[str, float] = field(default_factory=dict)  # name -> seconds

    def __enter__(self) -> Watch:
        self._quit = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self.gauge.synchronize()
        self._exact = self.gauge.forget()
        self._base = self.gauge.held()
        self._began = time.perf_counter()
        if self._base is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._quit.set()
        if self._thread.is_alive():
            self._thread.join()
        now = self.gauge.held()
        if now is not None and self._base is not None:
            self.after = now - self._base

    def mark(self, name: str) -> None:
        self.marks[name] = time.perf_counter() - self._began

    def stop_peak(self) -> None:
        """Take the peak here, all work done; what follows in the block is no longer part of it."""
        self.gauge.synchronize()
        highest = self.gauge.highest()
        if self._exact and highest is not None and self._base is not None:
            self.peak = highest - self._base

    def _sample(self) -> None:
        while not self._quit.is_set():
            now = self.gauge.held()
            if now is not None and self._base is not None:
                self.history.append((time.perf_counter() - self._began, now - self._base))
            self._quit.wait(INTERVAL)
