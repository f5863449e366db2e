"""Megatron's names, positional order, strict modes, factories and return shapes."""

from __future__ import annotations

import importlib
import inspect
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from torch_dcp_backport import dist_checkpointing as room
from torch_dcp_backport.dist_checkpointing import (
    CheckpointingException,
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    dict_utils,
    mapping,
    optimizer,
    utils,
)
from torch_dcp_backport.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper

#: module -> names that programs import from it.
NAMES = {
    "core": "CONFIG_FNAME CheckpointingConfig CheckpointingException check_is_distributed_checkpoint "
    "maybe_load_config save_config",
    "mapping": "CommonStateDict FactoryBuildFn FactoryMergeFn LocalNonpersistentObject ReplicaId ShardedBase "
    "ShardedObject ShardedStateDict ShardedTensor ShardedTensorFactory StateDict apply_factories "
    "apply_factory_merges is_main_replica",
    "serialization": "load load_common_state_dict load_content_metadata load_plain_tensors "
    "load_sharded_metadata load_tensors_metadata remove_sharded_tensors save",
    "validation": "StrictHandling adjust_non_strict_load determine_global_metadata "
    "maybe_report_missing_and_unexpected_keys parse_strict_flag validate_integrity_and_strict_load "
    "validate_sharding_integrity verify_checkpoint_and_load_strategy",
    "dict_utils": "dict_list_map_inplace dict_list_map_outplace dict_map dict_map_with_key diff "
    "extract_matching_values inspect_types map_reduce merge nested_items_iter nested_values",
    "utils": "add_prefix_for_sharding apply_prefix_mapping debug_time extract_nonpersistent "
    "extract_sharded_base extract_sharded_tensors extract_sharded_tensors_and_factories "
    "extract_sharded_tensors_or_nonpersistent replace_prefix_for_sharding zip_strict",
    "state_dict_utils": "filter_out_empty_flatten_tensor load_preprocess save_preprocess",
    "exchange_utils": "ShardDistribution determine_main_replica_uniform_distribution "
    "distribute_shards_to_ranks exchange_by_distribution exchange_loaded_objects_gather_object "
    "exchange_loaded_tensors_broadcast exchange_loaded_tensors_gather_object "
    "exchange_loaded_tensors_gather_rounds is_float8tensor",
    "strategies.fully_parallel": "FullyParallelLoadStrategyWrapper FullyParallelSaveStrategyWrapper "
    "distribute_main_replicas_with_precomputed_distribution",
    "optimizer": "get_optim_param_to_id_map get_param_id_to_sharded_param_map make_sharded_optimizer_tensor "
    "optim_state_to_sharding_state",
}


@pytest.mark.parametrize("name", NAMES)
def test_names(name: str) -> None:
    module = importlib.import_module(f"torch_dcp_backport.dist_checkpointing.{name}")
    assert [each for each in NAMES[name].split() if not hasattr(module, each)] == []


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (
            room.save,
            "sharded_state_dict checkpoint_dir sharded_strategy common_strategy validate_access_integrity "
            "async_sharded_save preprocess_common_before_consistancy_check content_metadata",
        ),
        (
            room.load,
            "sharded_state_dict checkpoint_dir sharded_strategy common_strategy validate_access_integrity "
            "strict",
        ),
        (
            ShardedTensor,
            "key data dtype local_shape global_shape global_offset axis_fragmentations replica_id "
            "prepend_axis_num allow_shape_mismatch flattened_range",
        ),
        (ShardedObject, "key data global_shape global_offset replica_id"),
        (ShardedTensorFactory, "key data build_fn merge_fn replica_id flattened_range"),
    ],
)
def test_positional_order(function: Any, names: str) -> None:
    wanted = names.split()
    assert list(inspect.signature(function).parameters)[: len(wanted)] == wanted


def part(key: str, rank: int, world: int, value: float = 0.0) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, torch.full((2, 3), value), (0, rank, world))


