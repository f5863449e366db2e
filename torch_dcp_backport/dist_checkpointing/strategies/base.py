"""The one format as a strategy, for programs that choose a strategy and pass it on.

Names are those of `megatron.core.dist_checkpointing.strategies`.
"""

from __future__ import annotations

import logging
from typing import Any

import torch.distributed as dist

from torch_dcp_backport.dist_checkpointing._src.offers import refusing
from torch_dcp_backport.dist_checkpointing.core import (
    COMMON_BACKEND,
    SHARDED_BACKEND,
    CheckpointingException,
)
from torch_dcp_backport.transfer import Group, warn_once

logger = logging.getLogger("torch_dcp_backport.dist_checkpointing")

__getattr__ = refusing(
    __name__,
    "LoadCommonStrategy LoadStrategyBase SaveCommonStrategy SaveStrategyBase StrategyAction async_calls "
    "default_strategies get_default_strategy register_default_strategy",
)


class ShardedStrategy:
    """The only way in which sharded tensors are saved, and loaded."""

    def __init__(self, backend: str = SHARDED_BACKEND, version: int = 1) -> None:
        """Make a strategy. A format that is not there is refused where it is used."""
        self.backend = backend
        self.version = version

    can_handle_sharded_objects = property(lambda self: True)

    def check_backend_compatibility(self, loaded_backend: Any) -> None:
        """Do nothing: a load says what it cannot read."""

    def check_version_compatibility(self, loaded_version: Any) -> None:
        """Do nothing: a load says what it cannot read."""


class SaveShardedStrategy(ShardedStrategy):
    """A strategy that saves."""


class LoadShardedStrategy(ShardedStrategy):
    """A strategy that loads."""


AsyncSaveShardedStrategy = SaveShardedStrategy


def refuse_strategies(*strategies: Any, called: str = "") -> None:
    """Refuse strategies for another format than Megatron's torch_dist; by duck type.

    Args:
        called: the method in whose place the caller stands: a strategy of this package's classes with a
            method of its own by this name is refused, for it would not be called.

    Raises:
        CheckpointingException: naming the other format, or the class.
    """
    for strategy in strategies:
        while hasattr(strategy, "base_strategy"):
            strategy = strategy.base_strategy
        if isinstance(strategy, ShardedStrategy):
            for name in (called, f"async_{called}"):
                made_in = getattr(getattr(type(strategy), name, None), "__module__", __package__)
                if called and made_in.partition(".")[0] != __name__.partition(".")[0]:
                    raise CheckpointingException(
                        f"{called} does not call strategies, and {type(strategy).__name__} has a {name} of "
                        f"its own: call its {name} instead, or that of a FullyParallel wrapper around it"
                    )
        name = strategy[0] if isinstance(strategy, tuple) else getattr(strategy, "backend", strategy)
        if name not in (None, SHARDED_BACKEND, COMMON_BACKEND):
            raise CheckpointingException(f"no such format: {name!r} (there is {SHARDED_BACKEND} alone)")


def say_once(text: str) -> None:
    """Log, once in this process, that something of Megatron's makes no difference here.

    On every rank: no group is known here, and an object may be made on any rank alone.
    """
    warn_once(logger, text)


def sharing_groups(strategy: Any) -> tuple[Group, ...]:
    """Return the process group whose ranks a strategy lets read together; empty without such a strategy."""
    if not hasattr(strategy, "parallelization_group") or not dist.is_initialized():
        return ()
    return (strategy.parallelization_group,)
