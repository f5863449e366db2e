"""The holders of some objects, as the garbage collector sees them, and a name for each place.

Only looks: must never run code of the objects that it looks at (no getattr, no ==). Locals of running
functions are left out, and so are objects that gc.freeze() set aside: the collector does not show them.
"""

from __future__ import annotations

import functools
import gc
import sys
import types
from typing import cast

OWN = __name__.partition(".")[0]
DEPTH = 8  # torch.compile makes of a function: cell, tuple, function, twice, and the holder of that

_STANDARD = getattr(  # came with Python 3.10
    sys, "stdlib_module_names", frozenset({"builtins", "collections", "contextlib", "functools", "types"})
)
_LRU_CACHE = type(functools.lru_cache(maxsize=None)(lambda: None))
# Holding a function or class in one of these ways calls or makes nothing.
_IDLE = frozenset({types.FrameType, types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType,
    types.GetSetDescriptorType, types.MemberDescriptorType, types.GenericAlias,
    getattr(types, "UnionType", types.GenericAlias)})  # fmt: skip
_IDLE_CLASSES = ("typing.", "dataclasses.Field")
_IDLE_KEYS = frozenset({"__annotations__", "__annotations_cache__", "__wrapped__"})
# Parts of a function or of an object, without a name of their own.
_PARTS = frozenset({tuple, dict, types.CellType})
_WHOLES = ("closure of ", "default of ", "attribute of ", "a ")

# The attributes of a class by `type` itself: a metaclass may have others of these names.
_facts = vars(type)


class Own(list[object]):
    """A list of this package's: a holder that does not count."""


def within(module: str, package: str) -> bool:
    return module.partition(".")[0] == package


def namespace_of(module: object) -> dict[str, object] | None:
    """Return a module's globals without running code of it: lazy modules import things on a plain getattr."""
    if not issubclass(type(module), types.ModuleType):
        return None
    namespace = object.__getattribute__(module, "__dict__")
    return namespace if isinstance(namespace, dict) else None


def class_namespace(cls: type) -> dict[str, object]:
    """Return the dict itself. vars() gives a proxy of it."""
    (namespace,) = gc.get_referents(_facts["__dict__"].__get__(cls))
    return cast("dict[str, object]", namespace)


def title(cls: type) -> str:
    return f"{_facts['__module__'].__get__(cls)}.{_facts['__qualname__'].__get__(cls)}"


