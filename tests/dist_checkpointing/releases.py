"""Small checkpoints of other releases, kept as files in `releases/`; and how they were made.

    cd tests/dist_checkpointing/releases && TORCH_DCP_BACKPORT=off python ../releases.py torch|megatron|ours

Two ranks each. A relative folder: torch and Megatron write its name into the checkpoint.
"""

from __future__ import annotations

import importlib
import multiprocessing
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

WORLD = 2
FOLDER = Path(__file__).parent / "releases"
OBJECT = {"seed": [1, 2.5, "three"], "state": torch.arange(5, dtype=torch.uint8)}
STEP = 7


def tensors() -> dict[str, torch.Tensor]:
    """The whole tensors: of many dtypes, of no dimension, of no elements, and in any order in memory."""
    values = torch.arange(12).view(6, 2)
    whole = {
        f"of.{name}": values.to(getattr(torch, name))
        for name in ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8")
    }
    whole["of.bool"] = values % 3 == 0
    whole["of.complex64"] = torch.complex(values.float(), -values.float())
    whole["of.float8"] = values.to(torch.float32).to(torch.float8_e4m3fn)
    whole["turned"] = torch.arange(8.0).view(2, 4).t()
    whole["none"] = torch.ones(2, 0)
    whole["large"] = torch.arange(2 * 4500, dtype=torch.int32).view(2, 4500)
    return whole


def known_to(name: str) -> dict[str, torch.Tensor]:
    """Those that a release's checkpoint has."""
    # Megatron divides by the rows of a shard.
    return {key: whole for key, whole in tensors().items() if key != "none" or "megatron" not in name}


def part(whole: torch.Tensor, rank: int) -> torch.Tensor:
    rows = len(whole) // WORLD
    return whole[rank * rows : (rank + 1) * rows]


def by_torch(rank: int, folder: str) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed._tensor import DTensor, Shard, init_device_mesh

    mesh = init_device_mesh("cpu", (WORLD,))
    state: dict[str, Any] = {
        key: DTensor.from_local(part(whole, rank), mesh, [Shard(0)]) for key, whole in tensors().items()
    }
    state |= {"scalar": torch.tensor(2.5), "object": OBJECT, "step": STEP}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder))


def by_name(rank: int, folder: str, name: str) -> None:
    room = importlib.import_module(name)
    Path(folder).mkdir(exist_ok=True)
    dist.barrier()
    state: dict[str, Any] = {
        key: room.ShardedTensor.from_rank_offsets(key, part(whole, rank), (0, rank, WORLD))
        for key, whole in known_to(name).items()
    }
    state["scalar"] = room.ShardedTensor.from_rank_offsets("scalar", torch.tensor(2.5), replica_id=rank)
    state["object"] = room.ShardedObject("object", OBJECT, (1,), (0,), replica_id=rank)
    room.save({**state, "step": STEP}, folder)


def write(rank: int, kind: str, rendezvous: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=WORLD)
    if kind == "torch":
        by_torch(rank, f"torch-{torch.__version__.partition('+')[0]}")
    elif kind == "ours":
        by_name(rank, "ours-1", "torch_dcp_backport.dist_checkpointing")
    else:
        torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
        torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
        version = importlib.import_module("importlib.metadata").version("megatron-core")
        by_name(rank, f"megatron-core-{version}", "megatron.core.dist_checkpointing")
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        context = multiprocessing.get_context("spawn")
        ranks = [
            context.Process(target=write, args=(rank, sys.argv[1], f"{temporary}/rendezvous"))
            for rank in range(WORLD)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        sys.exit(any(process.exitcode for process in ranks))
