"""The descriptions of a rank's values: parts of global tensors, and objects in a grid.

Fields and positional order are those of megatron.core.dist_checkpointing.mapping. Reads and writes no file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Optional, Union

import torch

from torch_dcp_backport.dist_checkpointing._src.sharded_tensor import ReplicaId as ReplicaId
from torch_dcp_backport.dist_checkpointing._src.sharded_tensor import ShardedBase as ShardedBase
from torch_dcp_backport.dist_checkpointing._src.sharded_tensor import ShardedTensor as ShardedTensor
from torch_dcp_backport.dist_checkpointing._src.sharded_tensor import check_fields
from torch_dcp_backport.dist_checkpointing._src.sharded_tensor import is_main_replica as is_main_replica
from torch_dcp_backport.dist_checkpointing.core import CheckpointingException
from torch_dcp_backport.dist_checkpointing.dict_utils import dict_list_map_inplace

StateDict = dict[str, Any]
CommonStateDict = dict[str, Any]
ShardedStateDict = dict[str, Any]
#: (key, data, replica id, flattened range) -> a sharded state dict.
FactoryBuildFn = Callable[[str, torch.Tensor, ReplicaId, Optional[slice]], ShardedStateDict]
#: The values that were loaded for the built state dict -> the value itself.
FactoryMergeFn = Callable[[StateDict], torch.Tensor]


@dataclass
class ShardedObject(ShardedBase):
    """A value in a grid of values that are no tensors.

    Args:
        key: the key of the grid.
        data: the value; None where it is to be loaded.
        global_shape: the extents of the grid.
        global_offset: the place of this value in the grid.
        replica_id: the number of this copy; 0, or a tuple of zeros, is the main copy, which is saved.

    Example:
        >>> from torch_dcp_backport.dist_checkpointing import ShardedObject
        >>> ShardedObject("rng", b"state of rank 1", (2,), (1,)).unique_key
        'rng/shard_1_2'
    """

    key: str
    data: Any = field(repr=False)
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    replica_id: ReplicaId = 0

    def validate_metadata_integrity(self) -> None:
        """Raise where the fields contradict each other.

        Raises:
            CheckpointingException: naming the key.
        """
        check_fields(self.key, (*self.global_shape, *self.global_offset), self.replica_id)
        if "/" in self.key:
            raise CheckpointingException(f'an object whose key has a "/": {self.key}')
        inside = all(0 <= place < extent for place, extent in zip(self.global_offset, self.global_shape))
        if len(self.global_shape) != len(self.global_offset) or not inside:
            raise CheckpointingException(
                f"no such place in a grid of objects: {self.key} (place {self.global_offset} "
                f"of {self.global_shape})"
            )

    @property
    def unique_key(self) -> str:
        """The key and the place in the grid, as the checkpoint names it."""
        offset, shape = (".".join(map(str, numbers)) for numbers in (self.global_offset, self.global_shape))
        return f"{self.key}/shard_{offset}_{shape}"

    def without_data(self) -> ShardedObject:
        return replace(self, data=None)

    @classmethod
    def empty_from_unique_key(cls, unique_key: str, replica_id: ReplicaId = 0) -> ShardedObject:
        """Return the object that a `unique_key` names, without its value.

        Old checkpoints leave out the last extent of the shape, which is -1 then.

        Args:
            unique_key: the name of an object in a checkpoint.
            replica_id: the number of this copy; 0, or a tuple of zeros, is the main copy, which is saved.

        Raises:
            CheckpointingException: not such a key.
        """
        key, slash, place = unique_key.partition("/")
        name, _, numbers = place.partition("_")
        offset_text, underscore, shape_text = numbers.partition("_")
        try:
            if not (slash and underscore) or name != "shard":
                raise ValueError("it has no /shard_OFFSET_SHAPE")
            offset = tuple(int(number) for number in offset_text.split(".") if number)
            shape = tuple(int(number) for number in shape_text.split(".") if number)
        except ValueError as error:
            raise CheckpointingException(f"not a key of a sharded object: {unique_key} ({error})") from None
        if len(shape) + 1 == len(offset):
            shape += (-1,)
        return cls(key, None, shape, offset, replica_id)


@dataclass
class ShardedTensorFactory(ShardedBase):
    """A value that is saved as a sharded state dict of its parts, and loaded from it.

    Args:
        key: the key of the value.
        data: the value.
        build_fn: called with (key, data, replica_id, flattened_range); returns a sharded state dict.
        merge_fn: called with the values that were loaded for that state dict; returns the value.
        replica_id: the number of this copy; 0, or a tuple of zeros, is the main copy, which is saved.
        flattened_range: the elements of a flattened tensor that `data` has; None where it is not flattened.
    """

    key: str
    data: Any = field(repr=False)
    build_fn: FactoryBuildFn
    merge_fn: FactoryMergeFn
    replica_id: ReplicaId = 0
    flattened_range: Optional[slice] = None

    def build(self) -> ShardedStateDict:
        """Return the sharded state dict of the parts: the result of `build_fn`."""
        return self.build_fn(self.key, self.data, self.replica_id, self.flattened_range)

    def validate_metadata_integrity(self) -> None:
        """Do nothing: the parts that are built are validated."""

    def without_data(self) -> ShardedTensorFactory:
        return replace(self, data=None)


class LocalNonpersistentObject:
    """A value that is not saved, and comes back from a load as it was passed.

    Args:
        obj: the value.
    """

    def __init__(self, obj: Any) -> None:
        self.obj = obj

    def unwrap(self) -> Any:
        """Return the value."""
        return self.obj


def apply_factories(sharded_state_dict: ShardedStateDict) -> None:
    """Replace factories with the parts that they build, in place."""
    dict_list_map_inplace(
        lambda value: value.build() if isinstance(value, ShardedTensorFactory) else value, sharded_state_dict
    )


def apply_factory_merges(x1: Any, x2: Any, key: tuple[Union[str, int], ...] = ()) -> Any:
    """Merge the values that were loaded for factories, in place where they are a dict or a list.

    Args:
        x1: the loaded values.
        x2: the state dict with the factories, with or without its other values.
        key: the path so far, for errors.

    Raises:
        ValueError: nothing was loaded where a factory stands.
    """
    if isinstance(x2, ShardedTensorFactory):
        return x2.merge_fn(x1)
    if isinstance(x2, (Mapping, list)):
        if not isinstance(x1, (dict, list)):
            raise ValueError(f"cannot merge {type(x1).__name__} and {type(x2).__name__} at {key}")
        items = x2.items() if isinstance(x2, Mapping) else enumerate(x2)
        for name, value in items:
            has_parts = isinstance(value, (ShardedTensorFactory, Mapping, list))
            if has_parts and (name in x1 if isinstance(x1, dict) else name < len(x1)):
                x1[name] = apply_factory_merges(x1[name], value, (*key, name))
    return x1
