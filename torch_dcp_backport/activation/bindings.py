"""Who bound early what is about to be replaced, where that can be rebound, and where it cannot.

Rebinds names of modules and class attributes. What else holds an original is its owner's, who may keep it
there on purpose: it is listed. Must never keep a module or class of anybody alive.
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
    """One name in one module: what is there, what torch put there, and what shall be.

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
    """The module that has this name, or with a dot the class in it. Runs no code of either."""
    namespace = namespace_of(module)
    if namespace is None:
        return None
    cls = name.rpartition(".")[0]
    if not cls:
        return cast(ModuleType, module)
    found = namespace.get(cls)
    return cast(type, found) if issubclass(type(found), type) else None


def contents(holder: ModuleType | type | None) -> dict[str, object]:
    """The dict itself of a module or class; an empty one where there is none."""
    if issubclass(type(holder), type):
        return class_namespace(cast(type, holder))
    return namespace_of(holder) or {}


class ClassAttribute(NamedTuple):
    """One attribute of one class; ABSENT where there is none."""

    name: str  # empty: torch's own, nobody needs to hear of it
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
    """One attribute of one class, except where somebody put a third thing since."""
    if class_namespace(cls).get(key, ABSENT) is not old:
        return
    # Past a metaclass that has its own.
    if new is ABSENT:
        type.__delattr__(cls, key)
    else:
        type.__setattr__(cls, key, new)


class Early(NamedTuple):
    """All that was bound early."""

    names: list[Swap]
    attributes: list[ClassAttribute]
    listed: list[str]  # what cannot be rebound

    @property
    def rebound(self) -> tuple[str, ...]:
        """Where torch's own was. A stub has been ours from the beginning."""
        names = {swap.dotted for swap in self.names if swap.held is swap.stock}
        return tuple(sorted(names | {attribute.name for attribute in self.attributes if attribute.name}))

    def told(self, owner: str) -> list[str]:
        """What was rebound, without torch's own."""
        own = {swap.dotted for swap in self.names if within(swap.module, owner)}
        return [name for name in self.rebound if name not in own]


def early_names(swaps: list[Swap]) -> list[Swap]:
    """Names of other modules that hold what is about to be replaced."""
    doomed = {id(thing): (swap, thing) for swap in _moved(swaps) for thing in (swap.held, swap.stock)}
    found = []
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
                found.append(
                    swap._replace(module=module_name, name=name, holder=weakref.ref(module), held=held)
                )
    return found


def early_places(swaps: list[Swap], owner: str) -> tuple[list[ClassAttribute], list[str]]:
    """Outside of modules: attributes of classes, and the names of what cannot be rebound."""
    ours = {id(swap.stock): swap for swap in _moved(swaps)}
    holders = Holders(Own(swap.stock for swap in ours.values()), owner)
    attributes: list[ClassAttribute] = []
    listed: set[str] = set()
    for swap in ours.values():
        for holder in holders.of(swap.stock):
            found = [] if holders.is_module(holder) else _attributes(holders, holder, swap)
            attributes += found
            if not found and not holders.is_module(holder):
                listed.update(holders.names_in(holder, swap.stock))
    return attributes, sorted(listed)


def _moved(swaps: list[Swap]) -> list[Swap]:
    return [swap for swap in swaps if swap.ours is not swap.stock]


def _attributes(holders: Holders, holder: object, swap: Swap) -> list[ClassAttribute]:
    """The class attributes that this holder of torch's own is, or is the namespace of."""
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
