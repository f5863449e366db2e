"""What this package did not publish: never removed, counted, written through or waited for."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from trainer import Trainer, same

from torch_dcp_backport.__main__ import main
from torch_dcp_backport.checkpoint import PreservationPolicy, find_latest_ckpt_path
from torch_dcp_backport.checkpoint._src import retention, store
from torch_dcp_backport.checkpoint._src.store import ListedStep
from torch_dcp_backport.dist_checkpointing import CheckpointingException


def verls(root: Path) -> Path:
    folder = root / "global_step_300"
    folder.mkdir(parents=True)
    for part in ("model", "optim", "extra_state"):
        torch.save({"w": torch.ones(2)}, folder / f"{part}_world_size_1_rank_0.pt")
    return folder


def native(root: Path) -> Path:
    folder = root / "global_step_250"
    dcp.save({"w": torch.ones(2)}, checkpoint_id=folder)
    return folder


def users(root: Path) -> Path:
    folder = root / "global_step_50"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def newer(root: Path) -> Path:
    """A step of a release that is not out yet."""
    folder = Trainer(root).handler.save_checkpoint(60)
    outer = json.loads((folder / "manifest.json").read_text())
    text = outer["content"].replace('"format": 1', '"format": 2')
    (folder / "manifest.json").write_text(json.dumps({"crc32": zlib.crc32(text.encode()), "content": text}))
    return folder


def torn(root: Path) -> Path:
    folder = Trainer(root).handler.save_checkpoint(61)
    os.truncate(folder / "manifest.json", 20)
    return folder


def renamed(root: Path) -> Path:
    return Trainer(root).handler.save_checkpoint(3).rename(root / "global_step_70")


def empty(root: Path) -> Path:
    folder = root / "global_step_1"
    folder.mkdir(parents=True)
    return folder


def linked(root: Path) -> Path:
    elsewhere = Trainer(root / "elsewhere").handler.save_checkpoint(80)
    (root / "global_step_80").symlink_to(elsewhere)
    return root / "global_step_80"


FOREIGN: dict[Callable[[Path], Path], str] = {
    verls: "not ours",
    native: "not ours",
    users: "not ours",
    newer: "newer",
    torn: "damaged",
    renamed: "its manifest is of step 3",
    empty: "not ours",
    linked: "a link",
}


def content_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("make", FOREIGN, ids=lambda make: make.__name__)
def test_retention_leaves_alone_what_is_not_ours_and_says_so_once(tmp_path: Path, make, caplog) -> None:
    folder = make(tmp_path)
    before = content_of(folder)
    trainer = Trainer(tmp_path, max_ckpt_to_keep=1)
    with caplog.at_level(logging.WARNING):
        for step in (400, 401, 402):
            trainer.handler.save_checkpoint(step)
        trainer.handler.finish()
    assert content_of(folder) == before
    assert sorted(path.name for path in tmp_path.glob("global_step_4*")) == ["global_step_402"]
    said = [text for text in caplog.messages if "left alone" in text]
    assert len(said) == 1
    assert f"{folder.name} ({FOREIGN[make]}" in said[0]
    assert main(["checkpoint", "prune", str(tmp_path), "--keep", "1"]) == 0
    assert content_of(folder) == before


def test_all_of_them_together_never_count(tmp_path: Path, capsys) -> None:
    """The newest good steps stay, however many others are newer."""
    trainer = Trainer(tmp_path)
    for step in (10, 11):
        trainer.handler.save_checkpoint(step)
    folders = [make(tmp_path) for make in FOREIGN]
    before = [content_of(folder) for folder in folders]
    capsys.readouterr()
    assert main(["checkpoint", "prune", str(tmp_path), "--keep", "1"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "keep 11 1 of 1" in lines
    assert [line for line in lines if line.startswith("remove")] == [
        "remove 10 older than the newest 1 that are good"
    ]
    assert len([line for line in lines if line.startswith("left alone")]) == len(FOREIGN)
    assert [content_of(folder) for folder in folders] == before


@pytest.mark.parametrize("make", [verls, native, users, torn, newer], ids=lambda make: make.__name__)
def test_a_save_in_the_place_of_what_is_not_ours_keeps_it_beside(tmp_path: Path, make, caplog) -> None:
    folder = make(tmp_path)
    before, step = content_of(folder), int(folder.name.rpartition("_")[2])
    trainer = Trainer(tmp_path)
    trainer.train(3)
    with caplog.at_level(logging.WARNING):
        trainer.handler.save_checkpoint(step)
    (kept,) = tmp_path.glob(f"{folder.name}.kept-*")
    assert content_of(kept) == before
    assert str(kept) in caplog.text
    expected, fresh = trainer.state(), Trainer(tmp_path)
    assert fresh.handler.load_checkpoint() == step
    assert same(fresh.state(), expected)


def test_files_that_a_user_put_into_a_step_outlive_it(tmp_path: Path, caplog) -> None:
    """Results of an evaluation; a merged model; a link to a folder elsewhere."""
    trainer = Trainer(tmp_path, max_ckpt_to_keep=1)
    folder = trainer.handler.save_checkpoint(1)
    (folder / "eval").mkdir()
    (folder / "eval" / "scores.json").write_text("{}")
    (folder / "huggingface").mkdir(exist_ok=True)
    (folder / "huggingface" / "merged.safetensors").write_bytes(b"weights")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "__0_0.distcp").write_bytes(b"of another run")
    trainer.handler.save_checkpoint(2)
    trainer.handler.finish()
    assert content_of(folder) == {"eval/scores.json": b"{}", "huggingface/merged.safetensors": b"weights"}
    assert "eval/scores.json" in caplog.text
    assert not list(tmp_path.glob(".*"))
    # A step whose folder became a link: what the link leads to is not the step's.
    second = tmp_path / "global_step_2"
    (second / "dist_ckpt").rename(tmp_path / "moved")
    (second / "dist_ckpt").symlink_to(outside)
    trainer.handler.save_checkpoint(3)
    trainer.handler.finish()
    assert (outside / "__0_0.distcp").read_bytes() == b"of another run"


def test_two_processes_remove_the_same_step(tmp_path: Path, monkeypatch, caplog) -> None:
    """The one that comes second finds no manifest, and takes the folder for nobody else's."""
    from torch_dcp_backport.publish import disk

    trainer = Trainer(tmp_path)
    trainer.handler.save_checkpoint(1)
    trainer.handler.save_checkpoint(2)
    names: list[str] = []
    at: list[str] = []
    limit = 0

    def other(name: str) -> None:
        names.append(name)
        if len(names) == limit:
            monkeypatch.setattr(disk, "on_step", None)
            at.append(name)
            store.clean(tmp_path)

    while len(names) == limit:
        folder, hidden = trainer.handler.save_checkpoint(1), tmp_path / ".global_step_1.old-00000000"
        folder.rename(hidden)
        names.clear()
        limit += 1
        monkeypatch.setattr(disk, "on_step", other)
        assert store.removed(hidden, folder) == []
        monkeypatch.setattr(disk, "on_step", None)
        assert {path.name for path in tmp_path.iterdir()} == {"global_step_2", store.TRACKER}
    assert "remove manifest.json" in at
    assert "is kept" not in caplog.text


