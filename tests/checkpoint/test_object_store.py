"""Steps in an object store: moto's S3 server, a process of its own, reached through s3fs, as S3 is."""

from __future__ import annotations

import contextlib
import itertools
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dying
import fsspec
import pytest
import torch
import torch.distributed as dist
from torch import nn
from trainer import Trainer, same

from torch_dcp_backport.__main__ import main
from torch_dcp_backport.checkpoint._src import manifest, remote, store
from torch_dcp_backport.dist_checkpointing import CheckpointingException

pytest.importorskip("moto.server")
pytest.importorskip("s3fs")

WORDS = {
    "AWS_ACCESS_KEY_ID": "none",
    "AWS_SECRET_ACCESS_KEY": "none",
    "AWS_DEFAULT_REGION": "us-east-1",
    # Else it waits for 40 s before it says that there is no connection.
    "AWS_MAX_ATTEMPTS": "1",
}


class Relay:
    """Stands between client and server; cuts one of `every` connections after `cuts_after` bytes."""

    def __init__(self, port: int) -> None:
        self.server = port
        self.cuts_after: int | None = None
        self.every = 1
        self.cut = 0
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self) -> None:
        for number in itertools.count():
            client, _ = self.socket.accept()
            server = socket.create_connection(("127.0.0.1", self.server))
            left = self.cuts_after if number % self.every == 0 else None
            for ends in ((client, server), (server, client)):
                threading.Thread(target=self.carry, args=(*ends, left), daemon=True).start()

    def carry(self, source: socket.socket, target: socket.socket, left: int | None) -> None:
        """What one end sends; moto takes one request of a connection."""
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data[:left])
                if left is not None:
                    left -= len(data)
                    if left <= 0:
                        self.cut += 1
                        break
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@pytest.fixture(scope="module")
def only_relay() -> Iterator[Relay]:
    """One for all: fsspec keeps what it connected to."""
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        found = None
        while found is None:
            found = re.search(r"http://127\.0\.0\.1:(\d+)", process.stderr.readline())
        threading.Thread(target=process.stderr.read, daemon=True).start()
        yield Relay(int(found[1]))
        process.kill()


