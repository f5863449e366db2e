"""A limit of bytes for a block of a test, in any rank process.

Must not import torch before it is used, and must never change what the block does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from torch_dcp_backport.regression import meter

#: An error shows so many of the tensors that are still alive.
SHOWN = 5


@dataclass
class Figures:
    """The bytes that a block needed, known once it is over."""

    #: Of storages of tensors that are alive after it and were not before, on all devices.
    kept: int = 0
    #: Of memory above the state before it: resident on the host, allocated by torch on CUDA devices; the
    #: larger of the two. None where the system has no such figure.
    peak: int | None = None


@contextlib.contextmanager
def limit(*, keeps: int | None = None, peak: int | None = None) -> Iterator[Figures]:
    """Fail if the block keeps, or needs at its peak, more than so many bytes in this process.

    Args:
        keeps: most bytes of tensors that the block may leave alive. Counted storage by storage: a view of a
            large tensor counts as the large tensor; meta tensors, and what only C++ holds, count as nothing.
        peak: most bytes of memory above the state before the block. The host's includes what allocators
            round up, so leave some MiB.

    Raises:
        AssertionError: the block needed more; names the rank, both figures and the largest tensors.
        RuntimeError: a peak is asked for where the system has no such figure (no /proc).
    """
    figures = Figures()
    before = meter.live_storages()
    meter.trim()
    base, exact = meter.resident(), meter.forget_peak()
    devices = _forget_cuda_peaks()
    if peak is not None and (base is None or not exact):
        raise RuntimeError("this system does not tell a process's peak memory (no /proc/self/clear_refs)")
    yield figures
    highest = meter.peak_resident()
    if base is not None and highest is not None and exact:
        figures.peak = max([highest - base, *_cuda_peaks(devices)])
    # By size too: an address may be used again.
    new = {
        key: entry
        for key, entry in meter.live_storages().items()
        if key not in before or before[key][0] != entry[0]
    }
    figures.kept = sum(nbytes for nbytes, _ in new.values())
    if keeps is not None and figures.kept > keeps:
        largest = sorted(((*entry, device) for (device, _), entry in new.items()), reverse=True)[:SHOWN]
        lines = [
            f"  {_amount(size)} held by a tensor {holder} on {device}" for size, holder, device in largest
        ]
        raise AssertionError(
            f"{_rank()} keeps {_amount(figures.kept)} of tensors alive that were not before, "
            f"{_amount(keeps)} are allowed. The largest of {len(new)}:\n" + "\n".join(lines)
        )
    if peak is not None and figures.peak is not None and figures.peak > peak:
        needed = f"{_rank()} needed {_amount(figures.peak)} at its peak"
        raise AssertionError(f"{needed}, {_amount(peak)} are allowed")


def _rank() -> str:
    import torch.distributed as dist

    return f"rank {dist.get_rank()}" if dist.is_available() and dist.is_initialized() else "this process"


def _amount(nbytes: int) -> str:
    return f"{nbytes} bytes ({nbytes / meter.MIB:.1f} MiB)"


def _forget_cuda_peaks() -> dict[int, int]:
    """device index -> bytes allocated now, of the devices that this process uses."""
    import torch

    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return {}
    devices = {index: torch.cuda.memory_allocated(index) for index in range(torch.cuda.device_count())}
    for index in devices:
        torch.cuda.reset_peak_memory_stats(index)
    return devices


def _cuda_peaks(devices: dict[int, int]) -> list[int]:
    import torch

    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return []
    # Without a figure from before, it was initialised since.
    indices = range(torch.cuda.device_count())
    return [torch.cuda.max_memory_allocated(index) - devices.get(index, 0) for index in indices]
