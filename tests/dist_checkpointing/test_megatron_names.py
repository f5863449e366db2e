"""Megatron's words, types, signatures and names, as programs and Megatron's own tests expect them."""

from __future__ import annotations

import importlib
import io
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from heard import heard
from pool import on_ranks
from torch.distributed.checkpoint.api import CheckpointException

from torch_dcp_backport import compat
from torch_dcp_backport import dist_checkpointing as room
from torch_dcp_backport.dist_checkpointing import (
    CheckpointingException,
    ShardedObject,
    ShardedTensor,
    dict_utils,
)
from torch_dcp_backport.dist_checkpointing import utils as ours_utils
from torch_dcp_backport.dist_checkpointing.mapping import is_main_replica
from torch_dcp_backport.dist_checkpointing.serialization import (
    get_default_load_sharded_strategy,
    get_default_save_sharded_strategy,
)
from torch_dcp_backport.dist_checkpointing.strategies import async_utils
from torch_dcp_backport.dist_checkpointing.strategies.async_utils import AsyncCallsQueue, _disable_gc
from torch_dcp_backport.dist_checkpointing.strategies.cached_metadata_filesystem_reader import (
    CachedMetadataFileSystemReader,
)
from torch_dcp_backport.dist_checkpointing.strategies.checkpointable import (
    CheckpointableShardedTensor,
    LocalShardsContainer,
)
from torch_dcp_backport.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from torch_dcp_backport.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from torch_dcp_backport.dist_checkpointing.strategies.nvrx import has_nvrx_async_support
from torch_dcp_backport.dist_checkpointing.strategies.torch import (
    MCoreLoadPlanner,
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
    get_async_strategy,
)
from torch_dcp_backport.dist_checkpointing.validation import (
    determine_global_metadata,
    maybe_report_missing_and_unexpected_keys,
    save_integrity_manifest,
    validate_integrity_and_strict_load,
    verify_integrity_manifest,
)

TASD = "torch_dcp_backport.dist_checkpointing.tensor_aware_state_dict"
NVRX = "nvidia_resiliency_ext.checkpointing.local.base_state_dict"


def tensor(key: str, values: Any, **fields: Any) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, torch.tensor(values), **fields)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    room.save({"w": tensor("w", [1, 2]), "rng": ShardedObject("rng", 7, (1,), (0,)), "step": 3}, tmp_path)
    return tmp_path


# --- words and types ---


def test_words_of_a_folder_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(CheckpointingException, match=f"directory {tmp_path}/no does not exist"):
        room.load({}, tmp_path / "no")
    with pytest.raises(CheckpointingException, match=f"{tmp_path} is not a distributed checkpoint"):
        room.load({}, tmp_path)


def test_an_unexpected_key_is_torchs_error_where_torch_looks(saved: Path) -> None:
    asked = {"v": tensor("v", [0])}
    with pytest.raises(CheckpointException, match="Unexpected keys, not in the checkpoint: v") as caught:
        room.load(asked, saved)
    assert isinstance(caught.value, CheckpointingException)
    assert caught.value.failures == {}
    with pytest.raises(CheckpointingException, match="Unexpected keys, not in the checkpoint: v") as caught:
        room.load(asked, saved, strict="raise_unexpected")
    assert not isinstance(caught.value, CheckpointException)
    with pytest.raises(CheckpointingException, match=r"Missing keys, in the checkpoint, .*: w") as caught:
        room.load({"rng": ShardedObject("rng", None, (1,), (0,))}, saved, strict="raise_all")
    assert "Unexpected keys" not in str(caught.value)


def test_keys_are_logged_unless_they_are_raised(caplog: pytest.LogCaptureFixture) -> None:
    maybe_report_missing_and_unexpected_keys({"a"}, set(), raise_error=False)
    assert "Missing keys, in the checkpoint, and loaded by no rank: a" in caplog.text
    with pytest.raises(CheckpointingException, match="Missing keys"):
        maybe_report_missing_and_unexpected_keys({"a"}, set())


def test_nothing_is_returned_of_keys_that_are_ignored() -> None:
    asked = {"v": tensor("v", [0])}
    for strict, expected in (("ignore_all", set()), ("return_all", {"v"})):
        result = validate_integrity_and_strict_load(asked, strict, False, None, [[asked["v"]]], {})
        assert result == ({}, set(), expected)


