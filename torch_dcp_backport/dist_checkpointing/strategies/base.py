"""The one format as a strategy, for programs that choose a strategy and pass it on.

Names are those of `megatron.core.dist_checkpointing.strategies`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from torch_dcp_backport.dist_checkpointing.core import (
    COMMON_BACKEND,
    SHARDED_BACKEND,
    CheckpointingException,
)
from torch_dcp_backport.transfer.groups import Group


@dataclass(frozen=True)
class ShardedStrategy:
    """The only way in which sharded tensors are saved, and loaded."""

    backend: str = SHARDED_BACKEND
    version: int = 1

    def __post_init__(self) -> None:
        refuse_strategies((self.backend, self.version))

    can_handle_sharded_objects = property(lambda self: True)


def refuse_strategies(*strategies: Any) -> None:
    """Refuse strategies for another format than Megatron's torch_dist; by duck type.

    Raises:
        CheckpointingException: naming the other format.
    """
    for strategy in strategies:
        while hasattr(strategy, "base_strategy"):
            strategy = strategy.base_strategy
        name = strategy[0] if isinstance(strategy, tuple) else getattr(strategy, "backend", strategy)
        if name not in (None, SHARDED_BACKEND, COMMON_BACKEND):
            raise CheckpointingException(f"no such format: {name!r} (there is {SHARDED_BACKEND} alone)")


def sharing_groups(strategy: Any) -> tuple[Group, ...]:
    """Return the process group whose ranks a strategy lets read together; empty without such a strategy."""
    if not hasattr(strategy, "parallelization_group") or not dist.is_initialized():
        return ()
    return (strategy.parallelization_group,)
