"""Nested dicts, lists and tuples of a state dict, walked by path.

No tree is ever changed.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from torch_dcp_backport.transfer import spell_key

Path = tuple[object, ...]
#: The types that a checkpoint holds besides tensors and containers.
SMALL = (int, float, str, bytes, io.BytesIO, type(None))


class ListIndex(int):
    """A step of a path into a list, as opposed to an integer key of a dict."""


class TupleIndex(ListIndex):
    """A step of a path into a tuple."""


def rebuild(tree: Any, leaf: Callable[[Path, Any], Any], path: Path = ()) -> Any:
    """A copy of nested dicts, lists and tuples with `leaf(path, value)` for every other value."""
    if isinstance(tree, Mapping):
        return {key: rebuild(value, leaf, (*path, key)) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        items = [rebuild(value, leaf, (*path, index)) for index, value in enumerate(tree)]
        return tuple(items) if isinstance(tree, tuple) else items
    return leaf(path, tree)


def leaves(tree: Any, opens: Callable[[Sequence[Any]], bool]) -> dict[Path, Any]:
    """path -> value of a nested dict; lists are opened only where `opens(list)` says so."""
    values: dict[Path, Any] = {}
    # A nested function that calls itself would be a cycle, which keeps the values alive.
    _collect(values, opens, (), tree)
    return values


def _collect(values: dict[Path, Any], opens: Callable[[Sequence[Any]], bool], path: Path, tree: Any) -> None:
    if isinstance(tree, Mapping) and tree:
        for key, value in tree.items():
            _collect(values, opens, (*path, key), value)
    elif isinstance(tree, (list, tuple)) and opens(tree):
        kind = TupleIndex if isinstance(tree, tuple) else ListIndex
        for index, value in enumerate(tree):
            _collect(values, opens, (*path, kind(index)), value)
    else:
        values[path] = tree


def place(tree: dict[Any, Any], path: Path, value: Any) -> None:
    """Write a value at a path of nested dicts, and the dicts on the way to it."""
    for step in path[:-1]:
        tree = tree.setdefault(step, {})
    tree[path[-1]] = value


def with_lists(tree: Any) -> Any:
    """The tree that `place` made of the paths of `leaves`, with its lists and tuples."""
    if not isinstance(tree, dict):
        return tree
    if tree and all(isinstance(key, ListIndex) for key in tree):
        items = [with_lists(tree[key]) for key in sorted(tree)]
        return tuple(items) if all(isinstance(key, TupleIndex) for key in tree) else items
    return {key: with_lists(value) for key, value in tree.items()}


def check_types(tree: Any) -> None:
    """Raise a ValueError for a value that a checkpoint cannot hold."""
    for path, value in leaves(tree, opens=lambda _: True).items():
        if not isinstance(value, (torch.Tensor, Mapping, *SMALL)):
            raise ValueError(
                f"{spell_key(path)} is a {type(value).__name__}, which a checkpoint cannot hold: expected a "
                "tensor, int, float, str, bytes, BytesIO or None, or dicts, lists and tuples of them"
            )


def untouched(value: Any) -> Any:
    """A value for a copy of the tree: a tensor or small value itself, a deep copy of anything else."""
    return value if isinstance(value, (torch.Tensor, *SMALL)) else copy.deepcopy(value)
