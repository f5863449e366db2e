"""Runs scenarios on worker pools, in one of four ways, and joins what the ranks saw."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from canonical import joined
from packaging.version import Version
from pool import OURS, STOCK, Pool, RankError
from scenario import all_scenarios, execute, in_step, warm_up

RELEASE = ".".join(str(part) for part in Version(torch.__version__).release)
#: Whether torch itself has the fix, so that its own results are the standard.
NATIVE = Version(RELEASE) >= Version("2.7")

#: How a scenario reaches the functions: (module, TORCH_DCP_BACKPORT of its processes).
WAYS = {
    # torch's own: native, or stock of a broken release.
    "torch": (STOCK, "off"),
    # As a user gets them: torch's module, with ours put in.
    "shim": (STOCK, "auto"),
    # Ours by name, on any release.
    "direct": (OURS, "off"),
}


def run_all(way: str, keys: Iterable[str], streams: int = 3) -> dict[str, dict[str, Any]]:
    """The results of these scenarios.

    In several streams, each with its own processes: ranks mostly wait for each other. All scenarios of a
    world size that few have go to the same one, so that its processes are started once.
    """
    by_world: dict[int, list[str]] = {}
    for key in keys:
        by_world.setdefault(all_scenarios()[key].world, []).append(key)
    usual = by_world.pop(max(by_world, key=lambda world: len(by_world[world])), [])
    waiting = iter([*by_world.values(), *([key] for key in usual)])
    results: dict[str, dict[str, Any]] = {}
    lock = threading.Lock()

    def work() -> None:
        runner = Runner(way)
        try:
            while True:
                with lock:
                    keys = next(waiting, None)
                if keys is None:
                    return
                for key in keys:
                    results[key] = runner.run(key)
        finally:
            runner.close()

    with ThreadPoolExecutor(streams) as executor:
        for future in [executor.submit(work) for _ in range(streams)]:
            future.result()
    return results


class Runner:
    """Worker pools of one way, one per world size."""

    def __init__(self, way: str) -> None:
        self.way = way
        #: Seconds of a collective: torch's own hangs are part of the record.
        self.timeout = 12.0
        self.pools: dict[int, Pool] = {}
        self.count = 0

    def pool(self, world: int) -> Pool:
        pool = self.pools.get(world)
        if pool is None or not pool.usable:
            api, switch = WAYS[self.way]
            pool = Pool(world, api, switch=switch, timeout=self.timeout, limit=3 * self.timeout)
            self.pools[world] = pool
            pool.run(warm_up)
        return pool

    def run(self, key: str) -> dict[str, Any]:
        """The joined result of all ranks, and under "text" what to tell a person."""
        pool = self.pool(all_scenarios()[key].world)
        try:
            ranks = pool.run(execute, key, self.timeout)
        except RankError as error:
            dead = "died" in str(error)
            return {"error": "(crash)" if dead else "(hang)", "text": str(error)}
        result = outcome_of(ranks)
        if "error" in result:
            self.count += 1
            if "(hang)" in result["error"] or not self.in_step(pool):
                pool.close()
        return result

    def in_step(self, pool: Pool) -> bool:
        """Whether the ranks can go on together after an error."""
        try:
            return all(pool.run(in_step, self.count))
        except RankError:
            return False

    def close(self) -> None:
        for pool in self.pools.values():
            pool.close()


def outcome_of(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    errors = [one.get("error") for one in ranks]
    result: dict[str, Any] = {}
    if not any(errors):
        result["value"] = joined([one["value"] for one in ranks])
    elif len(set(errors)) == 1:
        result["error"] = f"{errors[0]} on every rank"
    else:
        result["error"] = ", ".join(str(error or "nothing") for error in errors) + " by rank"
    warned = [one.get("warnings") for one in ranks]
    if any(warned):
        result["warnings"] = joined(warned)
    texts = {one["text"] for one in ranks if "text" in one}
    if texts:
        result["text"] = "\n".join(sorted(texts))
    return result
