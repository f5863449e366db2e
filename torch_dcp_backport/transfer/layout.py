"""Which box of a global tensor each rank holds.

Plain arithmetic on shapes, meshes and placements: never moves data, never talks to other ranks.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Optional

import torch

from torch_dcp_backport import compat

#: Per mesh dimension: None for a replica, (tensor dim, split factor) for a shard.
Placement = Optional[tuple[int, int]]


@dataclass(frozen=True)
class Box:
    """A rectangular region of a global tensor, in elements."""

    offset: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def numel(self) -> int:
        count = 1
        for extent in self.size:
            count *= extent
        return count

    def within(self, outer: Box) -> tuple[slice, ...]:
        """This box as slices of a tensor that holds `outer`."""
        return tuple(
            slice(start - base, start - base + extent)
            for start, base, extent in zip(self.offset, outer.offset, self.size)
        )

    def head(self, dim: int, length: int) -> Box:
        return Box(self.offset, (*self.size[:dim], length, *self.size[dim + 1 :]))

    def tail(self, dim: int, length: int) -> Box:
        """What `head(dim, length)` leaves over."""
        return Box(
            (*self.offset[:dim], self.offset[dim] + length, *self.offset[dim + 1 :]),
            (*self.size[:dim], self.size[dim] - length, *self.size[dim + 1 :]),
        )


def whole(shape: tuple[int, ...]) -> Box:
    return Box((0,) * len(shape), shape)


@dataclass(frozen=True)
class Layout:
    """How a tensor of a global shape is spread over ranks.

    Without a mesh (`ranks` is None) every rank holds all of it.
    """

    shape: tuple[int, ...]
    mesh_shape: tuple[int, ...] = ()
    # Global ranks of the mesh, row-major.
    ranks: Optional[tuple[int, ...]] = None
    placements: tuple[Placement, ...] = ()

    @property
    def is_sharded(self) -> bool:
        return any(placement is not None for placement in self.placements)

    def box(self, rank: int) -> Optional[Box]:
        """The box of a global rank; None for a rank outside the mesh. May be empty."""
        if self.ranks is None:
            return whole(self.shape)
        coordinate = coordinates(self.mesh_shape, self.ranks).get(rank)
        if coordinate is None:
            return None
        return box_at(self.shape, self.mesh_shape, self.placements, coordinate)

    def is_first_holder(self, rank: int) -> bool:
        """Whether `rank` is the lowest-placed of the ranks that hold the same box."""
        if self.ranks is None:
            return True
        coordinate = coordinates(self.mesh_shape, self.ranks).get(rank)
        return coordinate is not None and all(
            position == 0 for position, placement in zip(coordinate, self.placements) if placement is None
        )

    def held_whole_by(self, ranks: tuple[int, ...]) -> bool:
        """Whether every one of `ranks` holds the whole tensor."""
        return self.ranks is None or (not self.is_sharded and set(ranks) <= set(self.ranks))

    @functools.cached_property
    def signature(self) -> str:
        """The same text on every rank that sees the same layout."""
        return f"{self.shape}{self.mesh_shape}{self.ranks}{self.placements}"


@functools.lru_cache(maxsize=64)
def coordinates(mesh_shape: tuple[int, ...], ranks: tuple[int, ...]) -> dict[int, tuple[int, ...]]:
    found = {}
    for position, rank in enumerate(ranks):
        coordinate = []
        for extent in reversed(mesh_shape):
            position, index = divmod(position, extent)
            coordinate.append(index)
        found[rank] = tuple(reversed(coordinate))
    return found


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


def split_order(mesh_shape: tuple[int, ...], placements: tuple[Placement, ...]) -> list[int]:
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
    """The layout of a DTensor; a plain tensor is whole on every rank."""
    if not isinstance(tensor, compat.DTensor):
        return Layout(tuple(tensor.shape))
    compat.check_placements(tuple(tensor.placements))
    mesh_shape, ranks = compat.mesh_ranks(tensor.device_mesh)
    layout = Layout(
        tuple(tensor.shape), mesh_shape, ranks, tuple(compat.split_of(p) for p in tensor.placements)
    )
    split_order(mesh_shape, layout.placements)
    return layout


def row_of(box: Box, itemsize: int) -> tuple[int, int]:
    """(dim, bytes): the outermost dimension along which `box` can be cut, and what one row of it weighs."""
    for dim, extent in enumerate(box.size):
        if extent > 1:
            return dim, box.numel // extent * itemsize
    return 0, itemsize
