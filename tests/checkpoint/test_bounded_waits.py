"""A writer that stands still, a store that hangs: the wait ends with an error, and the training goes on."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import patience
import pytest
import torch
import torch.distributed as dist
from fsspec.implementations.memory import MemoryFileSystem
from pool import on_ranks
from trainer import Trainer, same

from torch_dcp_backport.checkpoint import FSDPCheckpointManager
from torch_dcp_backport.checkpoint._src import store
from torch_dcp_backport.dist_checkpointing import CheckpointingException, ShardedTensor, load, save
from torch_dcp_backport.dist_checkpointing._src import saver, staged
from torch_dcp_backport.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from torch_dcp_backport.publish import disk

#: Seconds. Long enough for a save on a busy machine, where a save is to end.
SHORT = 3.0


@contextlib.contextmanager
def stopped_process() -> Iterator[list[int]]:
    """Have the processes that write saves stand still from their first moment; their ids."""
    native, pids = saver._Process.order, list[int]()

    def order(self: Any, *args: Any) -> None:
        os.kill(self._pid, signal.SIGSTOP)
        pids.append(self._pid)
        native(self, *args)

    saver._Process.order = order  # type: ignore[method-assign]
    # A save as small as this is a thread's.
    kept, staged.KEPT_BYTES = staged.KEPT_BYTES, 1
    try:
        yield pids
    finally:
        staged.KEPT_BYTES = kept
        saver._Process.order = native  # type: ignore[method-assign]


@contextlib.contextmanager
def hanging_disk() -> Iterator[threading.Event]:
    """Have threads hang before they make a file of records, until the event is set."""
    freed = threading.Event()

    def hang(name: str) -> None:
        if name.startswith("create __") and threading.current_thread() is not threading.main_thread():
            freed.wait()

    disk.on_step = hang
    try:
        yield freed
    finally:
        disk.on_step = None
        freed.set()


HANGS = {"process": stopped_process, "disk": hanging_disk}


def hangs(api: Any, root: Path, how: str, by: str) -> str:
    rank, last = (dist.get_rank(), dist.get_world_size() - 1) if dist.is_initialized() else (0, 0)
    # Larger than what one rank writes for all.
    model = torch.nn.Sequential(torch.nn.Linear(600, 500), torch.nn.Linear(500, 4))
    trainer = Trainer(root, model, config={"async_save": True}, save_timeout=SHORT)
    trainer.train(1)
    trainer.handler.save_checkpoint(1)
    trainer.handler.finish()
    with HANGS[how]() if rank == last else contextlib.nullcontext():
        trainer.train(2)
        trainer.handler.save_checkpoint(2)
        calls = {
            "finish": trainer.handler.finish,
            "a load": trainer.handler.load_checkpoint,
            "the next save": lambda: trainer.handler.save_checkpoint(3),
        }
        with pytest.raises(CheckpointingException) as caught:
            calls[by]()
        if dist.is_initialized():
            dist.barrier()
        assert [step.step for step in store.steps_in(root) if not step.fault] == [1]
    # The next save works, whatever became of the last one.
    trainer.train(3)
    trainer.handler.save_checkpoint(4)
    assert trainer.handler.finish()
    expected = trainer.state()
    if dist.is_initialized():
        dist.barrier()
    fresh = Trainer(root, copy.deepcopy(model))
    assert fresh.handler.load_checkpoint() == 4
    assert same(fresh.state(), expected)
    return str(caught.value)


@pytest.mark.parametrize("by", ["finish", "the next save", "a load"])
@pytest.mark.parametrize("how", HANGS)
@pytest.mark.parametrize("world", [0, 2])
def test_a_wait_for_a_writer_that_stands_still_is_bounded(
    ranks: Any, tmp_path: Path, how: str, by: str, world: int
) -> None:
    (text,) = set(ranks(hangs, tmp_path, how, by, world=world))
    assert f"not written within {SHORT:g} s" in text
    assert "rank 1: " in text or not world
    assert f"__{max(world - 1, 0)}_0.distcp by {'process' if how == 'process' else 'a thread'}" in text
    assert ("which was killed" in text) == (how == "process")
    assert "step 2 was not saved; the newest complete step is 1" in text
    assert "what is left is" in text
    assert ".global_step_2.tmp-" in text


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def held_below(folder: Path) -> list[str]:
    return [path for path, _ in list(disk._own.values()) if path.startswith(str(folder))]


@on_ranks(world=0)
def test_an_abandoned_process_is_ended_and_its_draft_goes(api: Any, tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, config={"async_save": True}, save_timeout=SHORT)
    with stopped_process() as pids:
        trainer.handler.save_checkpoint(1)
        with pytest.raises(CheckpointingException, match="not written within"):
            trainer.handler.finish()
    assert pids
    # The thread takes its status once it has heard of its end; the draft may go after that.
    until = time.monotonic() + 10 * patience.factor()
    while any(map(is_there, pids)) or list(tmp_path.iterdir()) or held_below(tmp_path):
        assert time.monotonic() < until
        time.sleep(0.05)


@on_ranks(world=0)
def test_the_wait_of_a_manager_alone_is_bounded(api: Any, tmp_path: Path) -> None:
    trainer = Trainer(tmp_path / "unused")
    manager = FSDPCheckpointManager(
        trainer.model, trainer.optimizer, checkpoint_config={"async_save": True}, save_timeout=SHORT
    )
    manager.save_checkpoint(tmp_path / "global_step_1", global_step=1)
    manager.finish()
    with hanging_disk():
        manager.save_checkpoint(tmp_path / "global_step_2", global_step=2)
        with pytest.raises(CheckpointingException, match=r"not written within .*__0_0.distcp by a thread"):
            manager.save_checkpoint(tmp_path / "global_step_3", global_step=3)
    manager.save_checkpoint(tmp_path / "global_step_3", global_step=3)
    manager.finish()
    assert sorted(path.name for path in tmp_path.glob("global_step_*")) == ["global_step_1", "global_step_3"]


def part(value: float) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets("w", torch.full((4,), value))


@on_ranks(world=0)
def test_the_folder_of_an_abandoned_request_is_its_own_until_its_thread_ends(
    api: Any, tmp_path: Path
) -> None:
    """The thread may yet make its file: a save in its place would lose its own."""
    queue = AsyncCallsQueue(timeout=0.5)
    with hanging_disk() as freed:
        queue.schedule_async_request(save({"w": part(1.0)}, tmp_path, async_sharded_save=True))
        with pytest.raises(CheckpointingException, match="not written within"):
            queue.close()
        with pytest.raises(CheckpointingException, match=r"another save to .* is under way"):
            save({"w": part(2.0)}, tmp_path)
        freed.set()
        for thread in threading.enumerate():
            if thread.name.startswith(("save in the background", "removal of an abandoned")):
                thread.join()
    gc.collect()
    save({"w": part(3.0)}, tmp_path)
    wanted = part(0.0)
    load({"w": wanted}, tmp_path)
    assert wanted.data is not None
    assert wanted.data.tolist() == [3.0] * 4


PROGRAM = """
import sys, threading
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from trainer import Trainer
from torch_dcp_backport.dist_checkpointing import CheckpointingException
from torch_dcp_backport.publish import disk
def hang(name):
    if name.startswith("create __"):
        threading.Event().wait()
