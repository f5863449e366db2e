"""Who bound early what is about to be replaced, where that can be rebound, and where it cannot.

Rebinds module-level names, class attributes, closures and partials. Other people's containers, objects and
defaults are theirs: some keep originals there on purpose. Those are listed.
"""

from __future__ import annotations

import functools
import sys
import types
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


class Swap(NamedTuple):
    """One name in one module: what is there, and what shall be."""

    module: str
    name: str
    namespace: dict[str, object]
    stock: object
    ours: object

    @property
    def dotted(self) -> str:
        return f"{self.module}.{self.name}"


class Place:
    """One place outside of modules: what it held, and what it shall hold."""

    def __init__(self, name: str, where: object, old: object, new: object) -> None:
        self.name = name  # empty: torch's own, nobody needs to hear of it
        self.where = where
        self.old = old
        self.new = new

    def put(self) -> None:
        self._turn(self.old, self.new)

    def undo(self) -> None:
        self._turn(self.new, self.old)

    def _turn(self, old: object, new: object) -> None:
        """Except where somebody put a third thing since."""
        if self._holds(old):
            self._set(new)

    def _holds(self, value: object) -> bool:
        raise NotImplementedError

    def _set(self, value: object) -> None:
        raise NotImplementedError


class ClassAttribute(Place):
    def __init__(self, name: str, cls: type, key: str, old: object, new: object) -> None:
        super().__init__(name, cls, old, new)
        self.key = key

    def _holds(self, value: object) -> bool:
        return class_namespace(cast(type, self.where)).get(self.key) is value

    def _set(self, value: object) -> None:
        type.__setattr__(cast(type, self.where), self.key, value)  # past a metaclass that has its own


class Cell(Place):
    def _holds(self, value: object) -> bool:
        try:
            return cast(types.CellType, self.where).cell_contents is value
        except ValueError:  # empty
            return False

    def _set(self, value: object) -> None:
        cast(types.CellType, self.where).cell_contents = value


class Partial(Place):
    """Its state, as for pickle: function, arguments, keywords, attributes."""

    def _holds(self, value: object) -> bool:
        parts = zip(_state(self.where), cast("tuple[object, ...]", value))
        return all(part is wanted for part, wanted in parts)

    def _set(self, value: object) -> None:
        functools.partial.__setstate__(self.where, value)  # type: ignore[attr-defined]


class Early(NamedTuple):
    """All that was bound early."""

    names: list[Swap]  # module-level
    places: list[Place]
    listed: list[str]  # what cannot be rebound

    @property
    def rebound(self) -> tuple[str, ...]:
        names = {swap.dotted for swap in self.names} | {place.name for place in self.places if place.name}
        return tuple(sorted(names))

    def told(self, owner: str) -> list[str]:
        """What was rebound, without torch's own."""
        own = {swap.dotted for swap in self.names if within(swap.module, owner)}
        return [name for name in self.rebound if name not in own]


def early_names(swaps: list[Swap]) -> list[Swap]:
    """Module-level names elsewhere that hold what is about to be replaced."""
    doomed = {id(swap.stock): swap for swap in swaps}
    found = []
    seen = {id(swap.namespace) for swap in swaps}  # a module may have two names (__main__ and __mp_main__)
    for module_name, module in sys.modules.copy().items():
        namespace = namespace_of(module)
        if namespace is None or id(namespace) in seen or within(module_name, OWN):
            continue
        seen.add(id(namespace))
        for name, value in namespace.copy().items():
            swap = doomed.get(id(value))
            if swap is not None:
                found.append(Swap(module_name, name, namespace, swap.stock, swap.ours))
    return found


def early_places(swaps: list[Swap], owner: str) -> tuple[list[Place], list[str]]:
    """Outside of modules: what can be rebound, and the names of what cannot."""
    return _Search(swaps, owner).run()


class _Search:
    def __init__(self, swaps: list[Swap], owner: str) -> None:
        self.swaps = {id(swap.stock): swap for swap in swaps}
        self.holders = Holders(Own(swap.stock for swap in self.swaps.values()), owner)
        self.places: dict[tuple[int, str], Place] = {}
        self.listed: set[str] = set()

    def run(self) -> tuple[list[Place], list[str]]:
        for swap in self.swaps.values():
            for holder in self.holders.of(swap.stock):
                if not self.holders.is_module(holder) and not self._rebindable(holder, swap):
                    self.listed.update(self.holders.names_in(holder, swap.stock))
        return list(self.places.values()), sorted(self.listed)

    def _rebindable(self, holder: object, swap: Swap) -> bool:
        kind = type(holder)
        if kind is types.CellType:
            self._cell(holder, swap)
            return True
        if kind is functools.partial:
            self._partial(holder)
            return True
        above = self.holders.of(holder)
        if kind is staticmethod or kind is classmethod:
            wrapper = kind(swap.ours)  # type: ignore[call-arg]
            return sum(self._attribute(namespace, holder, wrapper) for namespace in above) > 0
        partials = [one for one in above if type(one) is functools.partial]
        if kind in (tuple, dict) and partials:  # its arguments
            for one in partials:
                self._partial(one)
            return True
        return self._attribute(holder, swap.stock, swap.ours)

    def _attribute(self, namespace: object, old: object, new: object) -> bool:
        cls = self.holders.class_of(namespace)
        if cls is None:
            return False
        for key, value in class_namespace(cls).copy().items():
            if value is old:
                name = "" if self.holders.is_quiet(title(cls)) else f"{title(cls)}.{key}"
                self.places[id(cls), key] = ClassAttribute(name, cls, key, old, new)
        return True

    def _cell(self, cell: object, swap: Swap) -> None:
        if not self.holders.is_for_super(cell):
            self.places[id(cell), ""] = Cell(self._name("closure", cell), cell, swap.stock, swap.ours)

    def _partial(self, partial: object) -> None:
        old = _state(partial)
        function, args, keywords, attributes = old
        new_args = tuple(self._replaced(value) for value in cast("tuple[object, ...]", args))
        known = cast("dict[str, object]", keywords)
        new_keywords = {key: self._replaced(value) for key, value in known.items()}
        new = (self._replaced(function), new_args, new_keywords, attributes)
        self.places[id(partial), ""] = Partial(self._name("functools.partial", partial), partial, old, new)

    def _replaced(self, value: object) -> object:
        swap = self.swaps.get(id(value))
        return value if swap is None else swap.ours

    def _name(self, what: str, thing: object) -> str:
        names = self.holders.names(thing)
        if names:
            return names[0] if names[0].startswith(what) else f"{what} in {names[0]}"
        return "" if self.holders.of(thing) else f"a {what}"  # torch's own, or in a running function


def _state(partial: object) -> tuple[object, ...]:
    reduced = functools.partial.__reduce__(cast("functools.partial[object]", partial))
    return cast("tuple[object, ...]", reduced[2])
