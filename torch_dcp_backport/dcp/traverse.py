"""The walk through a nested state dict, by functions that hold nothing once it is over.

Torch's walk is a function that calls itself by its closure: a cycle, which keeps the visitor and its tensors
until a garbage collection. https://github.com/pytorch/pytorch/pull/170431
Must never make a cycle.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Callable, Optional, Union

import torch

Path = tuple[Union[str, int], ...]
Visitor = Callable[[Path, Any], None]
#: Whether a list with such a value in it is walked through.
Keep = Optional[Callable[[Any], bool]]


def is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def traverse_state_dict(
    state_dict: Mapping[Any, Any], visitor: Visitor, keep_traversing: Keep = is_tensor
) -> None:
    """Call `visitor` with the path and the value of each leaf: mappings are none, and lists of tensors."""
    for key, value in state_dict.items():
        walk((str(key),), value, visitor, keep_traversing, has_leaf_mappings=False)


def traverse_state_dict_v_2_3(
    state_dict: Mapping[Any, Any], visitor: Visitor, keep_traversing: Keep = is_tensor
) -> None:
    """As torch 2.3, whose checkpoints have its paths: a mapping without tensors in it is a leaf."""
    for key, value in state_dict.items():
        walk((str(key),), value, visitor, keep_traversing, has_leaf_mappings=True)


def walk(path: Path, value: Any, visitor: Visitor, keep: Keep, has_leaf_mappings: bool) -> None:
    if is_leaf(value, keep, has_leaf_mappings):
        visitor(path, value)
    elif isinstance(value, Mapping):
        for key, below in value.items():
            walk((*path, str(key)), below, visitor, keep, has_leaf_mappings)
    else:
        for index, below in enumerate(value):
            walk((*path, index), below, visitor, keep, has_leaf_mappings)


def is_leaf(value: Any, keep: Keep, has_leaf_mappings: bool) -> bool:
    below: Collection[Any]
    if isinstance(value, Mapping):
        if not has_leaf_mappings:
            return False
        below = value.values()
    elif isinstance(value, list):
        below = value
    else:
        return True
    for each in below:  # no generator: a frame for each level is what torch takes of Python's limit
        if isinstance(each, (Mapping, list)) and not is_leaf(each, keep, has_leaf_mappings):
            return False
        if keep is not None and keep(each):
            return False
    return True