trainer = Trainer(Path(sys.argv[2]), config={"async_save": True}, save_timeout=0.5)
disk.on_step = hang
trainer.handler.save_checkpoint(1)
try:
    trainer.handler.finish()
except CheckpointingException as error:
    print("told:", error)
"""


def test_a_process_ends_beside_a_writer_that_it_has_abandoned(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(Path(__file__).parent), str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert "told: " in done.stdout
    assert "not written within 0.5 s" in done.stdout
    assert "never published" not in done.stderr


class Hanging(MemoryFileSystem):
    """A store whose writes hang until it is freed."""

    protocol = "hanging"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    freed = threading.Event()

    def put_file(self, lpath: str, rpath: str, **options: Any) -> None:
        Hanging.freed.wait()
        super().put_file(lpath, rpath, **options)


@pytest.fixture
def hanging() -> Iterator[str]:
    fsspec.register_implementation("hanging", Hanging, clobber=True)
    Hanging.freed.clear()
    yield "hanging://runs/a"
    Hanging.freed.set()


@pytest.mark.parametrize("on_upload", ["raise", "warn"])
def test_a_wait_for_an_upload_is_bounded(tmp_path: Path, hanging: str, on_upload: str, caplog) -> None:
    trainer = Trainer(tmp_path, default_hdfs_dir=hanging, on_upload=on_upload, save_timeout=0.3)
    trainer.handler.save_checkpoint(1)
    trainer.handler.save_checkpoint(2)
    text = f"an upload is not done within 0.3 s: {tmp_path / 'global_step_1'} to {hanging}/global_step_1"
    if on_upload == "raise":
        with pytest.raises(CheckpointingException) as caught:
            trainer.handler.finish()
        assert text in str(caught.value)
        assert "1 more that waited for it were not begun" in str(caught.value)
    else:
        assert trainer.handler.finish()
        assert text in caplog.text
    # What may yet be read is not removed, and later steps are uploaded.
    assert store.is_uploading(tmp_path / "global_step_1")
    Hanging.freed.set()
    trainer.handler.save_checkpoint(3)
    while not trainer.handler.finish(blocking=False):
        pass
    assert store.uploaded_to(tmp_path / "global_step_3") == f"{hanging}/global_step_3"


def test_a_wait_for_a_removal_is_bounded(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, max_ckpt_to_keep=1, save_timeout=0.3)
    freed = threading.Event()

    def hang(name: str) -> None:
        if threading.current_thread() is not threading.main_thread():
            freed.wait()

    trainer.handler.save_checkpoint(1)
    disk.on_step = hang
    try:
        trainer.handler.save_checkpoint(2)
        with pytest.raises(CheckpointingException, match=r"not removed within 0.3 s: .*global_step_1"):
            trainer.handler.finish()
    finally:
        disk.on_step = None
        freed.set()
    assert trainer.handler.load_checkpoint() == 2


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), "5", True])
def test_a_bound_is_a_number_of_seconds(tmp_path: Path, value: Any) -> None:
    with pytest.raises(ValueError, match="expected seconds above 0, or None"):
        Trainer(tmp_path, save_timeout=value)
    with pytest.raises(ValueError, match="timeout="):
        AsyncCallsQueue(timeout=value)
