"""`torch.fakegpu`: the device module of the emulated accelerator, with the names that `torch.cuda` has.

Installed in rank processes alone, by runner.py: it renames torch's spare device for the whole process.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any, Optional, Union

import torch
import torch.distributed as dist
from emulated.account import account
from emulated.build import library

native = library()
#: The device of a rank has so much.
TOTAL_BYTES = 2**30

DeviceLike = Union[torch.device, str, int, None]


def index_of(device: DeviceLike) -> int:
    if device is None:
        return current_device()
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return current_device() if index is None else index


def current_device() -> int:
    return int(native.current_device())


def set_device(device: DeviceLike) -> None:
    """As in CUDA for this thread alone; and from now on the process has no business on another device."""
    native.set_device(index_of(device))
    native.set_home_device(index_of(device))


def device_count() -> int:
    return int(native.device_count())


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def _is_in_bad_fork() -> bool:
    return False


def synchronize(device: DeviceLike = None) -> None:
    native.synchronize()


class device:
    """A context in which another device is the current one."""

    def __init__(self, device: DeviceLike) -> None:
        self.index = index_of(device)

    def __enter__(self) -> None:
        self.before = current_device()
        native.set_device(self.index)

    def __exit__(self, *_: object) -> None:
        native.set_device(self.before)


# --- streams: all work is done in order ---


class Event:
    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def wait(self, *_: Any) -> None: ...

    def synchronize(self) -> None:
        native.synchronize()

    def query(self) -> bool:
        return True

    def elapsed_time(self, *_: Any) -> float:
        return 0.0


class Stream:
    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, *_: Any) -> None: ...

    def wait_event(self, *_: Any) -> None: ...

    def record_event(self, event: Optional[Event] = None) -> Event:
        return event or Event()

    def synchronize(self) -> None:
        native.synchronize()

    def query(self) -> bool:
        return True


def current_stream(device: DeviceLike = None) -> Stream:
    return Stream()


def default_stream(device: DeviceLike = None) -> Stream:
    return Stream()


def stream(stream: Optional[Stream]) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


# --- memory: the emulator keeps nothing in reserve ---


def empty_cache() -> None: ...


def mem_get_info(device: DeviceLike = None) -> tuple[int, int]:
    return TOTAL_BYTES - memory_allocated(), TOTAL_BYTES


def memory_allocated(device: DeviceLike = None) -> int:
    return int(native.counters()["allocated"])


def max_memory_allocated(device: DeviceLike = None) -> int:
    return int(native.counters()["peak"])


def copied_bytes() -> int:
    """Bytes that were copied between host and device."""
    counters = native.counters()
    return int(counters["to_device_bytes"] + counters["to_host_bytes"])


def reset_peak_memory_stats(device: DeviceLike = None) -> None:
    native.reset_peaks()


def set_per_process_memory_fraction(fraction: float, device: DeviceLike = None) -> None:
    native.set_memory_limit(int(fraction * TOTAL_BYTES))


# --- chance: it is the CPU's ---


def get_rng_state(device: DeviceLike = None) -> torch.Tensor:
    return torch.zeros(16, dtype=torch.uint8, device="cpu")


def set_rng_state(state: torch.Tensor, device: DeviceLike = None) -> None: ...


def manual_seed(seed: int) -> None: ...


def manual_seed_all(seed: int) -> None: ...


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


# --- what only the emulator has ---


def reset_traffic() -> None:
    """What was sent so far belongs to the preparation of a case."""
    account.reset_traffic()


def install(count: int) -> None:
    """Make this torch's device "fakegpu", with `count` devices, and "strict" a backend of process groups."""
    from emulated import strict

    torch.utils.rename_privateuse1_backend("fakegpu")
    torch._register_device_module("fakegpu", sys.modules[__name__])
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=False)
    native.set_device_count(count)
    dist.Backend.register_backend("strict", strict.make_backend, devices=["fakegpu"])
    if not hasattr(dist.distributed_c10d.Backend, "supports_coalescing"):
        batched = strict.batched(dist.batch_isend_irecv)
        dist.batch_isend_irecv = dist.distributed_c10d.batch_isend_irecv = batched
