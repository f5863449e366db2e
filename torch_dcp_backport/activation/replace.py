"""The replacement itself: check the full set, write it, undo it.

Must never leave a part of the set written, and must never run code of the modules it looks at.
"""

from __future__ import annotations

import functools
import linecache
import sys
import weakref
from collections.abc import Collection, Iterable, Sequence
from importlib import import_module
from types import FunctionType, ModuleType
from typing import NamedTuple, cast

from torch_dcp_backport.activation.bindings import (
    ABSENT,
    ClassAttribute,
    Early,
    Swap,
    contents,
    holder_in,
    turn,
)
from torch_dcp_backport.activation.holders import class_namespace, namespace_of, within
from torch_dcp_backport.activation.table import FIRST, Table, Target

# The module whose functions stand for torch's until the set is complete.
STUBS = "torch_dcp_backport.activation.importer"
# Torch decorates some of its functions with these, and with its own.
_DECORATORS = ("contextlib", "functools")
_LAYERLESS = ("@no_type_check",)  # returns what it is given
_LRU_CACHE = type(functools.lru_cache(maxsize=None)(lambda: None))
# The names that @dataclass writes into a class, besides the defaults of its fields.
_DATACLASS = ("__init__", "__repr__", "__eq__", "__replace__", "__match_args__", "__annotations__",
    "__dataclass_fields__")  # fmt: skip


class Refused(Exception):
    """The set cannot be replaced; nothing was changed."""

    def __init__(self, outcome: str, reason: str) -> None:
        super().__init__(reason)
        self.outcome = outcome
        self.reason = reason


class Plan(NamedTuple):
    """A checked set: names of modules, and attributes of torch's own classes."""

    swaps: list[Swap]
    attributes: list[ClassAttribute]


def plan(table: Table, release: tuple[int, int], preview: bool, stubs: Sequence[Swap] = ()) -> Plan:
    """Return the full set, checked; raise Refused if a member cannot be replaced. `stubs`: as for `find`."""
    swaps, attributes = [], []
    for swap in find(table, table.modules, release, preview, stubs):
        swap = swap._replace(ours=replacement_of(table, swap.module, swap.name))
        _check(swap, table)
        if isinstance(swap.stock, type) and not swap.name.startswith("_"):
            # Instances made before stay instances of the class that other modules have.
            attributes += _extension(swap.stock, cast(type, swap.ours))
            swap = swap._replace(ours=swap.stock)
        swaps.append(swap)
    return Plan(swaps, attributes)


def replacement_of(table: Table, module: str, name: str) -> object:
    """Return our object for this name in torch's module, or None. Imports the provider."""
    (target,) = (target for target in table.targets if (target.module, target.name) == (module, name))
    value: object = import_module(target.provider or table.provider)
    for part in name.split("."):
        value = getattr(value, part, None)
    return value


def find(
    table: Table,
    modules: Collection[str],
    release: tuple[int, int],
    preview: bool,
    stubs: Sequence[Swap] = (),
) -> list[Swap]:
    """Return these modules' swaps, without a replacement yet; raise Refused if a name is not torch's own.

    `stubs`: those that are in place. An object that another tool put over a stub since counts as an object
    over ours: left alone, and reported as overridden. A wrapper around the stub calls ours by then.
    """
    put = {swap.dotted: swap for swap in stubs}
    # By name, and the id of what stands in the place of a stub: other modules import it from there.
    instead: dict[tuple[str, int], Swap] = {}
    swaps = []
    for target in table.targets:
        if target.module not in modules or not target.serves(release, preview):
            continue
        module = sys.modules.get(target.module)
        if module is None and target.module in table.optional:
            continue
        if namespace_of(module) is None:
            raise Refused("unsupported", f"{target.module} is not loaded, though {table.trigger} is")
        holder = holder_in(module, target.name)
        held = contents(holder).get(target.name.rpartition(".")[2], ABSENT)
        if holder is None or held is ABSENT:
            if _required(target, release, preview):
                raise Refused("unsupported", f"{target.module} has no {target.name}: unknown layout")
            continue
        stock = behind_stub(held)
        swap = Swap(target.module, target.name, weakref.ref(holder), held, stock, stock)
        foreign = foreign_layer(stock, table)
        stub = put.get(swap.dotted, instead.get((swap.key, id(held))))
        if foreign is not None and stub is not None:
            instead[swap.key, id(held)] = stub
            swap = swap._replace(held=stub.ours, stock=stub.stock, ours=stub.stock)
        elif foreign is not None:
            raise Refused(
                "conflict",
                f"{swap.dotted} was already replaced by {foreign}: remove one of the two, "
                "or import torch_dcp_backport first if the other one can wrap it",
            )
        swaps.append(swap)
    return swaps


