"""Who opens which file in a load: each file once, and no more files than have something of this rank."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from file_calls import counted

from torch_dcp_backport import dist_checkpointing as room
from torch_dcp_backport.dist_checkpointing import CheckpointingException, ShardedObject, ShardedTensor
from torch_dcp_backport.dist_checkpointing._src import files
from torch_dcp_backport.dist_checkpointing.storage import CheckedReader


def with_counters(value: float) -> dict[str, Any]:
    """As AdamW has them: what is cut between all ranks, and a number of each that all ranks hold."""
    rank, world = dist.get_rank(), dist.get_world_size()
    state: dict[str, Any] = {}
    for number in range(40):
        cut, counter = torch.full((50, 7), value + rank), torch.tensor(value + number)
        state[f"cut{number}"] = ShardedTensor.from_rank_offsets(f"cut{number}", cut, (0, rank, world))
        state[f"step{number}"] = ShardedTensor.from_rank_offsets(f"step{number}", counter, replica_id=rank)
    state["own"] = ShardedObject("own", rank, (world,), (rank,))
    return state


def data_files(calls: Any) -> dict[str, tuple[int, int]]:
    """Data file -> how often it was opened, and looked at by its name."""
    names = [name for name in {*calls.opens, *calls.stats} if name.endswith(".distcp")]
    return {name: (calls.opens[name], calls.stats[name]) for name in names}


def files_of_a_load(room: Any, folder: Path) -> tuple[dict[str, tuple[int, int]], bool]:
    room.save(with_counters(3.0), folder)
    with counted(folder) as calls:
        loaded = room.load(with_counters(0.0), folder)
    wanted = {key: part.data for key, part in with_counters(3.0).items()}
    assert loaded.pop("own") == wanted.pop("own")
    return data_files(calls), all(torch.equal(loaded[key], value) for key, value in wanted.items())


@pytest.mark.parametrize("world", [2, 4])
def test_a_load_on_the_same_ranks_opens_its_own_file_and_one_more(ranks: Any, tmp_path: Path, world) -> None:
    """Each once: the file that is looked at before the ranks agree is the open file that is read after it."""
    outcomes = ranks(files_of_a_load, tmp_path, world=world)
    assert [is_right for _, is_right in outcomes] == [True] * world
    own = [f"__{rank}_0.distcp" for rank in range(world)]
    assert [found for found, _ in outcomes] == [dict.fromkeys((own[0], name), (1, 0)) for name in own]


def saved(room: Any, folder: Path) -> None:
    room.save(with_counters(3.0), folder)


def whole(key: str = "cut0") -> dict[str, Any]:
    return {key: ShardedTensor.from_rank_offsets(key, torch.zeros(200, 7))}


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize(("most", "opens"), [(1024, 4), (4, 4), (3, 5), (0, 8)])
def test_a_load_keeps_no_more_files_open_than_it_may(
    ranks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, opens: int
) -> None:
    ranks(saved, tmp_path, world=4)
    monkeypatch.setattr(files, "MOST_OPEN", most)
    before = open_files()
    with counted(tmp_path) as calls:
        loaded = room.load(whole(), tmp_path)
    assert torch.equal(loaded["cut0"], torch.arange(3.0, 7.0).repeat_interleave(50)[:, None].expand(200, 7))
    assert sum(count for count, _ in data_files(calls).values()) == opens
    assert open_files() == before


@pytest.mark.parametrize("fault", ["absent", "short", "damaged", "a key", "a folder"])
def test_a_load_that_fails_leaves_no_file_open(ranks: Any, tmp_path: Path, fault: str) -> None:
    ranks(saved, tmp_path, world=4)
    last = tmp_path / "__3_0.distcp"
    if fault == "short":
        os.truncate(last, 100)
    elif fault == "damaged":
        last.write_bytes(bytes(last.stat().st_size))
    elif fault != "a key":
        last.unlink()
    if fault == "a folder":
        last.mkdir()
    before = open_files()
    with pytest.raises(CheckpointingException) as caught:
        room.load(whole("none" if fault == "a key" else "cut0"), tmp_path, strict="raise_unexpected")
    assert fault == "a key" or last.name in str(caught.value)
    assert open_files() == before


def test_what_replaces_a_file_between_the_look_and_the_read_is_not_read(
    ranks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The load has the files that it looked at: it is of one save, as the ranks agreed."""
    ranks(saved, tmp_path, world=4)
    native = room._src.loading.Loading.read

    def read(loading: Any) -> Any:
        for path in tmp_path.glob("*.distcp"):
            shutil.copy(path, path.with_suffix(".new"))
            os.truncate(path.with_suffix(".new"), 1)
            path.with_suffix(".new").rename(path)
        return native(loading)

    monkeypatch.setattr(room._src.loading.Loading, "read", read)
    assert torch.equal(room.load(whole(), tmp_path)["cut0"][-1], torch.full((7,), 6.0))


@pytest.mark.parametrize("is_checked", [False, True])
def test_a_verification_and_dcp_open_each_file_once(ranks: Any, tmp_path: Path, is_checked: bool) -> None:
    ranks(saved, tmp_path, world=4)
    names = [f"__{rank}_0.distcp" for rank in range(4)]
    with counted(tmp_path) as calls:
        if is_checked:
            assert room.verify(tmp_path) == []
        else:
            state: dict[str, Any] = {"cut0": torch.zeros(200, 7), "step1": torch.zeros(())}
            state.update({f"own/shard_{rank}_4": None for rank in range(4)})
            dcp.load(state, storage_reader=CheckedReader(tmp_path))
            assert [state[f"own/shard_{rank}_4"] for rank in range(4)] == [[0], [1], [2], [3]]
    assert data_files(calls) == dict.fromkeys(names, (1, 0))
