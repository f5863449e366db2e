"""The garbage collector, kept still."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def gc_context() -> Iterator[None]:
    """No garbage collection meanwhile: a state dict's many small objects would trigger it over and over."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
