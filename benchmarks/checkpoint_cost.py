#!/usr/bin/env python3
"""What a sharded save and load cost the processor: many small tensors, few large ones; beside torch's DCP.

    python3 tools/lanes.py run 2.6 -- python benchmarks/checkpoint_cost.py
    python3 tools/lanes.py run transformers -- python benchmarks/checkpoint_cost.py --hf-alone

Processor seconds of rank 0, of 4 ranks with one thread each, gloo, files in the page cache: wall time says
little on a machine with other work. With the large tensors all ways run in turns; the medians of the rounds
are told. "again" is a second save of the same tensors into another folder. Every tensor is cut along its
first axis, a part on each rank; ours write checksums and compare them. Where safetensors is installed, one
process also saves tensors by `hf.save_state_dict` and by safetensors' `save_file`, in turns, in memory
(/dev/shm) and in the folder for temporary files; ours is on the disk when it returns, and so `save_file` is
also told with a sync.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import logging
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
PATHS = [str(ROOT), str(ROOT / "benchmarks")]
sys.path += [path for path in PATHS if path not in sys.path]

from torch_dcp_backport import dist_checkpointing as room  # noqa: E402
from torch_dcp_backport.compat import Shard  # noqa: E402
from torch_dcp_backport.dist_checkpointing import ShardedTensor  # noqa: E402
from torch_dcp_backport.regression import launch, meter  # noqa: E402

MIB = 2**20
WORLD = 4
OURS, HASHED, TORCHS = "ours", "ours, SHA-256", "torch's DCP"
SHAPES = ((16, 8), (64,), (8, 16), (32, 4), (128,), (16,))
KEYS = ("q_proj.weight", "q_proj.bias", "k_proj.weight", "mlp.up.weight", "norm.weight", "mlp.up.bias")


# --- on the ranks ---


def small(count: int) -> dict[str, torch.Tensor]:
    """Parts of many small tensors, as layers have them."""
    tensors = {}
    for number in range(count):
        rows, *rest = SHAPES[number % len(SHAPES)]
        key = f"model.layers.{number // len(SHAPES)}.{KEYS[number % len(KEYS)]}"
        tensors[key] = torch.full((rows // WORLD, *rest), float(number))
    return tensors


def large(count: int) -> dict[str, torch.Tensor]:
    return {f"model.{number}": torch.full((2048 // WORLD, 8192), float(number)) for number in range(count)}


def sharded(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    rank = dist.get_rank()
    return {
        key: ShardedTensor.from_rank_offsets(key, value, (0, rank, WORLD)) for key, value in tensors.items()
    }


def dtensors(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh

    from torch_dcp_backport.compat import DTensor

    mesh = init_device_mesh("cpu", (WORLD,))
    return {
        key: DTensor.from_local(value, mesh, [Shard(0)], run_check=False) for key, value in tensors.items()
    }


def cost_of(work: Callable[[], object]) -> dict[str, float]:
    """Processor seconds, wall seconds, and the peak above what was there."""
    dist.barrier()
    before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    with meter.Watch() as watch:
        work()
        watch.stop_peak()
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"cpu": cpu, "wall": time.perf_counter() - began, "peak": (watch.peak or 0) / MIB}


def costs(api: Any, folder: str, way: str, kind: str, count: int, phases: bool) -> dict[str, Any]:
    torch.set_num_threads(1)
    tensors = (small if kind == "small" else large)(count)
    places = [Path(folder) / name for name in ("first", "again")]
    for place in places:
        place.mkdir(exist_ok=True)
    dist.barrier()
    found: dict[str, Any] = {}
    told: list[str] = []
    state = (dtensors if way == TORCHS else sharded)(tensors)
    for name, place in zip(("save", "again"), places):
        with contextlib.redirect_stdout(io.StringIO()):
            found[name] = cost_of(lambda place=place: save(way, state, place))
        told.append(f"{name}: {room.storage_report()}")
    expected = {key: float(value.view(-1)[0]) for key, value in tensors.items()}
    if way == OURS:
        found["background"] = in_background(state, list(tensors.values()), Path(folder))
    for value in tensors.values():
        value.zero_()
    found["load"] = cost_of(lambda: load(way, state, places[1]))
    told.append(f"load: {room.storage_report()}")
    wrong = sum(not bool((value == expected[key]).all()) for key, value in tensors.items())
    found["wrong"], found["own"] = wrong, sum(value.nbytes for value in tensors.values())
    if phases and not dist.get_rank() and way != TORCHS:
        found["told"] = told
    return found


def in_background(state: dict[str, Any], tensors: list[torch.Tensor], folder: Path) -> dict[str, float]:
    """Seconds of a copy of this rank's share, and of the call that begins a save in the background."""
    copying, blocked = [], []
    for number in range(3):
        place = folder / f"background-{number}"
        place.mkdir(exist_ok=True)
        dist.barrier()
        began = time.perf_counter()
        copies = [torch.empty_like(value).copy_(value) for value in tensors]
        copying.append(time.perf_counter() - began)
        del copies
        dist.barrier()
        began = time.perf_counter()
        request = room.save(state, place, async_sharded_save=True)
        blocked.append(time.perf_counter() - began)
        request.execute_sync()
        del request
    return {"copy": sorted(copying)[1], "blocked": sorted(blocked)[1]}


