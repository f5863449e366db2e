"""The replacement itself: check the full set, write it, undo it.

Must never leave a part of the set written, and must never run code of the modules it looks at.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Mapping
from importlib import import_module
from types import FunctionType, ModuleType
from typing import NamedTuple, cast

from torch_dcp_backport.activation.bindings import (
    ABSENT,
    Early,
    Swap,
    holder_in,
    namespace_of,
    turn,
)
from torch_dcp_backport.activation.table import DECORATED, FIRST, TABLE, Target

# Torch decorates some of its functions with these, and with its own.
_DECORATORS = ("contextlib", "functools")
MOST_LAYERS = 100
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


class CheckedSet(NamedTuple):
    """A checked set: names of modules, and attributes of torch's own classes."""

    swaps: list[Swap]
    attributes: list[Swap]
    left_out: list[LeftOut]


class LeftOut(NamedTuple):
    """A name that another tool has replaced before, and that the others do without."""

    module: str
    name: str
    by: str  # the module that replaced it

    def __str__(self) -> str:
        return f"{self.module}.{self.name} (replaced by {self.by})"


def plan(
    release: tuple[int, int],
    preview: bool,
    former: Mapping[str, Swap] | None = None,
    complete: bool = True,
) -> CheckedSet:
    """Return the full set, checked; raise Refused if a member is not torch's own or cannot be replaced.

    Unless it has to be `complete`, a name that another tool has replaced is left out where the others can do
    without.

    `former`: the swaps of before a module of torch's was executed again, by name. What is there is ours.
    """
    swaps, attributes, left_out = [], [], []
    for target in TABLE.targets:
        module = sys.modules.get(target.module)
        if not target.serves(release, preview) or (module is None and target.module in TABLE.optional):
            continue
        if not namespace_of(module):
            raise Refused("unsupported", f"{target.module} is not loaded, though {TABLE.trigger} is")
        holder = holder_in(module, target.name)
        stock = namespace_of(holder).get(target.name.rpartition(".")[2], ABSENT)
        if holder is None or stock is ABSENT:
            if _required(target, release, preview):
                raise Refused("unsupported", f"{target.module} has no {target.name}: unknown layout")
            continue
        ours = replacement_of(target.module, target.name)
        swap = Swap(target.module, target.name, weakref.ref(holder), stock, ours)
        before = (former or {}).get(swap.dotted)
        if before is not None and stock is before.ours:
            swap = swap._replace(stock=before.stock, ours=before.ours)
        else:
            foreign = _foreign(swap, release)
            if foreign is not None and target.is_independent and not complete:
                left_out.append(LeftOut(swap.module, swap.name, foreign))
                continue
            _check(swap, foreign, complete)
            if isinstance(stock, type) and not swap.name.startswith("_"):
                # Instances made before stay instances of the class that other modules have.
                attributes += _extension(stock, cast(type, ours))
                swap = swap._replace(ours=stock)
        swaps.append(swap)
    return CheckedSet(swaps, attributes, left_out)


def replacement_of(module: str, name: str) -> object:
    """Return our object for this name in torch's module, or None. Imports the provider."""
    (target,) = (target for target in TABLE.targets if (target.module, target.name) == (module, name))
    value: object = import_module(target.provider or TABLE.provider)
    for part in name.split("."):
        value = getattr(value, part, None)
    return value


def optional(release: tuple[int, int], preview: bool) -> list[str]:
    """Return the optional modules that have names to replace in this torch."""
    served = (target for target in TABLE.targets if target.since <= release)
    modules = {target.module for target in served if target.serves(release, preview)}
    return [module for module in TABLE.optional if module in modules]


def _required(target: Target, release: tuple[int, int], preview: bool) -> bool:
    if preview and target.since == release > FIRST:
        return False  # cut before or after that release's names came
    return target.since <= release


def is_torchs_now(left_out: LeftOut, release: tuple[int, int]) -> bool:
    """Return whether a name that was left out holds torch's own object again."""
    holder = holder_in(sys.modules.get(left_out.module), left_out.name)
    stock = namespace_of(holder).get(left_out.name.rpartition(".")[2], ABSENT)
    return stock is not ABSENT and foreign_layer(stock, _layers(left_out.name, release)) is None


def _layers(name: str, release: tuple[int, int]) -> int:
    return sum(since <= release for since in DECORATED.get(name, ()))


def _foreign(swap: Swap, release: tuple[int, int]) -> str | None:
    return foreign_layer(swap.stock, _layers(swap.name, release))


def _check(swap: Swap, foreign: str | None, complete: bool) -> None:
    if foreign is not None:
        why = "" if complete else " (other functions of the set need ours there, so that none is replaced)"
        raise Refused(
            "conflict",
            f"{swap.dotted} was already replaced by {foreign}{why}: remove one of the two, "
            "or import torch_dcp_backport first if the other one can wrap it",
        )
    if swap.ours is None or isinstance(swap.stock, type) != isinstance(swap.ours, type):
        raise Refused("unsupported", f"there is no replacement for {swap.dotted}")
    # torch 2.7 itself shifted the positions of _StateDictInfo, which only torch creates, by keyword.
    positions = not (isinstance(swap.stock, type) and swap.name.startswith("_"))
    misfit = call_misfit(swap.stock, swap.ours, positions)
    if misfit is not None:
        why = f"{swap.dotted} takes calls that the replacement does not ({misfit}): unknown layout"
        raise Refused("unsupported", why)


