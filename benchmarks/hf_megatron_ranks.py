"""What the ranks of benchmarks/hf_megatron.py do: load, compute, save, and measure themselves."""

from __future__ import annotations

import functools
import gc
import os
import shutil
import sys
import threading
import time
import unittest.mock
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Optional

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
PATHS = (ROOT, ROOT / "benchmarks", ROOT / "tests", ROOT / "tests" / "megatron")
sys.path += [str(path) for path in PATHS if str(path) not in sys.path]

from alternatives.megatron_loaders import Mbridge, Verl  # noqa: E402
from decoders import Decoder, differences, expected, spot_of  # noqa: E402
from gpt import forward, gpt  # noqa: E402

from torch_dcp_backport import megatron  # noqa: E402
from torch_dcp_backport.regression import meter  # noqa: E402

MIB = 2**20


class Job(NamedTuple):
    """What the ranks are to do."""

    folder: str
    decoder: Decoder
    wide: Decoder
    repeats: int
    #: Where verl and mbridge are; None where they could not be had.
    beside: Optional[str]
    #: Whether each save takes the place of the one before.
    overwrites: bool


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


def run(rank: int, job: Job) -> None:
    """Everything; the first rank leaves the figures in `figures.pt`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{job.folder}/rendezvous", rank=rank, world_size=4)
    facts: dict[str, Any] = {"logits": logits(job)}
    facts["ways"], facts["own"] = ways(job)
    # What was saved from tp 2 x pp 2, in another cut; the model of the real shape has no heads for tp 4.
    facts["again"] = again(job)
    if rank == 0:
        torch.save(facts, f"{job.folder}/figures.pt")
    dist.barrier()
    dist.destroy_process_group()


def worst(number: float) -> float:
    """The highest of the ranks' numbers."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, number)
    return float(max(found))


def distance(model: torch.nn.Module, decoder: Decoder, path: str) -> float:
    """How far the logits are from transformers', as a part of their largest."""
    found, wanted = forward(model, decoder), torch.load(path)
    return worst(float((found - wanted).abs().max() / wanted.abs().max()) if found.numel() else 0.0)


def logits(job: Job) -> dict[str, float]:
    """Way -> distance, in fp32."""
    found = {}
    (model,) = gpt(job.decoder, 2, 2)
    megatron.load_hf(model, f"{job.folder}/hf")
    found["tp 2 x pp 2"] = distance(model, job.decoder, f"{job.folder}/hf.pt")
    del model
    (model,) = gpt(job.wide, 2, 2)
    megatron.load_hf(model, f"{job.folder}/wide")
    megatron.save_hf(model, f"{job.folder}/wide-saved", like=f"{job.folder}/wide")
    (model,) = gpt(job.wide, 4, 1)
    megatron.load_hf(model, f"{job.folder}/wide-saved")
    found["saved at tp 2 x pp 2, loaded at tp 4"] = distance(model, job.wide, f"{job.folder}/wide.pt")
    return found


def again(job: Job) -> dict[str, int]:
    """Way -> parameters that differ from the files, of the export at another cut."""
    found = {}
    for tp, pp in ((2, 1), (1, 4)):
        (model,) = gpt(job.decoder, tp, pp, dtype=torch.bfloat16)
        megatron.load_hf(model, f"{job.folder}/saved")
        found[f"tp {tp} x pp {pp}"] = int(worst(len(wrong(model, job, tp, pp))))
        del model
    return found


def wrong(model: torch.nn.Module, job: Job, tp: int = 2, pp: int = 2) -> list[str]:
    """Parameters that are not what torch.cat and chunk make of the files."""
    rank, vocab = dist.get_rank(), job.decoder.vocab
    spot = spot_of(job.decoder, "mcore", rank, tp, pp, rows=-(-vocab // (16 * tp)) * 16)
    return differences([model], expected(job.decoder, spot, mapped(f"{job.folder}/hf")))


def mapped(folder: str) -> dict[str, torch.Tensor]:
    """The tensors of a folder, in the page cache."""
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        found.update(load_file(path))
    return found


def ways(job: Job) -> tuple[dict[str, list[Any]], int]:
    """Way -> (seconds, MiB of rank 0, MiB of the others, bytes read of own, values) of each turn."""
    rank, source = dist.get_rank(), f"{job.folder}/hf"
    (model,) = gpt(job.decoder, 2, 2, dtype=torch.bfloat16)
    own = sum(param.nbytes for param in model.parameters())
    how = megatron.Export(file_bytes=200 * MIB, overwrite=True)

    def through_first() -> int:
        # The others do not see the files.
        where = source if rank == 0 else f"{job.folder}/elsewhere"
        return megatron.load_hf(model, where).bytes_read

    def save(folder: str) -> None:
        megatron.save_hf(model, folder, like=source, how=how)

    loads: dict[str, Callable[[], int]] = {}
    #: Way -> what saves, and the folder.
    saves: dict[str, tuple[Callable[[str], None], str]] = {}
    if job.beside:
        verl = Verl(Path(job.beside), model, job.decoder.config)
        bridge = Mbridge(Path(job.beside), model, source)
        loads["load: verl, whole dict on every rank"] = lambda: verl.load(source)
        loads["load: mbridge"] = lambda: bridge.load(source)
    loads["load: load_hf"] = lambda: megatron.load_hf(model, source).bytes_read
    loads["load: load_hf through rank 0"] = through_first
    if job.beside:
        # In verl's layout the rows of linear_qkv lie otherwise: its saver takes what its loader left.
        saves["save: verl, whole dict on rank 0"] = verl.save, "verl"
        saves["save: mbridge"] = bridge.save, "mbridge"
    saves["save: save_hf"] = save, "saved"
    saves["save: save_hf, not waiting for the disk"] = functools.partial(hasty, save), "saved"
    rows: dict[str, list[Any]] = {name: [] for name in (*loads, *saves)}
    for turn in range(job.repeats):
        for name, load in loads.items():
            with torch.no_grad():
                for param in model.parameters():
                    param.fill_(torch.nan)
            row = measured(load, own)
            left = worst(sum(bool(param.isnan().any()) for param in model.parameters()))
            verdict = f"{int(left)} not loaded" if left else ""
            if name.startswith("load: load_hf") and turn == 0:
                assert not wrong(model, job), name
                verdict = "bit-equal"
            rows[name].append((*row, verdict))
        for name, (way, place) in saves.items():
            folder = f"{job.folder}/{place}"
            if rank == 0 and not job.overwrites:
                # A training saves each step into a new folder.
                shutil.rmtree(folder, ignore_errors=True)
            rows[name].append((*measured(functools.partial(way, folder), own), ""))
    return rows, own


def hasty(save: Callable[[str], None], folder: str) -> None:
    """Save as the others do, which leave it to the system when files come to the disk."""
    with unittest.mock.patch.object(os, "fsync"):
        save(folder)


def measured(way: Callable[[], Optional[int]], own: int) -> tuple[float, float, float, float]:
    if dist.get_rank() == 0:
        # What the way before left for the disk is not this one's.
        os.sync()
    dist.barrier()
    watch = Watch()
    watch.start()
    began = time.perf_counter()
    nbytes = way() or 0
    seconds, peak = time.perf_counter() - began, watch.stop()
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (seconds, peak / MIB, nbytes / own))
    others = max(peak for _, peak, _ in found[1:])
    return max(row[0] for row in found), found[0][1], others, max(share for *_, share in found)
