"""Containers of one machine share a root and a host name, and see none of each other's processes.

What another process writes is left alone, what the dead left goes with a save or a prune, and a load changes
nothing.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import containers
import pytest
import torch
import torch.distributed as dist
from containers import Container, inside, stopped_at, wait_for
from pool import on_ranks
from trainer import Trainer, same

from torch_dcp_backport import hf
from torch_dcp_backport.__main__ import main
from torch_dcp_backport.checkpoint import NearbyCheckpoints, find_latest_ckpt_path
from torch_dcp_backport.checkpoint._src import store
from torch_dcp_backport.dist_checkpointing import CheckpointingException
from torch_dcp_backport.publish import disk, drafts


@pytest.fixture
def signs(tmp_path: Path) -> Path:
    """A folder for what processes tell each other; it needs containers."""
    containers.needed()
    folder = tmp_path / "signs"
    folder.mkdir()
    return folder


def tree(root: Path) -> dict[str, Any]:
    return {
        str(path.relative_to(root)): path.read_bytes() if path.is_file() else None for path in root.rglob("*")
    }


def handler_load(root: Path) -> Any:
    return Trainer(root).handler.load_checkpoint()


def manager_load(root: Path) -> Any:
    Trainer(root).manager.load_checkpoint(root / "global_step_1")
    return 1


def latest(root: Path) -> Any:
    return int(str(find_latest_ckpt_path(root)).rpartition("_")[2])


def prune(root: Path) -> Any:
    return 1 - main(["checkpoint", "prune", str(root), "--keep", "1"])


def another_step(root: Path) -> Any:
    Trainer(root).handler.save_checkpoint(3)
    return 1


OTHERS: list[Callable[[Path], Any]] = [handler_load, manager_load, latest, prune, another_step]


def saves(root: Path, signs: Path, at: str, config: Any = None) -> list[str]:
    """Save step 2, in the midst of which others come."""
    trainer = Trainer(root, config=config)
    with stopped_at(at, signs):
        trainer.handler.save_checkpoint(2)
        trainer.handler.finish()
    return sorted(path.name for path in root.iterdir() if path.name.startswith("global_step_"))


@pytest.mark.parametrize("other", OTHERS, ids=lambda other: other.__name__)
@pytest.mark.parametrize("has_proc", [True, False])
def test_a_step_that_another_container_writes_is_left_to_it(
    tmp_path: Path, signs: Path, other: Callable[[Path], Any], has_proc: bool
) -> None:
    root = tmp_path / "run"
    Trainer(root).handler.save_checkpoint(1)
    trainer = Container(lambda: saves(root, signs, "write manifest.json"), has_proc)
    wait_for(signs / "came")
    assert inside(lambda: other(root), has_proc) == 1
    # Of the machine itself: it sees every process, under another id.
    assert other(root) == 1
    (signs / "go").touch()
    assert {"global_step_1", "global_step_2"} <= set(trainer.result())
    assert Trainer(root).handler.load_checkpoint() == 2 if other is not another_step else 3


@pytest.mark.parametrize("at", ["rename the draft", "remove the folder that was replaced"])
def test_a_step_that_another_container_replaces_is_loaded(tmp_path: Path, signs: Path, at: str) -> None:
    root = tmp_path / "run"
    former = Trainer(root)
    former.train(1)
    former.handler.save_checkpoint(2)
    trainer = Container(lambda: saves(root, signs, at))
    wait_for(signs / "came")
    before = tree(root)
    assert inside(lambda: handler_load(root)) == 2
    assert tree(root) == before
    (signs / "go").touch()
    assert trainer.result() == ["global_step_2"]
    assert not list(root.glob(".*"))


def test_a_save_in_the_background_is_left_to_its_container(tmp_path: Path, signs: Path) -> None:
    root = tmp_path / "run"
    Trainer(root).handler.save_checkpoint(1)
    trainer = Container(lambda: saves(root, signs, "create __0_0", {"async_save": True}))
    wait_for(signs / "came")
    for other in OTHERS:
        assert inside(lambda other=other: other(root)) == 1
    (signs / "go").touch()
    assert "global_step_2" in trainer.result()


def test_two_containers_that_save_the_same_step(tmp_path: Path, signs: Path) -> None:
    root = tmp_path / "run"
    Trainer(root).handler.save_checkpoint(1)

    def second() -> str:
        with pytest.raises(CheckpointingException) as caught:
            saves(root, signs, "write manifest.json")
        return str(caught.value)

    trainer = Container(second)
    wait_for(signs / "came")
    inside(lambda: Trainer(root).handler.save_checkpoint(2) and None)
    (signs / "go").touch()
    assert "another writer published global_step_2" in trainer.result()
    assert Trainer(root).handler.load_checkpoint() == 2
    assert not list(root.glob(".*"))


@pytest.mark.parametrize("other", [prune, another_step], ids=["prune", "a save"])
def test_what_a_killed_container_left_goes_with_a_save_or_a_prune(
    tmp_path: Path, signs: Path, other: Callable[[Path], Any]
) -> None:
    root = tmp_path / "run"
    Trainer(root).handler.save_checkpoint(1)
    trainer = Container(lambda: saves(root, signs, "write manifest.json"))
    wait_for(signs / "came")
    trainer.kill()
    before = tree(root)
    assert len(list(root.glob(".*"))) == 1
    for load in (handler_load, manager_load, latest):
        assert inside(lambda load=load: load(root)) == 1
        assert load(root) == 1
    assert tree(root) == before
    assert inside(lambda: other(root)) == 1
    assert not list(root.glob(".*"))


def forks(root: Path, signs: Path) -> None:
    """Be the first process of a container in which a trainer dies in a save, and its data loader lives on."""
    trainer = os.fork()
    if not trainer:

        def at_manifest(name: str) -> None:
            if name == "write manifest.json":
                if not os.fork():
                    held = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
                    (signs / "held").write_text(json.dumps(held))
                    (signs / "came").touch()
                    time.sleep(600)
                wait_for(signs / "came")
                os.kill(os.getpid(), signal.SIGKILL)

        disk.on_step = at_manifest
        Trainer(root).handler.save_checkpoint(2)
    os.waitpid(trainer, 0)
    (signs / "died").touch()
    wait_for(signs / "go")


def test_a_data_loader_that_outlives_its_trainer_holds_no_draft(tmp_path: Path, signs: Path) -> None:
    """A lock is held by every process that was forked meanwhile, until the last one ends."""
    root = tmp_path / "run"
    Trainer(root).handler.save_checkpoint(1)
    container = Container(lambda: forks(root, signs))
    wait_for(signs / "died")
    held = json.loads((signs / "held").read_text())
    assert not [path for path in held if path.startswith(str(root))]
    assert inside(lambda: prune(root)) == 1
    assert not list(root.glob(".*"))
    container.kill()


def waits_in_export(target: Path, signs: Path) -> None:
    with stopped_at("rename the draft", signs):
        hf.save_state_dict({"w": torch.ones(4)}, target, like={"model_type": "none"})


def exported(target: Path) -> str:
    try:
        hf.save_state_dict({"w": torch.ones(4)}, target, like={"model_type": "none"})
    except Exception as error:
        return str(error)
    return ""


def test_two_containers_that_export_into_the_same_folder(tmp_path: Path, signs: Path) -> None:
    target = tmp_path / "model"
    first = Container(lambda: waits_in_export(target, signs))
    wait_for(signs / "came")
    assert "another export into" in inside(lambda: exported(target))
    (signs / "go").touch()
    first.result()
    assert (target / "model.safetensors").is_file()
    assert "overwrite" in inside(lambda: exported(target))


def test_a_step_that_another_container_uploads_stays(tmp_path: Path, signs: Path) -> None:
    root = tmp_path / "run"
    for step in (1, 2):
        Trainer(root).handler.save_checkpoint(step)

    def upload() -> None:
        with store.uploading(root / "global_step_1"):
            (signs / "came").touch()
            wait_for(signs / "go")

    trainer = Container(upload)
    wait_for(signs / "came")
    assert inside(lambda: prune(root)) == 1
    assert (root / "global_step_1").is_dir()
    (signs / "go").touch()
    trainer.result()
    assert inside(lambda: prune(root)) == 1
    assert not (root / "global_step_1").exists()


def test_a_part_on_a_node_that_another_container_writes_is_left_to_it(tmp_path: Path, signs: Path) -> None:
    folder, state = tmp_path / "node", {"w": torch.ones(3)}
    NearbyCheckpoints(folder, run="a").save(state, 1)

    def writes() -> bool:
        tier = NearbyCheckpoints(folder, run="a")
        with stopped_at("write manifest.json", signs):
            return tier.save(state, 2)

    trainer = Container(writes)
    wait_for(signs / "came")
    before = {name for name in tree(folder) if ".node-" not in name}
    assert inside(lambda: NearbyCheckpoints(folder, run="a").latest()) == 1
    loaded = inside(lambda: NearbyCheckpoints(folder, run="a").load({"w": torch.zeros(3)}).step)
    assert loaded == 1
    assert {name for name in tree(folder) if ".node-" not in name} == before
    assert inside(lambda: NearbyCheckpoints(folder, run="a", keep=3).save(state, 3))
    (signs / "go").touch()
    assert trainer.result()


# What a mark proves, in one process.


def own(root: Path) -> store.StepDraft:
    return store.StepDraft(root / "global_step_1")


def aged(folder: Path) -> None:
    for path in (*folder.rglob("*"), folder):
        os.utime(path, (0, 0))


def marked(draft: Path, **fields: Any) -> None:
    """Give a draft the mark of another process, which has no lock on it."""
    facts = json.loads((draft / drafts.OWNER).read_text())
    (draft / drafts.OWNER).unlink()
    facts.update(fields)
    facts["locked"] = facts["locked"] and [os.stat(draft).st_dev, 0]
    (draft / drafts.OWNER).write_text(json.dumps(facts))


ELSEWHERE = {
    "another boot of a machine of this name": {"boot": "another", "pid": 1},
    "another machine": {"host": "another", "boot": "another", "pid": 1},
    "a file system without locks": {"pid_namespace": "pid:[1]", "pid": 1, "locked": None},
    "another mount": {"pid_namespace": "pid:[1]", "pid": 1},
}


@pytest.mark.parametrize("where", ELSEWHERE)
def test_where_nothing_can_be_known_time_decides(tmp_path: Path, where: str) -> None:
    draft = own(tmp_path).folder
    marked(draft, **ELSEWHERE[where])
    assert drafts.is_alive(draft)
    aged(draft)
    assert not drafts.is_alive(draft)


def test_an_old_release_mark_is_judged_by_time_unless_its_process_is_here(tmp_path: Path) -> None:
    """It does not say in which PID namespace its id is."""
    draft = own(tmp_path).folder
    (draft / drafts.OWNER).unlink()
    old = {"host": socket.gethostname(), "pid": os.getpid(), "started": drafts.started_at(os.getpid())}
    (draft / drafts.OWNER).write_text(json.dumps(old))
    aged(draft)
    assert drafts.is_alive(draft)
    (draft / drafts.OWNER).write_text(json.dumps({**old, "started": "1"}))
    assert drafts.is_alive(draft)
    aged(draft)
    assert not drafts.is_alive(draft)


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"null", b'"x"', b"{}", b'{"host": 1, "pid": 0, "started": 1}', b"[" * 100000]
    + [
        b'{"host": "h", "pid": 1, "started": "1", "locked": %s}' % text
        for text in (b'""', b"{}", b"[1]", b"3")
    ]
    + [b'{"host": "h", "pid": %d, "started": "1"}' % (10**40)],
)
def test_a_mark_that_is_none_proves_nothing(tmp_path: Path, content: bytes) -> None:
    draft = own(tmp_path).folder
    (draft / drafts.OWNER).unlink()
    (draft / drafts.OWNER).write_bytes(content)
    assert drafts.is_alive(draft)
    aged(draft)
    assert not drafts.is_alive(draft)


def test_a_process_of_another_user_that_proc_hides_is_not_taken_for_dead(tmp_path: Path, monkeypatch) -> None:
    """/proc with hidepid=2."""
    draft = own(tmp_path).folder
    # No process can have this id.
    marked(draft, pid=2**22 + 1)
    aged(draft)

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    assert not drafts.is_alive(draft)
    monkeypatch.setattr(drafts.os, "kill", refuse)
    os.utime(draft)
    assert drafts.is_alive(draft)


def test_an_old_release_reads_a_mark_of_today_as_one_of_its_own(tmp_path: Path) -> None:
    facts = json.loads((own(tmp_path).folder / drafts.OWNER).read_text())
    # All that release 0.1.0 looks at.
    assert facts["host"] == socket.gethostname()
    assert facts["started"] == drafts.started_at(int(facts["pid"]))


def test_without_locks_a_draft_of_another_container_is_kept_by_time(
    tmp_path: Path, signs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    root = tmp_path / "run"
    Trainer(root).handler.save_checkpoint(1)
    trainer = Container(lambda: saves(root, signs, "write manifest.json"))
    wait_for(signs / "came")
    assert inside(lambda: prune(root)) == 1
    (draft,) = root.glob(".*")
    (signs / "go").touch()
    assert "global_step_2" in trainer.result()
    draft.mkdir()
    (draft / drafts.OWNER).write_text("{}")
    aged(draft)
    assert inside(lambda: prune(root)) == 1
    assert not draft.exists()


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_reader_without_the_right_to_write(tmp_path: Path, signs: Path, is_lost: bool) -> None:
    root = tmp_path / "run"
    trainer = Trainer(root)
    trainer.train(3)
    step = trainer.handler.save_checkpoint(1)
    expected = trainer.state()
    own(root)
    if is_lost:
        step.rename(root / ".global_step_1.was-01234567")
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)

    def reads() -> bool:
        os.setgid(65534)
        os.setuid(65534)
        fresh = Trainer(root)
        is_same = fresh.handler.load_checkpoint() == 1 and same(fresh.state(), expected)
        Trainer(root).manager.load_checkpoint(root / "global_step_1")
        return is_same and find_latest_ckpt_path(root) == str(root / "global_step_1")

    before = tree(root)
    assert inside(reads)
    assert tree(root) == before


@pytest.mark.parametrize("below", ["", "actor"])
def test_a_step_that_lost_its_name_is_loaded_where_it_is(tmp_path: Path, below: str) -> None:
    """Killed between two renames: the only step of the run."""
    trainer = Trainer(tmp_path)
    trainer.train(3)
    path = tmp_path / "global_step_7" / below
    if below:
        trainer.manager.save_checkpoint(path, global_step=7)
    else:
        trainer.handler.save_checkpoint(7)
    expected = trainer.state()
    path.rename(path.with_name(f".{path.name}.was-01234567"))
    before = tree(tmp_path)
    fresh = Trainer(tmp_path)
    found = find_latest_ckpt_path(tmp_path)
    assert found == str(tmp_path / "global_step_7")
    fresh.manager.load_checkpoint(Path(found) / below)
    fresh.loader.position = trainer.loader.position
    assert same(fresh.state(), expected)
    if not below:
        assert Trainer(tmp_path).handler.load_checkpoint() == 7
        resumed = Trainer(tmp_path / "b", resume_mode="resume_path", resume_from_path=path)
        assert resumed.handler.load_checkpoint() == 7
    assert tree(tmp_path) == before
    # The next save gives it its name back, and is newer.
    fresh.manager.save_checkpoint(tmp_path / "global_step_3" / below, global_step=3)
    assert path.is_dir()
    if not below:
        assert [step.step for step in store.steps_in(tmp_path)] == [3, 7]


def gone(api: Any, root: Path, at: str, is_async: bool) -> str:
    trainer = Trainer(root, config={"async_save": is_async})
    trainer.handler.save_checkpoint(1)
    trainer.handler.finish()

    def remove(name: str) -> None:
        if name.startswith(at):
            disk.on_step = None
            for draft in root.glob(".*"):
                shutil.rmtree(draft)

    if dist.get_rank() == 0:
        disk.on_step = remove
    try:
        with pytest.raises(CheckpointingException) as caught:  # noqa: PT012
            trainer.handler.save_checkpoint(2)
            trainer.handler.finish()
    finally:
        disk.on_step = None
    dist.barrier()
    assert trainer.handler.load_checkpoint() == 1
    return str(caught.value)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("at", ["create __0_0", "sync __0_0", "write metadata.json", "write manifest.json"])
def test_a_save_whose_draft_is_removed_says_so_on_every_rank(
    ranks: Any, tmp_path: Path, at: str, is_async: bool
) -> None:
    (text,) = set(ranks(gone, tmp_path, at, is_async, world=2))
    assert ".global_step_2.tmp-" in text
    assert "is gone: another process removed it while it was written here" in text
    assert "the newest complete step is 1" in text


def forked_in_a_save(root: Path) -> list[str]:
    """Return what of a run a child holds that is forked while records are written in a thread."""
    trainer = Trainer(root, config={"async_save": True})
    folder = root.parent / "signs"
    folder.mkdir()
    with stopped_at("sync __0_0", folder):
        trainer.handler.save_checkpoint(1)
        wait_for(folder / "came")
        mine = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
        assert any("__0_0.distcp" in path for path in mine)
        assert any(path.endswith(drafts.OWNER) for path in mine)
        child = os.fork()
        if not child:
            held = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
            (folder / "held").write_text(json.dumps(held))
            os._exit(0)
        os.waitpid(child, 0)
        (folder / "go").touch()
        trainer.handler.finish()
    assert not [key for key, _ in disk._own.values() if key.startswith(str(root))]
    return [path for path in json.loads((folder / "held").read_text()) if path.startswith(str(root))]


@on_ranks(world=0)
def test_a_process_that_is_forked_in_a_save_holds_none_of_its_files(api: Any, tmp_path: Path) -> None:
    assert forked_in_a_save(tmp_path / "run") == []
    assert Trainer(tmp_path / "run").handler.load_checkpoint() == 1
