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
from torch_dcp_backport.dist_checkpointing._src.calls import as_problems_of, begin, world_size
from torch_dcp_backport.dist_checkpointing._src.options import CANNOT_SAVE
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
from torch_dcp_backport.dist_checkpointing.strategies.base import logger
from torch_dcp_backport.dist_checkpointing.strategies.torch import (
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
)
from torch_dcp_backport.dist_checkpointing.utils import ShardId, _sharded_object_id, _sharded_tensor_shard_id
from torch_dcp_backport.dist_checkpointing.validation import (
    determine_global_metadata,
    validate_sharding_integrity,
)
from torch_dcp_backport.transfer import DOUBTFUL, Group, warn_on_first

SHARING, READING = "sharing out what is written", "reading what this rank takes care of"


class FullyParallelSaveStrategyWrapper:
    """A save in which every rank writes. `dist_checkpointing.save`, with `balanced=True`, does so without it.

    Args:
        strategy: the strategy that writes; None for this room's.
        parallelization_group: the ranks among which `save` shares out; None is the default group.
        do_cache_distribution: keep the first distribution, as `cached_distribution`, for later `save`s.
        backend: the format.
        version: its version.
        validate_access_integrity: whether a `save` checks the parts of all ranks together; with
            do_cache_distribution only the first does.
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
        say_of_cache(pg_cache_path, parallelization_group)
        self.backend, self.version = backend, version
        self.base_strategy = TorchDistSaveShardedStrategy(backend, version) if strategy is None else strategy
        self.validate_access_integrity = validate_access_integrity
        self.parallelization_group = parallelization_group
        #: Of the first save; kept where `do_cache_distribution` says so.
        self.cached_distribution: Optional[ShardDistribution] = None
        self.do_cache_distribution = do_cache_distribution
        #: Whether the parts of all ranks were checked together. A rank that is its whole group has no
        #: distribution, and takes part in the check with the others.
        self._is_checked = False

    can_handle_sharded_objects = property(lambda self: True)

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Folder) -> Any:
        """Share the shards out, and have the strategy inside save them. Collective.

        Replica ids of the state dict's tensors are set: 0 where this rank writes, else 1.

        Raises:
            CheckpointingException: a rank's part contradicts itself, the ranks' parts do not fit, or the
                strategy inside failed on a rank; the same on every rank.
        """
        return self._saved("save", sharded_state_dict, checkpoint_dir)

    def async_save(
        self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Folder, *options: Any, **more: Any
    ) -> Any:
        """Do as `save`, in the background; return the request of the strategy inside. Collective."""
        return self._saved("async_save", sharded_state_dict, checkpoint_dir, *options, **more)

    def _saved(self, name: str, sharded_state_dict: ShardedStateDict, *options: Any, **more: Any) -> Any:
        """Share the shards out, and call a method of the strategy inside, by its name. Collective."""
        with begin(CANNOT_SAVE, "save") as call:
            call.attempt(self.apply_saving_parallelization, sharded_state_dict)
            method = call.attempt(getattr, self.base_strategy, name)
            # A rank without that method does not leave the others in theirs.
            call.barrier(SHARING)
            made = call.attempt(lambda: method.value(sharded_state_dict, *options, **more))
            call.barrier("writing", so_far="whether the folder holds a checkpoint shows a load")
        return made.value

    def apply_saving_parallelization(self, sharded_state_dict: ShardedStateDict) -> None:
        """Set the replica ids of a state dict's tensors, in place. Collective."""
        share_out = as_problems_of(None, self.parallelization_group, self._shared_out)
        with begin(CANNOT_SAVE, "save") as call:
            distribution = call.attempt(share_out, sharded_state_dict)
            # Before what is collective among all, for a rank that failed does not come there.
            call.barrier(SHARING)
            if self.validate_access_integrity and not (self._is_checked and self.do_cache_distribution):
                validate_sharding_integrity(determine_global_metadata(sharded_state_dict)[1])
                self._is_checked = True
        if self.do_cache_distribution:
            self.cached_distribution = distribution.value

    def _shared_out(self, sharded_state_dict: ShardedStateDict) -> Optional[ShardDistribution]:
        """Set the replica ids, in place; return the distribution. Collective in the group."""
        distribution = self.cached_distribution if self.do_cache_distribution else None
        if distribution is None:
            distribution = determine_main_replica_uniform_distribution(
                sharded_state_dict, self.parallelization_group
            )
        distribute_main_replicas_with_precomputed_distribution(
            sharded_state_dict, self.parallelization_group, distribution
        )
        return distribution


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
        say_of_cache(pg_cache_path, parallelization_group)
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
            check_loaded(loaded, parts, f"{type(self.base_strategy).__name__}.load")
            return loaded

        group = self.parallelization_group
        # Objects go to ranks of other groups, too: also from a rank that is its whole group.
        everyone = group if self.per_rank_object_load else None
        if world_size(group) <= 1 and world_size(everyone) <= 1:
            alone: StateDict = self.base_strategy.load(sharded_state_dict, checkpoint_dir, *options, **more)
            return alone
        with begin(CANNOT_LOAD, "load", everyone) as call:
            loaded = call.attempt(as_problems_of(everyone, group, self._loaded), sharded_state_dict, read)
            if self.per_rank_object_load:
                call.barrier(READING, so_far=DOUBTFUL)
                objects = loaded.value.objects
            else:
                objects = exchanged_objects(call, call.attempt(lambda made: made.objects, loaded))
            filled = call.attempt(filled_in, sharded_state_dict, loaded.value.tensors, objects)
            call.barrier("settling", so_far=DOUBTFUL)
        self.cached_global_metadata = getattr(self.base_strategy, "cached_global_metadata", None)
        return filled.value

    def _loaded(self, sharded_state_dict: ShardedStateDict, read: Callable[[Any], dict[ShardId, Any]]) -> Own:
        """Return this rank's tensors, and the objects that it has read. Collective in the group."""
        group = self.parallelization_group
        is_alone = world_size(group) <= 1
        distribution = self.apply_loading_parallelization(sharded_state_dict)
        with begin(CANNOT_LOAD, "load", group, is_alone=is_alone) as call:
            own, others = Own({}, {}), Own({}, {})
            with call.guard():
                for part in nested_values(sharded_state_dict):
                    check_shard(part)
                    half = own if is_main_replica(adopted(part).replica_id) else others
                    if isinstance(adopted(part), ShardedTensor):
                        half = own if is_alone else half
                        half.tensors[_sharded_tensor_shard_id(part)] = part
                    else:
                        half = own if self.per_rank_object_load else half
                        half.objects[_sharded_object_id(part)] = part
                # Tensors last, as in Megatron's: a strategy may note what it has read last.
                objects = read(own.objects)
                loaded = Own(read(own.tensors), objects)
            call.barrier(READING, so_far=DOUBTFUL)
        if is_alone:
            return loaded
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


