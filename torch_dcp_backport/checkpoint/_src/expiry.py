"""Saves between the regular ones: before a reservation ends, and on a signal to stop."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any, Optional

from torch_dcp_backport.dist_checkpointing import begin
from torch_dcp_backport.transfer import Group

#: Set by Volcano Engine and by SageMaker: seconds since 1970 at which the machines are taken away.
EXPIRY = (
    "MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP",
    "SAGEMAKER_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP",
)
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


def should_save_ckpt_esi(
    max_steps_duration: float, save_ckpt_duration: float = 60, redundant_time: float = 0
) -> bool:
    """Return whether the reservation of these machines ends before the next step and a save would.

    The end is that of Volcano Engine or SageMaker, in an environment variable. Return False without a
    reservation, and after its end (verl's says True for ever on SageMaker). The answer goes by this machine's
    clock: pass it to `SaveSignals.should_save`, for all ranks to agree.

    Args:
        max_steps_duration: seconds of the longest step.
        save_ckpt_duration: seconds of a save.
        redundant_time: seconds to spare.

    Example:
        >>> import os, time
        >>> from torch_dcp_backport.checkpoint import should_save_ckpt_esi
        >>> os.environ["SAGEMAKER_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP"] = str(time.time() + 300)
        >>> should_save_ckpt_esi(100), should_save_ckpt_esi(280)
        (False, True)
        >>> del os.environ["SAGEMAKER_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP"]
    """
    needed = max_steps_duration + save_ckpt_duration + redundant_time
    for name in EXPIRY:
        with contextlib.suppress(KeyError, ValueError):
            if 0 < float(os.environ[name]) - time.time() <= needed:
                return True
    return False


class SaveSignals:
    """A context that records SIGTERM and SIGUSR1 until all ranks ask; former handlers are called as well.

    The handler that Python itself has for SIGINT, which raises KeyboardInterrupt, is not called.

    Args:
        signals: the signals that are recorded.
        process_group: the ranks that ask together; None is the default group.

    Example:
        >>> import signal
        >>> from torch_dcp_backport.checkpoint import SaveSignals
        >>> with SaveSignals([signal.SIGUSR1]) as signals:
        ...     signal.raise_signal(signal.SIGUSR1)
        ...     print(signals.should_save(), signals.should_save())
        True False
    """

    def __init__(self, signals: Sequence[signal.Signals] = SIGNALS, process_group: Group = None) -> None:
        self.process_group = process_group
        # Named twice, a signal would have this handler as its own former one.
        self.signals = tuple(dict.fromkeys(signals))
        self._received = False
        self._former: dict[signal.Signals, Any] = {}

    def __enter__(self) -> SaveSignals:
        if self._former:
            raise RuntimeError("these signals are watched already")
        try:
            for number in self.signals:
                self._former[number] = signal.signal(number, self._note)
        except (OSError, ValueError):
            # Not in the main thread, or a signal that no program gets: none is left half watched.
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for number, former in self._former.items():
            # None stands for a handler that is not of Python's.
            signal.signal(number, signal.SIG_DFL if former is None else former)
        self._former = {}

    def _note(self, number: int, frame: Optional[FrameType]) -> None:
        self._received = True
        former = self._former.get(signal.Signals(number))
        # Python's own for SIGINT would end the loop before the step that is to be saved.
        if callable(former) and former is not signal.default_int_handler:
            former(number, frame)

    def take(self) -> bool:
        """Return whether this rank got a signal since the last call. Not collective."""
        received, self._received = self._received, False
        return received

    def should_save(self, expires: bool = False) -> bool:
        """Return whether any rank got a signal since the last call, or passes `expires`. Collective.

        The answer is the same on every rank.

        Args:
            expires: whether this rank has another reason to save, such as `should_save_ckpt_esi`.
        """
        with begin("cannot agree on a save", "save", self.process_group) as call:
            received = self.take()
            return call.gather_object(
                "asking for signals", bool(received or expires), lambda wishes: any(wishes.values())
            )
