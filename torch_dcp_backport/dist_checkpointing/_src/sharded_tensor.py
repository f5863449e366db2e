"""A box of a global tensor on one rank, or a run of a flattened box.

Fields and positional order are those of megatron.core.dist_checkpointing.mapping, where programs find it.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, NoReturn, Optional, Union

import torch
import torch.distributed as dist

from torch_dcp_backport import compat
from torch_dcp_backport.dist_checkpointing.core import CheckpointingException
from torch_dcp_backport.transfer import Box, Group, Layout, group_ranks, has_slices, layout_of, misfit

# --- checks of fields ---


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


# --- runs of a flattened box ---
#
# A run of the elements of a box, in row-major order, is a few boxes: nothing else has to know of runs. In
# a checkpoint it lies folded: a tensor [X, Y] of boxes [x, y] is a tensor [X / x, Y / y, x * y], cut
# along its last axis. Pure arithmetic.


class Run(NamedTuple):
    """A box whose elements follow each other in a flattened box."""

    box: Box
    #: The place of its first element.
    start: int


def runs(box: Box, start: int, stop: int, base: int = 0) -> Iterator[Run]:
    """Yield the fewest boxes that have the elements `start` to `stop` of a box, in order.

    At most two for each axis but the first, and one more.

    Args:
        base: the place of the box's first element.
    """
    if start >= stop:
        return
    if (start, stop) == (0, box.numel):
        yield Run(box, base)
        return
    dim = next(dim for dim, extent in enumerate(box.size) if extent > 1)
    row = box.numel // box.size[dim]
    first, last = start // row, -(-stop // row)
    if last - first == 1:
        inner = box.tail(dim, first).head(dim, 1)
        yield from runs(inner, start - first * row, stop - first * row, base + first * row)
        return
    if start % row:
        yield from runs(box.tail(dim, first).head(dim, 1), start % row, row, base + first * row)
        first += 1
    full_end = stop // row
    if full_end > first:
        yield Run(box.tail(dim, first).head(dim, full_end - first), base + first * row)
    if stop % row:
        yield from runs(box.tail(dim, full_end).head(dim, 1), 0, stop % row, base + full_end * row)


def folded_shape(grid: tuple[int, ...], numel: int) -> tuple[int, ...]:
    """Return the shape in which a checkpoint has a tensor of so many boxes of so many elements."""
    return (*grid, numel)


def folded(cell: tuple[int, ...], start: int, stop: int) -> Box:
    """Return the box of a folded tensor that holds a run of one cell."""
    return Box((*cell, start), (*(1 for _ in cell), stop - start))


def unfolded(part: Box, grid: tuple[int, ...], shape: tuple[int, ...]) -> Iterator[Run]:
    """Yield the boxes of a tensor that a box of the folded tensor holds; places count from the part's start.

    Args:
        part: a box with an extent of 1 along every axis but the last.
        grid: the number of equal boxes that each axis of the tensor is cut into.
        shape: of the tensor.
    """
    size = tuple(extent // parts for extent, parts in zip(shape, grid))
    cell = Box(tuple(place * extent for place, extent in zip(part.offset, size)), size)
    start = part.offset[-1]
    yield from runs(cell, start, start + part.size[-1], -start)


# --- this rank's part ---
#
# Reads layouts only; moves nothing.


class TensorPart(NamedTuple):
    """This rank's part of a tensor."""

    #: In the shape of the box.
    local: torch.Tensor
    box: Box
    #: Zeros for the main copy.
    replica: Union[int, tuple[int, ...]]
    #: The lowest rank of the mesh; this rank for a plain tensor.
    mesh: Optional[int] = None


