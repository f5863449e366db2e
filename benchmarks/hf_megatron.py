#!/usr/bin/env python3
"""load_hf and save_hf on the shape of Qwen2.5-0.5B, tp 2 x pp 2: seconds, memory and bytes of the worst rank.

    python3 tools/lanes.py run 2.6 -- python benchmarks/hf_megatron.py

Beside them what they replace: a whole state dict on every rank, of which each keeps its part, and one whole
dict on rank 0 that is then written. The ways take turns in the same four processes: gloo, one thread each,
bf16, files in the page cache. Memory is private (anonymous and shared) above what it was before the call.
"""

from __future__ import annotations

import argparse
import gc
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT / "tests"), str(ROOT / "tests" / "megatron")]

from decoders import Decoder, differences, expected, models_of, spot_of  # noqa: E402

from torch_dcp_backport import megatron, transfer  # noqa: E402
from torch_dcp_backport.regression import meter  # noqa: E402

MODEL = Decoder("qwen2", 24, 896, 14, 2, 64, 4864, 151936, tied=True)
TINY = Decoder("qwen2", 4, 64, 4, 2, 16, 128, 512, tied=True)
MIB = 2**20


def private() -> int:
    """Bytes of this process that are no file's."""
    with open("/proc/self/status") as lines:
        sizes = dict(line.split(":", 1) for line in lines if line.startswith(("RssAnon", "RssShmem")))
    return sum(int(size.split()[0]) * 1024 for size in sizes.values())


class Watch(threading.Thread):
    """The highest private memory above that at the beginning, looked at every 3 ms."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        gc.collect()
        meter.trim()
        self.base, self.peak, self.over = private(), 0, threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.003):
            self.peak = max(self.peak, private() - self.base)

    def stop(self) -> int:
        self.over.set()
        self.join()
        return max(self.peak, private() - self.base)


def read(folder: str) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    state: dict[str, torch.Tensor] = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        state.update(load_file(path))
    return state


def whole_dict(models: list[Any], folder: str, decoder: Decoder, spot: Any) -> int:
    """Every rank reads all files, makes the fused parameters of all that it holds, and copies them."""
    state = read(folder)
    for model, params in zip(models, expected(decoder, spot, state)):
        actual = dict(model.module.module.named_parameters())
        for name, value in params.items():
            actual[name].data.copy_(value)
    return sum(value.nbytes for value in state.values())


def run(rank: int, folder: str, decoder: Decoder, repeats: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=4)
    source, spot = f"{folder}/hf", spot_of(decoder, "mcore", rank, tp=2, pp=2)
    parallel = megatron.Parallel(spot.tp_rank, 2)
    hf = {key: torch.empty(shape, dtype=torch.bfloat16) for key, shape in decoder.shapes().items()}
    models = models_of(decoder, spot, hf)
    del hf
    own = sum(param.nbytes for model in models for param in model.parameters())

    def load(files: str) -> int:
        # Only the first rank sees the files where it reads for all.
        where = source if files == "shared" or rank == 0 else f"{folder}/elsewhere"
        return megatron.load_hf(models, where, parallel=parallel, files=files).bytes_read

    def save() -> int:
        how = megatron.Export(file_bytes=200 * MIB, overwrite=True)
        megatron.save_hf(models, f"{folder}/saved", like=source, parallel=parallel, how=how)
        return 0

    def gather_and_write() -> int:
        from safetensors.torch import save_file

        config = decoder.config
        state = megatron.gather_hf(models, config=config, parallel=parallel)
        if rank == 0:
            save_file(state, f"{folder}/state.safetensors")
        dist.barrier()
        return 0

    ways: dict[str, Callable[[], int]] = {
        "load, a whole dict on every rank": lambda: whole_dict(models, source, decoder, spot),
        "load_hf, every rank its slices": lambda: load("shared"),
        "load_hf through rank 0": lambda: load("rank0"),
        "save, a whole dict on rank 0": gather_and_write,
        "save_hf": save,
    }
    taken: dict[str, list[tuple[float, int, int, int]]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            dist.barrier()
            watch = Watch()
            watch.start()
            began = time.perf_counter()
            nbytes = way()
            seconds, peak = time.perf_counter() - began, watch.stop()
            figures: list[Any] = [None] * 4
            dist.all_gather_object(figures, (seconds, peak, nbytes / own))
            others = max(peak for _, peak, _ in figures[1:])
            shares = max(share for *_, share in figures)
            taken[name].append((max(row[0] for row in figures), figures[0][1], others, shares))
            if name.startswith("load"):
                hf = read(source)
                assert not differences(models, expected(decoder, spot, hf)), name
                del hf
    if rank == 0:
        staging = transfer.settings.staging_bytes() // MIB
        print(f"torch {torch.__version__}; a rank holds {own / MIB:.0f} MiB; staging {staging} MiB")
        print("| way | seconds | MiB, rank 0 | MiB, others | bytes read / own |")
        print("|---|---|---|---|---|")
        for name, rows in taken.items():
            seconds = ", ".join(f"{row[0]:.2f}" for row in rows)
            peaks = [max(row[place] for row in rows) / MIB for place in (1, 2)]
            share = statistics.median(row[3] for row in rows)
            ratio = f"{share:.2f}" if share else ""
            print(f"| {name} | {seconds} | {peaks[0]:.0f} | {peaks[1]:.0f} | {ratio} |")
    dist.barrier()
    dist.destroy_process_group()


def write_model(folder: Path, decoder: Decoder) -> None:
    """Files of about 200 MiB, through our own writer, from one process."""
    made = torch.Generator().manual_seed(0)
    hf = {
        key: torch.randn(shape, generator=made, dtype=torch.float32).bfloat16()
        for key, shape in decoder.shapes().items()
    }
    spot = spot_of(decoder, "mcore", 0, tp=1, pp=1)
    models = models_of(decoder, spot, hf)
    for model, params in zip(models, expected(decoder, spot, hf)):
        for name, param in model.module.module.named_parameters():  # type: ignore[operator, union-attr]
            param.data.copy_(params[name])
    megatron.save_hf(models, folder, like=decoder.config, how=megatron.Export(file_bytes=200 * MIB))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="only try it")
    parser.add_argument("--folder", help="where the files go; by default a temporary folder")
    args = parser.parse_args()
    decoder = TINY if args.tiny else MODEL
    folder = tempfile.mkdtemp(dir=args.folder)
    try:
        write_model(Path(folder) / "hf", decoder)
        gc.collect()
        meter.trim()
        mp.start_processes(run, args=(folder, decoder, args.repeats), nprocs=4, start_method="spawn")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
