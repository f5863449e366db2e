#!/usr/bin/env python3
"""A training state saved by 4 ranks and loaded by others, by torch's DCP and by this package's room.

    make demo-reshard          or: python3 tools/lanes.py run 2.6 -- python benchmarks/checkpoints.py

Decoder layers of Qwen2-0.5B's shape (FSDP2, fp32) and their AdamW, on any number of ranks and meshes: the
bytes that a rank asks of files, its peak above the state, seconds; every value is compared. Both with
`get_state_dict` and `set_state_dict`, as programs call them: torch's as it is, or the package's. gloo, one
thread per rank, files in the page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
PATHS = [str(path) for path in (ROOT, ROOT / "benchmarks", ROOT / "tests", ROOT / "tests/dist_checkpointing")]
sys.path += [path for path in PATHS if path not in sys.path]

from qwen import build  # noqa: E402

from torch_dcp_backport.dist_checkpointing.training_state import (  # noqa: E402
    load_training_state,
    save_training_state,
)
from torch_dcp_backport.regression import launch, meter  # noqa: E402
from torch_dcp_backport.transfer import layout_of  # noqa: E402

MIB = 2**20
#: No multiple of any extent: neighbours differ along every axis.
PERIOD = 8191
SHAPE = {"layers": 4, "hidden": 896, "inner": 4864, "words": 32000}
WHOLE = {"layers": 24, "hidden": 896, "inner": 4864, "words": 151936}
#: Kind of mesh -> numbers of ranks.
CASES = [("FSDP", 4), ("FSDP", 2), ("FSDP", 3), ("FSDP", 8), ("plain", 1), ("HSDP", 4), ("TP x FSDP", 4)]
TORCHS, OURS = "dcp.save, dcp.load", "dist_checkpointing"
WAYS = {TORCHS: launch.STOCK, OURS: launch.DIRECT}
#: Told apart by all eyes (Okabe and Ito).
COLORS = {TORCHS: "#E69F00", OURS: "#0072B2"}


# --- on the ranks ---


def pattern(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank's part of a tensor has, by the places of its elements in the whole."""
    layout = layout_of(tensor)
    box = layout.box(dist.get_rank())
    assert box is not None, "every rank is in the mesh"
    places, stride = torch.zeros(box.size, dtype=torch.int32), 1
    for dim in reversed(range(len(box.size))):
        steps = (torch.arange(box.size[dim]) + box.offset[dim]) * stride % PERIOD
        places += steps.to(torch.int32).view(-1, *[1] * (len(box.size) - dim - 1))
        stride *= layout.shape[dim]
    return places.to(tensor.dtype)