def part_of_this_rank(key: str, tensor: torch.Tensor, group: Group = None) -> TensorPart:
    """Return this rank's part. A plain tensor is the same on every rank of the group.

    Raises:
        NotImplementedError: a placement that does not say where elements live (Partial).
        CheckpointingException: a local tensor that is not the shard that its placements say.
    """
    layout, rank = layout_of(tensor), dist.get_rank() if dist.is_initialized() else 0
    local = compat.arrived(compat.local_part(tensor)) if isinstance(tensor, compat.DTensor) else tensor
    problem = misfit(key, local, layout, rank)
    if problem is not None:
        raise CheckpointingException(str(problem))
    local, box = local.detach(), layout.own_box(rank)
    if tuple(local.shape) != box.size:
        # It has no elements, and another shape than the empty box.
        local = local.new_empty(box.size)
    return TensorPart(
        local, box, replica_of(layout, rank, group), min(layout.mesh.ranks) if layout.mesh else rank
    )


def replica_of(layout: Layout, rank: int, group: Group = None) -> Union[int, tuple[int, ...]]:
    """Return the number of this copy: its place in the group, or along the mesh dimensions of replicas."""
    if layout.mesh is None:
        return group_ranks(group).index(rank) if dist.is_initialized() else 0
    coordinate = layout.mesh.coordinates.get(rank)
    if coordinate is None:
        return 1  # outside the mesh the box is empty
    return tuple(coordinate[dim] for dim in layout.replica_dims) or 0


# --- sharded tensors ---

#: A number, or a tuple of them: the copy with zeros only is the main copy.
ReplicaId = Union[int, tuple[int, ...]]


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
        """Return the same part without its value."""


def is_main_replica(replica_id: ReplicaId) -> bool:
    """Return whether a copy is the main copy: its id is 0, or zeros only."""
    if isinstance(replica_id, int):
        return replica_id == 0
    return all(number == 0 for number in replica_id)


