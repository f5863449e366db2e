"""Nested dicts and lists: find, map, compare and merge their leaves. Knows nothing of tensors or files.

Names and results are those of megatron.core.dist_checkpointing.dict_utils. A tuple is a leaf.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar, Union

U = TypeVar("U")
V = TypeVar("V")
K = TypeVar("K")
Nested = Union[dict[Any, Any], list[Any]]
Path = tuple[Any, ...]


def extract_matching_values(
    x: Nested, predicate: Callable[[Any], bool], return_lists_as_dicts: bool = False
) -> tuple[Nested, Nested]:
    """Split a structure into (matching leaves, the others). Empty containers are among the others.

    Args:
        return_lists_as_dicts: give lists as dicts from index to value, so that places are kept.

    Raises:
        ValueError: `x` is neither a dict nor a list.
    """
    if not isinstance(x, (dict, list)):
        raise ValueError(f"expected a dict or a list, got {type(x).__name__}")
    as_dict = isinstance(x, dict) or return_lists_as_dicts
    halves: tuple[dict[Any, Any], dict[Any, Any]] = ({}, {})
    for key, value in x.items() if isinstance(x, dict) else enumerate(x):
        if isinstance(value, (dict, list)):
            for half, part in zip(halves, extract_matching_values(value, predicate, return_lists_as_dicts)):
                if part or (not value and half is halves[1]):
                    half[key] = part if part else value
        else:
            halves[0 if predicate(value) else 1][key] = value
    if as_dict:
        return halves
    return list(halves[0].values()), list(halves[1].values())


def diff(x1: Any, x2: Any, prefix: Path = ()) -> tuple[list[Path], list[Path], list[tuple[Any, ...]]]:
    """Return (paths only in x1, paths only in x2, (path, type, type) of values that differ)."""
    if isinstance(x1, dict) and isinstance(x2, dict):
        left = [(*prefix, key) for key in x1 if key not in x2]
        right = [(*prefix, key) for key in x2 if key not in x1]
        shared: Iterable[Any] = [key for key in x1 if key in x2]
    elif isinstance(x1, list) and isinstance(x2, list):
        size = min(len(x1), len(x2))
        left = [(*prefix, index) for index in range(size, len(x1))]
        right = [(*prefix, index) for index in range(size, len(x2))]
        shared = range(size)
    else:
        return [], [], [] if _equal(x1, x2) else [(prefix, type(x1), type(x2))]
    mismatch: list[tuple[Any, ...]] = []
    for key in shared:
        inner = diff(x1[key], x2[key], (*prefix, key))
        left += inner[0]
        right += inner[1]
        mismatch += inner[2]
    return left, right, mismatch


def _equal(x1: Any, x2: Any) -> bool:
    try:
        same = x1 == x2
        return bool(same.all()) if hasattr(same, "all") else bool(same)
    except Exception:  # values of some classes cannot be compared
        return type(x1) is type(x2)


def inspect_types(x: Any, prefix: Path = (), indent: int = 4) -> None:
    """Print the structure of nested dicts and lists with the types of their leaves."""
    lead = " " * (indent * len(prefix))
    if isinstance(x, (dict, list)):
        print(f"{lead}{type(x).__name__} of {len(x)}")
        for key, value in x.items() if isinstance(x, dict) else enumerate(x):
            print(f"{lead}{key}:")
            inspect_types(value, (*prefix, key), indent)
    else:
        print(f"{lead}{type(x).__name__}")


def nested_values(x: Nested) -> Iterator[Any]:
    """Yield the leaves."""
    for _, _, value in nested_items_iter(x):
        yield value


def nested_items_iter(x: Nested) -> Iterator[tuple[Nested, Any, Any]]:
    """Yield (the container, the key or index in it, the leaf)."""
    for key, value in x.items() if isinstance(x, dict) else enumerate(x):
        if isinstance(value, (dict, list)):
            yield from nested_items_iter(value)
        else:
            yield x, key, value


def dict_map(f: Callable[[Any], Any], d: dict[Any, Any]) -> None:
    """Replace the values of a dict, in place; dicts in it are values."""
    for key in list(d):
        d[key] = f(d[key])


def dict_map_with_key(f: Callable[[Any, Any], Any], d: dict[Any, Any]) -> None:
    """Replace the values of a dict by f(key, value), in place."""
    for key in list(d):
        d[key] = f(key, d[key])


def dict_list_map_inplace(f: Callable[[Any], Any], x: Any) -> Any:
    """Replace the leaves, in place."""
    if isinstance(x, dict):
        dict_map(lambda value: dict_list_map_inplace(f, value), x)
    elif isinstance(x, list):
        x[:] = [dict_list_map_inplace(f, value) for value in x]
    else:
        return f(x)
    return x


def dict_list_map_outplace(f: Callable[[Any], Any], x: Any) -> Any:
    """Return the same structure with other leaves."""
    if isinstance(x, dict):
        return {key: dict_list_map_outplace(f, value) for key, value in x.items()}
    if isinstance(x, list):
        return [dict_list_map_outplace(f, value) for value in x]
    return f(x)


def merge(x1: Any, x2: Any, key: Path = ()) -> Any:
    """Merge x2 into x1, in place; a list and a dict from index to value go together.

    Raises:
        ValueError: two leaves at the same path, lists of different lengths, a dict beside a leaf.
    """
    if isinstance(x1, dict) and isinstance(x2, dict):
        for name, value in x2.items():
            x1[name] = merge(x1[name], value, (*key, name)) if name in x1 else value
    elif isinstance(x1, list) and isinstance(x2, list):
        if len(x1) != len(x2):
            raise ValueError(f"cannot merge lists of {len(x1)} and {len(x2)} values at {key}")
        x1[:] = [merge(value, other, (*key, index)) for index, (value, other) in enumerate(zip(x1, x2))]
    elif isinstance(x1, list) and isinstance(x2, dict):
        for index, value in x2.items():
            if not isinstance(index, int) or not 0 <= index < len(x1):
                raise ValueError(f"cannot merge {index!r} into a list of {len(x1)} values at {key}")
            x1[index] = merge(x1[index], value, (*key, index))
    else:
        raise ValueError(f"cannot merge {type(x1).__name__} and {type(x2).__name__} at {key}")
    return x1


def _itself(value: Any) -> Any:
    return value


def map_reduce(
    xs: Iterable[U],
    key_fn: Callable[[U], K] = _itself,
    value_fn: Callable[[U], V] = _itself,
    reduce_fn: Callable[[list[V]], Any] = _itself,
) -> dict[K, Any]:
    """Group by key and reduce each group's values; by default a value is its key, and a group a list."""
    groups: dict[K, list[V]] = defaultdict(list)
    for x in xs:
        groups[key_fn(x)].append(value_fn(x))
    return {key: reduce_fn(values) for key, values in groups.items()}
