"""Shards given to ranks and exchanged between them: Megatron's results, faults told on every rank."""

from __future__ import annotations

import importlib
from typing import Any, Optional

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from pool import on_ranks
from values import Failing, value_of

from torch_dcp_backport.dist_checkpointing import CheckpointingException, ShardedTensor, exchange_utils
from torch_dcp_backport.dist_checkpointing.strategies import fully_parallel
from torch_dcp_backport.dist_checkpointing.utils import _sharded_object_id, _sharded_tensor_shard_id

OURS, THEIRS = "torch_dcp_backport.dist_checkpointing", "megatron.core.dist_checkpointing"
DTYPES = (torch.float32, torch.bfloat16, torch.int64)


@st.composite
def holdings(draw: Any) -> tuple[dict[Any, list[int]], dict[Any, int], int]:
    world = draw(st.integers(1, 5))
    ranks = st.lists(st.integers(0, world - 1), min_size=1, max_size=world, unique=True).map(sorted)
    held = draw(st.lists(ranks, max_size=12))
    shards = {(f"k{number}", (number,), None): each for number, each in enumerate(held)}
    return shards, {shard: draw(st.integers(0, 5)) for shard in shards}, world


@given(holdings())
@settings(max_examples=200, deadline=None)
def test_every_shard_goes_to_one_of_its_ranks_and_the_load_is_even(case: Any) -> None:
    shards, sizes, world = case
    given = exchange_utils.distribute_shards_to_ranks(shards, sizes, world)
    assert set(given) == set(shards)
    assert all(rank in shards[shard] for shard, rank in given.items())
    load = [sum(sizes[shard] for shard, rank in given.items() if rank == each) for each in range(world)]
    if all(len(ranks) == world for ranks in shards.values()):
        assert max(load, default=0) - min(load, default=0) <= max(sizes.values(), default=0)


@given(holdings())
@settings(max_examples=200, deadline=None)
def test_shards_are_given_as_megatron_gives_them(case: Any) -> None:
    theirs = pytest.importorskip(f"{THEIRS}.exchange_utils")
    ours = exchange_utils.distribute_shards_to_ranks(*case)
    assert list(ours.items()) == list(theirs.distribute_shards_to_ranks(*case).items())


def test_a_shard_on_no_rank() -> None:
    with pytest.raises(ValueError, match=r"a is on none of 2 ranks: \[2\]"):
        exchange_utils.distribute_shards_to_ranks({"a": [2]}, {"a": 1}, 2)


def group_of(size: int) -> Any:
    """The group of the last ranks; None is all of them."""
    world = dist.get_world_size()
    return None if size == world else dist.new_group(range(world - size, world))


def state_of(kind: Any, filled: bool) -> dict[str, Any]:
    """Shards of several kinds: on all ranks, on some, on one; with and without data."""
    rank, world = dist.get_rank(), dist.get_world_size()
    state: dict[str, Any] = {"layers": [{}, {}], "plain": 3}
    for number in range(9):
        holders = [each for each in range(world) if number % 3 == 0 or (each + number) % 3 != 2]
        if number == 8:
            holders = [world - 1]
        if rank not in holders:
            continue
        dtype, shape = DTYPES[number % len(DTYPES)], ((number + 2) * 3, 5)
        values = value_of(f"key {number}", shape, dtype)
        part = kind.from_rank_offsets(f"key {number}", values, (0, 0, 1), replica_id=holders.index(rank))
        if not filled:
            part.data = torch.zeros_like(values) if number % 2 else None
        state["layers"][number % 2][f"name {number}"] = part
    return state


def parts_in(state: dict[str, Any]) -> list[Any]:
    return [part for layer in state["layers"] for part in layer.values()]


