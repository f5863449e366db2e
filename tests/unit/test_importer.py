"""Hooks, replacement and undo on a package that stands in for torch (tests/imports has the real one)."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import pickle
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any
from unittest import mock

import fakes
import pytest
import wrapt

from torch_dcp_backport.activation import bindings, early, finder, replace
from torch_dcp_backport.activation import importer as importer_module
from torch_dcp_backport.activation.importer import Installer
from torch_dcp_backport.activation.replace import call_misfit
from torch_dcp_backport.activation.status import BackportWarning, LateImportWarning

MODULES = ("fakehost", "fakehost.low", "fakehost.lower", "fakehost.high", "fakeprovider", "client", "lazy")


@pytest.fixture(autouse=True)
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The fake packages, importable and not imported yet; warnings are errors unless a test expects them."""
    fakes.write(tmp_path)
    (tmp_path / "lazy.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    wrapt.register_post_import_hook(lambda module: None, "sys")  # puts wrapt's finder into sys.meta_path
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(finder, "_own", None)
    if finder.installed() is not None:
        sys.meta_path.remove(finder.installed())  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", ImportWarning)
        yield tmp_path
    for name in MODULES:
        sys.modules.pop(name, None)


def hooked() -> set[str]:
    return set(finder.process()._hooks)


def installer(strict: bool = False) -> Installer:
    return Installer(fakes.TABLE, fakes.STRICT if strict else fakes.AUTO)


def load(name: str) -> types.ModuleType:
    return importlib.import_module(name)


def stock() -> dict[str, dict[str, object]]:
    """The modules' globals as they are now, to be compared by identity."""
    found = {name: dict(vars(sys.modules[name])) for name in ("fakehost.low", "fakehost.high")}
    return {**found, "a class": dict(vars(getattr(sys.modules["fakehost.low"], "Writer", object)))}


def same(a: dict[str, dict[str, object]], b: dict[str, dict[str, object]]) -> bool:
    return all(a[m].keys() == b[m].keys() and all(a[m][n] is b[m][n] for n in a[m]) for m in a)


def assert_applied(subject: Installer) -> None:
    low, high, ours = (sys.modules[name] for name in ("fakehost.low", "fakehost.high", "fakeprovider"))
    status = subject.status()
    assert (status.outcome, status.reason) == ("applied", "fakehost 2.6 is ill")
    assert dict(status.replaced) == fakes.NAMES
    assert status.records == fakes.RECORDS
    assert status.overridden == ()
    for module, names in ((low, fakes.NAMES["fakehost.low"]), (high, fakes.NAMES["fakehost.high"])):
        for name in set(names) - {"Options"}:
            assert attrgetter(name)(module) is attrgetter(name)(ours)
    assert high.Options.__module__ == "fakehost.high"
    assert high.Options(more=1) == high.Options(True, 1) != high.Options()
    assert high._load.__module__ == "fakeprovider"
    # What was not replaced finds what was.
    assert high.load_with(None) == "our _load"


def test_waits_for_the_module_and_then_applies() -> None:
    subject = installer()
    subject.install()
    assert subject.status().outcome == "pending"
    assert "waiting for fakehost.high" in subject.status().reason
    assert not {"fakehost", "fakeprovider"} & set(sys.modules)
    load("fakehost.low")
    assert subject.status().outcome == "pending"
    assert not {"fakehost.high", "fakeprovider"} & set(sys.modules)
    load("fakehost.high")
    assert_applied(subject)


def test_applies_at_once_where_the_module_is_loaded() -> None:
    load("fakehost.high")
    subject = installer()
    subject.install()
    assert_applied(subject)
    assert hooked() == set()


def test_the_import_system_keeps_no_trace() -> None:
    subject = installer()
    subject.install()
    finders = list(sys.meta_path)
    high = load("fakehost.high")
    assert_applied(subject)
    assert hooked() == set()
    assert type(high.__loader__) is type(load("json").__loader__)
    assert high.__spec__ is not None
    assert high.__spec__.loader is high.__loader__
    assert sys.meta_path == finders


def test_installing_again_changes_nothing() -> None:
    subject = installer()
    subject.install()
    subject.install()
    assert sys.meta_path.count(finder.process()) == 1  # type: ignore[arg-type]
    load("fakehost.high")
    applied = stock()
    subject.install()
    assert same(stock(), applied)
    assert_applied(subject)


def test_remove_restores_torchs_own_objects() -> None:
    load("fakehost.high")
    before = stock()
    first = installer()
    first.install()
    assert not same(stock(), before)
    assert first.remove() == []
    assert same(stock(), before)
    assert load("fakeprovider").Options.__module__ == "fakeprovider"
    second = installer()
    second.install()
    assert_applied(second)
    second.remove()
    assert same(stock(), before)


def test_remove_takes_the_hook_back() -> None:
    subject = installer()
    subject.install()
    assert subject.remove() == []
    assert hooked() == set()
    assert load("fakehost.high").load_with(None) == "stock _load"
    assert "fakeprovider" not in sys.modules


def test_a_hook_that_could_not_be_taken_back_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = installer()
    subject.install()
    monkeypatch.setattr(finder.Finder, "unhook", lambda self, name: None)
    subject.remove()
    assert load("fakehost.high").load_with(None) == "stock _load"
    assert "fakeprovider" not in sys.modules


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("removed", [False, True])
def test_hooks_of_wrapt_on_the_same_module_are_called_once(first: bool, removed: bool) -> None:
    seen: list[types.ModuleType] = []
    subject = installer()
    if first:
        subject.install()
    wrapt.register_post_import_hook(seen.append, "fakehost.high")
    subject.install()
    if removed:
        subject.remove()
    assert seen == []
    assert load("fakehost.high") is seen[0]
    assert len(seen) == 1
    assert subject.status().outcome == ("pending" if removed else "applied")


def test_remove_leaves_what_somebody_else_put_there_since() -> None:
    load("fakehost.high")
    before = stock()
    subject = installer()
    subject.install()
    high = sys.modules["fakehost.high"]
    high.load = other = lambda: None  # type: ignore[attr-defined]
    assert subject.status().overridden == ("fakehost.high.load",)
    assert subject.remove() == ["fakehost.high.load"]
    assert high.load is other
    before["fakehost.high"]["load"] = other
    assert same(stock(), before)


def test_a_reload_is_noticed() -> None:
    subject = installer()
    subject.install()
    importlib.reload(load("fakehost.high"))
    assert "fakehost.high._load" in subject.status().overridden


def test_the_class_pickles_as_torchs_while_applied() -> None:
    options = load("fakehost.high").Options(False)
    old = pickle.dumps(options)
    subject = installer()
    subject.install()
    new = pickle.dumps(sys.modules["fakehost.high"].Options(False))
    assert b"fakeprovider" not in new
    assert pickle.loads(old) == pickle.loads(new) == options
    assert pickle.dumps(options) == old
    subject.remove()
    assert pickle.loads(new) == options
    with pytest.raises(TypeError, match="more"):
        type(options)(more=1)


# --- what was bound early


def client(host: Path) -> types.ModuleType:
    (host / "client.py").write_text(
        "from fakehost.high import load, Options as O, quiet\nfrom fakehost import high\nkept = [load]\n"
    )
    return load("client")


def test_late_bindings_are_rebound_and_told_once(host: Path) -> None:
    module = client(host)
    subject = installer()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        subject.install()
        subject.install()
    assert [warning.category for warning in caught] == [LateImportWarning]
    text = str(caught[0].message)
    assert ": client.load, client.quiet." in text
    assert "high" not in text
    assert caught[0].filename == __file__
    ours = load("fakeprovider")
    assert (module.load, module.quiet) == (ours.load, ours.quiet)
    assert module.O is load("fakehost.high").Options
    assert sorted(subject.status().late_bindings) == ["client.load", "client.quiet"]
    assert subject.status().out_of_reach == ("list in client.kept",)
    assert "out of reach: list in client.kept." in text
    assert module.kept[0] is not ours.load
    assert module.kept[0](None, None) == "our _load"  # out of reach, but what it calls is not
    subject.remove()
    assert module.load is module.kept[0]


def test_torchs_own_late_bindings_are_rebound_silently(host: Path) -> None:
    (host / "fakehost" / "extra.py").write_text("from fakehost.high import load\n")
    extra = load("fakehost.extra")
    subject = installer()
    subject.install()
    assert extra.load is load("fakeprovider").load
    assert subject.status().late_bindings == ("fakehost.extra.load",)
    sys.modules.pop("fakehost.extra")


def test_strict_refuses_late_bindings_before_anything_changes(host: Path) -> None:
    module = client(host)
    before, bound = stock(), dict(vars(module))
    subject = installer(strict=True)
    with pytest.raises(RuntimeError, match=r"client\.load, client\.quiet"):
        subject.install()
    assert subject.status().outcome == "conflict"
    assert same(stock(), before)
    assert vars(module) == bound


def test_a_warning_turned_into_an_error_changes_nothing(host: Path) -> None:
    client(host)
    before = stock()
    subject = installer()
    with pytest.raises(LateImportWarning):
        subject.install()
    assert subject.status().outcome == "conflict"
    assert same(stock(), before)


def test_the_scan_runs_no_code_of_lazy_or_odd_modules(host: Path) -> None:
    class Lazy(types.ModuleType):
        def __getattribute__(self, name: str) -> object:
            raise AssertionError(f"asked for {name}")

    class Odd:
        def __getattr__(self, name: str) -> object:
            raise AssertionError(f"asked for {name}")

        @property
        def __class__(self) -> type:  # type: ignore[override]
            raise AssertionError("asked for the class")

    load("fakehost.high")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "lazy", Lazy("lazy"))
        patch.setitem(sys.modules, "odd", Odd())  # type: ignore[arg-type]
        patch.setitem(sys.modules, "nothing", None)  # type: ignore[arg-type]
        subject = installer()
        subject.install()
        assert_applied(subject)


