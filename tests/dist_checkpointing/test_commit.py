"""A save that is killed at any step: the folder is a whole checkpoint, or none; the other ranks are told."""

from __future__ import annotations

import contextlib
import os
import signal
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool, RankError

from torch_dcp_backport import dist_checkpointing as room
from torch_dcp_backport.dist_checkpointing import CheckpointingException, ShardedObject, ShardedTensor, core
from torch_dcp_backport.publish import disk


def state_of(value: float, rank: int, world: int) -> dict[str, Any]:
    data = torch.full((2, 3), value) + rank
    large = torch.full((30000,), value) + rank
    return {
        "a": ShardedTensor.from_rank_offsets("a", data, (0, rank, world)),
        "b": ShardedTensor.from_rank_offsets("b", large, (0, rank, world)),
        "step": value,
    }


def save_killed(folder: Path, limit: int, is_hashed: bool) -> None:
    """Save in a process that is killed before a step."""
    count = 0

    def step(name: str) -> None:
        nonlocal count
        if count == limit:
            os.kill(os.getpid(), signal.SIGKILL)
        count += 1

    child = os.fork()
    if not child:
        try:
            disk.on_step = step
            room.save(state_of(2.0, 0, 1), folder, verify_integrity=is_hashed)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGKILL


@pytest.mark.parametrize(("is_overwrite", "is_hashed"), [(False, False), (True, False), (True, True)])
def test_at_every_step_the_folder_is_a_whole_checkpoint_or_none(
    tmp_path: Path, is_overwrite: bool, is_hashed: bool
) -> None:
    steps: list[str] = []
    disk.on_step = steps.append
    try:
        room.save(state_of(2.0, 0, 1), tmp_path, verify_integrity=is_hashed)
    finally:
        disk.on_step = None
    total = len(steps)
    assert total > 12
    outcomes = []
    for limit in range(total):
        folder = tmp_path / str(limit)
        folder.mkdir()
        if is_overwrite:
            room.save(state_of(1.0, 0, 1), folder, verify_integrity=is_hashed)
        save_killed(folder, limit, is_hashed)
        target = state_of(0.0, 0, 1)
        try:
            result = room.load(target, folder)
        except CheckpointingException:
            outcomes.append(None)
            assert torch.equal(target["a"].data, torch.zeros(2, 3))
        else:
            step = result["step"]
            outcomes.append(step)
            assert not is_hashed or room.verify(folder) == []
            assert torch.equal(result["a"], torch.full((2, 3), step))
            assert torch.equal(result["b"], torch.full((30000,), step))
    # The older one until its marker goes, then none, then the new one.
    order = [step for number, step in enumerate(outcomes) if not number or outcomes[number - 1] != step]
    assert order == ([1.0, None, 2.0] if is_overwrite else [None, 2.0])


def step_names(room: Any, folder: str) -> list[str]:
    names: list[str] = []
    disk.on_step = names.append
    try:
        room.save(state_of(1.0, dist.get_rank(), dist.get_world_size()), folder)
    finally:
        disk.on_step = None
    return names


def killed(room: Any, folder: str, victim: int, limit: int) -> str:
    """Save; one rank is killed before a step. The error of the others."""
    rank, count = dist.get_rank(), 0

    def step(name: str) -> None:
        nonlocal count
        if count == limit:
            os.kill(os.getpid(), signal.SIGKILL)
        count += 1

    disk.on_step = step if rank == victim else None
    try:
        room.save(state_of(2.0, rank, dist.get_world_size()), folder)
    except room.CheckpointingException as error:
        raise AssertionError(f"TOLD {error}") from None
    return "saved"


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_is_told_of_by_the_others(tmp_path: Path, victim: int) -> None:
    world = 3
    pool = Pool(world, "torch_dcp_backport.dist_checkpointing", timeout=15.0, limit=60.0)
    names = pool.run(step_names, str(tmp_path))[victim]
    # In the middle of its file, and at its last step.
    limits = [names.index("write record"), len(names) - 1]
    for limit in limits:
        if not pool.usable:
            pool = Pool(world, "torch_dcp_backport.dist_checkpointing", timeout=15.0, limit=60.0)
        with pytest.raises(RankError) as caught:
            pool.run(killed, str(tmp_path), victim, limit)
        text = str(caught.value)
        assert f"the process of rank {victim} died" in text
        errors = [line for line in text.splitlines() if "AssertionError: TOLD" in line]
        assert len(errors) == world - 1, text
        assert len(set(errors)) == 1, text
        assert f"rank {victim} is gone" in text or f"rank {victim}: the rank is gone" in text, text
    pool.close()


