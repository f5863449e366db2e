"""Steps that are removed while training goes on: out of sight at once, gone in the end, or told."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from trainer import Trainer

from torch_dcp_backport.checkpoint import CheckpointHandler, FSDPCheckpointManager, PreservationPolicy
from torch_dcp_backport.checkpoint._src import retention, store
from torch_dcp_backport.checkpoint._src.saves import Background
from torch_dcp_backport.publish import disk


@contextlib.contextmanager
def held_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """What is out of sight is removed once the event is set."""
    opened = threading.Event()

    def wait(name: str) -> None:
        if name.startswith("remove .global_step_"):
            assert threading.current_thread() is not threading.main_thread()
            assert opened.wait(30)

    monkeypatch.setattr(disk, "on_step", wait)
    try:
        yield opened
    finally:
        opened.set()


def test_a_save_does_not_wait_for_what_it_removes(tmp_path: Path, monkeypatch) -> None:
    trainer = Trainer(tmp_path, max_ckpt_to_keep=1)
    trainer.handler.save_checkpoint(1)
    with held_back(monkeypatch) as opened:
        trainer.handler.save_checkpoint(2)
        assert [step.step for step in store.steps_in(tmp_path)] == [2]
        (hidden,) = tmp_path.glob(".global_step_1.old-*")
        assert trainer.handler.finish(blocking=False)
        assert (hidden / "manifest.json").exists()
        opened.set()
        trainer.handler.finish()
        assert not hidden.exists()


def test_the_next_one_waits_for_it(tmp_path: Path, monkeypatch) -> None:
    trainer = Trainer(tmp_path, max_ckpt_to_keep=1)
    trainer.handler.save_checkpoint(1)
    with held_back(monkeypatch) as opened:
        trainer.handler.save_checkpoint(2)
        threading.Timer(0.2, opened.set).start()
        trainer.handler.save_checkpoint(3)
        assert opened.is_set()
        assert not list(tmp_path.glob(".global_step_1.*"))
    trainer.handler.finish()


def test_what_cannot_be_removed_is_told_once_and_no_reason_not_to_save(
    tmp_path: Path, monkeypatch, caplog
) -> None:
    trainer = Trainer(tmp_path, max_ckpt_to_keep=1)

    def refuse(name: str) -> None:
        if name == "remove data_0.pt":
            raise PermissionError(13, "Permission denied", name)

    monkeypatch.setattr(disk, "on_step", refuse)
    with caplog.at_level(logging.ERROR):
        for step in (1, 2, 3):
            trainer.handler.save_checkpoint(step)
            trainer.handler.finish()
    names = sorted(path.name.split("-")[0] for path in tmp_path.glob(".*"))
    assert names == [".global_step_1.old", ".global_step_2.old"]
    for name in names:
        assert len([text for text in caplog.messages if name in text]) == 1
    assert "still takes its room on the disk" in caplog.text
    assert "Permission denied" in caplog.text
    monkeypatch.undo()
    trainer.handler.save_checkpoint(4)
    trainer.handler.finish()
    assert not list(tmp_path.glob(".*"))


REFUSED = ("data_0.pt", "dist_ckpt/.metadata", "owner.json", "manifest.json", "a folder", "the step")


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("then", ["a save", "a restart", "prune", "the same step again"])
def test_a_removal_that_failed_is_gone_on_with(tmp_path: Path, monkeypatch, what: str, then: str) -> None:
    """A file of a disk elsewhere may be busy for a moment: what is left must still be known as ours."""
    trainer = Trainer(tmp_path, max_ckpt_to_keep=2)
    for step in (1, 2):
        trainer.handler.save_checkpoint(step)
    again = then == "the same step again"
    native, failures = os.rmdir, list[OSError]()

    def refuse_file(name: str) -> None:
        if name == f"remove {what}":
            failures.append(OSError(16, "Device or resource busy", name))
            raise failures[-1]

    def refuse_folder(path: Any, **options: Any) -> None:
        if (Path(path).name == "dist_ckpt") if what == "a folder" else (".old-" in Path(path).name):
            failures.append(OSError(16, "Device or resource busy", str(path)))
            raise failures[-1]
        native(path, **options)

    if what in ("a folder", "the step"):
        monkeypatch.setattr(os, "rmdir", refuse_folder)
    else:
        monkeypatch.setattr(disk, "on_step", refuse_file)
    trainer.handler.save_checkpoint(1 if again else 3)
    trainer.handler.finish()
    monkeypatch.undo()
    assert failures
    (hidden,) = tmp_path.glob(".*")
    assert ".old-" in hidden.name
    if then in ("a save", "the same step again"):
        trainer.handler.save_checkpoint(1 if again else 4)
        trainer.handler.finish()
    elif then == "a restart":
        fresh = Trainer(tmp_path, max_ckpt_to_keep=2)
        assert fresh.handler.load_checkpoint() == 3
        assert hidden.exists()
        fresh.handler.save_checkpoint(4)
        fresh.handler.finish()
    else:
        assert retention.prune(tmp_path, PreservationPolicy(2), lambda verdict: None, is_dry=True) == []
        assert hidden.exists()
        assert retention.prune(tmp_path, PreservationPolicy(2), lambda verdict: None) == []
    names = {path.name for path in tmp_path.iterdir()} - {store.TRACKER}
    steps = {"a save": (3, 4), "a restart": (3, 4), "the same step again": (1, 2)}.get(then, (2, 3))
    assert names == {store.name_of(step) for step in steps}


def test_what_stays_is_named_by_prune_and_at_the_first_save(tmp_path: Path, monkeypatch, caplog) -> None:
    trainer = Trainer(tmp_path)
    (tmp_path / ".global_step_1.old-00000000").symlink_to(trainer.handler.save_checkpoint(2))
    folder = trainer.handler.save_checkpoint(1)
    hidden = folder.rename(tmp_path / ".global_step_1.old-01234567")

    def refuse(name: str) -> None:
        if name == "remove data_0.pt":
            raise OSError(16, "Device or resource busy", name)

    monkeypatch.setattr(disk, "on_step", refuse)
    (failure,) = retention.prune(tmp_path, PreservationPolicy(1), lambda verdict: None)
    assert failure.startswith(f"{hidden}: [Errno 16]")
    caplog.clear()
    Trainer(tmp_path).handler.save_checkpoint(3)
    assert f"{hidden} still takes its room on the disk: [Errno 16]" in caplog.text


PROGRAM = """
import sys, threading, time
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from trainer import Trainer
from torch_dcp_backport.publish import disk
def slow(name):
    if threading.current_thread() is not threading.main_thread() and name.startswith("remove "):
        time.sleep(0.1)
