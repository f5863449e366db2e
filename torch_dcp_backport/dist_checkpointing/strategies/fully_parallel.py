"""Strategies by which ranks share work: Megatron's names.

`dist_checkpointing.save` shares it out in any case, and `load` does with a strategy of these. Their own
methods do as Megatron's: each shard has one rank of a group, which calls the strategy inside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Optional

import torch
import torch.distributed as dist

from torch_dcp_backport.dist_checkpointing._src.adopt import adopted
from torch_dcp_backport.dist_checkpointing._src.calls import begin, told_to
from torch_dcp_backport.dist_checkpointing.core import CheckpointingException, Folder
from torch_dcp_backport.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from torch_dcp_backport.dist_checkpointing.exchange_utils import (
    BROADCAST,
    ShardDistribution,
    determine_main_replica_uniform_distribution,
    exchange_by_distribution,
    exchanged_objects,
)
from torch_dcp_backport.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    StateDict,
    is_main_replica,
)
from torch_dcp_backport.dist_checkpointing.serialization import CANNOT_LOAD
from torch_dcp_backport.dist_checkpointing.strategies.base import say_once
from torch_dcp_backport.dist_checkpointing.strategies.torch import (
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
)
from torch_dcp_backport.dist_checkpointing.utils import ShardId, _sharded_object_id, _sharded_tensor_shard_id
from torch_dcp_backport.dist_checkpointing.validation import (
    determine_global_metadata,
    validate_sharding_integrity,
)
from torch_dcp_backport.transfer import DOUBTFUL, Group, Topic, meet

READING = Topic("reading what this rank takes care of", DOUBTFUL)
SETTLING = Topic("settling", DOUBTFUL)


class FullyParallelSaveStrategyWrapper:
    """A save in which every rank writes. `dist_checkpointing.save`, with `balanced=True`, does so without it.

    Args:
        strategy: the strategy that writes; None for this room's.
        parallelization_group: the ranks among which `save` shares out; None is the default group.
        do_cache_distribution: keep the first distribution, as `cached_distribution`, for later `save`s.
        backend: the format.
        version: its version.
        validate_access_integrity: whether the first `save` checks the parts of all ranks together.
        pg_cache_path, pg_cache_create: make no difference, which is said once.
    """

    def __init__(
        self,
        strategy: Any = None,
        parallelization_group: Group = None,
        do_cache_distribution: bool = False,
        backend: str = "torch_dist",
        version: int = 1,
        validate_access_integrity: bool = True,
        pg_cache_path: Optional[str] = None,
        pg_cache_create: bool = False,
    ) -> None:
        say_of_cache(pg_cache_path)
        self.backend, self.version = backend, version
        self.base_strategy = TorchDistSaveShardedStrategy(backend, version) if strategy is None else strategy
        self.validate_access_integrity = validate_access_integrity
        self.parallelization_group = parallelization_group
        #: Of the first save; kept where `do_cache_distribution` says so.
        self.cached_distribution: Optional[ShardDistribution] = None
        self.do_cache_distribution = do_cache_distribution

    can_handle_sharded_objects = property(lambda self: True)

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Folder) -> Any:
        """Share the shards out, and have the strategy inside save them. Collective.

        Replica ids of the state dict's tensors are set: 0 where this rank writes, else 1.

        Raises:
            CheckpointingException: a rank's part contradicts itself, or the ranks' parts do not fit; the same
                on every rank.
        """
        self.apply_saving_parallelization(sharded_state_dict)
        return self.base_strategy.save(sharded_state_dict, checkpoint_dir)

    def async_save(
        self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Folder, *options: Any, **more: Any
    ) -> Any:
        """Do as `save`, in the background; return the request of the strategy inside. Collective."""
        self.apply_saving_parallelization(sharded_state_dict)
        return self.base_strategy.async_save(sharded_state_dict, checkpoint_dir, *options, **more)

    def apply_saving_parallelization(self, sharded_state_dict: ShardedStateDict) -> None:
        """Set the replica ids of a state dict's tensors, in place. Collective."""
        distribution = self.cached_distribution if self.do_cache_distribution else None
        if distribution is None:
            distribution = determine_main_replica_uniform_distribution(
                sharded_state_dict, self.parallelization_group
            )
        distribute_main_replicas_with_precomputed_distribution(
            sharded_state_dict, self.parallelization_group, distribution
        )
        if self.cached_distribution is None and self.validate_access_integrity:
            validate_sharding_integrity(determine_global_metadata(sharded_state_dict)[1])
        if self.do_cache_distribution:
            self.cached_distribution = distribution