def test_the_same_step_again_keeps_what_a_user_put_into_it(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    folder = trainer.handler.save_checkpoint(1)
    (folder / "scores.json").write_text("{}")
    trainer.handler.save_checkpoint(1)
    (kept,) = tmp_path.glob("global_step_1.kept-*")
    assert content_of(kept) == {"scores.json": b"{}"}


def test_hidden_folders_of_others_stay(tmp_path: Path) -> None:
    """By name alone nothing is ours: a draft has its owner's mark, a step its manifest."""
    folders = [tmp_path / f".global_step_9.{kind}-0123abcd" for kind in ("tmp", "was", "old")]
    for folder in folders:
        folder.mkdir()
        (folder / "precious").write_bytes(b"1")
        os.utime(folder / "precious", (0, 0))
        os.utime(folder, (0, 0))
    Trainer(tmp_path).handler.save_checkpoint(1)
    assert Trainer(tmp_path).handler.load_checkpoint() == 1
    assert len(list(tmp_path.rglob("precious"))) == 3


def test_a_store_keeps_what_is_not_ours(tmp_path: Path) -> None:
    theirs = tmp_path / "far" / "global_step_1"
    theirs.mkdir(parents=True)
    (theirs / "manifest.json").write_text(json.dumps({"files": ["theirs"]}))
    (theirs / "data_0.pt").write_bytes(b"theirs")
    before = content_of(theirs)
    trainer = Trainer(tmp_path / "root", default_hdfs_dir=str(tmp_path / "far"))
    trainer.handler.save_checkpoint(1)
    with pytest.raises(CheckpointingException, match=r"is not ours .* and is not replaced"):
        trainer.handler.finish()
    assert content_of(theirs) == before


LISTED = st.builds(
    ListedStep,
    st.integers(0, 50),
    st.builds(lambda number: Path(f"/nowhere/global_step_{number}"), st.integers(0, 10**6)),
    st.integers(1, 50),
    st.sampled_from(["", "", "", "not ours", "newer", "damaged"]),
    st.just("why"),
    st.none(),
)


@given(st.lists(LISTED, unique_by=lambda entry: entry.path), st.integers(1, 5), st.data())
def test_verdicts(listed: list[ListedStep], keep: int, data: Any) -> None:
    """The newest good ones stay, in the order of their publication; what is foreign is never touched."""
    listed = sorted(listed, key=lambda entry: (entry.order, entry.step), reverse=True)
    bad = {entry.path for entry in listed if data.draw(st.booleans())}
    decided = list(
        retention.verdicts(listed, PreservationPolicy(keep), lambda entry: "bad" if entry.path in bad else "")
    )
    assert [verdict.entry for verdict in decided] == listed
    gone = {verdict.entry.path for verdict in decided if verdict.action == retention.REMOVE}
    good = [entry.path for entry in listed if not entry.foreign and entry.path not in bad]
    assert gone.isdisjoint(good[:keep])
    assert gone.isdisjoint(entry.path for entry in listed if entry.foreign)
    assert gone >= set(good[keep:])
    if len(good) < keep:
        assert not gone


# What a folder of somebody else's may hold in the place of our small files.


MARKED = {
    "could-not-be-loaded.txt": "it fails to load",
    "uploaded.txt": "it is uploaded",
    "uploading.json": "it is uploaded",
}


@pytest.mark.parametrize("name", MARKED)
@pytest.mark.parametrize("kind", ["symlink", "hard link", "link of the draft"])
def test_no_link_in_a_step_is_written_through(tmp_path: Path, name: str, kind: str) -> None:
    """A crafted step, downloaded from somewhere, must not overwrite any file of the user's."""
    precious = tmp_path / "precious"
    precious.write_bytes(b"of the user")
    root = tmp_path / "root"
    trainer = Trainer(root)
    for step in (1, 2):
        trainer.handler.save_checkpoint(step)
    path = root / "global_step_2" / (f"{name}.new" if kind == "link of the draft" else name)
    if kind == "hard link":
        os.link(precious, path)
    else:
        path.symlink_to(precious)
    options: dict[str, Any] = {}
    if "upload" in MARKED[name]:
        options["default_hdfs_dir"] = str(tmp_path / "far")
    else:
        (root / "global_step_2" / "data_0.pt").unlink()
        (root / "global_step_2" / "data_0.pt").write_bytes(b"")
    fresh = Trainer(root, verify=False, **options)
    if not options:
        with open(root / "global_step_2" / "manifest.json", "rb") as file:
            outer = json.loads(file.read())
        facts = json.loads(outer["content"])
        facts["files"]["data_0.pt"] = [0, 0]
        text = json.dumps(facts)
        outer = {"crc32": zlib.crc32(text.encode()), "content": text}
        (root / "global_step_2" / "manifest.json").write_text(json.dumps(outer))
    assert fresh.handler.load_checkpoint() == (2 if options else 1)
    fresh.handler.finish()
    assert precious.read_bytes() == b"of the user"


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """Interrupt what hangs."""

    def interrupt(*_: object) -> None:
        raise TimeoutError(f"no answer in {seconds} s")

    former = signal.signal(signal.SIGALRM, interrupt)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, former)


