"""The box of a global tensor that each rank holds.

Plain arithmetic on shapes, meshes and placements: never moves data, never talks to other ranks.
"""

from __future__ import annotations

import functools
import hashlib
import math
import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Optional

import torch
from torch.distributed.device_mesh import DeviceMesh

from torch_dcp_backport import compat
from torch_dcp_backport.transfer._src.errors import Problem, spell_key

#: Per mesh dimension: None for a replica, (tensor dim, split factor) for a shard.
Placement = Optional[tuple[int, int]]


@dataclass(frozen=True)
class Box:
    """A rectangular region of a global tensor, in elements.

    Args:
        offset: the first element along each dimension.
        size: the number of elements along each dimension.

    Example:
        >>> import torch
        >>> from torch_dcp_backport.transfer import Box
        >>> held = torch.arange(6).reshape(2, 3)  # the box at (4, 0) of a larger tensor
        >>> held[Box((5, 1), (1, 2)).within(Box((4, 0), (2, 3)))].tolist()
        [[4, 5]]
    """

    offset: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.size)

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Return this box as slices of a tensor.

        Args:
            outer: the box that the tensor holds; it contains this one.
        """
        return tuple(
            slice(start - base, start - base + extent)
            for start, base, extent in zip(self.offset, outer.offset, self.size)
        )

    def head(self, dim: int, length: int) -> Box:
        """Return the first part of this box.

        Args:
            dim: the dimension along which it is cut.
            length: the number of elements of the part along `dim`.
        """
        return Box(self.offset, (*self.size[:dim], length, *self.size[dim + 1 :]))

    def tail(self, dim: int, length: int) -> Box:
        """Return the rest of this box, behind `head(dim, length)`.

        Args:
            dim: the dimension along which it is cut.
            length: the number of elements along `dim` that are left out.
        """
        return Box(
            (*self.offset[:dim], self.offset[dim] + length, *self.offset[dim + 1 :]),
            (*self.size[:dim], self.size[dim] - length, *self.size[dim + 1 :]),
        )


@functools.lru_cache(maxsize=4096)
def whole(shape: tuple[int, ...]) -> Box:
    """Return the box of a whole tensor of a shape."""
    return Box((0,) * len(shape), shape)


@functools.lru_cache(maxsize=4096)
def row_major(size: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a dense tensor of this size, as torch has them also where there are no elements."""
    strides, step = [], 1
    for extent in reversed(size):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


@dataclass(frozen=True)
class Mesh:
    """A grid of ranks.

    Args:
        shape: the number of ranks along each dimension.
        ranks: the global ranks, row-major.

    Example:
        >>> from torch_dcp_backport.transfer import Mesh
        >>> mesh = Mesh((2, 2), (0, 1, 2, 3))
        >>> mesh.coordinates[2], mesh.first_along(1, rank=3)
        ((1, 0), 2)
    """

    shape: tuple[int, ...]
    ranks: tuple[int, ...]

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        # Without what is derived.
        return Mesh, (self.shape, self.ranks)

    @functools.cached_property
    def _hash(self) -> int:
        # Looked up for each of thousands of tensors, on a thousand ranks.
        return hash((self.shape, self.ranks))

    @functools.cached_property
    def coordinates(self) -> dict[int, tuple[int, ...]]:
        """Each rank's position in the grid."""
        coordinates = {}
        for position, rank in enumerate(self.ranks):
            coordinate = []
            for extent in reversed(self.shape):
                position, index = divmod(position, extent)
                coordinate.append(index)
            coordinates[rank] = tuple(reversed(coordinate))
        return coordinates

    @functools.cached_property
    def signature(self) -> str:
        """The same text on every rank that sees the same mesh; short, since every tensor has it."""
        text = f"{self.shape}{self.ranks}"
        return text if len(self.ranks) <= 8 else hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def first_along(self, dim: int, rank: int) -> int:
        """Return the rank at 0 on a dimension, and at the position of `rank` on the others.

        Args:
            dim: a dimension of the mesh.
            rank: a global rank of the mesh.
        """
        step = math.prod(self.shape[dim + 1 :])
        return self.ranks[self.ranks.index(rank) - step * self.coordinates[rank][dim]]


