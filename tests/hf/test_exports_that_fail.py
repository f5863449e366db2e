"""Exports that meet one another, fail or die: a reader finds the old model, the new one or none."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

import pytest
from test_safetensors_files import NEW, TENSORS, data_of, exported, infos, same

from torch_dcp_backport import hf
from torch_dcp_backport.hf._src.files import ExportDraft
from torch_dcp_backport.hf._src.format import read_header
from torch_dcp_backport.transfer import TransferError
from torch_dcp_backport.transfer._src import call

OLD_CONFIG, NEW_CONFIG = {"model_type": "made"}, {"model_type": "made", "rope_theta": 1}


def draft_of(target: Path, file_bytes: int, config: dict[str, Any]) -> ExportDraft:
    draft = ExportDraft(target, True)
    draft.reserve(infos(NEW), file_bytes)
    draft.add("config.json", json.dumps(config).encode())
    draft.add("tokenizer.json", b"same")
    for key, value in NEW.items():
        draft.files.write(key, 0, memoryview(data_of(value)))
    draft.sync()
    return draft


def as_transformers_reads(folder: Path) -> Optional[tuple[dict[str, Any], bool]]:
    """(config, whether the weights are the new ones); None where there is no model."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if not (folder / "config.json").exists() or not (single.exists() or index.exists()):
        return None
    names = ["model.safetensors"]
    if not single.exists():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    found = {}
    for name in names:
        for key, entry in read_header(folder / name).items():
            found[key] = (folder / name).read_bytes()[entry.start : entry.stop]
    assert set(found) == set(TENSORS)
    is_new = found == {key: data_of(value) for key, value in NEW.items()}
    assert is_new or found == {key: data_of(value) for key, value in TENSORS.items()}
    return json.loads((folder / "config.json").read_text()), is_new


def before_each(monkeypatch: pytest.MonkeyPatch, look: Callable[[str], None]) -> None:
    for name in ("rename", "unlink", "rmdir"):
        step = getattr(os, name)

        def stepped(*args: Any, step: Any = step, name: str = name, **how: Any) -> None:
            look(name)
            step(*args, **how)

        monkeypatch.setattr(os, name, stepped)


@pytest.mark.parametrize("new_config", [OLD_CONFIG, NEW_CONFIG], ids=["same config", "other config"])
@pytest.mark.parametrize("new_files", [10, 10**9])
@pytest.mark.parametrize("old_files", [10, 10**9])
def test_whenever_it_dies_no_reader_takes_one_model_for_the_other(
    tmp_path, monkeypatch, old_files, new_files, new_config
):
    target, states = tmp_path / "m", []
    exported(target, TENSORS, old_files)
    (target / "config.json").write_text(json.dumps(OLD_CONFIG))
    (target / "tokenizer.json").write_text("same")
    draft = draft_of(target, new_files, new_config)
    with monkeypatch.context() as patch:
        before_each(patch, lambda _: states.append(as_transformers_reads(target)))
        draft.switch()
        draft.finish()
    assert as_transformers_reads(target) == (new_config, True)
    allowed = [(OLD_CONFIG, False), (new_config, True), *([None] if new_config != OLD_CONFIG else [])]
    assert all(state in allowed for state in states), states
    assert same(target, NEW)


@pytest.mark.parametrize("new_files", [10, 10**9])
@pytest.mark.parametrize("number", range(12))
def test_a_step_that_fails_leaves_the_folder_as_it_was_or_without_a_model(
    tmp_path, monkeypatch, new_files, number
):
    target, left = tmp_path / "m", [number]
    exported(target, TENSORS, 10)
    (target / "config.json").write_text(json.dumps(OLD_CONFIG))
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    draft = draft_of(target, new_files, NEW_CONFIG)

    def fail(name: str) -> None:
        left[0] -= 1
        if left[0] == -1 and name != "rmdir":
            raise OSError(5, "the disk is broken")

    has_switched = False
    with monkeypatch.context() as patch:
        before_each(patch, fail)
        try:
            draft.switch()
            has_switched = True
            draft.finish()
        except OSError:
            pass
    draft.discard()
    if not has_switched:
        assert {path.name: path.read_bytes() for path in target.iterdir()} == before
    assert as_transformers_reads(target) in [(OLD_CONFIG, False), (NEW_CONFIG, True), None]
    exported(target, NEW, new_files, overwrite=True)
    assert same(target, NEW)
    assert not (target / ".partial").exists()