def as_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def as_device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def as_huge(path: Path) -> None:
    os.truncate(path, 8 * 2**30)


def as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


FILES = (
    "manifest.json",
    "data_0.pt",
    "dist_ckpt/metadata.json",
    "dist_ckpt/.metadata",
    "dist_ckpt/common.pt",
    "dist_ckpt/__0_0.distcp",
)


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    "damage", [as_pipe, as_device, as_huge, as_folder], ids=lambda damage: damage.__name__
)
def test_a_file_that_is_no_file_makes_a_step_damaged(tmp_path: Path, damage, name: str, verify: bool) -> None:
    """The older step is taken, soon, and in bounded memory."""
    trainer, states = Trainer(tmp_path), {}
    for step in (1, 2):
        trainer.train(step)
        trainer.handler.save_checkpoint(step)
        states[step] = trainer.state()
    damage(tmp_path / "global_step_2" / name)
    with at_most(20):
        fresh = Trainer(tmp_path, verify=verify)
        assert fresh.handler.load_checkpoint() == 1
        assert same(fresh.state(), states[1])
        assert find_latest_ckpt_path(tmp_path) == str(tmp_path / "global_step_1")
        assert main(["checkpoint", "list", str(tmp_path)]) == 0
        assert main(["checkpoint", "verify", str(tmp_path / "global_step_2")]) == 1
        fresh.handler.save_checkpoint(3)


