"""Checks of a part's fields: its numbers are integers, and its place is within the global tensor."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from torch_dcp_backport.dist_checkpointing.core import CheckpointingException


def check_fields(key: object, numbers: Sequence[object], replica_id: object) -> None:
    """Refuse fields that could be saved, and never be loaded again.

    Raises:
        CheckpointingException: a key that is no text, or a place or shape whose numbers are no int (numpy's
            are other objects in a file).
    """
    if not isinstance(key, str):
        raise CheckpointingException(f"a key that is no text: {key!r}")
    replicas = replica_id if isinstance(replica_id, tuple) else (replica_id,)
    if {*map(type, numbers), *map(type, replicas)} != {int}:
        for number in (number for number in (*numbers, *replicas) if type(number) is not int):
            raise CheckpointingException(f"{key}: {number!r} is a {type(number).__name__}, and not an int")


def is_off_grid(local_shape: tuple[int, ...], offset: tuple[int, ...]) -> bool:
    """Return whether a box begins off the regular grid of such boxes."""
    return any(extent and start % extent for start, extent in zip(offset, local_shape))


# Of 100,000 tensors few have a place of their own: layers repeat.
@functools.lru_cache(maxsize=4096)
def is_place(
    local_shape: tuple[int, ...],
    offset: tuple[int, ...],
    global_shape: tuple[int, ...],
    prepended: int,
    is_regular: bool,
) -> bool:
    """Return whether a box is in the global shape, and on its grid if that is regular.

    Offset and global shape have the axes of the local shape behind the prepended axes; all are integers.
    """
    size = (1,) * prepended + local_shape
    if any(start < 0 or start + extent > limit for start, extent, limit in zip(offset, size, global_shape)):
        return False
    return not (is_regular and is_off_grid(local_shape, offset[prepended:]))
