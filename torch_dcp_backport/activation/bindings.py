"""Names that hold torch's objects: those that are replaced, and those that bound them before us.

Only looks: must never run code of the modules and classes that it looks at, nor keep one alive.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
import weakref
from collections.abc import Iterable, Iterator
from typing import NamedTuple, cast

OWN = __name__.partition(".")[0]
ABSENT = object()
_of_modules = vars(types.ModuleType)
_facts = vars(type)  # the attributes of a class by `type` itself: a metaclass may have others of these names


class Swap(NamedTuple):
    """A name in a module or class: torch's object, and the replacement.

    A class that is changed in place is its own replacement.
    """

    module: str
    name: str  # with dots an attribute of a class
    holder: weakref.ref[types.ModuleType | type]
    stock: object
    ours: object

    @property
    def dotted(self) -> str:
        return f"{self.module}.{self.name}"

    @property
    def key(self) -> str:
        return self.name.rpartition(".")[2]

    def holder_now(self) -> types.ModuleType | type | None:
        """Return the holder of this name in the module that is loaded now."""
        return holder_in(sys.modules.get(self.module), self.name)


class Early(NamedTuple):
    """What bound torch's objects before us."""

    swaps: list[Swap]
    listed: list[str]  # places that cannot be written, but seen

    def rebound(self) -> list[str]:
        return sorted({swap.dotted for swap in self.swaps})


def namespace_of(holder: object) -> dict[str, object] | types.MappingProxyType[str, object]:
    """Return the names of a module or class without running code of it; nothing for another object."""
    if issubclass(type(holder), type):
        # On Python 3.9 a class written in C may have none yet.
        return cast("types.MappingProxyType[str, object]", _facts["__dict__"].__get__(holder) or {})
    if not issubclass(type(holder), types.ModuleType):
        return {}
    # Lazy modules import things on a plain getattr, and some have a property of this name.
    namespace = _of_modules["__dict__"].__get__(holder)
    return namespace if isinstance(namespace, dict) else {}


def holder_in(module: object, name: str) -> types.ModuleType | type | None:
    """Return the module that has this name, or with a dot the class in it."""
    cls = name.rpartition(".")[0]
    holder = namespace_of(module).get(cls) if cls else module
    is_holder = issubclass(type(holder), (type if cls else types.ModuleType))
    return cast("types.ModuleType | type", holder) if is_holder else None


def turn(changes: Iterable[tuple[types.ModuleType | type | None, str, object, object]]) -> None:
    """Apply (holder, name, old, new), each module's at once; leave a name that holds a third value."""
    updates: dict[int, tuple[dict[str, object], dict[str, object]]] = {}
    for holder, name, old, new in changes:
        held = namespace_of(holder)
        if held.get(name, ABSENT) is not old:
            continue
        if isinstance(held, dict):
            updates.setdefault(id(held), (held, {}))[1][name] = new
        elif new is ABSENT:  # a metaclass may have a __setattr__ of its own
            type.__delattr__(cast(type, holder), name)
        else:
            type.__setattr__(cast(type, holder), name, new)
    for held, values in updates.values():
        held.update(values)  # no thread sees it half done


def find_early(swaps: list[Swap], owner: str, classes: bool) -> Early:
    """Return other names of modules, and with `classes` of their classes, that hold an object of the swaps.

    What a closure, a container or an instance holds is not looked for: torch's function from there still
    finds its module's names, which are replaced.
    """
    moved = {id(swap.stock): swap for swap in swaps if swap.ours is not swap.stock}
    # A module that has a replaced name may have bound another one's object, too.
    places = {(id(swap.holder()), swap.key) for swap in swaps}
    seen: set[int] = set()
    found, listed = [], set()
    for module_name, module in sys.modules.copy().items():
        if module_name.partition(".")[0] == OWN or id(module) in seen:
            continue
        seen.add(id(module))  # a module may have two names (__main__ and __mp_main__)
        for holder, home, name, value in _names(module, module_name, seen if classes else None):
            if (id(holder), name) in places:
                continue
            swap = moved.get(id(value))
            new = swap.ours if swap is not None else None
            if type(value) in (staticmethod, classmethod) and holder is not module:
                swap = moved.get(id(value.__func__))  # type: ignore[attr-defined]
                new = type(value)(swap.ours) if swap is not None else None  # type: ignore[call-arg]
            if swap is not None:
                found.append(Swap(home, name, weakref.ref(holder), value, new))
            elif id(_inside(value)) in moved and home.partition(".")[0] != owner:
                what = f"{type(value).__module__}.{type(value).__qualname__}".replace("builtins.", "")
                listed.add(f"{what} in {home}.{name}")
    return Early(found, sorted(listed))


def _names(
    holder: types.ModuleType | type, home: str, seen: set[int] | None
) -> Iterator[tuple[types.ModuleType | type, str, str, object]]:
    """Yield holder, its name, and each name in it with its value; with `seen` also of classes, each once."""
    for name, value in dict(namespace_of(holder)).items():
        yield holder, home, name, value
        if seen is not None and issubclass(type(value), type) and id(value) not in seen:
            seen.add(id(value))
            title = home
            with contextlib.suppress(AttributeError):  # a class without __module__
                title = f"{_facts['__module__'].__get__(value)}.{_facts['__qualname__'].__get__(value)}"
            yield from _names(cast(type, value), title, seen)


def _inside(value: object) -> object:
    """Return the function in a partial or a bound method."""
    if type(value) is functools.partial:
        return value.func
    return value.__func__ if type(value) is types.MethodType else None