@pytest.mark.parametrize(
    "name", [store.TRACKER, "global_step_1/uploaded.txt", "global_step_1/uploading.json", ".global_step_3"]
)
def test_a_pipe_in_the_place_of_a_mark_is_not_waited_for(tmp_path: Path, name: str) -> None:
    trainer = Trainer(tmp_path, max_ckpt_to_keep=1)
    trainer.handler.save_checkpoint(1)
    path = tmp_path / name
    if name == ".global_step_3":
        path = tmp_path / ".global_step_3.tmp-01234567" / "owner.json"
        path.parent.mkdir()
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    with at_most(20):
        assert main(["checkpoint", "list", str(tmp_path)]) == 0
        assert Trainer(tmp_path).handler.load_checkpoint() == 1
        trainer.handler.save_checkpoint(2)
        trainer.handler.finish()


def as_link_to_a_name_too_long(path: Path, _: Path) -> None:
    path.symlink_to("a" * 300)


def as_loop(path: Path, _: Path) -> None:
    path.symlink_to(path.name)


def as_link_to_elsewhere(path: Path, elsewhere: Path) -> None:
    path.symlink_to(elsewhere)


def as_deep_folder(path: Path, _: Path) -> None:
    """Deeper than Python's calls may be, and than a path may be long: pytest cannot remove it, either."""
    path.mkdir()
    place = os.open(path, os.O_RDONLY)
    for _step in range(3000):
        os.mkdir("d", dir_fd=place)
        below = os.open("d", os.O_RDONLY, dir_fd=place)
        os.close(place)
        place = below
    os.close(place)


ODD = (as_link_to_a_name_too_long, as_loop, as_link_to_elsewhere, as_deep_folder)
PLACES = (
    "global_step_9",
    *(f".global_step_9.{kind}-01234567" for kind in ("tmp", "old", "was")),
    store.TRACKER,
    "global_step_1/uploading.json",
    "global_step_1/eval",
    "global_step_2/uploaded.txt",
    "global_step_2/owner.json",
    "global_step_2/manifest.json",
    "global_step_2/data_0.pt",
    "global_step_2/dist_ckpt",
)


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("make", ODD, ids=lambda make: make.__name__)
def test_whatever_stands_in_a_place_of_ours_stops_no_run_and_leads_nowhere(
    tmp_path: Path, make, name: str, capsys
) -> None:
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    trainer = Trainer(root)
    for step in (1, 2):
        trainer.handler.save_checkpoint(step)
    elsewhere.mkdir()
    # As the draft of a writer that is dead.
    owner = {"host": socket.gethostname(), "pid": 2**22 + 1, "started": "1"}
    (elsewhere / "owner.json").write_text(json.dumps(owner))
    (elsewhere / "precious").write_bytes(b"of the user")
    before = content_of(elsewhere)
    if (root / name).is_dir():
        shutil.rmtree(root / name)
    else:
        (root / name).unlink(missing_ok=True)
    make(root / name, elsewhere)
    # A folder of 3,000 levels is walked several times: 5 s on an idle machine.
    with at_most(150):
        fresh = Trainer(root, max_ckpt_to_keep=1)
        is_damaged = name in (
            "global_step_2/manifest.json",
            "global_step_2/data_0.pt",
            "global_step_2/dist_ckpt",
        )
        good = 1 if is_damaged else 2
        assert fresh.handler.load_checkpoint() == good
        assert find_latest_ckpt_path(root) == str(root / f"global_step_{good}")
        fresh.handler.save_checkpoint(3)
        fresh.handler.finish()
        assert Trainer(root).handler.load_checkpoint() == 3
        assert main(["checkpoint", "list", str(root)]) == 0
        assert main(["checkpoint", "prune", str(root), "--keep", "1"]) == 0
    assert content_of(elsewhere) == before
    if make is as_deep_folder:
        subprocess.run(["rm", "-rf", root], check=True)


