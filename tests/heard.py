"""The warnings of a process, such as a rank of a pool."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from torch_dcp_backport.transfer._src import once


@contextlib.contextmanager
def heard(room: str = "") -> Iterator[list[str]]:
    """The messages of a room's logger, or of all, within the context; what was said before is said anew."""
    once.forget()
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(f"torch_dcp_backport.{room}".rstrip("."))
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)
