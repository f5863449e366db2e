"""Steps in a store: uploaded whole or not there, brought back, and stores that fail."""

from __future__ import annotations

import json
import os
import shutil
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import dying
import fsspec
import pytest
import torch.distributed as dist
from damaging import flip
from fsspec.implementations.memory import MemoryFileSystem
from trainer import Trainer, same

from torch_dcp_backport import transfer
from torch_dcp_backport.__main__ import main
from torch_dcp_backport.checkpoint import export_checkpoint
from torch_dcp_backport.checkpoint._src import manifest, remote, store
from torch_dcp_backport.dist_checkpointing import CheckpointingException

Fault = Callable[["Store", str, str], bool]


class Store(MemoryFileSystem):
    """In memory; a fault is told of each file that comes, and may take it in its own way."""

    protocol = "faulty"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    fault: Fault | None = None
    lost = False

    def put_file(self, lpath: str, rpath: str, **options: Any) -> None:
        if Store.fault is None or not Store.fault(self, lpath, rpath):
            super().put_file(lpath, rpath, **options)

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        if Store.lost:
            raise ConnectionError("no route to the store")
        return super().ls(path, detail=detail, **options)


URL = "faulty://runs/a"


@pytest.fixture(autouse=True)
def _store(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(remote, "WAIT", 0.001)
    reset()
    yield
    reset()


def reset() -> None:
    remote.WAIT = 0.001
    fsspec.register_implementation("faulty", Store, clobber=True)
    Store.store.clear()
    Store.fault, Store.lost = None, False


def saved(root: Path, url: str, steps: int = 1, **options: Any) -> tuple[Trainer, dict[int, Any]]:
    trainer, states = Trainer(root, default_hdfs_dir=url, **options), {}
    for step in range(1, steps + 1):
        trainer.train(step, step)
        trainer.handler.save_checkpoint(step)
        states[step] = trainer.state()
    trainer.handler.finish()
    return trainer, states


def remote_faults(url: str) -> dict[int, str]:
    return {step.step: step.fault for step in remote.steps_at(remote.place_of(url))}


@pytest.mark.parametrize("kind", ["memory", "path", "file"])
def test_a_step_comes_back_where_the_local_ones_are_gone(tmp_path: Path, kind: str) -> None:
    url = {"memory": URL, "path": str(tmp_path / "far"), "file": f"file://{tmp_path}/far"}[kind]
    root = tmp_path / "root"
    _, states = saved(root, url, 2)
    assert remote_faults(url) == {2: "", 1: ""}
    shutil.rmtree(root)
    fresh = Trainer(root, default_hdfs_dir=url)
    assert fresh.handler.load_checkpoint() == 2
    assert same(fresh.state(), states[2])
    assert [path.name for path in root.iterdir()] == ["global_step_2"]
    fresh.handler.save_checkpoint(3)
    fresh.handler.finish()
    assert list(remote_faults(url)) == [3, 2, 1]


def test_where_there_is_a_good_step_the_store_is_not_asked(tmp_path: Path) -> None:
    saved(tmp_path, URL)
    Store.lost = True
    assert Trainer(tmp_path, default_hdfs_dir=URL).handler.load_checkpoint() == 1


def test_a_store_that_cannot_be_asked_is_no_new_run(tmp_path: Path) -> None:
    Store.lost = True
    with pytest.raises(CheckpointingException, match="no route to the store"):
        Trainer(tmp_path, default_hdfs_dir=URL).handler.load_checkpoint()
    Store.lost = False
    assert Trainer(tmp_path, default_hdfs_dir=URL).handler.load_checkpoint() == 0


class Azure(Store):
    """As adlfs tells of a container that is not there: without a cause."""

    protocol = ("abfs", "az")

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        try:
            raise RuntimeError("ErrorCode:ContainerNotFound")
        except RuntimeError:
            raise FileNotFoundError(path)  # noqa: B904


def test_a_container_that_is_not_there_is_no_new_run() -> None:
    with pytest.raises(remote.Failed, match="az://gone/runs: its bucket is not there"):
        remote.steps_at(remote.RemoteFolder(Azure(), "gone/runs", "az://gone/runs"))


def cut(fs: Store, lpath: str, rpath: str) -> bool:
    fs.pipe_file(rpath, Path(lpath).read_bytes()[:-1])
    return True


def turn(fs: Store, lpath: str, rpath: str) -> bool:
    data = bytearray(Path(lpath).read_bytes())
    data[len(data) // 2] ^= 1
    fs.pipe_file(rpath, bytes(data))
    return True


def refuse(fs: Store, lpath: str, rpath: str) -> bool:
    raise ConnectionResetError("by peer")


FAULTS = {refuse: "ConnectionResetError: by peer", cut: "bytes are in the store", turn: "CRC32 "}
BY_NAME = {"ids": lambda fault: getattr(fault, "__name__", None)}


@pytest.mark.parametrize("fault", FAULTS, **BY_NAME)
def test_what_fails_twice_is_tried_again(tmp_path: Path, fault: Fault) -> None:
    counts: dict[str, int] = {}

    def twice(fs: Store, lpath: str, rpath: str) -> bool:
        counts[rpath] = counts.get(rpath, 0) + 1
        return counts[rpath] <= 2 and fault(fs, lpath, rpath)

    Store.fault = twice
    _, states = saved(tmp_path / "root", URL)
    assert len(counts) > 3
    assert set(counts.values()) == {3}
    shutil.rmtree(tmp_path / "root")
    Store.fault = None
    fresh = Trainer(tmp_path / "root", default_hdfs_dir=URL)
    assert fresh.handler.load_checkpoint() == 1
    assert same(fresh.state(), states[1])


@pytest.mark.parametrize("fault", FAULTS, **BY_NAME)
def test_what_always_fails_is_an_error_of_the_next_save(tmp_path: Path, fault: Fault, caplog) -> None:
    Store.fault = fault
    trainer = Trainer(tmp_path, default_hdfs_dir=URL)
    trainer.handler.save_checkpoint(1)
    trainer.handler._uploads.wait(30)
    with pytest.raises(CheckpointingException, match=f"an upload failed: .*{FAULTS[fault]}.*5 times"):
        trainer.handler.save_checkpoint(2)
    assert [step.step for step in store.steps_in(tmp_path)] == [1]
    assert store.uploaded_to(tmp_path / "global_step_1") == ""
    assert "no manifest.json" in remote_faults(URL).get(1, "no manifest.json")
    # Said once; the store is back.
    Store.fault = None
    trainer.handler.save_checkpoint(2)
    assert trainer.handler.finish()
    assert remote_faults(URL)[2] == ""


def test_a_failed_upload_is_a_warning_where_asked(tmp_path: Path, caplog) -> None:
    Store.fault = refuse
    saved(tmp_path, URL, 2, on_upload="warn")
    assert [step.step for step in store.steps_in(tmp_path)] == [2, 1]
    assert caplog.text.count("an upload failed") == 2
    Store.fault = None
    # What was resumed from is uploaded after all.
    resumed = Trainer(tmp_path, default_hdfs_dir=URL)
    assert resumed.handler.load_checkpoint() == 2
    resumed.handler.finish()
    assert remote_faults(URL)[2] == ""


def test_a_step_that_is_being_uploaded_is_not_removed(tmp_path: Path, caplog) -> None:
    is_under_way, may_go_on = threading.Event(), threading.Event()

    def hold(fs: Store, lpath: str, rpath: str) -> bool:
        is_under_way.set()
        assert may_go_on.wait(30)
        return False

    Store.fault = hold
    trainer = Trainer(tmp_path, default_hdfs_dir=URL, max_ckpt_to_keep=1)
    trainer.handler.save_checkpoint(1)
    assert is_under_way.wait(30)
    for step in (2, 3):
        trainer.handler.save_checkpoint(step)
        assert not trainer.handler.finish(blocking=False)
    assert main(["checkpoint", "prune", str(tmp_path), "--keep", "1"]) == 0
    # The second was still to be uploaded: it is not kept for that.
    assert [step.step for step in store.steps_in(tmp_path)] == [3, 1]
    may_go_on.set()
    assert trainer.handler.finish()
    assert remote_faults(URL) == {3: "", 1: ""}
    assert "global_step_2 was not uploaded: it was removed" in caplog.text
    trainer.handler.save_checkpoint(4)
    trainer.handler.finish()
    assert [step.step for step in store.steps_in(tmp_path)] == [4]


def test_a_step_that_was_damaged_here_is_not_uploaded(tmp_path: Path) -> None:
    trainer, _ = saved(tmp_path, URL)
    (shard,) = (tmp_path / "global_step_1" / "dist_ckpt").glob("*.distcp")
    flip(shard)
    Store.store.clear()  # What is there already is not uploaded again.
    trainer.handler.upload(tmp_path / "global_step_1")
    with pytest.raises(CheckpointingException, match="is not what was saved"):
        trainer.handler.finish()


def test_list_says_what_was_uploaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer, _ = saved(tmp_path, URL)
    trainer.handler._remote = None
    trainer.handler.save_checkpoint(2)
    assert main(["checkpoint", "list", str(tmp_path)]) == 0
    _, newest, oldest, where = capsys.readouterr().out.splitlines()
    assert newest.split()[-4:] == ["complete", "-", "-", "-"]
    assert oldest.split()[-4:] == ["complete", "yes", "-", "-"]
    assert where.strip() == f"uploaded to {URL}/global_step_1"
    assert main(["checkpoint", "list", str(tmp_path), "--json"]) == 0
    steps = json.loads(capsys.readouterr().out)["steps"]
    assert [step["uploaded"] for step in steps] == [None, f"{URL}/global_step_1"]
    # Saved again, it is another one.
    trainer.train(7)
    trainer.handler.save_checkpoint(1)
    assert store.uploaded_to(tmp_path / "global_step_1") == ""


@pytest.mark.parametrize("what", ["cut", "turned", "lost", "unmarked"])
def test_what_the_store_has_not_whole_is_passed_over(tmp_path: Path, what: str, caplog) -> None:
    _, states = saved(tmp_path / "root", f"{tmp_path}/far", 2)
    folder = tmp_path / "far" / "global_step_2"
    (shard,) = (folder / "dist_ckpt").glob("*.distcp")
    if what == "cut":
        os.truncate(shard, 100)
    elif what == "turned":
        flip(shard)
    else:
        (shard if what == "lost" else folder / manifest.NAME).unlink()
    shutil.rmtree(tmp_path / "root")
    fresh = Trainer(tmp_path / "root", default_hdfs_dir=f"{tmp_path}/far")
    assert fresh.handler.load_checkpoint() == 1
    assert same(fresh.state(), states[1])
    assert "far/global_step_2" in caplog.text
    shutil.rmtree(tmp_path / "root")
    shutil.rmtree(tmp_path / "far" / "global_step_1")
    with pytest.raises(CheckpointingException, match=r"no step in .* is good: .*far/global_step_2"):
        Trainer(tmp_path / "root", default_hdfs_dir=f"{tmp_path}/far").handler.load_checkpoint()
    assert not list((tmp_path / "root").glob(".*"))


def test_where_no_local_step_is_good_the_store_s_takes_its_place(tmp_path: Path) -> None:
    _, states = saved(tmp_path / "root", f"{tmp_path}/far")
    for shard in (tmp_path / "root").rglob("*.distcp"):
        flip(shard)
    fresh = Trainer(tmp_path / "root", default_hdfs_dir=f"{tmp_path}/far")
    assert fresh.handler.load_checkpoint() == 1
    assert same(fresh.state(), states[1])


def test_a_manifest_that_names_files_elsewhere_is_refused(tmp_path: Path) -> None:
    _, _ = saved(tmp_path / "root", f"{tmp_path}/far")
    folder = tmp_path / "far" / "global_step_1"
    content = json.loads(json.loads((folder / "manifest.json").read_text())["content"])
    content["files"] = {f"../{name}": entry for name, entry in content["files"].items()}
    text = json.dumps(content)
    outer = {"crc32": zlib.crc32(text.encode()), "content": text}
    (folder / "manifest.json").write_text(json.dumps(outer))
    with pytest.raises(remote.Failed, match="a file outside the folder"):
        remote.download(remote.place_of(str(folder)), tmp_path / "other" / "global_step_1")
    assert not (tmp_path / "other").exists()


def test_a_store_that_is_the_root_itself_is_refused(tmp_path: Path) -> None:
    for there in (tmp_path, tmp_path / "root", tmp_path / "root" / "far"):
        with pytest.raises(ValueError, match="it is where steps are saved"):
            Trainer(tmp_path / "root", default_hdfs_dir=f"file://{there}")


def uploaded_until(root: Path, url: str, step: int, limit: int) -> int:
    """Save and upload in a child that is gone before the upload's `limit`-th step; how many it came to."""

    def work(begin: Callable[[], None]) -> None:
        trainer = Trainer(root, default_hdfs_dir=url)
        assert trainer.handler.load_checkpoint() == 1
        trainer.train(2, 2)
        begin()
        trainer.handler.save_checkpoint(step)
        trainer.handler.finish()

    return dying.until(limit, work, is_uploading=True)


@pytest.mark.parametrize("step", [1, 2], ids=["the same step again", "the next step"])
def test_killed_at_every_step_of_an_upload(tmp_path: Path, step: int) -> None:
    for limit in range(100):
        root, far = tmp_path / f"root{limit}", f"{tmp_path}/far{limit}"
        _, states = saved(root, far)
        total = uploaded_until(root, far, step, limit)
        good = [number for number, fault in remote_faults(far).items() if not fault]
        # Of the same step the older one is no longer whole once the newer one comes.
        assert good in ([1], [2, 1]) or (step == 1 and good == [])
        if good:
            alone = Trainer(tmp_path / f"alone{limit}", default_hdfs_dir=far)
            assert alone.handler.load_checkpoint() == good[0]
            brought = alone.state()
        fresh = Trainer(root, default_hdfs_dir=far)
        assert fresh.handler.load_checkpoint() == step
        fresh.handler.finish()
        # What was cut short is whole after the next start.
        state = fresh.state()
        if good:
            # Of the same step either one.
            expected = [state] if good[0] == step else [states[1]]
            assert any(same(brought, one) for one in (expected if step == 2 else [state, states[1]]))
        assert set(remote_faults(far).values()) == {""}
        shutil.rmtree(root)
        again = Trainer(root, default_hdfs_dir=far)
        assert again.handler.load_checkpoint() == step
        assert same(again.state(), state)
        assert not list(root.glob(".*"))
        if total < limit:
            break
    assert 3 < total < limit


def on_ranks(api: Any, root: Path, far: Path) -> str:
    reset()
    rank = dist.get_rank()
    _, states = saved(root, str(far), 2)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(root)
    dist.barrier()
    fresh = Trainer(root, default_hdfs_dir=str(far))
    assert fresh.handler.load_checkpoint() == 2
    assert same(fresh.state(), states[2])
    Store.fault = refuse
    failing = Trainer(root, default_hdfs_dir=URL)
    failing.handler.save_checkpoint(3)
    with pytest.raises(CheckpointingException) as caught:
        failing.handler.finish()
    odd = Trainer(root, default_hdfs_dir=str(far) if rank else None)
    for call in (odd.handler.load_checkpoint, lambda: odd.handler.save_checkpoint(4)):
        with pytest.raises(CheckpointingException, match="not the same on every rank: default_hdfs_dir"):
            call()
    reset()
    dist.barrier()
    return str(caught.value)


def test_ranks_hear_of_it_together(ranks, tmp_path: Path) -> None:
    (text,) = set(ranks(on_ranks, tmp_path / "root", tmp_path / "far", world=2))
    assert "rank 0: an upload failed" in text
    assert "ConnectionResetError: by peer" in text


def test_a_manager_alone_uploads_and_brings(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    folder, url = tmp_path / "global_step_1" / "actor", f"{URL}/global_step_1/actor"
    trainer.train(3)
    trainer.manager.save_checkpoint(folder, url, 1)
    assert trainer.manager.finish()
    parameters = trainer.state()["parameters"]
    shutil.rmtree(tmp_path / "global_step_1")
    fresh = Trainer(tmp_path)
    with pytest.raises(CheckpointingException, match="no manifest"):
        fresh.manager.load_checkpoint(folder, f"{URL}/global_step_9/actor")
    fresh.manager.load_checkpoint(folder, url)
    assert all(map(lambda a, b: bool((a == b).all()), parameters, fresh.state()["parameters"]))
    with pytest.raises(CheckpointingException, match="it is where the folder is saved"):
        trainer.manager.save_checkpoint(folder, str(folder), 1)


def test_progress_of_all_that_moves_bytes(tmp_path: Path) -> None:
    seen: dict[str, list[tuple[int, int]]] = {}

    def note(progress: Any) -> None:
        seen.setdefault(progress.operation, []).append((progress.done, progress.total))

    counts: dict[str, int] = {}

    def once(fs: Store, lpath: str, rpath: str) -> bool:
        counts[rpath] = counts.get(rpath, 0) + 1
        return counts[rpath] == 1 and cut(fs, lpath, rpath)

    Store.fault = once
    transfer.configure(progress=note)
    try:
        saved(tmp_path, URL)
        nbytes = manifest.read(tmp_path / "global_step_1").nbytes
        shutil.rmtree(tmp_path / "global_step_1")
        Trainer(tmp_path, default_hdfs_dir=URL).handler.load_checkpoint()
        export_checkpoint(tmp_path / "global_step_1", tmp_path / "out", like={"model_type": "linear"})
    finally:
        transfer.configure()
    assert set(seen) == {"save", "upload", "download", "verify", "load", "export"}
    for operation in ("upload", "download", "verify", "export"):
        assert seen[operation][-1][0] == seen[operation][-1][1]
    assert seen["upload"][-1] == seen["download"][-1] == (nbytes, nbytes)
    for operation in seen:
        assert [done for done, _ in seen[operation]] == sorted({done for done, _ in seen[operation]})


def test_another_store_gets_what_the_first_one_has(tmp_path: Path) -> None:
    saved(tmp_path, URL)
    handler = Trainer(tmp_path, default_hdfs_dir="faulty://runs/b").handler
    assert handler.load_checkpoint() == 1
    handler.finish()
    assert remote_faults("faulty://runs/b") == {1: ""}


def test_a_full_disk_keeps_nothing_from_being_uploaded_and_removed(tmp_path: Path, monkeypatch) -> None:
    def refuse(root: Path, step: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "write_tracker", refuse)
    saved(tmp_path, URL, steps=2, max_ckpt_to_keep=1)
    assert [step.step for step in store.steps_in(tmp_path)] == [2]
    assert remote_faults(URL) == {1: "", 2: ""}
