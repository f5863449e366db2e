"""The replacement itself: check the whole set, write it, undo it.

Must never leave a part of the set written, and must never run code of the modules it looks at.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from importlib import import_module
from types import FunctionType

from torch_dcp_backport.activation.bindings import Early, Swap
from torch_dcp_backport.activation.holders import namespace_of, within
from torch_dcp_backport.activation.table import FIRST, Table, Target

# Torch decorates some of its functions with these; a layer of anybody else is a foreign patch.
_DECORATORS = ("contextlib", "functools")
_LRU_CACHE = type(functools.lru_cache(maxsize=None)(lambda: None))


class Refused(Exception):
    """The set cannot be replaced; nothing was changed."""

    def __init__(self, outcome: str, reason: str) -> None:
        super().__init__(reason)
        self.outcome = outcome
        self.reason = reason


def plan(table: Table, release: tuple[int, int], preview: bool) -> list[Swap]:
    """The whole set, checked; Refused where one member cannot be replaced."""
    provider = import_module(table.provider)
    swaps = []
    for target in table.targets:
        namespace = namespace_of(sys.modules.get(target.module))
        if namespace is None:
            raise Refused("unsupported", f"{target.module} is not loaded, though {table.trigger} is")
        if target.name not in namespace:
            if _required(target, release, preview):
                raise Refused("unsupported", f"{target.module} has no {target.name}: unknown layout")
            continue
        stock, ours = namespace[target.name], getattr(provider, target.name, None)
        swap = Swap(target.module, target.name, namespace, stock, ours)
        _check(swap, table)
        swaps.append(swap)
    return swaps


def _required(target: Target, release: tuple[int, int], preview: bool) -> bool:
    if preview and target.since == release > FIRST:
        return False  # cut before or after that release's names came
    return target.since <= release


def _check(swap: Swap, table: Table) -> None:
    foreign = foreign_layer(swap.stock, table.owner)
    if foreign is not None:
        raise Refused(
            "conflict",
            f"{swap.dotted} was already replaced by {foreign}: remove one of the two, "
            "or import torch_dcp_backport first if the other one can wrap it",
        )
    if swap.ours is None or isinstance(swap.stock, type) != isinstance(swap.ours, type):
        raise Refused("unsupported", f"{table.provider} has no replacement for {swap.dotted}")
    # torch 2.7 itself shifted the positions of _StateDictInfo, which only torch creates, by keyword.
    positions = not (isinstance(swap.stock, type) and swap.name.startswith("_"))
    misfit = call_misfit(swap.stock, swap.ours, positions)
    if misfit is not None:
        why = f"{swap.dotted} takes calls that the replacement does not ({misfit}): unknown layout"
        raise Refused("unsupported", why)


def foreign_layer(value: object, owner: str) -> str | None:
    """Who else had a hand in this function or class, seen through torch's own decorators; None if nobody."""
    layer: object | None = value
    home = "?"
    while layer is not None:
        # A foreign wrapper copies __module__ (functools.wraps) but not the globals it runs in.
        if type(layer) is FunctionType:  # isinstance would believe a wrapt proxy
            home = str(layer.__globals__.get("__name__"))
            known = within(home, owner) or home in _DECORATORS
        elif type(layer) in (_LRU_CACHE, type):
            home = str(getattr(layer, "__module__", None))
            known = within(home, owner)
        else:
            home, known = f"a {type(layer).__module__}.{type(layer).__qualname__}", False
        if not known:
            return home
        layer = getattr(layer, "__wrapped__", None)
    return None if within(home, owner) else home


