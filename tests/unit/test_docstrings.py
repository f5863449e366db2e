"""Docstrings of public names: parameters are named, and examples run in one process without a GPU."""

from __future__ import annotations

import dataclasses
import doctest
import enum
import importlib
import inspect
import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pool
import pytest

import torch_dcp_backport

ROOMS = (
    "state_dict",
    "transfer",
    "dist_checkpointing",
    "dist_checkpointing.training_state",
    "checkpoint",
    "engine",
    "hf",
    "megatron",
)

pools, ranks = pool.fixtures(pool.OURS)

PACKAGE = torch_dcp_backport.__name__
ROOT = Path(torch_dcp_backport.__file__).parent
#: An example with these words gets a gloo group of one rank.
NEEDS_GROUP = "within a process group"
#: First words that make a relative clause of a sentence.
CLAUSE = re.compile(r"(What|Which|Whose|That|Whether|Where|Who|As|Of)\b")


def public_names() -> list[tuple[str, str]]:
    """Return (room, name) of every public class and function."""
    names = []
    for room in ROOMS:
        module = importlib.import_module(f"{PACKAGE}.{room}")
        for name in module.__all__:
            # An alias of a type has no docstring of its own.
            if inspect.isclass(getattr(module, name)) or inspect.isroutine(getattr(module, name)):
                names.append((room, name))
    return names


def modules_with_examples() -> list[str]:
    found = []
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            if ">>> " in path.read_text():
                parts = path.relative_to(ROOT.parent).with_suffix("").parts
                found.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return found


def documented_in(text: str) -> set[str]:
    """Return the names in the Args section of a docstring."""
    match = re.search(r"^Args:\n((?:    .*\n?|\n)*)", inspect.cleandoc(text) + "\n", re.MULTILINE)
    if match is None:
        return set()
    names = re.findall(r"^    (\*{0,2}\w+(?:, \*{0,2}\w+)*):", match[1], re.MULTILINE)
    return {name.lstrip("*") for group in names for name in group.split(", ")}


def parameters_of(function: Any) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]


def has_arguments(kind: type) -> bool:
    """Return whether a class's constructor is its own: neither an enum's nor that of a plain exception."""
    if getattr(kind, "_is_protocol", False):
        return False
    if issubclass(kind, (enum.Enum, BaseException)):
        return "__init__" in vars(kind)
    return kind.__init__ is not object.__init__ or is_named_tuple(kind)


def is_named_tuple(kind: type) -> bool:
    return issubclass(kind, tuple) and hasattr(kind, "_fields")


def constructor_text(kind: type) -> str:
    own = "" if dataclasses.is_dataclass(kind) or is_named_tuple(kind) else inspect.getdoc(kind.__init__)
    return "\n\n".join([inspect.getdoc(kind) or "", own or ""])


def public_functions(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, function): a function itself, or the public methods that a class has from this package."""
    if not inspect.isclass(value):
        yield name, value
        return
    for base in value.__mro__:
        if base.__module__.startswith(f"{PACKAGE}."):
            for method, found in vars(base).items():
                function = found.__func__ if isinstance(found, (classmethod, staticmethod)) else found
                if not method.startswith("_") and inspect.isfunction(function):
                    yield f"{name}.{method}", getattr(value, method)


@pytest.mark.parametrize("room, name", public_names())
def test_a_public_name_has_its_parameters_and_an_example(room: str, name: str) -> None:
    value = getattr(importlib.import_module(f"{PACKAGE}.{room}"), name)
    problems = []
    if inspect.isclass(value):
        text = constructor_text(value)
        problems += [] if value.__doc__ and not CLAUSE.match(text) else [f"{name}: first line {text[:60]!r}"]
        if has_arguments(value):
            missing = [word for word in parameters_of(value) if word not in documented_in(text)]
            problems += [f"{name}: no {word}" for word in missing]
    elif ">>> " not in (inspect.getdoc(value) or ""):
        problems.append(f"{name}: no example")
    for label, function in public_functions(name, value):
        text = inspect.getdoc(function) or ""
        if not text or CLAUSE.match(text):
            problems.append(f"{label}: first line {text[:60]!r}")
        missing = [word for word in parameters_of(function) if word not in documented_in(text)]
        problems += [f"{label}: no {word}" for word in missing]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("name", modules_with_examples())
def test_the_examples_of_a_module_run(
    ranks: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports = []
    for number, example in enumerate(examples_in(importlib.import_module(name))):
        folder = tmp_path / str(number)
        folder.mkdir()
        if NEEDS_GROUP in (example.docstring or "").lower():
            reports += ranks(report_of_rank, name, number, str(folder), world=1)
        else:
            monkeypatch.chdir(folder)
            reports.append(report_of(example))
    assert not any(reports), "".join(reports)


def report_of(example: doctest.DocTest) -> str:
    """Run an example, and return what is wrong with it."""
    lines: list[str] = []
    with warnings.catch_warnings():
        # torch's own differ between its releases.
        warnings.simplefilter("ignore")
        runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS)
        runner.run(example, out=lines.append)
    return "".join(lines)


def report_of_rank(api: Any, name: str, number: int, folder: str) -> str:
    """Run an example of a module on a rank, which has a process group."""
    os.chdir(folder)
    return report_of(examples_in(importlib.import_module(name))[number])


def examples_in(module: Any) -> list[doctest.DocTest]:
    """Return the examples of a module; each begins with an empty namespace, as a reader's does."""
    finder, names = doctest.DocTestFinder(exclude_empty=True), {"__name__": "__main__"}
    found = finder.find(module, globs=names)
    for name, value in vars(module).items():
        # The finder passes over functions with another module's wrapper, such as torch.no_grad's.
        if getattr(value, "__wrapped__", None) is not None and value.__module__ == module.__name__:
            found += finder.find(inspect.unwrap(value), name, module, globs=names)
    return [example for example in found if example.examples]