def test_an_error_says_how_programs_allow_a_class(tmp_path: Path) -> None:
    with mock.patch.object(importlib.import_module(__name__), "Allowed", Allowed):
        room.save({"x": Allowed()}, tmp_path)
        with pytest.raises(
            CheckpointingException, match=r"torch.serialization.add_safe_globals allows a class"
        ):
            room.load({}, tmp_path)
        before = torch.serialization.get_safe_globals()
        torch.serialization.add_safe_globals([Allowed])
        try:
            assert isinstance(room.load({}, tmp_path)["x"], Allowed)
        finally:
            torch.serialization.clear_safe_globals()
            torch.serialization.add_safe_globals(before)


class Allowed:
    pass


# --- signatures ---


def test_the_order_of_the_newest_release(tmp_path: Path) -> None:
    room.save({"w": tensor("w", [1])}, tmp_path, None, True, False, None, {"a": 1}, "mcore", True)
    assert (tmp_path / "integrity.json").exists()
    assert room.load_content_metadata(tmp_path) == {"a": 1}
    result = room.load({"w": tensor("w", [0])}, tmp_path, None, False, "return_all", True, None)
    assert (result[0]["w"].tolist(), result[1:]) == ([1], (set(), set()))
    with pytest.raises(TypeError, match=r"load\(\) got strict twice"):
        room.load({}, tmp_path, None, False, "return_all", strict="raise_all")
    with pytest.raises(TypeError, match=r"load\(\) takes 7 arguments"):
        room.load({}, tmp_path, None, False, "return_all", True, None, 1)


def test_default_strategies(tmp_path: Path, saved: Path) -> None:
    assert isinstance(get_default_load_sharded_strategy(), TorchDistLoadShardedStrategy)
    assert isinstance(get_default_load_sharded_strategy(saved), TorchDistLoadShardedStrategy)
    assert isinstance(get_default_save_sharded_strategy("torch_dist"), TorchDistSaveShardedStrategy)
    with pytest.raises(CheckpointingException, match="no such format: 'zarr'"):
        get_default_save_sharded_strategy("zarr")


def test_another_programs_background_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointingException, match="async_strategy='nvrx' writes in another process"):
        room.save({"w": tensor("w", [1])}, tmp_path, async_sharded_save=True, async_strategy="nvrx")
    room.save({"w": tensor("w", [1])}, tmp_path, async_strategy="nvrx")


def test_a_queue_that_is_given_up_leaves_no_checkpoint(tmp_path: Path) -> None:
    queue = AsyncCallsQueue(persistent=True)
    AsyncCallsQueue.warmup_persistent_caller(0, mp_mode="spawn")
    queue.schedule_async_request(room.save({"w": tensor("w", [1])}, tmp_path, async_sharded_save=True))  # type: ignore[arg-type]
    queue.close(abort=True)
    assert queue.get_num_unfinalized_calls() == 0
    assert list(tmp_path.iterdir()) == []
    room.save({"w": tensor("w", [1])}, tmp_path)  # the folder is free


def test_the_group_in_content_metadata_is_not_saved(tmp_path: Path) -> None:
    room.save({}, tmp_path, content_metadata={"sharding": "dp", "dp_cp_group": object()})
    assert room.load_content_metadata(tmp_path) == {"sharding": "dp"}


def test_a_group_that_is_none_of_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    gathered: list[Any] = []
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2 if group == "group" else 0)
    monkeypatch.setattr(dist, "all_gather_object", lambda *args, group: gathered.append((*args, group)))
    part = tensor("w", [1])
    group: Any = "group"
    own, everyone = determine_global_metadata({"w": part}, process_group=group)
    assert own == [replace(part, data=None)]
    assert gathered == [([None, None], own, "group")]
    assert everyone is gathered[0][0]