def strict_modes(room: Any, folder: str, is_shared: bool) -> dict[str, Any]:
    """Every rank asks for parts of `a`, rank 1 for an unexpected key, too, and nobody for `b`."""
    rank, world = dist.get_rank(), dist.get_world_size()
    saved = {key: part(key, rank, world, rank + 1.0) for key in "ab"}
    room.save({**saved, "step": 5, "rng": ShardedObject("rng", rank, (world,), (rank,))}, folder)
    outcomes: dict[str, Any] = {}
    for mode in importlib.import_module(f"{room.__name__}.validation").StrictHandling:
        asked: dict[str, Any] = {"a": part("a", rank, world)}
        asked["next"] = replace(part("a", (rank + 1) % world, world), replica_id=1)
        if rank == 1:
            asked["c"] = ShardedTensor("c", torch.zeros(1), torch.float32, (1,), (1,), (0,), None)
        before = list(asked)
        try:
            strategy = FullyParallelLoadStrategyWrapper(None) if is_shared else None
            result = room.load(asked, folder, strategy, strict=mode if rank else mode.value)
        except room.CheckpointingException as error:
            outcomes[mode.value] = str(error)
            assert torch.equal(asked["a"].data, torch.zeros(2, 3))
            continue
        assert list(asked) == before
        missing: Any = None
        if isinstance(result, tuple):
            result, *missing = result
        assert sorted(result) == ["a", "next", "step"]
        assert torch.equal(result["a"], torch.full((2, 3), rank + 1.0))
        assert torch.equal(result["next"], torch.full((2, 3), (rank + 1) % world + 1.0))
        outcomes[mode.value] = missing
    return outcomes


@pytest.mark.parametrize("is_shared", [False, True], ids=["each for itself", "together"])
def test_strict_modes(ranks: Any, tmp_path: Path, is_shared: bool) -> None:
    outcomes = ranks(strict_modes, str(tmp_path), is_shared)
    for rank, outcome in enumerate(outcomes):
        unexpected = {"c"} if rank == 1 else set()
        assert outcome["log_unexpected"] is outcome["log_all"] is outcome["ignore_all"] is None
        assert outcome["return_unexpected"] == [set(), unexpected]
        assert outcome["return_all"] == [{"b", "rng"}, unexpected]
        for mode in ("assume_ok_unexpected", "raise_unexpected", "raise_all"):
            assert "rank 1: Unexpected keys, not in the checkpoint: c" in outcome[mode]
            assert outcome[mode] == outcomes[0][mode]


def test_missing_keys_alone_raise_only_where_all_are_looked_at(tmp_path: Path) -> None:
    room.save({"a": part("a", 0, 1, 1.0), "b": part("b", 0, 1)}, tmp_path)
    with pytest.raises(CheckpointingException, match="in the checkpoint, and loaded by no rank: b"):
        room.load({"a": part("a", 0, 1)}, tmp_path, strict="raise_all")
    assert set(room.load({"a": part("a", 0, 1)}, tmp_path, strict="raise_unexpected")) == {"a"}
    with pytest.raises(CheckpointingException, match="expected one of assume_ok_unexpected, "):
        room.load({}, tmp_path, strict="all")


def fused(key: str, data: Any, replica_id: Any, flattened_range: Any) -> Any:
    """A fused weight as two halves, as Megatron's gated MLPs are saved."""
    halves = torch.chunk(data, 2)
    return [
        ShardedTensor.from_rank_offsets(key, half.contiguous(), (0, number, 2), replica_id=replica_id)
        for number, half in enumerate(halves)
    ]


def test_factories_structure_and_what_is_not_saved(tmp_path: Path) -> None:
    weight = torch.arange(12.0).view(4, 3)

    def state(data: torch.Tensor, local: str) -> dict[Any, Any]:
        return {
            "fused": [ShardedTensorFactory("w", data, fused, torch.cat), {"plain": 1}],
            "local": LocalNonpersistentObject(local),
            3: {"params": LocalNonpersistentObject([7]), "lr": 0.5},
            "empty": {},
            "list": [1, part("x", 0, 1, 2.0), "two"],
        }

    saved = state(weight, "saved")
    before = repr(saved)
    room.save(saved, tmp_path, content_metadata={"version": 2})
    assert repr(saved) == before
    asked = state(torch.zeros(4, 3), "asked")
    before = repr(asked)
    result = room.load(asked, tmp_path)
    assert repr(asked) == before
    assert torch.equal(result["fused"][0], weight)
    assert result["fused"][1] == {"plain": 1}
    assert result["local"] == "asked"
    assert result[3] == {"params": [7], "lr": 0.5}
    assert result["empty"] == {}
    assert result["list"][::2] == [1, "two"]
    assert torch.equal(result["list"][1], torch.full((2, 3), 2.0))
    assert room.load_content_metadata(tmp_path) == {"version": 2}
    assert set(room.load_common_state_dict(tmp_path)) == {"fused", 3, "empty", "list", "content_metadata"}