class FullyParallelLoadStrategyWrapper:
    """A load in which the ranks of a group read together: a part that several want is read once, and sent.

    For files far away (a network's file system). With files in the memory of this machine each rank is as
    fast by itself.

    Args:
        strategy: the strategy that reads for `load`; None for this room's.
        parallelization_group: the ranks that read together; None is the default group. All of them have to
            take part in the load.
        do_cache_distribution: keep the first distribution, as `cached_distribution`, for later `load`s.
        exchange_algo: makes no difference: there is only one.
        per_rank_object_load: whether each rank reads all its objects in `load`; else its main replicas, and
            all ranks of the default group exchange them.
        pg_cache_path, pg_cache_create: make no difference, which is said once.
    """

    def __init__(
        self,
        strategy: Any = None,
        parallelization_group: Group = None,
        do_cache_distribution: bool = False,
        exchange_algo: str = BROADCAST,
        per_rank_object_load: bool = False,
        pg_cache_path: Optional[str] = None,
        pg_cache_create: bool = False,
    ) -> None:
        self.base_strategy = TorchDistLoadShardedStrategy() if strategy is None else strategy
        say_of_cache(pg_cache_path)
        self.per_rank_object_load, self.exchange_algo = per_rank_object_load, exchange_algo
        self.parallelization_group = parallelization_group
        #: Of the first load; kept where `do_cache_distribution` says so.
        self.cached_distribution: Optional[ShardDistribution] = None
        self.do_cache_distribution = do_cache_distribution
        #: That of the strategy inside.
        self.cached_global_metadata: Any = None

    can_handle_sharded_objects = property(lambda self: True)

    def load(
        self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Folder, *options: Any, **more: Any
    ) -> StateDict:
        """Have the strategy inside load each shard on one rank of the group, and exchange them. Collective.

        `dist_checkpointing.load` with this wrapper reads parts of shards instead, and does not call this.

        Returns:
            The loaded values in the structure of the state dict; without its other values.

        Raises:
            CheckpointingException: a rank could not read, or an object is read by none; the same on every
                rank that takes part.
        """

        def read(parts: Any) -> dict[ShardId, Any]:
            loaded: dict[Any, Any] = self.base_strategy.load(parts, checkpoint_dir, *options, **more)
            return loaded

        group = self.parallelization_group
        if dist.get_world_size(group) <= 1:
            alone: StateDict = self.base_strategy.load(sharded_state_dict, checkpoint_dir, *options, **more)
            return alone
        # Objects go to ranks of other groups, too.
        everyone = group if self.per_rank_object_load else None
        with begin(CANNOT_LOAD, "load", everyone) as call:
            loaded = call.attempt(told_to(everyone, group, self._loaded), sharded_state_dict, read)
            if self.per_rank_object_load:
                meet(call, READING)
                objects = loaded.value.objects
            else:
                objects = exchanged_objects(call, call.attempt(lambda made: made.objects, loaded))
            filled = call.attempt(filled_in, sharded_state_dict, loaded.value.tensors, objects)
            meet(call, SETTLING)
        self.cached_global_metadata = getattr(self.base_strategy, "cached_global_metadata", None)
        return filled.value

    def _loaded(self, sharded_state_dict: ShardedStateDict, read: Callable[[Any], dict[ShardId, Any]]) -> Own:
        """Return this rank's tensors, and the objects that it has read. Collective in the group."""
        group = self.parallelization_group
        distribution = self.apply_loading_parallelization(sharded_state_dict)
        with begin(CANNOT_LOAD, "load", group) as call:
            own, others = Own({}, {}), Own({}, {})
            with call.guard():
                for part in nested_values(sharded_state_dict):
                    half = own if is_main_replica(adopted(part).replica_id) else others
                    if isinstance(adopted(part), ShardedTensor):
                        half.tensors[_sharded_tensor_shard_id(part)] = part
                    elif isinstance(adopted(part), ShardedObject):
                        half = own if self.per_rank_object_load else half
                        half.objects[_sharded_object_id(part)] = part
                # Tensors last, as in Megatron's: a strategy may note what it has read last.
                objects = read(own.objects)
                loaded = Own(read(own.tensors), objects)
            meet(call, READING)
        tensors = exchange_by_distribution(
            loaded.tensors, others.tensors, distribution, group, self.exchange_algo
        )
        return Own(tensors, loaded.objects)

    def apply_loading_parallelization(
        self, sharded_state_dict: ShardedStateDict
    ) -> Optional[ShardDistribution]:
        """Set the replica ids of a state dict's tensors, in place; return the distribution. Collective."""
        distribution = self.cached_distribution if self.do_cache_distribution else None
        if distribution is None:
            distribution = determine_main_replica_uniform_distribution(
                sharded_state_dict, self.parallelization_group, True
            )
        distribute_main_replicas_with_precomputed_distribution(
            sharded_state_dict, self.parallelization_group, distribution
        )
        if self.do_cache_distribution:
            self.cached_distribution = distribution
        return distribution

    def load_tensors_metadata(self, checkpoint_dir: Folder) -> Any:
        """Return what the strategy inside does."""
        return self.base_strategy.load_tensors_metadata(checkpoint_dir)

    def load_sharded_metadata(self, checkpoint_dir: Folder) -> Any:
        """Return what the strategy inside does."""
        return self.base_strategy.load_sharded_metadata(checkpoint_dir)