def test_a_list_of_digests_of_any_folder(tmp_path: Path) -> None:
    (tmp_path / "metadata.json").write_text(json.dumps({"test_metadata": 1}))
    save_integrity_manifest(tmp_path)
    verify_integrity_manifest(tmp_path)
    (tmp_path / "metadata.json").write_text(json.dumps({"test_metadata": 2}))
    with pytest.raises(CheckpointingException, match="wrong SHA-256"):
        verify_integrity_manifest(tmp_path)
    (tmp_path / ".metadata").write_bytes(b"")
    with pytest.raises(CheckpointingException, match=r"does not list a file: .metadata"):
        verify_integrity_manifest(tmp_path)


# --- values ---


def test_a_buffer_comes_back(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    torch.save({"some": "dict"}, buffer)
    room.save({"o": ShardedObject("o", buffer, (1,), (0,))}, tmp_path)
    loaded = room.load({"other": ShardedObject("o", io.BytesIO(), (1,), (0,))}, tmp_path)["other"]
    loaded.seek(0)
    assert torch.load(loaded, weights_only=True) == {"some": "dict"}


def test_the_common_state_has_megatrons_key(saved: Path) -> None:
    parts = room.load_sharded_metadata(saved)
    assert sorted(parts) == ["common_state/shard_0_1", "rng/shard_0_1", "w"]
    loaded = room.load(dict(parts), saved, validate_access_integrity=False, strict="raise_all")
    assert loaded["common_state/shard_0_1"] == {"step": 3}
    assert loaded["rng/shard_0_1"] == 7
    assert loaded["w"].tolist() == [1, 2]


# --- strategies ---


def test_a_strategy_saves_and_loads_by_itself(tmp_path: Path) -> None:
    strategy = TorchDistSaveShardedStrategy(thread_count=2, cached_metadata=True)
    strategy.use_cached_ckpt_structure = True
    strategy.save({"w": tensor("w", [1, 2])}, tmp_path)
    loader = TorchDistLoadShardedStrategy(cache_metadata=True)
    assert loader.load({"x": tensor("w", [0, 0])}, tmp_path)["x"].tolist() == [1, 2]
    assert list(loader.load_tensors_metadata(tmp_path)) == ["w"]
    assert sorted(loader.load_sharded_metadata(tmp_path)) == ["common_state/shard_0_1", "w"]
    queue = AsyncCallsQueue()
    queue.schedule_async_request(strategy.async_save({"w": tensor("w", [3, 4])}, tmp_path))
    queue.close()
    assert loader.load({"x": tensor("w", [0, 0])}, tmp_path)["x"].tolist() == [3, 4]
    with pytest.raises(CheckpointingException, match="async_strategy='nvrx'"):
        strategy.async_save({}, tmp_path, "nvrx")
    with pytest.raises(CheckpointingException, match="no such format: 'mock'"):
        TorchDistSaveShardedStrategy("mock").save({}, tmp_path)
    loader.remove_sharded_tensors(str(tmp_path), "w")
    assert room.load_tensors_metadata(tmp_path) == {}


def test_a_program_sees_what_is_read_from_which_file(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compat.has_checkpointables():
        pytest.skip("torch asks values for their boxes from 2.6 on")
    seen = []

    def look(self: Any) -> Any:
        plan = super(MCoreLoadPlanner, self).create_local_plan()
        places = self.metadata.storage_data
        seen.extend((item.dest_index.fqn, places[item.storage_index].relative_path) for item in plan.items)
        return plan

    monkeypatch.setattr(MCoreLoadPlanner, "create_local_plan", look)
    loaded = TorchDistLoadShardedStrategy().load({"w": tensor("w", [0, 0])}, saved)
    assert (seen, loaded["w"].tolist()) == ([("w", "__0_0.distcp")], [1, 2])


class OwnSave(TorchDistSaveShardedStrategy):
    """Notes the keys of its main replicas, and writes nothing."""

    def __init__(self) -> None:
        super().__init__("mock", 1)
        self.keys: set[str] = set()

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        self.keys = {part.key for part in sharded_state_dict.values() if is_main_replica(part.replica_id)}


class OwnLoad(TorchDistLoadShardedStrategy):
    """Fills what it is asked for with its rank; fails on a rank."""

    def __init__(self, fails_on: int = -1) -> None:
        super().__init__()
        self.keys: set[str] = set()
        self.fails_on = fails_on

    def load(self, sharded_state_dict: Any, checkpoint_dir: Any, async_strategy: str = "mcore") -> Any:
        rank = dist.get_rank()
        if rank == self.fails_on:
            raise OSError("the disk is gone")
        self.keys |= {part.key for part in sharded_state_dict.values()}
        return {
            shard: torch.full_like(part.data, rank) if isinstance(part, ShardedTensor) else rank
            for shard, part in sharded_state_dict.items()
        }


def test_a_strategy_of_ones_own_is_not_passed_over(saved: Path) -> None:
    for strategy in (OwnSave(), FullyParallelSaveStrategyWrapper(OwnSave())):
        with pytest.raises(CheckpointingException, match="OwnSave has a save of its own"):
            room.save({"w": tensor("w", [1])}, saved, strategy)
    for loader in (OwnLoad(), FullyParallelLoadStrategyWrapper(OwnLoad())):
        with pytest.raises(CheckpointingException, match="OwnLoad has a load of its own"):
            room.load({"w": tensor("w", [1, 2])}, saved, loader)


def shared(api: Any, folder: str) -> dict[str, Any]:
    """Two ranks with two tensors alike, one each, and an object each of which the other has a copy."""
    rank = dist.get_rank()

    def state() -> dict[str, Any]:
        return {
            "large": ShardedTensor.from_rank_offsets("large", torch.zeros(8), replica_id=rank),
            "small": ShardedTensor.from_rank_offsets("small", torch.zeros(2), replica_id=rank),
            "own": ShardedTensor.from_rank_offsets("own", torch.zeros(2), (0, rank, 2)),
        }

    found: dict[str, Any] = {}
    saver = FullyParallelSaveStrategyWrapper(OwnSave(), do_cache_distribution=True)
    parts = state()
    saver.save(parts, folder)
    found["saves"] = saver.base_strategy.keys
    found["replicas"] = {key: part.replica_id for key, part in parts.items()}
    assert saver.cached_distribution is not None
    found["mains"] = {shard[0]: main for shard, main in saver.cached_distribution.main_rank_for_shard.items()}

    asked = {**state(), "o": ShardedObject("o", None, (1,), (0,), replica_id=1 - rank)}
    loader = FullyParallelLoadStrategyWrapper(OwnLoad())
    values = loader.load(asked, folder)
    found["reads"] = loader.base_strategy.keys
    found["values"] = {key: value if key == "o" else int(value[0]) for key, value in values.items()}

    groups = [dist.new_group([number]) for number in range(2)]
    try:
        FullyParallelLoadStrategyWrapper(OwnLoad(fails_on=1)).load(asked, folder)
    except CheckpointingException as error:
        found["failed"] = str(error)
    narrow = FullyParallelLoadStrategyWrapper(OwnLoad(), groups[rank], per_rank_object_load=True)
    found["narrow"] = int(narrow.load(state(), folder)["large"][0])

    ours = FullyParallelSaveStrategyWrapper(None)
    filled = {key: replace(part, data=part.data + 1 + rank) for key, part in state().items()}
    filled["small"] = replace(filled["small"], data=torch.full((2,), 5.0))
    filled["large"] = replace(filled["large"], data=torch.full((8,), 6.0))
    ours.save(filled, folder)
    loaded = FullyParallelLoadStrategyWrapper(None).load(state(), folder)
    found["ours"] = {key: float(value[0]) for key, value in loaded.items()}
    return found


@on_ranks(world=3)
def test_a_rank_that_is_its_whole_group_saves_again_with_the_others(api: Any, tmp_path: Path) -> None:
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2])]
    group = groups[rank == 2]
    saver = FullyParallelSaveStrategyWrapper(None, group, do_cache_distribution=True)
    for value in (1.0, 2.0):
        folder = tmp_path / str(value)
        if rank == 0:
            folder.mkdir()
        dist.barrier()
        parts = {
            "all": ShardedTensor.from_rank_offsets("all", torch.full((3,), value), replica_id=rank),
            "own": ShardedTensor.from_rank_offsets("own", torch.full((2,), value + rank), (0, rank, 3)),
        }
        saver.save(parts, folder)
        loaded = room.load(
            {key: replace(part, data=torch.zeros_like(part.data)) for key, part in parts.items()}, folder
        )
        assert (loaded["all"].tolist(), loaded["own"].tolist()) == ([value] * 3, [value + rank] * 2)


