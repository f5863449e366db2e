"""A model's or optimizer's own methods, replaced by calls of the get_* and set_* functions.

Shares torch's set of replaced methods. Must never make a second set: a replaced method that is not in the set
that torch or this package looks into would call itself.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any, Union

import torch
from torch import nn

STOCK = "torch.distributed.checkpoint.state_dict"


class Getter:
    """The replacement of a model's or optimizer's `state_dict`."""

    # All getters and setters are equal. One placeholder in torch's set is enough to recognise every one
    # of them, and the set, which lives as long as the process, keeps no model alive.
    def __new__(cls, *_: object) -> Getter:
        import_module(STOCK)._patched_state_dict.add(PLACEHOLDER)
        return super().__new__(cls)

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Getter)

    def __hash__(self) -> int:
        return hash(Getter)

    def __call__(self) -> Any:
        return self.call()


class Setter(Getter):
    """The replacement of a model's or optimizer's `load_state_dict`."""

    def __call__(self, state_dict: Any) -> Any:  # type: ignore[override]
        return self.call(state_dict)


PLACEHOLDER = object.__new__(Getter)


def replace_methods(
    owners: Iterable[Union[nn.Module, torch.optim.Optimizer]],
    get: Callable[[], Any],
    load: Callable[[Any], Any],
) -> None:
    getter, setter = Getter(get), Setter(load)
    for owner in owners:
        owner.state_dict = getter  # type: ignore[method-assign]
        owner.load_state_dict = setter  # type: ignore[method-assign]


def original_method(obj: Union[nn.Module, torch.optim.Optimizer], api: str) -> Callable[..., Any]:
    """`obj.state_dict` or the like; that of its class, where the object's method is a replaced one.

    A replaced method calls the get_* and set_* functions: calling it from these would never end.
    """
    call = getattr(obj, api)
    stock = sys.modules.get(STOCK)
    if stock is not None and call in stock._patched_state_dict:
        return functools.partial(getattr(type(obj), api), self=obj)
    return call  # type: ignore[no-any-return]
