#!/usr/bin/env python3
"""How long a training waits for a step of `CheckpointHandler`, beside `save_training_state` alone.

    python3 tools/lanes.py run 2.6 -- python benchmarks/checkpoint_blocked.py

Decoder layers of Qwen2-0.5B's shape (FSDP2, fp32) and their AdamW on 4 ranks of one machine, gloo, one thread
per rank. The ways take turns in every order, so that all meet the same disk; with the handler one step is
kept, so that each save but the first has a step to remove. Between saves there is a pause, as in
training, in which the background ends. Wall seconds of the slowest rank; the ratio is that of the medians.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
PATHS = [str(path) for path in (ROOT, ROOT / "benchmarks", ROOT / "tests", ROOT / "tests/dist_checkpointing")]
sys.path += [path for path in PATHS if path not in sys.path]

from qwen import build  # noqa: E402

from torch_dcp_backport.checkpoint import CheckpointHandler, FSDPCheckpointManager  # noqa: E402
from torch_dcp_backport.dist_checkpointing.training_state import save_training_state  # noqa: E402
from torch_dcp_backport.publish import disk  # noqa: E402
from torch_dcp_backport.regression import launch, meter  # noqa: E402

WORLD = 4
SHAPE = {"layers": 2, "hidden": 896, "inner": 4864, "words": 8000}
ALONE, HANDLER, BACKGROUND = "save_training_state", "handler", "handler, async_save"
MIB = 2**20


def seconds_of(work: Callable[[], object]) -> tuple[float, float]:
    """Of the slowest rank: wall seconds, and the peak above what was there."""
    dist.barrier()
    began = time.perf_counter()
    with meter.Watch() as watch:
        work()
        seconds = time.perf_counter() - began
        watch.stop_peak()
    most = torch.tensor([seconds, watch.peak or 0.0])
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return most[0].item(), most[1].item() / MIB


def measure(
    api: Any, folder: str, rounds: int, training: float, is_traced: bool, layers: int
) -> dict[str, Any]:
    torch.set_num_threads(1)
    model, optimizer = build("FSDP", **{**SHAPE, "layers": layers})
    api.get_state_dict(model, optimizer)  # makes the optimizer's states
    root, plain = Path(folder), Path(folder) / "plain"
    handlers = {
        name: CheckpointHandler(
            FSDPCheckpointManager(model, optimizer, checkpoint_config={"async_save": name == BACKGROUND}),
            default_local_dir=root / name,
            max_ckpt_to_keep=1,
        )
        for name in (HANDLER, BACKGROUND)
    }
    found: dict[str, Any] = {name: [] for name in (ALONE, HANDLER, BACKGROUND)}
    steps: list[tuple[float, str]] = []
    for number in range(1, rounds + 2):
        place = plain / str(number)
        if dist.get_rank() == 0:
            place.mkdir(parents=True)
        ways: dict[str, Callable[[], object]] = {
            ALONE: lambda place=place: save_training_state(place, model, optimizer),
            **{
                name: lambda handler=handler, number=number: handler.save_checkpoint(number)
                for name, handler in handlers.items()
            },
        }
        # A disk is slower after much was written: each way follows each other one as often.
        orders = [*itertools.permutations(ways.items())]
        for name, work in orders[number % len(orders)]:
            is_last = is_traced and name == HANDLER and number == rounds + 1
            if is_last:
                began = time.perf_counter()
                disk.on_step = lambda step, began=began: steps.append((time.perf_counter() - began, step))
            took = seconds_of(work)
            disk.on_step = None
            if number > 1:  # the first finds no step to remove, and a cold plan
                found[name].append(took)
            time.sleep(training)
            for handler in handlers.values():
                handler.finish()
            if name == ALONE and dist.get_rank() == 0:
                shutil.rmtree(place)
            time.sleep(training)
    parts = [*model.state_dict().values()]
    parts += [value for state in optimizer.state.values() for value in state.values()]
    return {**found, "steps": steps, "own": sum(meter.own_bytes(part) for part in parts)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--layers", type=int, default=8, help="of 42 MiB on each rank")
    parser.add_argument("--training", type=float, default=0.5, help="seconds between saves")
    parser.add_argument("--folder", help="on the disk to be measured; by default a temporary one")
    parser.add_argument(
        "--steps", action="store_true", help="when the first rank came to which step of a save"
    )
    options = parser.parse_args()
    results: list[dict[str, Any]] = []

    def tell(job: launch.Job, reports: list[launch.RankReport]) -> None:
        failed = [report for report in reports if report.ending != "finished"]
        if failed:
            sys.exit(str(failed[0]))
        results.append(reports[0].result)

    with tempfile.TemporaryDirectory(prefix="checkpoint-blocked-", dir=options.folder) as folder:
        arguments = {
            "folder": folder,
            "rounds": options.rounds,
            "training": options.training,
            "is_traced": options.steps,
            "layers": options.layers,
        }
        job = launch.Job("blocked", "checkpoint_blocked:measure", WORLD, arguments, seconds=1500.0)
        environment = {"PYTHONPATH": os.pathsep.join([*PATHS, os.environ.get("PYTHONPATH", "")])}
        launch.run(launch.DIRECT, [job], preload=("checkpoint_blocked",), environment=environment, done=tell)
    found = results[0]
    print(f"torch {torch.__version__}; {found['own'] / MIB:.0f} MiB on each of {WORLD} ranks\n")
    print(f"{'':24s} {'median, s':>10s} {'least, s':>10s} {'ratio':>7s} {'peak, MiB':>10s}")
    alone = statistics.median(seconds for seconds, _ in found[ALONE])
    for name in (ALONE, HANDLER, BACKGROUND):
        all_seconds, peaks = zip(*found[name])
        middle = statistics.median(all_seconds)
        print(f"{name:24s} {middle:10.3f} {min(all_seconds):10.3f} {middle / alone:7.2f} {max(peaks):10.1f}")
    for at, step in found["steps"]:
        print(f"{at:10.4f}  {step}")


if __name__ == "__main__":
    main()
