"""With `on_failure="warn"` a failed save is an error in the log of every rank, and the training goes on."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from trainer import Trainer

from torch_dcp_backport.checkpoint import CheckpointHandler, FSDPCheckpointManager
from torch_dcp_backport.checkpoint._src import store
from torch_dcp_backport.dist_checkpointing import CheckpointingException
from torch_dcp_backport.publish import disk

GOES_ON = "the training goes on without it: "


class Texts(logging.Handler):
    """What a rank logs."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def fails(api: Any, root: Path, where: str, is_async: bool) -> list[str]:
    log = Texts()
    logger = logging.getLogger("torch_dcp_backport.checkpoint")
    logger.addHandler(log)
    trainer = Trainer(root, config={"async_save": is_async}, on_failure="warn")
    assert trainer.handler.save_checkpoint(1) == root / "global_step_1"
    assert trainer.handler.finish()

    def fail(name: str) -> None:
        if name.startswith(where):
            raise OSError(28, "No space left on device")

    if dist.get_rank() == (1 if where == "create" else 0):
        disk.on_step = fail
    try:
        saved = trainer.handler.save_checkpoint(2)
        # In the background it is found at the next call.
        assert saved is None or is_async
        assert trainer.handler.finish()
        assert trainer.handler.failed_saves == 1
        trainer.handler.save_checkpoint(3)
        if is_async:
            # The save after a failed one is begun.
            assert trainer.handler.save_checkpoint(4) is not None
            assert trainer.handler.failed_saves == 2
            assert trainer.handler.finish()
    finally:
        disk.on_step = None
    dist.barrier()
    assert trainer.handler.save_checkpoint(5) == root / "global_step_5"
    assert trainer.handler.finish()
    dist.barrier()
    logger.removeHandler(log)
    assert trainer.handler.failed_saves == 2 + is_async
    assert [step.step for step in store.steps_in(root)] == [5, 1]
    assert trainer.handler.load_checkpoint() == 5
    return [text for text in log.texts if text.startswith(GOES_ON)]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("where", ["create", "write manifest.json", "rename the draft"])
def test_a_save_that_fails_is_logged_on_every_rank_and_counted(
    ranks: Any, tmp_path: Path, where: str, is_async: bool
) -> None:
    said = ranks(fails, tmp_path, where, is_async, world=2)
    assert said[0] == said[1]
    assert len(said[0]) == 2 + is_async
    assert "No space left on device" in said[0][0]
    assert "step 2 was not saved; the newest complete step is 1" in said[0][0]


def raises(api: Any, root: Path) -> str:
    trainer = Trainer(root)
    trainer.handler.save_checkpoint(1)

    def fail(name: str) -> None:
        if name == "write manifest.json":
            raise OSError(28, "No space left on device")

    disk.on_step = fail
    try:
        with pytest.raises(CheckpointingException) as caught:
            trainer.handler.save_checkpoint(2)
    finally:
        disk.on_step = None
    assert trainer.handler.failed_saves == 0
    return str(caught.value)


def test_by_default_it_is_raised_on_every_rank(ranks: Any, tmp_path: Path) -> None:
    (text,) = set(ranks(raises, tmp_path, world=2))
    assert "No space left on device" in text


def differ(api: Any, root: Path, name: str, values: tuple[Any, Any], first: str) -> str:
    trainer = Trainer(root, **{name: values[dist.get_rank()]})
    calls = {"save": lambda: trainer.handler.save_checkpoint(1), "load": trainer.handler.load_checkpoint}
    with pytest.raises(CheckpointingException) as caught:
        calls[first]()
    assert not root.exists()
    return str(caught.value)


@pytest.mark.parametrize("first", ["save", "load"])
@pytest.mark.parametrize(
    ("name", "values"), [("on_failure", ("warn", "raise")), ("save_timeout", (5.0, None))]
)
def test_ranks_that_differ_in_an_option_are_refused(
    ranks: Any, tmp_path: Path, name: str, values: tuple[Any, Any], first: str
) -> None:
    (text,) = set(ranks(differ, tmp_path / "run", name, values, first, world=2))
    assert name in text
    assert str(values[0]) in text
    assert str(values[1]) in text


def test_an_unknown_outcome_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="on_failure='ignore': expected raise or warn"):
        Trainer(tmp_path, on_failure="ignore")


def test_a_failed_upload_is_an_error_in_the_log_too(tmp_path: Path, caplog) -> None:
    (tmp_path / "far").write_bytes(b"a file")
    trainer = Trainer(tmp_path / "run", default_hdfs_dir=str(tmp_path / "far"), on_failure="warn")
    trainer.handler.save_checkpoint(1)
    assert trainer.handler.finish()
    assert trainer.handler.save_checkpoint(2) is not None
    assert trainer.handler.finish()
    assert "an upload failed" in caplog.text


def test_a_training_goes_on_where_no_draft_can_be_made(tmp_path: Path) -> None:
    (tmp_path / "run").write_bytes(b"a file in the place of the root")
    trainer = Trainer(tmp_path / "run", on_failure="warn")
    assert trainer.handler.save_checkpoint(1) is None
    assert trainer.handler.failed_saves == 1
    assert trainer.handler.last_saved is None


# The working directory may be another when a part of a save is done.


def test_relative_paths_stay_where_they_were(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    trainer = Trainer(Path("run"), default_hdfs_dir="far", trash_dir="trash", max_ckpt_to_keep=1)
    monkeypatch.chdir(tmp_path / "elsewhere")
    for step in (1, 2):
        trainer.handler.save_checkpoint(step)
    trainer.handler.finish()
    assert (tmp_path / "far" / "global_step_2" / "manifest.json").is_file()
    assert len(list((tmp_path / "trash").iterdir())) == 1
    monkeypatch.chdir(tmp_path)
    manager = FSDPCheckpointManager(trainer.model, trainer.optimizer, checkpoint_config={"async_save": True})
    manager.save_checkpoint("own/global_step_1", hdfs_path="upload", global_step=1)
    monkeypatch.chdir(tmp_path / "elsewhere")
    manager.finish()
    assert (tmp_path / "own" / "global_step_1" / "manifest.json").is_file()
    assert (tmp_path / "upload" / "manifest.json").is_file()
    assert not list((tmp_path / "elsewhere").iterdir())
    fresh = CheckpointHandler(
        FSDPCheckpointManager(trainer.model, trainer.optimizer),
        default_local_dir=tmp_path / "new",
        default_hdfs_dir=os.path.relpath(tmp_path / "far"),
    )
    monkeypatch.chdir(tmp_path)
    assert fresh.load_checkpoint() == 2