@pytest.mark.parametrize("name", ["__0_0.distcp", "common.pt.new", ".metadata.new", "metadata.json.new"])
def test_no_write_goes_where_a_link_leads(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    other, folder = tmp_path / "other", tmp_path / "checkpoint"
    other.write_text("not to be written")
    folder.mkdir()

    def plant(step: str) -> None:
        # After the old files are gone, and before the new ones are there.
        if step == "create __0_0.distcp":
            (folder / name).symlink_to(other)

    monkeypatch.setattr(disk, "on_step", plant)
    with contextlib.suppress(CheckpointingException):
        room.save(state_of(1.0, 0, 1), folder)
    assert other.read_text() == "not to be written"


def test_the_marker_alone_does_not_follow_a_link_either(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("not to be written")
    (tmp_path / "metadata.json").symlink_to(other)
    core.save_config(room.CheckpointingConfig("torch_dist"), tmp_path)
    assert other.read_text() == "not to be written"
    assert room.check_is_distributed_checkpoint(tmp_path)


def test_checksums_of_an_earlier_checkpoint_are_removed(tmp_path: Path) -> None:
    (tmp_path / "integrity.json").write_text("{}")
    room.save(state_of(1.0, 0, 1), tmp_path)
    assert not (tmp_path / "integrity.json").exists()


def test_a_part_of_a_tensor_is_saved_without_the_rest(tmp_path: Path) -> None:
    large = torch.arange(100000.0)
    state = {"row": large[3:5], "more": [(large[:1], 1), OrderedDict(last=large[-1:])]}
    room.save({**state, "o": ShardedObject("o", {"x": large[7:8]}, (1,), (0,))}, tmp_path)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 20000
    loaded = room.load({"o": ShardedObject("o", None, (1,), (0,))}, tmp_path)
    assert loaded["row"].tolist() == [3.0, 4.0]
    assert (loaded["more"][0][0].item(), loaded["more"][1]["last"].item()) == (0.0, 99999.0)
    assert loaded["o"]["x"].item() == 7.0
    assert state["row"].data_ptr() == large[3:].data_ptr()


def test_all_is_on_the_disk_before_the_marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill does not show it, a power cut does: files, their names, and the marker last."""
    done: list[str] = []
    sync, replace = os.fsync, os.replace

    def synced(file: int) -> None:
        done.append(os.path.basename(os.readlink(f"/proc/self/fd/{file}")))
        sync(file)

    def renamed(source: Any, target: Any) -> None:
        done.append(f"-> {os.path.basename(target)}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    room.save(state_of(1.0, 0, 1), folder, verify_integrity=True)
    marker = done.index(f"-> {core.CONFIG_FNAME}")
    before, small = done[:marker], ("common.pt", ".metadata", "integrity.json")
    assert "__0_0.distcp" in before
    for name in small:
        assert before.index(f"{name}.new") < before.index(f"-> {name}")
    assert f"{core.CONFIG_FNAME}.new" in before
    # The names of all of them, and then the marker's own.
    assert "checkpoint" in before[before.index("-> integrity.json") :]
    assert "checkpoint" in done[marker:]