disk.on_step = slow
trainer = Trainer(Path(sys.argv[2]), max_ckpt_to_keep=1)
for step in (1, 2):
    trainer.handler.save_checkpoint(step)
"""


def test_a_process_that_ends_waits_for_it(tmp_path: Path) -> None:
    here = str(Path(__file__).parent)
    subprocess.run([sys.executable, "-c", PROGRAM, here, str(tmp_path)], check=True)
    assert {path.name for path in tmp_path.iterdir()} == {"global_step_2", store.TRACKER}


def test_a_process_without_threads_removes_at_once(tmp_path: Path, monkeypatch) -> None:
    trainer = Trainer(tmp_path, max_ckpt_to_keep=1)
    trainer.handler.save_checkpoint(1)

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "removal of checkpoints":
            raise RuntimeError("can't start new thread")
        native(thread)

    native = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", refuse)
    trainer.handler.save_checkpoint(2)
    assert {path.name for path in tmp_path.iterdir()} == {"global_step_2", store.TRACKER}


def test_a_manager_alone_clears_what_a_killed_one_left(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    for step in (1, 2):
        trainer.manager.save_checkpoint(tmp_path / f"global_step_{step}" / "actor", global_step=step)
    left = tmp_path / "global_step_1" / "actor"
    left.rename(left.with_name(".actor.old-00000000"))
    fresh = Trainer(tmp_path).manager
    fresh.load_checkpoint(tmp_path / "global_step_2" / "actor")
    assert list((tmp_path / "global_step_1").iterdir())
    fresh.save_checkpoint(tmp_path / "global_step_3" / "actor", global_step=3)
    assert not list((tmp_path / "global_step_1").iterdir())


def test_half_of_a_replaced_step_never_comes_back(tmp_path: Path, monkeypatch) -> None:
    """Killed while what a step replaced is removed; the step that replaced it goes later."""
    trainer = Trainer(tmp_path)
    trainer.handler.save_checkpoint(1)

    def die(name: str) -> None:
        if name == "remove manifest.json":
            raise KeyboardInterrupt

    monkeypatch.setattr(disk, "on_step", die)
    with pytest.raises(KeyboardInterrupt):
        trainer.handler.save_checkpoint(1)
    monkeypatch.undo()
    (left,) = tmp_path.glob(".*")
    assert (left / "manifest.json").exists()
    shutil.rmtree(tmp_path / "global_step_1")
    store.clean(tmp_path)
    assert not list(tmp_path.glob("*global_step_1*"))


def test_a_job_that_raises_is_not_waited_for_without_end() -> None:
    background = Background("removal of checkpoints")
    for error in (ValueError("bad"), asyncio.CancelledError("by the store")):

        def fail(error: BaseException = error) -> str:
            raise error

        background.add(fail)
    assert background.wait(5)
    assert background.failures() == ["ValueError: bad", "CancelledError: by the store"]


def test_one_that_stays_is_no_reason_to_keep_the_others(tmp_path: Path, monkeypatch, caplog) -> None:
    trainer = Trainer(tmp_path)
    for step in (1, 2, 3):
        trainer.handler.save_checkpoint(step)
    native = os.rename

    def refuse(source: Path, target: Path) -> None:
        if Path(source).name == "global_step_2":
            raise PermissionError(13, "Permission denied", str(source))
        native(source, target)

    monkeypatch.setattr(os, "rename", refuse)
    trainer.handler.max_ckpt_to_keep = 1
    trainer.handler.save_checkpoint(4)
    trainer.handler.finish()
    assert [step.step for step in store.steps_in(tmp_path)] == [4, 2]
    assert "still takes its room on the disk" in caplog.text
    assert retention.prune(tmp_path, PreservationPolicy(1), lambda step: None) == [
        f"{tmp_path / 'global_step_2'}: [Errno 13] Permission denied: '{tmp_path / 'global_step_2'}'"
    ]


def test_two_processes_that_prune(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    for step in (1, 2, 3, 4):
        trainer.handler.save_checkpoint(step)

    def told(verdict: retention.StepVerdict) -> None:
        if verdict.entry.step == 3:
            shutil.rmtree(verdict.entry.path)

    assert retention.prune(tmp_path, PreservationPolicy(1), told) == []
    assert [step.step for step in store.steps_in(tmp_path)] == [4]


def test_prune_reads_what_is_to_stay_beside_one_that_could_not_be_loaded(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    for step in (1, 2, 3):
        trainer.handler.save_checkpoint(step)
    retention.distrust(tmp_path / "global_step_3", "a reason")
    (tmp_path / "global_step_2" / "data_0.pt").write_bytes(
        bytes((tmp_path / "global_step_2" / "data_0.pt").stat().st_size)
    )
    retention.prune(tmp_path, PreservationPolicy(1), lambda step: None)
    assert Trainer(tmp_path).handler.load_checkpoint() == 3
    # 3 could not be loaded before, and 2 is damaged.
    assert (tmp_path / "global_step_1").exists()


@pytest.mark.parametrize("mode", ["disable", "resume_path"])
def test_a_run_that_looks_for_no_step_clears_up_when_it_saves(tmp_path: Path, mode: str) -> None:
    Trainer(tmp_path / "a").handler.save_checkpoint(1)
    left = tmp_path / "b" / ".global_step_9.old-00000000"
    left.mkdir(parents=True)
    options = {"resume_mode": mode, "resume_from_path": tmp_path / "a" / "global_step_1"}
    trainer = Trainer(tmp_path / "b", **options)
    assert trainer.handler.load_checkpoint() == (mode == "resume_path")
    assert left.exists()
    trainer.handler.save_checkpoint(2)
    assert not left.exists()


def slowly(api: Any, root: Path) -> bool:
    group = dist.new_group(timeout=datetime.timedelta(seconds=3))
    model = torch.nn.Linear(2, 2)
    handler = CheckpointHandler(
        FSDPCheckpointManager(model, torch.optim.AdamW(model.parameters()), process_group=group),
        default_local_dir=root,
        max_ckpt_to_keep=1,
        process_group=group,
    )
    handler.save_checkpoint(1)
    disk.on_step = lambda name: time.sleep(5) if name.startswith("remove .global_step_") else None
    try:
        handler.save_checkpoint(2)
        handler.finish()
    finally:
        disk.on_step = None
    dist.barrier(group)
    return not list(root.glob(".*"))


def test_ranks_wait_for_a_removal_together(ranks, tmp_path: Path) -> None:
    assert ranks(slowly, tmp_path, world=2) == [True, True]
