"""File calls of saves, starts and loads: as many however many steps stay, and no other process is missed."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from file_calls import FileCalls, counted
from test_ranks import fully_shard
from trainer import Trainer, same

from torch_dcp_backport.checkpoint import PreservationPolicy
from torch_dcp_backport.checkpoint._src import manifest, store
from torch_dcp_backport.checkpoint._src.store import Shelf

POLICIES: dict[str, dict[str, Any]] = {
    "all": {"max_ckpt_to_keep": None},
    "every": {"preserve": PreservationPolicy(last=2, every=1)},
    "last": {"max_ckpt_to_keep": 2},
}


def run_of(root: Path, steps: int) -> None:
    """A run with so many steps, which were not saved just now."""
    Trainer(root).handler.save_checkpoint(1)
    first = root / "global_step_1"
    content = manifest.read(first)
    for step in range(2, steps + 1):
        folder = root / f"global_step_{step}"
        shutil.copytree(first, folder)
        manifest.write(folder, dataclasses.replace(content, step=step, order=step))
    for path in root.glob("*/manifest.json"):
        os.utime(path, (0, 0))


def kinds(calls: FileCalls) -> dict[str, Counter[str]]:
    """The calls by what was opened, looked at or listed; numbers of steps and random names are left out."""
    return {
        name: Counter(
            {
                key: sum(
                    count for path, count in counts.items() if re.sub(r"[0-9a-f]{8}|\d+", "N", path) == key
                )
                for key in {re.sub(r"[0-9a-f]{8}|\d+", "N", path) for path in counts}
            }
        )
        for name, counts in calls._asdict().items()
    }


def calls_of_saves(root: Path, steps: int, options: dict[str, Any]) -> list[dict[str, Counter[str]]]:
    run_of(root, steps)
    trainer = Trainer(root, **({} if options.get("max_ckpt_to_keep", 2) is None else options))
    trainer.handler.max_ckpt_to_keep = options.get("max_ckpt_to_keep")
    assert trainer.handler.load_checkpoint() == steps
    found = []
    for step in range(steps + 1, steps + 4):
        with counted(root) as calls:
            trainer.handler.save_checkpoint(step)
            trainer.handler.finish()
        found.append(kinds(calls))
    return found


@pytest.mark.parametrize("policy", ["all", "every"])
def test_a_save_makes_as_many_file_calls_however_many_steps_stay(tmp_path: Path, policy: str) -> None:
    few = calls_of_saves(tmp_path / "few", 5, POLICIES[policy])
    many = calls_of_saves(tmp_path / "many", 200, POLICIES[policy])
    # The first save of a process lists what a killed save may have left.
    assert many[1:] == few[1:]
    assert many[0] == few[0]


def calls_of_a_start(root: Path, steps: int) -> FileCalls:
    run_of(root, steps)
    trainer = Trainer(root)
    with counted(root) as calls:
        assert trainer.handler.load_checkpoint() == steps
    return calls


def test_a_start_reads_the_manifest_of_each_step_once(tmp_path: Path) -> None:
    """And looks at the files of the newest good step alone."""
    few, many = (calls_of_a_start(tmp_path / f"{steps}", steps) for steps in (5, 200))
    opens, stats = (
        sum(getattr(many, name).values()) - sum(getattr(few, name).values()) for name in ("opens", "stats")
    )
    assert opens == 195
    assert stats <= 3 * 195
    assert sum(many.listings.values()) == sum(few.listings.values())


# --- other processes ---


def saves_again(other: Trainer, root: Path) -> None:
    other.handler.save_checkpoint(2)


def removes_and_saves_again(other: Trainer, root: Path) -> None:
    shutil.rmtree(root / "global_step_2")
    other.handler.save_checkpoint(2)


def saves_twice(other: Trainer, root: Path) -> None:
    other.handler.save_checkpoint(2)
    other.handler.save_checkpoint(2)


def saves_another(other: Trainer, root: Path) -> None:
    other.handler.save_checkpoint(9)


@pytest.mark.parametrize("inode", ["its own", "of the folder before", "the same for all"])
@pytest.mark.parametrize("does", [saves_again, removes_and_saves_again, saves_twice, saves_another])
def test_what_another_process_has_saved_counts_as_newer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, does: Callable[[Trainer, Path], None], inode: str
) -> None:
    """Also where the new folder of a name cannot be told from the old one by the listing of the root."""
    native = Shelf._inodes
    if inode != "its own":

        def inodes(shelf: Shelf) -> dict[str, int]:
            return {name: 7 if inode.startswith("the same") else hash(name) | 1 for name in native(shelf)}

        monkeypatch.setattr(Shelf, "_inodes", inodes)
    run_of(tmp_path, 4)
    trainer, other = Trainer(tmp_path), Trainer(tmp_path)
    trainer.handler.save_checkpoint(5)
    for path in tmp_path.glob("*/manifest.json"):
        os.utime(path, (0, 0))
    trainer.handler.save_checkpoint(6)
    does(other, tmp_path)
    newest = max(step.manifest.order for step in store.steps_in(tmp_path) if step.manifest is not None)
    trainer.handler.save_checkpoint(7)
    assert manifest.read(tmp_path / "global_step_7").order == newest + 1
    # Of the two that stay, one is the other process's.
    trainer.handler.max_ckpt_to_keep = 2
    trainer.handler.save_checkpoint(8)
    trainer.handler.finish()
    assert {step.step for step in store.steps_in(tmp_path)} == {7, 8}


def test_what_another_process_has_removed_is_not_counted(tmp_path: Path) -> None:
    run_of(tmp_path, 4)
    trainer = Trainer(tmp_path, max_ckpt_to_keep=3)
    trainer.handler.load_checkpoint()
    for step in (3, 4):
        shutil.rmtree(tmp_path / f"global_step_{step}")
    trainer.handler.save_checkpoint(5)
    trainer.handler.finish()
    assert {step.step for step in store.steps_in(tmp_path)} == {1, 2, 5}


@pytest.mark.parametrize("when", ["of all", "of the oldest"])
def test_what_another_process_has_pinned_stays(tmp_path: Path, when: str) -> None:
    run_of(tmp_path, 6)
    trainer = Trainer(tmp_path, preserve=PreservationPolicy(last=2, every=3))
    trainer.handler.load_checkpoint()
    pinned = {2, 3, 6} if when == "of all" else {1}
    for step in pinned:
        store.pin(tmp_path / f"global_step_{step}")
    trainer.handler.save_checkpoint(7)
    trainer.handler.finish()
    # A pinned step is not counted among the last two.
    last = {5, 7} if 6 in pinned else {6, 7}
    assert {step.step for step in store.steps_in(tmp_path)} == {3, 6} | pinned | last


@pytest.mark.parametrize("keep", [1, 2])
def test_a_step_that_was_damaged_since_the_last_save_is_no_good_step(
    tmp_path: Path, keep: int, caplog
) -> None:
    run_of(tmp_path, 4)
    trainer = Trainer(tmp_path)
    trainer.handler.load_checkpoint()
    trainer.handler.save_checkpoint(5)
    (tmp_path / "global_step_4" / "data_0.pt").unlink()
    (tmp_path / "global_step_2" / "manifest.json").write_text("{")
    trainer.handler.max_ckpt_to_keep = keep + 1
    trainer.handler.save_checkpoint(6)
    trainer.handler.finish()
    # Step 2, whose manifest is damaged, is left alone.
    assert {step.step for step in store.steps_in(tmp_path)} == {2, 5, 6} | ({3, 4} if keep == 2 else set())
    trainer.handler.save_checkpoint(7)
    assert "global_step_2 (damaged" in caplog.text


# --- loads of several ranks ---


def loaded(api: Any, root: Path, verify: bool) -> dict[str, int]:
    """How often a rank opens each file of the weights of the step that it loads."""
    model = torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(3)])
    fully_shard(model)
    trainer = Trainer(root, model, verify=verify)
    trainer.train()
    trainer.handler.save_checkpoint(1)
    state = trainer.state()
    trainer.train()
    dist.barrier()
    with counted(root / "global_step_1" / "dist_ckpt") as calls:
        assert trainer.handler.load_checkpoint() == 1
    assert same(trainer.state(), state)
    return dict(calls.opens)


@pytest.mark.parametrize("world", [2, 4])
def test_a_handlers_load_opens_its_own_file_and_one_more(ranks, tmp_path: Path, world: int) -> None:
    first, *others = ranks(loaded, tmp_path, False, world=world)
    for rank, opens in enumerate(others, 1):
        assert opens == {"__0_0.distcp": 1, f"__{rank}_0.distcp": 1}
    assert first.pop("__0_0.distcp") == 1
    # The first rank reads the small files for all.
    assert set(first) == {".metadata", "common.pt", "metadata.json"}


def test_checksums_are_compared_by_one_rank_for_each_file(ranks, tmp_path: Path) -> None:
    for rank, opens in enumerate(ranks(loaded, tmp_path, True, world=2)):
        assert opens[f"__{rank}_0.distcp"] == 2
        assert opens["__0_0.distcp"] == 2 - rank
