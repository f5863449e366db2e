"""Call back as soon as a module has been imported: wrapt's hooks, and the finder that serves them.

Must never import anything or wait while Python looks for a module: the global import lock is held then.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import wrapt

Hook = Callable[[], None]


class Hooks:
    """This package's hooks, and a finder in sys.meta_path, in front of wrapt's, from the first hook on.

    wrapt's own finder imports the parent package of the module that is looked for, under the global import
    lock: where another thread is importing that package, the two wait for each other for good. So this one
    serves the modules that have hooks of ours. It asks the other finders, with the path that it is given,
    and notifies wrapt's hooks, ours and those of others, once the module has been executed.
    It goes when wrapt's finder no longer imports: https://github.com/DataDog/dd-trace-py/pull/17742
    """

    def __init__(self) -> None:
        # The Installer that is in charge of this process. Its module imports this one: here it is an object.
        self.installer: object = None
        self._hooks: dict[str, Hook] = {}
        self._registered: set[str] = set()  # with wrapt, which forgets a hook that it has called

    def hook(self, name: str, hook: Hook) -> None:
        """Call `hook` whenever a module of this name has been executed; not for what is loaded by now."""
        if not any(finder is self for finder in sys.meta_path):
            # Its first hook puts wrapt's finder in front of all.
            wrapt.register_post_import_hook(lambda module: None, "sys")
            sys.meta_path.insert(0, self)
        self._hooks[name] = hook
        self._register(name)

    def unhook(self, name: str) -> None:
        self._hooks.pop(name, None)

    def awaits(self, name: str) -> bool:
        """Return whether the hook of this module is still to be called."""
        return name in self._registered

    def when_lazy(self, name: str) -> None:
        """Call the hook of a module that LazyLoader has put into sys.modules when that is executed."""
        spec = object.__getattribute__(sys.modules[name], "__spec__")
        if type(spec.loader) is not _Loader:
            spec.loader = _Loader(spec.loader, partial(self._call, name))

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self._hooks:
            return None
        self._register(name)
        finders = list(sys.meta_path)
        # Those before this one have been asked.
        while finders and finders.pop(0) is not self:
            pass
        for finder in finders:
            is_wrapts = type(finder).__module__ == wrapt.register_post_import_hook.__module__
            if is_wrapts or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = _Loader(spec.loader, self._notify)  # type: ignore[assignment]
                return spec
        return None

    def _notify(self, module: ModuleType) -> None:
        try:
            wrapt.notify_module_loaded(module)
        except BaseException:
            # A hook of another tool's failed before ours was called, and wrapt has forgotten both.
            self._registered.discard(module.__name__)
            raise

    def _register(self, name: str) -> None:
        # For a module that is there wrapt would call the hook at once.
        if name not in self._registered and name not in sys.modules:
            self._registered.add(name)
            wrapt.register_post_import_hook(partial(self._call, name), name)

    def _call(self, name: str, module: object = None) -> None:
        self._registered.discard(name)
        hook = self._hooks.get(name)
        if hook is not None:
            hook()


class _Loader:
    """A loader around the module's own until the module is executed, which never sees it."""

    def __init__(self, loader: Any, after: Callable[[ModuleType], object]) -> None:
        self._loader = loader
        self._after = after

    def exec_module(self, module: ModuleType) -> None:
        spec: Any = module.__spec__
        if spec.loader is self:
            spec.loader = self._loader
        if module.__loader__ is self:
            module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._after(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_loader"), name)


class _Ending(ModuleSpec):
    """The spec of a module in the middle of its import, until Python notes there that it has ended."""

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name == "_initializing" and not value:
            self.__class__ = ModuleSpec  # type: ignore[assignment]
            try:
                vars(self).pop("_after")()
            except BaseException:
                sys.modules.pop(self.name, None)  # as after any error, the next import executes it again
                raise


def when_ended(name: str, after: Callable[[], None]) -> bool:
    """Call `after` when the import of a module has ended, in the thread that imports it.

    There is no other sign: the module was looked for before there was a hook, or has none.

    Returns:
        whether it will be called: the module is in the middle of its import.
    """
    spec = getattr(sys.modules.get(name), "__spec__", None)
    if type(spec) is ModuleSpec and vars(spec).get("_initializing"):
        vars(spec)["_after"] = after
        spec.__class__ = _Ending
        if not vars(spec).get("_initializing") and vars(spec).pop("_after", None):
            # Another thread has noted the end meanwhile.
            spec.__class__ = ModuleSpec
    return type(spec) is _Ending