@pytest.mark.parametrize("name", [".metadata", "common.pt", "metadata.json"])
def test_a_manager_alone_does_not_read_a_file_that_grew(tmp_path: Path, name: str) -> None:
    trainer = Trainer(tmp_path)
    folder = trainer.handler.save_checkpoint(1)
    os.truncate(folder / "dist_ckpt" / name, 8 * 2**30)
    with pytest.raises(CheckpointingException, match=f"{name} has 8589934592 bytes, and had"):
        trainer.manager.load_checkpoint(folder)


def test_nothing_is_written_through_a_step_that_is_a_link(tmp_path: Path) -> None:
    """Neither that it could not be loaded, nor that it was uploaded."""
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    Trainer(root).handler.save_checkpoint(1)
    whole = Trainer(elsewhere).handler.save_checkpoint(2)
    Trainer(elsewhere).handler.save_checkpoint(3)
    (root / "global_step_2").symlink_to(whole)
    before = content_of(elsewhere)
    trainer = Trainer(root, default_hdfs_dir=str(tmp_path / "far"))
    assert trainer.handler.load_checkpoint() == 2
    trainer.handler.finish()
    assert content_of(elsewhere) == before
    # A step of another model, which fails to load.
    other = Trainer(tmp_path / "other", torch.nn.Linear(2, 3)).handler.save_checkpoint(3)
    (root / "global_step_3").symlink_to(other)
    before = content_of(tmp_path / "other")
    assert Trainer(root).handler.load_checkpoint() == 2
    assert content_of(tmp_path / "other") == before


def test_a_managers_own_saves_leave_no_empty_folders(tmp_path: Path) -> None:
    """Each save would look at all of them; a trainer's own files keep theirs."""
    trainer = Trainer(tmp_path)
    for step in range(1, 8):
        path = tmp_path / f"global_step_{step}" / "actor"
        trainer.manager.save_checkpoint(path, global_step=step, max_ckpt_to_keep=2)
        if step == 3:
            (path.parent / "data.pt").write_bytes(b"of the trainer")
        trainer.manager.finish()
    assert {path.name for path in tmp_path.iterdir()} == {f"global_step_{step}" for step in (3, 6, 7)}
    assert [path.name for path in (tmp_path / "global_step_3").iterdir()] == ["data.pt"]


def test_verify_knows_the_step_of_a_folder(tmp_path: Path, capsys) -> None:
    folder = Trainer(tmp_path).handler.save_checkpoint(3)
    assert main(["checkpoint", "verify", str(folder)]) == 0
    renamed(tmp_path)
    assert main(["checkpoint", "verify", str(tmp_path / "global_step_70")]) == 1
    assert "named global_step_70, and its manifest is of step 3" in capsys.readouterr().out


@pytest.mark.parametrize("is_sparse", [False, True])
def test_a_file_that_looks_like_the_state_of_a_loader_is_none(tmp_path: Path, is_sparse: bool) -> None:
    trainer = Trainer(tmp_path)
    trainer.loader.position = 5
    folder = trainer.handler.save_checkpoint(2)
    if is_sparse:
        (folder / "data_1.pt").touch()
        os.truncate(folder / "data_1.pt", 6 * 2**30)
    else:
        (folder / "data_notes.pt").write_bytes(b"of the user")
    fresh = Trainer(tmp_path)
    assert fresh.handler.load_checkpoint() == 2
    assert fresh.loader.position == 5


@pytest.mark.parametrize("what", ["a file of the user's", "a damaged manifest"])
def test_what_retention_cannot_take_is_said_once(tmp_path: Path, what: str, caplog) -> None:
    """Also of a step that was ours when it was listed."""
    trainer = Trainer(tmp_path, max_ckpt_to_keep=1)
    folder = trainer.handler.save_checkpoint(1)
    if what == "a damaged manifest":
        os.truncate(folder / "manifest.json", 20)
    else:
        (folder / "notes.txt").write_bytes(b"mine")
    before = content_of(folder)
    inodes = []
    for step in range(2, 7):
        trainer.handler.save_checkpoint(step)
        trainer.handler.finish()
        inodes.append(folder.stat().st_ctime_ns)
    kept = content_of(folder)
    assert kept == (before if what == "a damaged manifest" else {"notes.txt": b"mine"})
    # Once it is known, it is not renamed to and fro.
    assert len(set(inodes[1:])) == 1
    assert len([text for text in caplog.messages if "left alone" in text]) == 1
    assert len([text for text in caplog.messages if "is kept" in text]) == (what != "a damaged manifest")