def distributed(room: Any, module: str, size: int, ignore_groups: bool) -> Any:
    """What a module of ours or of Megatron's says about the same state, in plain values."""
    group = group_of(size)
    if dist.get_rank() < dist.get_world_size() - size:
        return None
    utils, mapping = (importlib.import_module(f"{module}.{name}") for name in ("exchange_utils", "mapping"))
    state = state_of(mapping.ShardedTensor, True)
    group = group if group is not None else dist.group.WORLD
    found = utils.determine_main_replica_uniform_distribution(state, group, ignore_groups)
    if found is None:
        return None
    assert all(part.data is None for part in found.shard_to_metadata.values())
    apply = importlib.import_module(f"{module}.strategies.fully_parallel")
    apply.distribute_main_replicas_with_precomputed_distribution(state, group, found)
    mains = [(part.key, part.replica_id) for part in parts_in(state)]
    known = {shard: part.replica_id for shard, part in found.shard_to_metadata.items()}
    return list(found.main_rank_for_shard.items()), found.shards_in_this_group, known, found[3], mains


@pytest.mark.parametrize(("size", "ignore_groups"), [(4, True), (4, False), (2, True), (2, False), (1, True)])
def test_what_a_group_shares_out(ranks: Any, size: int, ignore_groups: bool) -> None:
    found = ranks(distributed, OURS, size, ignore_groups)
    if size == 1:
        assert found == [None] * 4
        return
    of_group = found[4 - size :]
    assert all(each[:4] == of_group[0][:4] for each in of_group)
    given, here, _, holders, _ = of_group[0]
    assert set(dict(given)) == here == set(holders)
    # One main replica for each shard of the group.
    mains = [key for *_, mine in of_group for key, replica in mine if replica == 0]
    assert sorted(mains) == sorted(key for key, *_ in here)


@pytest.mark.parametrize(("size", "ignore_groups"), [(4, True), (4, False), (2, True), (2, False)])
def test_what_a_group_shares_out_is_what_megatron_does(ranks: Any, size: int, ignore_groups: bool) -> None:
    pytest.importorskip(f"{THEIRS}.exchange_utils")
    ours, theirs = (ranks(distributed, module, size, ignore_groups) for module in (OURS, THEIRS))
    assert ours == theirs


def on_the_cpu(kind: Any) -> None:
    """Megatron's exchange makes CUDA tensors; here they are on the CPU."""

    def plain(make: Any) -> Any:
        return lambda *args, device=None, **options: make(*args, **options)

    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[assignment, method-assign]
    if kind.init_data.__defaults__ == (torch.empty,):
        kind.init_data.__defaults__ = (plain(torch.empty),)
        torch.empty_like = plain(torch.empty_like)


def exchanged(room: Any, module: str, algorithm: str, size: int) -> Optional[dict[Any, torch.Tensor]]:
    """What a rank has after the exchange of what each loaded by the distribution."""
    group = group_of(size)
    if dist.get_rank() < dist.get_world_size() - size:
        return None
    utils, mapping = (importlib.import_module(f"{module}.{name}") for name in ("exchange_utils", "mapping"))
    group = group if group is not None else dist.group.WORLD
    if module == THEIRS:
        on_the_cpu(mapping.ShardedTensor)
    asked = state_of(mapping.ShardedTensor, False)
    found = utils.determine_main_replica_uniform_distribution(asked, group, True)
    me = dist.get_rank(group)
    loaded, waiting = {}, {}
    for filled, part in zip(parts_in(state_of(mapping.ShardedTensor, True)), parts_in(asked)):
        shard = _sharded_tensor_shard_id(part)
        if found.main_rank_for_shard[shard] == me:
            loaded[shard] = filled.data
        else:
            waiting[shard] = part
    result = utils.exchange_by_distribution(loaded, waiting, found, group, algorithm)
    assert set(result) >= {*loaded, *waiting}
    if module == OURS:
        assert set(result) == {*loaded, *waiting}
        for shard, part in waiting.items():
            assert part.data is None or part.data is result[shard] or torch.equal(part.data, result[shard])
    return {shard: result[shard] for shard in sorted({*loaded, *waiting})}


@pytest.mark.parametrize("algorithm", ["broadcast", "gather_rounds", "gather_object"])
@pytest.mark.parametrize("size", [4, 2])
def test_what_was_loaded_comes_to_all_that_wait_for_it(ranks: Any, algorithm: str, size: int) -> None:
    for found in ranks(exchanged, OURS, algorithm, size)[4 - size :]:
        for (key, *_), value in found.items():
            assert torch.equal(value, value_of(key, tuple(value.shape), value.dtype)), key