# Where a client may have put torch's function, what that place is called, and how to look at it.
REBOUND = {
    "class T:\n  load = staticmethod(load)": ("client.T.load", "T.__dict__['load'].__func__"),
    "class T:\n  load = classmethod(load)": ("client.T.load", "T.__dict__['load'].__func__"),
    "class T:\n  load = load": ("client.T.load", "T.load"),
    "class T:\n  class U:\n    load = load": ("client.T.U.load", "T.U.load"),
    "class T(list):\n  __call__ = load": ("client.T.__call__", "T.__dict__['__call__']"),
}
# And where it is left, as only the owner knows what for.
LISTED = {
    "def make(f):\n  def inner():\n    return f\n  return inner\nf = make(load)": (
        "closure of client.make.<locals>.inner"
    ),
    "def make(f):\n  def loop(n):\n    return loop(n - 1) if n else f\n  return loop\nf = make(load)": (
        "closure of client.make.<locals>.loop"
    ),
    "p = partial(load, 1, options=2)": "functools.partial in client.p",
    "p = partial(map, load)": "tuple in functools.partial in client.p",
    "p = partial(map, key=load)": "dict in functools.partial in client.p",
    "class T:\n  p = partial(load)": "functools.partial in client.T.p",
    "kept = [partial(load)]": "functools.partial in list in client.kept",
    "class T: pass\nt = T()\nt.p = partial(load)": "functools.partial in a client.T object",
    "kept = [load]": "list in client.kept",
    "kept = (load, 1)": "tuple in client.kept",
    "kept = {load}": "set in client.kept",
    "kept = {'load': load}": "dict in client.kept",
    "kept = {'a': [load]}": "list in dict in client.kept",
    "class T:\n  kept = {'load': load}": "dict in client.T.kept",
    "class T: pass\nt = T()\nt.load = load": "a client.T object",
    "class T:\n  __slots__ = ('load',)\nt = T()\nt.load = load": "a client.T object",
    "def f(load=load): pass": "default of client.f",
    "def f(*, load=load): pass": "default of client.f",
    "def f(): pass\nf.load = load": "attribute of client.f",
    "f = functools.lru_cache(None)(load)": "functools._lru_cache_wrapper in client.f",
    "method = types.MethodType(load, 1)": "method in client.method",
    "f = staticmethod(load)": "staticmethod in client.f",
    "class P(partial): pass\np = P(load)": "a client.P object",
    "def a(b):\n  def f():\n    b\n  return f\nf = a([load])": "list in closure of client.a.<locals>.f",
}
# What torch's objects are in without anything being done with them.
IDLE = {
    "annotations": "def f(a: Options, b: Optional[Options] = None) -> List[Options]: pass\n"
    "class T:\n  a: Options\nx: Options = None",
    "dataclasses": "@dataclasses.dataclass\nclass T:\n  a: Options = dataclasses.field(default_factory=dict)",
    "the class that stays": "class Mine(Options): pass\nknown = (Options, dict)",
    "an instance": "x = Options()\nclass T: pass\nt = T()\nt.options = x",
    "what a wrapper wraps": "@functools.wraps(load)\ndef f(*args): return high.load(*args)",
    "what a cache remembers": "@functools.lru_cache(None)\ndef f(one, two): pass\nf(load, Options)",
    "a running generator": "def f(load):\n  yield\ng = f(load)\nnext(g)",
}
HEADER = """
import dataclasses, functools, types
from functools import partial
from typing import List, Optional
from fakehost import high
from fakehost.high import Options, load
"""