class Own(NamedTuple):
    """Tensors and objects of this rank, by shard."""

    tensors: dict[ShardId, Any]
    objects: dict[ShardId, Any]


def filled_in(
    sharded_state_dict: ShardedStateDict,
    tensors: Mapping[ShardId, torch.Tensor],
    objects: Mapping[ShardId, Any],
) -> StateDict:
    """Return a state dict with the values for its shards.

    Raises:
        CheckpointingException: there is none for one of them.
    """

    def value_of(value: Any) -> Any:
        part = adopted(value)
        if isinstance(part, ShardedTensor):
            shard, values = _sharded_tensor_shard_id(part), tensors
        elif isinstance(part, ShardedObject):
            shard, values = _sharded_object_id(part), objects
        else:
            raise CheckpointingException(f"a {type(value).__name__} among the shards of a load")
        if shard not in values:
            raise CheckpointingException(
                f"a shard that no rank has loaded: {part.key} at {part.global_offset}"
            )
        return values[shard]

    filled: StateDict = dict_list_map_outplace(value_of, sharded_state_dict)
    return filled


def say_of_cache(path: Optional[str]) -> None:
    if path is not None:
        say_once("pg_cache_path makes no difference: ranks agree on who takes what in each call")


def distribute_main_replicas_with_precomputed_distribution(
    sharded_state_dict: ShardedStateDict,
    parallelization_group: Group,
    precomputed_distribution: Optional[ShardDistribution],
) -> None:
    """Make each shard's main replica that of the rank of the distribution: 0 there, 1 elsewhere; in place.

    Raises:
        ValueError: no distribution, in a group of several ranks.
    """
    if dist.get_world_size(parallelization_group) <= 1:
        return
    if precomputed_distribution is None:
        raise ValueError("no precomputed_distribution, in a group of several ranks")
    rank = dist.get_rank(parallelization_group)
    mains = precomputed_distribution.main_rank_for_shard
    for value in nested_values(sharded_state_dict):
        part = adopted(value)
        if isinstance(part, ShardedTensor):
            # Of Megatron's own objects, too.
            value.replica_id = int(mains.get(_sharded_tensor_shard_id(part)) != rank)
