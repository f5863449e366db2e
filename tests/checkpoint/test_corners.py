"""What happens beside a save: other processes, other saves, other paths, classes and devices."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import threading
from collections import Counter, OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from damaging import flip
from pool import on_ranks
from test_async_saves import ASYNC, slow
from trainer import Trainer, same

from torch_dcp_backport import dist_checkpointing
from torch_dcp_backport.checkpoint import BaseCheckpointManager, FSDPCheckpointManager
from torch_dcp_backport.checkpoint._src import retention, saves, store
from torch_dcp_backport.checkpoint._src.together import writing_in
from torch_dcp_backport.dist_checkpointing import CheckpointingException, ShardedTensor
from torch_dcp_backport.dist_checkpointing.core import SHARDED
from torch_dcp_backport.dist_checkpointing.strategies.async_utils import AsyncRequest
from torch_dcp_backport.publish import disk


def good(root: Path) -> list[int]:
    return sorted(step.step for step in store.steps_in(root) if not step.fault)


def are_whole(root: Path) -> bool:
    """Whether every step has the bytes that its manifest says."""
    from torch_dcp_backport.checkpoint._src import manifest

    steps = store.steps_in(root)
    return all(not list(manifest.wrong_checksums(step.path, manifest.read(step.path))) for step in steps)


def test_another_process_clears_up_while_a_draft_is_made(tmp_path: Path, monkeypatch) -> None:
    trainer, times = Trainer(tmp_path), 0

    def clear_up(name: str) -> None:
        nonlocal times
        if name.startswith("name ") and times < 3:
            times += 1
            store.clean(tmp_path)

    monkeypatch.setattr(disk, "on_step", clear_up)
    trainer.handler.save_checkpoint(1)
    assert (times, good(tmp_path)) == (3, [1])


def test_a_failed_save_of_the_manager_is_no_fault_of_a_step(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path / "root")
    for step in (1, 2):
        trainer.train(step)
        trainer.handler.save_checkpoint(step)
    trainer.manager.is_async = True
    with slow(fails=True) as opened:
        opened.set()
        trainer.manager.save_checkpoint(tmp_path / "other", global_step=9)
        with pytest.raises(CheckpointingException, match="No space left"):
            trainer.handler.load_checkpoint()
    assert trainer.handler.load_checkpoint() == 2


def test_values_of_the_schedule_keep_their_classes(tmp_path: Path) -> None:
    def made() -> Trainer:
        trainer = Trainer(tmp_path)
        trainer.schedule = torch.optim.lr_scheduler.MultiStepLR(trainer.optimizer, [2, 4])
        trainer.manager.lr_scheduler = trainer.schedule
        return trainer

    trainer = made()
    trainer.optimizer.param_groups[0]["note"] = OrderedDict(b=1, a=2)
    trainer.handler.save_checkpoint(1)
    resumed = made()
    resumed.optimizer.param_groups[0]["note"] = OrderedDict()
    resumed.handler.load_checkpoint()
    assert type(resumed.schedule.milestones) is Counter
    for one in (trainer, resumed):
        for _ in range(3):
            one.optimizer.step()
            one.schedule.step()
    assert resumed.schedule.get_last_lr() == trainer.schedule.get_last_lr()


class Rewriting(FSDPCheckpointManager):
    """Writes its records twice, with other values."""

    def write(self, folder: Path, step: int) -> None:
        super().write(folder, step)
        for value in (1.0, 2.0):
            # The second time the same size, and other bytes.
            part = ShardedTensor.from_rank_offsets("w", torch.full((3,), value))
            dist_checkpointing.save({"w": part}, folder / SHARDED)


def test_what_is_written_again_is_what_the_manifest_has(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    trainer.handler.engine = Rewriting(trainer.model, trainer.optimizer)
    for step in (1, 2):
        trainer.handler.save_checkpoint(step)
    assert good(tmp_path) == [1, 2]
    assert are_whole(tmp_path)


class InAThread:
    """An engine that has its manager save in another thread."""

    def __init__(self, manager: FSDPCheckpointManager) -> None:
        self.manager = manager

    def save_checkpoint(self, **options: Any) -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(self.manager.save_checkpoint, **options).result()


def test_an_engine_may_save_in_a_thread(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, config=ASYNC)
    trainer.handler.engine = InAThread(trainer.manager)
    trainer.handler.save_checkpoint(1)
    trainer.handler.finish()
    assert good(tmp_path) == [1]
    assert {path.name for path in tmp_path.iterdir()} == {"global_step_1", store.TRACKER}
    assert are_whole(tmp_path)
    trainer.train(1)
    trainer.handler.engine = trainer.manager
    assert trainer.handler.load_checkpoint() == 1


class NoText:
    def __str__(self) -> str:
        raise ValueError("it has no text")


def paths(api: Any, root: Path, path: Any, method: str) -> str:
    manager, odd = Trainer(root).manager, dist.get_rank() == 1
    path = NoText() if path == "no text" else path
    folder = root / "global_step_2"
    calls = {
        "step": lambda: manager.save_checkpoint(folder, None, path if odd else 2),
        "save": lambda: manager.save_checkpoint(path if odd else folder, None, 2),
        "load": lambda: manager.load_checkpoint(path if odd else folder),
    }
    with pytest.raises(CheckpointingException) as caught:
        calls[method]()
    # In step again.
    manager.save_checkpoint(root / "global_step_3", None, 3)
    dist.barrier()
    assert good(root) == [3]
    return str(caught.value)


@pytest.mark.parametrize(
    ("path", "method"),
    [(None, "save"), (5, "save"), (b"x", "load"), ("no text", "step")],
)
def test_a_path_of_one_rank_that_is_none(ranks, tmp_path: Path, path: Any, method: str) -> None:
    (text,) = set(ranks(paths, tmp_path, path, method, world=2))
    assert "rank 1: " in text


@on_ranks(world=2)
def test_a_rank_without_a_thread_writes_at_once(api: Any, tmp_path: Path) -> None:
    trainer, native = Trainer(tmp_path, config=ASYNC), threading.Thread.start
    trainer.train(dist.get_rank())

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    if dist.get_rank() == 1:
        threading.Thread.start = refuse
    try:
        trainer.handler.save_checkpoint(1)
    finally:
        threading.Thread.start = native
    trainer.handler.finish()
    dist.barrier()
    assert good(tmp_path) == [1]


def test_a_step_that_could_not_be_loaded_does_not_count_after_restarts(tmp_path: Path) -> None:
    first = Trainer(tmp_path, max_ckpt_to_keep=3)
    first.handler.save_checkpoint(1)
    first.handler.save_checkpoint(2)
    flip(tmp_path / "global_step_2" / SHARDED / "__0_0.distcp")
    for resumed, saved in ((1, 3), (3, 4)):
        trainer = Trainer(tmp_path, max_ckpt_to_keep=3)
        assert trainer.handler.load_checkpoint() == resumed
        trainer.handler.save_checkpoint(saved)
    assert good(tmp_path) == [1, 2, 3, 4]
    # Mended, it is loaded, and counts.
    flip(tmp_path / "global_step_2" / SHARDED / "__0_0.distcp")
    for step in (3, 4):
        shutil.rmtree(tmp_path / f"global_step_{step}")
    trainer = Trainer(tmp_path, max_ckpt_to_keep=2)
    assert trainer.handler.load_checkpoint() == 2
    trainer.handler.save_checkpoint(5)
    assert good(tmp_path) == [2, 5]


class Later(FSDPCheckpointManager):
    """Has more to write in the background, by `work`."""

    work: Any = None

    def write(self, folder: Path, step: int) -> None:
        super().write(folder, step)
        writing_in(folder).requests.append(AsyncRequest(self.work, (folder,), []))


def later(api: Any, root: Path, what: str) -> list[str]:
    trainer = Trainer(root, config=ASYNC)
    manager = trainer.handler.engine = Later(trainer.model, trainer.optimizer, checkpoint_config=ASYNC)
    said = []

    def work(folder: Path) -> None:
        if what == "fails" and dist.get_rank() == 1:
            raise OSError(5, "Input/output error")
        if what == "another number" and dist.get_rank() == 1:
            (folder / "tp_1").mkdir()
            with open(folder / "tp_1" / "data_0.pt", "wb") as file:
                for _ in range(20):
                    file.write(bytes(1000))
                    file.flush()
                    threading.Event().wait(0.02)

    manager.work = work
    trainer.handler.save_checkpoint(1)
    try:
        trainer.handler.finish()
    except CheckpointingException as error:
        said.append(str(error))
    dist.barrier()
    assert are_whole(root)
    return [*said, str(good(root))]


def test_a_part_in_the_background_that_fails(ranks, tmp_path: Path) -> None:
    said = ranks(later, tmp_path, "fails", world=2)
    assert said[0] == said[1]
    text, steps = said[0]
    assert "rank 1: OSError: [Errno 5] Input/output error" in text
    assert steps == "[]"


def test_a_file_with_another_ranks_number(ranks, tmp_path: Path) -> None:
    assert ranks(later, tmp_path, "another number", world=2) == [["[1]"], ["[1]"]]


def test_a_handler_that_is_gone_before_its_step_is_published(tmp_path: Path, caplog) -> None:
    trainer = Trainer(tmp_path, config=ASYNC)
    trainer.handler.save_checkpoint(1)
    held = trainer.handler._saves
    del trainer
    gc.collect()
    with caplog.at_level(logging.ERROR):
        saves._warn()
    assert "global_step_1 was never published" in caplog.text
    held.finish()
    assert held not in saves._unfinished


def test_a_step_that_is_removed_while_it_is_saved_again(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, config=ASYNC)
    trainer.handler.save_checkpoint(1)
    trainer.handler.finish()
    trainer.handler.save_checkpoint(1)
    (entry,) = store.Shelf(tmp_path).listed()
    retention.remove(entry)
    trainer.handler.finish()
    assert good(tmp_path) == [1]


def finalizes(api: Any, folder: Path) -> str:
    from torch_dcp_backport.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    queue, replica = AsyncCallsQueue(), dist.get_rank()
    part = ShardedTensor.from_rank_offsets("w", torch.ones(3), replica_id=replica)
    request = dist_checkpointing.save({"w": part}, folder, async_sharded_save=True)
    assert request is not None

    def fail() -> None:
        if dist.get_rank() == 1:
            raise ValueError("of the user's own")

    request.add_finalize_fn(fail)
    queue.schedule_async_request(request)
    with pytest.raises(CheckpointingException) as caught:
        queue.close()
    return str(caught.value)


def test_a_finalize_function_that_fails_on_one_rank(ranks, tmp_path: Path) -> None:
    (text,) = set(ranks(finalizes, tmp_path, world=2))
    assert "rank 1: ValueError: of the user's own" in text
    assert dist_checkpointing.verify(tmp_path) == []


def test_the_step_of_a_path(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    trainer.manager.save_checkpoint(tmp_path / "global_step_5")
    assert good(tmp_path) == [5]


def test_empty_bytes_are_harmless(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    trainer.loader.position = b""  # type: ignore[assignment]
    trainer.handler.save_checkpoint(1)
    resumed = Trainer(tmp_path)
    resumed.handler.load_checkpoint()
    assert resumed.loader.position == b""


def test_a_default_device_makes_no_difference(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, config={**ASYNC, "save_contents": ["model", "optimizer", "extra"]})
    trainer.train(1)
    with torch.device("meta"):
        trainer.handler.save_checkpoint(1)
        trainer.handler.finish()
    expected, fresh = trainer.state(), Trainer(tmp_path)
    fresh.handler.load_checkpoint()
    assert same(fresh.state(), expected)


def test_another_working_directory_at_the_end(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = Trainer(Path("root"), config=ASYNC)
    trainer.handler.save_checkpoint(1)
    (tmp_path / "elsewhere").mkdir()
    os.chdir(tmp_path / "elsewhere")
    trainer.handler.finish()
    assert good(tmp_path / "root") == [1]
    assert store.tracked(tmp_path / "root") == 1


def test_steps_that_go_while_they_are_tried(tmp_path: Path, monkeypatch, caplog) -> None:
    """Another process publishes, and its retention takes what this one has found."""
    other, trainer = Trainer(tmp_path), Trainer(tmp_path)
    other.handler.save_checkpoint(1)
    native = trainer.handler.load_step

    def load_step(path: Path, is_ours: bool) -> None:
        if path.name == "global_step_1":
            other.handler.save_checkpoint(2)
            retention.remove(store.Shelf(tmp_path).listed()[-1])
        native(path, is_ours)

    monkeypatch.setattr(trainer.handler, "load_step", load_step)
    with caplog.at_level(logging.ERROR):
        assert trainer.handler.load_checkpoint() == 2
    assert "taken for good" not in caplog.text


def test_a_root_that_cannot_be_synced_has_the_step(tmp_path: Path, monkeypatch, caplog) -> None:
    trainer, native = Trainer(tmp_path), disk.sync_folder

    def sync(folder: Path) -> None:
        if folder == tmp_path:
            raise OSError(5, "Input/output error")
        native(folder)

    for _ in range(2):  # new, and in the place of the same step
        monkeypatch.setattr(disk, "sync_folder", sync)
        trainer.handler.max_ckpt_to_keep = None
        with caplog.at_level(logging.ERROR):
            trainer.handler.save_checkpoint(1)
        assert "is published; a loss of power may take it back" in caplog.text
        caplog.clear()
        assert good(tmp_path) == [1]
        assert not list(tmp_path.glob(".*"))


def test_patience_with_files_that_are_not_seen_is_that_of_all(tmp_path: Path, monkeypatch) -> None:
    from torch_dcp_backport.dist_checkpointing._src import commit
    from torch_dcp_backport.dist_checkpointing._src.body import Output
    from torch_dcp_backport.dist_checkpointing._src.metadata import Index
    from torch_dcp_backport.transfer import Refusal

    class Clock:
        now = 0.0

        def monotonic(self) -> float:
            return self.now

        def sleep(self, seconds: float) -> None:
            self.now += seconds

    clock = Clock()
    monkeypatch.setattr(commit, "time", clock)
    outputs = {rank: Output(f"__{rank}_0.distcp", 8, [], []) for rank in range(100)}
    with pytest.raises(Refusal) as caught:
        commit.publish(tmp_path, Index(), b"", outputs)
    assert len(caught.value.findings) == 100
    assert clock.now <= commit.PATIENCE + 0.1


def test_a_parameter_that_is_frozen_when_it_is_resumed(tmp_path: Path, caplog) -> None:
    """As stock: what the optimizer has no place for is left out, and the rest is as it was."""
    trainer, fresh = Trainer(tmp_path), Trainer(tmp_path)
    trainer.train(1, 2)
    trainer.handler.save_checkpoint(1)
    fresh.model[0].weight.requires_grad_(False)
    assert fresh.handler.load_checkpoint() == 1
    assert "not loaded, as their parameters are frozen now: optimizer.state.0.weight.exp_avg" in caplog.text
    for parameter, other in zip(trainer.model.parameters(), fresh.model.parameters()):
        assert torch.equal(parameter, other)
        if other.requires_grad:
            states = trainer.optimizer.state[parameter], fresh.optimizer.state[other]
            assert states[0].keys() == states[1].keys()
            assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    fresh.handler.save_checkpoint(2)
    again = Trainer(tmp_path)
    again.model[0].weight.requires_grad_(False)
    assert again.handler.load_checkpoint() == 2
    unfrozen = Trainer(tmp_path)
    assert unfrozen.handler.load_checkpoint() == 2
    state = unfrozen.optimizer.state[unfrozen.model[0].weight]
    assert not any(value.any() for value in state.values())  # step 2 has none: it begins anew
    assert "optimizer.state.0.weight.exp_avg" in caplog.records[-1].getMessage()


class NamedByRank(BaseCheckpointManager):
    """Each rank writes a file whose name says its rank, as torch's savers and verl's own manager do."""

    def write(self, folder: Path, step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        torch.save({"rank": dist.get_rank()}, folder / f"data_{dist.get_rank()}.pt")

    def read(self, folder: Path) -> None:
        self.read_back = torch.load(folder / f"data_{dist.get_rank()}.pt")["rank"]


@on_ranks(world=2)
def test_files_that_no_rank_noted_are_published(api: Any, tmp_path: Path) -> None:
    manager = NamedByRank(None, None)
    manager.save_checkpoint(str(tmp_path / "global_step_1" / "actor"), global_step=1)
    assert sorted(os.listdir(tmp_path / "global_step_1")) == ["actor"]
    manager.load_checkpoint(str(tmp_path / "global_step_1" / "actor"))
    assert manager.read_back == dist.get_rank()