def call_misfit(stock: object, ours: object, positions: bool = True) -> str | None:
    """Why some call that stock takes would fail with ours; None if there is none."""
    import inspect  # torch has it loaded by now

    if not callable(stock) or not callable(ours):
        return "not callable"
    theirs = list(inspect.signature(stock).parameters.values())
    mine = list(inspect.signature(ours).parameters.values())
    by_name = {parameter.name: (index, parameter) for index, parameter in enumerate(mine)}
    for index, want in enumerate(theirs):
        if want.name not in by_name:
            return f"no parameter {want.name}"
        place, have = by_name[want.name]
        # Keyword-only may become positional, nothing else may change.
        if have.kind is not want.kind and not (
            want.kind is want.KEYWORD_ONLY and have.kind is want.POSITIONAL_OR_KEYWORD
        ):
            return f"parameter {want.name} is {have.kind.description}"
        positional = want.kind in (want.POSITIONAL_ONLY, want.POSITIONAL_OR_KEYWORD)
        if positions and positional and place != index:
            return f"parameter {want.name} is not number {index + 1}"
        if want.default is not want.empty and have.default is have.empty:
            return f"parameter {want.name} has no default"
    known = {want.name for want in theirs}
    for have in mine:
        optional = have.default is not have.empty or have.kind in (have.VAR_POSITIONAL, have.VAR_KEYWORD)
        if have.name not in known and not optional:
            return f"new parameter {have.name} has no default"
    return None


class Replacement:
    """A checked set and the early bindings that go with it: written and undone as one."""

    def __init__(self, swaps: list[Swap], early: Early) -> None:
        self.swaps = swaps
        self.early = early
        self._labels: list[tuple[type, str, str]] = []  # our classes, where they say they are from, as what

    def write(self) -> None:
        try:
            _update(self.swaps, lambda swap: (swap.stock, swap.ours))
            for swap in self.swaps:
                # Pickle looks a class up by module and name. Functions keep theirs: tracebacks stay honest.
                if isinstance(swap.ours, type):
                    self._labels.append((swap.ours, swap.ours.__module__, swap.ours.__qualname__))
                    _label(swap.ours, swap.module, swap.name)
            _update(self.early.names, lambda swap: (swap.stock, swap.ours))
            for place in self.early.places:
                place.put()
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        """Torch's own objects back, except where somebody put a third thing in place of ours since."""
        for place in self.early.places:
            place.undo()
        _update(self.early.names, lambda swap: (swap.ours, swap.stock))
        # A module that was imported anew has got what it imports itself from one that was not.
        now = [
            swap._replace(namespace=namespace_of(sys.modules.get(swap.module)) or {}) for swap in self.swaps
        ]
        _update([*self.swaps, *now], lambda swap: (swap.ours, swap.stock))
        while self._labels:
            _label(*self._labels.pop())

    def overridden(self) -> list[str]:
        """Names that no longer hold what was put there (a reload, another patch)."""
        lost = []
        for swap in self.swaps:
            now = namespace_of(sys.modules.get(swap.module))
            if now is None or now.get(swap.name) is not swap.ours:
                lost.append(swap.dotted)
        return lost

    def reloaded(self, table: Table) -> bool:
        """Whether torch's module was executed again, and has torch's own functions again."""
        module = namespace_of(sys.modules.get(table.trigger)) or {}
        imported = {swap.name for swap in self.swaps if swap.module != table.trigger}
        swaps = [swap for swap in self.swaps if swap.module == table.trigger and swap.name not in imported]
        return not any(module.get(swap.name) is swap.ours for swap in swaps) and not any(
            foreign_layer(module.get(swap.name), table.owner) for swap in swaps
        )


def _label(cls: type, module: str, qualname: str) -> None:
    if (cls.__module__, cls.__qualname__) != (module, qualname):
        cls.__module__, cls.__qualname__ = module, qualname


def _update(swaps: list[Swap], change: Callable[[Swap], tuple[object, object]]) -> None:
    """For each module one dict.update, which no other thread can see half done."""
    updates: dict[int, tuple[dict[str, object], dict[str, object]]] = {}
    for swap in swaps:
        old, new = change(swap)
        if swap.namespace.get(swap.name) is old:
            updates.setdefault(id(swap.namespace), (swap.namespace, {}))[1][swap.name] = new
    for namespace, new_values in updates.values():
        namespace.update(new_values)


def names_by_module(swaps: list[Swap]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    names: dict[str, list[str]] = {}
    for swap in swaps:
        names.setdefault(swap.module, []).append(swap.name)
    return tuple((module, tuple(sorted(found))) for module, found in names.items())


def records_of(swaps: list[Swap], table: Table) -> tuple[str, ...]:
    replaced = {(swap.module, swap.name) for swap in swaps}
    used = (target.records for target in table.targets if (target.module, target.name) in replaced)
    return tuple(sorted({record for records in used for record in records}))
