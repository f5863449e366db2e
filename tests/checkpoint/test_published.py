"""The order in which steps were published: by what is on disk now, whoever published, on any file system."""

from __future__ import annotations

import json
import logging
import os
import shutil
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from trainer import Trainer

from torch_dcp_backport.__main__ import main
from torch_dcp_backport.checkpoint._src import manifest, store
from torch_dcp_backport.checkpoint._src.manifest import BadManifest, Manifest, ManifestEntry
from torch_dcp_backport.dist_checkpointing import CheckpointingException
from torch_dcp_backport.publish import disk


def saved_again(root: Path, step: int, times: int = 1) -> None:
    """Have another process save a step again into a folder that gets the inode of the folder before.

    File systems give the number of a removed folder to the next, or do not: here they do.
    """
    folder = root / f"global_step_{step}"
    for _ in range(times):
        inode = folder.stat().st_ino
        aside = folder.rename(root / "aside")
        shutil.copytree(aside, folder)
        other = Trainer(root)
        other.train(7)
        other.handler.save_checkpoint(step)
        for path in aside.rglob("*"):
            if path.is_file():
                path.unlink()
        for path in sorted(folder.rglob("*")):
            target = aside / path.relative_to(folder)
            if path.is_dir():
                target.mkdir(exist_ok=True)
            else:
                path.rename(target)
        for path in sorted(folder.rglob("*"), reverse=True):
            path.rmdir()
        folder.rmdir()
        aside.rename(folder)
        assert folder.stat().st_ino == inode


def make_old(root: Path) -> None:
    """Make the manifests older than any file system's times are coarse."""
    for path in root.glob("*/manifest.json"):
        os.utime(path, (10**9, 10**9))


@pytest.mark.parametrize("is_old", [False, True], ids=["just now", "long ago"])
def test_a_step_that_another_process_saved_again_has_its_order_now(tmp_path: Path, is_old: bool) -> None:
    trainer = Trainer(tmp_path, max_ckpt_to_keep=3)
    for step in (1, 2, 3):
        trainer.handler.save_checkpoint(step)
        if is_old:
            make_old(tmp_path)
    trainer.handler.load_checkpoint()
    saved_again(tmp_path, 3, times=3)
    if is_old:
        make_old(tmp_path)
    trainer.train(4)
    trainer.handler.save_checkpoint(4)
    trainer.handler.finish()
    assert [step.step for step in store.steps_in(tmp_path)] == [4, 3, 2]
    assert Trainer(tmp_path).handler.load_checkpoint() == 4
    assert main(["checkpoint", "prune", str(tmp_path), "--keep", "1"]) == 0
    assert [step.step for step in store.steps_in(tmp_path)] == [4]


def test_another_writer_of_a_folder_with_the_same_inode_is_told(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, config={"async_save": True})
    trainer.handler.save_checkpoint(1)
    trainer.handler.finish()
    trainer.handler.save_checkpoint(1)
    saved_again(tmp_path, 1)
    theirs = (tmp_path / "global_step_1" / "manifest.json").read_bytes()
    with pytest.raises(CheckpointingException, match="another writer published global_step_1"):
        trainer.handler.finish()
    assert (tmp_path / "global_step_1" / "manifest.json").read_bytes() == theirs


def test_marks_and_links_to_files_are_no_other_writer(tmp_path: Path) -> None:
    """They change times, and no content: an upload's mark, a backup by hard links."""
    trainer = Trainer(tmp_path, config={"async_save": True})
    folder = trainer.handler.save_checkpoint(1)
    trainer.handler.finish()
    trainer.handler.save_checkpoint(1)
    (folder / "uploaded.txt").write_text("{}")
    os.link(folder / "manifest.json", tmp_path / "backup")
    os.utime(folder / "manifest.json", (10**9, 10**9))
    trainer.handler.finish()
    assert (tmp_path / "backup").read_bytes() != (folder / "manifest.json").read_bytes()


def test_a_step_that_is_saved_again_while_it_is_uploaded_is_no_failed_upload(
    tmp_path: Path, monkeypatch, caplog
) -> None:
    root = tmp_path / "root"
    trainer = Trainer(root, default_hdfs_dir=str(tmp_path / "far"))

    def other(name: str) -> None:
        if name.startswith("upload "):
            monkeypatch.setattr(disk, "on_step", None)
            saved_again(root, 1)

    monkeypatch.setattr(disk, "on_step", other)
    with caplog.at_level(logging.WARNING):
        trainer.handler.save_checkpoint(1)
        trainer.handler.finish()
    assert "it was removed, or saved again, before" in caplog.text


# Orders that no training comes to.


def with_order(folder: Path, order: int, step: int) -> None:
    content = json.loads(json.loads((folder / "manifest.json").read_text())["content"])
    text = json.dumps({**content, "order": order, "step": step})
    outer = {"crc32": zlib.crc32(text.encode()), "content": text}
    (folder / "manifest.json").write_text(json.dumps(outer))


