"""Disks that fail in the middle, write less than asked for, or are slow."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from torch_dcp_backport import dist_checkpointing as room
from torch_dcp_backport.dist_checkpointing import CheckpointingException, ShardedTensor
from torch_dcp_backport.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

NATIVE = {"pwrite": os.pwrite, "preadv": os.preadv, "fsync": os.fsync}


def state_of(value: float) -> dict[str, Any]:
    rank = dist.get_rank() if dist.is_initialized() else 0
    world = dist.get_world_size() if dist.is_initialized() else 1
    sizes = {"small": 5, "large": 70_000}
    return {
        key: ShardedTensor.from_rank_offsets(key, torch.full((size,), value + rank), (0, rank, world))
        for key, size in sizes.items()
    }


def failing(room: Any, folder: Path, call: str, code: int) -> str:
    """A save in which one rank's disk fails."""

    def fail(*_: Any) -> Any:
        raise OSError(code, os.strerror(code))

    try:
        if dist.get_rank() == 2:
            setattr(os, call, fail)
        with pytest.raises(CheckpointingException) as caught:
            room.save(state_of(2.0), folder)
    finally:
        setattr(os, call, NATIVE[call])
    return str(caught.value)


@pytest.mark.parametrize(
    ("call", "code"),
    [("pwrite", errno.EIO), ("fsync", errno.EIO), ("pwrite", errno.EROFS), ("pwrite", errno.EDQUOT)],
)
def test_a_disk_that_fails_is_told_on_every_rank(ranks: Any, tmp_path: Path, call: str, code: int) -> None:
    ranks(saved, tmp_path)
    (text,) = set(ranks(failing, tmp_path, call, code))
    assert "rank 2: " in text
    assert os.strerror(code) in text
    # The older checkpoint is gone, and no part of the new one is left.
    assert not room.check_is_distributed_checkpoint(tmp_path)
    assert list(tmp_path.glob("*.distcp")) == []
    ranks(saved, tmp_path)
    assert room.verify(tmp_path) == []


def saved(room: Any, folder: Path) -> None:
    room.save(state_of(1.0), folder)


def test_calls_that_do_less_than_they_were_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: NATIVE["pwrite"](fd, data[: 1 + at % 997], at))
    monkeypatch.setattr(
        os, "preadv", lambda fd, targets, at: NATIVE["preadv"](fd, [targets[0][: 1 + at % 991]], at)
    )
    room.save(state_of(3.0), tmp_path)
    loaded = room.load(state_of(0.0), tmp_path)
    assert all(bool((value == 3.0).all()) for value in loaded.values())
    monkeypatch.undo()
    assert room.verify(tmp_path) == []


NOBODY = 65534
IS_ROOT = os.geteuid() == 0


@pytest.fixture
def reachable() -> Iterator[Path]:
    """A folder that every user can reach."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        for parent in folder.parents:
            if IS_ROOT and not parent.stat().st_mode & stat.S_IXOTH:
                pytest.skip(f"other users do not get through {parent}")
        yield folder
        for path in (folder, *folder.iterdir()):
            path.chmod(0o755)


def denied(room: Any, folder: Path, call: str, who: list[int]) -> str:
    """The error of a call in which some ranks have no more rights than a user has."""
    state = state_of(2.0)
    before = {key: part.data.clone() for key, part in state.items()}
    is_less = IS_ROOT and dist.get_rank() in who
    if is_less:
        os.seteuid(NOBODY)
    try:
        with pytest.raises(CheckpointingException) as caught:
            getattr(room, call)(state, folder)
    finally:
        if is_less:
            os.seteuid(0)
    assert all(torch.equal(part.data, before[key]) for key, part in state.items())
    return str(caught.value)


@pytest.mark.parametrize("who", [[0, 1, 2, 3], [2]])
def test_a_folder_that_may_not_be_written(ranks: Any, reachable: Path, who: list[int]) -> None:
    if not IS_ROOT and len(who) < 4:
        pytest.skip("only root has more rights than another rank")
    ranks(saved, reachable)
    reachable.chmod(0o555)
    (text,) = set(ranks(denied, reachable, "save", who))
    assert f"[Errno 13] Permission denied: '{reachable}'" in text
    assert ("rank 2" in text) == (who == [2])
    assert "nothing was changed" in text
    # The older checkpoint is what it was.
    assert room.verify(reachable) == []


@pytest.mark.parametrize(
    ("name", "who"), [("__1_0.distcp", [0, 1, 2, 3]), ("__1_0.distcp", [1]), (".metadata", [0, 1, 2, 3])]
)
def test_a_file_that_may_not_be_read(ranks: Any, reachable: Path, name: str, who: list[int]) -> None:
    if not IS_ROOT and len(who) < 4:
        pytest.skip("only root has more rights than another rank")
    ranks(saved, reachable)
    (reachable / name).chmod(0)
    (text,) = set(ranks(denied, reachable, "load", who))
    assert f"[Errno 13] Permission denied: '{reachable / name}'" in text
    assert "nothing was changed" in text


def test_a_slow_disk_is_not_waited_for_in_the_background(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()

    def slow(fd: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            assert goes_on.wait(30)
        NATIVE["fsync"](fd)

    monkeypatch.setattr(os, "fsync", slow)
    queue = AsyncCallsQueue()
    state = state_of(4.0)
    began = time.monotonic()
    queue.schedule_async_request(room.save(state, tmp_path, async_sharded_save=True))
    for part in state.values():
        part.data.zero_()
    assert queue.maybe_finalize_async_calls() == []
    assert time.monotonic() - began < 20
    assert not room.check_is_distributed_checkpoint(tmp_path)
    goes_on.set()
    queue.close()
    loaded = room.load(state_of(0.0), tmp_path)
    assert all(bool((value == 4.0).all()) for value in loaded.values())
