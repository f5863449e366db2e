"""Which steps stay: the newest, every Nth, the best, the pinned; and the trash in the place of a removal."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import on_ranks
from trainer import Trainer

from torch_dcp_backport.__main__ import main
from torch_dcp_backport.checkpoint import PreservationPolicy
from torch_dcp_backport.checkpoint._src import manifest, store
from torch_dcp_backport.dist_checkpointing import CheckpointingException
from torch_dcp_backport.publish import disk

#: Save only the model: saves take a tenth of the time.
SMALL = {"save_contents": ["model"], "load_contents": ["model"]}


def saved(root: Path, metrics: dict[int, Any], **options: Any) -> Trainer:
    """Save steps with metrics; by now what is not kept is gone."""
    trainer = Trainer(root, config=SMALL, **options)
    for step, metric in metrics.items():
        trainer.handler.save_checkpoint(step, metric=metric)
    trainer.handler.finish()
    return trainer


def steps(root: Path) -> list[int]:
    return sorted(step.step for step in store.steps_in(root) if not step.fault)


@pytest.mark.parametrize(
    ("policy", "left"),
    [
        (PreservationPolicy(last=2), [5, 6]),
        (PreservationPolicy(last=1, every=3), [3, 6]),
        (PreservationPolicy(last=1, best=2), [2, 5, 6]),
        (PreservationPolicy(last=1, best=2, mode="max"), [1, 3, 6]),
        (PreservationPolicy(last=0, best=1), [2, 6]),
    ],
)
def test_what_stays(tmp_path: Path, policy: PreservationPolicy, left: list[int]) -> None:
    metrics = {1: torch.tensor(9.0), 2: 1, 3: 8.5, 4: None, 5: 2.0, 6: float("nan")}
    saved(tmp_path, metrics, preserve=policy)
    assert steps(tmp_path) == left
    assert not list(tmp_path.glob(".*"))


def test_a_damaged_step_is_not_the_best_one(tmp_path: Path) -> None:
    trainer = saved(tmp_path, {1: 0.1, 2: 0.5, 3: 0.9}, preserve=PreservationPolicy(last=3, best=1))
    next((tmp_path / "global_step_1" / "dist_ckpt").glob("*.distcp")).write_bytes(b"")
    trainer.handler.preserve = PreservationPolicy(last=1, best=1)
    trainer.handler.save_checkpoint(4, metric=0.8)
    trainer.handler.finish()
    assert steps(tmp_path) == [2, 4]


def test_the_policy_of_the_publication_counts(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, config={**SMALL, "async_save": True}, max_ckpt_to_keep=1)
    trainer.handler.save_checkpoint(1)
    trainer.handler.save_checkpoint(2)
    trainer.handler.max_ckpt_to_keep = 2
    trainer.handler.finish()
    assert steps(tmp_path) == [1, 2]


def test_the_newest_good_step_stays_by_every_policy(tmp_path: Path) -> None:
    trainer = saved(tmp_path, {3: None, 4: None, 5: None}, preserve=PreservationPolicy(last=0, every=4))
    assert steps(tmp_path) == [4, 5]
    (tmp_path / "global_step_5" / "manifest.json").unlink()
    for step, left in ((6, [4, 6]), (8, [4, 8])):
        trainer.handler.save_checkpoint(step)
        trainer.handler.finish()
        assert steps(tmp_path) == left


@pytest.mark.parametrize("count", [0, 2.5, "2", True])
def test_a_number_to_keep_that_is_none_is_refused(tmp_path: Path, count: Any) -> None:
    with pytest.raises(ValueError, match="max_ckpt_to_keep="):
        Trainer(tmp_path, max_ckpt_to_keep=count)


@on_ranks(world=2)
def test_a_number_to_keep_that_one_rank_changed_is_an_error_of_all(api: Any, tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, config=SMALL, max_ckpt_to_keep=2)
    trainer.handler.max_ckpt_to_keep = 2.5 if dist.get_rank() else 2
    with pytest.raises(CheckpointingException, match=r"rank 1: ValueError: last=2\.5"):
        trainer.handler.save_checkpoint(1)


def test_only_a_pin_of_a_step_is_taken_back(tmp_path: Path, capsys) -> None:
    (tmp_path / "pinned.txt").write_text("my own notes")
    assert main(["checkpoint", "unpin", str(tmp_path)]) == 1
    assert "no mark of this package" in capsys.readouterr().err
    assert (tmp_path / "pinned.txt").read_text() == "my own notes"


def test_prune_says_that_there_is_no_such_run(tmp_path: Path, capsys) -> None:
    assert main(["checkpoint", "prune", str(tmp_path / "none"), "--keep", "1"]) == 1
    assert "there is no folder" in capsys.readouterr().err


def test_trash_has_the_name_of_the_run_and_is_in_no_step(tmp_path: Path, monkeypatch, capsys) -> None:
    saved(tmp_path / "run", {1: None, 2: None})
    (tmp_path / "link").symlink_to("run")
    monkeypatch.chdir(tmp_path / "run")
    for trash in ("../link", "../link/global_step_2/trash"):
        assert main(["checkpoint", "prune", ".", "--keep", "1", "--trash", trash]) == 2
    assert main(["checkpoint", "prune", ".", "--keep", "1", "--trash", "../trash"]) == 0
    (name,) = [path.name for path in (tmp_path / "trash").iterdir()]
    assert name.startswith("run.global_step_1.")


def test_a_pinned_step_stays_and_is_not_counted(tmp_path: Path, capsys) -> None:
    trainer = saved(tmp_path, {1: None, 2: None}, max_ckpt_to_keep=2)
    folder = str(tmp_path / "global_step_1")
    assert main(["checkpoint", "pin", folder]) == 0
    for step in (3, 4):
        trainer.handler.save_checkpoint(step)
    trainer.handler.finish()
    assert steps(tmp_path) == [1, 3, 4]
    assert main(["checkpoint", "prune", str(tmp_path), "--keep", "1"]) == 0
    assert "pinned" in capsys.readouterr().out
    assert steps(tmp_path) == [1, 4]
    assert main(["checkpoint", "unpin", folder]) == 0
    assert main(["checkpoint", "unpin", folder]) == 1
    assert main(["checkpoint", "prune", str(tmp_path), "--keep", "1"]) == 0
    assert steps(tmp_path) == [4]


def test_what_is_no_step_is_not_pinned(tmp_path: Path, capsys) -> None:
    (tmp_path / "global_step_1").mkdir()
    assert main(["checkpoint", "pin", str(tmp_path / "global_step_1"), str(tmp_path / "gone")]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert f"{tmp_path / 'global_step_1'}: no manifest.json" in said
    assert f"there is no folder {tmp_path / 'gone'}" in said
    assert not list((tmp_path / "global_step_1").iterdir())


def test_a_pin_in_the_last_moment_is_seen(tmp_path: Path, monkeypatch) -> None:
    trainer = saved(tmp_path, {1: None}, max_ckpt_to_keep=1)

    def pin(name: str) -> None:
        if name == "rename global_step_1 away":
            store.pin(tmp_path / "global_step_1")

    monkeypatch.setattr(disk, "on_step", pin)
    trainer.handler.save_checkpoint(2)
    trainer.handler.finish()
    assert steps(tmp_path) == [1, 2]


def test_a_pin_in_the_last_moment_is_seen_where_the_step_is_saved_again(tmp_path: Path, monkeypatch) -> None:
    trainer = saved(tmp_path, {1: None}, max_ckpt_to_keep=1)
    native = store.taken

    def taken(folder: Path, trash: Any = None) -> Any:
        # Another process pins the step, and one more saves it again, around the rename.
        store.pin(folder)
        hidden = native(folder, trash)
        shutil.copytree(tmp_path / "global_step_2", folder)
        return hidden

    monkeypatch.setattr(store, "taken", taken)
    trainer.handler.save_checkpoint(2)
    trainer.handler.finish()
    (beside,) = tmp_path.glob("global_step_1.kept-*")
    assert store.is_pinned(beside)
    assert not list(tmp_path.glob(".*"))


def test_a_step_that_is_saved_twice_in_the_last_moment_is_not_removed(tmp_path: Path, monkeypatch) -> None:
    trainer = saved(tmp_path, {1: None}, max_ckpt_to_keep=1)
    saved(tmp_path / "other", {1: 0.5})
    native = store.taken

    def taken(folder: Path, trash: Any = None) -> Any:
        # Another process saves the step again, and once more, around the rename.
        shutil.rmtree(folder)
        shutil.copytree(tmp_path / "other" / "global_step_1", folder)
        hidden = native(folder, trash)
        shutil.copytree(tmp_path / "global_step_2", folder)
        return hidden

    monkeypatch.setattr(store, "taken", taken)
    trainer.handler.save_checkpoint(2)
    trainer.handler.finish()
    (beside,) = tmp_path.glob("global_step_1.kept-*")
    assert manifest.read(beside).metric == 0.5


@pytest.mark.parametrize("kind", ["was", "old"])
def test_a_pinned_step_that_a_dead_process_hid_gets_its_name_back(tmp_path: Path, kind: str) -> None:
    saved(tmp_path, {1: None})
    store.pin(tmp_path / "global_step_1")
    os.rename(tmp_path / "global_step_1", tmp_path / f".global_step_1.{kind}-0a1b2c3d")
    store.clean(tmp_path)
    assert steps(tmp_path) == [1]


def test_a_save_in_the_place_of_a_pinned_step_keeps_it_beside(tmp_path: Path) -> None:
    trainer = saved(tmp_path, {1: 0.5})
    store.pin(tmp_path / "global_step_1")
    trainer.handler.save_checkpoint(1, metric=0.25)
    trainer.handler.finish()
    (beside,) = tmp_path.glob("global_step_1.kept-*")
    assert manifest.read(beside).metric == 0.5
    assert manifest.read(tmp_path / "global_step_1").metric == 0.25
    assert not store.is_pinned(tmp_path / "global_step_1")


def test_steps_go_to_the_trash_whole_and_leave_no_trace_in_another_run(tmp_path: Path) -> None:
    root, trash = tmp_path / "a", tmp_path / "b"
    saved(trash, {1: None})
    saved(root, {1: None, 2: None, 3: None}, max_ckpt_to_keep=1, trash_dir=trash)
    assert steps(root) == [3]
    assert not list(root.glob(".*"))
    store.clean(trash)
    assert steps(trash) == [1]
    moved = [path for path in trash.iterdir() if path.name.startswith("a.global_step_")]
    assert sorted(manifest.read(path).step for path in moved) == [1, 2]
    assert not any(any(manifest.wrong_checksums(path, manifest.read(path))) for path in moved)
    assert Trainer(trash, config=SMALL).handler.load_checkpoint() == 1


def test_a_trash_that_cannot_be_written_costs_no_step(tmp_path: Path, caplog) -> None:
    root, trash = tmp_path / "a", tmp_path / "file"
    trash.write_text("")
    saved(root, {1: None, 2: None}, max_ckpt_to_keep=1, trash_dir=trash)
    assert steps(root) == [1, 2]
    assert "still takes its room on the disk" in caplog.text
    assert main(["checkpoint", "prune", str(root), "--keep", "1", "--trash", str(tmp_path / "new")]) == 0
    assert steps(root) == [2]


@pytest.mark.parametrize(
    "options",
    [
        {"max_ckpt_to_keep": 1, "preserve": PreservationPolicy()},
        {"preserve": 3},
        {"trash_dir": "."},
        {"trash_dir": "global_step_1/trash"},
    ],
)
def test_options_that_do_not_go_together_are_refused(tmp_path: Path, monkeypatch, options: Any) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="|".join(options)):
        Trainer(Path("."), **options)


@pytest.mark.parametrize(
    "options", [{"last": 0}, {"last": -1}, {"every": 0}, {"best": True}, {"best": 1, "mode": "lowest"}]
)
def test_a_policy_that_says_nothing_is_refused(options: Any) -> None:
    with pytest.raises(ValueError, match="|".join(options)):
        PreservationPolicy(**options)


def test_a_metric_that_is_no_number_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointingException, match="metric='low': expected a number"):
        Trainer(tmp_path, config=SMALL).handler.save_checkpoint(1, metric="low")  # type: ignore[arg-type]
    assert not steps(tmp_path)


def differing(api: Any, root: Path, what: str) -> str:
    odd = dist.get_rank() == 1
    options = {
        "max_ckpt_to_keep": {"max_ckpt_to_keep": 2 if odd else 1},
        "preserve": {"preserve": PreservationPolicy(last=2 if odd else 1)},
        "trash_dir": {"trash_dir": root.parent / "trash" if odd else None},
        "metric": {},
    }[what]
    trainer = Trainer(root, config=SMALL, **options)
    with pytest.raises(CheckpointingException) as caught:
        trainer.handler.save_checkpoint(1, metric=float(odd) if what == "metric" else None)
    return str(caught.value)


class Odd:
    """What neither is a number nor can be printed."""

    def __float__(self) -> float:
        raise KeyError("no number")

    def __repr__(self) -> str:
        raise KeyError("no text")


@on_ranks(world=2)
def test_a_metric_that_one_rank_cannot_make_a_number_of_is_refused_on_every_rank(
    api: Any, tmp_path: Path
) -> None:
    handler = Trainer(tmp_path, config=SMALL).handler
    for odd, says in [
        (10**400, "type int: too large"),
        (10**5000, "type int: too large"),
        (Odd(), "KeyError"),
    ]:
        with pytest.raises(CheckpointingException, match=f"rank 1: .*{says}"):
            handler.save_checkpoint(1, metric=odd if dist.get_rank() else 1.0)
    handler.save_checkpoint(1, metric=1.0)


@pytest.mark.parametrize("what", ["max_ckpt_to_keep", "preserve", "trash_dir", "metric"])
def test_what_differs_between_ranks_is_refused_on_each(ranks, tmp_path: Path, what: str) -> None:
    (text,) = set(ranks(differing, tmp_path / "run", what, world=2))
    assert f"rank 1: not the same on every rank: {what} (" in text
    assert not steps(tmp_path / "run")
