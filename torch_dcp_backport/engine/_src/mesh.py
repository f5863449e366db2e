"""The arrangement of ranks: shards, replicas of shards, tensor parallelism, ranks that share a sequence.

Must never leave ranks that share nothing without saying so: a shard size of 1 is replication.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

import torch.distributed as dist
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh

from torch_dcp_backport import compat
from torch_dcp_backport.transfer import Call, Group, Terms, groups_of, members

TITLE = "cannot arrange the ranks"


class Sizes(NamedTuple):
    """Extents of the mesh.

    Args:
        replicate: the number of copies of the model.
        shard: the number of shards of each copy.
        tp: the number of ranks that compute each layer together.
        ulysses: the number of ranks that share a sequence.
    """

    replicate: int
    shard: int
    tp: int
    ulysses: int = 1


class Grid(NamedTuple):
    """The ranks of the default process group, arranged.

    Args:
        sizes: the extents of the mesh.
        mesh: the mesh with all dimensions.
        data: the mesh for `fully_shard`: shards, or replicas of shards.
        tp: the mesh of tensor parallelism; None where there is none.
        sequence: all ranks once more, as "dp" and "sp": "sp" share a sequence; None where ranks share none.
    """

    sizes: Sizes
    mesh: DeviceMesh
    data: DeviceMesh
    tp: Optional[DeviceMesh]
    sequence: Optional[DeviceMesh] = None

    @property
    def reduced(self) -> int:
        """The number of ranks whose gradients FSDP2 adds up."""
        return self.sizes.replicate * self.sizes.shard

    @property
    def dp_size(self) -> int:
        """The number of ranks that have data of their own; those that share a sequence count once."""
        return self.reduced // self.sizes.ulysses

    @property
    def copies(self) -> int:
        """The number of consecutive ranks that have the same rows."""
        return self.sizes.tp * self.sizes.ulysses

    @property
    def dp_group(self) -> Group:
        """The ranks with other data, this rank among them; never None, which verl takes for no ranks."""
        if self.sequence is not None:
            return self.sequence.get_group("dp")
        return members(None) if self.tp is None else self.data.get_group()

    @property
    def sp_group(self) -> Group:
        """The ranks that share this rank's sequence; None where it shares none."""
        return None if self.sequence is None else self.sequence.get_group("sp")

    @property
    def is_first_copy(self) -> bool:
        """Whether this rank is the first of those that have the same rows."""
        shared = self.tp if self.sequence is None else self.sequence["sp"]
        return shared is None or shared.get_local_rank() == 0


