"""The publisher: at every step of it, and after every error, readers find the old target or the new one."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from torch_dcp_backport.publish import disk, drafts
from torch_dcp_backport.publish.drafts import (
    OWNER,
    Draft,
    Hidden,
    InRoom,
    Move,
    discarding,
    hidden_name,
    make_hidden,
    rename_all,
)


class Stopped(BaseException):
    """As Ctrl-C."""


def in_room(target: Path) -> tuple[Draft, Path]:
    draft = InRoom(target.with_name(".room"), target, lambda: None)
    return draft, draft.aside


def hidden(target: Path) -> tuple[Draft, Path]:
    folder, mark = make_hidden(target)
    return Hidden(folder, target, mark), hidden_name(target, "was")


KINDS = pytest.mark.parametrize("kind", [in_room, hidden])
Kind = Callable[[Path], tuple[Draft, Path]]


def old(root: Path) -> Path:
    target = root / "target"
    target.mkdir(parents=True)
    (target / "file").write_bytes(b"old")
    return target


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return old(tmp_path)


@pytest.fixture(autouse=True)
def no_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "on_step", None)


def begun(kind: Kind, target: Path) -> tuple[Draft, Path]:
    draft, aside = kind(target)
    (draft.folder / "below").mkdir()
    disk.write(draft.folder / "below" / "file", b"new")
    return draft, aside


def steps_of(monkeypatch: pytest.MonkeyPatch, work: Callable[[], object], limit: int) -> list[str]:
    """Do some work, which is stopped before its `limit`-th step; return the steps that it came to."""
    names: list[str] = []

    def step(name: str) -> None:
        if len(names) == limit:
            raise Stopped
        names.append(name)

    monkeypatch.setattr(disk, "on_step", step)
    with suppress(Stopped):
        work()
    monkeypatch.setattr(disk, "on_step", None)
    return names


@KINDS
def test_a_draft_that_is_stopped_at_any_step_leaves_the_old_target_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind
) -> None:
    for limit in range(100):
        target = old(tmp_path / str(limit))

        def publish(target: Path = target) -> None:
            draft, aside = begun(kind, target)
            with discarding(draft):
                draft.sync()
                draft.take_place(aside)
                disk.step("published")

        names = steps_of(monkeypatch, publish, limit)
        is_new = (target / "below" / "file").exists()
        assert (target / "file").exists() != is_new
        assert is_new == ("rename the draft" in names)
        if len(names) < limit:
            break
    assert len(names) < limit
    assert names[-1] == "published"


@KINDS
def test_a_rename_that_fails_leaves_the_target_as_it_was(
    target: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind
) -> None:
    draft, aside = begun(kind, target)
    native = os.rename

    def refuse(source: Path, to: Path) -> None:
        if source == draft.folder:
            raise OSError(5, "Input/output error")
        native(source, to)

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(OSError, match="Input/output error"):
        draft.take_place(aside)
    assert (target / "file").read_bytes() == b"old"
    assert not aside.exists()
    draft.discard()
    assert (target / "file").read_bytes() == b"old"


@KINDS
def test_a_draft_is_discarded_on_an_error_and_only_then(tmp_path: Path, target: Path, kind: Kind) -> None:
    draft, _ = begun(kind, target)
    with pytest.raises(Stopped), discarding(draft):
        raise Stopped
    assert os.listdir(tmp_path) == ["target"]
    draft, aside = begun(kind, target)
    with discarding(draft):
        draft.take_place(aside)
    assert (target / "below" / "file").read_bytes() == b"new"
    assert (aside / "file").read_bytes() == b"old"
    # What took its place is no draft.
    draft.discard()
    assert (target / "below" / "file").read_bytes() == b"new"


@KINDS
def test_a_new_target_needs_nothing_aside(tmp_path: Path, kind: Kind) -> None:
    draft, _ = begun(kind, tmp_path / "new")
    draft.take_place()
    assert (tmp_path / "new" / "below" / "file").read_bytes() == b"new"


def test_nothing_to_discard_is_no_error() -> None:
    with pytest.raises(Stopped), discarding(None):
        raise Stopped


@pytest.mark.parametrize("failing", range(3))
def test_renames_are_all_or_none(tmp_path: Path, failing: int) -> None:
    for number in range(3):
        (tmp_path / f"{number}").write_bytes(b"%d" % number)
    (tmp_path / f"{failing}").unlink()
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(FileNotFoundError):
        rename_all([Move(tmp_path / f"{number}", tmp_path / f"to {number}") for number in range(3)])
    assert sorted(os.listdir(tmp_path)) == before


def test_a_draft_is_on_the_disk_with_its_names(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draft, _ = begun(hidden, target)
    synced: list[int] = []
    native = os.fsync

    def fsync(number: int) -> None:
        synced.append(os.fstat(number).st_ino)
        native(number)

    monkeypatch.setattr(os, "fsync", fsync)
    draft.sync()
    paths = [draft.folder, draft.folder / OWNER, draft.folder / "below", draft.folder / "below" / "file"]
    assert sorted(synced) == sorted(path.stat().st_ino for path in paths)
    synced.clear()
    draft.sync({"below/file", OWNER})
    assert sorted(synced) == sorted(path.stat().st_ino for path in paths[::2])


@pytest.mark.parametrize("put", [disk.write, disk.publish])
def test_a_small_file_is_never_written_through_a_link(
    tmp_path: Path, put: Callable[[Path, bytes], None]
) -> None:
    (tmp_path / "theirs").write_bytes(b"theirs")
    (tmp_path / "file").symlink_to(tmp_path / "theirs")
    put(tmp_path / "file", b"ours")
    assert (tmp_path / "theirs").read_bytes() == b"theirs"
    assert (tmp_path / "file").read_bytes() == b"ours"
    assert stat.S_ISREG((tmp_path / "file").lstat().st_mode)
    assert sorted(os.listdir(tmp_path)) == ["file", "theirs"]


def test_what_cannot_be_removed_is_named_and_the_rest_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder").mkdir()
    for name in ("a", "b"):
        (tmp_path / "folder" / name).write_bytes(b"")
    native = os.unlink

    def unlink(path: object, *args: object, **how: object) -> None:
        if Path(str(path)).name == "a":
            raise PermissionError(1, "Operation not permitted", str(path))
        native(path, *args, **how)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "unlink", unlink)
    (failure,) = disk.remove_whole(tmp_path / "folder")
    assert isinstance(failure, PermissionError)
    assert os.listdir(tmp_path / "folder") == ["a"]
    monkeypatch.undo()
    assert disk.remove_whole(tmp_path / "folder") == []
    assert disk.remove_whole(tmp_path / "folder") == []


def test_a_folder_that_cannot_go_back_is_kept_and_put_back_by_the_next(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the rename of the draft nor its undoing works: what was replaced is there alone."""
    draft, aside = begun(in_room, target)
    rename, calls = os.rename, []

    def once(*paths: Path) -> None:
        calls.append(paths)
        if len(calls) > 1:
            raise OSError("no more")
        rename(*paths)

    monkeypatch.setattr(os, "rename", once)
    with pytest.raises(OSError, match="no more"), discarding(draft):
        draft.take_place(aside)
    monkeypatch.undo()
    assert not target.exists()
    assert (aside / "file").read_bytes() == b"old"
    again, _ = in_room(target)
    assert (target / "file").read_bytes() == b"old"
    again.discard()
    assert os.listdir(target.parent) == ["target"]