@pytest.mark.parametrize("beside", [[], [{"plain": 1}]], ids=["alone", "beside another value"])
def test_a_list_without_some_elements_keeps_the_places_of_its_factories(tmp_path: Path, beside: Any) -> None:
    weight = torch.arange(12.0).view(4, 3)
    room.save({"list": [ShardedTensorFactory("w", weight, fused, torch.cat), *beside]}, tmp_path)

    def other(data: Any) -> ShardedTensorFactory:
        return ShardedTensorFactory("v", data, lambda key, data, *_: part(key, 0, 1), failing)

    def failing(_: Any) -> Any:
        raise AssertionError("nothing was loaded for this one")

    asked = {
        "list": [part("x", 0, 1), ShardedTensorFactory("w", torch.zeros(4, 3), fused, torch.cat)],
        "others": [part("y", 0, 1), other(weight), [part("z", 0, 1)]],
    }
    result = room.load(asked, tmp_path, strict="ignore_all")
    assert list(result) == ["list"]
    assert torch.equal(result["list"][0], weight)


def test_what_a_checkpoint_holds(tmp_path: Path) -> None:
    stack = ShardedTensor.from_rank_offsets("stack", torch.ones(3, 2), (0, 0, 1), prepend_axis_num=1)
    room.save({"s": stack, "o": ShardedObject("o", 1, (1,), (0,)), "step": 1}, tmp_path)
    tensors = room.load_tensors_metadata(tmp_path)
    assert tensors["stack"].global_shape == (1, 3, 2)
    assert set(room.load_sharded_metadata(tmp_path)) == {
        "stack",
        "o/shard_0_1",
        "common_state/shard_0_1",
    }
    plain = room.load_plain_tensors(tmp_path)
    assert torch.equal(plain["stack"], torch.ones(1, 3, 2))
    assert plain["step"] == 1


def test_keys_are_removed_without_reading_them(tmp_path: Path) -> None:
    from torch_dcp_backport.dist_checkpointing.serialization import remove_sharded_tensors

    state = {key: part(key, 0, 1, 1.0) for key in ("model.a", "optimizer.a", "optimizer.b")}
    room.save({**state, "step": 1}, tmp_path)
    remove_sharded_tensors(tmp_path, "optimizer.")
    assert set(room.load_tensors_metadata(tmp_path)) == {"model.a"}
    assert room.verify(tmp_path) == []
    assert torch.equal(room.load({"a": part("model.a", 0, 1)}, tmp_path)["a"], torch.ones(2, 3))


def megatron() -> ModuleType:
    """A module with the fields of Megatron's own classes, and nothing else of them."""
    module = ModuleType("megatron.core.dist_checkpointing.mapping")

    class ShardedTensor:
        def __init__(self, **fields: Any) -> None:
            self.__dict__.update(fields)

    class ShardedObject(ShardedTensor):
        pass

    class ShardedTensorFactory(ShardedTensor):
        pass

    class LocalNonpersistentObject:
        def __init__(self, obj: Any) -> None:
            self.obj = obj

    for kind in (ShardedTensor, ShardedObject, ShardedTensorFactory, LocalNonpersistentObject):
        kind.__module__ = module.__name__
        setattr(module, kind.__name__, kind)
    return module


def test_objects_of_megatron_itself(tmp_path: Path) -> None:
    theirs = megatron()
    weight = torch.arange(6.0).view(2, 3)

    def tensor(key: str, data: torch.Tensor, replica_id: Any, flattened_range: Any) -> Any:
        fields = {"key": key, "data": data, "dtype": data.dtype, "local_shape": data.shape}
        grid = {"global_shape": data.shape, "global_offset": (0, 0), "axis_fragmentations": (1, 1)}
        return theirs.ShardedTensor(**fields, **grid, replica_id=replica_id, prepend_axis_num=0)

    def state(data: torch.Tensor, value: Any) -> dict[str, Any]:
        grid = {"global_shape": (1,), "global_offset": (0,), "replica_id": 0}
        factory = {"key": "f", "build_fn": tensor, "merge_fn": lambda built: built + 1, "replica_id": 0}
        return {
            "w": tensor("w", data, (0, 0), None),
            "o": theirs.ShardedObject(key="o", data=value, **grid),
            "f": theirs.ShardedTensorFactory(data=data.clone(), **factory),
            "l": theirs.LocalNonpersistentObject(value),
        }

    room.save(state(weight, "saved"), tmp_path)
    target = torch.zeros(2, 3)
    result = room.load(state(target, None), tmp_path)
    assert torch.equal(target, weight)
    assert result["w"].data_ptr() == target.data_ptr()
    assert torch.equal(result["f"], weight + 1)
    assert (result["o"], result["l"]) == ("saved", None)


