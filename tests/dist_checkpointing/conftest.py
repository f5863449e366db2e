"""Rank processes, started once for all tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pool import Pool

API = "torch_dcp_backport.dist_checkpointing"


class Pools:
    def __init__(self) -> None:
        self.open: dict[int, Pool] = {}

    def get(self, world: int) -> Pool:
        pool = self.open.get(world)
        if pool is None or not pool.usable:
            pool = self.open[world] = Pool(world, API, limit=100.0)
        return pool

    def close(self) -> None:
        for pool in self.open.values():
            pool.close()


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    pools = Pools()
    yield pools
    pools.close()


@pytest.fixture
def ranks(pools: Pools) -> Callable[..., list[Any]]:
    """Run a function on 4 ranks (or `world=`); it gets the room first."""

    def run(function: Callable[..., Any], *args: Any, world: int = 4, **kwargs: Any) -> list[Any]:
        return pools.get(world).run(function, *args, **kwargs)

    return run