@pytest.mark.parametrize("algorithm", ["broadcast", "gather_object"])
def test_an_exchange_gives_what_megatrons_gives(ranks: Any, algorithm: str) -> None:
    pytest.importorskip(f"{THEIRS}.exchange_utils")
    ours, theirs = (ranks(exchanged, module, algorithm, 4) for module in (OURS, THEIRS))
    for mine, other in zip(ours, theirs):
        assert mine.keys() == other.keys()
        for shard, value in mine.items():
            assert (value.dtype, value.shape) == (other[shard].dtype, other[shard].shape)
            assert torch.equal(value, other[shard])


def test_an_exchange_in_one_process_alone() -> None:
    part = ShardedTensor.from_rank_offsets("w", torch.ones(3))
    loaded = {_sharded_tensor_shard_id(part): torch.ones(3)}
    assert (
        exchange_utils.exchange_by_distribution(loaded, {}, None, None, "gather_object").keys()
        == loaded.keys()
    )
    with pytest.raises(NotImplementedError, match="no such exchange_algo: 'ring'"):
        exchange_utils.exchange_by_distribution(loaded, {}, None, None, "ring")
    with pytest.raises(CheckpointingException, match="broadcast needs a shard_distribution"):
        exchange_utils.exchange_by_distribution(loaded, {}, None)


def refused(room: Any, fault: str) -> tuple[str, bool]:
    """(the error, whether the tensor that was waited for was left alone)"""
    rank = dist.get_rank()
    part = ShardedTensor.from_rank_offsets("w", torch.zeros(3), replica_id=rank)
    shard = _sharded_tensor_shard_id(part)
    found = exchange_utils.determine_main_replica_uniform_distribution({"w": part}, None, True)
    value = torch.ones(3)
    if fault == "another shape":
        value = torch.ones(4)
    if fault == "another dtype":
        value = value.double()
    loaded = {} if rank or fault == "loaded by none" else {shard: value}
    algorithm = "gather_object" if fault == "loaded twice" else "broadcast"
    if rank == 1 and fault == "loaded twice":
        loaded = {shard: value}
    if rank == 2 and fault == "another algorithm":
        algorithm = "gather_rounds"
    if rank == 3 and fault == "not a tensor":
        loaded = {shard: "text"}  # type: ignore[dict-item]
    if rank == 0 and fault == "loaded without values":
        loaded = {shard: value.to("meta")}
    if rank == 2:
        data = {"other data": torch.zeros(2, 2), "data without values": part.data.to("meta")}
        part.data = data.get(fault, part.data.new_zeros(1).expand(3) if fault == "expanded" else part.data)
    if rank == 1 and fault == "no distribution":
        found = None
    with pytest.raises(CheckpointingException) as caught:
        exchange_utils.exchange_by_distribution(
            loaded, {} if loaded else {shard: part}, found, None, algorithm
        )
    return str(caught.value), part.data.is_meta or bool((part.data == 0).all())


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (
            "loaded by none",
            "rank 0: a shard that no rank has loaded: w at (0,) (expected by rank 0, got none)",
        ),
        ("another shape", "another shape or dtype than on another rank: w at (0,)"),
        ("another dtype", "got (3,) torch.float32"),
        ("loaded twice", "rank 1: loaded by several ranks: w at (0,)"),
        ("another algorithm", "rank 2: another distribution or exchange_algo than on another rank"),
        ("not a tensor", "rank 3: "),
        ("no distribution", "rank 1: broadcast needs a shard_distribution"),
        ("loaded without values", "rank 0: w at (0,): a tensor without values"),
        ("data without values", "rank 2: w at (0,): a tensor without values"),
        ("other data", "rank 2: w at (0,): data of (2, 2) torch.float32, expected (3,) torch.float32"),
        ("expanded", "rank 2: w at (0,): an expanded tensor cannot be written"),
    ],
)
def test_bad_input(ranks: Any, fault: str, words: str) -> None:
    found = ranks(refused, fault)
    texts = {text for text, _ in found}
    assert len(texts) == 1
    assert words in texts.pop()
    assert all(untouched for _, untouched in found)


