"""The parts of a replacement that are functions of their arguments."""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import wrapt

from torch_dcp_backport.activation.bindings import ABSENT, Early, Swap
from torch_dcp_backport.activation.replace import CheckedSet, Replacement, call_misfit, foreign_layer
from torch_dcp_backport.activation.table import STATE_DICT


def _f(a, b, c=1, *, d=None):  # type: ignore[no-untyped-def]
    ...


MISFITS: list[tuple[Callable[..., object], str | None]] = [
    (lambda a, b, c=1, *, d=None: None, None),
    (lambda a, b, c=1, d=None: None, None),
    (lambda a, b, c=2, e=3, *, d=None, g=0: None, None),
    (lambda a, b, c=1, *rest, d=None, **more: None, None),
    (lambda a, b, c=1: None, "no parameter d"),
    (lambda b, a, c=1, *, d=None: None, "parameter a is not number 1"),
    (lambda a, b, c, *, d=None: None, "parameter c has no default"),
    (lambda a, b, c=1, *, d: None, "parameter d has no default"),
    (lambda a, b, c=1, *, d=None, e: None, "new parameter e has no default"),
    (lambda a, b, *, c=1, d=None: None, "parameter c is keyword-only"),
    (lambda *args, **kwargs: None, "no parameter a"),
]


@pytest.mark.parametrize(("ours", "misfit"), MISFITS)
def test_ours_must_take_every_call_that_stock_takes(ours: Callable[..., object], misfit: str | None) -> None:
    assert call_misfit(_f, ours) == misfit


SOURCE = "def stock(): pass\nclass Stock: pass\n"


@pytest.fixture
def torchs() -> dict[str, Any]:
    """The globals of a module of torch's."""
    scope: dict[str, Any] = {"__name__": STATE_DICT}
    exec(SOURCE, scope)
    return scope


@contextlib.contextmanager
def timed():  # type: ignore[no-untyped-def]
    yield


def wrapper(function: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(function)
    def call(*args: object) -> object:
        return function(*args)

    return call


HERE = __name__
LAYERS: dict[str, tuple[Callable[[Any], object], int, str | None]] = {
    "none": (lambda stock: stock, 0, None),
    "torch's own, around what torch decorates": (functools.lru_cache(None), 1, None),
    "a second one around that": (lambda stock: timed()(functools.lru_cache(None)(stock)), 1, "contextlib"),
    "around what torch does not decorate": (timed(), 0, "contextlib"),
    "a cache": (functools.lru_cache(None), 0, "functools"),
    "of another module": (wrapper, 1, HERE),
    "of wrapt": (lambda stock: wrapt.FunctionWrapper(stock, lambda f, *_: f()), 1, "FunctionWrapper"),
    "another function": (lambda stock: wrapper, 0, HERE),
    "a subclass": (lambda stock: type("Stock", (), {"__module__": "elsewhere"}), 0, "elsewhere"),
    "something else": (lambda stock: None, 0, "a builtins.NoneType"),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_another_tools_layer_is_told_from_torchs(torchs: dict[str, Any], layer: str) -> None:
    wrap, layers, home = LAYERS[layer]
    found = foreign_layer(wrap(torchs["stock"]), layers)
    assert found == home or (home is not None and found is not None and found.endswith(home))


def test_a_class_of_torchs_is_torchs(torchs: dict[str, Any]) -> None:
    assert foreign_layer(torchs["Stock"], 0) is None


@pytest.mark.parametrize("broken", [False, True])
def test_all_is_written_or_nothing(monkeypatch: pytest.MonkeyPatch, broken: bool) -> None:
    """A name in a module, a new attribute of a class, and last what a class of Python's refuses."""
    module, cls = ModuleType("fakehost"), type("Fake", (), {"__slots__": ("__weakref__",)})
    module.name = stock = object()  # type: ignore[attr-defined]
    ours = object()
    monkeypatch.setitem(sys.modules, "fakehost", module)
    swap = Swap("fakehost", "name", weakref.ref(module), stock, ours)
    new = Swap("fakehost", "Fake.new", weakref.ref(cls), ABSENT, ours)
    last = Swap("fakehost", "int.new", weakref.ref(int), ABSENT, ours)
    subject = Replacement(CheckedSet([swap], [new, *[last] * broken], []), Early([], []))
    if broken:
        with pytest.raises(TypeError):
            subject.write()
    else:
        subject.write()
        assert (module.name, vars(cls)["new"]) == (ours, ours)
        assert subject.overridden() == []
        module.name = third = object()
        assert subject.overridden() == ["fakehost.name"]
        subject.undo()
        assert (module.name, "new" in vars(cls)) == (third, False)
        return
    assert (module.name, "new" in vars(cls)) == (stock, False)


def test_a_wrapper_of_itself_is_another_tools() -> None:
    """The walk ends: a mock has a `__wrapped__` for ever."""

    def endless() -> None: ...

    endless.__wrapped__ = endless  # type: ignore[attr-defined]
    assert foreign_layer(endless) == __name__