def early_client(host: Path, body: str) -> types.ModuleType:
    (host / "client.py").write_text(f"{HEADER}{body}\ndel Options, load\n")
    return load("client")


@pytest.mark.parametrize("body", REBOUND)
def test_what_is_bound_outside_of_modules_is_rebound_and_undone(host: Path, body: str) -> None:
    name, look = REBOUND[body]
    module = early_client(host, body)
    before = eval(look, vars(module))
    subject = installer()
    with pytest.warns(LateImportWarning) as caught:
        subject.install()
    assert len(caught) == 1
    assert f"given the replacements now: {name}." in str(caught[0].message)
    assert subject.status().late_bindings == (name,)
    assert subject.status().out_of_reach == ()
    assert eval(look, vars(module)) is load("fakeprovider").load
    subject.remove()
    assert eval(look, vars(module)) is before is load("fakehost.high").load


@pytest.mark.parametrize("body", LISTED)
def test_what_others_keep_is_left_and_listed(host: Path, body: str) -> None:
    module = early_client(host, body)
    before = dict(vars(module))
    subject = installer()
    with pytest.warns(LateImportWarning) as caught:
        subject.install()
    assert len(caught) == 1
    assert f"out of reach: {LISTED[body]}." in str(caught[0].message)
    assert subject.status().out_of_reach == (LISTED[body],)
    assert subject.status().late_bindings == ()
    assert vars(module) == before


@pytest.mark.parametrize("what", IDLE)
def test_what_does_nothing_with_it_is_not_told(host: Path, what: str) -> None:
    early_client(host, IDLE[what])
    subject = installer()
    subject.install()
    assert_applied(subject)
    assert (subject.status().late_bindings, subject.status().out_of_reach) == ((), ())


@pytest.mark.parametrize("body", [*list(REBOUND)[:8:3], *list(LISTED)[::5]])
def test_strict_refuses_them_too(host: Path, body: str) -> None:
    early_client(host, body)
    before = stock()
    subject = installer(strict=True)
    name = REBOUND[body][0] if body in REBOUND else LISTED[body]
    with pytest.raises(RuntimeError, match=r"do that first: ") as caught:
        subject.install()
    assert f": {name}. " in str(caught.value)
    assert same(stock(), before)


def test_what_torch_itself_has_outside_of_modules_is_rebound_silently_or_left(host: Path) -> None:
    (host / "fakehost" / "extra.py").write_text(
        "from fakehost import high\nfrom functools import partial\nkept = partial(high.load, 1)\n"
        "class Base:\n  load = high.load\nregistry = [high.load]\n"
    )
    extra = load("fakehost.extra")
    subject = installer()
    subject.install()
    assert extra.Base.load is load("fakeprovider").load
    assert (subject.status().late_bindings, subject.status().out_of_reach) == ((), ())
    subject.remove()
    assert extra.kept.func is extra.Base.load is extra.registry[0]
    sys.modules.pop("fakehost.extra")


def test_the_search_runs_no_code_of_what_it_looks_at(host: Path) -> None:
    body = """
def no(*args): raise AssertionError
class Meta(type):
  __getattribute__ = __setattr__ = __eq__ = no
  __hash__ = type.__hash__
class Odd(metaclass=Meta):
  load = load
  table = {'a': load}
class Other:
  __class__ = property(no)
  __getattribute__ = __eq__ = no
  __hash__ = object.__hash__
class Dict(dict):
  items = keys = values = copy = __iter__ = __getitem__ = __eq__ = no
  __hash__ = object.__hash__
other, table = Other(), Dict(a=load)
object.__setattr__(other, 'load', load)
kept = [Other(), load, Dict(), Odd]
"""
    module = early_client(host, body)
    subject = installer()
    with pytest.warns(LateImportWarning):
        subject.install()
    assert subject.status().late_bindings == ("client.Odd.load",)
    assert subject.status().out_of_reach == (
        "a client.Dict object", "a client.Other object", "dict in client.Odd.table", "list in client.kept"
    )  # fmt: skip
    assert type.__getattribute__(module.Odd, "load") is load("fakeprovider").load