@pytest.mark.parametrize("is_there", [False, True])
def test_the_lock_is_held_until_everything_is_in_its_place(tmp_path, is_there):
    target = tmp_path / "m"
    if is_there:
        exported(target, TENSORS, 10)
    first = draft_of(target, 10, OLD_CONFIG)
    first.switch()
    if is_there:
        with pytest.raises(BlockingIOError, match="another export"):
            ExportDraft(target, True)
    else:
        # It appeared at once, and may be replaced.
        exported(target, TENSORS, 10, overwrite=True)
    first.finish()
    assert same(target, NEW if is_there else TENSORS)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize("is_there", [False, True])
def test_an_export_that_was_overtaken_does_not_take_the_other_for_its_own(tmp_path, monkeypatch, is_there):
    target, flock, others = tmp_path / "m", fcntl.flock, [exported]
    if is_there:
        target.mkdir()

    def late(lock: int, how: int) -> None:
        while others:
            # As another process, while this one is on its way to the lock.
            shutil.rmtree(target, ignore_errors=True)
            others.pop()(target.parent / "other", TENSORS, 10)
            os.rename(target.parent / "other", target)
            if is_there:
                os.makedirs(target / ".partial")
                os.close(os.open(target / ".partial" / ".lock", os.O_CREAT))
        flock(lock, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises((BlockingIOError, FileExistsError)):
        ExportDraft(target, False)
    monkeypatch.undo()
    assert same(target, TENSORS)
    exported(target, NEW, 10, overwrite=True)
    assert same(target, NEW)


def test_a_folder_that_cannot_be_cleared_is_not_locked_for_ever(tmp_path, monkeypatch):
    target = tmp_path / "m"
    dead = draft_of(target, 10, OLD_CONFIG)
    os.close(dead.room._lock)

    def broken(*_: Any, **__: Any) -> None:
        raise OSError(5, "the disk is broken")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", broken)
        with pytest.raises(OSError, match="the disk is broken"):
            ExportDraft(target, True)
    exported(target, NEW, 10)
    assert same(target, NEW)


def test_weights_of_pickle_are_a_model_that_is_there(tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(FileExistsError, match=r"pytorch_model.bin; Export\(overwrite=True\)"):
        ExportDraft(tmp_path / "m", False)
    assert exported(tmp_path / "m", NEW, 10, overwrite=True) == ["pytorch_model.bin"]
    assert same(tmp_path / "m", NEW)


def test_what_is_in_the_way_is_an_error_before_anything_is_written(tmp_path):
    (tmp_path / ".m.partial").mkdir()
    (tmp_path / ".m.partial" / "notes").write_text("mine")
    with pytest.raises(FileExistsError, match="no export made it"):
        ExportDraft(tmp_path / "m", True)
    assert (tmp_path / ".m.partial" / "notes").read_text() == "mine"
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(NotADirectoryError, match="no folder"):
        ExportDraft(tmp_path / "link", True)
    exported(tmp_path / "n", TENSORS, 10)
    (tmp_path / "n" / "tokenizer.json").mkdir()
    draft = draft_of(tmp_path / "n", 10, OLD_CONFIG)
    with pytest.raises(IsADirectoryError, match=r"tokenizer.json is a folder"):
        draft.switch()
    draft.discard()
    (tmp_path / "n" / "tokenizer.json").rmdir()
    assert not hf.Folder(tmp_path / "n").problems
    assert same(tmp_path / "n", TENSORS)
    assert not list(tmp_path.glob("**/.n*"))


@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize("met", range(7))
def test_a_rank_that_is_gone_before_any_meeting_leaves_one_whole_model(tmp_path, monkeypatch, met, is_there):
    target, meetings, agree_on_mesh = tmp_path / "m", [], call.agree_on_mesh
    if is_there:
        exported(target, TENSORS, 10**9)
        (target / "config.json").write_text(json.dumps(OLD_CONFIG))

    def lonely(findings: Any, groups: Any, user_code: bool, *, so_far: str) -> Any:
        if len(meetings) == met:
            raise TransferError(f"{so_far}; no agreement with rank 1")
        meetings.append(so_far)
        return agree_on_mesh(findings, groups, user_code, so_far=so_far)

    monkeypatch.setattr(call, "agree_on_mesh", lonely)
    with pytest.raises(TransferError, match="no agreement") as caught:
        hf.save_state_dict(NEW, target, like=NEW_CONFIG, how=hf.Export(file_bytes=10, overwrite=True))
    found = as_transformers_reads(target)
    assert found == ((NEW_CONFIG, True) if met > 4 else (OLD_CONFIG, False) if is_there else None)
    assert ("nothing was changed" in str(caught.value)) == (found != (NEW_CONFIG, True))
    assert [path.name for path in tmp_path.iterdir()] == ["m"] * (found is not None)
    assert not (target / ".partial").exists()


@pytest.mark.parametrize("is_published", [False, True])
def test_what_died_beside_a_target_that_is_there_now_is_cleared_away(tmp_path, is_published):
    target = tmp_path / "m"
    dead = draft_of(target, 10, OLD_CONFIG)
    if is_published:
        dead.switch()
    else:
        target.mkdir()
    # One under way is left alone.
    exported(target, TENSORS, 10, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".m.partial", "m"]
    os.close(dead.room._lock)
    exported(target, NEW, 10, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    assert same(target, NEW)


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def unknown(*_: Any) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", unknown)
    exported(tmp_path / "m", TENSORS, 10)
    dead = ExportDraft(tmp_path / "m", True)
    with pytest.raises(BlockingIOError, match=r"\.partial is of an export .* or was killed: .* has no locks"):
        ExportDraft(tmp_path / "m", True)
    assert same(tmp_path / "m", TENSORS)
    os.close(dead.room._lock)
    shutil.rmtree(dead.room.path)
    exported(tmp_path / "m", NEW, 10, overwrite=True)
    assert same(tmp_path / "m", NEW)
    assert [path.name for path in tmp_path.glob("**/.*")] == []


def test_a_path_leads_where_the_system_says(tmp_path, monkeypatch):
    (tmp_path / "real" / "in").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real" / "in")
    exported(tmp_path / "link" / ".." / "out", TENSORS, 10)
    assert same(tmp_path / "real" / "out", TENSORS)
    # A link to the target itself stays one.
    exported(tmp_path / "link", TENSORS, 10)
    assert (tmp_path / "link").is_symlink()
    monkeypatch.chdir(tmp_path / "link")
    for name in (".", "../in"):
        exported(Path(name), NEW, 10, overwrite=True)
        assert same(tmp_path / "real" / "in", NEW)
    assert not list(tmp_path.glob("**/.*"))


def test_a_folder_with_the_name_of_a_file_is_no_older_model(tmp_path):
    kept = tmp_path / "m" / "model-00001-of-00002.safetensors"
    kept.mkdir(parents=True)
    assert exported(tmp_path / "m", TENSORS, 10**9) == []
    assert kept.is_dir()
    assert same(tmp_path / "m", TENSORS)


@pytest.mark.parametrize("answer", [None, errno.EOPNOTSUPP])
def test_a_system_that_cannot_reserve_room(tmp_path, monkeypatch, answer):
    def cannot(*_: Any) -> None:
        raise OSError(answer, "not supported")

    if answer is None:
        monkeypatch.delattr(os, "posix_fallocate")
    else:
        monkeypatch.setattr(os, "posix_fallocate", cannot)
    exported(tmp_path / "m", NEW, 10)
    assert same(tmp_path / "m", NEW)


@pytest.mark.parametrize("is_there", [False, True])
def test_a_file_system_that_cannot_sync_a_folder(tmp_path, monkeypatch, is_there):
    native = os.fsync

    def of_files_alone(number: int) -> None:
        if stat.S_ISDIR(os.fstat(number).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        native(number)

    if is_there:
        exported(tmp_path / "m", TENSORS, 10)
    monkeypatch.setattr(os, "fsync", of_files_alone)
    exported(tmp_path / "m", NEW, 10, overwrite=is_there)
    assert same(tmp_path / "m", NEW)
    assert not list(tmp_path.glob("**/.*"))
