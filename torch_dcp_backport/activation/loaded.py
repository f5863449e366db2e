"""The state of the modules that are waited for: executed, in the middle of it, or past our hook.

Must never import any of them.
"""

from __future__ import annotations

import sys

from torch_dcp_backport.activation.finder import ready


class Loaded:
    """The modules that an attempt waits for, by name."""

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

    def is_complete(self, name: str) -> bool:
        return name in sys.modules and (name in self.executed or ready(name))

    def under_way(self, name: str) -> bool:
        """Return whether a module is in the middle of its import, or still expected."""
        return not self.is_complete(name) if name in sys.modules else self.is_expected(name)

    def is_expected(self, name: str) -> bool:
        """Return whether a module is not there yet, and its package is in the middle of its import.

        Python does not wait for a package that another thread imports: some of its modules are there, others
        are not.
        """
        package = name.rpartition(".")[0]
        return name not in sys.modules and package in sys.modules and not ready(package)