def test_a_wrapper_shares_the_work_of_the_strategy_inside(ranks: Any, tmp_path: Path) -> None:
    first, second = ranks(shared, str(tmp_path), world=2)
    assert first["mains"] == second["mains"] == {"large": 0, "small": 1, "own": 1}
    assert (first["saves"], second["saves"]) == ({"large", "own"}, {"small", "own"})
    assert first["replicas"] == {"large": 0, "small": 1, "own": 0}
    assert (first["reads"], second["reads"]) == ({"large", "own"}, {"small", "own", "o"})
    assert first["values"] == {"large": 0, "small": 1, "own": 0, "o": 1}
    assert second["values"] == {"large": 0, "small": 1, "own": 1, "o": 1}
    assert "rank 1: OSError: the disk is gone" in first["failed"]
    assert first["failed"] == second["failed"]
    assert (first["narrow"], second["narrow"]) == (0, 1)
    assert first["ours"] == {"large": 6.0, "small": 5.0, "own": 1.0}
    assert second["ours"] == {"large": 6.0, "small": 5.0, "own": 2.0}


class Failing(TorchDistSaveShardedStrategy):
    """Saves, and fails afterwards on rank 1."""

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        super().save(sharded_state_dict, checkpoint_dir)
        if dist.get_rank() == 1:
            raise OSError("the disk is gone")


