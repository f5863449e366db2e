"""`dcp.save` and `dcp.load`: torch 2.3's keys, partial values, meta tensors, what a checkpoint lacks.

On torch >= 2.7 these run where torch has the correction.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from models import fully_shard
from packaging.version import Version
from pool import on_ranks
from test_dcp import same
from test_helpers import legacy
from torch import nn
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import torch_dcp_backport.dcp
from torch_dcp_backport.compat import DTensor, Replicate, Shard, placement_types
from torch_dcp_backport.dcp.planner import flattened_as_2_3

Partial = placement_types.Partial
TORCH = Version(torch.__version__).release[:2]
AFFECTED = (2, 4) <= TORCH < (2, 7)
not_on_2_7 = pytest.mark.skipif(TORCH == (2, 7), reason="torch 2.7 is left as it is, and has the defect")
open_upstream = pytest.mark.skipif(not AFFECTED, reason="torch >= 2.7 is left as it is, and has the defect")


class Loose(dcp.DefaultLoadPlanner):
    def __init__(self) -> None:
        super().__init__(allow_partial_load=True)


def failures(error: CheckpointException) -> set[tuple[str, str]]:
    return {(type(each).__name__, str(each)) for each, _ in error.failures.values()}


# --- torch 2.3's keys

#: Written by two ranks with torch 2.3.1's dcp.save, from `as_2_3_saved`.
OF_2_3 = Path(__file__).parent / "torch-2.3.1"


def as_2_3_saved(shards: bool, saved: bool = True) -> dict[str, Any]:
    """What is in the checkpoint, or (not `saved`) what a program has before a load."""

    def rows(first: float) -> torch.Tensor:
        whole = torch.arange(8.0).view(4, 2) + first if saved else torch.zeros(4, 2)
        if not shards:
            return whole
        mesh, size = init_device_mesh("cpu", (dist.get_world_size(),)), 4 // dist.get_world_size()
        here = whole[size * dist.get_rank() :][:size].clone()
        return DTensor.from_local(here, mesh, [Shard(0)], run_check=False)

    group = {"params": ["w"], "lr": 0.5, "betas": (0.9, 0.95)}
    state = {"w": {"exp_avg": rows(10), "step": torch.tensor(3.0 * saved)}}
    return {
        "model": {"w": rows(0)},
        "optim": {"state": state, "param_groups": [group if saved else {"params": [], "lr": 0, "betas": ()}]},
        "trainer": {"step": 7, "epochs": [1, 2], "none": {}}
        if saved
        else {"step": 0, "epochs": [], "none": 1},
    }


def equal(loaded: Any, wanted: Any) -> None:
    if isinstance(wanted, Mapping):
        assert loaded.keys() == wanted.keys()
        for key, value in wanted.items():
            equal(loaded[key], value)
    elif isinstance(wanted, (list, tuple)):
        assert (type(loaded), len(loaded)) == (type(wanted), len(wanted))
        for got, value in zip(loaded, wanted):
            equal(got, value)
    elif isinstance(wanted, DTensor):
        assert torch.equal(loaded.to_local(), wanted.to_local())
    else:
        assert torch.equal(loaded, wanted) if torch.is_tensor(wanted) else loaded == wanted


# With allow_partial_load stock torch 2.4 says nothing, and loads no group and no step.
@pytest.mark.parametrize("planner", [None, Loose])
@pytest.mark.parametrize("shards", [False, True])
@on_ranks(world=2, broken=TORCH == (2, 4), fixture="fixed")
def test_a_checkpoint_of_torch_2_3_loads(api: Any, shards: bool, planner: Any) -> None:
    state = as_2_3_saved(shards, saved=False)
    weight = state["model"]["w"]
    dcp.load(state, checkpoint_id=str(OF_2_3), planner=planner and planner())
    equal(state, as_2_3_saved(shards))
    assert state["model"]["w"] is weight


class As23(dcp.DefaultSavePlanner):
    """Saves with torch 2.3's keys."""

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self.state_dict, self.mappings = flattened_as_2_3(state_dict)


NESTED = {
    "a mapping without tensors": {"args": {"lr": 0.5, "more": {"text": "t", "none": None}}},
    "lists of mappings": {"groups": [{"lr": 1}, {"lr": 2, "betas": [1, 2]}], "rest": [[{"a": 1}], []]},
    "beside tensors": {"o": {"w": torch.ones(2), "args": {"lr": 1}, "list": [torch.ones(1), {"n": 3}]}},
    "what is empty": {"state": {"a": {}, "b": []}, "none": {}, "t": torch.ones(3)},
}


