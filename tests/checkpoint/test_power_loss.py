"""What is on disk at each moment of a save: a loss of power leaves a step whole, or without its name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from trainer import Trainer

from torch_dcp_backport.checkpoint._src import store
from torch_dcp_backport.publish import drafts


class Disk:
    """Which files and folders are on disk as they are."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.synced: dict[int, tuple[int, int]] = {}
        #: What had not been synced when it, or the folder that it is in, was renamed: by the new name.
        self.lost: dict[str, list[str]] = {}
        native = {name: getattr(os, name) for name in ("fsync", "rename", "replace")}

        def fsync(fd: int) -> None:
            stat = os.fstat(fd)
            self.synced[stat.st_ino] = stat.st_mtime_ns, stat.st_size
            native["fsync"](fd)

        def rename(source: Any, target: Any) -> None:
            self.lost[Path(target).name] = self.volatile(Path(source))
            native["rename"](source, target)

        for name, function in (("fsync", fsync), ("rename", rename), ("replace", rename)):
            monkeypatch.setattr(os, name, function)

    def volatile(self, path: Path) -> list[str]:
        """What a loss of power would take of a file or folder."""
        every = [path, *path.rglob("*")] if path.is_dir() else [path]
        stats = [(one, one.stat()) for one in every if one.name != drafts.OWNER]
        return [
            one.name
            for one, stat in stats
            if self.synced.get(stat.st_ino) != (stat.st_mtime_ns, stat.st_size)
        ]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_handler_names_what_is_on_disk(tmp_path: Path, monkeypatch, is_async: bool) -> None:
    disk = Disk(monkeypatch)
    root = tmp_path / "runs" / "a"
    trainer = Trainer(root, config={"async_save": is_async}, max_ckpt_to_keep=1)
    for step in (1, 2):
        trainer.handler.save_checkpoint(step)
        trainer.handler.finish()
        assert disk.lost[f"global_step_{step}"] == []
        assert disk.lost[store.TRACKER] == []
    assert {folder.stat().st_ino for folder in (root, root.parent, tmp_path)} <= set(disk.synced)


def test_a_manager_alone_puts_the_folders_above_on_disk(tmp_path: Path, monkeypatch) -> None:
    disk = Disk(monkeypatch)
    trainer = Trainer(tmp_path)
    final = tmp_path / "global_step_1" / "actor"
    trainer.manager.save_checkpoint(final, global_step=1)
    assert disk.lost["actor"] == []
    assert {tmp_path.stat().st_ino, final.parent.stat().st_ino} <= set(disk.synced)


def test_a_file_that_is_not_synced_is_seen(tmp_path: Path, monkeypatch) -> None:
    """The test of the test."""
    disk = Disk(monkeypatch)
    monkeypatch.setattr("torch_dcp_backport.publish.disk.sync_tree", lambda *args: None)
    Trainer(tmp_path).handler.save_checkpoint(1)
    assert "manifest.json" in disk.lost["global_step_1"]
