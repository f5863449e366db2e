"""Steps that are written while training goes on: the state of the call, published later, or told."""

from __future__ import annotations

import contextlib
import logging
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from pool import on_ranks
from trainer import Trainer, same

from torch_dcp_backport.checkpoint._src import saves, store
from torch_dcp_backport.dist_checkpointing import CheckpointingException
from torch_dcp_backport.dist_checkpointing._src import saver, staged

ASYNC = {"async_save": True}


@contextlib.contextmanager
def slow(fails: bool = False) -> Iterator[threading.Event]:
    """Files are written once the event is set, or not at all."""
    native, opened = saver.write, threading.Event()

    def write(*args: Any) -> Any:
        assert threading.current_thread() is not threading.main_thread()
        assert opened.wait(30)
        if fails:
            raise OSError(28, "No space left on device")
        return native(*args)

    saver.write = write  # type: ignore[assignment]
    try:
        yield opened
    finally:
        opened.set()
        saver.write = native


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def names(root: Path) -> set[str]:
    return {path.name for path in root.iterdir() if path.is_dir()}


def goes_on(api: Any, root: Path) -> None:
    trainer = Trainer(root, config=ASYNC, max_ckpt_to_keep=1)
    expected = {}
    for step in (1, 2, 3):
        trainer.train(10 * step + rank(), step)
        with slow() as opened:
            published = names(root)
            if dist.is_initialized():
                dist.barrier()
            # The state of now: what is drawn below is drawn by the resumed training, too.
            if step == 1:
                folder = trainer.handler.save_checkpoint(step)
                expected[step] = trainer.state()
                trainer.train(99, 7)
                assert not folder.exists()
                assert not trainer.handler.finish(blocking=False)
                assert not folder.exists()
                opened.set()
            else:
                opened.set()
                trainer.handler.save_checkpoint(step)
                expected[step] = trainer.state()
                assert store.name_of(step - 1) in names(root), published
    assert trainer.handler.finish()
    assert trainer.handler.finish(blocking=False)
    if dist.is_initialized():
        dist.barrier()
    assert names(root) == {store.name_of(3)}
    assert store.tracked(root) == 3
    fresh = Trainer(root, config=ASYNC)
    assert fresh.handler.load_checkpoint() == 3
    assert same(fresh.state(), expected[3])


@pytest.mark.parametrize("world", [0, 2])
def test_the_state_of_the_call_is_saved_and_published_later(ranks, tmp_path: Path, world: int) -> None:
    ranks(goes_on, tmp_path, world=world)


@on_ranks(world=2)
def test_a_load_waits_for_the_step_under_way(api: Any, tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, config=ASYNC)
    trainer.train(rank())
    trainer.handler.save_checkpoint(5)
    expected = trainer.state()
    trainer.train(9, 9)
    assert trainer.handler.load_checkpoint() == 5
    assert same(trainer.state(), expected)


def fails_later(api: Any, root: Path, by_next: bool) -> str:
    trainer = Trainer(root, config=ASYNC)
    trainer.train(rank())
    trainer.handler.save_checkpoint(1)
    trainer.handler.finish()
    first = names(root)
    with slow(fails=rank() == 1) as opened:
        opened.set()
        trainer.handler.save_checkpoint(2)
        with pytest.raises(CheckpointingException) as caught:
            trainer.handler.save_checkpoint(3) if by_next else trainer.handler.finish()
    dist.barrier()
    assert names(root) == first == {"global_step_1"}
    assert trainer.handler.finish()
    trainer.handler.save_checkpoint(4)
    trainer.handler.finish()
    dist.barrier()
    assert names(root) == {"global_step_1", "global_step_4"}
    return str(caught.value)


@pytest.mark.parametrize("by_next", [False, True])
def test_a_failure_in_the_background_is_told_on_all_ranks(ranks, tmp_path: Path, by_next: bool) -> None:
    (text,) = set(ranks(fails_later, tmp_path, by_next, world=2))
    assert "rank 1: OSError: [Errno 28] No space left on device" in text


@on_ranks(world=2)
def test_a_manager_alone(api: Any, tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, config=ASYNC)
    for step in (1, 2, 3):
        trainer.train(step)
        trainer.manager.save_checkpoint(
            tmp_path / f"global_step_{step}/actor", global_step=step, max_ckpt_to_keep=2
        )
        expected = trainer.state()
    assert trainer.manager.finish()
    if dist.is_initialized():
        dist.barrier()
    assert sorted(path.parent.name for path in tmp_path.glob("*/actor")) == ["global_step_2", "global_step_3"]
    fresh = Trainer(tmp_path)
    fresh.manager.load_checkpoint(tmp_path / "global_step_3/actor")
    fresh.loader.position = trainer.loader.position
    assert same(fresh.state(), expected)


PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from trainer import Trainer
Trainer(Path(sys.argv[2]), config={"async_save": True}).handler.save_checkpoint(7)
"""


def test_a_step_that_nobody_finished_is_told_and_cleared_away(tmp_path: Path) -> None:
    here = str(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, here, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert "global_step_7 was never published: call finish()" in done.stderr
    assert len(list(tmp_path.glob(".global_step_7.tmp-*"))) == 1
    fresh = Trainer(tmp_path).handler
    assert fresh.load_checkpoint() == 0
    assert len(list(tmp_path.iterdir())) == 1
    fresh.save_checkpoint(1)
    assert not list(tmp_path.glob(".*"))


def test_the_word_is_only_said_where_it_is_true(tmp_path: Path, caplog) -> None:
    trainer = Trainer(tmp_path, config=ASYNC)
    with caplog.at_level(logging.ERROR):
        trainer.handler.save_checkpoint(1)
        saves._warn()
        assert "never published" in caplog.text
        caplog.clear()
        trainer.handler.finish()
        saves._warn()
        assert caplog.text == ""


@pytest.mark.parametrize("fails", [False, True])
def test_the_last_finish_frees_the_memory_of_the_copy(tmp_path: Path, fails: bool, monkeypatch) -> None:
    """Saves keep it for the next one."""
    monkeypatch.setattr(staged, "KEPT_BYTES", 1)
    trainer = Trainer(tmp_path, config=ASYNC)
    for step in (1, 2):
        trainer.handler.save_checkpoint(step)
        while not trainer.handler.finish(blocking=False):
            time.sleep(0.01)
        assert staged._kept
    with slow(fails) as opened:
        opened.set()
        trainer.handler.save_checkpoint(3)
        with pytest.raises(CheckpointingException) if fails else contextlib.nullcontext():
            trainer.handler.finish()
    assert not staged._kept
    trainer.manager.save_checkpoint(tmp_path / "global_step_4/actor", global_step=4)
    trainer.manager.finish()
    assert not staged._kept


def test_a_save_that_waits_for_the_one_before_says_so(tmp_path: Path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(saves, "SHORT", 0.2)
    trainer = Trainer(tmp_path, config=ASYNC)
    with slow() as opened:
        trainer.handler.save_checkpoint(1)
        threading.Timer(0.4, opened.set).start()
        trainer.handler.save_checkpoint(2)
    assert re.search(r"waited 0\.[4-9] s for .*global_step_1, the save before", caplog.text)
    trainer.handler.finish()
