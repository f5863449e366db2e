"""Managers and handlers on several ranks: another number of ranks, faults of one, damaged steps."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import RankError, on_ranks
from torch import nn
from trainer import Trainer, same

from torch_dcp_backport.checkpoint import CheckpointHandler, SaveSignals
from torch_dcp_backport.checkpoint._src import manifest, store
from torch_dcp_backport.dist_checkpointing import CheckpointingException
from torch_dcp_backport.transfer._src.object_collectives import ObjectCollective

try:
    from torch.distributed.fsdp import fully_shard
except ImportError:  # torch 2.4 and 2.5
    from torch.distributed._composable.fsdp import fully_shard


def sharded(seed: int = 0) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh

    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return model


def whole(trainer: Trainer) -> list[torch.Tensor]:
    return [parameter.full_tensor().detach() for parameter in trainer.model.parameters()]


def save_sharded(api: Any, root: Path) -> list[torch.Tensor]:
    trainer = Trainer(root, sharded())
    trainer.train(dist.get_rank(), dist.get_rank() + 1)
    trainer.handler.save_checkpoint(3)
    return whole(trainer)


def load_sharded(api: Any, root: Path, expected: list[torch.Tensor]) -> dict[str, Any]:
    trainer = Trainer(root, sharded(1))
    trainer.train(50 + dist.get_rank())
    assert trainer.handler.load_checkpoint() == 3
    assert all(map(torch.equal, whole(trainer), expected))
    return trainer.state()


def test_as_it_was_on_the_same_ranks_and_on_others(ranks, tmp_path) -> None:
    expected = ranks(save_sharded, tmp_path, world=4)[0]
    four = ranks(load_sharded, tmp_path, expected, world=4)
    assert len({tuple(state["draws"]) for state in four}) == 4
    two = ranks(load_sharded, tmp_path, expected, world=2)
    assert [state["draws"] for state in two] == [state["draws"] for state in four[:2]]
    assert [state["rate"] for state in two] == [state["rate"] for state in four[:2]]
    three = ranks(load_sharded, tmp_path, expected, world=3)
    assert {state["position"] for state in three} == {1}


def differs(api: Any, root: Path, what: str) -> tuple[str, str]:
    """What a save and a load say where one rank asks for something else."""
    odd = dist.get_rank() == 1
    trained(root, 1)
    config = {
        "async_save": {"async_save": True},
        "save_contents": {"save_contents": ["model"]},
        "load_contents": {"load_contents": ["model"]},
    }.get(what, {})
    trainer = Trainer(root / "other" if odd and what == "root" else root, config=config if odd else None)
    if odd and what == "scheduler":
        trainer.manager.lr_scheduler = None
    if odd and what == "resume_mode":
        trainer.handler.resume_mode = "disable"
    texts = []
    calls = (
        (lambda: trainer.handler.save_checkpoint(9 if odd and what == "step" else 2)),
        trainer.handler.load_checkpoint,
    )
    for call in calls:
        try:
            call()
            texts.append("")
        except CheckpointingException as error:
            texts.append(str(error))
    dist.barrier()
    assert not list(root.glob(".*"))
    return texts[0], texts[1]


@pytest.mark.parametrize(
    ("what", "save_says", "load_says"),
    [
        ("async_save", "async_save", ""),
        ("save_contents", "save_contents", "load_contents"),
        ("load_contents", "", "load_contents"),
        ("root", "folder", "default_local_dir"),
        ("step", "folder", ""),
        ("scheduler", "scheduler", ""),
        ("resume_mode", "", "resume_mode"),
    ],
)
def test_ranks_that_ask_for_different_things_are_told(
    ranks, tmp_path: Path, what: str, save_says: str, load_says: str
) -> None:
    (texts,) = set(ranks(differs, tmp_path, what, world=2))
    for text, says in zip(texts, (save_says, load_says)):
        assert bool(text) == bool(says), text
        assert not says or f"rank 1: not the same on every rank: {says} (" in text


def asks_alone(api: Any, root: Path, what: str) -> str:
    """What a manager says where one rank asks for what is not offered, or for nothing."""
    odd = dist.get_rank() == 1
    manager, folder = Trainer(root).manager, root / "global_step_1" / "actor"
    calls = {
        "save": lambda: manager.save_checkpoint(folder, "memory://there" if odd else None, 1),
        "load nothing": lambda: manager.load_checkpoint(None if odd else folder),
        "load and delete": lambda: manager.load_checkpoint(folder, del_local_after_load=odd),
    }
    if what != "save":
        manager.save_checkpoint(folder, None, 1)
    with pytest.raises(CheckpointingException) as caught:
        calls[what]()
    dist.barrier()
    assert folder.exists() == (what != "save")
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "says"),
    [
        (
            "save",
            "rank 1: not the same on every rank: hdfs_path (expected None as on rank 0, got memory://there)",
        ),
        ("load nothing", "rank 1: not the same on every rank: folder (expected "),
        (
            "load and delete",
            "rank 1: not the same on every rank: del_local_after_load (expected False as on rank 0, ",
        ),
    ],
)
def test_what_one_rank_asks_for_alone_is_told_on_all(ranks, tmp_path: Path, what: str, says: str) -> None:
    (text,) = set(ranks(asks_alone, tmp_path, what, world=2))
    assert says in text


class Engine:
    """Around a manager, and fails where it is told to."""

    def __init__(self, manager: Any, fails: str) -> None:
        self.manager = manager
        self.fails = fails

    def save_checkpoint(self, **arguments: Any) -> None:
        self.manager.save_checkpoint(**arguments)
        if self.fails == "save":
            raise OSError("no room on this node")

    def load_checkpoint(self, path: str) -> None:
        self.manager.load_checkpoint(path)
        if self.fails == "load" and path.endswith("global_step_2"):
            raise ValueError("not to my liking")


def trained(root: Path, steps: int = 2, **options: Any) -> tuple[Trainer, dict[int, Any]]:
    """A plain model on every rank, saved after each step; what it was then."""
    trainer, states = Trainer(root, **options), {}
    for step in range(1, steps + 1):
        trainer.train(10 * step + dist.get_rank(), step)
        trainer.handler.save_checkpoint(step)
        states[step] = trainer.state()
    return trainer, states


def fail_to_save(api: Any, root: Path) -> str:
    trainer, states = trained(root)
    trainer.handler.engine = Engine(trainer.manager, "save" if dist.get_rank() == 1 else "")
    with pytest.raises(CheckpointingException) as caught:
        trainer.handler.save_checkpoint(3)
    dist.barrier()
    assert [step.fault for step in store.steps_in(root)] == ["", ""]
    assert not list(root.glob(".*"))
    fresh = Trainer(root)
    assert fresh.handler.load_checkpoint() == 2
    assert same(fresh.state(), states[2])
    return str(caught.value)


def test_a_rank_that_fails_to_save_leaves_the_older_steps(ranks, tmp_path) -> None:
    (text,) = set(ranks(fail_to_save, tmp_path, world=2))
    assert "rank 1: OSError: no room on this node" in text
    assert store.name_of(3) not in os.listdir(tmp_path)


@pytest.mark.parametrize(
    "damage", ["a flipped bit", "another step's shard", "a missing data state", "an engine that fails"]
)
@on_ranks(world=2)
def test_the_step_before_is_taken_on_all_ranks(api: Any, tmp_path: Path, damage: str) -> None:
    rank = dist.get_rank()
    _, states = trained(tmp_path)
    dist.barrier()
    last, before = tmp_path / "global_step_2", tmp_path / "global_step_1"
    shard = "dist_ckpt/__1_0.distcp"
    if rank == 0 and damage == "a flipped bit":
        data = bytearray((last / shard).read_bytes())
        data[-300] ^= 4
        (last / shard).write_bytes(data)
    if rank == 0 and damage == "another step's shard":
        shutil.copy(before / shard, last / shard)
    if rank == 0 and damage == "a missing data state":
        (last / "data_1.pt").unlink()
    dist.barrier()
    fresh = Trainer(tmp_path)
    fresh.handler.engine = Engine(fresh.manager, "load" if damage == "an engine that fails" and rank else "")
    assert fresh.handler.load_checkpoint() == 1
    assert same(fresh.state(), states[1])


def none_good(api: Any, root: Path, explicit: bool) -> str:
    trained(root)
    dist.barrier()
    if dist.get_rank() == 0:
        for step in store.steps_in(root):
            (step.path / "manifest.json").unlink()
    dist.barrier()
    options: dict[str, Any] = {}
    if explicit:
        options = {"resume_mode": "resume_path", "resume_from_path": root / "global_step_2"}
    fresh = Trainer(root, **options)
    before = fresh.state()
    with pytest.raises(CheckpointingException) as caught:
        fresh.handler.load_checkpoint()
    after = fresh.state()
    assert all(map(torch.equal, before["parameters"], after["parameters"]))
    return str(caught.value)


@pytest.mark.parametrize("explicit", [False, True])
def test_no_good_step_is_an_error_and_no_new_beginning(ranks, tmp_path, explicit: bool) -> None:
    (text,) = set(ranks(none_good, tmp_path, explicit, world=2))
    assert "no manifest.json" in text
    assert "global_step_2" in text
    assert ("global_step_1" in text) is not explicit


def save_data(api: Any, root: Path) -> None:
    trainer = Trainer(root)
    trainer.loader.position = 7 + dist.get_rank()
    trainer.handler.save_checkpoint(1)


def load_data(api: Any, root: Path, on_data: str) -> int:
    fresh = Trainer(root, on_data=on_data)
    assert fresh.handler.load_checkpoint() == 1
    return fresh.loader.position


def test_states_of_data_that_do_not_fit_are_an_error_unless_asked(ranks, tmp_path) -> None:
    ranks(save_data, tmp_path, world=3)
    assert ranks(load_data, tmp_path, "restart", world=2) == [0, 0]
    with pytest.raises(
        RankError, match="3 data loaders were saved with states that differ, and 2 are loaded"
    ):
        ranks(load_data, tmp_path, "error", world=2)


@on_ranks(world=2)
def test_a_manager_alone_saves_and_loads_parts(api: Any, tmp_path: Path) -> None:
    saved = Trainer(tmp_path, config={"save_contents": ["model", "extra"]})
    saved.train(1)
    saved.manager.save_checkpoint(tmp_path / "global_step_1" / "actor", global_step=1)
    expected = saved.state()
    model = Trainer(tmp_path, config={"load_contents": ["model"]})
    model.train(2)
    before = model.state()
    model.manager.load_checkpoint(tmp_path / "global_step_1" / "actor")
    after = model.state()
    assert all(map(torch.equal, after["parameters"], expected["parameters"]))
    assert all(map(torch.equal, after["moments"], before["moments"]))
    assert after["rate"] == before["rate"]
    whole = Trainer(tmp_path)
    with pytest.raises(CheckpointingException, match="has no optimizer; it has model, extra"):
        whole.manager.load_checkpoint(tmp_path / "global_step_1" / "actor")
    larger = Trainer(tmp_path, nn.Sequential(nn.Linear(6, 5)), config={"load_contents": ["model"]})
    with pytest.raises(CheckpointingException, match=r"only the checkpoint has model\.1\.bias"):
        larger.manager.load_checkpoint(tmp_path / "global_step_1" / "actor")


@on_ranks(world=2)
def test_a_manager_alone_keeps_the_newest_of_its_name(api: Any, tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    for step in range(1, 5):
        for name in ("actor", "critic"):
            path = tmp_path / f"global_step_{step}" / name
            trainer.manager.save_checkpoint(path, global_step=step, max_ckpt_to_keep=2)
    trainer.manager.finish()
    dist.barrier()
    left = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.glob("global_step_*/*"))
    assert left == [f"global_step_{step}/{name}" for step in (3, 4) for name in ("actor", "critic")]


def signalled(api: Any) -> list[bool]:
    import signal

    with SaveSignals() as signals:
        answers = [signals.should_save()]
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        answers += [signals.should_save(), signals.should_save(), signals.should_save(dist.get_rank() == 0)]
    return answers


def test_a_signal_to_one_rank_saves_on_all_at_the_same_step(ranks) -> None:
    assert ranks(signalled, world=2) == [[False, True, False, True]] * 2


class Theirs:
    """As an engine with verl's own manager."""

    def save_checkpoint(self, local_path: str, **options: Any) -> None:
        name = f"model_world_size_{dist.get_world_size()}_rank_{dist.get_rank()}.pt"
        Path(local_path, name).write_bytes(bytes(100))