def test_where_the_hook_came_first_nothing_is_searched(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early, "early_places", lambda *args: pytest.fail("searched"))
    subject = installer()
    subject.install()
    load("fakehost.high")
    assert_applied(subject)


def test_a_class_attribute_that_changed_since_is_left_alone(host: Path) -> None:
    module = early_client(host, "class T:\n  load = load\n")
    subject = installer()
    with pytest.warns(LateImportWarning):
        subject.install()
    module.T.load = len
    subject.remove()
    assert module.T.load is len


def test_what_was_bound_early_is_not_kept_alive(host: Path) -> None:
    module = early_client(host, "class T:\n  load = staticmethod(load)\n  big = set()\nname = high.load\n")
    subject = installer()
    with pytest.warns(LateImportWarning):
        subject.install()
    gone = [weakref.ref(thing) for thing in (module, module.T, module.T.big)]
    del sys.modules["client"], module
    gc.collect()
    assert [ref() for ref in gone] == [None] * 3
    assert subject.remove() == []


# --- helpers that torch's other modules use, without the module that completes the set

USER = """
from fakehost.low import move
def save(state): return move(state, "cpu")
"""


def user(host: Path) -> types.ModuleType:
    (host / "client.py").write_text(USER)
    return load("client")


@pytest.mark.parametrize("late", [False, True])
def test_the_first_call_of_a_helper_replaces_the_whole_set(host: Path, late: bool) -> None:
    subject = installer()
    if late:
        (host / "fakehost" / "saver.py").write_text(USER)
        saver = load("fakehost.saver")
        subject.install()
    else:
        subject.install()
        saver = user(host)
    assert subject.status().outcome == "pending"
    assert not {"fakehost.high", "fakeprovider"} & set(sys.modules)
    stub = saver.move
    assert (stub.__module__, stub.__name__) == ("fakehost.low", "move")
    assert saver.save({}) == "our move"
    assert_applied(subject)
    assert saver.move is load("fakeprovider").move
    subject.remove()
    assert saver.save({}) == stub({}, "cpu") == "stock move"
    assert saver.move is load("fakehost.low").move
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is imported since has torch's own now
        installer().install()
    assert saver.save({}) == stub({}, "cpu") == "our move"
    sys.modules.pop("fakehost.saver", None)


METHODS = """
from fakehost import low
class Sub(low.Writer):
    def write(self, data): return "sub of " + super().write(data)
class Taken:
    write = low.Writer.write
made, sub = low.Writer(), Sub()
function = low.Writer.write
def all_of_them():
    return [made.write(1), sub.write(1), Taken().write(1), function(None, 1), low.Writer().write(1)]
"""
OF_STOCK = ["stock write", "sub of stock write", *["stock write"] * 3]


@pytest.mark.parametrize("when", ["first", "last", "after the helpers"])
def test_a_method_serves_subclasses_and_objects_made_before(host: Path, when: str) -> None:
    (host / "client.py").write_text(METHODS)
    subject = installer()
    if when == "first":
        subject.install()
    if when == "last":
        load("fakehost.high")
    module = load("client")
    write = module.low.Writer.__dict__["write"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LateImportWarning)
        subject.install()
    assert subject.status().outcome == ("applied" if when == "last" else "pending")
    bound = module.made.write  # a stub's, or ours
    assert module.all_of_them() == [text.replace("stock", "our") for text in OF_STOCK]
    assert_applied(subject)
    assert bound(1) == "our write"
    late = {name for name in subject.status().late_bindings if name.startswith("client.")}
    assert late == (set() if when == "first" else {"client.function", "client.Taken.write"})
    assert subject.remove() == []
    assert module.all_of_them() == OF_STOCK
    assert (module.low.Writer.__dict__["write"] is write) is (when != "first")
    assert hooked() == set()


def test_a_method_that_somebody_replaces_later_is_theirs(host: Path) -> None:
    load("fakehost.high")
    subject = installer()
    subject.install()
    writer = load("fakehost.low").Writer
    writer.write = theirs = lambda self, data: "theirs"
    assert subject.status().overridden == ("fakehost.low.Writer.write",)
    assert subject.remove() == ["fakehost.low.Writer.write"]
    assert writer.__dict__["write"] is theirs


def test_a_helper_in_the_middle_of_its_import_is_waited_for(host: Path) -> None:
    """What completes the set comes up there, before the class does."""
    fakes.write(host, low=fakes.LOW.replace("class Writer", "import fakehost.high\nclass Writer"))
    subject = installer()
    subject.install()
    load("fakehost.low")
    assert_applied(subject)


def test_until_when_a_name_is_replaced() -> None:
    target = fakes.Target("fakehost.low", "move", (2, 4), fakes.RECORDS, (2, 6))
    served = {(2, 5): True, (2, 6): False, (2, 7): False}
    assert {release: target.serves(release, False) for release in served} == served
    assert target.serves((2, 6), True), "a preview may lack what its release has"


def test_removed_before_a_call(host: Path) -> None:
    low = load("fakehost.low")
    before = dict(vars(low))
    subject = installer()
    subject.install()
    module = user(host)
    assert module.move is not before["move"]
    subject.remove()
    assert module.move is low.move is before["move"]
    assert vars(low) == before
    assert module.save({}) == "stock move"
    assert hooked() == set()


def test_a_helper_bound_before_us_is_told_at_once(host: Path) -> None:
    module = user(host)
    subject = installer()
    with pytest.warns(LateImportWarning, match=r"given the replacements now: client\.move\."):
        subject.install()
    assert subject.status().late_bindings == ("client.move",)
    assert module.save({}) == "our move"
    assert subject.status().late_bindings == ("client.move",)
    subject.remove()
    assert module.move is load("fakehost.low").move


