#!/usr/bin/env python3
"""What a save in the background takes from a training whose steps are busy in Python.

    python3 tools/lanes.py run current -- python benchmarks/background_saver.py
    python3 tools/lanes.py run current -- python benchmarks/background_saver.py --tensors 5000 --kib 4

One process, gloo. A step is a fixed amount of Python with small tensor operations between. It needs the
interpreter all the time, so it loses each moment in which another thread has it. The ways take turns: ours
(`dist_checkpointing.save(async_sharded_save=True)`), DCP's `async_save` in a thread and, where torch has it,
in a process. Each turn times steps without a save, saves, and times steps until the files are written.

    call      seconds until the call returns
    beside    the median step while the files were written, over the median step before
    wall      seconds from the call's return until the files were written
    threads   CPU seconds of the trainer's other threads meanwhile: they had the interpreter for no longer
    taken     seconds that the turn took from the training: the call, and what steps took more than before
    torn      whether a step's change of a tensor after the call came into the files

Medians of the turns after the first, in which pools and processes are made; the first is told in brackets.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from torch_dcp_backport import dist_checkpointing  # noqa: E402
from torch_dcp_backport.dist_checkpointing.strategies.async_utils import AsyncCallsQueue  # noqa: E402

State = dict[str, torch.Tensor]
#: Starts a save; returns whether it has ended, and a function that waits for its end.
Started = tuple[Callable[[], bool], Callable[[], None]]
MIB = 2**20


class Turn(NamedTuple):
    """Of a save: see the head of this file."""

    call: float
    beside: float
    wall: float
    threads: float
    taken: float
    faults: int
    is_torn: bool


def train(work: int) -> float:
    """Return a step's seconds: objects of Python, and small tensors."""
    began = time.perf_counter()
    weights = torch.ones(64)
    for number in range(work):
        names = {f"layer.{number}.{part}": part for part in range(8)}
        if sum(names.values()) != 28:
            raise AssertionError
        weights = weights + 1
    return time.perf_counter() - began


class Ours:
    """Saves of `dist_checkpointing`."""

    def __init__(self) -> None:
        self.queue = AsyncCallsQueue()

    def start(self, state: State, folder: Path) -> Started:
        describe = dist_checkpointing.ShardedTensor.from_rank_offsets
        sharded = {key: describe(key, tensor) for key, tensor in state.items()}
        request = dist_checkpointing.save(sharded, folder, async_sharded_save=True)
        assert request is not None
        self.queue.schedule_async_request(request)
        thread = self.queue._thread
        assert thread is not None
        return lambda: not thread.is_alive(), lambda: self.queue.maybe_finalize_async_calls(blocking=True)  # type: ignore[return-value]

    def read(self, state: State, folder: Path) -> None:
        describe = dist_checkpointing.ShardedTensor.from_rank_offsets
        dist_checkpointing.load({key: describe(key, tensor) for key, tensor in state.items()}, folder)


class Torchs:
    """Saves of torch's DCP."""

    def __init__(self, kind: str) -> None:
        self.options = {}
        if kind == "process":
            from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

            self.options = {"async_checkpointer_type": AsyncCheckpointerType.PROCESS}

    def start(self, state: State, folder: Path) -> Started:
        future = dcp.async_save(dict(state), checkpoint_id=folder, **self.options)
        return future.done, lambda: future.result() and None

    def read(self, state: State, folder: Path) -> None:
        dcp.load(state, checkpoint_id=folder)


def turn_of(way: object, state: State, folder: Path, work: int) -> Turn:
    before = statistics.median(train(work) for _ in range(15))
    for tensor in state.values():
        tensor.fill_(1)
    folder.mkdir()
    faults, began = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.perf_counter()
    is_done, wait = way.start(state, folder)  # type: ignore[attr-defined]
    called = time.perf_counter()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    for tensor in state.values():
        tensor.fill_(2)
    cpu = time.process_time() - time.thread_time()
    steps = [train(work)]
    while not is_done():
        steps.append(train(work))
    wall = time.perf_counter() - called
    cpu = time.process_time() - time.thread_time() - cpu
    wait()
    saved = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
    way.read(saved, folder)  # type: ignore[attr-defined]
    is_torn = any(not bool((tensor == 1).all()) for tensor in saved.values())
    shutil.rmtree(folder)
    more = sum(steps) - before * len(steps)
    beside = statistics.median(steps) / before
    return Turn(called - began, beside, wall, cpu, called - began + more, faults, is_torn)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tensors", type=int, default=24)
    parser.add_argument("--kib", type=int, default=16 * 1024, help="of each tensor")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--work", type=int, default=5000, help="of a step; about 20 ms by default")
    parser.add_argument("--ways", nargs="*", default=["ours", "DCP thread", "DCP process"])
    parser.add_argument("--folder", help="on the disk to be measured; by default a temporary one")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if not hasattr(dcp.state_dict_saver, "AsyncCheckpointerType"):
        options.ways = [way for way in options.ways if way != "DCP process"]
    ways = {way: Ours() if way == "ours" else Torchs(way.split()[1]) for way in options.ways}
    state = {f"tensor.{number}": torch.ones(options.kib * 256) for number in range(options.tensors)}
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    turns: dict[str, list[Turn]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory(prefix="background-saver-", dir=options.folder) as folder:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        for number in range(options.rounds + 1):
            order = [*ways.items()][:: 1 if number % 2 else -1]
            for name, way in order:
                turns[name].append(turn_of(way, state, Path(folder) / f"{number}", options.work))
        dist.destroy_process_group()
    size = options.tensors * options.kib / 1024
    print(
        f"torch {torch.__version__}; {options.tensors} tensors of {options.kib} KiB, {size:.0f} MiB;", end=" "
    )
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n")
    heads = f"{'beside':>7s} {'wall, s':>8s} {'threads, s':>10s} {'taken, s':>16s} {'faults':>7s} torn"
    print(f"{'':12s} {'call, s':>16s} {heads}")
    for name, all_turns in turns.items():
        first, others = all_turns[0], all_turns[1:]
        middle = Turn(*(statistics.median(column) for column in zip(*others)))
        call = f"{middle.call:.3f} ({first.call:.3f})"
        taken = f"{middle.taken:.3f} ({first.taken:.3f})"
        torn = "yes" if any(turn.is_torn for turn in all_turns) else "no"
        figures = f"{middle.beside:7.2f} {middle.wall:8.2f} {middle.threads:10.3f} {taken:>16s}"
        print(f"{name:12s} {call:>16s} {figures} {middle.faults:7.0f} {torn}")


if __name__ == "__main__":
    main()