def into_failing(room: Any) -> str:
    rank = dist.get_rank()
    data = torch.zeros(64)
    part = ShardedTensor.from_rank_offsets("w", data, replica_id=rank)
    shard = _sharded_tensor_shard_id(part)
    found = exchange_utils.determine_main_replica_uniform_distribution({"w": part}, None, True)
    if rank == 1:
        part.data = data.as_subclass(Failing)
    loaded = {} if rank else {shard: torch.ones(64)}
    with pytest.raises(CheckpointingException) as caught:
        exchange_utils.exchange_by_distribution(loaded, {} if loaded else {shard: part}, found)
    dist.barrier()
    return str(caught.value)


def test_a_tensor_that_takes_no_values_is_told_on_every_rank(ranks: Any) -> None:
    (text,) = set(ranks(into_failing))
    assert "rank 1: ValueError: no values are taken: w at (0,)" in text
    assert "do not use what was being loaded" in text


def unequal(room: Any) -> str:
    size = 3 + dist.get_rank() // 3
    part = ShardedTensor.from_rank_offsets("w", torch.zeros(size), replica_id=dist.get_rank())
    with pytest.raises(CheckpointingException) as caught:
        exchange_utils.determine_main_replica_uniform_distribution({"w": part}, None)
    return str(caught.value)


def test_a_shard_that_is_something_else_on_another_rank(ranks: Any) -> None:
    (text,) = set(ranks(unequal))
    assert (
        "rank 3: another shape or dtype than on another rank: w (expected (3,) torch.float32 as rank 0"
        in text
    )


def objects(room: Any, twice: bool) -> Any:
    rank = dist.get_rank()
    mine = {("rng", (rank,), (4,)): {"state": torch.arange(rank)}}
    if twice:
        mine["rng", (0,), (4,)] = rank
    try:
        return exchange_utils.exchange_loaded_objects_gather_object(mine)
    except CheckpointingException as error:
        return str(error)


def test_objects(ranks: Any) -> None:
    for found in ranks(objects, False):
        assert list(found) == [("rng", (rank,), (4,)) for rank in range(4)]
        assert torch.equal(found["rng", (3,), (4,)]["state"], torch.arange(3))
    (text,) = set(ranks(objects, True))
    assert "rank 3: loaded by several ranks: rng at (0,) (expected one, got ranks [0, 1, 2, 3])" in text


def test_names_of_shards() -> None:
    part = ShardedTensor.from_rank_offsets("w", torch.ones(2, 3), (0, 1, 2))
    assert _sharded_tensor_shard_id(part) == ("w", (2, 0), None)
    from torch_dcp_backport.dist_checkpointing import ShardedObject

    assert _sharded_object_id(ShardedObject("o", 1, (2, 3), (1, 2))) == ("o", (1, 2), (2, 3))
    assert fully_parallel.FullyParallelLoadStrategyWrapper().exchange_algo == exchange_utils.BROADCAST


@on_ranks(world=2)
def test_a_shard_that_is_larger_than_a_chunk(room: Any) -> None:
    """A shard that travels in parts: no chunk has more than 4 MiB."""
    rank, full = dist.get_rank(), torch.arange(1_300_000, dtype=torch.float32)
    shard = ShardedTensor.from_rank_offsets("w", torch.zeros(full.shape), replica_id=rank)
    name = _sharded_tensor_shard_id(shard)
    ways = exchange_utils.ShardDistribution({name: 0}, {name}, {name: shard}, {name: [0, 1]})
    loaded: dict[Any, torch.Tensor] = {name: full} if rank == 0 else {}
    missing: dict[Any, ShardedTensor] = {name: shard} if rank else {}
    found = exchange_utils.exchange_by_distribution(loaded, missing, ways, None)
    assert torch.equal(found[name], full)
