"""transfer.reshard from any layout to any other, against the whole tensor cut with torch.chunk."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import local_of, value_of
from pool import on_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torch_dcp_backport import transfer
from torch_dcp_backport.compat import HAS_STRIDED, Replicate, Shard

try:
    from torch.distributed.tensor import DTensor, Partial
except ImportError:  # torch 2.4
    from torch.distributed._tensor import DTensor
    from torch.distributed._tensor.placement_types import Partial

SHAPES = {"matrix": (7, 5), "large": (64, 33), "row": (1, 9), "deep": (3, 5, 2, 4), "none": (0, 4)}
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float64)
KINDS: dict[str, tuple[Any, list[Any]]] = {
    "shard 0": ((4,), [Shard(0)]),
    "shard 1": ((4,), [Shard(1)]),
    "replicas": ((4,), [Replicate()]),
    "HSDP": ((2, 2), [Replicate(), Shard(0)]),
    "FSDP with TP": ((2, 2), [Shard(0), Shard(1)]),
    "TP of two": ((2, 2), [Shard(1), Replicate()]),
    "twice": ((2, 2), [Shard(0), Shard(0)]),
    "a part of the world": ([1, 3], [Shard(0)]),
    "backwards": ([3, 2, 1, 0], [Shard(0)]),
}
if not HAS_STRIDED:
    # torch 2.4 writes FSDP2 over TP in the same way, and does not mean the same.
    del KINDS["twice"]


def values() -> dict[str, torch.Tensor]:
    found = {
        key: value_of(key, shape, torch.float32).to(dtype)
        for (key, shape), dtype in zip(SHAPES.items(), DTYPES)
    }
    return found


def mesh_of(kind: str) -> tuple[DeviceMesh, list[Any]]:
    shape, placements = KINDS[kind]
    if isinstance(shape, tuple):
        return init_device_mesh("cpu", shape), placements
    return DeviceMesh("cpu", shape), placements


def cut(value: torch.Tensor, mesh: DeviceMesh, placements: list[Any]) -> DTensor:
    """The whole value as a DTensor. distribute_tensor goes by the group's order, not by the mesh's."""
    local, here = value, mesh.get_coordinate()
    for dim, placement in enumerate(placements if here is not None else ()):
        if isinstance(placement, Shard):
            parts = local.chunk(mesh.size(dim), placement.dim)
            empty = local.narrow(placement.dim, 0, 0)
            local = parts[here[dim]] if here[dim] < len(parts) else empty
    if here is None:
        local = value.new_empty(0)
    return DTensor.from_local(
        local.clone(), mesh, placements, run_check=False, shape=value.shape, stride=value.stride()
    )


def same(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Of DTensors: on a rank of the mesh."""
    assert got.placements == expected.placements
    assert got.shape == expected.shape
    assert got.stride() == expected.stride()
    assert got.dtype == expected.dtype
    if expected.device_mesh.get_coordinate() is None:
        return got.to_local().numel() == 0
    return torch.equal(got.to_local(), expected.to_local())


@pytest.mark.parametrize("kind", KINDS)
@on_ranks()
def test_every_layout_to_every_other(api: Any, kind: Any) -> None:
    first = kind
    full = values()
    old = mesh_of(first)
    source = {key: cut(value, *old) for key, value in full.items()}
    before = {key: local_of(value).clone() for key, value in source.items()}
    for kind in KINDS:
        new = mesh_of(kind)
        got = transfer.reshard(source, new, staging_bytes=5 * 256)
        assert list(got) == list(full)
        for key, value in full.items():
            assert same(got[key], cut(value, *new)), (kind, key)
            assert torch.equal(source[key].to_local(), before[key])
        report = transfer.last_report()
        assert report.operation == "reshard"
        assert report.staging_bytes <= 5 * 256


def received(api: Any, first: str, second: str) -> tuple[int, int]:
    whole = {key: value_of(str(key), (16, 16), torch.float32) for key in range(3)}
    source = {key: cut(value, *mesh_of(first)) for key, value in whole.items()}
    got = transfer.reshard(source, mesh_of(second))
    assert all(same(got[key], cut(value, *mesh_of(second))) for key, value in whole.items())
    report = transfer.last_report()
    return report.bytes_received, report.bytes_sent


@pytest.mark.parametrize(
    ("first", "second", "share"),
    [
        # Of the new shard's elements, those that a rank does not hold.
        ("shard 0", "shard 0", [0, 0, 0, 0]),
        ("shard 0", "shard 1", [3 / 16] * 4),
        ("replicas", "shard 1", [0, 0, 0, 0]),
        ("shard 0", "replicas", [3 / 4] * 4),
        ("HSDP", "shard 0", [0, 1 / 4, 1 / 4, 0]),
    ],
)
def test_only_what_a_rank_lacks_travels(ranks, first, second, share):
    results = ranks(received, first, second)
    assert [got for got, _ in results] == [int(part * 3 * 16 * 16 * 4) for part in share]
    assert sum(got for got, _ in results) == sum(sent for _, sent in results)