def reads(api: Any, root: Path) -> list[str]:
    """The files whose checksums this rank takes."""
    names, native = list[str](), manifest.entry_of

    def entry_of(path: Path) -> manifest.ManifestEntry:
        names.append(path.name)
        return native(path)

    manifest.entry_of = entry_of
    try:
        CheckpointHandler(Theirs(), default_local_dir=root).save_checkpoint(1)
    finally:
        manifest.entry_of = native
    return names


def test_each_rank_reads_what_it_wrote(ranks, tmp_path: Path) -> None:
    """One that reads all lets the others wait, for longer than their group's timeout."""
    assert ranks(reads, tmp_path, world=2) == [[f"model_world_size_2_rank_{rank}.pt"] for rank in (0, 1)]


def agreements(api: Any, root: Path) -> list[list[str]]:
    """The agreements of a handler's first and second save, of two in the background, and of a load."""
    native, lists = ObjectCollective.gather, list[list[str]]()

    def recorded(self: ObjectCollective, *args: Any) -> Any:
        lists[-1].append(self.doing)
        return native(self, *args)

    trainer = Trainer(root, sharded())
    trainer.train(1)
    later = Trainer(root / "later", sharded(), config={"async_save": True})
    later.train(1)
    calls = (
        lambda: trainer.handler.save_checkpoint(1),
        lambda: trainer.handler.save_checkpoint(2),
        lambda: (later.handler.save_checkpoint(1), later.handler.publish_last()),
        lambda: (later.handler.save_checkpoint(2), later.handler.publish_last()),
        trainer.handler.load_checkpoint,
    )
    ObjectCollective.gather = recorded  # type: ignore[method-assign]
    try:
        for call in calls:
            lists.append([])
            call()
    finally:
        ObjectCollective.gather = native  # type: ignore[method-assign]
    return lists


def test_how_often_the_ranks_meet(ranks, tmp_path: Path) -> None:
    """What each agreement protects is in docs/internals.md."""
    first, second, begun, later, load = ranks(agreements, tmp_path, world=2)[0]
    save = [
        "making a folder",
        "writing the configuration",
        "comparing plans",
        "removing the old marker",
        "committing",
        "writing",
    ]
    # In a process's first save of some state also the handler's options, and who writes what.
    assert sorted(first) == sorted([*save, "comparing options", "planning"])
    assert second == save
    assert [len(begun), len(later)] == [12, 11], (begun, later)
    assert load == [
        "looking for steps",
        "verifying the files",
        "looking",
        "reading what was saved",
        "planning",
        "settling",
        "loading",
        "loading",
    ]