def check_shard(value: Any) -> None:
    """Refuse what is no shard.

    Raises:
        CheckpointingException: naming its class.
    """
    if not isinstance(adopted(value), (ShardedTensor, ShardedObject)):
        raise CheckpointingException(f"a {type(value).__name__} among the shards of a load")


def check_loaded(loaded: Any, parts: Mapping[ShardId, Any], what: str) -> None:
    """Check that a strategy has returned a dict, with a tensor for each sharded tensor in it.

    Raises:
        CheckpointingException: naming the strategy's method, and what it returned.
    """
    if not isinstance(loaded, Mapping):
        raise CheckpointingException(f"{what} returned a {type(loaded).__name__}, expected a dict")
    for shard, value in loaded.items():
        part = adopted(parts.get(shard))
        if isinstance(part, ShardedTensor) and not isinstance(value, torch.Tensor):
            raise CheckpointingException(
                f"{what} returned a {type(value).__name__} for {part.key}, expected a tensor"
            )


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
        check_shard(value)
        part = adopted(value)
        if isinstance(part, ShardedTensor):
            shard, values = _sharded_tensor_shard_id(part), tensors
        else:
            shard, values = _sharded_object_id(part), objects
        if shard not in values:
            raise CheckpointingException(
                f"a shard that no rank has loaded: {part.key} at {part.global_offset}"
            )
        return values[shard]

    filled: StateDict = dict_list_map_outplace(value_of, sharded_state_dict)
    return filled


def say_of_cache(path: Optional[str], group: Group) -> None:
    if path is not None:
        text = "pg_cache_path makes no difference: ranks agree on who takes what in each call"
        warn_on_first(logger, text, group)


def distribute_main_replicas_with_precomputed_distribution(
    sharded_state_dict: ShardedStateDict,
    parallelization_group: Group,
    precomputed_distribution: Optional[ShardDistribution],
) -> None:
    """Make each shard's main replica that of the rank of the distribution: 0 there, 1 elsewhere; in place.

    Raises:
        ValueError: no distribution, in a group of several ranks.
    """
    if world_size(parallelization_group) <= 1:
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
