from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pool import Pool

API = "torch_dcp_backport.megatron"


@pytest.fixture(scope="session")
def pools() -> Iterator[list[Pool]]:
    pools: list[Pool] = []
    yield pools
    for pool in pools:
        pool.close()


@pytest.fixture
def ranks(pools: list[Pool]) -> Callable[..., list[Any]]:
    """Run a function on 4 ranks; another four where some were lost."""

    def run(function: Callable[..., Any], *args: Any) -> list[Any]:
        if not pools or not pools[-1].usable:
            pools.append(Pool(4, API, timeout=20.0, limit=90.0))
        return pools[-1].run(function, *args)

    return run