def optional(table: Table, release: tuple[int, int], preview: bool) -> list[str]:
    """Return the optional helpers that have names to replace in this torch."""
    served = (
        target for target in table.targets if target.since <= release and target.serves(release, preview)
    )
    modules = {target.module for target in served}
    return [helper for helper in table.optional if helper in modules]


def behind_stub(value: object) -> object:
    """Return torch's own function behind a stub, of an earlier activation or another copy of us too."""
    stands_for = getattr(value, "__wrapped__", None) if _home(value) == STUBS else None
    return value if stands_for is None else stands_for


def _required(target: Target, release: tuple[int, int], preview: bool) -> bool:
    if preview and target.since == release > FIRST:
        return False  # cut before or after that release's names came
    return target.since <= release


def _check(swap: Swap, table: Table) -> None:
    if swap.ours is None or isinstance(swap.stock, type) != isinstance(swap.ours, type):
        raise Refused("unsupported", f"there is no replacement for {swap.dotted}")
    # torch 2.7 itself shifted the positions of _StateDictInfo, which only torch creates, by keyword.
    positions = not (isinstance(swap.stock, type) and swap.name.startswith("_"))
    misfit = call_misfit(swap.stock, swap.ours, positions)
    if misfit is not None:
        why = f"{swap.dotted} takes calls that the replacement does not ({misfit}): unknown layout"
        raise Refused("unsupported", why)


def _extension(stock: type, ours: type) -> list[ClassAttribute]:
    """Return the attributes that turn torch's own dataclass into the newer."""
    old, new = class_namespace(stock), class_namespace(ours)
    fields = cast("dict[str, object]", new.get("__dataclass_fields__", {}))
    return [
        ClassAttribute("", weakref.ref(stock), key, old.get(key, ABSENT), new[key])
        for key in (*_DATACLASS, *fields)
        if key in new
    ]


def foreign_layer(value: object, table: Table) -> str | None:
    """Return the module that changed this function or class of torch's; None if there is none.

    A wrapper's home does not decide: every @torch.no_grad() comes from the same module as torch's own. So the
    layers are counted: torch's definition has one for each of its decorators.
    """
    definition, wrappers = value, []
    while getattr(definition, "__wrapped__", None) is not None:
        wrappers.append(_home(definition))
        definition = definition.__wrapped__  # type: ignore[attr-defined]
    home = _home(definition)
    if home not in table.modules:
        return home
    unknown = [layer for layer in wrappers if not within(layer, table.owner) and layer not in _DECORATORS]
    if unknown or not wrappers:
        return unknown[0] if unknown else None
    return wrappers[0] if len(wrappers) > _decorators(definition) else None


def _home(layer: object) -> str:
    """Return the module that has the code of a function, class or wrapper."""
    if type(layer) is FunctionType:  # isinstance would believe a wrapt proxy
        return str(layer.__globals__.get("__name__"))
    if type(layer) is type:
        return layer.__module__
    return (
        "functools" if type(layer) is _LRU_CACHE else f"a {type(layer).__module__}.{type(layer).__qualname__}"
    )


def _decorators(definition: object) -> int:
    """Return the number of decorators in torch's source of a function; the largest int without a source."""
    if type(definition) is not FunctionType:
        return 0
    code = definition.__code__
    linecache.checkcache(code.co_filename)
    lines = linecache.getlines(code.co_filename)[code.co_firstlineno - 1 :]
    count = 0
    for line in map(str.lstrip, lines):  # a method's are indented
        if line.startswith("def "):
            return count
        count += line.startswith("@") and not line.startswith(_LAYERLESS)
    return sys.maxsize