def test_a_helper_bound_before_us_is_refused_when_strict(host: Path) -> None:
    module = user(host)
    before = dict(vars(load("fakehost.low")))
    subject = installer(strict=True)
    with pytest.raises(RuntimeError, match=r"do that first: client\.move\."):
        subject.install()
    assert vars(load("fakehost.low")) == before
    assert module.save({}) == "stock move"


@pytest.mark.parametrize("strict", [False, True])
def test_a_refusal_at_the_first_call(host: Path, strict: bool) -> None:
    """Stock is called, or each call raises."""
    fakes.write(host, provider="import no_such_module\n")
    subject = installer(strict)
    subject.install()
    module = user(host)
    for _ in range(2):
        if strict:
            with pytest.raises(RuntimeError, match="taken back: ModuleNotFoundError"):
                module.save({})
            continue
        with pytest.warns(BackportWarning) if subject.outcome == "pending" else contextlib.nullcontext():
            assert module.save({}) == "stock move"
    assert subject.status().outcome == "unsupported"


def test_the_completing_module_cannot_be_imported(host: Path) -> None:
    fakes.write(host, high="import no_such_module\n")
    subject = installer()
    subject.install()
    module = user(host)
    with pytest.warns(BackportWarning, match="fakehost.high cannot be imported: ModuleNotFoundError"):
        assert module.save({}) == "stock move"
    assert module.save({}) == "stock move"
    assert module.move is load("fakehost.low").move
    assert subject.status().outcome == "unsupported"


# --- reload


def test_after_a_reload_of_torchs_module_it_says_so_and_can_be_made_good(host: Path) -> None:
    module = client(host)
    subject = installer()
    with pytest.warns(LateImportWarning):
        subject.install()
    first = module.kept[0]
    high = importlib.reload(load("fakehost.high"))
    assert subject.reloaded()
    status = subject.status()
    assert (status.outcome, status.replaced) == ("pending", ())
    assert "fakehost.high was reloaded since" in status.reason
    second = high.load
    with pytest.warns(LateImportWarning):
        subject.install()
    assert not subject.reloaded()
    assert_applied(subject)
    assert module.load is load("fakeprovider").load
    assert subject.remove() == []
    assert high.load is second
    assert module.load is first


# --- what is refused


def foreign_function() -> None:
    high = load("fakehost.high")
    high.load = lambda model, state, *, options=None: None  # type: ignore[attr-defined]


def foreign_wrapper() -> None:
    import functools

    high = load("fakehost.high")
    inner = high._load

    @functools.wraps(inner)
    def wrapper(*args: object) -> object:
        return inner(*args)

    high._load = wrapper  # type: ignore[attr-defined]


def foreign_wrapt() -> None:
    high = load("fakehost.high")
    high.load = wrapt.FunctionWrapper(high.load, lambda f, i, a, k: f(*a, **k))  # type: ignore[attr-defined]


def foreign_context() -> None:
    high = load("fakehost.high")

    @contextlib.contextmanager
    def timed() -> Iterator[None]:
        yield

    high.load = timed()(high.load)  # type: ignore[attr-defined]


def foreign_context_around_a_decorated_one() -> None:
    high = load("fakehost.high")
    high.quiet = contextlib.contextmanager(high.quiet)  # type: ignore[attr-defined]


def foreign_method() -> None:
    load("fakehost.high")
    load("fakehost.low").Writer.write = lambda self, data: "theirs"


def foreign_context_around_a_method() -> None:
    load("fakehost.high")
    writer = load("fakehost.low").Writer

    @contextlib.contextmanager
    def timed() -> Iterator[None]:
        yield

    writer.write = timed()(writer.write)


def foreign_class() -> None:
    high = load("fakehost.high")
    high.Options = type("Options", (high.Options,), {"__module__": "elsewhere"})  # type: ignore[attr-defined]


def foreign_copy_of_us() -> None:
    load("fakehost.high")
    Installer(fakes.TABLE, fakes.AUTO).install()


@pytest.mark.parametrize(
    "shim",
    [
        foreign_function,
        foreign_wrapper,
        foreign_wrapt,
        foreign_context,
        foreign_context_around_a_decorated_one,
        foreign_method,
        foreign_context_around_a_method,
        foreign_class,
        foreign_copy_of_us,
    ],
)
@pytest.mark.parametrize("strict", [False, True])
def test_somebody_elses_patch_is_left_alone(shim: Callable[[], None], strict: bool) -> None:
    shim()
    before = stock()
    subject = installer(strict)
    with pytest.raises(RuntimeError) if strict else pytest.warns(BackportWarning) as caught:
        subject.install()
    message = str(caught.value if strict else caught[0].message)  # type: ignore[index, union-attr]
    assert "was already replaced by" in message
    assert "was left as it is" in message
    assert subject.status().outcome == "conflict"
    assert subject.status().reason in message
    assert same(stock(), before)


def wrapped(function: Callable[..., str]) -> Callable[..., str]:
    @functools.wraps(function)
    def wrapper(*args: object) -> str:
        return f"wrapped {function(*args)}"

    return wrapper


