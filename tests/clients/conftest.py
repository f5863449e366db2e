"""Each client runs as it is, in processes that differ only in when, and whether, they import the backport."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from cpu_fsdp import RELEASE
from pool import LIMIT, STOCK, Pool

CLIENTS = tuple(
    name
    for name in ("lightning_fabric", "accelerate", "torchtune.training", "verl.utils.fsdp_utils")
    if importlib.util.find_spec(name.partition(".")[0])  # a lane of the newest torch has accelerate alone
)
#: What the ranks import, and in which order. The first to be named is what the others must equal.
ORDERS = {
    "no shim": CLIENTS,
    "shim first": ("torch_dcp_backport", *CLIENTS),
    "client first": (*CLIENTS, "torch_dcp_backport"),
}


#: Seconds for a pool's processes to import the clients.
START = 240.0


def ready(api: Any) -> None:
    """The ranks have begun."""


class Orders:
    """A pool of `world` processes per order, made anew where one has failed."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.open: dict[str, Pool] = {}

    def get(self) -> dict[str, Pool]:
        for order, imports in ORDERS.items():
            if order not in self.open or not self.open[order].usable:
                pool = Pool(self.world, STOCK, switch="auto", timeout=120.0, limit=START, imports=imports)
                # One after the other, and with time: each rank imports all of the clients.
                pool.run(ready)
                pool.limit = LIMIT
                self.open[order] = pool
        return self.open

    def close(self) -> None:
        for pool in self.open.values():
            pool.close()


#: Each takes the clients' imports in every order; torch 2.6 runs both.
WORLDS = [2, 4] if RELEASE >= (2, 6) or os.environ.get("TESTS_WHOLE") else [4]


@pytest.fixture(scope="session", params=WORLDS, ids="{}-ranks".format)
def orders(request: pytest.FixtureRequest) -> Iterator[Orders]:
    orders = Orders(request.param)
    yield orders
    orders.close()


@pytest.fixture
def in_every_order(orders: Orders) -> Callable[..., dict[str, list[Any]]]:
    """Run a function in all three orders: {order: its results by rank}."""

    def run(function: Callable[..., Any], *args: Any) -> dict[str, list[Any]]:
        return {order: pool.run(function, order, *args) for order, pool in orders.get().items()}

    return run


def check_orders(results: dict[str, list[Any]], stock_keeps: Sequence[str] = ()) -> None:
    """Every order gives every rank the same bits, and with the shim no tensor holds more than its own bytes.

    `stock_keeps`: where stock torch must be seen to hold more, so that the check is known to be able to fail.
    """
    stock = results["no shim"]
    for order, ranks in results.items():
        for rank, (found, expected) in enumerate(zip(ranks, stock)):
            for name, values in expected["bits"].items():
                assert values or rank, f"{name}: there is nothing to compare"
                assert found["bits"][name] == values, f"{order}, rank {rank}: {name} differs from stock's"
            if order != "no shim" and RELEASE < (2, 7):
                assert not any(found["excess"].values()), f"{order}, rank {rank}: {found['excess']}"
    # From torch 2.7 on there is no shim: the three are one, whose import has changed nothing.
    for rank, found in enumerate(stock if RELEASE < (2, 7) else ()):
        for name in stock_keeps:
            assert found["excess"][name], f"rank {rank}: stock torch holds no more of {name} than it should"
