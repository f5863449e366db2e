"""Steps on the nodes themselves: four ranks on two pretended nodes, lost nodes and torn copies."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dying
import pytest
import torch
import torch.distributed as dist
from heard import heard
from pool import on_ranks
from torch import nn

from torch_dcp_backport import compat
from torch_dcp_backport.checkpoint import NearbyCheckpoints
from torch_dcp_backport.checkpoint._src import manifest, nearby
from torch_dcp_backport.checkpoint._src.node_folder import Contents, Part
from torch_dcp_backport.dist_checkpointing import CheckpointingException
from torch_dcp_backport.publish import disk, drafts
from torch_dcp_backport.state_dict import get_state_dict, set_state_dict

try:
    from torch.distributed.fsdp import fully_shard
except ImportError:  # torch 2.4 and 2.5
    from torch.distributed._composable.fsdp import fully_shard


def node_here() -> str:
    return f"n{dist.get_rank() // 2}"


def on_nodes(root: Path, **options: Any) -> NearbyCheckpoints:
    """Two ranks on each node, and a folder for each node."""
    options = {"run": "a", "node": node_here(), "timeout": 15.0, **options}
    return NearbyCheckpoints(root / node_here(), **options)


class Training:
    """Five and four rows on four ranks: one rank has no row of the first layer."""

    def __init__(self, seed: int = 0) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4))
        for layer in self.model:
            fully_shard(layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.seen = 0

    def train(self, step: int) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter) * step
        self.optimizer.step()
        self.seen = 10 * step + dist.get_rank()

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "seen": self.seen}

    def resume(self, tier: NearbyCheckpoints) -> Any:
        loaded = tier.load(self.state())
        if loaded is not None:
            model, optimizer = loaded.state["model"], loaded.state["optimizer"]
            set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)
            self.seen = loaded.state["seen"]
        return loaded

    def values(self) -> list[torch.Tensor]:
        state = self.state()
        moments = [value for states in state["optimizer"]["state"].values() for value in states.values()]
        tensors = [
            getattr(tensor, "_local_tensor", tensor) for tensor in [*state["model"].values(), *moments]
        ]
        return [*(tensor.detach().clone() for tensor in tensors), torch.tensor(self.seen)]


def trained(root: Path, steps: int = 3, **options: Any) -> dict[int, list[torch.Tensor]]:
    """Train and save after each step; the values that each step had."""
    training, tier, values = Training(), on_nodes(root, **options), {}
    for step in range(1, steps + 1):
        training.train(step)
        assert tier.save(training.state(), step)
        values[step] = training.values()
    return values


def equal(values: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return len(values) == len(expected) and all(map(torch.equal, values, expected))


def once(function: Any, *args: Any) -> None:
    """Call on the first rank, while the others wait."""
    dist.barrier()
    if dist.get_rank() == 0:
        function(*args)
    dist.barrier()


def files_of(root: Path, node: str, rank: int, step: int) -> Path:
    (folder,) = (root / node / f"rank_{rank}").glob(f"step_{step}.*")
    return folder


def refused(call: Any, *args: Any) -> str:
    with pytest.raises(CheckpointingException) as caught:
        call(*args)
    dist.barrier()
    return str(caught.value)


@pytest.mark.parametrize("lost", ["no node", "n0", "n1"])
@on_ranks()
def test_a_node_is_lost_and_the_training_goes_on_bit_for_bit(api: Any, tmp_path: Path, lost: str) -> None:
    expected = trained(tmp_path)
    if lost != "no node":
        once(shutil.rmtree, tmp_path / lost)
    training, tier = Training(1), on_nodes(tmp_path)
    assert tier.latest() == 3
    loaded = training.resume(tier)
    assert loaded.step == 3
    assert equal(training.values(), expected[3])
    assert loaded.copied_from == ({"n0": "n1", "n1": "n0"}[lost] if node_here() == lost else "")
    # It is at home again, and the next save has its copies again.
    training.train(4)
    assert tier.save(training.state(), 4)
    once(shutil.rmtree, tmp_path / ("n0" if lost == "n1" else "n1"))
    again = Training(2)
    assert again.resume(on_nodes(tmp_path)).step == 4
    assert equal(again.values(), training.values())


@on_ranks()
def test_ranks_that_are_restarted_on_other_nodes_find_their_parts(api: Any, tmp_path: Path) -> None:
    expected = trained(tmp_path)
    # The nodes have changed places; and the folder of the new n0 has no copies.
    once(os.rename, tmp_path / "n0", tmp_path / "x")
    once(os.rename, tmp_path / "n1", tmp_path / "n0")
    once(os.rename, tmp_path / "x", tmp_path / "n1")
    once(lambda: [shutil.rmtree(tmp_path / "n0" / f"rank_{rank}") for rank in (0, 1)])
    training = Training(1)
    loaded = training.resume(on_nodes(tmp_path))
    assert (loaded.step, loaded.copied_from) == (3, "n1" if node_here() == "n0" else "")
    assert equal(training.values(), expected[3])


def flip(folder: Path) -> None:
    (path,) = (folder / "dist_ckpt").glob("__*.distcp")
    data = bytearray(path.read_bytes())
    data[-300] ^= 4
    path.write_bytes(data)


def cut(folder: Path) -> None:
    (path,) = (folder / "dist_ckpt").glob("__*.distcp")
    os.truncate(path, path.stat().st_size - 1)


def of_rank_1(folder: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(next((folder.parent.parent / "rank_1").glob(folder.name)), folder)


@pytest.mark.parametrize("damage", [flip, cut, of_rank_1, shutil.rmtree])
@pytest.mark.parametrize("places", [["n0"], ["n0", "n1"]], ids=["at home", "at home and at the peer"])
@on_ranks()
def test_a_torn_part_is_not_used(api: Any, tmp_path: Path, damage: Any, places: list[str]) -> None:
    expected = trained(tmp_path)
    for node in places:
        once(lambda node=node: damage(files_of(tmp_path, node, 0, 3)))
    training = Training(1)
    loaded = training.resume(on_nodes(tmp_path))
    is_whole = places == ["n0"]
    assert loaded.step == (3 if is_whole else 2)
    assert loaded.copied_from == ("n1" if is_whole and dist.get_rank() == 0 else "")
    assert equal(training.values(), expected[loaded.step])


@on_ranks()
def test_a_torn_copy_that_is_asked_for_is_refused_by_its_digest(api: Any, tmp_path: Path) -> None:
    expected = trained(tmp_path)
    once(flip, files_of(tmp_path, "n1", 0, 3))
    once(shutil.rmtree, tmp_path / "n0")
    with heard("checkpoint") as records:
        training = Training(1)
        assert training.resume(on_nodes(tmp_path)).step == 2
    assert equal(training.values(), expected[2])
    assert not list((tmp_path / "n0" / "rank_0").glob("*step_3.*"))
    if dist.get_rank() == 0:
        assert any("the part of rank 0 on n1 is torn" in text for text in records)
        assert any("no node has a whole part of rank 0" in text for text in records)
        assert any(
            "step 2: ranks 0-1 had no whole part at home; the copies on n1" in text for text in records
        )


@on_ranks()
def test_a_load_does_not_go_back_behind_the_shared_folder(api: Any, tmp_path: Path) -> None:
    expected, tier = trained(tmp_path, 3), on_nodes(tmp_path)
    for node in ("n0", "n1"):
        once(lambda node=node: flip(files_of(tmp_path, node, 0, 3)))
    training = Training(1)
    before = training.values()
    assert tier.latest() == 3
    assert tier.load(training.state(), newer_than=2) is None
    assert equal(training.values(), before)
    state = training.state()
    assert tier.load(state, newer_than=1).step == 2
    assert equal(training.values()[:-1], expected[2][:-1])
    rank = dist.get_rank()
    text = refused(lambda: tier.load(state, newer_than=1 + (rank == 2)))
    assert "not the same on every rank: newer_than (expected 1 as on rank 0, got 2)" in text
    text = refused(lambda: tier.load(state, newer_than=-1 if rank == 2 else 1))
    assert "rank 2: ValueError: newer_than=-1: expected a whole number from 0 on" in text


def save_four(api: Any, root: Path) -> None:
    trained(root)


def load_two(api: Any, root: Path) -> tuple[Any, str]:
    training, tier = Training(1), on_nodes(root, node=f"n{dist.get_rank()}")
    tier = NearbyCheckpoints(root / f"n{dist.get_rank()}", run="a", node=f"n{dist.get_rank()}")
    before, latest = training.values(), tier.latest()
    text = refused(training.resume, tier)
    assert equal(training.values(), before)
    assert tier.load(training.state(), newer_than=3) is None
    training.train(9)
    # A save of these ranks is newer than what they cannot load, and removes it where two steps are kept.
    assert tier.save(training.state(), 9)
    assert tier.latest() == 9
    return latest, text


def test_another_number_of_ranks_is_refused_by_name(ranks, tmp_path: Path) -> None:
    ranks(save_four, tmp_path)
    ((latest, text),) = set(ranks(load_two, tmp_path, world=2))
    assert latest is None
    assert "step 3 was saved nearby by 4 ranks, and 2 ranks are here" in text
    assert "load from the shared folder" in text


@pytest.mark.parametrize("what", ["shape", "key", "more", "missing"])
@on_ranks()
def test_another_layout_is_refused_and_nothing_is_changed(api: Any, tmp_path: Path, what: str) -> None:
    tier, rank = on_nodes(tmp_path), dist.get_rank()
    tier.save({"w": torch.ones(4), "v": torch.ones(2)}, 1)
    odd = what if rank == 2 else ""
    state = {"w": torch.zeros(5 if odd == "shape" else 4), "v": torch.zeros(2)}
    if odd == "key":
        state["u"] = state.pop("v")
    if odd == "more":
        state["u"] = torch.zeros(1)
    if odd == "missing":
        del state["v"]
    text = refused(tier.load, state)
    says = {"shape": "wrong global shape: w", "key": "u", "more": "u", "missing": "loaded by no rank: v"}
    assert "rank 2: " in text
    assert says[what] in text
    assert "load from the shared folder" in text
    assert not any(bool(tensor.any()) for tensor in state.values())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"keep": 5}, "not the same on every rank: keep (expected 2 as on rank 0, got 5)"),
        ({"step": 7}, "not the same on every rank: step (expected 1 as on rank 0, got 7)"),
        ({"step": -1}, "step=-1: expected a whole number"),
        ({"folder": "x"}, "another folder than rank 2 of the same node, n1: folder"),
        ({"folder": "file"}, "FileExistsError"),
        (
            {"state": {"a.b": torch.ones(2), "a": {"b": torch.zeros(2)}}},
            "two tensors of one rank have the key a.b",
        ),
        ({"state": {"f": Contents}}, "not known to be harmless"),
        ({"state": [1]}, "expected a dict, got list"),
    ],
)
@on_ranks()
def test_what_one_rank_does_wrong_is_told_on_all(api: Any, tmp_path: Path, options: Any, says: str) -> None:
    odd = options if dist.get_rank() == 3 else {}
    if "folder" in odd:
        (tmp_path / "file").touch()
        tier = NearbyCheckpoints(tmp_path / odd["folder"], run="a", node=node_here(), timeout=15.0)
        if odd["folder"] == "file":
            tier = NearbyCheckpoints(tmp_path / "file", run="a", node="alone", timeout=15.0)
    else:
        tier = on_nodes(tmp_path, keep=odd.get("keep", 2))
    text = refused(tier.save, odd.get("state", {"w": torch.ones(2)}), odd.get("step", 1))
    assert says in text
    assert "rank 3: " in text
    assert not list(tmp_path.rglob("step_*"))


@on_ranks()
def test_an_outcome_that_ranks_do_not_share_is_an_error_on_all(api: Any, tmp_path: Path) -> None:
    tier = on_nodes(tmp_path, on_failure="warn" if dist.get_rank() else "raise")
    with pytest.raises(CheckpointingException, match="on_failure"):
        tier.save({"weight": torch.ones(2)}, 1)


@on_ranks()
def test_two_nodes_with_one_folder_are_refused(api: Any, tmp_path: Path) -> None:
    tier = NearbyCheckpoints(tmp_path / "shared", run="a", ranks_per_node=2)
    text = refused(tier.save, {"w": torch.ones(2)}, 1)
    assert "two nodes have the same folder, which must be each node's own" in text
    assert "node 0 and node 1" in text
    text = refused(NearbyCheckpoints(tmp_path / node_here(), run="a", node=node_here(), replicas=2).latest)
    assert "too few nodes: replicas=2 (expected at least 3, got 2)" in text


@on_ranks()
def test_ranks_of_one_node_see_one_folder(api: Any, tmp_path: Path) -> None:
    tier = on_nodes(tmp_path)
    if dist.get_rank() == 1:
        # As in a container of its own, with a /dev/shm of its own.
        (tmp_path / "own").mkdir()
        tier._here.root = tmp_path / "own"
    text = refused(tier.save, {"w": torch.ones(2)}, 1)
    assert "rank 1: not the folder that rank 0 of the same node, n0, has under this name" in text


@on_ranks()
def test_a_torn_step_does_not_count_among_those_that_are_kept(api: Any, tmp_path: Path) -> None:
    expected, tier = trained(tmp_path, 3), on_nodes(tmp_path)
    for node in ("n0", "n1"):
        once(lambda node=node: flip(files_of(tmp_path, node, 0, 3)))
    training = Training(1)
    assert training.resume(tier).step == 2
    assert tier.save(training.state(), 4)
    dist.barrier()  # the first rank of each node removes
    assert {path.name[:6] for path in (tmp_path / "n0" / "rank_0").iterdir()} == {
        "step_2",
        "step_3",
        "step_4",
    }
    for node in ("n0", "n1"):
        once(lambda node=node: flip(files_of(tmp_path, node, 0, 4)))
    assert training.resume(on_nodes(tmp_path)).step == 2
    assert equal(training.values(), expected[2])


@pytest.mark.parametrize("where", ["writing", "copying"])
@pytest.mark.parametrize("on_failure", ["raise", "warn"])
@on_ranks()
def test_a_disk_that_is_full_on_one_rank(api: Any, tmp_path: Path, where: str, on_failure: str) -> None:
    training, tier = Training(), on_nodes(tmp_path, on_failure=on_failure)
    training.train(1)
    tier.save(training.state(), 1)
    values = training.values()
    training.train(2)

    def fill(name: str) -> None:
        if name == ("create __2_0.distcp" if where == "writing" else "create __0_0.distcp"):
            raise OSError(28, "No space left on device")

    disk.on_step = fill if dist.get_rank() == 2 else None
    try:
        if on_failure == "raise":
            text = refused(tier.save, training.state(), 2)
            assert "rank 2: OSError: [Errno 28] No space left on device" in text
            assert "rank 0" not in text
        else:
            assert tier.save(training.state(), 2) is False
    finally:
        disk.on_step = None
    assert not list(tmp_path.rglob(".step_*"))
    assert tier.latest() == (1 if where == "writing" else 2)
    fresh = Training(1)
    fresh.resume(on_nodes(tmp_path, on_failure=on_failure))
    assert equal(fresh.values(), values if where == "writing" else training.values())
    assert tier.save(training.state(), 3)
    dist.barrier()  # the first rank of each node removes
    saves = {folder.name.partition(".")[0] for folder in tmp_path.rglob("step_*")}
    # A step without all of its copies goes with the next whole one.
    assert saves == {"step_1", "step_3"}


@on_ranks()
def test_saves_that_fail_do_not_fill_the_disk(api: Any, tmp_path: Path) -> None:
    rank, tier, state = dist.get_rank(), on_nodes(tmp_path, on_failure="warn"), {"w": torch.ones(2)}

    def fails(step: int, where: str) -> None:
        def fail(name: str) -> None:
            if name == where and (step != 9 or list(tmp_path.rglob("step_8.*"))):
                raise OSError(28, "No space left on device")

        disk.on_step = fail if rank == 2 else None
        try:
            assert tier.save(state, step) is False
        finally:
            disk.on_step = None
        dist.barrier()

    def steps() -> list[str]:
        return sorted(path.name.partition(".")[0] for path in tmp_path.rglob("step_*"))

    tier.save(state, 1)
    for step in (2, 3, 4):
        fails(step, "rename the draft")
        # Three ranks have published their parts.
        assert steps() == [*["step_1"] * 8, *[f"step_{step}"] * 3]
        dist.barrier()
    fails(8, "create __0_0.distcp")  # the copy that rank 2 gets
    assert "step_4" not in steps()
    dist.barrier()
    fails(9, "create __2_0.distcp")  # no room beside the step before
    assert tier.latest() == 8
    assert tier.save(state, 9)
    dist.barrier()
    assert steps() == [*["step_1"] * 8, *["step_9"] * 8]


@on_ranks()
def test_a_part_that_cannot_be_removed_is_no_error_of_one_rank(api: Any, tmp_path: Path) -> None:
    rank, tier = dist.get_rank(), on_nodes(tmp_path, keep=1, timeout=5.0)

    def fail(name: str) -> None:
        if name.startswith(("remove .step_1.", "remove .step_2.")):
            raise OSError(5, "Input/output error")
        if name == "create __1_0.distcp" and rank == 3 and not (tmp_path / "failed").exists():
            raise OSError(28, "No space left on device")

    tier.save({"w": torch.zeros(2)}, 1)
    disk.on_step = fail
    try:
        refused(tier.save, {"w": torch.zeros(2)}, 2)
        once((tmp_path / "failed").touch)
        for step in (3, 4):
            assert tier.save({"w": torch.full((2,), float(step))}, step)
    finally:
        disk.on_step = None
    wanted = {"w": torch.zeros(2)}
    assert tier.load(wanted).step == 4
    assert wanted["w"].tolist() == [4.0, 4.0]


@on_ranks()
def test_the_newest_steps_are_kept_and_what_is_not_ours_stays(api: Any, tmp_path: Path) -> None:
    once(lambda: [(tmp_path / "n0/rank_0/step_1.mine").mkdir(parents=True), (tmp_path / "n0/file").touch()])
    once(lambda: (tmp_path / "n0/rank_0/step_1.00000000").mkdir())
    trained(tmp_path, 4)
    dist.barrier()  # the first rank of each node removes
    every = {folder.name.partition(".")[0] for folder in tmp_path.rglob("step_?.????????")}
    assert every == {"step_1", "step_3", "step_4"}
    assert len(list(tmp_path.rglob("step_4.*"))) == 8
    assert sorted(path.name for path in (tmp_path / "n0/rank_0").glob("step_1.*")) == [
        "step_1.00000000",
        "step_1.mine",
    ]
    assert (tmp_path / "n0/file").exists()
    # After a step back the lower step is the newer one.
    training, tier = Training(5), on_nodes(tmp_path)
    training.train(2)
    tier.save(training.state(), 2)
    assert tier.latest() == 2
    fresh = Training(1)
    assert fresh.resume(on_nodes(tmp_path)).step == 2
    assert equal(fresh.values(), training.values())


def tree(root: Path) -> dict[str, bytes]:
    """Return every file and folder, with its bytes."""
    return {str(path): path.read_bytes() if path.is_file() else b"" for path in root.rglob("*")}


def leave(part: Path) -> list[Path]:
    """Leave what killed processes leave: a draft, one that was given up, and a part half removed."""
    here = {"boot": drafts.boot(), "pid_namespace": drafts.pid_namespace()}
    dead = {"host": socket.gethostname(), "pid": os.getpid(), "started": "long ago", **here}
    hidden = [part.with_name(f".{part.name}.{kind}-0a1b2c3d") for kind in ("tmp", "off", "old")]
    for path in hidden:
        shutil.copytree(part, path)
        if path != hidden[2]:
            (path / "manifest.json").unlink()
            (path / "owner.json").write_text(json.dumps(dead))
    (hidden[2] / "part.json").unlink()
    return hidden


@on_ranks()
def test_a_folder_of_another_run_is_not_touched(api: Any, tmp_path: Path) -> None:
    on_nodes(tmp_path).save({"w": torch.ones(2)}, 1)
    once(lambda: leave(files_of(tmp_path, "n0", 0, 1)))
    # The folder of n1 has no part of another run.
    once(shutil.rmtree, tmp_path / "n1")
    before = tree(tmp_path)
    dist.barrier()
    for call in ("save", "load", "latest"):
        tier = on_nodes(tmp_path, run="b")
        arguments: tuple[Any, ...] = {"save": ({"w": torch.ones(2)}, 2), "load": ({"w": torch.ones(2)},)}.get(
            call, ()
        )
        assert "rank 0: AnotherRun: " in refused(getattr(tier, call), *arguments)
        assert tree(tmp_path) == before
        dist.barrier()


def test_what_a_killed_run_left_is_removed_by_that_run_alone(tmp_path: Path, caplog) -> None:
    state = {"w": torch.ones(2)}
    NearbyCheckpoints(tmp_path, run="a", keep=1).save(state, 1)
    (part,) = (tmp_path / "rank_0").glob("step_1.*")
    hidden = leave(part)
    empty = part.with_name(f".{part.name}.tmp-00000000")
    empty.mkdir()
    shutil.rmtree(part)
    before = [tree(path) for path in hidden]
    assert NearbyCheckpoints(tmp_path, run="b", keep=1).save(state, 2)
    assert [tree(path) for path in hidden] == before
    assert not empty.exists()
    assert all(
        f"{path}: left alone, as nothing proves that the run 'b' saved it" in caplog.text for path in hidden
    )
    shutil.rmtree(next((tmp_path / "rank_0").glob("step_2.*")))
    resumed = NearbyCheckpoints(tmp_path, run="a", keep=1)
    assert resumed.latest() is None
    assert [tree(path) for path in hidden] == before
    assert resumed.save(state, 3)
    assert not list(tmp_path.rglob(".step_*"))


@on_ranks()
def test_parts_of_another_run_are_refused_and_stay(api: Any, tmp_path: Path) -> None:
    first, state = on_nodes(tmp_path), {"w": torch.ones(2)}
    first.save(state, 1)
    wanted = {"w": torch.zeros(2)}
    # The folder of n1 has no part of another run.
    once(shutil.rmtree, tmp_path / "n1")
    second = on_nodes(tmp_path, run="b", keep=1)
    for text in (
        refused(second.load, wanted),
        refused(second.latest),
        refused(second.save, {"w": torch.ones(2) * 2}, 9),
    ):
        assert "rank 0: AnotherRun: " in text
        assert "n0 has parts of the run 'a'" in text
        assert "this is the run 'b': each run has a folder of its own" in text
    assert not wanted["w"].any()
    assert len(list(tmp_path.rglob("step_1.*"))) == 4
    assert not list(tmp_path.rglob("step_9.*"))
    # Both may begin at the same time, in a folder without parts.
    save = files_of(tmp_path, "n0", 0, 1).name
    assert second._here.retire(before=9) == second._here.give_up(save) == []
    dist.barrier()
    assert len(list(tmp_path.rglob("step_1.*"))) == 4
    assert first.load(wanted).step == 1
    dist.barrier()
    text = refused(on_nodes(tmp_path, run="c" if dist.get_rank() == 2 else "a").latest)
    assert "run (expected a as on rank 0, got c)" in text


def of_run_c(path: Path) -> None:
    path.write_text(path.read_text().replace('"run": "a"', '"run": "c"'))


@pytest.mark.parametrize("damage", [os.unlink, of_run_c, lambda path: path.write_bytes(b"{")])
def test_a_part_goes_whose_part_json_was_damaged(tmp_path: Path, damage: Any) -> None:
    tier, state = NearbyCheckpoints(tmp_path, run="a", keep=1), {"w": torch.ones(2)}
    tier.save(state, 1)
    (part,) = (tmp_path / "rank_0").glob("step_1.*")
    damage(part / "part.json")
    assert tier.load(state) is None
    tier.save(state, 2)
    assert [path.name[:6] for path in (tmp_path / "rank_0").iterdir()] == ["step_2"]


def test_a_part_that_nothing_proves_stays_and_is_named_once(tmp_path: Path, caplog) -> None:
    tier, state = NearbyCheckpoints(tmp_path, run="a", keep=1), {"w": torch.ones(2)}
    tier.save(state, 1)
    (part,) = (tmp_path / "rank_0").glob("step_1.*")
    (part / "manifest.json").write_bytes(b"{")
    before = tree(part)
    for step in (2, 3):
        tier.save(state, step)
    assert tree(part) == before
    assert caplog.text.count(f"{part}: left alone, as nothing proves that the run 'a' saved it") == 1


def test_parts_of_release_0_1_0_are_refused_by_name(tmp_path: Path) -> None:
    NearbyCheckpoints(tmp_path, run="a").save({"w": torch.ones(2)}, 1)
    (part,) = (tmp_path / "rank_0").glob("step_1.*")
    said = {"format": 1, "rank": 0, "save": part.name, "world": 1}
    (part / "part.json").write_text(json.dumps(said))
    content = manifest.read(part)
    files = {**content.files, "part.json": manifest.entry_of(part / "part.json")}
    manifest.write(part, dataclasses.replace(content, files=files))
    before = tree(tmp_path)
    with pytest.raises(CheckpointingException) as caught:
        NearbyCheckpoints(tmp_path, run="a").latest()
    text = str(caught.value)
    assert f"has parts of release 0.1.0, such as {part}: its part.json is of format 1, and not 2" in text
    assert f"remove {tmp_path}/rank_*/step_*, or take another folder" in text
    assert tree(tmp_path) == before


def test_copies_that_a_user_made_of_parts_stay(tmp_path: Path) -> None:
    tier, state = NearbyCheckpoints(tmp_path, run="a", keep=1), {"w": torch.ones(2)}
    tier.save(state, 1)
    (part,) = (tmp_path / "rank_0").glob("step_1.*")
    made = [
        part.with_name("step_1.0000aaaa"),
        tmp_path / "rank_00" / part.name,
        tmp_path / "rank_1" / part.name,
    ]
    for copy in made:
        shutil.copytree(part, copy)
    tier.save(state, 2)
    assert not part.exists()
    assert all((copy / "manifest.json").exists() for copy in made)


@on_ranks()
def test_two_copies_outlive_two_nodes(api: Any, tmp_path: Path) -> None:
    rank = dist.get_rank()
    tier = NearbyCheckpoints(tmp_path / f"n{rank}", run="a", ranks_per_node=1, replicas=2, timeout=15.0)
    tier.save({"w": torch.full((3,), rank)}, 1)
    for node in ("n0", "n1"):
        once(shutil.rmtree, tmp_path / node)
    state = {"w": torch.zeros(3, dtype=torch.int64)}
    again = NearbyCheckpoints(tmp_path / f"n{rank}", run="a", ranks_per_node=1, replicas=2, timeout=15.0)
    assert again.load(state).copied_from == ("node 2" if rank < 2 else "")
    assert state["w"].tolist() == [rank] * 3


@on_ranks()
def test_connections_are_opened_without_waiting_for_each_other(api: Any, tmp_path: Path) -> None:
    # A wait in a TCPStore, which torchrun makes, keeps this process's other threads out of it: here each end
    # waits as a source before it would offer its other end as a target.
    class TargetsComeLate(nearby.Link):
        def __init__(self, name: str, source: int, target: int, seconds: float) -> None:
            if target == dist.get_rank():
                time.sleep(0.3)
            super().__init__(name, source, target, seconds)

    is_first = dist.get_rank() == 0
    store = dist.TCPStore("127.0.0.1", 0, is_master=True) if is_first else None
    port: list[Any] = [store.port if store else None]
    dist.broadcast_object_list(port, src=0)
    store = store or dist.TCPStore("127.0.0.1", port[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compat, "default_store", lambda: store)
        patch.setattr(nearby, "Link", TargetsComeLate)
        assert on_nodes(tmp_path, timeout=5.0).save({"weight": torch.ones(2)}, 1)


@on_ranks()
def test_one_node_saves_without_copies_and_says_so_once(api: Any, tmp_path: Path) -> None:
    with heard("checkpoint") as records:
        for _ in range(2):
            tier = NearbyCheckpoints(tmp_path, run="a")
            assert tier.latest() in (None, 1)
            assert tier.load({"w": torch.zeros(1)}) is None or tier.latest() == 1
            tier.save({"w": torch.ones(1)}, 1)
    texts = [text for text in records if "all ranks are on one node" in text]
    assert len(texts) == (dist.get_rank() == 0)


@on_ranks()
def test_parts_of_megatrons_kind_come_back_on_every_rank(api: Any, tmp_path: Path) -> None:
    from torch_dcp_backport.dist_checkpointing import ShardedObject, ShardedTensor

    rank, tier = dist.get_rank(), on_nodes(tmp_path)

    def state(value: int) -> dict[str, Any]:
        own = ShardedTensor.from_rank_offsets(
            "w", torch.full((2, 3), value), (0, rank // 2, 2), replica_id=rank % 2
        )
        return {"w": own, "rng": ShardedObject("rng", [value], (2,), (rank // 2,), replica_id=rank % 2)}

    tier.save(state(7 + rank), 1)
    once(shutil.rmtree, tmp_path / "n1")
    wanted = state(0)
    loaded = tier.load(wanted)
    assert wanted["w"].data.tolist() == [[7 + rank] * 3] * 2
    assert loaded.state["rng"] == [7 + rank]


def test_killed_at_every_step_of_a_save(tmp_path: Path) -> None:
    total = limit = -1
    resumed = set[int]()
    while total == limit:
        limit += 1
        tier = NearbyCheckpoints(tmp_path / str(limit), run="a", keep=1)
        tier.save({"w": torch.full((3,), 1.0)}, 1)

        def work(begin: Callable[[], None], tier: NearbyCheckpoints = tier) -> None:
            begin()
            tier.save({"w": torch.full((3,), 2.0)}, 2)

        total = dying.until(limit, work)
        state = {"w": torch.zeros(3)}
        fresh = NearbyCheckpoints(tier.folder, run="a", keep=1)
        loaded = fresh.load(state)
        assert loaded is not None
        assert state["w"].tolist() == [loaded.step] * 3
        resumed.add(loaded.step)
        fresh.save(state, 3)
        assert not list(tier.folder.rglob(".step_*"))
        assert [path.name[:6] for path in tier.folder.rglob("step_*")] == ["step_3"]
    assert resumed == {1, 2}
    assert limit > 20


def rank_of_a_job(rank: int, root: Path, meeting: str, dies: str) -> None:
    """Resume, say what was resumed, and save a step, in which rank 2 is killed where it comes to `dies`."""
    torch.set_num_threads(1)
    init = f"file://{root / meeting}"
    dist.init_process_group(
        "gloo", init_method=init, rank=rank, world_size=4, timeout=datetime.timedelta(seconds=30)
    )
    tier, state = on_nodes(root, keep=1), {"w": torch.zeros(5)}
    loaded = tier.load(state)
    step = loaded.step if loaded is not None else 0
    assert state["w"].tolist() == [10.0 * step + rank * (step > 0)] * 5
    (root / f"{meeting}-{rank}").write_text(str(step))
    names: list[str] = []

    def die(name: str) -> None:
        names.append(name)
        if rank == 2 and f"{name} {names.count(name)}" == dies:
            os.kill(os.getpid(), signal.SIGKILL)

    disk.on_step = die
    tier.save({"w": torch.full((5,), 10.0 * (step + 1) + rank)}, step + 1)


def run_job(root: Path, meeting: str, dies: str = "") -> tuple[set[int], list[int]]:
    """Return what four processes resumed, and how each has ended."""
    children = []
    for rank in range(4):
        child = os.fork()
        if not child:
            code = 1
            try:
                os.close(2)
                rank_of_a_job(rank, root, meeting, dies)
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    ends = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    return {int((root / f"{meeting}-{rank}").read_text()) for rank in range(4)}, ends


@pytest.mark.parametrize(
    ("dies", "resumed"),
    [
        ("create __2_0.distcp 1", {1}),  # its own part
        ("rename the draft 1", {1}),  # of its own part
        ("create __0_0.distcp 1", {2}),  # a copy
        ("rename the draft 2", {2}),  # of a copy
    ],
)
def test_a_rank_is_killed_in_a_save_and_its_node_is_lost(
    tmp_path: Path, dies: str, resumed: set[int]
) -> None:
    assert run_job(tmp_path, "first") == ({0}, [0] * 4)
    steps, ends = run_job(tmp_path, "second", dies)
    assert steps == {1}
    assert ends == [1, 1, -signal.SIGKILL, 1]
    shutil.copytree(tmp_path / "n0", tmp_path / "whole" / "n0")
    shutil.copytree(tmp_path / "n1", tmp_path / "whole" / "n1")
    steps, ends = run_job(tmp_path / "whole", "third")
    assert (steps, ends) == (resumed, [0] * 4)
    assert not list((tmp_path / "whole").rglob(".step_*"))
    shutil.rmtree(tmp_path / "n1")
    steps, ends = run_job(tmp_path, "third")
    assert steps in ({1}, resumed)
    assert ends == [0] * 4


def contents(*parts: tuple[int, str, int], world: int = 3) -> Contents:
    """(owner, name of the save, order); the name ends in the step."""
    return Contents([Part(owner, save, int(save[-1]), order, world) for owner, save, order in parts], [], 0)


NODES = {"a": [0, 1], "b": [2]}


def test_the_newest_save_with_all_parts_is_found() -> None:
    whole = [(rank, "s2", 2) for rank in (0, 1)]
    by_node = {"a": contents((0, "s3", 3), (1, "s3", 3), *whole), "b": contents((2, "s2", 2), (0, "s2", 2))}
    found = nearby.found_in(by_node, NODES)
    assert found.choice == nearby.Choice(2, "s2", {})
    assert found.passed_over == ["s3: no node has a whole part of rank 2"]
    found = nearby.found_in(by_node, NODES, [(0, "s2", "a")])
    assert found.choice == nearby.Choice(2, "s2", {0: "b"})
    assert nearby.found_in(by_node, NODES, [(1, "s2", "a")]).choice is None
    # After a step back the lower step is the newer one.
    back = {
        "a": contents((0, "s9", 4), (1, "s9", 4), (2, "s9", 4)),
        "b": contents((0, "s1", 5), (1, "s1", 5), (2, "s1", 5)),
    }
    assert nearby.found_in(back, NODES).choice == nearby.Choice(1, "s1", {0: "b", 1: "b"})


def test_an_older_step_is_not_taken_for_one_of_another_number_of_ranks() -> None:
    parts = [(rank, "s2", 2) for rank in (0, 1, 2)]
    newer = contents((0, "s3", 3), world=2)
    found = nearby.found_in({"a": contents(*parts), "b": newer}, NODES)
    assert found.choice is None
    assert "step 3 was saved nearby by 2 ranks, and 3 ranks are here" in found.refused
    older = contents((0, "s1", 1), world=2)
    assert nearby.found_in({"a": contents(*parts), "b": older}, NODES).choice is not None


def test_a_peer_is_on_another_node() -> None:
    assert nearby.peers({"a": [0, 1], "b": [2, 3], "c": [4, 5]}, 1) == [
        *((0, 2), (1, 3), (2, 4), (3, 5), (4, 0), (5, 1)),
    ]
    assert nearby.peers(NODES, 1) == [(0, 2), (1, 2), (2, 0)]
    assert nearby.peers({"a": [0, 1]}, 1) == []
    assert nearby.peers({"a": [0], "b": [1], "c": [2]}, 2) == [(0, 1), (0, 2), (1, 2), (1, 0), (2, 0), (2, 1)]


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("nodes", [2, 3, 8, 101])
def test_a_rank_waits_for_few_others_until_its_connections_are_open(nodes: int, replicas: int) -> None:
    wanted = [
        nearby.Copied(source, target, source)
        for source, target in nearby.peers({str(node): [node] for node in range(nodes)}, replicas)
    ]
    opened: dict[int, int] = {}
    for copy in nearby.in_turns(wanted):
        turn = 1 + max(opened.get(copy.source, 0), opened.get(copy.target, 0))
        opened[copy.source] = opened[copy.target] = turn
    assert set(nearby.in_turns(wanted)) == set(wanted)
    assert max(opened.values(), default=0) <= 4 * replicas - 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"run": ""}, "run='': expected a name"),
        ({"ranks_per_node": 0}, "ranks_per_node=0: expected a whole number from 1 on"),
        ({"replicas": -1}, "replicas=-1: expected a whole number from 0 on"),
        ({"keep": 0}, "keep=0: expected a whole number from 1 on"),
        ({"keep": True}, "keep=True: expected a whole number"),
        ({"on_failure": "x"}, "on_failure='x': expected raise or warn"),
        ({"ranks_per_node": 2, "node": "a"}, "give one of them"),
        ({"timeout": 0}, "timeout=0: expected seconds"),
    ],
)
def test_an_option_without_a_meaning_is_refused(tmp_path: Path, options: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        NearbyCheckpoints(tmp_path, **{"run": "a", **options})
