"""Early bindings of torch's objects: those that can be given the replacement, and those that cannot.

Rebinds names of modules and class attributes. Other holders may keep an original on purpose: they are listed.
Must never keep a module or class alive.
"""

from __future__ import annotations

import sys
import weakref
from types import ModuleType
from typing import NamedTuple, cast

from torch_dcp_backport.activation.holders import (
    OWN,
    Holders,
    Own,
    class_namespace,
    namespace_of,
    title,
    within,
)

ABSENT = object()


class Swap(NamedTuple):
    """A name in a module: its object now, torch's object, and the replacement.

    A class that is changed in place is its own replacement.
    """

    module: str
    name: str  # with a dot a method of a class
    holder: weakref.ref[ModuleType | type]
    held: object  # torch's own, or the stub that was put there for it
    stock: object
    ours: object

    @property
    def dotted(self) -> str:
        return f"{self.module}.{self.name}"

    @property
    def key(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def namespace(self) -> dict[str, object]:
        return contents(self.holder())


def holder_in(module: object, name: str) -> ModuleType | type | None:
    """Return the module that has this name, or with a dot the class in it. Runs no code of theirs."""
    namespace = namespace_of(module)
    if namespace is None:
        return None
    cls = name.rpartition(".")[0]
    if not cls:
        return cast(ModuleType, module)
    value = namespace.get(cls)
    return cast(type, value) if issubclass(type(value), type) else None


def contents(holder: ModuleType | type | None) -> dict[str, object]:
    """Return the namespace itself of a module or class; an empty dict for None."""
    if issubclass(type(holder), type):
        return class_namespace(cast(type, holder))
    return namespace_of(holder) or {}


class ClassAttribute(NamedTuple):
    """An attribute of a class; ABSENT stands for no value."""

    name: str  # for warnings; empty for torch's own classes
    cls: weakref.ref[type]
    key: str
    stock: object
    ours: object

    def put(self) -> None:
        self._turn(self.stock, self.ours)

    def undo(self) -> None:
        self._turn(self.ours, self.stock)

    def _turn(self, old: object, new: object) -> None:
        cls = self.cls()
        if cls is not None:
            turn(cls, self.key, old, new)


def turn(cls: type, key: str, old: object, new: object) -> None:
    """Replace an attribute of a class, unless it holds a third value by now."""
    if class_namespace(cls).get(key, ABSENT) is not old:
        return
    # A metaclass may have a __setattr__ of its own.
    if new is ABSENT:
        type.__delattr__(cls, key)
    else:
        type.__setattr__(cls, key, new)


class Early(NamedTuple):
    """The early bindings of a set."""

    names: list[Swap]
    attributes: list[ClassAttribute]
    listed: list[str]  # out of reach

    @property
    def rebound(self) -> tuple[str, ...]:
        """The names that held torch's own object. A stub has been ours from the beginning."""
        names = {swap.dotted for swap in self.names if swap.held is swap.stock}
        return tuple(sorted(names | {attribute.name for attribute in self.attributes if attribute.name}))

    def reported(self, owner: str) -> list[str]:
        """The rebound names outside of torch."""
        own = {swap.dotted for swap in self.names if within(swap.module, owner)}
        return [name for name in self.rebound if name not in own]


def early_names(swaps: list[Swap]) -> list[Swap]:
    """Return the names of other modules that hold an object of the swaps."""
    doomed = {id(thing): (swap, thing) for swap in _moved(swaps) for thing in (swap.held, swap.stock)}
    names = []
    # A module may have two names (__main__ and __mp_main__).
    seen = {id(swap.namespace) for swap in swaps if swap.holder() is not None}
    for module_name, module in sys.modules.copy().items():
        namespace = namespace_of(module)
        if namespace is None or id(namespace) in seen or within(module_name, OWN):
            continue
        seen.add(id(namespace))
        for name, value in namespace.copy().items():
            swap, held = doomed.get(id(value), (None, None))
            if swap is not None:
                holder: weakref.ref[ModuleType | type] = weakref.ref(module)
                names.append(swap._replace(module=module_name, name=name, holder=holder, held=held))
    return names


def early_places(swaps: list[Swap], owner: str) -> tuple[list[ClassAttribute], list[str]]:
    """Return early bindings outside of modules: attributes of classes, and places that cannot be rebound."""
    ours = {id(swap.stock): swap for swap in _moved(swaps)}
    holders = Holders(Own(swap.stock for swap in ours.values()), owner)
    attributes: list[ClassAttribute] = []
    listed: set[str] = set()
    for swap in ours.values():
        for holder in holders.of(swap.stock):
            if holders.is_module(holder):
                continue
            of_classes = _attributes(holders, holder, swap)
            attributes += of_classes
            if not of_classes:
                listed.update(holders.names_in(holder, swap.stock))
    return attributes, sorted(listed)


def _moved(swaps: list[Swap]) -> list[Swap]:
    return [swap for swap in swaps if swap.ours is not swap.stock]


def _attributes(holders: Holders, holder: object, swap: Swap) -> list[ClassAttribute]:
    """Return the class attributes by which this holder, a wrapper or a namespace, has torch's own."""
    kind = type(holder)
    if kind is staticmethod or kind is classmethod:
        wrapper = kind(swap.ours)  # type: ignore[call-arg]
        return [
            attribute for above in holders.of(holder) for attribute in _of(holders, above, holder, wrapper)
        ]
    return _of(holders, holder, swap.stock, swap.ours)


def _of(holders: Holders, namespace: object, old: object, new: object) -> list[ClassAttribute]:
    cls = holders.class_of(namespace)
    if cls is None:
        return []
    name = "" if holders.is_quiet(title(cls)) else title(cls)
    keys = [key for key, value in class_namespace(cls).copy().items() if value is old]
    return [ClassAttribute(name and f"{name}.{key}", weakref.ref(cls), key, old, new) for key in keys]
