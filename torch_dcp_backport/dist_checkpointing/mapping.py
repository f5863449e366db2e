"""Which part of which global tensor, or which of a grid of objects, a rank's value is.

Fields and positional order are those of megatron.core.dist_checkpointing.mapping. Reads and writes no file.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Optional, Union

import torch

from torch_dcp_backport.dist_checkpointing.core import CheckpointingException, check_fields
from torch_dcp_backport.dist_checkpointing.dict_utils import dict_list_map_inplace
from torch_dcp_backport.dist_checkpointing.engine.parts import part_of_this_rank
from torch_dcp_backport.transfer.groups import Group

StateDict = dict[str, Any]
CommonStateDict = dict[str, Any]
ShardedStateDict = dict[str, Any]
#: A number, or a tuple of them: the copy of all zeros is the main one.
ReplicaId = Union[int, tuple[int, ...]]
#: (key, data, replica id, flattened range) -> a sharded state dict.
FactoryBuildFn = Callable[[str, torch.Tensor, ReplicaId, Optional[slice]], ShardedStateDict]
#: What was loaded for the built state dict -> the value itself.
FactoryMergeFn = Callable[[StateDict], torch.Tensor]


class ShardedBase(ABC):
    """A value that is a part of something global, under a key."""

    key: str
    data: Any
    replica_id: ReplicaId

    @abstractmethod
    def validate_metadata_integrity(self) -> None:
        """Raise CheckpointingException where the fields contradict each other."""

    @abstractmethod
    def without_data(self) -> ShardedBase:
        """The same part without its value."""


def is_main_replica(replica_id: ReplicaId) -> bool:
    """Whether a copy is the one that counts: 0, or zeros only."""
    if isinstance(replica_id, int):
        return replica_id == 0
    return all(number == 0 for number in replica_id)


@dataclass
class ShardedTensor(ShardedBase):
    """A box of a global tensor.

    Axes may be prepended: a local [3, 2] with `prepend_axis_num=1` is a box [1, 3, 2] of a global tensor with
    three axes, such as one layer of a stack.
    """

    #: Of the global tensor.
    key: str
    #: The box's values; None where they are to be made by a load.
    data: Optional[torch.Tensor] = field(repr=False)
    dtype: torch.dtype
    #: Without the prepended axes, as is that of `data`.
    local_shape: tuple[int, ...]
    #: With the prepended axes, as are the two below.
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    #: Into how many equal parts each axis is cut; None for boxes of any size.
    axis_fragmentations: Optional[tuple[int, ...]]
    replica_id: ReplicaId = 0
    prepend_axis_num: int = 0
    #: Load what the saved tensor and this box have in common, and zeros for the rest.
    allow_shape_mismatch: bool = False
    #: Of Megatron before 0.16; not supported.
    flattened_range: Optional[slice] = None
    #: Of `from_dtensor`: the lowest rank of the mesh. The same box on another mesh is a replica.
    mesh: Optional[int] = None

    @property
    def has_regular_grid(self) -> bool:
        return self.axis_fragmentations is not None

    def validate_metadata_integrity(self) -> None:
        """Raise where the fields contradict each other.

        Raises:
            CheckpointingException: naming the key and the two values that disagree.
        """
        numbers = (*self.local_shape, *self.global_shape, *self.global_offset, self.prepend_axis_num)
        check_fields(self.key, numbers, self.replica_id)
        if "/shard_" in self.key:
            self._refuse("the key of an object's place", self.key, 'no "/shard_"')
        if self.flattened_range is not None:
            self._refuse("flattened ranges are not supported", self.flattened_range, None)
        if self.data is not None and self.data.dtype != self.dtype:
            self._refuse("another dtype than its data's", self.dtype, self.data.dtype)
        if self.data is not None and tuple(self.data.shape) != tuple(self.local_shape):
            self._refuse("another local shape than its data's", self.local_shape, tuple(self.data.shape))
        axes = len(self.local_shape) + self.prepend_axis_num
        if not len(self.global_shape) == len(self.global_offset) == axes:
            got = f"{self.global_shape} with offset {self.global_offset}"
            self._refuse("wrong number of axes in the global shape or offset", got, f"{axes} axes")
        for start, extent, limit in zip(self.global_offset, self.box_size, self.global_shape):
            is_outside = start < 0 or start + extent > limit
            if is_outside and not (self.allow_shape_mismatch or 0 in self.local_shape):
                got = f"offset {self.global_offset}, shape {self.box_size}"
                self._refuse("a box outside the global tensor", got, self.global_shape)
        if self.axis_fragmentations is not None:
            for start, extent in zip(self.global_offset[self.prepend_axis_num :], self.local_shape):
                if extent and start % extent:
                    what = "an offset that is no multiple of the local shape (irregular grids pass "
                    self._refuse(
                        what + "axis_fragmentations=None)", self.global_offset, tuple(self.local_shape)
                    )

    def _refuse(self, what: str, got: object, expected: object) -> None:
        raise CheckpointingException(f"{what}: {self.key} (expected {expected}, got {got})")

    @property
    def box_size(self) -> tuple[int, ...]:
        """The local shape with the prepended axes."""
        return (1,) * self.prepend_axis_num + tuple(self.local_shape)

    def global_slice(self) -> tuple[Union[int, slice], ...]:
        """The box as an index of the global tensor; prepended axes are numbers."""
        count = self.prepend_axis_num
        spans = zip(self.global_offset[count:], self.local_shape)
        return (*self.global_offset[:count], *(slice(start, start + extent) for start, extent in spans))

    def local_chunk_offset_in_global(self) -> tuple[int, ...]:
        """The place of the box in the grid of boxes.

        Raises:
            CheckpointingException: the grid is irregular.
        """
        fragments = self.max_allowed_chunks()
        return tuple(
            start * parts // extent if extent else 0
            for start, parts, extent in zip(self.global_offset, fragments, self.global_shape)
        )

    def max_allowed_chunks(self) -> tuple[int, ...]:
        """The shape of the grid of boxes.

        Raises:
            CheckpointingException: the grid is irregular.
        """
        if self.axis_fragmentations is None:
            self._refuse("an irregular grid has no numbers of chunks", None, "axis_fragmentations")
        assert self.axis_fragmentations is not None, "it was refused"
        return tuple(self.axis_fragmentations)

    def without_data(self) -> ShardedTensor:
        return replace(self, data=None)

    @classmethod
    def from_rank_offsets(
        cls,
        key: str,
        data: torch.Tensor,
        *rank_offsets: tuple[int, int, int],
        replica_id: ReplicaId = 0,
        prepend_axis_num: int = 0,
        flattened_range: None = None,
        **init_kwargs: Any,
    ) -> ShardedTensor:
        """Describe a local tensor by its place among equal parts along some axes.

        Args:
            rank_offsets: (axis, place, parts) for each axis that is cut; axes count the prepended ones.

        Raises:
            CheckpointingException: an axis, a place or a number of parts that cannot be.
        """
        axes = data.dim() + prepend_axis_num
        offset, parts = [0] * axes, [1] * axes
        local = (1,) * prepend_axis_num + tuple(data.shape)
        for axis, place, count in rank_offsets:
            if not 0 <= axis < axes or not 0 <= place < count:
                raise CheckpointingException(
                    f"no such place: {key} (axis {axis} of {axes}, part {place} of {count})"
                )
            offset[axis], parts[axis] = place * local[axis], count
        return cls(
            key,
            data,
            data.dtype,
            tuple(data.shape),
            tuple(extent * count for extent, count in zip(local, parts)),
            tuple(offset),
            tuple(parts),
            replica_id,
            prepend_axis_num,
            flattened_range=flattened_range,
            **init_kwargs,
        )

    @classmethod
    def from_dtensor(
        cls,
        key: str,
        tensor: torch.Tensor,
        *,
        allow_shape_mismatch: bool = False,
        process_group: Group = None,
    ) -> ShardedTensor:
        """Describe this rank's part of a DTensor, on any mesh and with any placements.

        A plain tensor is taken to be the same on every rank. `data` is the local tensor itself, so that a
        load writes into it.

        Args:
            process_group: those that save or load together; a plain tensor's main copy is the first one's.

        Raises:
            NotImplementedError: a placement that does not say where elements live (Partial).
            CheckpointingException: a local tensor that is not the shard that its placements say.
        """
        mine = part_of_this_rank(key, tensor, process_group)
        return cls(
            key,
            mine.local,
            mine.local.dtype,
            mine.box.size,
            tuple(tensor.shape),
            mine.box.offset,
            None,
            mine.replica,
            allow_shape_mismatch=allow_shape_mismatch,
            mesh=mine.mesh,
        )

    def init_data(
        self, device: Union[str, torch.device], init_fn: Callable[..., torch.Tensor] = torch.empty
    ) -> None:
        """Make `data`, unless it is there."""
        if self.data is None:
            self.data = init_fn(tuple(self.local_shape), dtype=self.dtype, device=device)

    def narrow(self, dim: int, start: int, length: int) -> list[ShardedTensor]:
        """This rank's part of the global tensor that is `narrow`ed alike: a list of one, or of none.

        The box has to lie inside or outside as a whole, but for a dimension that it holds all of.

        Args:
            dim: of the local tensor.
            start, length: in elements of the global tensor.
        """
        axis = dim + self.prepend_axis_num
        first = self.global_offset[axis]
        begin, end = max(first, start), min(first + self.local_shape[dim], start + length)
        if begin >= end:
            return []
        local = _with(self.local_shape, dim, end - begin)
        data = None if self.data is None else self.data.narrow(dim, begin - first, end - begin)
        return [
            replace(
                self,
                data=data,
                local_shape=local,
                global_shape=_with(self.global_shape, axis, length),
                global_offset=_with(self.global_offset, axis, begin - start),
                axis_fragmentations=self._narrowed_grid(axis, local[dim], length, begin - start),
            )
        ]

    def _narrowed_grid(self, axis: int, extent: int, length: int, offset: int) -> Optional[tuple[int, ...]]:
        """The grid of the narrowed tensor, where it still has one."""
        if self.axis_fragmentations is None or length % extent or offset % extent:
            return None
        return _with(self.axis_fragmentations, axis, length // extent)


def _with(values: tuple[int, ...], place: int, value: int) -> tuple[int, ...]:
    return (*values[:place], value, *values[place + 1 :])


@dataclass
class ShardedObject(ShardedBase):
    """One of a grid of values that are no tensors."""

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
        """Parse a `unique_key`. Old checkpoints leave out the last extent of the shape, which is -1 then.

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
    """A value that is saved as a sharded state dict of its parts, and loaded from it."""

    key: str
    data: Any = field(repr=False)
    build_fn: FactoryBuildFn
    merge_fn: FactoryMergeFn
    replica_id: ReplicaId = 0
    flattened_range: Optional[slice] = None

    def build(self) -> ShardedStateDict:
        return self.build_fn(self.key, self.data, self.replica_id, self.flattened_range)

    def validate_metadata_integrity(self) -> None:
        """Nothing to contradict: what is built is validated."""

    def without_data(self) -> ShardedTensorFactory:
        return replace(self, data=None)


class LocalNonpersistentObject:
    """A value that is not saved, and comes back from a load as it was passed."""

    def __init__(self, obj: Any) -> None:
        self.obj = obj

    def unwrap(self) -> Any:
        return self.obj


def apply_factories(sharded_state_dict: ShardedStateDict) -> None:
    """Replace factories with what they build, in place."""
    dict_list_map_inplace(
        lambda value: value.build() if isinstance(value, ShardedTensorFactory) else value, sharded_state_dict
    )


def apply_factory_merges(x1: Any, x2: Any, key: tuple[Union[str, int], ...] = ()) -> Any:
    """Merge what was loaded for factories, in place where that is a dict or a list.

    Args:
        x1: what was loaded.
        x2: the state dict with the factories, or what is left of it without other values.
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