def tensors_of(state: Any) -> list[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        return [state]
    parts = state.values() if isinstance(state, dict) else state if isinstance(state, list) else ()
    return [tensor for part in parts for tensor in tensors_of(part)]


def made(api: Any, kind: str, shape: dict[str, int]) -> tuple[Any, Any, list[torch.Tensor]]:
    """A model, its optimizer, and all their tensors."""
    model, optimizer = build(kind, **shape)
    return model, optimizer, tensors_of(list(api.get_state_dict(model, optimizer)))


def asked_bytes() -> int:
    """Bytes that this process has asked of files and pipes."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return 0
    return int(dict(line.split(": ") for line in lines)["rchar"])


def measured(work: Any) -> dict[str, float]:
    dist.barrier()
    before, began = asked_bytes(), time.perf_counter()
    with meter.Watch() as watch:
        work()
        watch.stop_peak()
    dist.barrier()
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "peak": (watch.peak or 0) / MIB, "asked": asked_bytes() - before}


def save(api: Any, folder: str, way: str, shape: dict[str, int]) -> dict[str, float]:
    torch.set_num_threads(1)
    model, optimizer, tensors = made(api, "FSDP", shape)
    for tensor in tensors:
        meter.local(tensor).detach().copy_(pattern(tensor))

    def torchs() -> None:
        import torch.distributed.checkpoint as dcp

        model_state, optimizer_state = api.get_state_dict(model, optimizer)
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)

    found = measured(torchs if way == TORCHS else lambda: save_training_state(folder, model, optimizer))
    return {**found, "own": sum(meter.own_bytes(tensor) for tensor in tensors)}


def load(api: Any, folder: str, way: str, shape: dict[str, int], kind: str) -> dict[str, float]:
    torch.set_num_threads(1)
    model, optimizer, _ = made(api, kind, shape)

    def torchs() -> None:
        import torch.distributed.checkpoint as dcp

        model_state, optimizer_state = api.get_state_dict(model, optimizer)
        dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
        api.set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)

    found = measured(torchs if way == TORCHS else lambda: load_training_state(folder, model, optimizer))
    loaded = tensors_of(list(api.get_state_dict(model, optimizer)))
    wrong = sum(not torch.equal(meter.local(tensor).detach(), pattern(tensor)) for tensor in loaded)
    return {**found, "own": sum(meter.own_bytes(tensor) for tensor in loaded), "wrong": wrong}


# --- the table ---


class Row(NamedTuple):
    """One call of one way: of the rank that asked, held or took most."""

    name: str
    way: str
    #: Bytes asked of files, of the rank's own bytes; 0 where the system does not tell.
    ratio: float
    peak: float
    seconds: float
    wrong: int


def row_of(name: str, way: str, reports: list[launch.RankReport]) -> Row:
    failed = [report for report in reports if report.ending != "finished"]
    if failed:
        sys.exit(f"{name}, {way}:\n{failed[0]}")
    results = [report.result for report in reports]
    return Row(
        name,
        way,
        max(one["asked"] / one["own"] for one in results),
        max(one["peak"] for one in results),
        max(one["seconds"] for one in results),
        sum(int(one.get("wrong", 0)) for one in results),
    )


def measure(way: str, folder: str, shape: dict[str, int]) -> list[Row]:
    target = {"folder": folder, "way": way, "shape": shape}
    jobs = [launch.Job("save: FSDP, 4 ranks", "checkpoints:save", 4, target, seconds=600.0)]
    jobs += [
        launch.Job(
            f"load: {kind}, {world} rank{'s' if world > 1 else ''}",
            "checkpoints:load",
            world,
            {**target, "kind": kind},
            seconds=600.0,
        )
        for kind, world in CASES
    ]
    rows: list[Row] = []

    def tell(job: launch.Job, reports: list[launch.RankReport]) -> None:
        rows.append(row_of(job.name, way, reports))
        print(line_of(rows[-1]), flush=True)

    environment = {"PYTHONPATH": os.pathsep.join([*PATHS, os.environ.get("PYTHONPATH", "")])}
    launch.run(WAYS[way], jobs, preload=("checkpoints",), environment=environment, done=tell)
    return rows


def line_of(row: Row) -> str:
    ratio = f"{row.ratio:.2f}" if row.name.startswith("load") else ""
    verdict = "" if row.name.startswith("save") else "WRONG" if row.wrong else "equal"
    return f"{row.name:24s} {row.way:20s} {ratio:>8s} {row.peak:10.0f} {row.seconds:9.2f}  {verdict}"


def draw(rows: list[Row], title: str, path: str) -> None:
    """Draw the median of all runs, with lines from the least to the most."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = {
        "bytes asked of files / own bytes": [row for row in rows if row.name.startswith("load")],
        "peak above the state, MiB": rows,
        "seconds": rows,
    }
    figure, axes = plt.subplots(1, 3, figsize=(15, 4.5))
    for axis, (label, shown) in zip(axes, panels.items()):
        names = list(dict.fromkeys(row.name for row in shown))
        for place, way in enumerate(WAYS):
            runs = [
                [
                    {"b": row.ratio, "p": row.peak, "s": row.seconds}[label[0]]
                    for row in shown
                    if (row.name, row.way) == (name, way)
                ]
                for name in names
            ]
            values = list(map(statistics.median, runs))
            axis.barh(
                [n + 0.4 * place for n in range(len(names))],
                values,
                height=0.38,
                xerr=[
                    [value - min(run) for value, run in zip(values, runs)],
                    [max(run) - value for value, run in zip(values, runs)],
                ],
                error_kw={"elinewidth": 1, "capsize": 2},
                label=way,
                color=COLORS[way],
            )
        axis.set_yticks(
            [n + 0.2 for n in range(len(names))], names if axis is axes[0] or shown is rows else []
        )
        axis.invert_yaxis()
        axis.set_xlabel(label)
        axis.grid(axis="x", alpha=0.3)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncol=len(labels), frameon=False)
    figure.suptitle(title, fontsize=11)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--whole", action="store_true", help="all 24 layers and 151,936 words: 5.9 GB, twice")
    parser.add_argument("--runs", type=int, default=1, help="how often each way runs, by turns (default 1)")
    parser.add_argument("--plot", help="where to write a picture")
    parser.add_argument("--json", help="where to write the figures")
    options = parser.parse_args()
    shape = WHOLE if options.whole else SHAPE
    print(f"torch {torch.__version__}; of the worst rank\n")
    print(f"{'':24s} {'':20s} {'read/own':>8s} {'peak, MiB':>10s} {'seconds':>9s}  values")
    rows = []
    with tempfile.TemporaryDirectory(prefix="checkpoints-") as folder:
        for way in [*WAYS] * options.runs:
            place = Path(folder) / str(len(rows))
            place.mkdir()
            rows += measure(way, str(place), shape)
            shutil.rmtree(place)
    if options.json:
        Path(options.json).write_text(json.dumps([row._asdict() for row in rows], indent=1))
    if options.plot:
        draw(
            rows,
            f"{shape['layers']} decoder layers of Qwen2-0.5B's shape and their AdamW, saved by 4 ranks and "
            f"loaded by others\ntorch {torch.__version__}, gloo, {os.cpu_count()} cores; of the worst rank; "
            f"median of {options.runs} run{'s' * (options.runs > 1)}, with lines from the least to the most",
            options.plot,
        )
        print(f"\n{options.plot} shows it")
    if any(row.wrong for row in rows if row.way == OURS):
        sys.exit("values differ")


if __name__ == "__main__":
    main()
