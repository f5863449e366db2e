"""Copies of a rank's share for a save in the background, in one memory that is kept for the next save.

Fresh memory costs more than the copy itself: the kernel makes it page by page. Must never hand out
memory that a save under way still has.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import threading
import weakref
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple, Optional

import torch

from torch_dcp_backport.dist_checkpointing._src.body import LITTLE, Form, Places
from torch_dcp_backport.dist_checkpointing._src.records import TYPED
from torch_dcp_backport.dist_checkpointing._src.writer import WriteWork
from torch_dcp_backport.transfer import is_dense, row_major, warn_once

logger = logging.getLogger("torch_dcp_backport.dist_checkpointing")

#: From so many bytes or records on, memory is kept, and another process may read it. With less, a thread
#: needs Python for less time than the process takes to start.
KEPT_BYTES, KEPT_RECORDS = 32 * 2**20, 2000
#: Values begin at a multiple of this, as every dtype needs.
ALIGNMENT = 64
#: The most tensors that are copied by one call.
TOGETHER = 512


class Memory:
    """Bytes on the host; those that other processes may read have a descriptor."""

    def __init__(self, nbytes: int, is_shared: bool) -> None:
        self.nbytes = -(-nbytes // ALIGNMENT) * ALIGNMENT
        self.fd = -1
        if is_shared and nbytes:
            try:
                self._map()
            except (OSError, AttributeError, ValueError) as error:
                text = "no memory that another process may read"
                warn_once(logger, f"{text} ({error}): a thread writes saves in the background", about=text)
        if self.fd < 0:
            self.tensor = torch.empty(self.nbytes, dtype=torch.uint8, device="cpu")
        self.view = memoryview(self.tensor.numpy()).cast("B")  # type: ignore[arg-type]

    def _map(self) -> None:
        fd = os.memfd_create("torch_dcp_backport")
        try:
            # Room that is missing is an error here; at the first write it would kill the process.
            os.posix_fallocate(fd, 0, self.nbytes)
            mapped, self._unmap = _mapped(fd, self.nbytes)
            self.tensor = torch.frombuffer(mapped, dtype=torch.uint8)
        except BaseException:
            os.close(fd)
            raise
        self.fd = fd
        #: Closes the descriptor, once.
        self._close = weakref.finalize(self, os.close, fd)
        _shared.add(self)

    def give_up(self) -> None:
        """Leave shared memory to the program that this process was forked from."""
        # It is not mapped here, and something else may be in its place.
        self._unmap.detach()
        self._close()
        self.fd = -1


def _mapped(fd: int, nbytes: int) -> tuple[Any, Any]:
    """Map a file, not for forked processes; return a buffer, and what unmaps it when it is gone.

    `mmap.mmap` would keep a descriptor of its own, which a forked process could not close, and would unmap
    there whatever has come to the same place.

    Raises:
        OSError: it cannot be mapped.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    at = libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
    if at in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    buffer = (ctypes.c_ubyte * nbytes).from_address(at)
    unmap = weakref.finalize(buffer, libc.munmap, at, nbytes)
    # A thread may still write at the end of the program.
    unmap.atexit = False  # type: ignore[misc]
    if libc.madvise(at, nbytes, mmap.MADV_DONTFORK):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return buffer, unmap


class Staged(NamedTuple):
    """Copies of records in one memory, in the order of the file."""

    memory: Memory
    places: Places
    #: Of the values, and of the records.
    nbytes: int
    length: int

    @property
    def is_shared(self) -> bool:
        return self.memory.fd >= 0


@torch.no_grad()
def staged(works: Sequence[WriteWork]) -> Staged:
    """Copy records to the host; the caller's later changes of its tensors do not reach the copies.

    Raises:
        RuntimeError: no memory.
    """
    numbers: dict[Form, int] = {}
    which, starts, runs = array("L"), array("Q"), list[tuple[int, int]]()
    end = nbytes = length = 0
    before: Optional[torch.dtype] = None
    for number, work in enumerate(works):
        form = work.form
        dtype = work.data.dtype
        is_together = dtype in TYPED and work.data.is_cpu and form.nbytes <= LITTLE
        if not (is_together and dtype is before and number - runs[-1][0] < TOGETHER):
            end = -(-end // ALIGNMENT) * ALIGNMENT
            runs.append((number, number))
        runs[-1] = runs[-1][0], number + 1
        before = dtype if is_together else None
        which.append(numbers.setdefault(form, len(numbers)))
        starts.append(end)
        end += form.nbytes
        nbytes += form.nbytes
        length += form.length
    memory = take(end, end >= KEPT_BYTES or len(works) >= KEPT_RECORDS)
    typed: dict[torch.dtype, torch.Tensor] = {}
    for first, stop in runs:
        _copy(memory.tensor, typed, works[first:stop], starts[first])
    return Staged(memory, Places(list(numbers), which, starts), nbytes, length)


def _copy(
    memory: torch.Tensor, typed: dict[torch.dtype, torch.Tensor], works: Sequence[WriteWork], start: int
) -> None:
    """Copy tensors of one dtype that lie one behind the other from `start` on."""
    dtype = works[0].data.dtype
    target = typed.get(dtype)
    if target is None:
        target = typed[dtype] = memory.view(dtype)
    at = start // dtype.itemsize
    if len(works) == 1:
        part = works[0].part
        target.as_strided(part.shape, row_major(tuple(part.shape)), at).copy_(part)
        return
    parts = [part if is_dense(part) else part.contiguous() for part in (work.part for work in works)]
    parts = [part.reshape(-1) for part in parts]
    torch.cat(parts, out=target[at : at + sum(part.numel() for part in parts)])


_lock = threading.Lock()
#: At most one, for the next save.
_kept: list[Memory] = []
#: All that have a descriptor.
_shared: weakref.WeakSet[Memory] = weakref.WeakSet()


def take(nbytes: int, is_kept: bool) -> Memory:
    """Return memory of at least `nbytes`: the kept one, if it is large enough and at most twice as large."""
    if not is_kept:
        return Memory(nbytes, is_shared=False)
    with _lock:
        memory = _kept.pop() if _kept else None
    if memory is not None and nbytes <= memory.nbytes <= 2 * nbytes + ALIGNMENT:
        return memory
    # Gone before the new one is made.
    del memory
    return Memory(nbytes, is_shared=True)


def give_back(memory: Memory) -> None:
    """Keep memory for the next save, if other processes may read it, and none is kept that is larger."""
    if memory.fd < 0:
        return
    with _lock:
        if not _kept or _kept[0].nbytes < memory.nbytes:
            _kept[:] = [memory]


def let_go() -> None:
    """Free the kept memory."""
    with _lock:
        _kept.clear()


def _after_fork() -> None:
    """Give up, in a process that the program forked, what belongs to the program."""
    global _lock
    _lock = threading.Lock()
    for memory in list(_shared):
        memory.give_up()
    _kept.clear()


os.register_at_fork(after_in_child=_after_fork)
