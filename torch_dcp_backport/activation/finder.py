"""Call back as soon as a module has been imported; one finder for the process and all copies of this package.

Must never import anything or wait while Python looks for a module: the global import lock is held then.
"""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    from torch_dcp_backport.activation.importer import Installer

    Hook = Callable[[str, bool], None]  # the name, and whether the import went past us

# For a process where sys.meta_path was put back to what it had been. importlib.reload() must not forget it.
_own: Finder | None = globals().get("_own")


class Finder:
    """The finder of the hooks, in sys.meta_path from the first hook on, for good.

    A thread that walks the list would miss a finder if this were taken out. Without hooks it costs a look
    into an empty dict for each import.
    """

    def __init__(self) -> None:
        self.installer: Installer | None = None  # in charge of this process
        self._hooks: dict[str, Hook] = {}
        self._awaited: set[str] = set()  # not imported yet, as far as we know
        self._looking: set[tuple[int, str]] = set()  # (thread, name), against walking in a circle

    def hook(self, name: str, hook: Hook) -> None:
        """Call `hook` whenever the module has been executed, also where another finder served it."""
        if not any(finder is self for finder in sys.meta_path):
            sys.meta_path.insert(0, self)
        self._hooks[name] = hook
        self._awaited.add(name)

    def unhook(self, name: str) -> None:
        self._hooks.pop(name, None)
        self._awaited.discard(name)

    def seen(self, name: str) -> None:
        """Note that the hook's owner has looked at this module already."""
        self._awaited.discard(name)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not self._hooks or (name not in self._hooks and not self._missed()):
            return None
        key = (threading.get_ident(), name)
        if key in self._looking:  # another finder asks all finders, as we do
            return None
        self._looking.add(key)
        try:
            spec, registries = self._ask_others(name, path, target)
        finally:
            self._looking.discard(key)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _Loader(spec.loader, registries)  # type: ignore[assignment]
        return spec

    def executed(self, name: str) -> None:
        missed = [other for other in self._missed() if other != name]
        for due in (*missed, name):
            self._awaited.discard(due)
            hook = self._hooks.get(due)
            if hook is not None:
                hook(due, due in missed)

    def _missed(self) -> list[str]:
        """Return awaited modules that another finder served, to Python directly."""
        return [name for name in self._awaited.copy() if ready(name)]

    def _ask_others(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> tuple[ModuleSpec | None, list[str]]:
        """Return the spec of this name in sys.meta_path, and the modules of wrapt that were not asked."""
        registries = []
        for finder in list(sys.meta_path):
            home = str(type(finder).__module__)
            if home.endswith("wrapt.importer"):
                # It imports the parent package under the global import lock: a deadlock where another thread
                # is at that. So it is not asked, and our loader notifies its hooks instead.
                # https://github.com/DataDog/dd-trace-py/pull/17742
                registries.append(home)
            elif finder is not self and hasattr(finder, "find_spec"):
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    return spec, registries
        return None, registries


class _Loader:
    """A loader around the module's own until the module is executed, which never sees it."""

    def __init__(self, loader: Any, registries: list[str]) -> None:
        self._loader = loader
        self._registries = registries

    def exec_module(self, module: ModuleType) -> None:
        spec: Any = module.__spec__
        if spec.loader is self:
            spec.loader = self._loader
        if module.__loader__ is self:
            module.__loader__ = self._loader
        self._loader.exec_module(module)
        for registry in self._registries:
            notify = getattr(sys.modules.get(registry), "notify_module_loaded", None)
            if notify is not None:
                notify(module)
        if sys.modules.get(spec.name) is module:
            process().executed(spec.name)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_loader"), name)


def ready(name: str) -> bool:
    """Return whether a module is loaded and executed to the end. Runs no code of it."""
    module = sys.modules.get(name)
    if module is None:
        return False
    try:
        spec = object.__getattribute__(module, "__spec__")
    except AttributeError:
        spec = None
    return not getattr(spec, "_initializing", False)


def installed() -> Finder | None:
    """Return the process's finder, of this copy of the package or of a copy deleted from sys.modules."""
    for finder in sys.meta_path:
        kind = type(finder)
        if (kind.__module__, kind.__qualname__) == (__name__, Finder.__qualname__):
            return finder  # type: ignore[return-value]
    return _own


def process() -> Finder:
    global _own
    _own = installed() or Finder()
    return _own