@pytest.fixture(autouse=True)
def relay(only_relay: Relay, monkeypatch: pytest.MonkeyPatch) -> Relay:
    for name, value in {**WORDS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{only_relay.port}"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(remote, "WAIT", 0.001)
    only_relay.cuts_after, only_relay.every, only_relay.cut = None, 1, 0
    return only_relay


@pytest.fixture
def far(request: pytest.FixtureRequest) -> str:
    """A bucket of this test's own."""
    bucket = re.sub(r"[^a-z0-9]+", "-", request.node.name).strip("-")[:60]
    client().mkdir(bucket)
    return f"s3://{bucket}/runs/a"


def client() -> Any:
    return fsspec.filesystem("s3", skip_instance_cache=True, use_listings_cache=False)


def saved(root: Path, url: str, steps: int = 1, **options: Any) -> list[dict[str, Any]]:
    trainer, states = Trainer(root, default_hdfs_dir=url, **options), []
    for step in range(1, steps + 1):
        trainer.train(step, step)
        trainer.handler.save_checkpoint(step)
        states.append(trainer.state())
    trainer.handler.finish()
    return states


def faults(url: str) -> dict[int, str]:
    return {step.step: step.fault for step in remote.steps_at(remote.place_of(url))}


def test_a_step_comes_back_where_the_local_ones_are_gone(tmp_path: Path, far: str, capsys) -> None:
    root = tmp_path / "root"
    states = saved(root, far, 3)
    assert faults(far) == {3: "", 2: "", 1: ""}
    assert main(["checkpoint", "list", str(root)]) == 0
    assert f"uploaded to {far}/global_step_3" in " ".join(capsys.readouterr().out.split())
    shutil.rmtree(root)
    fresh = Trainer(root, default_hdfs_dir=far)
    assert fresh.handler.load_checkpoint() == 3
    assert same(fresh.state(), states[2])
    # The newest is torn in the store: the one before, loudly.
    shutil.rmtree(root)
    place = remote.place_of(far).below("global_step_3")
    name = next(path for path in client().find(place.path) if path.endswith(".distcp"))
    data = bytearray(client().cat_file(name))
    data[len(data) // 2] ^= 1
    client().pipe_file(name, bytes(data))
    again = Trainer(root, default_hdfs_dir=far)
    assert again.handler.load_checkpoint() == 2
    assert same(again.state(), states[1])


def test_a_file_of_several_parts(tmp_path: Path, far: str) -> None:
    # s3fs sends what is larger than two blocks of 50 MiB in parts; the moments are as large as the model.
    state = saved(tmp_path / "root", far, model=nn.Linear(10, 2**20, bias=False))[0]
    (name,) = (path for path in client().find(far) if path.endswith(".distcp"))
    assert client().info(name)["ETag"].strip('"').endswith("-3")
    shutil.rmtree(tmp_path / "root")
    fresh = Trainer(tmp_path / "root", nn.Linear(10, 2**20, bias=False), default_hdfs_dir=far)
    assert fresh.handler.load_checkpoint() == 1
    assert same(fresh.state(), state)


def test_a_network_that_is_gone(tmp_path: Path, far: str, relay: Relay) -> None:
    trainer = Trainer(tmp_path / "root", default_hdfs_dir=far)
    trainer.train(1)
    relay.cuts_after = 300
    trainer.handler.save_checkpoint(1)
    trainer.handler._uploads.wait(120)
    with pytest.raises(CheckpointingException, match=r"an upload failed: .*global_step_1.*\(5 times\)"):
        trainer.handler.save_checkpoint(2)
    assert relay.cut >= remote.TRIES
    relay.cuts_after = None
    assert faults(far) == {}
    # The network is back.
    trainer.handler.save_checkpoint(2)
    assert trainer.handler.finish()
    assert faults(far) == {2: ""}
    shutil.rmtree(tmp_path / "root")
    # A step that cannot be brought is no new run.
    relay.cuts_after = 300
    with pytest.raises(CheckpointingException, match=re.escape(far)):
        Trainer(tmp_path / "root", default_hdfs_dir=far).handler.load_checkpoint()
    relay.cuts_after = None
    assert Trainer(tmp_path / "root", default_hdfs_dir=far).handler.load_checkpoint() == 2


def test_connections_that_are_cut_now_and_then(tmp_path: Path, far: str, relay: Relay) -> None:
    relay.cuts_after, relay.every = 300, 3
    states = saved(tmp_path / "root", far, 8)
    assert relay.cut > 10
    shutil.rmtree(tmp_path / "root")
    fresh = Trainer(tmp_path / "root", default_hdfs_dir=far)
    assert fresh.handler.load_checkpoint() == 8
    assert same(fresh.state(), states[-1])
    relay.cuts_after = None
    assert faults(far) == dict.fromkeys(range(8, 0, -1), "")


@pytest.mark.parametrize("through", ["", "dir::", "simplecache::"])
def test_a_bucket_that_is_not_there_is_an_error_and_is_not_made(tmp_path: Path, through: str) -> None:
    url = f"{through}s3://a-typing-error/runs"
    with pytest.raises(CheckpointingException, match=f"{url}: its bucket is not there: The specified bucket"):
        Trainer(tmp_path, default_hdfs_dir=url).handler.load_checkpoint()
    trainer = Trainer(tmp_path, default_hdfs_dir=url)
    trainer.handler.save_checkpoint(1)
    with pytest.raises(CheckpointingException, match=r"an upload failed: .*bucket does not exist"):
        trainer.handler.finish()
    with pytest.raises(remote.Failed, match=r"bucket|no manifest\.json"):
        remote.download(remote.place_of(url).below("global_step_1"), tmp_path / "other")
    assert not client().exists("a-typing-error")
    assert [step.step for step in store.steps_in(tmp_path)] == [1]


def test_a_folder_with_the_name_of_an_error_is_a_new_run(tmp_path: Path, far: str) -> None:
    assert Trainer(tmp_path, default_hdfs_dir=f"{far}/NoSuchBucket").handler.load_checkpoint() == 0


def test_killed_at_every_step_of_an_upload(tmp_path: Path, far: str) -> None:
    for limit in range(100):
        root, url = tmp_path / f"root{limit}", f"{far}/{limit}"
        (state,) = saved(root, url)

        def work(begin: Callable[[], None], root: Path = root, url: str = url) -> None:
            trainer = Trainer(root, default_hdfs_dir=url)
            assert trainer.handler.load_checkpoint() == 1
            trainer.train(2, 2)
            begin()
            trainer.handler.save_checkpoint(2)
            trainer.handler.finish()

        total = dying.until(limit, work, is_uploading=True)
        good = [number for number, fault in faults(url).items() if not fault]
        assert good in ([1], [2, 1])
        alone = Trainer(tmp_path / f"alone{limit}", default_hdfs_dir=url)
        assert alone.handler.load_checkpoint() == good[0]
        assert same(alone.state(), state) == (good == [1])
        fresh = Trainer(root, default_hdfs_dir=url)
        assert fresh.handler.load_checkpoint() == 2
        fresh.handler.finish()
        assert faults(url) == {2: "", 1: ""}
        if total < limit:
            break
    assert 3 < total < limit


def on_ranks(api: Any, root: Path, far: str) -> list[int]:
    rank = dist.get_rank()
    trainer = Trainer(root, default_hdfs_dir=far)
    trainer.train(4)
    trainer.handler.save_checkpoint(1)
    trainer.handler.finish()
    state = trainer.state()
    dist.barrier()
    if rank == 0:
        shutil.rmtree(root)
    dist.barrier()
    fresh = Trainer(root, default_hdfs_dir=far)
    step = fresh.handler.load_checkpoint()
    assert all(map(torch.equal, fresh.state()["parameters"], state["parameters"]))
    return [step, manifest.read(root / "global_step_1").step]


def test_ranks(ranks, tmp_path: Path, far: str) -> None:
    # The pool's ranks begin with this test's environment.
    assert ranks(on_ranks, tmp_path / "root", far, world=2) == [[1, 1]] * 2
