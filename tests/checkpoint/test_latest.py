"""The newest step as verl's trainers look for it: of parts, with a tracker that they write themselves."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from damaging import flip
from trainer import Trainer

from torch_dcp_backport.checkpoint import find_latest_ckpt_path
from torch_dcp_backport.checkpoint._src import manifest, store
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


@pytest.mark.parametrize("what", ["the steps", "a part"])
def test_steps_that_cannot_be_listed_are_no_reason_to_begin_at_0(
    tmp_path: Path, monkeypatch, what: str
) -> None:
    """A disk elsewhere may be away for a moment."""
    for step in (1, 2):
        saved(tmp_path, step, "actor", "critic")
    if what == "a part":
        (tmp_path / "global_step_2" / "critic" / "manifest.json").unlink()
    native = Path.iterdir

    def refuse(path: Path) -> Iterator[Path]:
        is_step = path.parent == tmp_path
        if is_step if what == "the steps" else path == tmp_path / "global_step_2" / "critic":
            raise OSError(errno.EIO, "Input/output error", str(path))
        return native(path)

    monkeypatch.setattr(Path, "iterdir", refuse)
    if what == "a part":
        assert latest(tmp_path) == 1
        (tmp_path / "global_step_1" / "critic" / "manifest.json").write_bytes(b"")
    with pytest.raises(CheckpointingException, match=r"global_step_2.*: cannot be listed: Input/output"):
        find_latest_ckpt_path(tmp_path)


@pytest.mark.parametrize("kind", ["tmp", "off", "old", "was"])
def test_what_a_killed_writer_left_in_a_step_is_no_part(tmp_path: Path, kind: str) -> None:
    saved(tmp_path, 1, "actor", "critic")
    saved(tmp_path, 2, "actor", "critic", tracked=False)
    saved(tmp_path, 3, "actor")
    actor = tmp_path / "global_step_3" / "actor"
    actor.rename(actor.with_name(f".actor.{kind}-00000000"))
    (tmp_path / store.TRACKER).write_text("garbled")
    assert latest(tmp_path) == 2
    # Both of its parts, one of which lost its name when it was replaced.
    saved(tmp_path, 3, "critic", tracked=False)
    assert latest(tmp_path) == (3 if kind == "was" else 2)
    Trainer(tmp_path).manager.load_checkpoint(actor if kind == "was" else actor.with_name("critic"))


def test_a_step_that_is_passed_over_is_told(tmp_path: Path, caplog) -> None:
    trainer = Trainer(tmp_path)
    for step in (1, 2):
        trainer.handler.save_checkpoint(step)
    (tmp_path / "global_step_2" / "data_0.pt").unlink()
    assert latest(tmp_path) == 1
    assert "global_step_2: data_0.pt: No such file or directory; going on from step 1" in caplog.text


def test_a_run_that_starts_from_another_one_s_step(tmp_path: Path) -> None:
    """As verl's "auto" with a path; but a restart goes on from what the run itself saved."""
    origin = tmp_path / "origin" / "global_step_4"
    Trainer(tmp_path / "origin").handler.save_checkpoint(4)
    trainer = Trainer(tmp_path / "run", resume_from_path=origin)
    assert trainer.handler.load_checkpoint() == 4
    trainer.handler.save_checkpoint(5)
    assert Trainer(tmp_path / "run", resume_from_path=origin).handler.load_checkpoint() == 5
    flip(origin / "manifest.json")
    with pytest.raises(CheckpointingException, match=r"manifest\.json"):
        Trainer(tmp_path / "another", resume_from_path=origin).handler.load_checkpoint()


def test_what_current_verl_s_tools_look_for(tmp_path: Path) -> None:
    facts = {"r": 8, "lora_alpha": 16, "task_type": "CAUSAL_LM"}
    folder = Trainer(tmp_path, lora_train_meta=facts).handler.save_checkpoint(1)
    assert json.loads((folder / "lora_train_meta.json").read_text()) == facts
    assert "lora_train_meta.json" in manifest.read(folder).files
