"""Step folders by what is on disk: good or why not, kept, removed, put back."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Optional

import pytest
from damaging import flip

from torch_dcp_backport.__main__ import main
from torch_dcp_backport.checkpoint._src import manifest, store
from torch_dcp_backport.checkpoint._src.manifest import BadManifest, Manifest
from torch_dcp_backport.checkpoint._src.retention import Retention, keeping
from torch_dcp_backport.publish import disk, drafts


def published(root: Path, step: int, content: bytes = b"values") -> Path:
    final = root / store.name_of(step)
    writing = store.StepDraft(final)
    draft = writing.folder
    (draft / "part").mkdir()
    (draft / "part" / "file").write_bytes(content)
    entries = {"part/file": manifest.entry_of(draft / "part/file")}
    manifest.write(draft, Manifest(step, 4, 0.0, store.Shelf(root).next_order(), entries))
    store.publish(writing)
    return final


def retire(root: Path, keep: Optional[int], distrusted: Collection[Path] = ()) -> None:
    retention = Retention()
    retention.retire(store.Shelf(root), keeping(keep), distrusted)
    assert retention.finish(30)


def states(root: Path) -> dict[int, str]:
    return {step.step: step.fault for step in store.steps_in(root)}


def test_newest_first_and_good(tmp_path: Path) -> None:
    for step in (3, 20, 100):
        published(tmp_path, step)
    assert list(states(tmp_path).items()) == [(100, ""), (20, ""), (3, "")]
    assert sorted(path.name for path in (tmp_path / "global_step_3").iterdir()) == ["manifest.json", "part"]


def cut(folder: Path) -> None:
    (folder / "part/file").write_bytes(b"value")


def lose(folder: Path) -> None:
    (folder / "part/file").unlink()


def garble(folder: Path) -> None:
    path = folder / manifest.NAME
    flip(path)


def empty(folder: Path) -> None:
    (folder / manifest.NAME).write_bytes(b"")


def unmark(folder: Path) -> None:
    (folder / manifest.NAME).unlink()


def rename(folder: Path) -> None:
    folder.rename(folder.with_name("global_step_9"))


DAMAGE = {
    cut: "part/file has 5 bytes, and had 6",
    lose: "part/file: No such file or directory",
    garble: "manifest.json ",
    empty: "manifest.json cannot be read",
    unmark: "no manifest.json",
    rename: "its manifest is of step 7",
}


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_a_damaged_step_is_not_good(tmp_path: Path, damage) -> None:
    damage(published(tmp_path, 7))
    (fault,) = states(tmp_path).values()
    assert fault.startswith(DAMAGE[damage])


def test_every_bit_of_a_manifest_counts(tmp_path: Path) -> None:
    folder = published(tmp_path, 7)
    path, right = folder / manifest.NAME, manifest.read(folder)
    data = path.read_bytes()
    for number in range(len(data) * 8):
        wrong = bytearray(data)
        wrong[number // 8] ^= 1 << number % 8
        path.write_bytes(wrong)
        with contextlib.suppress(BadManifest):
            assert manifest.read(folder) == right


def test_a_file_of_another_step_has_another_checksum(tmp_path: Path) -> None:
    first, second = published(tmp_path, 1, b"first "), published(tmp_path, 2, b"second")
    (first / "part/file").rename(second / "part/file")
    assert states(tmp_path)[2] == ""  # sizes say nothing
    assert len(list(manifest.wrong_checksums(second, manifest.read(second)))) == 1
    shares = [manifest.share_of(manifest.read(second), rank, 2) for rank in (0, 1)]
    assert shares == [["part/file"], []]
    assert list(manifest.wrong_checksums(second, manifest.read(second), shares[1])) == []


@pytest.mark.parametrize(
    "keep, bad, left",
    [
        (None, (), (5, 4, 3, 2, 1)),
        (1, (), (5,)),
        (2, (), (5, 4)),
        (9, (), (5, 4, 3, 2, 1)),
        (1, (5,), (5, 4)),
        (2, (4,), (5, 4, 3)),
        (2, (1, 5), (5, 4, 3)),
        (1, (1, 2, 3, 4, 5), (5, 4, 3, 2, 1)),
    ],
)
def test_retention_keeps_the_newest_good_ones(tmp_path: Path, keep, bad, left) -> None:
    for step in range(1, 6):
        folder = published(tmp_path, step)
        if step in bad:
            lose(folder)
    retire(tmp_path, keep)
    assert tuple(states(tmp_path)) == left
    assert not list(tmp_path.glob(".*"))


def test_after_a_step_back_the_newest_is_what_was_published_last(tmp_path: Path) -> None:
    for step in (5, 10, 6):
        published(tmp_path, step)
    assert list(states(tmp_path)) == [6, 10, 5]
    retire(tmp_path, 1)
    assert list(states(tmp_path)) == [6]


def test_what_could_not_be_loaded_does_not_count(tmp_path: Path) -> None:
    folders = {step: published(tmp_path, step) for step in (5, 10, 11)}
    retire(tmp_path, 1, {folders[11]})
    assert list(states(tmp_path)) == [11, 10]


def test_prune_reads_what_is_to_stay(tmp_path: Path) -> None:
    folders = {step: published(tmp_path, step) for step in (5, 6, 10)}
    (folders[10] / "part" / "file").write_bytes(b"valuez")
    assert main(["checkpoint", "prune", str(tmp_path), "--keep", "1"]) == 0
    assert list(states(tmp_path)) == [10, 6]


def wrapped(**changes: object) -> str:
    """A manifest with the right checksum and other facts."""
    facts = {"format": 1, "step": 1, "world": 1, "made_at": 0, "order": 1, "files": {}, **changes}
    text = json.dumps(facts)
    return json.dumps({"crc32": zlib.crc32(text.encode()), "content": text})


@pytest.mark.parametrize(
    "content",
    [
        "[" * 100_000,
        '{"crc32": 1, "content": 2}',
        wrapped(step=float("inf")),
        wrapped(files={"x": [1]}),
        *(wrapped(files={name: [1, 1]}) for name in ("/dev/zero", "../x", "a/../../x", "", "a\0b", "\ud800")),
    ],
)
def test_a_manifest_of_anything_is_a_fault_and_no_error(tmp_path: Path, content: str) -> None:
    folder = published(tmp_path, 1)
    (folder / "manifest.json").write_text(content)
    step = store.examined(folder, 1)
    assert "manifest.json cannot be read" in step.fault
    assert step.foreign == "damaged"


@pytest.mark.parametrize(
    ("content", "kind"),
    [("null", "not ours"), ('{"files": []}', "not ours"), (wrapped(format=2), "newer")],
)
def test_a_manifest_of_another_program_or_release(tmp_path: Path, content: str, kind: str) -> None:
    folder = published(tmp_path, 1)
    (folder / "manifest.json").write_text(content)
    step = store.examined(folder, 1)
    assert step.foreign == kind
    assert step.fault


def test_a_zombie_is_dead(tmp_path: Path) -> None:
    child = os.fork()
    if not child:
        store.StepDraft(tmp_path / "global_step_1")
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    store.clean(tmp_path)
    assert not list(tmp_path.iterdir())
    os.waitpid(child, 0)


def test_a_writer_that_died_before_it_gave_its_name_leaves_nothing(tmp_path: Path, monkeypatch) -> None:
    def killed(name: str) -> None:
        if name.startswith("name "):
            raise KeyboardInterrupt

    monkeypatch.setattr(disk, "on_step", killed)
    with pytest.raises(KeyboardInterrupt):
        store.StepDraft(tmp_path / "global_step_1")
    assert len(list(tmp_path.iterdir())) == 1
    store.clean(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_link_in_the_place_of_a_step_is_kept_beside_it(tmp_path: Path) -> None:
    """Neither the link nor its target is ours to remove."""
    elsewhere = published(tmp_path / "elsewhere", 1)
    root = tmp_path / "root"
    root.mkdir()
    (root / "global_step_1").symlink_to(elsewhere)
    published(root, 1)
    (kept,) = (path for path in root.iterdir() if path.name != "global_step_1")
    assert kept.name.startswith("global_step_1.kept-")
    assert os.readlink(kept) == str(elsewhere)
    assert not (root / "global_step_1").is_symlink()
    assert store.examined(elsewhere, 1).fault == ""


def test_a_step_between_two_renames_of_a_living_writer_is_left_to_it(tmp_path: Path) -> None:
    folder = published(tmp_path, 5)
    draft = store.StepDraft(folder).folder
    away = folder.rename(tmp_path / ".global_step_5.was-00000000")
    store.clean(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {draft.name, away.name}


def test_what_cannot_be_put_back_is_logged_alone(tmp_path: Path, monkeypatch, caplog) -> None:
    published(tmp_path, 5).rename(tmp_path / ".global_step_5.was-00000000")

    def refused(*paths: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(store.os, "rename", refused)
    store.clean(tmp_path)
    (record,) = caplog.records
    assert "cannot be put back" in record.getMessage()


def test_the_same_step_again_replaces_it(tmp_path: Path) -> None:
    published(tmp_path, 1, b"first")
    folder = published(tmp_path, 1, b"second")
    assert (folder / "part/file").read_bytes() == b"second"
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("is_there", [False, True])
def test_another_writer_of_the_same_step_is_told(tmp_path: Path, is_there: bool) -> None:
    final = tmp_path / "global_step_1"
    if is_there:
        published(tmp_path, 1, b"old")
    draft = store.StepDraft(final)
    published(tmp_path, 1, b"theirs")
    with pytest.raises(store.AnotherWriter, match="another writer published global_step_1"):
        store.publish(draft)
    assert (final / "part/file").read_bytes() == b"theirs"


@pytest.mark.parametrize("at", ["rename the folder that is replaced", "rename the draft"])
def test_another_writer_between_two_renames_is_told(tmp_path: Path, monkeypatch, at: str) -> None:
    final = published(tmp_path, 1, b"old")
    draft = store.StepDraft(final)
    theirs = tmp_path / "theirs"
    (theirs / "part").mkdir(parents=True)
    (theirs / "part" / "file").write_bytes(b"theirs")

    def other(name: str) -> None:
        if name == at:
            if final.exists():
                final.rename(tmp_path / ".global_step_1.was-01234567")
            theirs.rename(final)

    monkeypatch.setattr(disk, "on_step", other)
    expected = contextlib.nullcontext() if at.endswith("replaced") else pytest.raises(store.AnotherWriter)
    with expected:
        store.publish(draft)
    monkeypatch.setattr(disk, "on_step", None)
    place = final if at.endswith("draft") else next(tmp_path.glob("global_step_1.kept-*"))
    assert (place / "part/file").read_bytes() == b"theirs"


def test_an_interrupt_between_two_renames_puts_the_step_back(tmp_path: Path, monkeypatch) -> None:
    final = published(tmp_path, 1, b"old")

    def interrupt(name: str) -> None:
        if name == "rename the draft":
            raise KeyboardInterrupt

    monkeypatch.setattr(disk, "on_step", interrupt)
    with pytest.raises(KeyboardInterrupt):
        published(tmp_path, 1, b"new")
    assert (final / "part/file").read_bytes() == b"old"
    assert states(tmp_path) == {1: ""}


def test_a_draft_that_gets_its_owner_now_is_left_to_it(tmp_path: Path, monkeypatch, caplog) -> None:
    """Another process cleans up between its folder and its mark: it is no step that lost its name."""
    nameless = tmp_path / ".global_step_5.old-01234567"
    nameless.mkdir()
    native = disk.walk

    def walk(top: Path, *args: Any) -> Any:
        listed = list(native(top, *args))
        if top == nameless:
            drafts.Mark(nameless / drafts.OWNER)
        return iter(listed)

    monkeypatch.setattr(disk, "walk", walk)
    store.clean(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [nameless.name]
    assert not caplog.records
    monkeypatch.setattr(disk, "walk", native)
    store.clean(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_copy_with_a_number_of_its_own_spelling_is_no_step(tmp_path: Path) -> None:
    for step in (3, 4):
        published(tmp_path, step)
    shutil.copytree(tmp_path / "global_step_3", tmp_path / "global_step_003")
    assert states(tmp_path) == {4: "", 3: ""}
    retire(tmp_path, 1)
    assert {path.name for path in tmp_path.iterdir()} == {"global_step_003", "global_step_4"}


def dead_draft(root: Path) -> Path:
    """As a process leaves it that is killed."""
    code = "import sys; from pathlib import Path; from torch_dcp_backport.checkpoint._src import store\n"
    code += "print(store.StepDraft(Path(sys.argv[1]) / 'global_step_5').folder)"
    done = subprocess.run([sys.executable, "-c", code, str(root)], capture_output=True, text=True, check=True)
    return Path(done.stdout.split()[-1])


def test_what_the_dead_left_is_removed_and_what_the_living_write_is_not(tmp_path: Path) -> None:
    own, dead = store.StepDraft(tmp_path / "global_step_4").folder, dead_draft(tmp_path)
    far, old = (
        store.StepDraft(tmp_path / "global_step_6").folder,
        store.StepDraft(tmp_path / "global_step_7").folder,
    )
    for draft in (far, old):
        (draft / drafts.OWNER).unlink()
        (draft / drafts.OWNER).write_text(json.dumps({"host": "elsewhere", "pid": 1, "started": "1"}))
    for path in (old / drafts.OWNER, old):
        os.utime(path, (0, 0))
    (tmp_path / ".global_step_3.old-00000000").mkdir()
    others = {"somebody's", ".venv.old-12345678"}
    for name in others:
        (tmp_path / name).mkdir()
    store.clean(tmp_path)
    assert not dead.exists()
    assert not old.exists()
    assert {path.name for path in tmp_path.iterdir()} == {own.name, far.name, *others}


def test_the_next_writer_of_a_folder_removes_what_a_dead_one_left_of_it(tmp_path: Path) -> None:
    dead = dead_draft(tmp_path)
    other = tmp_path / ".another.old-00000000"
    other.mkdir()
    draft = store.StepDraft(tmp_path / "global_step_5").folder
    assert not dead.exists()
    assert {path.name for path in tmp_path.iterdir()} == {draft.name, other.name}


def test_a_step_that_lost_its_name_gets_it_back(tmp_path: Path) -> None:
    folder = published(tmp_path, 5)
    folder.rename(tmp_path / ".global_step_5.was-00000000")
    store.clean(tmp_path)
    assert states(tmp_path) == {5: ""}


@pytest.mark.parametrize("content", [b"", b"x", b"12 ", b"\xff"])
def test_a_garbled_tracker_is_no_number(tmp_path: Path, content: bytes) -> None:
    (tmp_path / store.TRACKER).write_bytes(content)
    assert store.tracked(tmp_path) == (12 if content == b"12 " else None)


def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "list", str(tmp_path)]) == 1
    for step in (1, 2, 3):
        published(tmp_path, step)
    lose(tmp_path / "global_step_3")
    capsys.readouterr()
    assert main(["checkpoint", "list", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line[0] != " "] == ["step", "3", "2", "1"]
    assert "No such file" in lines[2]
    assert lines[3].split()[-4:] == ["complete", "-", "-", "-"]
    assert main(["checkpoint", "list", str(tmp_path), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["steps"]
    assert [(step["step"], step["bytes"], step["ranks"], step["checked"]) for step in listed] == [
        (3, 6, 4, "sizes"),
        (2, 6, 4, "sizes"),
        (1, 6, 4, "sizes"),
    ]


def test_list_says_what_it_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (1, 2):
        (published(tmp_path, step) / "part" / "file").write_bytes(b"valuez" if step == 2 else b"values")
    assert main(["checkpoint", "list", str(tmp_path)]) == 0
    assert [line.split()[-4] for line in capsys.readouterr().out.splitlines()[1:]] == ["complete", "complete"]
    assert main(["checkpoint", "list", str(tmp_path), "--verify"]) == 0
    _, first, fault, second = capsys.readouterr().out.splitlines()
    assert first.split()[-4] == "damaged"
    assert "part/file has CRC32" in fault
    assert second.split()[-4] == "verified"


def test_prune_says_what_stays_and_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (1, 2, 3, 4):
        published(tmp_path, step)
    lose(tmp_path / "global_step_4")
    (published(tmp_path, 3) / "part" / "file").write_bytes(b"valuez")
    (tmp_path / "global_step_9").mkdir()
    expected = [
        "keep 3 not counted: part/file has CRC32",
        "keep 4 not counted: part/file: No such file or directory",
        "keep 2 1 of 1",
        "{} 1 older than the newest 1 that are good",
        "left alone 9 not ours: no manifest.json",
    ]
    for flags, verb in ((["--dry-run"], "would remove"), ([], "remove")):
        assert main(["checkpoint", "prune", str(tmp_path), "--keep", "1", *flags]) == 0
        lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
        assert len(lines) == len(expected)
        for line, start in zip(lines, expected):
            assert line.startswith(start.format(verb))
    assert sorted(states(tmp_path)) == [2, 3, 4, 9]
    assert main(["checkpoint", "prune", str(tmp_path), "--keep", "0"]) == 2


def test_a_step_is_verified_by_its_manifest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = published(tmp_path, 2)
    assert main(["checkpoint", "verify", str(folder)]) == 0
    assert capsys.readouterr().out.startswith("whole: ")
    (folder / "part" / "file").write_bytes(b"valuez")
    assert main(["checkpoint", "verify", str(folder), "--json"]) == 1
    assert "part/file has CRC32" in json.loads(capsys.readouterr().out)["problems"][0]
    (folder / "manifest.json").write_text("{")
    assert main(["checkpoint", "verify", str(folder)]) == 1
    assert "manifest.json cannot be read" in capsys.readouterr().out
    (folder / "manifest.json").unlink()
    assert main(["checkpoint", "verify", str(folder)]) == 1
    assert "holds no distributed checkpoint" in " ".join(capsys.readouterr().err.split())


def test_what_is_in_hand_for_long_is_not_abandoned_for_other_machines(tmp_path: Path, monkeypatch) -> None:
    """A step that is uploaded, and one that is whole and waits for its save to be finished; without locks."""
    monkeypatch.setattr(drafts, "_locked", lambda fd: False)
    monkeypatch.setattr(drafts, "ABANDONED", 0.6)
    monkeypatch.setattr(drafts, "_held", set())
    monkeypatch.setattr(drafts, "_is_touching", False)
    folder, draft = published(tmp_path, 5), store.StepDraft(tmp_path / "global_step_6")
    with store.uploading(folder):
        time.sleep(1.2)
        monkeypatch.setattr(drafts.socket, "gethostname", lambda: "elsewhere")
        assert store.is_uploading(folder)
        store.clean(tmp_path)
        assert draft.folder.exists()
    draft.discard()
    deadline = time.monotonic() + 10
    while drafts._is_touching:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert not drafts._held


def test_one_thread_keeps_the_marks_of_all_saves_young(tmp_path: Path) -> None:
    for step in range(5):
        store.StepDraft(tmp_path / f"global_step_{step}").discard()
    names = [thread.name for thread in threading.enumerate()]
    assert names.count("marks of folders in hand") <= 1


def test_a_published_folder_is_published_whatever_comes_after(tmp_path: Path, monkeypatch, caplog) -> None:
    def refuse(paths: Sequence[Path]) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(disk, "remove", refuse)
    published(tmp_path, 5)
    assert "is published" in caplog.text
    assert states(tmp_path) == {5: ""}


def test_a_link_to_nowhere_makes_room(tmp_path: Path) -> None:
    (tmp_path / "global_step_5").symlink_to(tmp_path / "another disk")
    published(tmp_path, 5)
    assert states(tmp_path) == {5: ""}
    assert len(list(tmp_path.glob("global_step_5.kept-*"))) == 1
