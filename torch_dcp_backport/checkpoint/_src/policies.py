"""Policies of a run: which steps stay, and when to save. Data alone.

Must never look at a disk or at other ranks.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Optional

MODES = ("min", "max")


def checked_count(name: str, value: Any, least: int) -> None:
    """Refuse what is no whole number from `least` on.

    Raises:
        ValueError: naming the argument.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r}: expected a whole number from {least} on")


@dataclass(frozen=True)
class PreservationPolicy:
    """The steps that stay: the newest, every Nth, the best by a metric. Pinned steps stay in any case.

    Args:
        last: the number of newest good steps that stay; pinned ones are not counted. The newest stays in any
            case, so that 0, beside every or best, is as 1.
        every: steps whose number is divisible by it stay; None for none.
        best: the number of good steps with the best metrics that stay; of equal ones the newer.
        mode: "min" where the lower metric is the better one, else "max".

    Raises:
        ValueError: a number or a mode that is not known; no step is named.

    Example:
        >>> import torch
        >>> from torch_dcp_backport.checkpoint import (
        ...     CheckpointHandler, FSDPCheckpointManager, PreservationPolicy
        ... )
        >>> policy = PreservationPolicy(last=1, every=4, best=1)
        >>> contents = {"save_contents": ["model"]}
        >>> manager = FSDPCheckpointManager(torch.nn.Linear(2, 3), checkpoint_config=contents)
        >>> handler = CheckpointHandler(manager, default_local_dir="run", preserve=policy)
        >>> for step, loss in enumerate([0.9, 0.2, 0.8, 0.7, 0.6, 0.5], start=1):
        ...     _ = handler.save_checkpoint(step, metric=loss)
        >>> handler.finish()
        True
        >>> import os
        >>> sorted(name for name in os.listdir("run") if name.startswith("global"))
        ['global_step_2', 'global_step_4', 'global_step_6']
    """

    last: int = 1
    every: Optional[int] = None
    best: int = 0
    mode: str = "min"

    def __post_init__(self) -> None:
        checked_count("last", self.last, 0)
        checked_count("best", self.best, 0)
        if self.every is not None:
            checked_count("every", self.every, 1)
        if self.mode not in MODES:
            raise ValueError(f"mode={self.mode!r}: expected {' or '.join(MODES)}")
        if not (self.last or self.every or self.best):
            raise ValueError("last=0 without every and best: it names no step that stays")


@dataclass(frozen=True)
class SavePolicy:
    """The moments at which `CheckpointHandler.save_if_due` saves.

    Args:
        steps: steps divisible by it are saved; None for none.
        minutes: a step is saved once so many minutes have passed since the last save, by the clock of the
            first rank.
        signals: a signal on any rank has all ranks save their next step; a signal that is named twice counts
            once.
        on_exception: save the last complete step when an exception leaves `watching()`.
        patience: seconds that a rank waits for the other ranks after an exception.

    Raises:
        ValueError: a number that is not known; no moment at all.

    Example:
        >>> import torch
        >>> from torch_dcp_backport.checkpoint import CheckpointHandler, FSDPCheckpointManager, SavePolicy
        >>> contents = {"save_contents": ["model"]}
        >>> manager = FSDPCheckpointManager(torch.nn.Linear(2, 3), checkpoint_config=contents)
        >>> handler = CheckpointHandler(manager, default_local_dir="run", save_policy=SavePolicy(steps=2))
        >>> [handler.save_if_due(step) is not None for step in (1, 2, 3, 4)]
        [False, True, False, True]
    """

    steps: Optional[int] = None
    minutes: Optional[float] = None
    signals: Sequence[signal.Signals] = ()
    on_exception: bool = False
    patience: float = 30.0

    def __post_init__(self) -> None:
        if self.steps is not None:
            checked_count("steps", self.steps, 1)
        for name in ("minutes", "patience"):
            value = getattr(self, name)
            is_known = (
                isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf
            )
            if not is_known and (value is not None or name == "patience"):
                raise ValueError(f"{name}={value!r}: expected a number above 0")
        if not isinstance(self.on_exception, bool):
            raise ValueError(f"on_exception={self.on_exception!r}: expected True or False")
        try:
            known = tuple(dict.fromkeys(map(signal.Signals, self.signals)))
        except (TypeError, ValueError) as error:
            raise ValueError(f"signals={self.signals!r}: expected a list of signals") from error
        object.__setattr__(self, "signals", known)
        if not (self.steps or self.minutes or self.signals or self.on_exception):
            raise ValueError("no steps, minutes, signals or on_exception: nothing would ever be saved")


def metric_of(value: Any) -> Optional[float]:
    """Return a step's metric; None where there is none, or no number to compare steps by.

    Raises:
        ValueError: no number.
    """
    if value is None:
        return None
    try:
        number = float(value)
    except OverflowError as error:
        raise ValueError(f"metric, of type {type(value).__name__}: too large a number to compare") from error
    except Exception as error:
        raise ValueError(f"metric={value!r:.60}: expected a number") from error
    return number if math.isfinite(number) else None


def spelled_metric(value: Any) -> str:
    """Return a metric as ranks compare it. Never raises."""
    try:
        return repr(metric_of(value))
    except Exception as error:
        return f"{type(error).__name__} for a {type(value).__name__}"
