"""What Megatron's releases have otherwise: names that are not offered here, another order of arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])


def refusing(module: str, names: str, why: str = "") -> Callable[[str], Any]:
    """Return a module's `__getattr__`, which tells of Megatron's names that are not offered.

    Args:
        module: the module's name.
        names: Megatron's names, with spaces between them.
        why: the end of the error.
    """
    known = frozenset(names.split())

    def __getattr__(name: str) -> Any:
        if name in known:
            # No AttributeError: `from module import name` would put a text of its own in its place.
            raise ImportError(
                f"{module} does not offer Megatron's {name}{why or WHY}", name=name, path=module
            )
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return __getattr__


WHY = ": saves and loads are planned and written another way here; see dist_checkpointing.save and load"


def either_order(*newer: str) -> Callable[[F], F]:
    """Return a decorator for a function whose fourth argument, `common_strategy`, Megatron dropped.

    Args:
        newer: the names of the arguments from the fourth on, in the order from megatron-core 0.19 on. A bool
            in the fourth place says that a call has this order.
    """

    def decorated(function: F) -> F:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if len(args) > 3 and isinstance(args[3], bool):
                named = dict(zip(newer, args[3:]))
                twice = sorted({*named} & {*kwargs})
                if len(args) - 3 > len(newer) or twice:
                    what = f"got {', '.join(twice)} twice" if twice else f"takes {3 + len(newer)} arguments"
                    raise TypeError(f"{function.__name__}() {what} in the order of megatron-core 0.19")
                args, kwargs = args[:3], {**named, **kwargs}
            return function(*args, **kwargs)

        return cast(F, call)

    return decorated