@dataclass
class ShardedTensor(ShardedBase):
    """A box of a global tensor.

    Axes may be prepended: a local [3, 2] with `prepend_axis_num=1` is a box [1, 3, 2] of a global tensor with
    three axes, such as one layer of a stack.

    Args:
        key: the key of the global tensor.
        data: the box's values; None where they are to be made by a load.
        dtype: the dtype of `data`.
        local_shape: the shape of the box without the prepended axes; that of `data`, unless it is flattened.
        global_shape: the shape of the global tensor, with the prepended axes.
        global_offset: the first element of the box along each axis, with the prepended axes.
        axis_fragmentations: the number of equal parts that each axis is cut into, with the prepended axes;
            None for boxes of any size.
        replica_id: the number of this copy; 0, or a tuple of zeros, is the main copy, which is saved.
        prepend_axis_num: the number of prepended axes.
        allow_shape_mismatch: load the elements that the saved tensor and this box have in common, and zeros
            for the rest.
        flattened_range: `data` is 1-D, and has these elements of the box in row-major order; as Megatron's
            distributed optimizer before 0.16 holds its states.
        mesh: set by `from_dtensor`: the lowest rank of the mesh, or this rank. The box on another mesh is a
            replica.

    Example:
        >>> import torch
        >>> from torch_dcp_backport.dist_checkpointing import ShardedTensor
        >>> part = ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3), (0, 1, 4))  # the second of 4 parts
        >>> part.global_shape, part.global_offset
        ((8, 3), (2, 0))
    """

    key: str
    data: Optional[torch.Tensor] = field(repr=False)
    dtype: torch.dtype
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    axis_fragmentations: Optional[tuple[int, ...]]
    replica_id: ReplicaId = 0
    prepend_axis_num: int = 0
    allow_shape_mismatch: bool = False
    flattened_range: Optional[slice] = None
    mesh: Optional[int] = None

    @property
    def has_regular_grid(self) -> bool:
        """True where every box of the global tensor has the same size."""
        return self.axis_fragmentations is not None

    def validate_metadata_integrity(self) -> None:
        """Raise where the fields contradict each other.

        Raises:
            CheckpointingException: naming the key and the two values that disagree.
        """
        numbers = (*self.local_shape, *self.global_shape, *self.global_offset, self.prepend_axis_num)
        check_fields(self.key, numbers, self.replica_id)
        if "/shard_" in self.key:
            refuse(self.key, "the key of an object's place", self.key, 'no "/shard_"')
        check_range(self)
        data = self.data
        if data is not None and data.dtype != self.dtype:
            refuse(self.key, "another dtype than its data's", self.dtype, data.dtype)
        if data is not None and data.shape != data_shape(self):
            refuse(self.key, "another local shape than its data's", data_shape(self), tuple(data.shape))
        axes = len(self.local_shape) + self.prepend_axis_num
        if not len(self.global_shape) == len(self.global_offset) == axes:
            got = f"{self.global_shape} with offset {self.global_offset}"
            refuse(self.key, "wrong number of axes in the global shape or offset", got, f"{axes} axes")
        local, offset, limits = tuple(self.local_shape), tuple(self.global_offset), tuple(self.global_shape)
        if is_place(local, offset, limits, self.prepend_axis_num, self.has_regular_grid):
            return
        for start, extent, limit in zip(offset, self.box_size, limits):
            is_outside = start < 0 or start + extent > limit
            if is_outside and not (self.allow_shape_mismatch or 0 in local):
                got = f"offset {self.global_offset}, shape {self.box_size}"
                refuse(self.key, "a box outside the global tensor", got, self.global_shape)
        if self.axis_fragmentations is not None and is_off_grid(local, offset[self.prepend_axis_num :]):
            what = "an offset that is no multiple of the local shape (irregular grids pass "
            refuse(self.key, what + "axis_fragmentations=None)", self.global_offset, local)

    @property
    def box_size(self) -> tuple[int, ...]:
        """The local shape with the prepended axes."""
        return (1,) * self.prepend_axis_num + tuple(self.local_shape)

    def global_slice(self) -> tuple[Union[int, slice], ...]:
        """Return the box as an index of the global tensor; prepended axes are numbers."""
        count = self.prepend_axis_num
        spans = zip(self.global_offset[count:], self.local_shape)
        return (*self.global_offset[:count], *(slice(start, start + extent) for start, extent in spans))

    def local_chunk_offset_in_global(self) -> tuple[int, ...]:
        """Return the place of the box in the grid of boxes.

        Raises:
            CheckpointingException: the grid is irregular.
        """
        grid_of(self)
        return tuple(
            start // extent if extent else 0 for start, extent in zip(self.global_offset, self.box_size)
        )

    def max_allowed_chunks(self) -> tuple[int, ...]:
        """Return the extents of a part of the grid; the name is Megatron's.

        Raises:
            CheckpointingException: the grid is irregular, or an axis has no equal parts.
        """
        grid = grid_of(self)
        if (
            any(extent % parts for extent, parts in zip(self.global_shape, grid))
            and not self.allow_shape_mismatch
        ):
            refuse(self.key, "an axis that has no equal parts", self.global_shape, f"multiples of {grid}")
        return tuple(extent // parts for extent, parts in zip(self.global_shape, grid))

    def local_coordinates(self) -> tuple[Any, ...]:
        """Return numpy arrays, one for each axis of the box: the places of the flattened range's elements.

        Raises:
            CheckpointingException: there is no flattened range.
        """
        import numpy

        if self.flattened_range is None:
            refuse(self.key, "no flattened range", None, "slice(start, stop)")
        places = numpy.arange(self.flattened_range.start, self.flattened_range.stop)
        return tuple(numpy.unravel_index(places, tuple(self.local_shape)))

    def global_coordinates(self) -> tuple[Any, ...]:
        """Return `local_coordinates` moved to the global tensor; prepended axes have one number."""
        places = (0,) * self.prepend_axis_num + self.local_coordinates()
        return tuple(place + start for place, start in zip(places, self.global_offset))

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
            key: the key of the global tensor.
            data: the local tensor.
            rank_offsets: (axis, place, parts) for each axis that is cut; axes count the prepended ones.
            replica_id: the number of this copy; 0, or a tuple of zeros, is the main copy, which is saved.
            prepend_axis_num: the number of axes of the global tensor that `data` does not have, in front.
            flattened_range: None; for a range there is `from_rank_offsets_flat`.
            init_kwargs: other arguments of the class, such as `allow_shape_mismatch`.

        Raises:
            CheckpointingException: an axis, a place or a number of parts that cannot be.
        """
        if not isinstance(data, torch.Tensor):
            raise CheckpointingException(f"no local tensor: {key} (expected a tensor, got {data!r:.80})")
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
            replica_id=replica_id,
            prepend_axis_num=prepend_axis_num,
            **{"flattened_range": flattened_range, **init_kwargs},
        )

    @classmethod
    def from_rank_offsets_flat(
        cls,
        key: str,
        data: torch.Tensor,
        non_flat_local_shape: tuple[int, ...],
        *args: tuple[int, int, int],
        flattened_range: Optional[slice] = None,
        **kwargs: Any,
    ) -> ShardedTensor:
        """Describe a 1-D tensor that has a range of a flattened box, by the box's place among equal parts.

        Args:
            key: the key of the global tensor.
            data: the elements of the range; 1-D.
            non_flat_local_shape: the shape of the box.
            flattened_range: the elements of the box, in row-major order, that `data` has; required.
            args, kwargs: as for `from_rank_offsets`.

        Raises:
            CheckpointingException: no range, or data that is not it.
        """
        if flattened_range is None:
            raise CheckpointingException(f"no flattened range: {key} (from_rank_offsets needs none)")
        box = torch.empty(tuple(non_flat_local_shape), dtype=data.dtype, device="meta")
        made = replace(
            cls.from_rank_offsets(key, box, *args, **kwargs), data=data, flattened_range=flattened_range
        )
        made.validate_metadata_integrity()
        return made

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

        A plain tensor is taken to be the same on every rank that has it. `data` is the local tensor itself,
        so that a load writes into it.

        Args:
            key: the key of the global tensor.
            tensor: a DTensor, or a plain tensor.
            allow_shape_mismatch: see the class.
            process_group: the ranks that save or load together; a plain tensor's main copy is on the first
                that has it.

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
        """Make `data`, unless it is there.

        Args:
            device: the device of the new tensor.
            init_fn: called with a shape, `dtype=` and `device=`; returns the tensor.
        """
        if self.data is None:
            self.data = init_fn(data_shape(self), dtype=self.dtype, device=device)

    def narrow(self, dim: int, start: int, length: int) -> list[ShardedTensor]:
        """Return this rank's part, where every rank `narrow`s its box alike, in a list; a run may have none.

        Args:
            dim, start, length: of the box, as for `torch.narrow`.

        Raises:
            CheckpointingException: boxes of different sizes along `dim`, or no such part of a box; a
                flattened range along another axis than the first.
        """
        axis, extent = dim + self.prepend_axis_num, self.local_shape[dim]
        total, offset = self.global_shape[axis], self.global_offset[axis]
        if not extent or total % extent or offset % extent:
            what = "boxes that are not of one size cannot be narrowed alike"
            refuse(self.key, what, total, f"multiples of {extent}")
        if not 0 <= start <= start + length <= extent:
            refuse(self.key, "no such part of a box", f"{start} to {start + length}", f"0 to {extent}")
        if self.flattened_range is not None and dim:
            refuse(self.key, "a flattened range can be narrowed along the first axis alone", dim, 0)
        made = replace(
            self,
            data=None,
            local_shape=_with(self.local_shape, dim, length),
            global_shape=_with(self.global_shape, axis, total // extent * length),
            global_offset=_with(self.global_offset, axis, offset // extent * length),
        )
        if self.flattened_range is None:
            made.data = None if self.data is None else self.data.narrow(dim, start, length)
            return [made]
        row = math.prod(self.local_shape[1:])
        begin, end = self.flattened_range.start, self.flattened_range.stop
        first, last = max(begin, start * row), min(end, (start + length) * row)
        if first >= last:
            return []
        made.data = None if self.data is None else self.data[first - begin : last - begin]
        made.flattened_range = slice(first - start * row, last - start * row)
        return [made]


def refuse(key: str, what: str, got: object, expected: object) -> NoReturn:
    raise CheckpointingException(f"{what}: {key} (expected {expected}, got {got})")


def check_range(part: ShardedTensor) -> None:
    """Refuse a flattened range that is none of the local shape, or of an irregular grid."""
    run, parts = part.flattened_range, part.axis_fragmentations
    if run is None:
        return
    limit = math.prod(part.local_shape)
    numbers = (run.start, run.stop)
    if run.step is not None or not all(type(number) is int for number in numbers):
        refuse(part.key, "not a flattened range", run, "slice(start, stop)")
    if not 0 <= run.start <= run.stop <= limit:
        refuse(part.key, "a flattened range outside the local shape", run, f"0 to {limit}")
    grid = tuple(cut * extent for cut, extent in zip(parts or (), part.box_size))
    if parts is None or grid != tuple(part.global_shape):
        what = "a flattened range without a regular grid of equal boxes"
        refuse(part.key, what, f"{parts} of {part.box_size}", f"{tuple(part.global_shape)} together")


def grid_of(part: ShardedTensor) -> tuple[int, ...]:
    """Return the numbers of boxes along the axes of a regular grid; an irregular one is refused."""
    if part.axis_fragmentations is None:
        refuse(part.key, "an irregular grid has no numbers of chunks", None, "axis_fragmentations")
    return tuple(part.axis_fragmentations)


def data_shape(part: ShardedTensor) -> tuple[int, ...]:
    """Return the shape of a part's data: that of the box, or the elements of the flattened range."""
    run = part.flattened_range
    return tuple(part.local_shape) if run is None else (run.stop - run.start,)


def _with(values: tuple[int, ...], place: int, value: int) -> tuple[int, ...]:
    return (*values[:place], value, *values[place + 1 :])


def check_memory(
    name: str, tensor: torch.Tensor, size: tuple[int, ...], dtype: torch.dtype, is_written: bool = False
) -> None:
    """Refuse a tensor that an exchange cannot read or write: other ranks would wait for it.

    Raises:
        CheckpointingException: it is of another shape or dtype than expected, or has no memory of its own.
    """
    if tensor.layout is not torch.strided or tensor.is_meta:
        raise CheckpointingException(f"{name}: a tensor without values ({tensor.layout} on {tensor.device})")
    if (tuple(tensor.shape), tensor.dtype) != (size, dtype):
        got = f"{tuple(tensor.shape)} {tensor.dtype}"
        raise CheckpointingException(f"{name}: data of {got}, expected {size} {dtype}")
    if is_written and any(stride == 0 and count > 1 for stride, count in zip(tensor.stride(), tensor.shape)):
        raise CheckpointingException(f"{name}: an expanded tensor cannot be written")


def is_float8tensor(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is of Transformer Engine's class for float8, by the name of its class."""
    return any(kind.__name__ in ("Float8Tensor", "QuantizedTensor") for kind in type(tensor).__mro__)


def nominal(tensor: torch.Tensor) -> torch.Tensor:
    """Return a Transformer Engine tensor's values in their nominal dtype; other tensors as they are."""
    dequantize = getattr(tensor, "dequantize", None) if is_float8tensor(tensor) else None
    return tensor if dequantize is None else dequantize()


def boxed(part: ShardedTensor, data: torch.Tensor) -> torch.Tensor:
    """Return the data of a part in the shape of its box: with the prepended axes."""
    axes = (None,) * (part.prepend_axis_num if part.flattened_range is None else len(part.global_shape))
    # Of a sparse tensor there is no view; it is refused later, by its key.
    return data.detach()[axes] if axes and has_slices(data) else data.detach()
