#!/usr/bin/env python3
"""transfer.reshard beside the best that torch has for it: seconds, memory and bytes of every rank.

    python3 tools/lanes.py run current -- python benchmarks/reshard.py

torch's way is `DTensor.redistribute` where the mesh stays, else `full_tensor()` and a slice. The ways
take turns in the same processes: gloo, one thread per rank, medians. Every result is compared with the whole.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from torch_dcp_backport import transfer
from torch_dcp_backport.regression import meter

STAGING = 16 * 2**20


class Case(NamedTuple):
    """From one layout to another: the ranks of each mesh, as a grid, and the placements."""

    world: int
    old: Any
    before: tuple[Any, ...]
    new: Any
    after: tuple[Any, ...]


PAIRS = [[0, 1], [2, 3]]
CASES = {
    "4 ranks, Shard(0) to Shard(1)": Case(4, [0, 1, 2, 3], (Shard(0),), [0, 1, 2, 3], (Shard(1),)),
    "HSDP (2, 2) to FSDP (4)": Case(4, PAIRS, (Replicate(), Shard(0)), [0, 1, 2, 3], (Shard(0),)),
    "TP 4 to FSDP 2 x TP 2": Case(4, [0, 1, 2, 3], (Shard(1),), PAIRS, (Shard(0), Shard(1))),
    "8 ranks to 4": Case(8, list(range(8)), (Shard(0),), [0, 1, 2, 3], (Shard(0),)),
}
MODELS = {"16 x 16 MiB": [(2048, 2048)] * 16, "1,000 x 64 KiB": [(128, 128)] * 1000}
Tensors = Mapping[int, DTensor]


def cut(value: torch.Tensor, mesh: DeviceMesh, placements: tuple[Any, ...]) -> DTensor:
    here, local = mesh.get_coordinate(), value
    for dim, placement in enumerate(placements if here is not None else ()):
        if isinstance(placement, Shard):
            local = local.chunk(mesh.size(dim), placement.dim)[here[dim]]
    if here is None:
        local = value.new_empty(0)
    return DTensor.from_local(local.clone(), mesh, placements, run_check=False)


def ours(tensors: Tensors, mesh: DeviceMesh, placements: tuple[Any, ...]) -> Tensors:
    return transfer.reshard(tensors, (mesh, placements), staging_bytes=STAGING)  # type: ignore[return-value]


def torchs(tensors: Tensors, mesh: DeviceMesh, placements: tuple[Any, ...]) -> Tensors:
    found = {}
    for key, tensor in tensors.items():
        if tensor.device_mesh == mesh:
            found[key] = tensor.redistribute(mesh, placements)
        else:
            found[key] = cut(tensor.full_tensor(), mesh, placements)
    return found


def measure(
    way: Callable[..., Tensors], tensors: Tensors, values: Mapping[int, torch.Tensor], to: Any
) -> tuple[float, int]:
    """(seconds, peak bytes above what is left behind)."""
    gc.collect()
    # What is free would hide what the call takes.
    meter.trim()
    dist.barrier()
    meter.forget_peak()
    before = meter.resident() or 0
    began = time.perf_counter()
    got = way(tensors, *to)
    dist.barrier()
    seconds = time.perf_counter() - began
    peak = (meter.peak_resident() or 0) - before
    left = 0
    for key, value in values.items():
        expected, local = cut(value, *to).to_local(), got[key].to_local()
        assert torch.equal(local, expected) or not expected.numel()
        left += local.numel() * local.element_size()
    return seconds, peak - left


def run(rank: int, world: int, folder: str, repeats: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/{world}", rank=rank, world_size=world)
    for title, case in CASES.items():
        if case.world != world:
            continue
        meshes = DeviceMesh("cpu", case.old), DeviceMesh("cpu", case.new)
        if case.old == case.new:
            meshes = meshes[0], meshes[0]
        for model, shapes in MODELS.items():
            made = torch.Generator().manual_seed(0)
            values = {number: torch.randn(shape, generator=made) for number, shape in enumerate(shapes)}
            tensors = {key: cut(value, meshes[0], case.before) for key, value in values.items()}
            found: dict[str, list[tuple[float, int]]] = {"ours": [], "torch": []}
            for _ in range(repeats):
                for name, way in (("ours", ours), ("torch", torchs)):
                    found[name].append(measure(way, tensors, values, (meshes[1], case.after)))
                    if name == "ours":
                        report = transfer.last_report()
            assert report is not None
            mine = [*(statistics.median(s for s, _ in found[name]) for name in ("ours", "torch"))]
            peaks = torch.tensor([max(p for _, p in found[name]) for name in ("ours", "torch")])
            dist.all_reduce(peaks, dist.ReduceOp.MAX)
            received = torch.tensor([report.bytes_received])
            dist.all_reduce(received, dist.ReduceOp.MAX)
            if rank == 0:
                a, b = (peak / 2**20 for peak in peaks.tolist())
                print(
                    f"| {title} | {model} | {mine[0]:.3f} | {mine[1]:.3f} | {mine[0] / mine[1]:.2f} "
                    f"| {a:.1f} | {b:.1f} | {received.item() / 2**20:.1f} |",
                    flush=True,
                )
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    print(f"torch {torch.__version__}, staging {STAGING // 2**20} MiB; MiB are of the rank with most")
    print("| case | tensors | ours, s | torch, s | ratio | peak, ours | peak, torch | received, ours |")
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for world in (4, 8):
            mp.start_processes(run, args=(world, folder, repeats), nprocs=world, start_method="fork")


if __name__ == "__main__":
    main()