class Holders:
    """The holders of some objects, their holders, and so on, as far as a name needs them."""

    def __init__(self, things: Own, owner: str) -> None:
        self._quiet = (owner, OWN)  # packages that know what they do
        self._modules: dict[int, str] = {}
        for name, module in sys.modules.copy().items():
            namespace = namespace_of(module)
            if namespace is not None:  # a module may have two names (__main__ and __mp_main__)
                self._modules.setdefault(id(namespace), name)
        self._above: dict[int, Own] = {}
        for _ in range(DEPTH):
            if things:
                things = self._climb(things)

    def of(self, thing: object) -> Own:
        return self._above.get(id(thing), Own())

    def names(self, thing: object) -> list[str]:
        """Return the places of an object outside torch and the standard library."""
        return self._names(thing, frozenset())

    def is_module(self, holder: object) -> bool:
        return id(holder) in self._modules

    def class_of(self, namespace: object) -> type | None:
        """Return the class that has this namespace."""
        for holder in self.of(namespace):
            if issubclass(type(holder), type) and class_namespace(cast(type, holder)) is namespace:
                return cast(type, holder)
        return None

    def is_quiet(self, dotted: str) -> bool:
        """Return whether a name is torch's or ours."""
        return dotted.partition(".")[0] in self._quiet

    def _climb(self, things: Own) -> Own:
        """Note the holders of these objects, and return those whose own holders are needed."""
        wanted = {id(thing) for thing in things}
        above = Own()
        for holder in gc.get_referrers(*things):
            if not self._matters(holder):
                continue
            new = id(holder) not in self._above
            held = [thing for thing in gc.get_referents(holder) if id(thing) in wanted]
            counted = [thing for thing in held if self._counts(holder, thing)]
            for thing in counted:
                self._above.setdefault(id(thing), Own()).append(holder)
            if counted and new and not self._is_last(holder):
                self._above[id(holder)] = Own()
                above.append(holder)
        return above

    def _matters(self, holder: object) -> bool:
        kind = type(holder)
        if kind in _IDLE or kind is Own:
            return False
        if issubclass(kind, type) or kind in _PARTS:
            return True
        return not title(kind).startswith(_IDLE_CLASSES) and not self.is_quiet(title(kind))

    def _is_last(self, holder: object) -> bool:
        """Return whether a holder has a name of its own, so that its holders do not matter."""
        kind = type(holder)
        if kind is types.FunctionType:
            return self._is_user_code(_function_title(holder))
        return self.is_module(holder) or issubclass(kind, type) or self._is_user_code(title(kind))

    def _is_user_code(self, dotted: str) -> bool:
        return not self.is_quiet(dotted) and dotted.partition(".")[0] not in _STANDARD

    def _counts(self, holder: object, thing: object) -> bool:
        """Return whether the holder may use the object: an annotation does not."""
        kind = type(holder)
        if issubclass(kind, type):
            cls = cast(type, holder)
            return class_namespace(cls) is thing or any(
                base is thing for base in _facts["__bases__"].__get__(cls)
            )
        if kind is types.FunctionType:
            return _role(cast(types.FunctionType, holder), thing) is not None
        if kind is dict:
            values = cast("dict[object, object]", holder).copy()
            keys = [key for key, value in values.items() if value is thing or key is thing]
            return any(type(key) is not str or key not in _IDLE_KEYS for key in keys)
        # A cache does not call its entries.
        return kind is not _LRU_CACHE or type(thing) not in _PARTS

    def _names(self, thing: object, seen: frozenset[int]) -> list[str]:
        if id(thing) in seen:  # a recursive function is in its own closure
            return []
        seen |= {id(thing)}
        names = {name for holder in self.of(thing) for name in self.names_in(holder, thing, seen)}
        return sorted(names, key=lambda name: (len(name), name))

    def names_in(self, holder: object, thing: object, seen: frozenset[int] = frozenset()) -> list[str]:
        """Return the names of an object's place in this holder."""
        kind = type(holder)
        if issubclass(kind, type):
            name = title(cast(type, holder))
            return [] if self.is_quiet(name) else [f"base class of {name}"]
        if kind is types.FunctionType:
            names = [_function_title(holder)] if self._is_last(holder) else self._names(holder, seen)
            role = _role(cast(types.FunctionType, holder), thing)
            return [name if name.startswith("closure of ") else f"{role} of {name}" for name in names]
        if self._is_last(holder) and not self.is_module(holder):
            return [f"a {title(kind)} object"]
        cls = self.class_of(holder)
        if cls is None and not self.is_module(holder):
            names = self._names(holder, seen)
            what = title(kind).replace("builtins.", "")
            return [n if kind in _PARTS and n.startswith(_WHOLES) else f"{what} in {n}" for n in names]
        home = self._modules[id(holder)] if cls is None else title(cls)
        keys = [key for key, value in cast("dict[str, object]", holder).copy().items() if value is thing]
        return [] if self.is_quiet(home) else [f"{home}.{key}" for key in keys]


def _function_title(function: object) -> str:
    known = cast(types.FunctionType, function)
    return f"{known.__globals__.get('__name__')}.{known.__qualname__}"


def _role(function: types.FunctionType, part: object) -> str | None:
    """Return the role of a part in its function. Annotations are not asked for: that may run code."""
    if part is function.__closure__:
        return "closure"
    if part is function.__defaults__ or part is function.__kwdefaults__:
        return "default"
    return "attribute" if part is function.__dict__ else None