class Returning(TorchDistLoadShardedStrategy):
    """Returns on rank 1 something else than what it was asked for."""

    def __init__(self, returned: Any) -> None:
        super().__init__()
        self.returned = returned

    def load(self, sharded_state_dict: Any, checkpoint_dir: Any, async_strategy: str = "mcore") -> Any:
        loaded = super().load(sharded_state_dict, checkpoint_dir)
        return self.returned(loaded) if dist.get_rank() == 1 else loaded


def in_groups_unlike(api: Any, folder: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Three ranks, two of which are a group, and one alone: what they load, and their errors."""
    rank = dist.get_rank()
    groups = [dist.new_group(members) for members in ([0, 1], [2])]
    group = groups[rank // 2]

    def state(value: Any = None) -> dict[str, Any]:
        return {
            "all": ShardedTensor.from_rank_offsets(
                "all", torch.full((3,), float(value or 0)), replica_id=rank
            ),
            "own": ShardedTensor.from_rank_offsets("own", torch.full((2,), float(rank)), (0, rank, 3)),
            "o": ShardedObject("o", value, (1,), (0,), replica_id=rank),
        }

    FullyParallelSaveStrategyWrapper(None, group).save(state(7), folder)
    found = FullyParallelLoadStrategyWrapper(None, group).load(state(), folder)
    values = {key: value if key == "o" else value.tolist() for key, value in found.items()}

    def saving(strategy: Any, given: Any = None) -> Any:
        return lambda: FullyParallelSaveStrategyWrapper(strategy, group).save(given or state(7), folder)

    def loading(returned: Any, given: Any = None) -> Any:
        loader = FullyParallelLoadStrategyWrapper(Returning(returned), group)
        return lambda: loader.load(given or state(), folder)

    plain = {**state(), "number": 3} if rank == 1 else None
    calls = {
        "fails": saving(Failing()),
        "has no save": saving(object() if rank == 1 else None),
        "no state dict": saving(None, 5 if rank == 1 else None),
        "returns None": loading(lambda loaded: None),
        "returns a number": loading(lambda loaded: dict.fromkeys(loaded, 3)),
        "no shard": loading(dict, plain),
    }
    errors = {}
    for name, call in calls.items():
        try:
            call()
        except CheckpointingException as error:
            errors[name] = str(error)
    return values, errors


def test_a_wrapper_in_groups_of_other_sizes_and_what_fails_on_one_rank(ranks: Any, tmp_path: Path) -> None:
    given = ranks(in_groups_unlike, str(tmp_path), world=3)
    for rank, (values, errors) in enumerate(given):
        assert values == {"all": [7.0] * 3, "own": [float(rank)] * 2, "o": 7}
        assert "rank 1: OSError: the disk is gone" in errors["fails"]
        assert "rank 1: AttributeError: 'object' object has no attribute 'save'" in errors["has no save"]
        assert "'int' object is not iterable" in errors["no state dict"]
        assert "Returning.load returned a NoneType, expected a dict" in errors["returns None"]
        assert "Returning.load returned a int for own, expected a tensor" in errors["returns a number"]
        assert "rank 1: a int among the shards of a load" in errors["no shard"]


def test_a_wrapper_in_one_process_alone(tmp_path: Path) -> None:
    FullyParallelSaveStrategyWrapper(None).save({"w": tensor("w", [1, 2])}, tmp_path)
    loaded = FullyParallelLoadStrategyWrapper(None).load({"w": tensor("w", [0, 0])}, tmp_path)
    assert loaded["w"].tolist() == [1, 2]


def test_what_makes_no_difference_is_said(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    TorchDistSaveShardedStrategy(separation_hint="a_prefix")
    assert "separation_hint='a_prefix' makes no difference" in caplog.text
    FullyParallelLoadStrategyWrapper(None, pg_cache_path=str(tmp_path))
    assert "pg_cache_path makes no difference" in caplog.text


WRAPPERS = {"save": FullyParallelSaveStrategyWrapper, "load": FullyParallelLoadStrategyWrapper}


def told_of_cache(api: Any, kind: str) -> list[str]:
    """Rank 0 makes no such strategy; ranks 1 and 2 read or write together."""
    pair = dist.new_group([1, 2])
    with heard("dist_checkpointing") as said:
        for _ in range(2 if dist.get_rank() else 0):
            WRAPPERS[kind](None, pair, pg_cache_path="cache")
    return said


@pytest.mark.parametrize("kind", ["save", "load"])
def test_what_makes_no_difference_is_said_by_the_first_rank_of_a_strategy(ranks, kind: str) -> None:
    none, (said,), others = ranks(told_of_cache, kind, world=3)
    assert "pg_cache_path makes no difference" in said
    assert none == others == []


def told_of_hint(api: Any) -> list[str]:
    with heard("dist_checkpointing") as said:
        for _ in range(2 if dist.get_rank() else 0):
            TorchDistSaveShardedStrategy(separation_hint="a_prefix")
    return said


def test_a_strategy_without_a_group_says_it_on_each_rank(ranks) -> None:
    none, (said,) = ranks(told_of_hint, world=2)
    assert "separation_hint='a_prefix' makes no difference" in said
    assert none == []


def test_classes_of_saves_in_the_background() -> None:
    strategy, classes = get_async_strategy("mcore")
    assert (strategy, classes["AsyncCallsQueue"]) == ("mcore", AsyncCallsQueue)
    assert get_async_strategy("mcore", module="FileSystemWriterAsync") == ("mcore", FileSystemWriterAsync)
    with mock.patch.dict(sys.modules, {"nvidia_resiliency_ext": None}):
        with pytest.raises(ModuleNotFoundError, match='async_strategy="nvrx" needs a nvidia-resiliency-ext'):
            get_async_strategy("nvrx")
        assert has_nvrx_async_support() is False
    with pytest.raises(TypeError, match="expected mcore or nvrx"):
        get_async_strategy("other")


# --- for torch's own functions ---


def test_boxes_are_values_of_dcp(tmp_path: Path) -> None:
    def state(add: int) -> dict[str, Any]:
        boxes = [
            ShardedTensor.from_rank_offsets("w", torch.arange(2) + 2 * place + add, (0, place, 2))
            for place in range(2)
        ]
        return {
            "several": LocalShardsContainer(list(map(CheckpointableShardedTensor.from_sh_ten, boxes))),
            "single": CheckpointableShardedTensor.from_sh_ten(tensor("v", [add])),
        }

    if not compat.has_checkpointables():
        with pytest.raises(CheckpointingException, match=r"from torch 2.6 on"):
            state(0)
        return
    dcp.save(state(0), checkpoint_id=tmp_path)
    loaded = state(9)
    dcp.load(loaded, checkpoint_id=tmp_path)
    parts = [shard._sh_ten.data for shard in loaded["several"]._local_shards]
    assert [part.tolist() for part in parts] == [[0, 1], [2, 3]]
    assert loaded["single"]._sh_ten.data.tolist() == [0]
    full = {"several": torch.zeros(4, dtype=torch.int64)}
    dcp.load(full, checkpoint_id=tmp_path)
    assert full["several"].tolist() == [0, 1, 2, 3]
    with pytest.raises(CheckpointingException, match="with prepended axes"):
        CheckpointableShardedTensor.from_sh_ten(
            ShardedTensor.from_rank_offsets("p", torch.zeros(2), (0, 0, 2), prepend_axis_num=1)
        )


def test_a_planner_compares_shapes(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path)
    for key, words in (("w", r"wrong global shape: w \(expected \(2,\)"), ("v", "Unexpected keys")):
        wanted = [tensor(key, [0.0, 0.0, 0.0])]
        planner = MCoreLoadPlanner(shapes_validation_sharded_tensors=wanted)
        with pytest.raises(CheckpointException, match=words):
            dcp.load({"w": torch.zeros(2)}, checkpoint_id=tmp_path, planner=planner)


def test_an_index_is_read_again_where_the_file_is_another(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(2)}, storage_writer=FileSystemWriterAsync(tmp_path))
    reader = CachedMetadataFileSystemReader(tmp_path)
    index = reader.read_metadata()
    assert list(index.state_dict_metadata) == ["a"]
    assert CachedMetadataFileSystemReader(tmp_path).read_metadata() is index
    dcp.save({"b": torch.ones(2)}, storage_writer=FileSystemWriterAsync(tmp_path))
    assert list(reader.read_metadata().state_dict_metadata) == ["b"]
    CachedMetadataFileSystemReader.clear_metadata_cache()
    assert list(reader.read_metadata().state_dict_metadata) == ["b"]


def test_names_that_training_programs_import_at_their_head() -> None:
    from torch_dcp_backport.dist_checkpointing.strategies.filesystem_async import _results_queue
    from torch_dcp_backport.dist_checkpointing.strategies.state_dict_saver import (
        save_state_dict_async_finalize,
    )

    assert _results_queue is None
    with pytest.raises(
        NotImplementedError, match=r"save_state_dict_async_finalize: saves and loads are planned"
    ):
        save_state_dict_async_finalize(1, 2, 3)


def test_small_helpers(caplog: pytest.LogCaptureFixture) -> None:
    with ours_utils.logger_stack("a"), ours_utils.logger_stack("b") as (name, _):
        assert name == "a.b"
    assert ours_utils._clean_metadata_for_serialization({"dp_cp_group": 1, "x": 2}) == {"x": 2}
    assert dict_utils.map_reduce([1, 2, 1]) == {1: [1, 1], 2: [2]}
    with mock.patch.object(os, "setpriority") as nice:
        async_utils._set_process_qos(10)
        assert nice.call_args.args == (os.PRIO_PROCESS, 0, 10)
        nice.side_effect = PermissionError("no")
        async_utils._set_process_qos(-5)
    assert "the priority of this process cannot be set: no" in caplog.text
    assert _disable_gc()(lambda number: number + 1)(1) == 2


# --- a state dict for local checkpoints ---


@pytest.fixture
def tasd() -> Iterator[Any]:
    """The module where NVRx is installed: a stand-in of its base class."""
    with with_nvrx() as module:
        yield module


class with_nvrx:
    def __enter__(self) -> Any:
        base = ModuleType(NVRX)
        base.__dict__["TensorAwareStateDict"] = type("TensorAwareStateDict", (), {})
        self.known = sys.modules.pop(TASD, None)
        with mock.patch.dict(sys.modules, {NVRX: base}):
            return importlib.import_module(TASD)

    def __exit__(self, *_: object) -> None:
        sys.modules.pop(TASD, None)
        if self.known is not None:
            sys.modules[TASD] = self.known


def test_without_nvrx_a_state_dict_cannot_be_made() -> None:
    known = sys.modules.pop(TASD, None)
    try:
        with mock.patch.dict(sys.modules, {"nvidia_resiliency_ext": None}):
            module = importlib.import_module(TASD)
        with pytest.raises(ImportError, match="nvidia-resiliency-ext is not installed"):
            module.MCoreTensorAwareStateDict.from_state_dict({})
    finally:
        sys.modules.pop(TASD, None)
        if known is not None:
            sys.modules[TASD] = known


def test_tensors_are_taken_out_and_put_back(tasd: Any) -> None:
    asked = {"w": tensor("w", [1, 2]), "o": ShardedObject("o", "x", (1,), (0,)), "step": 3}
    kept, _ = tasd.MCoreTensorAwareStateDict.from_state_dict(asked, "atomic")
    kept.copy_tensors_to_cpu()
    (out,) = kept.pop_tensors()
    assert kept.is_hollow
    assert asked["w"].data is not None, "the caller's description is its own"
    for action in (kept.pop_tensors, lambda: list(kept.tensors), lambda: kept.to_state_dict(asked, "atomic")):
        with pytest.raises(AssertionError, match="they were taken out"):
            action()
    with pytest.raises(ValueError, match=r"not the tensor that was taken out: w \(expected \(2,\)"):
        kept.insert_tensors([torch.zeros(3)])
    kept.insert_tensors([out])
    with pytest.raises(AssertionError, match="are there"):
        kept.init_tensors()
    kept.restore_tensor_device()
    new = {"w": tensor("w", [0, 0]), "o": ShardedObject("o", None, (1,), (0,))}
    loaded = kept.to_state_dict(new, "atomic")
    assert (loaded["w"].tolist(), loaded["o"], loaded["step"]) == ([1, 2], "x", 3)
    kept.pop_tensors()
    kept.init_tensors()
    assert [value.shape for value in kept.tensors] == [(2,)]


def local(api: Any) -> dict[str, Any]:
    rank = dist.get_rank()

    def state(value: float) -> dict[str, Any]:
        return {
            "both": ShardedTensor.from_rank_offsets("both", torch.full((2,), value), replica_id=rank),
            "own": ShardedTensor.from_rank_offsets("own", torch.full((2,), value + rank), (0, rank, 2)),
        }

    found: dict[str, Any] = {}
    with with_nvrx() as module:
        kept, _ = module.MCoreTensorAwareStateDict.from_state_dict(state(5.0))
        found["tensors"] = len(list(kept.tensors))
        loaded = kept.to_state_dict(state(0.0), "fully_parallel")
        found["values"] = {key: float(value[0]) for key, value in loaded.items()}
        for name, asked, options in (
            ("unknown", {"v": tensor("v", [0], replica_id=rank)}, {}),
            (
                "strict",
                {"v": tensor("v", [0], replica_id=rank)} if rank else state(0.0),
                {"strict": "raise_all"},
            ),
            ("unlike", state(0.0), {"strict": "log_all" if rank else "ignore_all"}),
            ("part", {"own": state(0.0)["own"]}, {"strict": "return_all", "return_mismatch_keys": True}),
        ):
            try:
                found[name] = kept.to_state_dict(asked, "fully_parallel", **options)
            except Exception as error:
                found[name] = [kind.__name__ for kind in type(error).__mro__], str(error)
        found["part"] = found["part"][1:]
        if rank:
            kept.pop_tensors()
        try:
            kept.to_state_dict(state(0.0), "fully_parallel")
        except AssertionError as error:
            found["hollow"] = str(error)
    return found


def test_ranks_keep_tensors_for_each_other(ranks: Any) -> None:
    first, second = ranks(local, world=2)
    assert first["tensors"] + second["tensors"] == 3
    assert first["values"] == {"both": 5.0, "own": 5.0}
    assert second["values"] == {"both": 5.0, "own": 6.0}
    for name, words in (
        ("unknown", "a shard that no rank has loaded"),
        ("strict", "Unexpected keys, not in the checkpoint: v"),
        ("unlike", "not the same on every rank: strict"),
    ):
        assert first[name] == second[name]
        assert words in first[name][1]
    assert {"AssertionError", "CheckpointingException"} <= set(first["unknown"][0])
    assert first["part"] == second["part"] == ({"both"}, set())
    assert "rank 1: the tensors are not there: they were taken out" in first["hollow"]
    assert first["hollow"] == second["hollow"]
