"""`dcp.save` and `dcp.load`: writer threads, shapes, groups without global rank 0, keys.

On torch >= 2.7 these run against torch as it is.
"""

from __future__ import annotations

import functools
import queue
import threading
import warnings
from pathlib import Path
from typing import Any, Optional

import pytest
import storages
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from packaging.version import Version
from pool import on_ranks
from storages import Storage, Writer
from test_helpers import legacy
from torch.distributed.checkpoint import format_utils
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torch_dcp_backport.compat import DTensor, Shard

TORCH = Version(torch.__version__).release[:2]
AFFECTED = (2, 4) <= TORCH < (2, 7)
open_upstream = pytest.mark.skipif(not AFFECTED, reason="torch >= 2.7 is left as it is, and has the defect")


def state(seed: int = 0, count: int = 6) -> dict[str, Any]:
    """A tensor on each rank of its own, one of all ranks, and what is no tensor."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    values = {f"w{n}.{rank}": torch.arange(64.0) + n + 100 * rank + seed for n in range(count)}
    return {**values, "step": 7 + seed, f"more.{rank}": [seed, "text"]}


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


def raises_everywhere(save: Any, folder: Path, storage: Storage, kind: Any, at: list[int]) -> None:
    """The error on every rank, nothing published, no thread and no file left."""
    before = set(threading.enumerate())
    with pytest.raises(CheckpointException) as caught:
        save()
    assert sorted(caught.value.failures) == at
    assert [error for error, _ in caught.value.failures.values() if not isinstance(error, kind)] == []
    dist.barrier()
    assert ".metadata" not in names_in(folder)
    assert storage.open == set()
    more = [thread for thread in set(threading.enumerate()) - before if "Pool" not in thread.name]
    for thread in more:
        # It has done its work, and may still be on its way out.
        thread.join(5)
    assert [thread for thread in more if thread.is_alive()] == []


ERRORS = {
    "no space": storages.no_space,
    "an interrupt": KeyboardInterrupt,
    "an exit": SystemExit,
    "no memory": MemoryError,
    "an empty queue": queue.Empty,
}


def save_with_failing_thread(api: Any, folder: str, error: str, options: dict[str, Any], later: bool) -> None:
    rank = dist.get_rank()
    fails = storages.in_another_thread(ERRORS[error]) if rank == 1 else lambda *_: None
    storage = Storage(fails)
    writer = Writer(folder, storage, **options)

    def save() -> None:
        if later:
            dcp.async_save(state(), storage_writer=writer).result()
        else:
            dcp.save(state(), storage_writer=writer)

    kind = RuntimeError if error == "an empty queue" else type(ERRORS[error]())
    raises_everywhere(save, Path(folder), storage, kind, [1])
    # The next save of the same writer is as good as any.
    storage.fails = lambda *_: None
    dcp.save(state(1), storage_writer=writer)
    loaded = state()
    dcp.load(loaded, checkpoint_id=folder)
    same(loaded, state(1))


def same(loaded: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert loaded.keys() == wanted.keys()
    for key, value in wanted.items():
        assert torch.equal(loaded[key], value) if torch.is_tensor(value) else loaded[key] == value, key


@open_upstream
@pytest.mark.parametrize("error", ERRORS)
def test_a_writer_thread_that_fails_is_an_error_on_every_rank(fixed, tmp_path, error):
    fixed(save_with_failing_thread, str(tmp_path / "saved"), error, {"thread_count": 2}, False, world=2)


@open_upstream
@pytest.mark.parametrize("options", [{"thread_count": 8}, {"thread_count": 3, "single_file_per_rank": False}])
def test_whatever_the_threads_and_files(ranks, tmp_path, options):
    ranks(save_with_failing_thread, str(tmp_path / "saved"), "no space", options, False, world=2)


@open_upstream
def test_an_asynchronous_save_fails_too(fixed, tmp_path):
    fixed(save_with_failing_thread, str(tmp_path / "saved"), "no space", {"thread_count": 2}, True, world=2)


@open_upstream
@on_ranks(world=2, fixture="fixed")
def test_the_callers_thread_waits_for_the_others(api: Any, tmp_path: Path) -> None:
    """The thread that called fails while another one is in the middle of its file."""
    folder = str(tmp_path / "saved")
    begun, go_on = threading.Event(), threading.Event()

    def fails(storage: Storage, number: int) -> Optional[BaseException]:
        if storage.is_callers:
            assert begun.wait(30)
            threading.Timer(0.2, go_on.set).start()
            return storages.no_space()
        begun.set()
        assert go_on.wait(30)
        return None

    storage = Storage(fails)
    writer = Writer(folder, storage, thread_count=2, single_file_per_rank=False)
    raises_everywhere(
        lambda: dcp.save(state(), storage_writer=writer), Path(folder), storage, OSError, [0, 1]
    )
    # Of many files no more were begun.
    assert len([name for name in names_in(Path(folder)) if name.startswith(f"__{dist.get_rank()}_")]) <= 3


def save_with_failing_writes(api: Any, folder: str, options: dict[str, Any]) -> int:
    """Each write of a save fails once: there is an error and nothing else."""
    counted = Storage(lambda *_: None)
    dcp.save(state(count=3), storage_writer=Writer(f"{folder}/all", counted, **options))
    loaded = state(1, count=3)
    dcp.load(loaded, checkpoint_id=f"{folder}/all")
    same(loaded, state(count=3))
    for number in range(1, counted.writes + 1, 5):
        storage, place = Storage(storages.at_write(number)), Path(folder, str(number))
        writer = Writer(str(place), storage, **options)
        # torch.save turns the storage's error into its own, where it is in the middle of a tensor.
        kinds = (OSError, RuntimeError)
        save = functools.partial(dcp.save, state(count=3), storage_writer=writer)
        raises_everywhere(save, place, storage, kinds, [0])
    return counted.writes


@open_upstream
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("single", [True, False])
def test_whichever_write_fails(ranks, tmp_path, threads, single):
    options = {"thread_count": threads, "single_file_per_rank": single}
    assert ranks(save_with_failing_writes, str(tmp_path), options, world=1)[0] > 10


def written(api: Any, folder: str, options: dict[str, Any]) -> tuple[set[str], set[tuple[Any, ...]]]:
    dcp.save(state(), storage_writer=dcp.FileSystemWriter(folder, **options))
    records = dcp.FileSystemReader(folder).read_metadata().storage_data
    found = {(index.fqn, info.relative_path, info.offset, info.length) for index, info in records.items()}
    return names_in(Path(folder)), found


@pytest.mark.parametrize(
    "options", [{}, {"thread_count": 3}, {"thread_count": 3, "single_file_per_rank": False}]
)
def test_the_same_files_are_written(pools, ranks, tmp_path, options):
    ours = ranks(written, str(tmp_path / "ours"), options, world=2)
    assert (
        pools.get(2, "torch.distributed.checkpoint.state_dict").run(written, str(tmp_path / "stock"), options)
        == ours
    )


# --- shapes


def dtensor(shape: tuple[int, ...]) -> DTensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = shape[0] // dist.get_world_size()
    return DTensor.from_local(torch.zeros(rows, *shape[1:]), mesh, [Shard(0)], run_check=False)


SHAPES = {
    "shorter": lambda: torch.zeros(3, 4),
    "longer": lambda: torch.zeros(8, 5),
    "fewer dimensions": lambda: torch.zeros(16),
    "nothing": lambda: torch.zeros(0, 4),
    "a DTensor": lambda: dtensor((8, 4)),
    "a ShardedTensor": legacy,
}


def load_into_another_shape(api: Any, folder: str, case: str) -> None:
    dcp.save({"a": torch.ones(2), "w": torch.ones(4, 4)}, checkpoint_id=folder)
    wanted = {"a": torch.zeros(2), "w": SHAPES[case]()}
    size = wanted["w"].size()
    with pytest.raises(CheckpointException) as caught:
        dcp.load(wanted, checkpoint_id=folder)
    errors = {(type(error), str(error)) for error, _ in caught.value.failures.values()}
    says = f"Size mismatch between saved {torch.Size([4, 4])} and current: {size} for w"
    assert errors == {(ValueError, says)}
    assert not torch.any(wanted["a"]), "something was read"


@pytest.mark.parametrize("case", SHAPES)
def test_another_shape_is_an_error(fixed, tmp_path, case):
    # With fewer dimensions torch 2.4 fails as well, with another error.
    fixed(load_into_another_shape, str(tmp_path / "saved"), case, world=2, broken=TORCH in ((2, 4), (2, 5)))


@on_ranks(world=2)
def test_what_changed_its_size_loads_by_the_saved_size(api: Any, tmp_path: Path) -> None:
    """The ways out that patches/0011 names."""
    folder = str(tmp_path / "saved")
    dcp.save({"rng": [{"cuda": torch.arange(8.0)}], "w": torch.ones(2)}, checkpoint_id=folder)
    stored = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata["rng.0.cuda"]
    wanted = {"rng": [{"cuda": torch.zeros(stored.size)}], "w": torch.zeros(2)}
    dcp.load(wanted, checkpoint_id=folder)
    assert torch.equal(wanted["rng"][0]["cuda"], torch.arange(8.0))
    part = {"w": torch.zeros(2)}
    dcp.load(part, checkpoint_id=folder)
    assert torch.all(part["w"] == 1)


@pytest.mark.skipif(TORCH not in ((2, 4), (2, 5)), reason="torch has its own check")
@on_ranks(world=2)
def test_megatrons_padded_tensors_may_differ(api: Any, tmp_path: Path) -> None:
    """Tensors as Megatron-LM makes them."""
    folder = str(tmp_path / "saved")

    class Made:
        allow_shape_mismatch = True

    dcp.save({"w": torch.ones(6, 3)}, checkpoint_id=folder)
    for name, value in (("mcore_sh_ten", Made()), ("prepend_axis_num", 0)):
        padded = legacy()
        padded.local_shards()[0].tensor.zero_()
        setattr(padded, name, value)
        dcp.load({"w": padded}, checkpoint_id=folder)
        assert torch.all(padded.local_shards()[0].tensor == 1)
    strict = legacy()
    strict.mcore_sh_ten = type("Strict", (), {"allow_shape_mismatch": False})()
    with pytest.raises(CheckpointException, match="Size mismatch"):
        dcp.load({"w": strict}, checkpoint_id=folder)


@on_ranks(world=2)
def test_the_rest_of_a_load_is_as_before(api: Any, tmp_path: Path) -> None:
    """What is no tensor, what is not there, and a mesh without this rank."""
    folder = str(tmp_path / "saved")
    rank = dist.get_rank()
    mesh = DeviceMesh("cpu", [1])
    part = DTensor.from_local(torch.full((2,), 5.0), mesh, [Shard(0)], run_check=False)
    dcp.save({"w": torch.ones(2), "o": {"n": 3}, "part": part}, checkpoint_id=folder)
    loaded = {"w": torch.zeros(2), "o": {"n": 0}}
    empty = DTensor.from_local(torch.zeros(2), mesh, [Shard(0)], run_check=False)
    dcp.load({**loaded, "part": empty}, checkpoint_id=folder)
    assert torch.equal(loaded["w"], torch.ones(2))
    assert rank != 1 or torch.all(empty.to_local() == 5)
    with pytest.raises(CheckpointException, match="Missing key in checkpoint state_dict: more"):
        dcp.load({**loaded, "more": 1}, checkpoint_id=folder)
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
    dcp.load({**loaded, "more": 1}, checkpoint_id=folder, planner=planner)


# --- objects with a state


class Trainer:
    """`Stateful`, as torch calls it."""

    def __init__(self, step: int) -> None:
        self.step, self.weight = step, torch.full((3,), float(step))

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "weight": self.weight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self.weight = state["weight"]


@pytest.mark.parametrize("group", [False, True])
@on_ranks(world=2, broken=TORCH in ((2, 4), (2, 5)), fixture="fixed")
def test_objects_with_a_state_stay_in_the_callers_dict(api: Any, tmp_path: Path, group: bool) -> None:
    """A job that keeps one dict for all of its saves and loads."""
    folder = str(tmp_path)
    options = {"process_group": dist.new_group([0, 1])} if group else {}

    def job(step: int) -> dict[str, Any]:
        return {"trainer": Trainer(step), "w": torch.full((2,), float(step)), "n": step}

    dcp.save(job(3), checkpoint_id=f"{folder}/first", **options)
    kept = job(0)
    trainer, tensor = kept["trainer"], kept["w"]
    dcp.load(kept, checkpoint_id=f"{folder}/first", **options)
    assert kept["trainer"] is trainer, "the object was replaced"
    assert kept["w"] is tensor
    assert (trainer.step, tensor.tolist(), kept["n"]) == (3, [3, 3], 3)
    trainer.step = 9
    trainer.weight.fill_(9)
    dcp.save(kept, checkpoint_id=f"{folder}/second", **options)
    resumed = job(0)
    dcp.load(resumed, checkpoint_id=f"{folder}/second", **options)
    assert (resumed["trainer"].step, resumed["trainer"].weight.tolist(), resumed["n"]) == (9, [9] * 3, 3)


@pytest.mark.skipif(TORCH >= (2, 7), reason="torch does not compare the keys")
@on_ranks(world=2)
def test_a_load_that_fails_leaves_the_callers_dict(api: Any, tmp_path: Path) -> None:
    """Nothing was loaded: the dict and its objects are as they were."""
    folder = str(tmp_path)
    dcp.save({"trainer": Trainer(3), "n": 3}, checkpoint_id=folder)
    kept = {"trainer": Trainer(1), "n": 1, **({"missing": 5} if dist.get_rank() == 1 else {})}
    trainer = kept["trainer"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(CheckpointException, match="missing"):
            dcp.load(kept, checkpoint_id=folder)
    assert kept["trainer"] is trainer
    assert (trainer.step, kept["n"]) == (1, 1)
    assert any("mismatched keys in state dict" in str(warning.message) for warning in caught) is (
        dist.get_rank() == 0
    )


# --- groups without global rank 0


@pytest.mark.skipif(TORCH == (2, 7), reason="torch 2.7 is left as it is, and has the defect")
@pytest.mark.parametrize("later", [False, True])
@on_ranks(fixture="fixed")
def test_replicas_save_and_load_by_themselves(api: Any, tmp_path: Path, later: bool) -> None:
    """Two replicas of two ranks, each with its own checkpoint."""
    folder = str(tmp_path)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    group, place = mesh.get_group("shard"), f"{folder}/{dist.get_rank() // 2}"
    sharded = DTensor.from_local(torch.full((2, 2), float(dist.get_rank())), mesh["shard"], [Shard(0)])
    wanted = {"w": sharded, "plain": torch.full((3,), float(dist.get_rank() // 2)), "n": dist.get_rank() // 2}
    if later:
        dcp.async_save(wanted, checkpoint_id=place, process_group=group).result()
    else:
        dcp.save(wanted, checkpoint_id=place, process_group=group)
    got = {
        "w": DTensor.from_local(torch.zeros(2, 2), mesh["shard"], [Shard(0)]),
        "plain": torch.zeros(3),
        "n": -1,
    }
    dcp.load(got, checkpoint_id=place, process_group=group)
    assert torch.equal(got["w"].to_local(), wanted["w"].to_local())
    assert torch.equal(got["plain"], wanted["plain"])
    assert got["n"] == wanted["n"]
    # An error of one rank is one of its group, and of no other.
    missing = {"plain": torch.zeros(3)} if dist.get_rank() != 3 else {"other": torch.zeros(3)}
    with pytest.raises(CheckpointException) if dist.get_rank() > 1 else warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(missing, checkpoint_id=place, process_group=group)


@pytest.mark.skipif(TORCH == (2, 7), reason="torch 2.7 is left as it is, and has the defect")
@on_ranks(world=2, fixture="fixed")
def test_each_rank_alone(api: Any, tmp_path: Path) -> None:
    folder = str(tmp_path)
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    rank = dist.get_rank()
    value = {"w": torch.full((4,), float(rank))}
    dcp.save(value, checkpoint_id=f"{folder}/{rank}", process_group=groups[rank])
    got = {"w": torch.zeros(4)}
    dcp.load(got, checkpoint_id=f"{folder}/{rank}", process_group=groups[rank])
    assert torch.equal(got["w"], value["w"])


@on_ranks(world=3, broken=TORCH == (2, 4), fixture="fixed")
def test_groups_with_global_rank_0(api: Any, tmp_path: Path) -> None:
    """Groups in which nothing was wrong: all ranks, by any name, and those with global rank 0."""
    folder = str(tmp_path)
    world = list(range(dist.get_world_size()))
    with_zero = dist.new_group(world[:2])
    groups = {"none": None, "world": dist.group.WORLD, "copy": dist.new_group(world)}
    if dist.get_rank() < 2:
        groups["part"] = with_zero
    for name, group in groups.items():
        dcp.save(state(), checkpoint_id=f"{folder}/{name}", process_group=group)
        loaded = state(1)
        dcp.load(loaded, checkpoint_id=f"{folder}/{name}", process_group=group)
        same(loaded, state())


# --- keys


def by_key(folder: str, keys: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    planner = _EmptyStateDictLoadPlanner(keys=keys)
    _load_state_dict(found, dcp.FileSystemReader(folder), planner=planner, no_dist=True)
    return found


@pytest.mark.skipif(TORCH == (2, 7), reason="torch 2.7 is left as it is, and has the defect")
@on_ranks(world=1, fixture="fixed")
def test_a_checkpoint_without_paths_loads_by_key(api: Any, tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    saved = {"a.b": torch.ones(2), "c": torch.zeros(3), "n": 5}
    dcp.save(saved, checkpoint_id=folder, planner=DefaultSavePlanner(flatten_state_dict=False))
    same(by_key(folder, {*saved}), saved)
    same(by_key(folder, None), saved)
    format_utils.dcp_to_torch_save(folder, f"{folder}/whole.pt")
    same(torch.load(f"{folder}/whole.pt", weights_only=False), saved)


@open_upstream
@on_ranks(world=1, fixture="fixed")
def test_some_keys_of_a_checkpoint_without_paths(api: Any, tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    saved = {"a.b": torch.ones(2), "c": torch.zeros(3), "n": 5}
    dcp.save(saved, checkpoint_id=folder, planner=DefaultSavePlanner(flatten_state_dict=False))
    same(by_key(folder, {"a.b", "n"}), {"a.b": saved["a.b"], "n": 5})
    assert by_key(folder, {"a"}) == {}


def load_nested_by_key(api: Any, folder: str) -> list[Any]:
    """As torch: a key, those above it, numbers, what is not there."""
    tensors = iter(torch.full((2,), float(n)) for n in range(9))
    saved = {
        "model": {"a.weight": next(tensors), "b": {"weight": next(tensors)}},
        "optim": {"state": {0: {"m": next(tensors)}, 1: {"m": next(tensors)}}, "lr": 0.5},
        0: next(tensors),
    }
    dcp.save(saved, checkpoint_id=folder)
    asked = [{"model"}, {"model.b"}, {"model.a.weight"}, {"optim.state.1"}, {"optim.lr", "0"}, {"none"}]
    asked += [set(), ["model.b.weight"], None]
    return [plain(by_key(folder, keys)) for keys in asked]


def plain(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: plain(value) for key, value in tree.items()}
    return tree.tolist() if torch.is_tensor(tree) else tree


def test_nested_keys_are_as_before(pools, ranks, tmp_path):
    ours = ranks(load_nested_by_key, str(tmp_path / "ours"), world=1)
    stock = pools.get(1, "torch.distributed.checkpoint.state_dict")
    assert stock.run(load_nested_by_key, str(tmp_path / "stock")) == ours
    assert ours[0][:3] == [
        {"model": {"a.weight": [0.0] * 2, "b": {"weight": [1.0] * 2}}},
        {"model": {"b": {"weight": [1.0] * 2}}},
        {"model": {"a.weight": [0.0] * 2}},
    ]