@dataclass(frozen=True)
class Layout:
    """The spread of a tensor over ranks; without a mesh every rank holds all of it.

    Args:
        shape: the global shape.
        mesh: the ranks that hold the tensor; None is all ranks.
        placements: for each mesh dimension None (a replica), or (tensor dimension, split factor) of a shard;
            the split factor is 1 but for a strided shard.

    Example:
        >>> from torch_dcp_backport.transfer import Layout, Mesh
        >>> rows = Layout((5, 2), Mesh((2,), (0, 1)), ((0, 1),))
        >>> rows.box(0), rows.box(1)
        (Box(offset=(0, 0), size=(3, 2)), Box(offset=(3, 0), size=(2, 2)))
    """

    shape: tuple[int, ...]
    mesh: Optional[Mesh] = None
    placements: tuple[Placement, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return layout_at, (self.shape, self.mesh, self.placements)

    @functools.cached_property
    def is_sharded(self) -> bool:
        """True where a placement is a shard."""
        return any(placement is not None for placement in self.placements)

    @functools.cached_property
    def replica_dims(self) -> tuple[int, ...]:
        """The mesh dimensions along which several ranks hold the same box."""
        if self.mesh is None:
            return ()
        return tuple(
            dim
            for dim, (extent, placement) in enumerate(zip(self.mesh.shape, self.placements))
            if placement is None and extent > 1
        )

    def box(self, rank: int) -> Optional[Box]:
        """Return the box of a rank, which may be empty; None for a rank outside the mesh.

        Args:
            rank: a global rank.
        """
        if self.mesh is None:
            return whole(self.shape)
        coordinate = self.mesh.coordinates.get(rank)
        if coordinate is None:
            return None
        return box_at(self.shape, self.mesh.shape, self.placements, coordinate)

    def own_box(self, rank: int) -> Box:
        """Return the box of a rank; an empty one outside the mesh, where the local tensor is empty.

        Args:
            rank: a global rank.
        """
        nothing = (0,) * len(self.shape)
        return self.box(rank) or Box(nothing, nothing)

    def is_first_holder(self, rank: int) -> bool:
        """Return whether a rank is the lowest-placed of the ranks that hold the same box.

        Args:
            rank: a global rank.
        """
        if self.mesh is None:
            return True
        coordinate = self.mesh.coordinates.get(rank)
        return coordinate is not None and all(coordinate[dim] == 0 for dim in self.replica_dims)

    def held_whole_by(self, ranks: tuple[int, ...]) -> bool:
        """Return whether each of some ranks holds the whole tensor.

        Args:
            ranks: global ranks.
        """
        return self.mesh is None or (not self.is_sharded and set(ranks) <= set(self.mesh.ranks))

    @functools.cached_property
    def signature(self) -> str:
        """The same text on every rank that sees the same layout."""
        return f"{self.shape}{self.mesh.signature if self.mesh else ''}{self.placements}"


@functools.lru_cache(maxsize=65536)
def box_at(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    placements: tuple[Placement, ...],
    coordinate: tuple[int, ...],
) -> Box:
    offset, size = [0] * len(shape), list(shape)
    for mesh_dim in split_order(mesh_shape, placements):
        placement = placements[mesh_dim]
        assert placement is not None
        dim = placement[0]
        # The rule of torch.chunk: equal pieces, rounded up, the last ones short or empty.
        step = -(-size[dim] // mesh_shape[mesh_dim])
        start = min(step * coordinate[mesh_dim], size[dim])
        offset[dim] += start
        size[dim] = min(step, size[dim] - start)
    if 0 in size:
        # An empty box lies nowhere; the origin keeps slices valid.
        offset = [0] * len(shape)
    return Box(tuple(offset), tuple(size))


@functools.lru_cache(maxsize=1024)
def split_order(mesh_shape: tuple[int, ...], placements: tuple[Placement, ...]) -> Sequence[int]:
    """Mesh dimensions in the order in which they cut.

    Left to right, but a strided shard cuts after those to its right whose sizes multiply to its
    split factor: FSDP2 over TP is written (_StridedShard(0, split_factor=tp), Shard(0)) and means
    "TP first, then FSDP within the TP shard".

    Raises:
        NotImplementedError: a split factor that no run of mesh dimensions gives.
    """
    per_dim: dict[int, list[int]] = {}
    for mesh_dim in range(len(placements) - 1, -1, -1):
        placement = placements[mesh_dim]
        if placement is None:
            continue
        dim, factor = placement
        order = per_dim.setdefault(dim, [])
        cut, product = 0, 1
        while product < factor and cut < len(order):
            product *= mesh_shape[order[cut]]
            cut += 1
        if product != factor:
            raise NotImplementedError(
                f"placements {placements} on a mesh of shape {mesh_shape}: the split factor {factor} "
                f"of mesh dimension {mesh_dim} is not a product of the mesh dimensions to its right"
            )
        order.insert(cut, mesh_dim)
    return [mesh_dim for order in per_dim.values() for mesh_dim in order]


def layout_of(tensor: torch.Tensor) -> Layout:
    """Return the layout of a DTensor; a plain tensor is whole on every rank.

    Args:
        tensor: a DTensor, or a plain tensor.

    Raises:
        NotImplementedError: a placement that does not say where elements live (Partial).

    Example:
        >>> import torch
        >>> from torch_dcp_backport.transfer import layout_of
        >>> layout_of(torch.zeros(2, 3)).box(rank=0)
        Box(offset=(0, 0), size=(2, 3))
    """
    if not isinstance(tensor, compat.DTensor):
        return layout_at(tuple(tensor.shape))
    mesh = mesh_of(tensor.device_mesh)
    return layout_at(tuple(tensor.shape), mesh, splits_of(mesh.shape, tensor.placements))


@functools.lru_cache(maxsize=4096)
def layout_at(
    shape: tuple[int, ...], mesh: Optional[Mesh] = None, placements: tuple[Placement, ...] = ()
) -> Layout:
    """Return a layout: one object for all tensors that lie alike, since it keeps derived values."""
    return Layout(shape, mesh, placements)


def splits_of(mesh_shape: tuple[int, ...], placements: tuple[object, ...]) -> tuple[Placement, ...]:
    """Return torch's placements in our form, checked.

    Not cached by placement: up to torch 2.7 a shard equals the strided one of its dimension.
    """
    compat.check_placements(placements)
    splits = tuple(compat.split_of(placement) for placement in placements)
    split_order(mesh_shape, splits)
    return splits


#: A mesh's ranks are read once: that costs more than everything else about a small tensor.
_meshes: weakref.WeakKeyDictionary[DeviceMesh, Mesh] = weakref.WeakKeyDictionary()


def mesh_of(device_mesh: DeviceMesh) -> Mesh:
    mesh = _meshes.get(device_mesh)
    if mesh is None:
        mesh = _meshes[device_mesh] = Mesh(*compat.mesh_ranks(device_mesh))
    return mesh


def row_of(box: Box, itemsize: int) -> tuple[int, int]:
    """Return the outermost dimension along which `box` can be cut, and the bytes of a row of it."""
    for dim, extent in enumerate(box.size):
        if extent > 1:
            return dim, box.numel // extent * itemsize
    return 0, itemsize


def misfit(key: Hashable, local: torch.Tensor, layout: Layout, rank: int) -> Optional[Problem]:
    """Return the problem of a local tensor that does not have the shape of its rank's box; None if it has it.

    If this package understood a layout of torch's otherwise than torch does, the result must be an error,
    never a wrong slice.

    Args:
        key: the key of the tensor, for the problem.
        local: the local tensor.
        layout: the layout that the tensor is said to have.
        rank: the global rank that has the local tensor.

    Example:
        >>> import torch
        >>> from torch_dcp_backport.transfer import Layout, Mesh, misfit
        >>> rows = Layout((4, 6), Mesh((2,), (0, 1)), ((0, 1),))
        >>> misfit("w", torch.zeros(2, 6), rows, rank=1)
        >>> print(misfit("w", torch.zeros(4, 3), rows, rank=1))
        the local tensor is not the shard that its placements say: w (expected (2, 6), got (4, 3))
    """
    box = layout.box(rank)
    if box is None or tuple(local.shape) == box.size or local.numel() == box.numel == 0:
        return None
    what = "the local tensor is not the shard that its placements say"
    return Problem(what, spell_key(key), got=str(tuple(local.shape)), expected=str(box.size))
