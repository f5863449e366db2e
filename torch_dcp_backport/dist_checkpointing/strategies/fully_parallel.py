"""Strategies by which ranks share work: Megatron's names.

A save shares it out in any case; a load does with a strategy of these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional

import torch.distributed as dist

from torch_dcp_backport.dist_checkpointing.adopt import adopted
from torch_dcp_backport.dist_checkpointing.dict_utils import nested_values
from torch_dcp_backport.dist_checkpointing.exchange_utils import ShardDistribution
from torch_dcp_backport.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor
from torch_dcp_backport.dist_checkpointing.utils import _sharded_tensor_shard_id
from torch_dcp_backport.transfer.groups import Group


@dataclass(frozen=True)
class FullyParallelSaveStrategyWrapper:
    """A save in which every rank writes. `save(balanced=True)`, the default, does so without it."""

    #: None, or a strategy for the one format.
    strategy: Any = None
    #: Makes no difference: any rank that holds a replica may write it.
    parallelization_group: Group = None
    #: Makes no difference: a plan is kept, and compared with what the ranks have, in any case.
    do_cache_distribution: bool = False

    base_strategy = property(lambda self: self.strategy)


@dataclass(frozen=True)
class FullyParallelLoadStrategyWrapper:
    """A load in which the ranks of a group read together: a part that several want is read once, and sent.

    For files far away (a network's file system). With files in the memory of this machine each rank is as
    fast by itself.
    """

    #: None, or a strategy for the one format.
    strategy: Any = None
    #: The ranks that read together; None is the default group. All of them have to take part in the load.
    parallelization_group: Group = None
    #: Makes no difference: nothing is cached.
    do_cache_distribution: bool = False
    #: Makes no difference: there is only one.
    exchange_algo: str = "broadcast"

    base_strategy = property(lambda self: self.strategy)


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