@on_ranks(world=8)
def test_eight_ranks_to_four_and_back(api: Any) -> None:
    full = {key: value_of(str(key), (24, 10), torch.float32) for key in range(5)}
    eight = init_device_mesh("cpu", (8,))
    four = DeviceMesh("cpu", [0, 1, 2, 3])
    source = {key: cut(value, eight, [Shard(0)]) for key, value in full.items()}
    there = transfer.reshard(source, (four, [Shard(1)]), staging_bytes=5 * 64)
    back = transfer.reshard(there, (eight, [Shard(0)]), staging_bytes=5 * 64)
    for key, value in full.items():
        assert same(there[key], cut(value, four, [Shard(1)]))
        assert same(back[key], source[key])


@on_ranks()
def test_a_rank_outside_the_group_is_told(api: Any) -> None:
    group = dist.new_group([0, 1])
    if dist.get_rank() > 1:
        with pytest.raises(ValueError, match="this rank is not in the process group"):
            transfer.reshard({}, {}, group=group)


@on_ranks()
def test_destinations_are_written_in_place(api: Any) -> None:
    mesh = init_device_mesh("cpu", (4,))
    full = {key: value_of(key, (12, 8), torch.float32) for key in ("a", "b", "plain", "stays")}
    source = {key: cut(value, mesh, [Shard(0)]) for key, value in full.items()}
    source["plain"] = full["plain"].clone()
    to: dict[str, Any] = {
        "a": cut(torch.zeros(12, 8, dtype=torch.bfloat16), mesh, [Shard(1)]),
        "b": torch.zeros(8, 12).t(),
        "plain": (mesh, [Shard(-1)]),
        "stays": source["stays"],
    }
    locals_of = {key: to[key].to_local().data_ptr() for key in ("a", "stays")}
    got = transfer.reshard(source, to)
    assert all(got[key] is to[key] for key in ("a", "b", "stays"))
    assert all(got[key].to_local().data_ptr() == address for key, address in locals_of.items())
    assert same(got["a"], cut(full["a"].bfloat16(), mesh, [Shard(1)]))
    assert torch.equal(got["b"], full["b"])
    assert same(got["plain"], cut(full["plain"], mesh, [Shard(1)]))
    assert same(got["stays"], cut(full["stays"], mesh, [Shard(0)]))
    # A parameter is a source and a destination like any tensor.
    param = torch.nn.Parameter(source["b"])
    assert transfer.reshard({"b": param}, param)["b"] is param