def other(tree: Any) -> Any:
    """The same structure with other values."""
    if isinstance(tree, dict):
        return {key: other(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [other(value) for value in tree]
    return torch.zeros_like(tree) if torch.is_tensor(tree) else "other"


@pytest.mark.parametrize("case", NESTED)
@on_ranks(world=1, broken=TORCH == (2, 4), fixture="fixed")
def test_2_3s_keys(api: Any, tmp_path: Path, case: str) -> None:
    folder = str(tmp_path / "saved")
    dcp.save(copy.deepcopy(NESTED[case]), checkpoint_id=folder, planner=As23())
    state = other(NESTED[case])
    dcp.load(state, checkpoint_id=folder)
    equal(state, NESTED[case])
    # By the keys of today, which the next save writes.
    dcp.save(state, checkpoint_id=f"{folder}/new")
    again = other(NESTED[case])
    dcp.load(again, checkpoint_id=f"{folder}/new")
    equal(again, NESTED[case])


@on_ranks(world=2)
def test_todays_keys_are_as_before(api: Any, tmp_path: Path) -> None:
    """More or less than the checkpoint has, by today's keys: as without torch 2.3's."""
    folder = str(tmp_path / "saved")
    dcp.save({"args": {"lr": 1, "n": 2}, "w": torch.ones(2)}, checkpoint_id=folder)
    part = {"args": {"lr": 0}}
    dcp.load(part, checkpoint_id=folder)
    assert part == {"args": {"lr": 1}}
    with pytest.raises(CheckpointException) as caught:
        dcp.load({"args": {"lr": 0, "more": 0}}, checkpoint_id=folder)
    assert failures(caught.value) == {("RuntimeError", "Missing key in checkpoint state_dict: args.more.")}
    more = {"args": {"lr": 0, "more": 0}}
    dcp.load(more, checkpoint_id=folder, planner=Loose())
    assert more == {"args": {"lr": 1, "more": 0}}
    dcp.save({"w": torch.ones(2)}, checkpoint_id=f"{folder}/flat", planner=dcp.DefaultSavePlanner(False))
    flat = {"w": torch.zeros(2)}
    dcp.load(flat, checkpoint_id=f"{folder}/flat", planner=dcp.DefaultLoadPlanner(False))
    assert torch.all(flat["w"] == 1)


# --- partial values


def partial(mesh: DeviceMesh, *others: Any) -> DTensor:
    return DTensor.from_local(torch.ones(2, 3), mesh, [Partial(), *others], run_check=False)


def norm() -> Any:
    """What clip_grad_norm_ returns of a model of FSDP2: each rank has its part of the norm."""
    model = nn.Linear(3, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    return nn.utils.clip_grad_norm_(model.parameters(), 1.0)


PARTIALS = {
    "one mesh dimension": lambda: partial(init_device_mesh("cpu", (2,))),
    "two mesh dimensions": lambda: partial(init_device_mesh("cpu", (1, 2)), Shard(0)),
    "a part of the ranks": lambda: partial(DeviceMesh("cpu", [1])),
    **({"a norm": norm} if AFFECTED else {}),  # whole in later releases
}


@not_on_2_7
@pytest.mark.parametrize("case", PARTIALS)
@on_ranks(world=2, broken=AFFECTED, fixture="fixed")
def test_partial_values_are_not_saved(api: Any, tmp_path: Path, case: str) -> None:
    folder = str(tmp_path / "saved")
    value = PARTIALS[case]()
    with pytest.raises(CheckpointException, match="partial") as caught:
        dcp.save({"w": torch.ones(2), "grads": {"sum": value}}, checkpoint_id=folder)
    assert sorted(caught.value.failures) == ([1] if case == "a part of the ranks" else [0, 1])
    if AFFECTED:
        assert all(text.startswith("grads.sum is a DTensor with") for _, text in failures(caught.value))
    assert not Path(folder, ".metadata").exists()
    if case != "a part of the ranks":
        dcp.save({"sum": value.full_tensor()}, checkpoint_id=folder)


@not_on_2_7
@on_ranks(world=2, broken=AFFECTED, fixture="fixed")
def test_partial_values_are_not_loaded(api: Any, tmp_path: Path) -> None:
    """Every rank would have the whole value, and their sum be another."""
    folder = str(tmp_path / "saved")
    dcp.save({"w": torch.full((2, 3), 3.0), "v": torch.zeros(2)}, checkpoint_id=folder)
    mesh = init_device_mesh("cpu", (2,))
    state = {"v": torch.ones(2), "w": partial(mesh)}
    with pytest.raises(CheckpointException):
        dcp.load(state, checkpoint_id=folder)
    assert torch.all(state["w"].to_local() == 1)
    assert torch.all(state["v"] == 1), "something was read"
    # One that the checkpoint does not have is none of this load's.
    dcp.load({"more": partial(mesh), "v": state["v"]}, checkpoint_id=folder, planner=Loose())
    assert not state["v"].any()
    whole = DTensor.from_local(torch.zeros(2, 3), mesh, [Replicate()], run_check=False)
    dcp.load({"w": whole}, checkpoint_id=folder)
    assert torch.all(whole.full_tensor() == 3)


# --- tensors on the meta device


class Pair(NamedTuple):
    first: Any
    second: Any


@on_ranks(world=2, broken=TORCH == (2, 4), fixture="fixed")
def test_tensors_on_the_meta_device_are_loaded(api: Any, tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    mesh = init_device_mesh("cpu", (2,))

    def values(device: str) -> dict[str, Any]:
        make = torch.ones if device == "cpu" else torch.empty
        even = DTensor.from_local(make(2, 2, device=device), mesh, [Shard(0)], run_check=False)
        return {
            "w": make(3, device=device),
            "nested": {"list": [make(2, device=device), {"w": make(1, dtype=torch.int64, device=device)}]},
            "even": even,
        }

    dcp.save(values("cpu"), checkpoint_id=folder)
    state = values("meta")
    inner = state["nested"]
    dcp.load(state, checkpoint_id=folder)
    equal(state, values("cpu"))
    assert state["nested"] is inner


@on_ranks(world=2, broken=TORCH == (2, 4), fixture="fixed")
def test_a_model_on_the_meta_device_is_loaded(api: Any, tmp_path: Path) -> None:
    """As torch documents it: no memory before the load."""
    folder = str(tmp_path / "saved")
    mesh = init_device_mesh("cpu", (2,))

    def model() -> nn.Module:
        made = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
        fully_shard(made, mesh=mesh)
        return made

    source = model()
    dcp.save(source.state_dict(), checkpoint_id=folder)
    with torch.device("meta"):
        loaded = model()
    state = loaded.state_dict()
    dcp.load(state, checkpoint_id=folder)
    loaded.load_state_dict(state, assign=True)
    equal(loaded.state_dict(), source.state_dict())
    assert not any(each.is_meta for each in (*loaded.parameters(), *loaded.buffers()))


@open_upstream
@on_ranks(world=2)
def test_what_is_rare_on_the_meta_device(api: Any) -> None:
    """Tuples keep their class; a ShardedTensor on the meta device is refused, as in torch."""
    planner = dcp.DefaultLoadPlanner()
    pair = Pair(torch.empty(2, device="meta"), {"w": torch.empty(1, device="meta")})
    kept = Pair(1, [torch.ones(1)])
    state: dict[str, Any] = {"pair": pair, "kept": kept, "size": torch.Size([2, 3])}
    planner.set_up_planner(state)
    assert type(state["pair"]) is Pair
    assert [state["pair"].first.device.type, pair.second["w"].device.type] == ["cpu", "cpu"]
    assert state["kept"] is kept
    assert type(state["size"]) is torch.Size
    sharded = legacy()
    planner.set_up_planner({"w": sharded})
    sharded.local_shards()[0].tensor = torch.empty(2, 3, device="meta")
    with pytest.raises(RuntimeError, match="unsupported type"):
        planner.set_up_planner({"w": sharded})


# --- what a checkpoint lacks


class Plain:
    """An object that torch knows nothing of."""

    def __init__(self, step: int) -> None:
        self.step = step


def objects(step: int) -> dict[str, Any]:
    return {
        "plain": Plain(step),
        "dtype": torch.float16,
        "set": {step},
        "pair": Pair(step, "text"),
        "n": step,
    }


@open_upstream
@on_ranks(world=2, broken=TORCH in ((2, 5), (2, 6)), fixture="fixed")
def test_objects_that_a_checkpoint_lacks_stay(api: Any, tmp_path: Path) -> None:
    """What is not in the checkpoint stays, also where the load fails."""
    folder = str(tmp_path / "saved")
    dcp.save({"trainer": {"n": 3}}, checkpoint_id=folder)
    state = {"trainer": objects(1)}
    before = dict(state["trainer"])
    with pytest.raises(CheckpointException, match="Missing key"):
        dcp.load(state, checkpoint_id=folder)
    assert state["trainer"] == before
    dcp.load(state, checkpoint_id=folder, planner=Loose())
    assert state["trainer"] == {**before, "n": 3}
    assert type(state["trainer"]["pair"]) is Pair


@on_ranks(world=2)
def test_objects_that_a_checkpoint_has_are_loaded(api: Any, tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    dcp.save({"trainer": objects(3)}, checkpoint_id=folder)
    state = {"trainer": objects(1)}
    dcp.load(state, checkpoint_id=folder)
    loaded = state["trainer"]
    assert (loaded["plain"].step, loaded["set"], loaded["pair"], loaded["n"]) == (3, {3}, Pair(3, "text"), 3)


class Unflattened(dcp.DefaultLoadPlanner):
    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)


class Renamed(dcp.DefaultLoadPlanner):
    """Loads the average into the weight."""

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        super().set_up_planner(state_dict, metadata, is_coordinator)
        self.state_dict = {f"ema_{key}": value for key, value in self.state_dict.items()}


@pytest.mark.skipif(TORCH != (2, 4), reason="later releases of torch look for torch 2.3's keys first")
@on_ranks(world=1)
def test_2_3s_keys_are_taken_where_they_serve_more(api: Any, tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    dcp.save({"w": torch.full((2,), 5.0), "ema_w": torch.full((2,), 7.0)}, checkpoint_id=folder)
    state: dict[str, Any] = {"w": torch.zeros(2)}
    dcp.load(state, checkpoint_id=folder, planner=Renamed())
    assert state["w"].tolist() == [7, 7]
    dcp.save({"a": None, "c": {"d": 2}}, checkpoint_id=f"{folder}/part")
    state = {"a": {"b": 1}, "c": {"d": 0}}
    dcp.load(state, checkpoint_id=f"{folder}/part", planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
    assert state == {"a": {"b": 1}, "c": {"d": 2}}


ODD = {
    "an integer key": {0: torch.ones(2)},
    "an empty dict": {"a": torch.ones(2), "e": {}},
    "below": {"a": {0: torch.ones(2), "e": {}}, "w": torch.ones(2)},
}


@pytest.mark.parametrize("case", ODD)
@on_ranks(world=1)
def test_an_unflattened_load_is_as_before(api: Any, tmp_path: Path, case: str) -> None:
    """Torch puts objects into a copy, whose keys are texts: the caller's dict keeps its form."""
    folder = str(tmp_path / "saved")
    unflattened = dcp.DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(copy.deepcopy(ODD[case]), checkpoint_id=folder, planner=unflattened)
    state = copy.deepcopy(ODD[case])
    for key, value in state.items():
        if torch.is_tensor(value):
            state[key] = torch.zeros(2)
    dcp.load(state, checkpoint_id=folder, planner=Unflattened())
    equal(state, ODD[case])


# --- all keys


SAVED = {"model": {"w": torch.ones(2), "b": torch.zeros(3)}, "step": 7}


@not_on_2_7
@on_ranks(world=2, broken=AFFECTED, fixture="fixed")
def test_no_keys_are_all_keys(api: Any, tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    load = state_dict_loader._load_state_dict_from_keys
    dcp.save(SAVED, checkpoint_id=folder)
    equal(load(checkpoint_id=folder), SAVED)
    equal(load(storage_reader=dcp.FileSystemReader(folder)), SAVED)
    equal(load("model.w", checkpoint_id=folder), {"model": {"w": torch.ones(2)}})
    equal(load({"step", "model.b"}, checkpoint_id=folder), {"model": {"b": torch.zeros(3)}, "step": 7})
    assert load(set(), checkpoint_id=folder) == {}


def test_no_keys_are_all_keys_without_a_group(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        dcp.save(SAVED, checkpoint_id=str(tmp_path))
    with pytest.warns(UserWarning, match="unavailable or uninitialized") as caught:
        found = torch_dcp_backport.dcp._load_state_dict_from_keys(checkpoint_id=str(tmp_path))
    assert [Path(warning.filename).name for warning in caught] == [Path(__file__).name]
    equal(found, SAVED)
    same(found["model"], SAVED["model"])
