"""Warnings that a process gives once: what they are of comes at every step of a training.

Must never import torch.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable
from typing import Optional

_warned: set[Hashable] = set()


def warn_once(logger: logging.Logger, text: str, about: Optional[Hashable] = None) -> None:
    """Log a warning, once in this process.

    Args:
        about: what the warning is of, where its text differs from time to time; by default the text itself.
    """
    key = (logger.name, text if about is None else about)
    if key not in _warned:
        _warned.add(key)
        logger.warning("%s", text)


def forget() -> None:
    """Begin anew, as a new process does."""
    _warned.clear()