def other(*args: object) -> str:
    return "other"


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("theirs", [wrapped, lambda _: other], ids=["a wrapper", "another function"])
def test_what_is_patched_after_us_is_left_alone_while_we_wait(theirs: Any, strict: bool) -> None:
    """As what is patched once we have replaced it: all else is replaced, and status() tells."""
    low = load("fakehost.low")
    before = dict(vars(low)), low.Writer.write
    subject = installer(strict)
    subject.install()
    low.move, low.Writer.write = move, write = theirs(low.move), theirs(low.Writer.write)
    high = load("fakehost.high")
    status = subject.status()
    assert status.outcome == "applied"
    assert set(status.overridden) >= {"fakehost.low.move", "fakehost.low.Writer.write"}
    assert (low.move, low.Writer.write) == (move, write)
    assert low.spread is high.spread is load("fakeprovider").spread
    is_wrapper = theirs is wrapped
    assert low.move({}, "cpu") == ("wrapped our move" if is_wrapper else "other")
    assert low.Writer().write(b"") == ("wrapped our write" if is_wrapper else "other")
    subject.remove()
    assert low.move({}, "cpu") == ("wrapped stock move" if is_wrapper else "other")
    assert low.spread is before[0]["spread"]


@pytest.mark.parametrize("while_in_place", ["applied", "removed"])
def test_a_patch_that_ends_puts_a_stub_back(while_in_place: str) -> None:
    """As unittest.mock does: the stub calls what it should, and is nobody else's."""
    low = load("fakehost.low")
    stock_write = low.Writer.write
    subject = installer()
    subject.install()
    with mock.patch.object(low.Writer, "write", other):
        if while_in_place == "removed":
            subject.remove()
        load("fakehost.high")
    assert low.Writer().write(b"") == ("our write" if while_in_place == "applied" else "stock write")
    subject.remove()
    again = installer()
    again.install()
    assert_applied(again)
    again.remove()
    assert low.Writer.write is stock_write


WRONG = {
    "a name is missing": {
        "high": fakes.HIGH.replace("def _load(", "def _load2(").replace("return _load(", "return _load2(")
    },
    "a newer parameter": {
        "high": fakes.HIGH.replace(
            "(model, state, *, options=None)", "(model, state, *, options=None, assign=False)"
        )
    },
    "a class is missing": {"low": fakes.LOW.replace("class Writer", "class Writers")},
    "a function for a class": {"low": fakes.LOW.replace("class Writer:", "def Writer():")},
    "a method is inherited": {
        "low": fakes.LOW.replace("class Writer:", "class Above:") + "class Writer(Above): pass\n"
    },
    "a method takes more": {"low": fakes.LOW.replace("(self, data)", "(self, data, how=None)")},
    "another order": {"low": fakes.LOW.replace("(state, device, strict", "(device, state, strict")},
    "the provider lacks one": {"provider": fakes.PROVIDER.replace("def names", "def other")},
    "the provider needs more": {
        "provider": fakes.PROVIDER.replace("def names(model)", "def names(model, prefix)")
    },
    "a class for a function": {
        "provider": fakes.PROVIDER.replace("def names(model):", "class names:\n  def __init__(self, model):")
    },
    "the provider cannot be imported": {"provider": "import no_such_module\n"},
    "the provider dies": {"provider": "1 / 0\n"},
}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("case", WRONG)
def test_an_unknown_layout_is_left_alone(host: Path, case: str, strict: bool) -> None:
    fakes.write(host, **WRONG[case])
    load("fakehost.high")
    before = stock()
    subject = installer(strict)
    with pytest.raises(RuntimeError) if strict else pytest.warns(BackportWarning):
        subject.install()
    assert subject.status().outcome == "unsupported"
    assert subject.status().replaced == ()
    assert same(stock(), before)


def test_a_refusal_in_the_hook_does_not_break_torchs_import(host: Path) -> None:
    fakes.write(host, **WRONG["a newer parameter"])
    subject = installer()
    subject.install()
    with pytest.warns(BackportWarning, match="no parameter assign"):
        high = load("fakehost.high")
    assert high.load_with(None) == "stock _load"
    assert subject.status().outcome == "unsupported"


def test_a_refusal_in_the_hook_raises_when_strict(host: Path) -> None:
    fakes.write(host, **WRONG["a newer parameter"])
    subject = installer(strict=True)
    subject.install()
    with pytest.raises(RuntimeError, match="no parameter assign"):
        load("fakehost.high")
    assert subject.status().outcome == "unsupported"


def test_half_way_failure_restores_everything(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = client(host)
    module.T = type("T", (), {"load": module.load, "__module__": "client"})  # type: ignore[attr-defined]
    options = dict(vars(load("fakehost.high").Options))
    real = bindings.ClassAttribute.put
    # The last write of all.
    monkeypatch.setattr(
        bindings.ClassAttribute, "put", lambda self: 1 / 0 if self.name == "client.T.load" else real(self)
    )
    before, bound = stock(), dict(vars(module))
    subject = installer()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        subject.install()
    assert [warning.category for warning in caught] == [LateImportWarning, BackportWarning]
    assert "taken back: ZeroDivisionError" in str(caught[1].message)
    assert subject.status().outcome == "unsupported"
    assert same(stock(), before)
    assert vars(module) == bound
    assert dict(vars(load("fakehost.high").Options)) == options
    assert module.T.load is module.load


def test_the_second_class_fails_and_the_first_gets_its_name_back(monkeypatch: pytest.MonkeyPatch) -> None:
    load("fakehost.high")
    before = stock()
    plan = replace.plan(fakes.TABLE, (2, 6), False)

    class Refuses(type):
        def __setattr__(cls, name: str, value: object) -> None:
            raise TypeError("not me")

    high = load("fakehost.high")
    two = Refuses("Two", (), {})
    holder = weakref.ref(high)
    swap = bindings.Swap("fakehost.high", "load_with", holder, high.load_with, high.load_with, two)
    plan.swaps.append(swap)
    with pytest.raises(TypeError, match="not me"):
        replace.Replacement(plan, bindings.Early([], [], [])).write()
    assert same(stock(), before)
    assert load("fakeprovider").Options.__module__ == "fakeprovider"


# --- releases


@pytest.mark.parametrize(
    ("release", "preview", "outcome"),
    [
        ((2, 4), False, "applied"),
        ((2, 5), False, "unsupported"),
        ((2, 5), True, "applied"),
        ((2, 6), True, "unsupported"),
    ],
)
def test_a_newer_name_may_be_missing_in_older_and_preview_builds(
    host: Path, release: tuple[int, int], preview: bool, outcome: str
) -> None:
    fakes.write(
        host,
        low=fakes.LOW.replace("def spread", "def other"),
        high=fakes.HIGH.replace("move, spread", "move"),
    )
    load("fakehost.high")
    subject = Installer(fakes.TABLE, fakes.AUTO._replace(release=release, preview=preview))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        subject.install()
    status = subject.status()
    assert status.outcome == outcome
    if outcome == "applied":
        assert "spread" not in dict(status.replaced)["fakehost.low"]


# --- half-executed modules and threads


def test_imported_from_within_torchs_module_it_waits_and_says_so(host: Path) -> None:
    """The module imports something that imports us: half executed, in our own thread."""
    subject = installer()
    importlib.import_module("json").fake_callback = subject.install  # type: ignore[attr-defined]
    fakes.write(host, high=fakes.HIGH.replace("def _load(", "import json; json.fake_callback()\ndef _load("))
    with pytest.warns(BackportWarning, match="is being imported right now"):
        high = load("fakehost.high")
    assert high.load_with(None) == "stock _load"
    assert subject.status().outcome == "pending"
    assert "call torch_dcp_backport.activate()" in subject.status().reason
    subject.install()
    assert_applied(subject)


def in_thread(function: Callable[[], object]) -> tuple[threading.Thread, list[BaseException]]:
    failures: list[BaseException] = []

    def guarded() -> None:
        try:
            function()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=guarded, daemon=True)
    thread.start()
    return thread, failures


