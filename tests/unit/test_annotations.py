"""Annotations can be looked up at run time, as typing.get_type_hints and tools that check types then do."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import sys
import typing
from collections.abc import Iterator
from typing import Any

import pytest

import torch_dcp_backport

MODULES = ["torch_dcp_backport"] + [
    module.name
    for module in pkgutil.walk_packages(torch_dcp_backport.__path__, "torch_dcp_backport.")
    if not module.name.endswith("__main__")
]


def annotations_of(tree: ast.AST) -> Iterator[ast.expr]:
    """Yield every annotation, also of assignments in functions, which only tools look at."""
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign):
            yield node.annotation
        elif isinstance(node, ast.FunctionDef):
            more = [one for one in (node.args.vararg, node.args.kwarg) if one is not None]
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, *more]
            yield from (one.annotation for one in arguments if one.annotation is not None)
            if node.returns is not None:
                yield node.returns


@pytest.mark.skipif(sys.version_info < (3, 10), reason="Python 3.9 cannot look up `X | Y`")
@pytest.mark.parametrize("name", MODULES)
def test_every_annotation_can_be_looked_up(name: str) -> None:
    module = importlib.import_module(name)
    source = inspect.getsource(module)
    for annotation in annotations_of(ast.parse(source)):
        text = ast.unparse(annotation)
        try:
            eval(text, dict(vars(module)))
        except Exception as error:
            raise AssertionError(f"{name}:{annotation.lineno}: {text}: {error}") from error


@pytest.mark.parametrize("room", torch_dcp_backport._ROOMS)
def test_types_of_every_public_function(room: str) -> None:
    module = importlib.import_module(f"torch_dcp_backport.{room}")
    checked = 0
    for name in module.__all__:
        public: Any = getattr(module, name)
        if inspect.isfunction(public) or inspect.isclass(public):
            assert isinstance(typing.get_type_hints(public), dict), name
            checked += 1
        for part in vars(public).values() if inspect.isclass(public) else ():
            function = getattr(part, "__func__", getattr(part, "fget", part))
            if inspect.isfunction(function) and function.__module__.startswith("torch_dcp_backport"):
                typing.get_type_hints(function)
    assert checked