@pytest.mark.parametrize("at", ["rename global_step_1 away", "before"])
def test_a_step_that_another_process_saves_again_is_not_removed(tmp_path: Path, monkeypatch, at) -> None:
    """It was the oldest when prune looked, and is the newest when prune comes to it."""
    from torch_dcp_backport.publish import disk

    trainer = Trainer(tmp_path)
    for step in (1, 2, 3):
        trainer.handler.save_checkpoint(step)

    def other(name: str) -> None:
        if name == at:
            monkeypatch.setattr(disk, "on_step", None)
            Trainer(tmp_path).handler.save_checkpoint(1)

    monkeypatch.setattr(disk, "on_step", other)

    def report(verdict: retention.StepVerdict) -> None:
        if verdict.entry.step == 1:
            other("before")

    assert retention.prune(tmp_path, PreservationPolicy(1), report) == []
    assert {path.name for path in tmp_path.iterdir()} == {"global_step_1", "global_step_3", store.TRACKER}
    assert find_latest_ckpt_path(tmp_path) == str(tmp_path / "global_step_1")


@pytest.mark.parametrize("number", ["order", "size"])
def test_a_manifest_with_a_number_that_no_step_has_is_damaged(tmp_path: Path, number: str) -> None:
    """Its order plus 1 would be the order of the next step, which could not be written."""
    trainer = Trainer(tmp_path)
    trainer.handler.save_checkpoint(1)
    folder = trainer.handler.save_checkpoint(2)
    content = json.loads(json.loads((folder / "manifest.json").read_text())["content"])
    content["order"] = 10**4298 if number == "order" else 7
    content["files"]["gone"] = [10**4298 if number == "size" else 1, 1]
    text = json.dumps(content)
    outer = {"crc32": zlib.crc32(text.encode()), "content": text}
    (folder / "manifest.json").write_text(json.dumps(outer))
    fresh = Trainer(tmp_path)
    assert fresh.handler.load_checkpoint() == 1
    fresh.handler.save_checkpoint(3)
    assert main(["checkpoint", "list", str(tmp_path)]) == 0
    assert Trainer(tmp_path).handler.load_checkpoint() == 3


def test_a_step_that_lost_a_name_with_a_newline_is_loaded_where_it_is(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    path = tmp_path / "global_step_1" / "the\nactor"
    trainer.manager.save_checkpoint(path, global_step=1)
    path.rename(path.with_name(f".{path.name}.was-00000000"))
    fresh = Trainer(tmp_path).manager
    fresh.load_checkpoint(path)
    assert not path.exists()
    fresh.save_checkpoint(tmp_path / "global_step_2" / "the\nactor", global_step=2)
    assert (path / "manifest.json").is_file()


# What a failed save says, and what a save costs.


def fails(api: Any, root: Path, where: str, is_async: bool) -> str:
    from torch_dcp_backport.publish import disk

    trainer = Trainer(root, config={"async_save": is_async})
    for step in (1, 2):
        trainer.handler.save_checkpoint(step)
    trainer.handler.finish()

    def fail(name: str) -> None:
        if name.startswith(where):
            raise OSError(28, "No space left on device")

    if dist.get_rank() == (1 if where == "create" else 0):
        disk.on_step = fail
    try:
        with pytest.raises(CheckpointingException) as caught:  # noqa: PT012
            trainer.handler.save_checkpoint(3)
            trainer.handler.finish()
    finally:
        disk.on_step = None
    dist.barrier()
    assert not list(root.glob(".*"))
    assert Trainer(root).handler.load_checkpoint() == 2
    return str(caught.value)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    "where",
    [
        "make",
        "write owner.json",
        "name",
        "remove metadata.json",
        "create",
        "write .metadata",
        "write manifest.json",
    ],
)
def test_a_save_that_fails_says_which_step_is_there(ranks, tmp_path: Path, where, is_async) -> None:
    (text,) = set(ranks(fails, tmp_path, where, is_async, world=2))
    assert "step 3 was not saved; the newest complete step is 2" in text
    assert "No space left" in text
    assert "the folder holds no checkpoint" not in text


