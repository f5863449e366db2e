"""What is known of the modules that are waited for: executed, in the middle of it, or past our hook.

Must never import one of them.
"""

from __future__ import annotations

import sys

from torch_dcp_backport.activation.finder import ready


class Loaded:
    """The modules that one attempt waits for, by name."""

    def __init__(self) -> None:
        self.late: set[str] = set()  # there before us, open to early bindings
        self.missed: set[str] = set()  # imported past our hook
        self.executed: set[str] = set()  # executed, and their import may not have returned yet

    def note(self, name: str, missed: bool) -> None:
        """Note that a module has been executed, and whether its import went past our hook."""
        if missed and name not in self.late:
            self.late.add(name)
            self.missed.add(name)
        self.executed.add(name)

    def whole(self, name: str) -> bool:
        return name in sys.modules and (name in self.executed or ready(name))

    def half_executed(self, name: str) -> bool:
        return name in sys.modules and not self.whole(name)
