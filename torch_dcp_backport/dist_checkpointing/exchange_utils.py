"""The distribution of shards over the ranks of a process group, and the exchange of loaded shards.

Names, positional order and results are those of megatron.core.dist_checkpointing.exchange_utils. A load with
`FullyParallelLoadStrategyWrapper` does both by itself, in smaller parts than full shards.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterator, Mapping
from typing import Any, NamedTuple, Optional, TypeVar

import torch

from torch_dcp_backport.dist_checkpointing._src.adopt import adopted
from torch_dcp_backport.dist_checkpointing._src.calls import begin, world_size
from torch_dcp_backport.dist_checkpointing._src.offers import refusing
from torch_dcp_backport.dist_checkpointing._src.sharded_tensor import check_memory, data_shape, nominal
from torch_dcp_backport.dist_checkpointing._src.sharded_tensor import is_float8tensor as is_float8tensor
from torch_dcp_backport.dist_checkpointing.core import CheckpointingException
from torch_dcp_backport.dist_checkpointing.dict_utils import nested_values
from torch_dcp_backport.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor, is_main_replica
from torch_dcp_backport.dist_checkpointing.utils import ShardId, _sharded_tensor_shard_id, shard_text
from torch_dcp_backport.transfer import (
    DOUBTFUL,
    Attempt,
    Box,
    Call,
    Failure,
    Findings,
    Group,
    Key,
    Memories,
    Problem,
    Refusal,
    Route,
    Terms,
    move,
    part_of,
    spread_of,
    whole,
)

__getattr__ = refusing(
    __name__,
    "PG_DIST_CACHE_FILE_PREFIX _PG_DIST_CACHE _build_shard_distribution _create_pg_dist_cache "
    "_gather_shards_metadata _load_pg_dist_cache _pg_dist_cache_file_path",
    ": what ranks have is compared in each call, and no distribution is kept in a file",
)

T = TypeVar("T", bound=Hashable)
Loaded = dict[ShardId, torch.Tensor]

CANNOT_EXCHANGE = "cannot exchange what was loaded"
#: Megatron's ways; here one exchange serves all of them.
GATHER_OBJECT, GATHER_ROUNDS, BROADCAST = "gather_object", "gather_rounds", "broadcast"


class ShardDistribution(NamedTuple):
    """The rank that takes care of each shard. Ranks are numbers within the process group."""

    #: The only rank that saves or loads a shard.
    main_rank_for_shard: dict[ShardId, int]
    shards_in_this_group: set[ShardId]
    #: Without data; of the first rank that has it.
    shard_to_metadata: dict[ShardId, ShardedTensor]
    #: In order; a rank that has a shard under two names is there twice.
    all_ranks_for_shard: dict[ShardId, list[int]]


class ShardShape(NamedTuple):
    """The size and dtype of a shard, which have to be the same on both ends."""

    size: tuple[int, ...]
    dtype: torch.dtype


class ShardsOfRank(NamedTuple):
    """The shards that a rank has loaded, and those that it waits for."""

    loaded: dict[ShardId, ShardShape]
    waiting: dict[ShardId, ShardShape]
    #: Shard -> the group's rank that has to have loaded it; the same on every rank, as is the next field.
    mains: dict[ShardId, int]
    algorithm: str


class ShardWay(NamedTuple):
    """The way of a shard; every rank knows all ways, so that messages are cut alike on both ends."""

    #: Global ranks.
    source: int
    takers: tuple[int, ...]
    shape: ShardShape

    @property
    def route(self) -> Route:
        size, dtype = self.shape
        box = [whole(size)]
        have, want = spread_of(size, {self.source: box}), spread_of(size, dict.fromkeys(self.takers, box))
        return Route(have, want, dtype)


Ways = dict[ShardId, ShardWay]


def distribute_shards_to_ranks(
    shard_to_ranks: Mapping[T, list[int]],
    shard_to_size: Mapping[T, int],
    num_ranks: int,
    cross_parallelization_group_loads: Collection[T] = (),
) -> dict[T, int]:
    """Give each shard to one of the ranks that have it, so that all get about the same bytes.

    The shards of fewest ranks go first, then the largest: each to the rank with the least so far. The result
    is equal on all ranks that pass the same.

    Args:
        cross_parallelization_group_loads: shards that go last: another group has saved them.

    Raises:
        ValueError: a shard that none of the ranks has.
    """
    load, last = [0] * num_ranks, frozenset(cross_parallelization_group_loads)
    given: dict[T, int] = {}
    order: Any = sorted(
        shard_to_ranks,
        key=lambda shard: (
            shard in last,
            len(shard_to_ranks[shard]),
            -shard_to_size[shard],
            shard,
        ),
    )
    for shard in order:
        ranks = [rank for rank in shard_to_ranks[shard] if 0 <= rank < num_ranks]
        if not ranks:
            raise ValueError(f"{shard} is on none of {num_ranks} ranks: {shard_to_ranks[shard]}")
        given[shard] = min(ranks, key=lambda rank: (load[rank], rank))
        load[given[shard]] += shard_to_size[shard]
    return given


def determine_main_replica_uniform_distribution(
    sharded_state_dict: ShardedStateDict,
    parallelization_group: Group,
    ignore_groups: bool = False,
    pg_cache_path: Optional[str] = None,
    pg_cache_create: bool = False,
) -> Optional[ShardDistribution]:
    """Give each shard of a process group to one of its ranks, by bytes. Collective.

    Args:
        ignore_groups: count the shards without a main replica in this group too, as a load has to.
        pg_cache_path, pg_cache_create: make no difference: what ranks have is compared in each call.

    Returns:
        The distribution, equal on all ranks; None in a group of one rank.

    Raises:
        CheckpointingException: a rank's part contradicts itself, or a shard differs from rank to rank; the
            same on every rank.
    """
    if world_size(parallelization_group) <= 1:
        return None
    with begin("cannot share out the shards", "save", parallelization_group) as call:
        mine = call.attempt(checked, sharded_state_dict)

        def alike(parts_by_rank: Mapping[int, list[ShardedTensor]]) -> list[list[ShardedTensor]]:
            all_parts = [parts_by_rank[rank] for rank in call.ranks]
            findings = list(differing(call.ranks, all_parts))
            if findings:
                raise Refusal(findings)
            return all_parts

        all_parts = call.gather_object("sharing out shards", mine, alike)
    return distribution_of(all_parts, ignore_groups)


def checked(sharded_state_dict: ShardedStateDict) -> list[ShardedTensor]:
    """Return the shards without their data.

    Raises:
        CheckpointingException: one contradicts itself.
    """
    mine: list[ShardedTensor] = []
    for part in map(adopted, nested_values(sharded_state_dict)):
        if isinstance(part, ShardedTensor):
            part.validate_metadata_integrity()
            mine.append(part.without_data())
    return mine


def distribution_of(all_parts: list[list[ShardedTensor]], ignore_groups: bool) -> ShardDistribution:
    """Return the distribution of the shards that the ranks of a group have."""
    ranks_by_shard: dict[ShardId, list[int]] = {}
    first: dict[ShardId, ShardedTensor] = {}
    here: set[ShardId] = set()
    mains: set[ShardId] = set()
    for rank, parts in enumerate(all_parts):
        for part in parts:
            shard = _sharded_tensor_shard_id(part)
            ranks_by_shard.setdefault(shard, []).append(rank)
            first.setdefault(shard, part)
            if is_main_replica(part.replica_id):
                mains.add(shard)
            if ignore_groups or shard in mains:
                here.add(shard)
    ranks_by_shard = {shard: ranks for shard, ranks in ranks_by_shard.items() if shard in here}
    sizes = {shard: _shard_size(part) for shard, part in first.items()}
    given = distribute_shards_to_ranks(ranks_by_shard, sizes, len(all_parts), here - mains)
    return ShardDistribution(given, here, first, ranks_by_shard)


def _shard_size(sh_ten: ShardedTensor) -> int:
    """Return the bytes of a shard."""
    return math.prod(data_shape(sh_ten)) * sh_ten.dtype.itemsize


def _get_empty_tensor_for_exchange(
    shard_id: ShardId,
    needed_shards: Mapping[ShardId, ShardedTensor],
    unneeded_shards: Mapping[ShardId, ShardedTensor],
    loaded_tensors: Loaded,
) -> tuple[torch.Tensor, None]:
    """Return the tensor that a shard is received into, which `loaded_tensors` gets; and None.

    By Megatron's name, which programs count memory by. Only shards that this rank needs are received.
    """
    part = adopted(needed_shards.get(shard_id, unneeded_shards.get(shard_id)))
    if shard_id in needed_shards and part.data is not None:
        tensor = part.data.detach()
    else:
        tensor = torch.empty(data_shape(part), dtype=part.dtype)
    if shard_id in needed_shards:
        loaded_tensors[shard_id] = tensor
    return tensor, None


def shape_of(part: ShardedTensor) -> ShardShape:
    return ShardShape(data_shape(part), part.dtype)


def differing(ranks: tuple[int, ...], all_parts: list[list[ShardedTensor]]) -> Iterator[tuple[int, Problem]]:
    """Yield findings of shards that have another shape or dtype on another rank."""
    known: dict[ShardId, tuple[int, ShardShape]] = {}
    for rank, parts in zip(ranks, all_parts):
        for part in parts:
            shape = shape_of(part)
            first, other = known.setdefault(_sharded_tensor_shard_id(part), (rank, shape))
            if other != shape:
                yield rank, mismatch(part.key, shape, other, first)


def mismatch(key: str, got: ShardShape, expected: ShardShape, rank: int) -> Problem:
    what = "another shape or dtype than on another rank"
    return Problem(what, key, f"{got.size} {got.dtype}", f"{expected.size} {expected.dtype} as rank {rank}")


def exchange_loaded_tensors_gather_rounds(
    loaded_tensors: Loaded,
    unloaded_shards: dict[ShardId, ShardedTensor],
    shard_distribution: Optional[ShardDistribution] = None,
    parallelization_group: Group = None,
) -> Loaded:
    """Exchange shards as `exchange_by_distribution` does."""
    return exchange_by_distribution(
        loaded_tensors, unloaded_shards, shard_distribution, parallelization_group, GATHER_ROUNDS
    )


def exchange_loaded_tensors_gather_object(
    loaded_tensors: Loaded,
    unloaded_shards: dict[ShardId, ShardedTensor],
    shard_distribution: Optional[ShardDistribution] = None,
    parallelization_group: Group = None,
) -> Loaded:
    """Exchange shards as `exchange_by_distribution` does; no distribution is needed."""
    return exchange_by_distribution(
        loaded_tensors, unloaded_shards, shard_distribution, parallelization_group, GATHER_OBJECT
    )


def exchange_loaded_tensors_broadcast(
    loaded_tensors: Loaded,
    unloaded_shards: dict[ShardId, ShardedTensor],
    shard_distribution: Optional[ShardDistribution] = None,
    parallelization_group: Group = None,
) -> Loaded:
    """Exchange shards as `exchange_by_distribution` does."""
    return exchange_by_distribution(
        loaded_tensors, unloaded_shards, shard_distribution, parallelization_group, BROADCAST
    )


def exchange_by_distribution(
    loaded_tensors: Loaded,
    unloaded_shards: dict[ShardId, ShardedTensor],
    shard_distribution: Optional[ShardDistribution],
    parallelization_group: Group = None,
    exchange_algo: str = BROADCAST,
) -> Loaded:
    """Bring each rank of a group the shards that it waits for, from those that loaded them. Collective.

    A shard goes to the ranks that want it, and to no other; in bounded pieces, whatever `exchange_algo` says.

    Args:
        loaded_tensors: the shards that this rank has loaded.
        unloaded_shards: those that it waits for; `data` that is there is written in place, and None becomes a
            tensor on the CPU.
        shard_distribution: the rank that sends each shard; copies that others loaded stay where they are.
        exchange_algo: "broadcast", "gather_rounds" or "gather_object"; the last refuses shards that two
            ranks have loaded.

    Returns:
        This rank's tensors: those that it had, and those that it waited for.

    Raises:
        CheckpointingException: a shard that a rank waits for was loaded by none, or has another shape or
            dtype there; the same on every rank. No tensor was written. Or a tensor takes no values, on some
            rank; the same on every rank, after tensors were written.
        NotImplementedError: no such `exchange_algo`.
    """
    if exchange_algo not in (BROADCAST, GATHER_ROUNDS, GATHER_OBJECT):
        raise NotImplementedError(f"no such exchange_algo: {exchange_algo!r}")
    try:
        with begin(CANNOT_EXCHANGE, "load", parallelization_group) as call:
            return exchanged(call, loaded_tensors, unloaded_shards, shard_distribution, exchange_algo)
    except RuntimeError as error:
        raise CheckpointingException(str(error)) from error


@torch.no_grad()
def exchanged(
    call: Call,
    loaded: Loaded,
    waiting: Mapping[ShardId, ShardedTensor],
    distribution: Optional[ShardDistribution],
    algorithm: str,
) -> Loaded:
    result: Loaded = {}
    own = ShardsOfRank({}, {}, {}, algorithm)
    with call.guard():
        if distribution is None and algorithm != GATHER_OBJECT:
            raise CheckpointingException(f"{algorithm} needs a shard_distribution")
        result = {shard: nominal(tensor) for shard, tensor in loaded.items()}
        for shard, tensor in result.items():
            check_memory(shard_text(shard), tensor, tuple(tensor.shape), tensor.dtype)
        own.loaded.update(
            (shard, ShardShape(tuple(value.shape), value.dtype)) for shard, value in result.items()
        )
        for shard, part in waiting.items():
            if shard not in loaded:
                own.waiting[shard] = shape = shape_of(adopted(part))
                data = adopted(part).data
                if data is not None:
                    check_memory(shard_text(shard), data, shape.size, shape.dtype, is_written=True)
        if distribution is not None and algorithm != GATHER_OBJECT:
            own.mains.update(distribution.main_rank_for_shard)

    def agreed(own_by_rank: Mapping[int, ShardsOfRank]) -> Ways:
        ways, findings = ways_of(call.ranks, own_by_rank)
        if findings:
            raise Refusal(findings)
        return ways

    ways = call.gather_object("exchanging what was loaded", own, agreed)
    if len(call.ranks) == 1:
        return result
    targets: Loaded = {}
    with call.room_for("the tensors that are exchanged"):
        for shard in own.waiting:
            _get_empty_tensor_for_exchange(shard, waiting, {}, targets)
    kinds = {tensor.device.type for tensor in [*result.values(), *targets.values()]}
    agreement = call.agree_on_wants({}, Terms(device=kinds.pop() if len(kinds) == 1 else ""))
    names: dict[Key, ShardId] = {str(number): shard for number, shard in enumerate(ways)}
    routes: dict[Key, Route] = {name: ways[shard].route for name, shard in names.items()}
    # Large shards go in parts.
    box_shape = {str(name): route.have.shape for name, route in routes.items()}

    def source_of(name: str, box: Box) -> torch.Tensor:
        return part_of(result[names[name]].detach(), whole(box_shape[name]), box)

    def target_of(name: str, box: Box) -> torch.Tensor:
        return part_of(targets[names[name]], whole(box_shape[name]), box)

    failures: list[Failure] = []
    move(call, agreement, routes, Memories(source_of, target_of, DOUBTFUL, failures.append))
    for error, name in failures:
        call.record(call.problem_of(error, shard_text(names[name]) if name else ""), error)
    call.barrier("settling", so_far=DOUBTFUL)
    return {**result, **targets}


def ways_of(ranks: tuple[int, ...], own_by_rank: Mapping[int, ShardsOfRank]) -> tuple[Ways, Findings]:
    """Return the way of each shard, and the findings of ranks whose shards have none."""
    findings: Findings = []
    loaders: dict[ShardId, list[int]] = {}
    takers: dict[ShardId, list[int]] = {}
    first = own_by_rank[ranks[0]]
    for rank in ranks:
        own = own_by_rank[rank]
        if (own.mains, own.algorithm) != (first.mains, first.algorithm):
            what = "another distribution or exchange_algo than on another rank"
            got, expected = f"{len(own.mains)} shards, {own.algorithm}", f"those of rank {ranks[0]}"
            findings.append((rank, Problem(what, "", got, expected)))
        for shard in own.loaded:
            loaders.setdefault(shard, []).append(rank)
        for shard in own.waiting:
            takers.setdefault(shard, []).append(rank)
    ways: Ways = {}
    for shard, waiting in takers.items():
        holders, main = loaders.get(shard, []), first.mains.get(shard)
        if main is not None and 0 <= main < len(ranks):
            # Copies that other ranks have loaded do not count.
            holders = [rank for rank in holders if rank == ranks[main]]
        if not holders:
            expected = "one" if main is None else f"by rank {ranks[main]}" if main < len(ranks) else f"{main}"
            findings.append(
                (waiting[0], Problem("a shard that no rank has loaded", shard_text(shard), "none", expected))
            )
            continue
        source = holders[0]
        shape = own_by_rank[source].loaded[shard]
        ways[shard] = ShardWay(source, tuple(waiting), shape)
        for rank in waiting:
            if own_by_rank[rank].waiting[shard] != shape:
                findings.append(
                    (rank, mismatch(shard_text(shard), own_by_rank[rank].waiting[shard], shape, source))
                )
    if first.algorithm == GATHER_OBJECT:
        findings += [
            (holders[-1], loaded_twice(shard, holders)) for shard, holders in loaders.items() if holders[1:]
        ]
    return ways, findings


def loaded_twice(shard: ShardId, ranks: list[int]) -> Problem:
    return Problem("loaded by several ranks", shard_text(shard), f"ranks {ranks}", "one")


def exchange_loaded_objects_gather_object(loaded_objects: dict[ShardId, Any]) -> dict[ShardId, Any]:
    """Return the objects that any rank has loaded, on every rank of the default group. Collective.

    Raises:
        CheckpointingException: two ranks have loaded the same object; the same error on every rank.
    """
    with begin(CANNOT_EXCHANGE, "load", None) as call:
        return exchanged_objects(call, call.attempt(dict, loaded_objects))


def exchanged_objects(call: Call, own: Attempt[dict[ShardId, Any]]) -> dict[ShardId, Any]:
    """Return the objects that any rank of a call has loaded. Collective."""

    def merged(objects_by_rank: Mapping[int, dict[ShardId, Any]]) -> dict[ShardId, Any]:
        together: dict[ShardId, Any] = {}
        loaders: dict[ShardId, list[int]] = {}
        for rank in sorted(objects_by_rank):
            together.update(objects_by_rank[rank])
            for shard in objects_by_rank[rank]:
                loaders.setdefault(shard, []).append(rank)
        findings = [(ranks[-1], loaded_twice(shard, ranks)) for shard, ranks in loaders.items() if ranks[1:]]
        if findings:
            raise Refusal(findings)
        return together

    return call.gather_object("exchanging objects", own, merged)
