#!/usr/bin/env python3
"""The bytes that ranks read of a checkpoint which they cut otherwise, alone and together.

    python3 tools/lanes.py run current -- python benchmarks/reads.py

Matrices that 4 ranks saved by rows are loaded by columns with `dist_checkpointing.load`, with
`read_together=False` and True in turn. A run is the bytes of a row that one rank wants. What is read is
counted by the system (`rchar` of /proc/self/io), of all ranks, over the bytes of their parts. Seconds are
those of the slowest rank, the median of the turns. gloo, one thread per rank; the files are in the page
cache, where reading together costs time. Of disks this tells how often they are asked for the same bytes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
PATHS = [str(path) for path in (ROOT, ROOT / "benchmarks", ROOT / "tests", ROOT / "tests/dist_checkpointing")]
sys.path += [path for path in PATHS if path not in sys.path]

from checkpoints import measured  # noqa: E402

from torch_dcp_backport import dist_checkpointing as room  # noqa: E402
from torch_dcp_backport.regression import launch  # noqa: E402

MIB = 2**20


def parts(world: int, row_bytes: int, mib: int, dim: int) -> tuple[dict[str, Any], torch.Tensor]:
    """This rank's part of a matrix cut along an axis, with zeros, and the values that belong there."""
    rank, columns = dist.get_rank(), row_bytes // 4
    shape = (mib * MIB // row_bytes, columns)
    whole = torch.arange(shape[0] * shape[1], dtype=torch.int32).view(shape)
    values = whole.chunk(world, dim)[rank].contiguous()
    part = room.ShardedTensor.from_rank_offsets("w", torch.zeros_like(values), (dim, rank, world))
    return {"w": part}, values


def save(_: Any, folder: str, world: int, row_bytes: int, mib: int) -> dict[str, float]:
    state, values = parts(world, row_bytes, mib, 0)
    state["w"].data.copy_(values)
    room.save(state, folder)
    return {}


def load(_: Any, folder: str, world: int, row_bytes: int, mib: int, turns: int) -> dict[str, list[float]]:
    torch.set_num_threads(1)
    found: dict[str, list[float]] = {"asked": [], "seconds": []}
    state, values = parts(world, row_bytes, mib, 1)
    for together in (False, True) * (turns + 1):
        state["w"].data.zero_()
        one = measured(lambda together=together: room.load(state, folder, read_together=together))
        assert torch.equal(state["w"].data, values), "wrong values"
        found["asked"].append(one["asked"] / values.nbytes)
        found["seconds"].append(one["seconds"])
    # Without the first turn, in which connections are made.
    return {name: listed[2:] for name, listed in found.items()}


def ways_of(reports: list[launch.RankReport]) -> list[tuple[float, float]]:
    """(bytes read over bytes of the parts, seconds) alone, and together."""
    failed = [report for report in reports if report.ending != "finished"]
    if failed:
        sys.exit(str(failed[0]))
    rows = []
    for way in range(2):
        asked = [statistics.median(report.result["asked"][way::2]) for report in reports]
        turns = zip(*(report.result["seconds"][way::2] for report in reports))
        rows.append((sum(asked) / len(asked), statistics.median(map(max, turns))))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--mib", type=int, default=128, help="of the matrix")
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    environment = {"PYTHONPATH": os.pathsep.join([*PATHS, os.environ.get("PYTHONPATH", "")])}
    print(f"torch {torch.__version__}, {options.ranks} ranks, {options.mib} MiB\n")
    print(f"{'run of a rank':14s} {'read/share':>21s} {'seconds':>21s}")
    print(f"{'':14s} {'alone':>10s} {'together':>10s} {'alone':>10s} {'together':>10s} {'ratio':>6s}")
    for run in (1024, 4096, 65536):
        with tempfile.TemporaryDirectory(prefix="reads-") as folder:
            asked = {"folder": folder, "world": options.ranks, "row_bytes": run * options.ranks}
            asked["mib"] = options.mib
            jobs = [
                launch.Job("save", "reads:save", options.ranks, asked),
                launch.Job("load", "reads:load", options.ranks, {**asked, "turns": options.turns}),
            ]
            results = launch.run(launch.DIRECT, jobs, preload=("reads",), environment=environment)
        (read, seconds), (read_both, seconds_both) = ways_of(results["load"])
        print(
            f"{run:8d} bytes {read:10.2f} {read_both:10.2f} {seconds:10.2f} {seconds_both:10.2f}"
            f" {seconds_both / seconds:6.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
