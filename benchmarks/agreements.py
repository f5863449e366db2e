#!/usr/bin/env python3
"""The cost of an agreement of all ranks, over that of torch's own collectives of objects.

    python3 tools/lanes.py run current -- python benchmarks/agreements.py

Ranks are processes of this machine with gloo. Both kinds take turns; a figure is the median of all rounds'
ratios of the time that the slowest rank took, with the smallest and the largest round.

The second table is arithmetic, by the package's own tree: messages of one agreement for numbers of ranks that
no machine here has. In a chain each message waits for the one before.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any


def torchs(dist: Any) -> dict[str, Callable[[], object]]:
    """torch's own calls: every rank gets all values; the first rank does, and answers all."""
    world = dist.get_world_size()

    def to_all() -> object:
        values: list[Any] = [None] * world
        dist.all_gather_object(values, dist.get_rank())
        return values

    def by_first() -> object:
        values: list[Any] = [None] * world
        dist.gather_object(dist.get_rank(), values if dist.get_rank() == 0 else None)
        answer = [sum(values)] if dist.get_rank() == 0 else [None]
        dist.broadcast_object_list(answer)
        return answer

    return {"to all": to_all, "first decides": by_first, "no problem": to_all}


def ours(dist: Any) -> dict[str, Callable[[], object]]:
    from torch_dcp_backport import transfer

    call = transfer.Call("cannot measure", "measure")

    def by_first() -> object:
        return call.gather_object("measuring", dist.get_rank(), lambda ranks: sum(ranks.values()))

    return {
        "to all": lambda: call.all_gather_object("measuring", dist.get_rank()),
        "first decides": by_first,
        "no problem": lambda: call.barrier("measuring"),
    }


def measure(rank: int, world: int, folder: str, rounds: int, times: int, queue: Any) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/met", rank=rank, world_size=world)
    figures: dict[str, list[float]] = {}
    kinds = torchs(dist), ours(dist)
    for _ in range(rounds):
        for name in kinds[0]:
            seconds = []
            for calls in kinds:
                calls[name]()
                dist.barrier()
                start = time.perf_counter()
                for _ in range(times):
                    calls[name]()
                elapsed = torch.tensor(time.perf_counter() - start)
                dist.all_reduce(elapsed, dist.ReduceOp.MAX)
                seconds.append(float(elapsed) / times)
            figures.setdefault(name, []).append(seconds[1] / seconds[0])
            figures.setdefault(f"{name}, ms", []).append(seconds[1] * 1000)
    if rank == 0:
        queue.put(figures)
    dist.barrier()
    dist.destroy_process_group()


def longest_chain(count: int) -> int:
    """The messages in a row from the last rank that comes to the last one that gets the answer."""
    from torch_dcp_backport.transfer._src.tree import neighbours

    up, down = [0] * count, [0] * count
    for place in reversed(range(count)):
        for part in neighbours(place, count)[1]:
            up[place] = max(up[place], up[part.start]) + 1
    for place in range(count):
        for sent, part in enumerate(reversed(neighbours(place, count)[1]), 1):
            down[part.start] = down[place] + sent
    return up[0] + max(down)


def tell_chains() -> None:
    from torch_dcp_backport.transfer._src.tree import neighbours

    print("\n| ranks | messages of the first rank | of all ranks | longest chain |\n|---|---|---|---|")
    for count in (8, 128, 1024, 16384):
        first = 2 * len(neighbours(0, count)[1])
        print(f"| {count} | {first} | {2 * (count - 1)} | {longest_chain(count)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--times", type=int, default=100)
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    print("| ranks | agreement | over torch's | ms |\n|---|---|---|---|")
    for world in args.worlds:
        queue = context.Queue()
        with tempfile.TemporaryDirectory() as folder:
            ranks = [
                context.Process(target=measure, args=(rank, world, folder, args.rounds, args.times, queue))
                for rank in range(world)
            ]
            for process in ranks:
                process.start()
            figures = queue.get(timeout=600)
            for process in ranks:
                process.join(60)
        for name in [name for name in figures if not name.endswith(", ms")]:
            ratios, ms = figures[name], figures[f"{name}, ms"]
            spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            print(f"| {world} | {name} | {spread} | {statistics.median(ms):.2f} |")
    tell_chains()


if __name__ == "__main__":
    main()
