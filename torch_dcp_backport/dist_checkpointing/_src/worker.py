"""A thread beside the training, which the process waits for before it ends, until it is given up.

Knows no ranks; must never be waited for without the caller's bound.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable
from typing import Optional


class Worker:
    """Some work in a thread.

    A thread that hangs in a call to the kernel cannot be ended, and Python waits at its end for every thread
    that is no daemon. So the work runs in a daemon, and a second thread, which Python waits for, ends with it
    or when it is given up.
    """

    def __init__(self, work: Callable[[], object], name: str) -> None:
        self._work = work
        self.name = name
        self._ended = threading.Event()
        self._released = threading.Event()

    def start(self) -> None:
        """Begin.

        Raises:
            RuntimeError: no thread can be started.
        """
        threading.Thread(target=self._run, name=self.name, daemon=True).start()
        with contextlib.suppress(RuntimeError):
            threading.Thread(target=self._released.wait, name=f"{self.name}, until its end").start()

    def wait(self, seconds: Optional[float] = None) -> bool:
        """Wait until the work has ended, for so many seconds at most; return whether it has."""
        return self._ended.wait(seconds)

    def give_up(self) -> None:
        """Let the process end without waiting for the work, which goes on if it can."""
        self._released.set()

    def _run(self) -> None:
        try:
            self._work()
        finally:
            self._ended.set()
            self._released.set()


def checked_seconds(name: str, value: Optional[float]) -> Optional[float]:
    """Return the bound of a wait; None is without end.

    Raises:
        ValueError: it is no number above 0.
    """
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if value is not None and not (is_number and 0 < value < math.inf):
        raise ValueError(f"{name}={value!r}: expected seconds above 0, or None to wait without end")
    return value
