"""What Megatron's modules have, and this room does not: named, so that an import says why it fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def refusing(module: str, names: str, why: str = "") -> Callable[[str], Any]:
    """Return a module's `__getattr__`, which tells of Megatron's names that are not offered.

    Args:
        module: the module's name.
        names: Megatron's names, with spaces between them.
        why: the end of the error.
    """
    known = frozenset(names.split())

    def __getattr__(name: str) -> Any:
        if name in known:
            # No AttributeError: `from module import name` would put a text of its own in its place.
            raise ImportError(
                f"{module} does not offer Megatron's {name}{why or WHY}", name=name, path=module
            )
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return __getattr__


WHY = ": saves and loads are planned and written another way here; see dist_checkpointing.save and load"