def sizes_of(
    world: int, fsdp_size: int = -1, tp_size: int = 1, ulysses_sequence_parallel_size: int = 1
) -> Sizes:
    """Return the extents of the mesh of `world` ranks.

    Args:
        world: the number of ranks.
        fsdp_size: ranks that share a copy of the model; -1, or as many as there are and more: one copy.
        tp_size: ranks that compute each layer together.
        ulysses_sequence_parallel_size: ranks that share a sequence.

    Raises:
        ValueError: sizes that do not divide, or are not offered together.

    Example:
        >>> from torch_dcp_backport import engine
        >>> engine.sizes_of(8, fsdp_size=4)
        Sizes(replicate=2, shard=4, tp=1, ulysses=1)
    """
    shared = ulysses_sequence_parallel_size
    named = ("fsdp_size", fsdp_size), ("tp_size", tp_size), ("ulysses_sequence_parallel_size", shared)
    for name, size in named:
        if size == 0 or size < (-1 if name == "fsdp_size" else 1):
            raise ValueError(f"{name}={size} is no number of ranks")
    if world % tp_size:
        raise ValueError(f"tp_size={tp_size} does not divide {world} ranks")
    if world % shared:
        raise ValueError(f"ulysses_sequence_parallel_size={shared} does not divide {world} ranks")
    if shared > 1 and tp_size > 1:
        raise ValueError(f"ulysses_sequence_parallel_size={shared} is not offered with {tp_size=}")
    data = world // tp_size
    shard = data if fsdp_size == -1 else min(fsdp_size, data)
    if data % shard:
        raise ValueError(f"fsdp_size={fsdp_size} does not divide {data} ranks ({world} ranks, {tp_size=})")
    if tp_size > 1 and shard < data:
        raise ValueError(f"fsdp_size={fsdp_size} makes {data // shard} replicas: not offered with {tp_size=}")
    if tp_size > 1 and not compat.HAS_STRIDED:
        raise ValueError(
            f"tp_size={tp_size} needs torch >= 2.5, which can say how FSDP2 cuts what TP has cut"
        )
    return Sizes(data // shard, shard, tp_size, shared)


class Meshes(NamedTuple):
    """The meshes of an arrangement: as of `Grid`."""

    mesh: DeviceMesh
    sequence: Optional[DeviceMesh]


#: The default process group of the meshes, and the meshes by type of device and sizes.
_made: tuple[Any, dict[tuple[str, Sizes], Meshes]] = (None, {})


def meshes_of(world: Any) -> dict[tuple[str, Sizes], Meshes]:
    """Return the meshes that were made of the ranks of the default process group.

    torch makes process groups for each mesh, and keeps them until the program ends: an engine after another
    takes the same mesh.
    """
    global _made
    if _made[0] is not world:
        _made = (world, {})
    return _made[1]


def mesh_of(device_type: str, sizes: Sizes) -> Meshes:
    """Make the meshes under verl's names. Collective."""
    extents = {"ddp": sizes.replicate, "fsdp": sizes.shard, "tp": sizes.tp}
    # A dimension of one rank is left out, but never the one that shards.
    dims = {name: size for name, size in extents.items() if size > 1 or name == "fsdp"}
    mesh = device_mesh.init_device_mesh(device_type, tuple(dims.values()), mesh_dim_names=tuple(dims))
    sequence = None
    if sizes.ulysses > 1:
        extent = sizes.replicate * sizes.shard // sizes.ulysses, sizes.ulysses
        sequence = device_mesh.init_device_mesh(device_type, extent, mesh_dim_names=("dp", "sp"))
    return Meshes(mesh, sequence)


def arrange(
    device_type: str, fsdp_size: int = -1, tp_size: int = 1, ulysses_sequence_parallel_size: int = 1
) -> Grid:
    """Arrange the ranks of the default process group. Collective.

    Args:
        device_type: the type of device of the mesh, "cpu" or "cuda" for example.
        fsdp_size: as of `sizes_of`.
        tp_size: as of `sizes_of`.
        ulysses_sequence_parallel_size: as of `sizes_of`.

    Raises:
        RuntimeError: sizes that do not divide, or are not the same on every rank; on every rank.

    Example:
        Within a process group:

        >>> from torch_dcp_backport import engine
        >>> grid = engine.arrange("cpu")
        >>> grid.sizes, grid.dp_size
        (Sizes(replicate=1, shard=1, tp=1, ulysses=1), 1)
    """
    if not dist.is_initialized():
        raise RuntimeError(f"{TITLE}: torch.distributed.init_process_group comes first, on one rank too")
    with Call(TITLE, "arrange", groups_of()) as call:
        sizes = Sizes(1, 1, 1)
        with call.guard():
            shared = ulysses_sequence_parallel_size
            sizes = sizes_of(dist.get_world_size(), fsdp_size, tp_size, shared)
        asked = {"device": device_type, "fsdp_size": str(fsdp_size), "tp_size": str(tp_size)}
        asked["ulysses_sequence_parallel_size"] = str(ulysses_sequence_parallel_size)
        made = meshes_of(dist.group.WORLD)
        is_made = (device_type, sizes) in made
        terms = Terms(condition=str(is_made), note=is_made, common=asked)
        tables = call.agree_on_wants(terms=terms).tables
    if not all(table.note for table in tables):
        made[device_type, sizes] = mesh_of(device_type, sizes)
    mesh, sequence = made[device_type, sizes]
    if sizes.tp == 1:
        return Grid(sizes, mesh, mesh, None, sequence)
    return Grid(sizes, mesh, mesh["fsdp"], mesh["tp"])