def test_a_process_that_was_forked_has_no_lock_of_a_room_and_of_a_mark(target: Path) -> None:
    """A data loader's worker lives on when its trainer is killed."""
    draft, _ = begun(in_room, target)
    folder, mark = make_hidden(target)
    held = {os.fstat(fd).st_ino for fd in (draft.room._lock, mark._fd)}  # type: ignore[attr-defined]
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        inodes = set()
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                inodes.add(os.fstat(int(name)).st_ino)
        mark.release()
        os.write(writes, str(len(held & inodes)).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reads, 9) == b"0"
    for end in (reads, writes):
        os.close(end)
    # The child gave up nothing of this process.
    assert is_locked(folder / OWNER)
    draft.discard()
    Hidden(folder, target, mark).discard()
    assert os.listdir(target.parent) == ["target"]


def is_locked(path: Path) -> bool:
    with open(path, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_what_a_killed_process_had_replaced_goes(target: Path) -> None:
    draft, aside = begun(in_room, target)
    draft.take_place(aside)
    # Killed here: its lock is gone.
    draft.room._unlock()
    again, _ = in_room(target)
    again.discard()
    assert (target / "below" / "file").read_bytes() == b"new"
    assert os.listdir(target.parent) == ["target"]


@pytest.mark.parametrize(
    "content",
    [
        '{"host": "x", "pid": Infinity, "started": null}',
        '{"host": "x", "pid": 1e400, "started": "1"}',
        '{"host": "x", "pid": 7, "started": "1", "locked": [Infinity, 1]}',
        '{"host": "x", "pid": NaN, "started": "1"}',
        '{"host": "x", "pid": 7, "started": "1", "locked": [1]}',
        "[1, 2]",
        "7",
    ],
)
def test_a_mark_of_anything_is_judged_by_time(tmp_path: Path, monkeypatch, content: str) -> None:
    """A save reads the marks of all drafts: it must not fail of one."""
    (tmp_path / drafts.OWNER).write_text(content)
    assert drafts.is_alive(tmp_path)
    monkeypatch.setattr(drafts, "ABANDONED", -1.0)
    assert not drafts.is_alive(tmp_path)