def in_inference_mode(_: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return torch.zeros(8, 8)


UNWRITABLE: dict[str, tuple[Any, str]] = {
    "inference": (in_inference_mode, "rank 1: .*made in inference mode: b"),
    "expand": (lambda _: torch.zeros(1).expand(8, 8), "rank 1: .*the same memory .*: b"),
    "view": (lambda source: source, "shares memory with what is read: b"),
}


class Unspeakable:
    """A key without a text."""

    def __repr__(self) -> str:
        raise ValueError("no name")


class Failing(dict):  # type: ignore[type-arg]
    """A mapping whose values come once."""

    def __init__(self, values: dict[str, Any], fails: bool) -> None:
        super().__init__(values)
        self.fails = fails

    def __getitem__(self, key: str) -> Any:
        if self.fails and key == "b":
            raise KeyError("gone")
        return super().__getitem__(key)


@pytest.mark.parametrize(
    "case",
    [
        "partial",
        "shape",
        "keys",
        "destination",
        "memory",
        "order",
        "group",
        "budget",
        "dim",
        "dtype",
        "meta",
        "placements",
        "mapping",
        "nested",
        *UNWRITABLE,
    ],
)
@on_ranks()
def test_what_cannot_be_is_one_error_on_every_rank(api: Any, case: str) -> None:
    mesh, rank = init_device_mesh("cpu", (4,)), dist.get_rank()
    full = {key: value_of(key, (8, 8), torch.float32) for key in ("a", "b")}
    source = {key: cut(value, mesh, [Shard(0)]) for key, value in full.items()}
    to: Any = (mesh, [Shard(1)])
    group = None
    error, words = RuntimeError, ""
    if case == "partial":
        source["b"] = DTensor.from_local(torch.ones(8, 8), mesh, [Partial()], run_check=False)
        words = "Partial.*: b"
    elif case == "shape":
        to = {"a": to, "b": cut(torch.zeros(8, 9), mesh, [Shard(0)])}
        words = r"wrong shape: b \(expected \(8, 8\), got \(8, 9\)\)"
    elif case == "keys":
        if rank == 2:
            del source["b"]
        words = r"rank 2: passed differently \(expected 2, got 1 tensors\)"
    elif case == "dtype":
        words = "rank 1: passed differently.*float64"
        if rank == 1:
            source["a"] = DTensor.from_local(torch.zeros(2, 8).double(), mesh, [Shard(0)], run_check=False)
    elif case == "destination":
        to = {"a": to} if rank == 3 else {"a": to, "b": to}
        words = "rank 3: KeyError: 'no destination for b'"
    elif case == "memory":
        flat = torch.zeros(8, 2)
        source["a"].to_local().copy_(full["a"].chunk(4)[rank])
        flat = source["a"].to_local().view(8, 2)
        to = {"a": DTensor.from_local(flat, mesh, [Shard(1)], run_check=False), "b": to}
        words = "shares memory with what is read: a"
    elif case == "order":
        # The same memory, and other rows: what is read would be written meanwhile.
        turned = DeviceMesh("cpu", [3, 2, 1, 0])
        local = source["a"].to_local()
        to = {"a": DTensor.from_local(local, turned, [Shard(0)], run_check=False), "b": to}
        words = "shares memory with what is read: a"
    elif case == "group":
        group = dist.new_group([0, 1])
        words = r"held by ranks outside the process group"
    elif case == "budget":
        error, words = ValueError, "staging_bytes=3"
    elif case == "dim":
        to = (mesh, [Shard(2)])
        words = r"Shard\(dim=2\) of a tensor of 2 dimensions"
    elif case in UNWRITABLE:
        make, words = UNWRITABLE[case]
        to = {"a": to, "b": make(source["b"]) if rank == 1 or case == "view" else torch.zeros(8, 8)}
        if case == "view":
            source["b"], to["b"] = full["b"], full["b"].t()
    elif case == "cast":
        # torch has no copy of it.
        source["b"] = cut(torch.zeros(8, 8, dtype=torch.uint8).view(torch.bits8), mesh, [Shard(0)])
        to = {"a": to, "b": torch.zeros(8, 8)}
        words = "not implemented.*: b"
    elif case == "key":
        source = {Unspeakable() if rank == 2 and key == "b" else key: value for key, value in source.items()}
        words = "rank 2: ValueError: no name"
    elif case == "placements":
        to = (init_device_mesh("cpu", (2, 2)), [Shard(0)])
        words = "1 placements on a mesh of 2 dimensions"
    elif case == "mapping":
        to = Failing({"a": to, "b": to}, rank == 2)
        words = "rank 2: KeyError: 'gone'"
    elif case == "nested":
        if rank == 1:
            source["b"] = {"c": source["b"]}  # type: ignore[assignment]
        words = "rank 1: TypeError: a dict, where a tensor is needed: b"
    elif case == "meta":
        source["b"] = DTensor.from_local(torch.ones(2, 8, device="meta"), mesh, [Shard(0)], run_check=False)
        words = r"on the meta device\): b"
    tensors = {key: value for key, value in source.items() if torch.is_tensor(value)}
    before = {key: local_of(value).clone() for key, value in tensors.items()}
    if case == "group" and rank > 1:
        return
    budget = 3 if case == "budget" and rank == 2 else None
    with pytest.raises(error, match=words) as caught:
        transfer.reshard(source, to, group=group, staging_bytes=budget)
    assert "nothing was changed" in str(caught.value)
    assert all(value.is_meta or torch.equal(local_of(value), before[key]) for key, value in tensors.items())


def kept(api: Any) -> int:
    """Bytes of tensors that one reshard leaves behind, above its result."""
    import gc

    mesh = init_device_mesh("cpu", (4,))
    whole = {key: value_of(str(key), (64, 64), torch.float32) for key in range(8)}
    source = {key: cut(value, mesh, [Shard(0)]) for key, value in whole.items()}
    got = transfer.reshard(source, (mesh, [Shard(1)]))
    gc.collect()
    for value in got.values():
        local = value.to_local()
        assert local.untyped_storage().nbytes() == local.nbytes
    live = [one for one in gc.get_objects() if type(one) is torch.Tensor and one.dtype == torch.uint8]
    return sum(one.untyped_storage().nbytes() for one in live)


def test_nothing_outlives_the_call(ranks):
    assert set(ranks(kept)) == {0}


@pytest.mark.parametrize("seed", range(6))
@on_ranks()
def test_random_layouts(api: Any, seed: int) -> None:
    """Random meshes, placements and sizes; the same on every rank."""
    import random

    draw = random.Random(seed)
    meshes = [((4,), 1), ((2, 2), 2)]
    for _ in range(12):
        shape = tuple(draw.randint(1, 9) for _ in range(draw.randint(1, 3)))
        ends = []
        for _ in range(2):
            mesh_shape, dims = draw.choice(meshes)
            mesh = init_device_mesh("cpu", mesh_shape)
            placements: list[Any] = []
            for _ in range(dims):
                twice = [] if HAS_STRIDED else placements
                choices = [Replicate(), *(Shard(dim) for dim in range(len(shape)) if Shard(dim) not in twice)]
                placements.append(draw.choice(choices))
            ends.append((mesh, placements))
        full = {key: value_of(str(key), shape, torch.float32) for key in range(draw.randint(1, 4))}
        source = {key: cut(value, *ends[0]) for key, value in full.items()}
        got = transfer.reshard(source, ends[1], staging_bytes=draw.choice([80, 640, 2**20]))
        assert all(same(got[key], cut(value, *ends[1])) for key, value in full.items())
