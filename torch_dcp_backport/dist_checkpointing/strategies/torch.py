"""Megatron's names for the one format, torch DCP's on disk."""

from __future__ import annotations

from typing import Any

from torch_dcp_backport.dist_checkpointing.core import SHARDED_BACKEND
from torch_dcp_backport.dist_checkpointing.strategies.base import ShardedStrategy


class TorchDistSaveShardedStrategy(ShardedStrategy):
    """A strategy with Megatron's arguments; the arguments of `save` set how a save goes."""

    def __init__(self, backend: str = SHARDED_BACKEND, version: int = 1, *options: Any, **more: Any) -> None:
        """`options`, `more`: threads, caches and hints of Megatron's; they make no difference."""
        super().__init__(backend, version)


class TorchDistLoadShardedStrategy(ShardedStrategy):
    """A strategy with Megatron's arguments."""

    def __init__(self, *options: Any, **more: Any) -> None:
        """`options`, `more`: caches of Megatron's; they make no difference."""
        super().__init__()
