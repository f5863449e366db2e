"""Megatron's own objects taken for ours: by the name of their class, never by importing Megatron."""

from __future__ import annotations

import functools
from typing import Any, Optional

from torch_dcp_backport.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)

FIELDS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "ShardedTensor": (
        ShardedTensor,
        (
            "key", "data", "dtype", "local_shape", "global_shape", "global_offset", "axis_fragmentations",
            "replica_id", "prepend_axis_num", "allow_shape_mismatch", "flattened_range",
        ),
    ),
    "ShardedObject": (ShardedObject, ("key", "data", "global_shape", "global_offset", "replica_id")),
    "ShardedTensorFactory": (
        ShardedTensorFactory,
        ("key", "data", "build_fn", "merge_fn", "replica_id", "flattened_range"),
    ),
    "LocalNonpersistentObject": (LocalNonpersistentObject, ("obj",)),
}  # fmt: skip
#: The package whose classes are meant.
PACKAGE = "megatron"


def adopted(value: Any) -> Any:
    """Return our object with the same fields for an object of Megatron's classes; else the value itself."""
    kind: Any = type(value)
    known = _known(kind)
    if known is None:
        return value
    ours, names = known
    return ours(**{name: getattr(value, name) for name in names if hasattr(value, name)})


@functools.lru_cache(maxsize=256)
def _known(kind: type) -> Optional[tuple[Any, tuple[str, ...]]]:
    names = (base.__name__ for base in kind.__mro__ if base.__module__.partition(".")[0] == PACKAGE)
    return next((FIELDS[name] for name in names if name in FIELDS), None)
