"""The settings of a process for all its transfers. Must never talk to other ranks."""

from __future__ import annotations

import os
from typing import Optional, Union

from torch_dcp_backport.transfer._src.progress import Bar, Callback

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
