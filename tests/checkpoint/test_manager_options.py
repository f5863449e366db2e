"""Options that cannot be, reservations, and small functions."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from trainer import Loader, Trainer

from torch_dcp_backport.checkpoint import (
    CheckpointHandler,
    extract_step,
    find_latest_ckpt_path,
    get_checkpoint_tracker_filename,
    should_save_ckpt_esi,
    store,
)
from torch_dcp_backport.checkpoint.expiry import EXPIRY
from torch_dcp_backport.dist_checkpointing import CheckpointingException


@pytest.mark.parametrize(
    "options, text",
    [
        ({"resume_mode": "always"}, "expected one of disable, auto, resume_path"),
        ({"resume_mode": "resume_path"}, "needs resume_from_path"),
        ({"on_data": "guess"}, "expected error or restart"),
        ({"max_ckpt_to_keep": 0}, "keep at least 1"),
        ({"default_hdfs_dir": "hdfs://x"}, "not supported yet"),
        ({"mode": "RAY"}, "only SPMD"),
    ],
)
def test_an_option_that_cannot_be(tmp_path: Path, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        CheckpointHandler(None, Loader(), default_local_dir=tmp_path, **options)


def test_a_loader_without_a_state_is_refused_unless_asked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="its data would start from the beginning"):
        CheckpointHandler(None, [1, 2], default_local_dir=tmp_path)
    CheckpointHandler(None, [1, 2], default_local_dir=tmp_path, on_data="restart")


@pytest.mark.parametrize("config", [{"save_contents": ["modle"]}, {"load_contents": "hf_model"}])
def test_contents_that_are_not_offered(tmp_path: Path, config: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="is not offered; there are model, optimizer, extra"):
        Trainer(tmp_path, config=config)


def test_an_empty_root_and_disable_start_at_0(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path / "new")
    assert trainer.handler.load_checkpoint() == 0
    trainer.handler.save_checkpoint(4)
    assert Trainer(tmp_path / "new", resume_mode="disable").handler.load_checkpoint() == 0
    assert Trainer(tmp_path / "new").handler.load_checkpoint() == 4


@pytest.mark.parametrize("tracker", ["9", "3", "four", None])
def test_the_tracker_is_not_believed(tmp_path: Path, tracker: str | None) -> None:
    trainer = Trainer(tmp_path)
    for step in (3, 4):
        trainer.handler.save_checkpoint(step)
    path = Path(get_checkpoint_tracker_filename(tmp_path))
    assert path.read_text() == "4"
    path.unlink()
    if tracker is not None:
        path.write_text(tracker)
    assert Trainer(tmp_path).handler.load_checkpoint() == 4
    assert find_latest_ckpt_path(tmp_path) == str(tmp_path / "global_step_4")


def test_a_path_names_its_step(tmp_path: Path) -> None:
    assert extract_step("runs/global_step_12/actor") == 12
    with pytest.raises(CheckpointingException, match="no global_step_N"):
        extract_step("runs/12")
    assert find_latest_ckpt_path(None) is None
    assert find_latest_ckpt_path(tmp_path) is None


@pytest.mark.parametrize("name", EXPIRY)
def test_a_reservation_that_ends(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not should_save_ckpt_esi(100)
    monkeypatch.setenv(name, str(time.time() + 300))
    assert should_save_ckpt_esi(250)
    assert not should_save_ckpt_esi(200)
    assert should_save_ckpt_esi(200, redundant_time=60)
    monkeypatch.setenv(name, str(time.time() - 1))
    assert not should_save_ckpt_esi(250)
    monkeypatch.setenv(name, "soon")
    assert not should_save_ckpt_esi(250)


def test_a_root_whose_name_is_that_of_a_draft_is_a_root(tmp_path: Path) -> None:
    root = tmp_path / ".runs.tmp-12345678"
    trainer = Trainer(root)
    trainer.handler.save_checkpoint(1)
    trainer.manager.save_checkpoint(root / "alone", global_step=2)
    assert store.examined(root / "alone", 2).fault == ""
    assert {path.name for path in root.iterdir()} == {"global_step_1", "alone", store.TRACKER}
    assert Trainer(root).handler.load_checkpoint() == 1