SLOW = "import threading, json\njson.fake_started.set()\nassert json.fake_go.wait(20)\n"


@pytest.fixture
def gates(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    import json

    started, go = threading.Event(), threading.Event()
    monkeypatch.setattr(json, "fake_started", started, raising=False)
    monkeypatch.setattr(json, "fake_go", go, raising=False)
    return started, go


def test_another_thread_is_in_the_middle_of_the_import(
    host: Path, gates: tuple[threading.Event, threading.Event]
) -> None:
    fakes.write(host, high=SLOW + fakes.HIGH)
    started, go = gates
    importing, failed = in_thread(lambda: load("fakehost.high"))
    assert started.wait(20)
    subject = installer()
    installing, failed_too = in_thread(subject.install)
    installing.join(0.2)
    assert installing.is_alive()  # it waits and does not touch the half-executed module
    assert "fakeprovider" not in sys.modules
    go.set()
    importing.join(20)
    installing.join(20)
    assert not failed + failed_too
    assert_applied(subject)


def test_an_import_that_began_just_before_the_hook_is_not_missed(
    host: Path, gates: tuple[threading.Event, threading.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other thread has passed the finders, but its module is not in sys.modules yet."""
    started, go = gates

    class Slow:
        def find_spec(self, name: str, path: object = None, target: object = None) -> None:
            if name == "fakehost.high":
                started.set()
                assert go.wait(20)

    load("fakehost.low")
    monkeypatch.setattr(sys, "meta_path", [Slow(), *sys.meta_path])
    importing, failed = in_thread(lambda: load("fakehost.high"))
    assert started.wait(20)
    assert "fakehost.high" not in sys.modules
    subject = installer()
    installing, failed_too = in_thread(subject.install)
    installing.join(0.2)
    go.set()
    importing.join(20)
    installing.join(20)
    assert not failed + failed_too
    assert_applied(subject)
    assert hooked() == set()


def test_an_import_that_fails_is_tried_again(
    host: Path, gates: tuple[threading.Event, threading.Event]
) -> None:
    fakes.write(host, high=SLOW + "1 / 0\n" + fakes.HIGH)
    started, go = gates
    importing, import_errors = in_thread(lambda: load("fakehost.high"))
    assert started.wait(20)
    subject = installer()
    installing, failed = in_thread(subject.install)
    installing.join(0.2)
    assert installing.is_alive()
    go.set()
    installing.join(20)
    importing.join(20)
    assert not failed
    assert [type(error) for error in import_errors] == [ZeroDivisionError]
    assert subject.status().outcome == "pending"
    fakes.write(host)
    importlib.invalidate_caches()
    load("fakehost.high")
    assert_applied(subject)


def test_many_threads_at_once_apply_once(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writes: list[object] = []
    real = importer_module.Replacement.write
    monkeypatch.setattr(
        importer_module.Replacement, "write", lambda self: (writes.append(self), real(self))[1]
    )
    subject = installer()
    barrier = threading.Barrier(8)

    def work(number: int) -> None:
        barrier.wait(20)
        if number % 2:
            load("fakehost.high")
        else:
            subject.install()

    threads = [in_thread(lambda number=number: work(number)) for number in range(8)]  # type: ignore[misc]
    for thread, failures in threads:
        thread.join(20)
        assert not thread.is_alive()
        assert not failures
    assert_applied(subject)
    assert len(writes) <= 2  # the stubs, and the set
    assert hooked() == set()


def test_stubs_that_another_thread_has_put_since() -> None:
    subject = installer()
    subject.install()
    load("fakehost.low")
    subject._attempt(subject._put_stubs)  # by a thread that had found them missing
    load("fakehost.high")
    assert_applied(subject)


def test_a_package_that_another_thread_is_importing_is_waited_for() -> None:
    """Its modules are there one by one, and the one that completes the set can be before a helper."""
    load("fakehost.high")
    del sys.modules["fakehost.low"]
    spec: Any = sys.modules["fakehost"].__spec__
    spec._initializing = True
    subject = installer()
    subject.install()
    assert subject.status().outcome == "pending"
    resolved = subject.resolve("fakehost.low", "move", str)
    assert resolved is str
    assert "fakeprovider" not in sys.modules
    spec._initializing = False
    load("fakehost.low")
    assert subject.status().outcome == "applied"
    assert sys.modules["fakehost.low"].move({}, "cpu") == "our move"


def test_a_helper_that_comes_up_while_stubs_are_made_gets_them(
    host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (host / "fakehost" / "lower.py").write_text("def sink(state):\n    return 'stock sink'\n")
    provider = host / "fakeprovider.py"
    provider.write_text(provider.read_text() + "\ndef sink(state):\n    return 'our sink'\n")
    target = fakes.Target("fakehost.lower", "sink", (2, 4), fakes.RECORDS)
    table = fakes.TABLE._replace(
        helpers=("fakehost.low", "fakehost.lower"), targets=(*fakes.TABLE.targets, target)
    )
    subject, real = Installer(table, fakes.AUTO), replace.find

    def slow(*arguments: Any) -> list[bindings.Swap]:
        monkeypatch.setattr(replace, "find", real)
        found = real(*arguments)
        thread, failed = in_thread(lambda: load("fakehost.lower"))
        thread.join(20)
        assert not failed
        return found

    subject.install()
    monkeypatch.setattr(replace, "find", slow)
    load("fakehost.low")
    assert "fakehost.high" not in sys.modules
    assert load("fakehost.lower").sink({}) == "our sink"
    assert subject.status().outcome == "applied"


def test_the_completing_module_comes_up_while_stubs_are_made(
    host: Path, gates: tuple[threading.Event, threading.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    started, go = gates
    real = bindings.early_names

    def slow(swaps: list[bindings.Swap]) -> list[bindings.Swap]:
        started.set()
        assert go.wait(20)
        return real(swaps)

    monkeypatch.setattr(early, "early_names", slow)
    load("fakehost.low")
    subject = installer()
    installing, failed = in_thread(subject.install)
    assert started.wait(20)
    load("fakehost.high")
    assert subject.status().outcome == "pending"
    go.set()
    installing.join(20)
    assert not failed
    assert_applied(subject)


def test_no_lock_is_held_while_the_replacements_are_imported(
    host: Path, gates: tuple[threading.Event, threading.Event]
) -> None:
    started, go = gates
    fakes.write(host, provider=SLOW + fakes.PROVIDER)
    load("fakehost.high")
    subject = installer()
    applying, failed = in_thread(subject.install)
    assert started.wait(20)
    # Another thread asks, installs again and registers a hook meanwhile.
    assert subject.status().outcome == "pending"
    subject.install()
    seen: list[object] = []
    wrapt.importer.register_post_import_hook(seen.append, "fakehost.high")
    assert seen
    go.set()
    applying.join(20)
    assert not failed
    assert_applied(subject)


def test_removed_while_another_thread_is_applying(
    host: Path, gates: tuple[threading.Event, threading.Event]
) -> None:
    started, go = gates
    fakes.write(host, provider=SLOW + fakes.PROVIDER)
    load("fakehost.high")
    before = stock()
    subject = installer()
    applying, failed = in_thread(subject.install)
    assert started.wait(20)
    subject.remove()
    go.set()
    applying.join(20)
    assert not failed
    assert same(stock(), before)


# --- another import hook that serves torch's modules itself


class Serves:
    """Asked before us, and asks nobody but the finder of files."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> object:
        found = importlib.machinery.PathFinder.find_spec(name, path)  # type: ignore[arg-type]
        return found if name.startswith("fakehost") else None


@pytest.fixture
def serves() -> Callable[[], None]:
    return lambda: sys.meta_path.insert(0, Serves())  # type: ignore[arg-type]


def test_served_by_another_hook_that_came_first(serves: Callable[[], None]) -> None:
    serves()
    subject = installer()
    subject.install()
    load("fakehost.high")
    assert_applied(subject)


def test_served_by_another_hook_is_noticed_at_the_next_import(serves: Callable[[], None]) -> None:
    subject = installer()
    subject.install()
    serves()
    high = load("fakehost.high")
    assert subject.status().outcome == "pending"
    assert "loaded unnoticed" in subject.status().reason
    assert high.load_with(None) == "stock _load"
    load("fakeprovider")
    assert_applied(subject)
    assert hooked() == set()


def test_served_by_another_hook_can_be_made_good_at_once(serves: Callable[[], None]) -> None:
    subject = installer()
    subject.install()
    serves()
    load("fakehost.high")
    subject.install()
    assert_applied(subject)


@pytest.mark.parametrize("strict", [False, True])
def test_what_was_bound_unnoticed_is_told(host: Path, serves: Callable[[], None], strict: bool) -> None:
    subject = installer(strict)
    subject.install()
    serves()
    module = client(host)
    with pytest.raises(RuntimeError) if strict else pytest.warns(LateImportWarning) as caught:
        load("lazy")
    message = str(caught.value if strict else caught[0].message)  # type: ignore[index, union-attr]
    assert "bound from fakehost.high, fakehost.low, which another import hook served unnoticed" in message
    assert "client.load, client.quiet" in message
    if strict:
        assert module.kept[0] is module.load is load("fakehost.high").load
    else:
        assert_applied(subject)


# --- a refusal in the hook is not forgotten


def test_an_import_that_raised_raises_again(host: Path) -> None:
    fakes.write(host, **WRONG["a newer parameter"])
    subject = installer(strict=True)
    subject.install()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no parameter assign"):
            load("fakehost.high")
        load("fakehost.low")
    fakes.write(host)
    importlib.invalidate_caches()
    load("fakehost.high")
    assert_applied(subject)


# --- signatures


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
    found = call_misfit(_f, ours)
    assert found == misfit