@pytest.mark.parametrize("kind", ["a step", "a link", "another step's"])
@pytest.mark.parametrize("order", [2**53, 2**53 + 1, 2**60, 10**4298])
def test_a_made_up_order_keeps_no_step_from_being_saved(tmp_path: Path, order: int, kind: str) -> None:
    root = tmp_path / "root"
    trainer = Trainer(root, max_ckpt_to_keep=2)
    trainer.handler.save_checkpoint(1)
    folder = trainer.handler.save_checkpoint(7)
    with_order(folder, order, 1 if kind == "another step's" else 7)
    if kind == "a link":
        folder.rename(tmp_path / "elsewhere")
        folder.symlink_to(tmp_path / "elsewhere")
    fresh = Trainer(root, max_ckpt_to_keep=2)
    assert fresh.handler.load_checkpoint() == 1
    for step in (8, 9, 10):
        fresh.handler.save_checkpoint(step)
        fresh.handler.finish()
        assert Trainer(root).handler.load_checkpoint() == step
    assert folder.exists()


def test_the_order_of_another_step_is_not_followed(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    trainer.handler.save_checkpoint(1)
    with_order(trainer.handler.save_checkpoint(7), 2**53 - 1, 1)
    folder = Trainer(tmp_path).handler.save_checkpoint(8)
    assert manifest.read(folder).order == 2


def test_a_step_that_is_a_link_is_followed_by_later_steps(tmp_path: Path) -> None:
    """It may be resumed from, so what is published after it must be newer."""
    root = tmp_path / "root"
    trainer = Trainer(root)
    for step in (5, 10):
        trainer.handler.save_checkpoint(step)
    (root / "global_step_10").rename(tmp_path / "elsewhere")
    (root / "global_step_10").symlink_to(tmp_path / "elsewhere")
    Trainer(root).handler.save_checkpoint(6)
    assert Trainer(root).handler.load_checkpoint() == 6


def after_the_last(api: Any, root: Path, is_async: bool) -> str:
    trainer = Trainer(root, config={"async_save": is_async})
    folder = trainer.handler.save_checkpoint(1)
    trainer.handler.finish()
    dist.barrier()
    if dist.get_rank() == 0:
        with_order(folder, 2**53 - 1, 1)
    dist.barrier()
    with pytest.raises(CheckpointingException) as caught:  # noqa: PT012
        trainer.handler.save_checkpoint(2)
        trainer.handler.finish()
    assert Trainer(root).handler.load_checkpoint() == 1
    dist.barrier()
    if dist.get_rank() == 0:
        folder.rename(root.parent / "away")
    dist.barrier()
    trainer.handler.save_checkpoint(2)
    trainer.handler.finish()
    assert Trainer(root).handler.load_checkpoint() == 2
    return str(caught.value)


@pytest.mark.parametrize("is_async", [False, True])
def test_after_the_last_order_a_save_is_refused_by_name(ranks, tmp_path: Path, is_async: bool) -> None:
    """It would be written, and never be read again."""
    (text,) = set(ranks(after_the_last, tmp_path / "root", is_async, world=2))
    assert f"{tmp_path / 'root' / 'global_step_1'} has order {2**53 - 1}, after which there is none" in text
    assert "move the folder away" in text
    assert "step 2 was not saved; the newest complete step is 1" in text


NUMBERS = st.one_of(st.integers(0, 100), st.integers(2**53 - 2, 2**53 + 2))
NAMES = st.one_of(st.sampled_from(["x", "a/b", "\udcff", "", "/x", "../x"]), st.text(max_size=9))


@given(NUMBERS, st.dictionaries(NAMES, NUMBERS, max_size=3))
def test_what_is_written_is_read(tmp_path_factory, order: int, sizes: dict[str, int]) -> None:
    folder = tmp_path_factory.mktemp("step")
    content = Manifest(3, 2, 1.5, order, {name: ManifestEntry(size, 7) for name, size in sizes.items()})
    try:
        manifest.write(folder, content)
    except ValueError:
        assert not list(folder.iterdir())
        return
    assert manifest.read(folder) == content


def test_a_manifest_that_is_too_large_to_be_read_is_not_written(tmp_path: Path) -> None:
    entries = {f"{number:0250}": ManifestEntry(1, 1) for number in range(270_000)}
    with pytest.raises(ValueError, match=r"could not be loaded again: manifest\.json has \d+ bytes"):
        manifest.write(tmp_path, Manifest(1, 1, 0.0, 1, entries))
    assert not list(tmp_path.iterdir())
    with pytest.raises(BadManifest, match="are the most"):
        manifest.parsed(b" " * (disk.MOST_SMALL + 1))
