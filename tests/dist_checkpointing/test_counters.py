"""What a load reads and holds, and what a save holds: bounded, whatever the spreads are."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from torch_dcp_backport import dist_checkpointing as room
from torch_dcp_backport.dist_checkpointing import ShardedTensor
from torch_dcp_backport.regression import meter
from torch_dcp_backport.transfer._src import object_collectives

MIB = 2**20
#: A tensor of 64 MiB: a column's share of a row has 64 KiB on four ranks.
SHAPE = (256, 65536)


def shard(dim: int, strided: bool = False) -> ShardedTensor:
    rank, world = dist.get_rank(), dist.get_world_size()
    size = list(SHAPE)
    size[dim] //= world
    data = torch.ones(size[::-1]).t() if strided else torch.ones(size)
    return ShardedTensor.from_rank_offsets("w", data, (dim, rank, world))


def peak_of(call: Any) -> float:
    """Peak bytes above what was there before; 0 where this system does not tell."""
    if not meter.forget_peak():
        return 0.0
    before = meter.resident()
    call()
    return float(meter.peak_resident() - before)


def saved(room: Any, folder: str, dim: int, strided: bool) -> float:
    part = shard(dim, strided)
    return peak_of(lambda: room.save({"w": part}, folder))


def loaded(room: Any, folder: str, dim: int) -> tuple[float, float]:
    """(bytes read / bytes of the own shard, peak bytes above the state)."""
    part = shard(dim)
    part.data.zero_()
    room.load({"w": part}, folder)
    part.data.zero_()
    peak = peak_of(lambda: room.load({"w": part}, folder))
    assert bool((part.data == 1).all())
    return room.storage_report().nbytes / part.data.nbytes, peak


@pytest.mark.parametrize("strided", [False, True])
def test_the_memory_of_a_save(ranks: Any, tmp_path: Path, strided: bool) -> None:
    ranks(saved, str(tmp_path), 0, strided)
    assert max(ranks(saved, str(tmp_path), 0, strided)) <= 16 * MIB


@pytest.mark.parametrize(
    ("dim", "world", "most"),
    [(0, 4, 1.02), (0, 8, 1.02), (0, 2, 1.02), (1, 4, 1.1), (0, 1, 1.02)],
)
def test_a_load_reads_what_it_needs(ranks: Any, tmp_path: Path, dim: int, world: int, most: float) -> None:
    ranks(saved, str(tmp_path), 0, False)
    for ratio, peak in ranks(loaded, str(tmp_path), dim, world=world):
        assert ratio <= most
        assert peak <= 16 * MIB


@pytest.mark.parametrize("writer", ["ours", "torch's"])
def test_small_records_are_read_many_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: str
) -> None:
    """Of files of ours and of torch's alike, and no byte more than once."""
    count, calls, native = 400, [0], os.preadv
    tensors = {f"w{number}": torch.full((40,), float(number)) for number in range(count)}
    state = {key: ShardedTensor.from_rank_offsets(key, value) for key, value in tensors.items()}
    if writer == "ours":
        room.save(state, tmp_path)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(tensors, storage_writer=dcp.FileSystemWriter(tmp_path, single_file_per_rank=True))
    for value in tensors.values():
        value.zero_()

    def counted(*arguments: Any) -> int:
        calls[0] += 1
        return native(*arguments)

    monkeypatch.setattr(os, "preadv", counted)
    room.load(state, tmp_path)
    monkeypatch.undo()
    assert [float(value[7]) for value in tensors.values()] == [float(number) for number in range(count)]
    nbytes = sum(path.stat().st_size for path in tmp_path.glob("*.distcp"))
    assert room.storage_report().nbytes <= nbytes
    assert calls[0] <= 2 + nbytes // 2**20


def replicated(room: Any, folder: str) -> int:
    """Halves of an embedding and of many layers, each on two of four ranks: what this rank wrote."""
    rank = dist.get_rank()
    sizes = {"embedding": 1_500_000, **{f"layer.{number}": 80_000 + 37 * number for number in range(12)}}
    state = {
        key: ShardedTensor.from_rank_offsets(key, torch.ones(size), (0, rank % 2, 2), replica_id=rank // 2)
        for key, size in sizes.items()
    }
    room.save(state, folder)
    return int(room.storage_report().nbytes)


def test_replicas_are_written_once_by_all_alike(ranks: Any, tmp_path: Path) -> None:
    written = ranks(replicated, str(tmp_path))
    assert max(written) <= 1.05 * sum(written) / 4
    values = 4 * 2 * (1_500_000 + sum(80_000 + 37 * number for number in range(12)))
    assert values <= sum(written) <= 1.02 * values


def rounds(room: Any, folders: list[str], count: int) -> list[int]:
    """How often the ranks meet: in a save, in one where a rank has an entry more, and in a load of that."""
    native, met = object_collectives.Round.gather, 0

    def counted(*args: Any) -> Any:
        nonlocal met
        met += 1
        return native(*args)

    rank, world, found = dist.get_rank(), dist.get_world_size(), []
    state = {
        f"w{number}": ShardedTensor.from_rank_offsets(f"w{number}", torch.ones(2), (0, rank, world))
        for number in range(count)
    }
    more = {"one": ShardedTensor.from_rank_offsets("one", torch.ones(3))} if rank == 1 else {}
    object_collectives.Round.gather = counted
    try:
        for call, parts, folder in (
            (room.save, state, folders[0]),
            (room.save, {**state, **more}, folders[1]),
            (room.load, {**state, **more}, folders[1]),
        ):
            met = 0
            call(parts, folder)
            found.append(met)
    finally:
        object_collectives.Round.gather = native
    return found


def test_the_ranks_meet_as_often_whatever_there_is(ranks: Any, tmp_path: Path) -> None:
    """Comparing plans, planning, removing the old marker, committing; opening, planning, settling."""
    for count in (1, 500):
        folders = [str(tmp_path / f"{count}-{name}") for name in ("alike", "more")]
        for folder in folders:
            os.mkdir(folder)
        assert ranks(rounds, folders, count) == [[4, 4, 3]] * 4
