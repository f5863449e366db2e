from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pool import Pools


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    pools = Pools("torch_dcp_backport.hf", timeout=20.0, limit=90.0)
    yield pools
    pools.close()


@pytest.fixture
def ranks(pools: Pools) -> Callable[..., list[Any]]:
    return pools.run