def call_misfit(stock: object, ours: object, positions: bool = True) -> str | None:
    """Return the reason why a call that stock takes would fail with ours; None if there is none."""
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
    """A checked set and the early bindings that go with it: written and undone together."""

    def __init__(self, plan: Plan, early: Early) -> None:
        self.swaps = plan.swaps
        self.early = early
        self._attributes = [*plan.attributes, *early.attributes]
        self._labels: list[tuple[type, str, str]] = []  # our classes, with their own module and name

    def write(self) -> None:
        try:
            _update([(swap.holder(), swap.key, swap.held, swap.ours) for swap in self.swaps])
            for swap in self.swaps:
                # Pickle looks a class up by module and name. Functions keep theirs: tracebacks stay honest.
                if isinstance(swap.ours, type) and swap.ours is not swap.stock:
                    self._labels.append((swap.ours, swap.ours.__module__, swap.ours.__qualname__))
                    _label(swap.ours, swap.module, swap.name)
            _update([(swap.holder(), swap.key, swap.held, swap.ours) for swap in self.early.names])
            for attribute in self._attributes:
                attribute.put()
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        """Put torch's own objects back, except over an object that replaced ours since."""
        for attribute in reversed(self._attributes):
            attribute.undo()
        # A module that was imported anew took its imports from modules that were not.
        anew = [(holder_in(sys.modules.get(swap.module), swap.name), swap) for swap in self.swaps]
        places = [(swap.holder(), swap) for swap in (*self.early.names, *self.swaps)]
        _update([(holder, swap.key, swap.ours, swap.stock) for holder, swap in (*places, *anew)])
        while self._labels:
            _label(*self._labels.pop())

    def overridden(self) -> list[str]:
        """Return names that no longer hold what was put there (a reload, another patch)."""
        lost = []
        for swap in self.swaps:
            now = contents(holder_in(sys.modules.get(swap.module), swap.name))
            if now.get(swap.key) is not swap.ours:
                lost.append(swap.dotted)
        return lost

    def reloaded(self, table: Table) -> bool:
        """Return whether torch's module was executed again, and has torch's own functions again."""
        module = namespace_of(sys.modules.get(table.trigger)) or {}
        imported = {swap.name for swap in self.swaps if swap.module != table.trigger}
        swaps = [swap for swap in self.swaps if swap.module == table.trigger and swap.name not in imported]
        return not any(module.get(swap.name) is swap.ours for swap in swaps) and not any(
            foreign_layer(module.get(swap.name), table) for swap in swaps
        )


def _label(cls: type, module: str, qualname: str) -> None:
    if (cls.__module__, cls.__qualname__) != (module, qualname):
        cls.__module__, cls.__qualname__ = module, qualname


def _update(changes: Iterable[tuple[ModuleType | type | None, str, object, object]]) -> None:
    """Apply (holder, name, old, new), each module in one dict.update: no thread sees it half done."""
    updates: dict[int, tuple[dict[str, object], dict[str, object]]] = {}
    for holder, name, old, new in changes:
        namespace = contents(holder)
        if issubclass(type(holder), type):
            turn(cast(type, holder), name, old, new)
        elif namespace.get(name, ABSENT) is old:
            updates.setdefault(id(namespace), (namespace, {}))[1][name] = new
    for namespace, new_values in updates.values():
        namespace.update(new_values)


def names_by_module(swaps: list[Swap]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    names: dict[str, list[str]] = {}
    for swap in swaps:
        names.setdefault(swap.module, []).append(swap.name)
    return tuple((module, tuple(sorted(of_module))) for module, of_module in names.items())


def records_of(swaps: list[Swap], table: Table) -> tuple[str, ...]:
    replaced = {(swap.module, swap.name) for swap in swaps}
    used = (target.records for target in table.targets if (target.module, target.name) in replaced)
    return tuple(sorted({record for records in used for record in records}))
