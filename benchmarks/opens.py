#!/usr/bin/env python3
"""The files that each rank opens, looks at and reads in a load, and in a save of a run with many steps.

    python3 tools/lanes.py run current -- python benchmarks/opens.py

Ranks are processes with one thread, gloo. The model is FSDP2's with AdamW, loaded on the mesh that saved it:
by `dist_checkpointing.load`, by `CheckpointHandler.load_checkpoint` (with and without checksums), and as a
folder of Hugging Face files by `hf.load_state_dict`. Opens and listings are Python's audit events, looks are
`os.stat` and `os.lstat`, reads and bytes are those of the system (`syscr`, `rchar` of /proc/self/io). Files
that torch maps (safetensors) are counted as looks, which come with them. `--saves` also tells the file calls
of one save of a handler, by the steps that stay.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
PATHS = [str(path) for path in (ROOT, ROOT / "benchmarks", ROOT / "tests")]
sys.path += [path for path in PATHS if path not in sys.path]

from file_calls import counted  # noqa: E402

from torch_dcp_backport import hf  # noqa: E402
from torch_dcp_backport.checkpoint import CheckpointHandler, FSDPCheckpointManager  # noqa: E402
from torch_dcp_backport.dist_checkpointing.training_state import (  # noqa: E402
    load_training_state,
    save_training_state,
)
from torch_dcp_backport.regression import launch  # noqa: E402

LAYERS, WIDTH = 20, 64
FIELDS = ("opens", "files", "looks", "listings", "reads", "KiB")


# --- on the ranks ---


def training() -> tuple[Any, Any]:
    """A sharded model, and its optimizer after a step."""
    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError:
        from torch.distributed._composable.fsdp import fully_shard
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return model, optimizer


def system_reads() -> tuple[int, int]:
    rows = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(rows["syscr"]), int(rows["rchar"])


def measured(root: Path, call: Callable[[], object]) -> dict[str, float]:
    dist.barrier()
    with counted(root) as calls:
        reads, nbytes = system_reads()
        call()
        reads_now, nbytes_now = system_reads()
    opens, looks, listings = (sum(counts.values()) for counts in calls)
    found = (opens, len(calls.opens), looks, listings, reads_now - reads, (nbytes_now - nbytes) / 1024)
    return dict(zip(FIELDS, found))


def loads(_: Any, folder: str, count: int) -> dict[str, dict[str, float]]:
    root, found = Path(folder), {}
    model, optimizer = training()
    state, run, weights = root / "state", root / "run", root / "hf"
    if not dist.get_rank():
        state.mkdir()
    dist.barrier()
    save_training_state(str(state), model, optimizer)
    found["dist_checkpointing"] = measured(state, lambda: load_training_state(str(state), model, optimizer))
    for verify in (False, True):
        manager = FSDPCheckpointManager(model, optimizer)
        handler = CheckpointHandler(manager, default_local_dir=run, verify=verify)
        handler.save_checkpoint(1)
        found["handler" + (", checksums" if verify else "")] = measured(run, handler.load_checkpoint)
    tensors = model.state_dict()
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    hf.save_state_dict(
        tensors, weights, like={"model_type": "made"}, how=hf.Export(file_bytes=max(nbytes // count, 1))
    )
    files = len(list(weights.glob("*.safetensors")))
    found[f"hf, {files} files"] = measured(weights, lambda: hf.load_state_dict(tensors, weights))
    return found


def saves(_: Any, folder: str, steps: int) -> dict[str, float]:
    """The third save of a process in a run with so many steps that stay."""
    from torch_dcp_backport.checkpoint._src import manifest

    root = Path(folder)
    model = torch.nn.Linear(WIDTH, WIDTH)
    manager = FSDPCheckpointManager(model, torch.optim.AdamW(model.parameters()))
    handler = CheckpointHandler(manager, default_local_dir=root)
    handler.save_checkpoint(1)
    first = root / "global_step_1"
    content = manifest.read(first)
    for step in range(2, steps + 1):
        shutil.copytree(first, root / f"global_step_{step}")
        manifest.write(root / f"global_step_{step}", dataclasses.replace(content, step=step, order=step))
    for path in root.glob("*/manifest.json"):
        os.utime(path, (0, 0))
    for step in (steps + 1, steps + 2):
        handler.save_checkpoint(step)
    return measured(root, lambda: handler.save_checkpoint(steps + 3))


# --- the tables ---


def run(name: str, world: int, **arguments: Any) -> list[Any]:
    environment = {"PYTHONPATH": os.pathsep.join([*PATHS, os.environ.get("PYTHONPATH", "")])}
    with tempfile.TemporaryDirectory(prefix="opens-") as folder:
        job = launch.Job(name, f"opens:{name}", world, {"folder": folder, **arguments})
        reports = launch.run(launch.DIRECT, [job], preload=("opens",), environment=environment)[name]
    failed = [report for report in reports if report.ending != "finished"]
    if failed:
        sys.exit(str(failed[0]))
    return [report.result for report in reports]


def row(label: str, found: dict[str, float]) -> str:
    return f"{label:40s}" + "".join(f"{found[name]:10.0f}" for name in FIELDS)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--files", type=int, default=30, help="Hugging Face files")
    parser.add_argument("--saves", type=int, nargs="*", default=[5, 200], help="steps that stay")
    options = parser.parse_args()
    print(f"torch {torch.__version__}\n\n{'':40s}" + "".join(f"{name:>10s}" for name in FIELDS))
    for world in options.ranks:
        results = run("loads", world, count=options.files)
        for kind in results[0]:
            first, *others = (result[kind] for result in results)
            most = {name: max(other[name] for other in others) for name in FIELDS}
            print(row(f"{kind}; {world} ranks, the first", first))
            print(row("    most of any other", most), flush=True)
    for steps in options.saves:
        print(row(f"a save, {steps} steps stay", run("saves", 1, steps=steps)[0]), flush=True)


if __name__ == "__main__":
    main()
