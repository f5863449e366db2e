"""`del_local_after_load`, verl's option: what a load has brought goes after it, and nothing else."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from trainer import Trainer

from torch_dcp_backport.checkpoint import FSDPCheckpointManager
from torch_dcp_backport.checkpoint._src import store
from torch_dcp_backport.dist_checkpointing import CheckpointingException
from torch_dcp_backport.publish import disk


class Meddling(FSDPCheckpointManager):
    """During its load the user does something."""

    def __init__(self, model: Any, meanwhile: Callable[[Path], None]) -> None:
        super().__init__(model, checkpoint_config={"load_contents": ["model"]})
        self.meanwhile = meanwhile

    def read(self, folder: Path) -> None:
        super().read(folder)
        self.meanwhile(folder)


@pytest.fixture
def stored(tmp_path: Path) -> tuple[Path, str]:
    """A folder that is saved, and its copy in a store."""
    folder, url = tmp_path / "run" / "global_step_1" / "actor", str(tmp_path / "store" / "actor")
    trainer = Trainer(tmp_path)
    trainer.manager.save_checkpoint(folder, url, 1)
    trainer.manager.finish()
    return folder, url


def test_what_was_brought_is_removed_after_the_load(stored: tuple[Path, str], tmp_path: Path) -> None:
    folder, url = stored
    trainer = Trainer(tmp_path)
    trainer.manager.load_checkpoint(folder, url, del_local_after_load=True)
    assert folder.is_dir(), "it was here before the load"
    shutil.rmtree(folder)
    trainer.manager.load_checkpoint(folder, url)
    assert folder.is_dir()
    shutil.rmtree(folder)
    expected = [parameter.clone() for parameter in trainer.model.parameters()]
    with torch.no_grad():
        trainer.model[0].weight.zero_()
    trainer.manager.load_checkpoint(folder, url, del_local_after_load=True)
    assert all(map(torch.equal, expected, trainer.model.parameters()))
    assert not os.path.lexists(folder)
    assert os.listdir(folder.parent) == []


def put_a_file(folder: Path) -> None:
    (folder / "mine.txt").write_text("mine")


def save_again(folder: Path) -> None:
    Trainer(folder.parent).manager.save_checkpoint(folder, None, 1)


def pin(folder: Path) -> None:
    store.pin(folder)


def put_a_folder(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()
    put_a_file(folder)


@pytest.mark.parametrize(
    ("meanwhile", "left"),
    [
        (put_a_file, {"mine.txt"}),
        (put_a_folder, {"mine.txt"}),
        (save_again, {"dist_ckpt", "manifest.json"}),
        (pin, {"dist_ckpt", "manifest.json", "pinned.txt", "uploaded.txt"}),
    ],
)
def test_what_was_not_brought_stays(
    stored: tuple[Path, str], meanwhile: Callable[[Path], None], left: set[str]
) -> None:
    folder, url = stored
    shutil.rmtree(folder)
    Meddling(Trainer(folder.parent).model, meanwhile).load_checkpoint(folder, url, del_local_after_load=True)
    assert {path.name for path in folder.iterdir()} == left


def test_a_pin_in_the_last_moment_is_seen(stored: tuple[Path, str], monkeypatch) -> None:
    folder, url = stored
    shutil.rmtree(folder)

    def on_step(name: str) -> None:
        if name == "rename actor away":
            store.pin(folder)

    monkeypatch.setattr(disk, "on_step", on_step)
    Trainer(folder.parent).manager.load_checkpoint(folder, url, del_local_after_load=True)
    assert store.is_pinned(folder)
    assert (folder / "manifest.json").is_file()


def test_a_save_in_the_last_moment_keeps_the_name_of_its_step(
    stored: tuple[Path, str], monkeypatch, caplog
) -> None:
    folder, url = stored
    shutil.rmtree(folder)

    def on_step(name: str) -> None:
        if name == "rename actor away":
            monkeypatch.setattr(disk, "on_step", None)
            save_again(folder)

    monkeypatch.setattr(disk, "on_step", on_step)
    Trainer(folder.parent).manager.load_checkpoint(folder, url, del_local_after_load=True)
    assert (folder / "manifest.json").is_file()
    assert "is no longer what was to be removed, and is not removed" in caplog.text
    assert "no longer a step" not in caplog.text


def test_nothing_is_removed_where_the_load_fails(stored: tuple[Path, str], tmp_path: Path) -> None:
    folder, url = stored
    shutil.rmtree(folder)
    other = Trainer(tmp_path, torch.nn.Sequential(torch.nn.Linear(3, 3)))
    with pytest.raises(CheckpointingException):
        other.manager.load_checkpoint(folder, url, del_local_after_load=True)
    assert (folder / "manifest.json").is_file()


def test_another_step_is_not_replaced(stored: tuple[Path, str], tmp_path: Path) -> None:
    folder, url = stored
    Trainer(tmp_path).manager.save_checkpoint(folder, None, 7)
    next((folder / "dist_ckpt").glob("*.distcp")).unlink()
    with pytest.raises(CheckpointingException, match=r"is of step 7, and .* of step 1: move the folder away"):
        Trainer(tmp_path).manager.load_checkpoint(folder, url, del_local_after_load=True)
    assert (folder / "manifest.json").is_file()


@pytest.mark.parametrize("value", ["False", "True", None, 2])
def test_it_is_on_or_off(stored: tuple[Path, str], tmp_path: Path, value: Any) -> None:
    folder, url = stored
    with pytest.raises(CheckpointingException, match=r"del_local_after_load=.* expected True or False"):
        Trainer(tmp_path).manager.load_checkpoint(folder, url, del_local_after_load=value)
    assert folder.is_dir()


def test_a_url_is_no_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointingException, match=r"local_path=hdfs://there: .* give a URL as hdfs_path"):
        Trainer(tmp_path).manager.load_checkpoint("hdfs://there")


def on_ranks(api: Any, folder: Path, url: str) -> bool:
    trainer = Trainer(folder.parent)
    trainer.manager.load_checkpoint(folder, url, del_local_after_load=True)
    dist.barrier()
    return os.path.lexists(folder)


def test_on_ranks(ranks, stored: tuple[Path, str]) -> None:
    folder, url = stored
    assert ranks(on_ranks, folder, url, world=2) == [True, True]
    shutil.rmtree(folder)
    assert ranks(on_ranks, folder, url, world=2) == [False, False]