def save(way: str, state: dict[str, Any], place: Path) -> None:
    if way == TORCHS:
        import torch.distributed.checkpoint as dcp

        dcp.save(state, checkpoint_id=str(place))
    else:
        room.save(state, place, verify_integrity=way == HASHED)


def load(way: str, state: dict[str, Any], place: Path) -> None:
    if way == TORCHS:
        import torch.distributed.checkpoint as dcp

        dcp.load(state, checkpoint_id=str(place))
    else:
        room.load(state, place, verify_integrity=way == HASHED)


# --- Hugging Face files, in one process ---


def processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def save_hf(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    from torch_dcp_backport import hf

    hf.save_state_dict(tensors, folder, like={"model_type": "made"})


def save_by_safetensors(tensors: dict[str, torch.Tensor], folder: Path, is_synced: bool = False) -> None:
    from safetensors.torch import save_file

    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    if is_synced:
        with open(folder / "model.safetensors", "rb") as file:
            os.fsync(file.fileno())


def tell_hf(rounds: int) -> None:
    """The least of the rounds: a save has nothing to do but to copy."""
    try:
        import safetensors.torch  # noqa: F401
    except ImportError:
        print("\nsafetensors is not installed: hf.save_state_dict is not measured")
        return
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    ways: dict[str, Callable[..., None]] = {
        "hf.save_state_dict": save_hf,
        "save_file": save_by_safetensors,
        "save_file, synced": functools.partial(save_by_safetensors, is_synced=True),
    }
    kinds = {"64 MiB": (8, (4096, 4096)), "8 MiB": (16, (2048, 1024))}
    print(f"\n{'':32s}" + "".join(f"{way:>20s}" for way in ways) + f"{'ratio':>8s}   CPU s/GB")
    for place in [path for path in ("/dev/shm", tempfile.gettempdir()) if os.access(path, os.W_OK)]:
        for kind, (count, shape) in kinds.items():
            tensors = {f"model.{number}": torch.randn(shape) for number in range(count)}
            gigabytes = sum(tensor.nbytes for tensor in tensors.values()) / 1e9
            costs: dict[str, list[float]] = {way: [] for way in ways}
            for _ in range(4 * rounds + 1):
                for way, save_as in ways.items():
                    with tempfile.TemporaryDirectory(dir=place) as folder:
                        before = processor_seconds()
                        save_as(tensors, Path(folder) / "m")
                        costs[way].append((processor_seconds() - before) / gigabytes)
            least = {way: min(each[1:]) for way, each in costs.items()}
            ratio = least["hf.save_state_dict"] / least["save_file"]
            cells = "".join(f"{least[way]:20.2f}" for way in ways)
            print(f"{f'{place}, {count} of {kind}':32s}{cells}{ratio:8.2f}", flush=True)


# --- the tables ---


def measure(way: str, kind: str, count: int, phases: bool) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = []

    def tell(job: launch.Job, reports: list[launch.RankReport]) -> None:
        failed = [report for report in reports if report.ending != "finished"]
        if failed:
            sys.exit(f"{way}, {kind}:\n{failed[0]}")
        results.extend(report.result for report in reports)

    with tempfile.TemporaryDirectory(prefix="checkpoint-cost-") as folder:
        arguments = {"folder": folder, "way": way, "kind": kind, "count": count, "phases": phases}
        job = launch.Job(f"{way}, {kind}", "checkpoint_cost:costs", WORLD, arguments, seconds=1500.0)
        environment = {"PYTHONPATH": os.pathsep.join([*PATHS, os.environ.get("PYTHONPATH", "")])}
        first = launch.STOCK if way == TORCHS else launch.DIRECT
        launch.run(first, [job], preload=("checkpoint_cost",), environment=environment, done=tell)
    if any(result["wrong"] for result in results):
        sys.exit(f"{way}, {kind}: values differ")
    for line in results[0].get("told", []):
        print(f"    {line}")
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tensors", type=int, default=100_000, help="small tensors, for ours")
    parser.add_argument("--torchs", type=int, default=4_000, help="the same for torch's DCP; 0 for none")
    parser.add_argument("--large", type=int, default=8, help="tensors of 64 MiB; 0 for none")
    parser.add_argument("--rounds", type=int, default=3, help="of the large tensors, in turns")
    parser.add_argument("--phases", action="store_true", help="the phases of ours")
    parser.add_argument("--hf-alone", action="store_true", help="only Hugging Face files")
    options = parser.parse_args()
    if options.hf_alone:
        tell_hf(options.rounds)
        return
    print(
        f"torch {torch.__version__}\n\n{'rank 0':32s} {'save':>8s} {'again':>8s} {'load':>8s}   CPU seconds"
    )
    for way, count in ((OURS, options.tensors), (TORCHS, options.torchs)):
        if count:
            first = measure(way, "small", count, options.phases)[0]
            cells = " ".join(f"{first[name]['cpu']:8.2f}" for name in ("save", "again", "load"))
            print(f"{way + f', {count:,} tensors':32s} {cells}", flush=True)
    if not options.large:
        return
    tell_hf(options.rounds)
    print(
        f"\n{'mean of the ranks':32s} {'save':>8s} {'again':>8s} {'load':>8s}   "
        "CPU s/GB; peak, MiB; seconds until all ranks are done"
    )
    rounds: dict[str, list[list[dict[str, Any]]]] = {way: [] for way in (OURS, HASHED, TORCHS)}
    for _ in range(options.rounds):
        for way, results in rounds.items():
            results.append(measure(way, "large", options.large, options.phases))
    for way, results in rounds.items():
        tell_large(way, results)


def tell_large(way: str, rounds: list[list[dict[str, Any]]]) -> None:
    """The medians of the rounds, each with the results of all ranks."""

    def of(
        value: Callable[[dict[str, Any]], float], combine: Callable[[Iterable[float]], float] = max
    ) -> float:
        return median(combine(map(value, ranks)) for ranks in rounds)

    names = ("save", "again", "load")
    gigabytes = sum(rank["own"] for rank in rounds[0]) / 1e9
    cells = " ".join(f"{of(lambda rank, n=name: rank[n]['cpu'], sum) / gigabytes:8.2f}" for name in names)
    peaks = ", ".join(f"{of(lambda rank, n=name: rank[n]['peak']):.0f}" for name in ("save", "load"))
    walls = ", ".join(f"{of(lambda rank, n=name: rank[n]['wall']):.2f}" for name in names)
    print(f"{way:32s} {cells}   {peaks}; {walls}", flush=True)
    if way == OURS:
        # Both until the slowest rank is done: the call is one of all ranks.
        blocked, copy = (of(lambda rank, k=key: rank["background"][k]) for key in ("blocked", "copy"))
        print(
            f"    a save in the background blocks {blocked:.3f} s, a copy of the share takes {copy:.3f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
