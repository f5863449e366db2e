"""A clean-up that is killed, too: what was complete comes back, what is nobody's goes; a load needs none."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import dying
import pytest
from trainer import Trainer

from torch_dcp_backport.checkpoint import PreservationPolicy
from torch_dcp_backport.checkpoint._src import retention, store
from torch_dcp_backport.dist_checkpointing import CheckpointingException
from torch_dcp_backport.publish import disk


def pruned(root: Path) -> None:
    assert retention.prune(root, PreservationPolicy(2), lambda verdict: None) == []


def killed_between_two_renames(root: Path) -> Trainer:
    """Save steps 1 and 2, and 2 again in a process that is killed when it has hidden the former step 2."""
    trainer = Trainer(root)
    for step in (1, 2):
        trainer.train(step)
        trainer.handler.save_checkpoint(step)
    child = os.fork()
    if not child:

        def die(name: str) -> None:
            if name == "rename the draft":
                os._exit(9)

        disk.on_step = die
        try:
            trainer.handler.save_checkpoint(2)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert len(list(root.glob(".global_step_2.was-*"))) == 1
    return trainer


@pytest.mark.parametrize("work", ["prune", "a save"])
def test_a_clean_up_that_is_killed_at_every_step(tmp_path: Path, work: str) -> None:
    total = limit = -1
    while total == limit:
        limit += 1
        root = tmp_path / str(limit)
        killed_between_two_renames(root)

        def clean(begin: Callable[[], None], root: Path = root) -> None:
            trainer = Trainer(root)
            begin()
            if work == "prune":
                pruned(root)
            else:
                trainer.handler.save_checkpoint(2)

        total = dying.until(limit, clean)
        assert Trainer(root).handler.load_checkpoint() == 2
        pruned(root)
        assert not list(root.glob(".*"))
        assert Trainer(root).handler.load_checkpoint() == 2
    assert limit > 5


def test_an_empty_draft_without_an_owner_hides_no_step(tmp_path: Path) -> None:
    """As an earlier clean-up left it that was killed before its last step."""
    killed_between_two_renames(tmp_path)
    (draft,) = tmp_path.glob(".global_step_2.tmp-*")
    for path in sorted(draft.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    assert Trainer(tmp_path).handler.load_checkpoint() == 2
    pruned(tmp_path)
    assert not list(tmp_path.glob(".*"))
    assert Trainer(tmp_path).handler.load_checkpoint() == 2


def test_a_step_that_waits_for_a_writer_elsewhere_is_named_and_loaded(tmp_path: Path, caplog) -> None:
    killed_between_two_renames(tmp_path)
    (hidden,) = tmp_path.glob(".global_step_2.was-*")
    (draft,) = tmp_path.glob(".global_step_2.tmp-*")
    (draft / "owner.json").write_text('{"host": "elsewhere", "pid": 1, "started": "1"}')
    assert Trainer(tmp_path).handler.load_checkpoint() == 2
    assert f"{hidden} is read where it is" in caplog.text
    caplog.clear()
    pruned(tmp_path)
    (text,) = {text for text in caplog.messages if hidden.name in text}
    assert f"{tmp_path / 'global_step_2'} is no step" in text
    assert draft.name in text


def test_a_draft_that_cannot_be_removed_now_is_removed_later(tmp_path: Path, monkeypatch) -> None:
    trainer = Trainer(tmp_path)
    trainer.handler.save_checkpoint(1)

    def refuse(name: str) -> None:
        if name in ("write manifest.json", "remove data_0.pt"):
            raise OSError(errno.EBUSY, "Device or resource busy", name)

    monkeypatch.setattr(disk, "on_step", refuse)
    native = shutil.rmtree

    def rmtree(path: Path, ignore_errors: bool = False) -> None:
        if path.name != "data_0.pt":
            native(path, ignore_errors)

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    with pytest.raises(CheckpointingException):
        trainer.handler.save_checkpoint(2)
    monkeypatch.undo()
    (left,) = tmp_path.glob(".*")
    assert {path.name for path in left.iterdir()} == {"data_0.pt", "owner.json"}
    # Its owner is this process, which is alive.
    assert Trainer(tmp_path).handler.load_checkpoint() == 1
    pruned(tmp_path)
    assert not list(tmp_path.glob(".*"))


def test_a_root_that_goes_while_it_is_cleaned(tmp_path: Path, monkeypatch) -> None:
    """The last step of a path below was removed: retention removes its empty folders."""
    root, below = tmp_path / "root", Path("actor")
    trainer = Trainer(root)
    for step in (1, 2):
        trainer.manager.save_checkpoint(root / f"global_step_{step}" / below)
    native = os.path.isdir

    def isdir(path: str) -> bool:
        is_there = native(path)
        if Path(path).name == "global_step_1":
            shutil.rmtree(path, ignore_errors=True)
        return is_there

    monkeypatch.setattr(store.os.path, "isdir", isdir)
    assert store.Shelf(root, below).clean() == []
    assert store.clean(root / "nowhere") == []


def test_an_error_does_not_say_that_there_are_no_steps_where_they_cannot_be_listed(
    tmp_path: Path, monkeypatch
) -> None:
    root = tmp_path / "root"
    trainer = Trainer(root)
    trainer.handler.save_checkpoint(1)
    native = os.scandir

    def refuse(path: object = ".") -> object:
        if path == root:
            raise OSError(errno.EIO, "Input/output error", str(path))
        return native(path)  # type: ignore[call-overload]

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(CheckpointingException) as caught:
        trainer.handler.save_checkpoint(2)
    assert f"step 2 was not saved, and the steps in {root} could not be listed" in str(caught.value)
    assert "no other complete step" not in str(caught.value)