class Odd:
    """Of a class that a load without `trust` refuses."""


def refuses(api: Any, root: Path, what: str, is_async: bool) -> str:
    trainer = Trainer(root, config={"async_save": is_async})
    for step in (1, 2):
        trainer.handler.save_checkpoint(step)
    trainer.handler.finish()
    rank = dist.get_rank()
    if what == "a class":
        trainer.schedule.odd = Odd()  # type: ignore[attr-defined]
    elif what == "a function" and rank:
        trainer.schedule.odd = lambda: None  # type: ignore[attr-defined]
    elif what == "an option" and rank:
        trainer.optimizer.param_groups[0]["weight_decay"] = 0.7
    elif what == "a dtype":
        trainer.model.register_buffer("more", torch.zeros(2, dtype=torch.int64 if rank else torch.int32))
    elif what == "a state" and rank:
        trainer.manager.get_rng_state = lambda: 1 / 0  # type: ignore[assignment,return-value]
    with pytest.raises(CheckpointingException) as caught:
        trainer.handler.save_checkpoint(3)
    return str(caught.value)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("what", ["a class", "a function", "an option", "a dtype", "a state"])
def test_a_save_that_is_refused_says_which_step_is_there(ranks, tmp_path: Path, what, is_async) -> None:
    (text,) = set(ranks(refuses, tmp_path, what, is_async, world=2))
    assert "step 3 was not saved; the newest complete step is 2" in text


def counted(api: Any, root: Path, steps: int) -> dict[str, int]:
    """The folders and files that the second save of a process looks at, by what is done."""
    trainer = Trainer(root, max_ckpt_to_keep=None if steps else 2)
    for step in range(1, steps + 2):
        trainer.handler.save_checkpoint(step)
    dist.barrier()
    if dist.get_rank() == 0:
        # A manifest that was written just now is read again.
        for path in root.glob("*/manifest.json"):
            os.utime(path, (0, 0))
    trainer = Trainer(root)
    trainer.handler.load_checkpoint()
    trainer.handler.max_ckpt_to_keep = steps + 2
    counts = {"stat": 0, "scandir": 0, "open": 0}
    draft = f"/.global_step_{steps + 2}."

    def is_other(path: object) -> bool:
        return isinstance(path, (str, os.PathLike)) and str(root) in str(path) and draft not in str(path)

    native = {name: getattr(os, name) for name in ("stat", "lstat")}

    def counting(name: str) -> Callable[..., Any]:
        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            counts["stat"] += is_other(path)
            return native[name](path, *args, **kwargs)

        return call

    is_counting = True

    def hear(event: str, args: tuple[Any, ...]) -> None:
        if is_counting and event in ("open", "os.scandir", "os.listdir"):
            if is_other(args[0]):
                counts["open" if event == "open" else "scandir"] += 1
            elif dist.get_rank() and event != "open" and draft in str(args[0]):
                counts["scandir"] += 1000

    sys.addaudithook(hear)
    for name in native:
        setattr(os, name, counting(name))
    try:
        trainer.handler.max_ckpt_to_keep = None
        trainer.handler.save_checkpoint(steps + 2)
    finally:
        is_counting = False
        for name, function in native.items():
            setattr(os, name, function)
    return counts


def test_a_save_reads_as_many_files_however_many_steps_there_are(ranks, tmp_path: Path) -> None:
    few = ranks(counted, tmp_path / "few", 3, world=2)
    many = ranks(counted, tmp_path / "many", 33, world=2)
    assert few == many
    # Other ranks list nothing: neither the root nor the draft.
    assert many[1]["scandir"] == 0
    assert many[0]["scandir"] <= 4


def test_a_relative_root_stays_where_it_was(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = Trainer(Path("root"))
    (tmp_path / "elsewhere").mkdir()
    os.chdir(tmp_path / "elsewhere")
    trainer.handler.save_checkpoint(1)
    assert trainer.handler.load_checkpoint() == 1
    assert (tmp_path / "root" / "global_step_1" / "manifest.json").is_file()
    assert not list((tmp_path / "elsewhere").iterdir())
