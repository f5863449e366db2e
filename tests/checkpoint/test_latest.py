"""The newest step as verl's trainers look for it: of parts, with a tracker that they write themselves."""

from __future__ import annotations

from pathlib import Path

import pytest
from damaging import flip
from trainer import Trainer

from torch_dcp_backport.checkpoint import find_latest_ckpt_path, store
from torch_dcp_backport.dist_checkpointing import CheckpointingException


def saved(root: Path, step: int, *parts: str, tracked: bool = True) -> None:
    trainer = Trainer(root)
    for part in parts:
        trainer.manager.save_checkpoint(root / f"global_step_{step}" / part, global_step=step)
    if tracked:
        (root / store.TRACKER).write_text(str(step))


def latest(root: Path) -> int:
    found = find_latest_ckpt_path(root)
    assert found is not None
    return int(found.rpartition("_")[2])


def test_a_step_that_was_cut_short_between_its_parts_is_none(tmp_path: Path, caplog) -> None:
    saved(tmp_path, 1, "actor", "critic")
    saved(tmp_path, 2, "actor", "critic")
    saved(tmp_path, 3, "actor", tracked=False)
    # All there, but the trainer had more to write.
    saved(tmp_path, 4, "actor", "critic", tracked=False)
    assert latest(tmp_path) == 2
    for tracker in ("", "7", "3"):
        (tmp_path / store.TRACKER).write_text(tracker)
        assert latest(tmp_path) == (3 if tracker == "3" else 4)
    assert "going on from step 4" in caplog.text


def test_a_part_that_is_damaged(tmp_path: Path) -> None:
    for step in (1, 2):
        saved(tmp_path, step, "actor", "critic")
    flip(tmp_path / "global_step_2" / "critic" / "manifest.json")
    assert latest(tmp_path) == 1
    (tmp_path / "global_step_1" / "actor" / "dist_ckpt" / ".metadata").unlink()
    with pytest.raises(
        CheckpointingException, match=r"no step in .* is good: .*critic.*; .*actor: dist_ckpt"
    ):
        find_latest_ckpt_path(tmp_path)


def test_what_retention_left_is_no_step(tmp_path: Path) -> None:
    (tmp_path / "global_step_1").mkdir()
    (tmp_path / "global_step_1" / "data.pt").write_bytes(b"x")
    assert find_latest_ckpt_path(tmp_path) is None


@pytest.mark.parametrize("part", ["actor", "."])
def test_steps_of_verls_own_manager_are_never_passed_over_for_step_0(tmp_path: Path, part: str) -> None:
    folder = tmp_path / "global_step_5" / part
    folder.mkdir(parents=True)
    (folder / "model_world_size_2_rank_0.pt").write_bytes(b"x")
    (tmp_path / store.TRACKER).write_text("5")
    assert latest(tmp_path) == 5
    (tmp_path / store.TRACKER).write_text("6")
    with pytest.raises(CheckpointingException, match="it has no manifest, and the tracker does not name it"):
        find_latest_ckpt_path(tmp_path)
