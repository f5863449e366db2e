"""What the fields of a part may say: whole numbers, and a place within the global tensor."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from torch_dcp_backport.dist_checkpointing.core import CheckpointingException


def check_fields(key: object, numbers: Sequence[object], replica_id: object) -> None:
    """Refuse what would be saved and never be loaded again.

    Raises:
        CheckpointingException: a key that is no text, or a place or shape that are no whole numbers (numpy's
            are other objects in a file).
    """
    if not isinstance(key, str):
        raise CheckpointingException(f"a key that is no text: {key!r}")
    replicas = replica_id if isinstance(replica_id, tuple) else (replica_id,)
    if {*map(type, numbers), *map(type, replicas)} != {int}:
        for number in (number for number in (*numbers, *replicas) if type(number) is not int):
            raise CheckpointingException(f"{key}: {number!r} is a {type(number).__name__}, and not an int")


def is_off_grid(local_shape: tuple[int, ...], offset: tuple[int, ...]) -> bool:
    """Whether a box does not begin where a regular grid of such boxes has one."""
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
    """Whether a box is in the global shape, and on its grid if that is regular.

    Offset and global shape have as many axes as the local shape and those that are put before it, all of them
    whole numbers.
    """
    size = (1,) * prepended + local_shape
    if any(start < 0 or start + extent > limit for start, extent, limit in zip(offset, size, global_shape)):
        return False
    return not (is_regular and is_off_grid(local_shape, offset[prepended:]))
