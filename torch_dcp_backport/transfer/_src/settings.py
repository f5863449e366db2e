"""The settings of a process for all its transfers. Must never talk to other ranks."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, Optional, Union

# --- progress ---


logger = logging.getLogger("torch_dcp_backport.transfer")


class Progress(NamedTuple):
    """The progress of one transfer of this rank.

    Args:
        operation: "scatter" (load from rank 0), "gather" (save) or "reshard"; "save" or "load" of a sharded
            checkpoint.
        done: bytes of tensors that this rank has handed to the backend or got from it so far.
        total: the value that `done` will have in the end.
    """

    operation: str
    done: int
    total: int


Callback = Callable[[Progress], object]


class Bar(threading.local):
    """A tqdm bar for each transfer; a thread in the background has its own."""

    def __init__(self) -> None:
        self._tqdm: Any = importlib.import_module("tqdm").tqdm
        self._bar: Any = None

    def __call__(self, progress: Progress) -> None:
        if self._bar is None:
            self._bar = self._tqdm(
                total=progress.total, desc=progress.operation, unit="B", unit_scale=True, unit_divisor=1024
            )
        self._bar.update(progress.done - self._bar.n)
        if progress.done >= progress.total:
            self._bar.close()
            self._bar = None


class Line:
    """A bar in the last line of a terminal, for commands: needs no package, and is silent elsewhere."""

    WIDTH = 30

    def __init__(self) -> None:
        self._shown = ""

    def __call__(self, progress: Progress) -> None:
        if not sys.stderr.isatty():
            return
        share = progress.done / progress.total if progress.total else 1.0
        unit, name = next(
            (unit, name) for unit, name in UNITS if progress.total < 1024 * unit or name == "TiB"
        )
        full = "#" * round(self.WIDTH * share)
        done, total = progress.done / unit, progress.total / unit
        line = f"{progress.operation} [{full:.<{self.WIDTH}}] {share:4.0%} {done:.1f} of {total:.1f} {name}"
        if line != self._shown:
            self._shown = line
            print(f"\r{line:<79}", end="", file=sys.stderr, flush=True)
        if progress.done >= progress.total:
            self._shown = ""
            # What follows is written over it.
            print(f"\r{'':79}\r", end="", file=sys.stderr, flush=True)


#: Bytes of units of a bar.
UNITS = ((1, "B"), (2**10, "KiB"), (2**20, "MiB"), (2**30, "GiB"), (2**40, "TiB"))


class Meter:
    """A caller of one transfer's callback; a callback that raised is not called again."""

    def __init__(self, operation: str, callback: Optional[Callback]) -> None:
        self.operation = operation
        self.callback = callback
        self.done = self.total = 0

    def expect(self, nbytes: Callable[[], int]) -> None:
        """`nbytes()` counts what else will move; not called without a callback."""
        if self.callback is not None:
            self.total += nbytes()

    def add(self, nbytes: int) -> None:
        if self.callback is None:
            return
        self.done += nbytes
        try:
            self.callback(Progress(self.operation, self.done, self.total))
        except Exception:
            logger.warning("the progress callback failed and is not called again", exc_info=True)
            self.callback = None


# --- settings ---

VARIABLE = "TORCH_DCP_BACKPORT_STAGING_MIB"
MIB = 2**20
#: Peak bytes of staging buffers on any rank, unless the user says otherwise.
DEFAULT = 64 * MIB
#: Bytes of the largest element (complex128): less cannot carry anything.
SMALLEST = 16
LARGEST = 2**62

_chosen: Optional[int] = None
_progress: Optional[Callback] = None


def configure(*, staging_bytes: Optional[int] = None, progress: Union[Callback, str, None] = None) -> None:
    """Set how this process's transfers work; what is left out goes back to its default.

    Args:
        staging_bytes: the staging budget in bytes; by default that of TORCH_DCP_BACKPORT_STAGING_MIB, or 64
            MiB. Less memory means more rounds. Where ranks differ, the smallest budget counts for all.
            Buffers hold at least one element (16 bytes) each, however small the budget is.
        progress: called with a `Progress` after every chunk that this rank sends or receives, or "tqdm" for
            a bar on standard error. Its errors are logged, and end no transfer.

    Raises:
        ValueError: not a whole number of bytes, or fewer than one element has; not a callback.
        ModuleNotFoundError: tqdm is not installed.

    Example:
        >>> from torch_dcp_backport.transfer import configure
        >>> configure(staging_bytes=16 * 2**20)
        >>> configure(staging_bytes=15)
        Traceback (most recent call last):
            ...
        ValueError: staging_bytes=15: expected at least ...
        >>> configure()
    """
    global _chosen, _progress
    budget = None if staging_bytes is None else checked(staging_bytes)
    if progress == "tqdm":
        progress = Bar()
    elif progress is not None and not callable(progress):
        raise ValueError(f'progress={progress!r}: expected a callable, "tqdm" or None')
    _chosen, _progress = budget, progress


def progress() -> Optional[Callback]:
    """Return the callback of `configure`; None where there is none."""
    return _progress


def staging_bytes() -> int:
    """Return the budget in bytes: that of `configure`, or of TORCH_DCP_BACKPORT_STAGING_MIB, or 64 MiB.

    Raises:
        ValueError: the variable is not a number of MiB.
    """
    if _chosen is not None:
        return _chosen
    text = os.environ.get(VARIABLE, "").strip()
    if not text:
        return DEFAULT
    try:
        return checked(int(float(text) * MIB))
    except (ValueError, OverflowError):
        raise ValueError(
            f"{VARIABLE}={text!r}: expected a number of MiB, at least {SMALLEST} bytes, or unset for 64"
        ) from None


def checked(budget: object) -> int:
    if isinstance(budget, bool) or not isinstance(budget, int):
        raise ValueError(f"staging_bytes={budget!r}: expected a whole number of bytes")
    if not SMALLEST <= budget <= LARGEST:
        what = f"the bytes of the largest element ({SMALLEST})"
        raise ValueError(f"staging_bytes={budget}: expected at least {what}, and at most 2**62")
    return budget
