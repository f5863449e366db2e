"""Prefixes of keys, and parts of sharded state dicts. Changes parts where stated, and nothing else.

Names are those of megatron.core.dist_checkpointing.utils.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Optional, Union

import torch

from torch_dcp_backport.dist_checkpointing._src.adopt import adopted
from torch_dcp_backport.dist_checkpointing._src.sharded_tensor import nominal
from torch_dcp_backport.dist_checkpointing.dict_utils import extract_matching_values, nested_values
from torch_dcp_backport.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
    StateDict,
)

logger = logging.getLogger("torch_dcp_backport.dist_checkpointing")
#: The names of the contexts of `logger_stack` that are open, and the innermost logger.
_stack: contextvars.ContextVar[tuple[tuple[str, ...], logging.Logger]] = contextvars.ContextVar(
    "stack", default=((), logger)
)

Halves = tuple[ShardedStateDict, StateDict]
#: (key, offset, ends of its range or shape of its grid): equal for equal parts of different ranks.
ShardId = tuple[str, tuple[int, ...], Union[None, tuple[int, ...]]]
_ShardId = ShardId


def zip_strict(*args: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Zip iterables of the same length.

    Raises:
        ValueError: their lengths differ.
    """
    lists = [list(values) for values in args]
    lengths = {len(values) for values in lists}
    if len(lengths) > 1:
        raise ValueError(f"lengths differ: {sorted(lengths)}")
    return list(zip(*lists))


def _sharded_tensor_shard_id(sharded_tensor: ShardedTensor) -> ShardId:
    """Return (key, offset, ends of the flattened range): the name of a shard on every rank that has it."""
    flat = sharded_tensor.flattened_range
    ends = None if flat is None else (flat.start, flat.stop)
    return sharded_tensor.key, tuple(sharded_tensor.global_offset), ends


def _sharded_object_id(sharded_object: ShardedObject) -> ShardId:
    """Return (key, place, shape of the grid)."""
    place, shape = tuple(sharded_object.global_offset), tuple(sharded_object.global_shape)
    return sharded_object.key, place, shape


def extract_sharded_tensors(sharded_state_dict: ShardedStateDict) -> Halves:
    """Return (the ShardedTensors, the rest)."""
    return _extract(sharded_state_dict, ShardedTensor)


def extract_sharded_tensors_and_factories(sharded_state_dict: ShardedStateDict) -> Halves:
    """Return (the ShardedTensors and factories, the rest)."""
    return _extract(sharded_state_dict, ShardedTensor, ShardedTensorFactory)


def extract_sharded_tensors_or_nonpersistent(sharded_state_dict: ShardedStateDict) -> Halves:
    """Return (ShardedTensors, factories and values that are not saved; the rest)."""
    return _extract(sharded_state_dict, ShardedTensor, LocalNonpersistentObject, ShardedTensorFactory)


def extract_sharded_base(sharded_state_dict: ShardedStateDict) -> Halves:
    """Return (everything sharded, the rest)."""
    return _extract(sharded_state_dict, ShardedBase)


def extract_nonpersistent(sharded_state_dict: ShardedStateDict) -> Halves:
    """Return (the values that are not saved, the rest)."""
    return _extract(sharded_state_dict, LocalNonpersistentObject)


def _extract(sharded_state_dict: ShardedStateDict, *kinds: type) -> Halves:
    halves: Any = extract_matching_values(sharded_state_dict, lambda value: isinstance(adopted(value), kinds))
    return halves  # type: ignore[no-any-return]


def add_prefix_for_sharding(sharded_state_dict: ShardedStateDict, prefix: str) -> None:
    """Put `prefix` before the keys of all parts, in place; names in the state dict stay."""
    _rename(sharded_state_dict, lambda key: f"{prefix}{key}")


def replace_prefix_for_sharding(
    sharded_state_dict: ShardedStateDict, old_prefix: str, new_prefix: str
) -> None:
    """Replace the beginning of the keys of all parts, in place.

    Raises:
        ValueError: a key begins otherwise; nothing was changed.
    """
    for part in _parts(sharded_state_dict):
        if not part.key.startswith(old_prefix):
            raise ValueError(f"{part.key} does not begin with {old_prefix}")
    _rename(sharded_state_dict, lambda key: f"{new_prefix}{key[len(old_prefix) :]}")


def apply_prefix_mapping(sharded_state_dict: ShardedStateDict, prefix_map: dict[str, str]) -> None:
    """Replace the beginning of keys by the first entry that fits, in place; other keys stay."""

    def renamed(key: str) -> str:
        for old, new in prefix_map.items():
            if key.startswith(old):
                return f"{new}{key[len(old) :]}"
        return key

    _rename(sharded_state_dict, renamed)


def _parts(sharded_state_dict: ShardedStateDict) -> list[Any]:
    # Megatron's own objects, too.
    return [part for part in nested_values(sharded_state_dict) if isinstance(adopted(part), ShardedBase)]


def _rename(sharded_state_dict: ShardedStateDict, renamed: Callable[[str], str]) -> None:
    for part in _parts(sharded_state_dict):
        part.key = renamed(part.key)


@contextlib.contextmanager
def debug_time(
    name: str, logger: Optional[logging.Logger] = logger, threshold: float = 0.0, level: Optional[int] = None
) -> Iterator[None]:
    """Log the seconds of the code inside, where it takes `threshold` or more."""
    start = time.perf_counter()
    try:
        yield
    finally:
        spent = time.perf_counter() - start
        if logger is not None and spent >= threshold:
            logger.log(logging.DEBUG if level is None else level, "%s took %.4f s", name, spent)


@contextlib.contextmanager
def logger_stack(
    name: Optional[str] = None, current_logger: Optional[logging.Logger] = None
) -> Iterator[tuple[str, logging.Logger]]:
    """Yield (the names of the contexts that are open, joined by points; the innermost logger)."""
    names, known = _stack.get()
    names = (*names, name) if name else names
    token = _stack.set((names, current_logger or known))
    try:
        yield ".".join(names), current_logger or known
    finally:
        _stack.reset(token)


def force_all_tensors_to_non_fp8(sharded_state_dict: ShardedStateDict) -> None:
    """Replace Transformer Engine's float8 tensors by their values in their nominal dtype, in place."""
    for part in _parts(sharded_state_dict):
        if isinstance(part.data, torch.Tensor):
            part.data = nominal(part.data)


def _clean_metadata_for_serialization(metadata: Optional[dict[str, Any]]) -> Optional[dict[str, Any]]:
    """Return content metadata without the process group that Megatron keeps in it."""
    if metadata is None:
        return None
    return {key: value for key, value in metadata.items() if key != "dp_cp_group"}


def shard_text(shard: ShardId) -> str:
    key, offset, *_ = shard
    return f"{key} at {offset}"