def _extension(stock: type, ours: type) -> list[Swap]:
    """Return the attributes that turn torch's own dataclass into the newer."""
    old, new = namespace_of(stock), namespace_of(ours)
    fields = cast("dict[str, object]", new.get("__dataclass_fields__", {}))
    keys = [key for key in (*_DATACLASS, *fields) if key in new]
    home: weakref.ref[ModuleType | type] = weakref.ref(stock)
    return [
        Swap(stock.__module__, f"{stock.__qualname__}.{key}", home, old.get(key, ABSENT), new[key])
        for key in keys
    ]


def foreign_layer(value: object, layers: int = 1) -> str | None:
    """Return the module that changed this function or class of torch's; None if there is none.

    A wrapper's home does not decide: every @torch.no_grad() comes from the same module as torch's own. But
    the `layers` that torch has around a function are known: most have none.
    """
    definition, wrappers = value, []
    while getattr(definition, "__wrapped__", None) is not None:
        wrappers.append(_home(definition))
        if len(wrappers) > MOST_LAYERS:  # a mock has one for ever
            return wrappers[0]
        definition = definition.__wrapped__  # type: ignore[attr-defined]
    home = _home(definition)
    if home not in TABLE.modules:
        return home
    for wrapper in wrappers:
        if wrapper.partition(".")[0] != TABLE.owner and wrapper not in _DECORATORS:
            return wrapper
    return wrappers[0] if len(wrappers) > layers else None


def _home(layer: object) -> str:
    """Return the module that has the code of a function, class or wrapper."""
    if type(layer) is FunctionType:  # isinstance would believe a wrapt proxy
        return str(layer.__globals__.get("__name__"))
    if type(layer) is type:
        return layer.__module__
    return (
        "functools" if type(layer) is _LRU_CACHE else f"a {type(layer).__module__}.{type(layer).__qualname__}"
    )


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

    def __init__(self, plan: CheckedSet, early: Early) -> None:
        self.swaps = plan.swaps
        self.left_out = plan.left_out
        self.early = early
        self._all = [*plan.swaps, *plan.attributes, *early.swaps]
        # Our classes and functions, with their own module and name.
        self._labels: list[tuple[type | FunctionType, str, str]] = []

    def write(self) -> None:
        try:
            turn([(swap.holder(), swap.key, swap.stock, swap.ours) for swap in self._all])
            self._label_as_torchs()
        except BaseException:
            self.undo()
            raise

    def _label_as_torchs(self) -> None:
        """Give our classes and functions the module and name of torch's.

        Pickle and cloudpickle look both up by these: the process that loads them may not have this package.
        Tracebacks go by the code, whose file and lines stay ours.
        """
        labelled: set[int] = set()
        for swap in self.swaps:
            ours = swap.ours
            # An object that is torch's under several names has the first, its home.
            if ours is swap.stock or id(ours) in labelled or not isinstance(ours, (type, FunctionType)):
                continue
            labelled.add(id(ours))
            self._labels.append((ours, ours.__module__, ours.__qualname__))
            _label(ours, swap.module, swap.name)

    def extend(self, early: Early) -> None:
        """Write bindings that were made while the others were written."""
        self.early = Early([*self.early.swaps, *early.swaps], sorted({*self.early.listed, *early.listed}))
        self._all += early.swaps
        turn([(swap.holder(), swap.key, swap.stock, swap.ours) for swap in early.swaps])

    def undo(self) -> None:
        """Put torch's own objects back, except over an object that replaced ours since."""
        # A module that was imported anew took its imports from modules that were not.
        anew = [(swap.holder_now(), swap.key, swap.ours, swap.stock) for swap in self.swaps]
        turn([*anew, *((swap.holder(), swap.key, swap.ours, swap.stock) for swap in reversed(self._all))])
        while self._labels:
            _label(*self._labels.pop())

    def overridden(self) -> list[str]:
        """Return names that no longer hold what was put there (a reload, another patch)."""
        return [
            swap.dotted
            for swap in self.swaps
            if namespace_of(swap.holder_now()).get(swap.key) is not swap.ours
        ]

    def reloaded(self) -> bool:
        """Return whether torch's module was executed again, and has torch's own functions again."""
        module = namespace_of(sys.modules.get(TABLE.trigger))
        imported = {swap.name for swap in self.swaps if swap.module != TABLE.trigger}
        own = [swap for swap in self.swaps if swap.module == TABLE.trigger and swap.name not in imported]
        now = [(module.get(swap.name), swap.ours) for swap in own]
        return not any(held is ours or foreign_layer(held) for held, ours in now)

    def names_by_module(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        names: dict[str, list[str]] = {}
        for swap in self.swaps:
            names.setdefault(swap.module, []).append(swap.name)
        return tuple((module, tuple(sorted(of_module))) for module, of_module in names.items())

    def records(self) -> tuple[str, ...]:
        replaced = {(swap.module, swap.name) for swap in self.swaps}
        used = (target.records for target in TABLE.targets if (target.module, target.name) in replaced)
        return tuple(sorted({record for records in used for record in records}))


def _label(ours: type | FunctionType, module: str, qualname: str) -> None:
    if (ours.__module__, ours.__qualname__) != (module, qualname):
        ours.__module__, ours.__qualname__ = module, qualname