@pytest.mark.parametrize("offsets", [(2, 0, 1), (-1, 0, 1), (0, 2, 2), (0, -1, 2), (0, 0, 0)])
def test_places_that_cannot_be(offsets: tuple[int, int, int]) -> None:
    with pytest.raises(CheckpointingException, match="no such place: w"):
        ShardedTensor.from_rank_offsets("w", torch.ones(2, 3), offsets)


def test_places() -> None:
    value = ShardedTensor.from_rank_offsets("w", torch.ones(2, 3), (0, 4, 6), (2, 1, 2), prepend_axis_num=1)
    assert (value.global_shape, value.global_offset) == ((6, 2, 6), (4, 0, 3))
    assert value.local_chunk_offset_in_global() == (4, 0, 1)
    assert value.max_allowed_chunks() == (1, 2, 3)
    assert value.global_slice() == (4, slice(0, 2), slice(3, 6))
    whole = ShardedTensor.from_rank_offsets("w", torch.arange(8.0).view(8, 1), (0, 1, 2))
    (piece,) = whole.narrow(0, 2, 4)
    assert (piece.global_shape, piece.global_offset, piece.data[:, 0].tolist()) == (
        (8, 1),
        (4, 0),
        [2, 3, 4, 5],
    )
    with pytest.raises(
        CheckpointingException, match=r"no such part of a box: w \(expected 0 to 8, got 6 to 10"
    ):
        whole.narrow(0, 6, 4)
    unique = ShardedObject("o", 1, (2, 3), (1, 2)).unique_key
    assert unique == "o/shard_1.2_2.3"
    parsed = ShardedObject.empty_from_unique_key(unique)
    assert (parsed.key, parsed.global_shape, parsed.global_offset) == ("o", (2, 3), (1, 2))
    assert ShardedObject.empty_from_unique_key("o/shard_1.2_2").global_shape == (2, -1)
    assert [mapping.is_main_replica(each) for each in (0, 1, (0, 0), (0, 1))] == [True, False, True, False]


def test_prefixes() -> None:
    state = {"a": part("x.a", 0, 1), "b": [ShardedObject("x.b", 1, (1,), (0,))]}
    keys = [value.key for value in dict_utils.nested_values(state)]
    with pytest.raises(ValueError, match=r"x\.a does not begin with y"):
        utils.replace_prefix_for_sharding(state, "y", "z")
    utils.add_prefix_for_sharding(state, "m.")
    utils.replace_prefix_for_sharding(state, "m.x", "n")
    utils.apply_prefix_mapping(state, {"n.a": "q", "n": "r"})
    assert keys == ["x.a", "x.b"]
    assert [value.key for value in dict_utils.nested_values(state)] == ["q", "r.b"]


def test_optimizer_states_are_sharded_as_their_parameters() -> None:
    model = nn.Linear(3, 2)
    adam = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    adam.step()
    state = adam.state_dict()
    for values in state["state"].values():
        del values["step"]
    sharded = {
        "weight": ShardedTensor.from_rank_offsets("weight", model.weight, (0, 1, 2)),
        "bias": ShardedTensor.from_rank_offsets("bias", model.bias, (0, 1, 2)),
    }
    parts = optimizer.get_param_id_to_sharded_param_map(sharded, model.parameters())
    optimizer.optim_state_to_sharding_state(state, parts, exclude_keys=("exp_avg_sq",))
    made = state["state"][0]["exp_avg"]
    assert (made.key, made.global_shape) == ("optimizer.state.exp_avg.weight", (4, 3))
    assert list(state["state"][0]) == ["exp_avg"]
    assert state["param_groups"][0]["params"].unwrap() == [0, 1]
    with pytest.raises(CheckpointingException, match=r"wrong shape: s\.weight"):
        optimizer.make_sharded_optimizer_tensor(sharded["weight"], torch.ones(1), "s")


def test_merge_and_diff() -> None:
    merged = dict_utils.merge({"a": [1, {"b": 2}]}, {"a": {1: {"c": 3}}, "d": 4})
    assert merged == {"a": [1, {"b": 2, "c": 3}], "d": 4}
    with pytest.raises(ValueError, match="cannot merge int and int"):
        dict_utils.merge({"a": 1}, {"a": 2})
    left, right, mismatch = dict_utils.diff({"a": 1, "b": [1]}, {"b": [2, 3], "c": 1})
    assert (left, right, mismatch) == ([("a",)], [("c",), ("b", 1)], [(("b", 0), int, int)])
    assert dict_utils.extract_matching_values([1, "a", [2]], lambda value: value != "a", True) == (
        {0: 1, 2: {0: 2}},
        {1: "a"},
    )
