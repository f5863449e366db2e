"""verl's own FSDPCheckpointManager and ours in its place, by the calls of verl's trainers.

What is on disk, what comes back, what is removed.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from client import bits, environment, full_state_of, tiny_llama, train
from pool import Pool
from torch.distributed.device_mesh import init_device_mesh

WORLD, KEEP = 2, 2
THEIRS, OURS = "verl.utils.checkpoint", "torch_dcp_backport.checkpoint"


@pytest.fixture(scope="module")
def workers():
    pool = Pool(WORLD, OURS, timeout=60.0, limit=240.0)
    yield pool.run
    pool.close()


class Tokenizer:
    def save_pretrained(self, folder: str) -> None:
        (Path(folder) / "tokenizer.json").write_text("{}")


class Worker:
    """As verl's workers make theirs, of FSDP2."""

    def __init__(self, package: str) -> None:
        from importlib import import_module

        from omegaconf import OmegaConf
        from verl.utils.fsdp_utils import apply_fsdp2

        self.module = import_module(f"{package}.fsdp_checkpoint_manager" if package == THEIRS else package)
        self.names = import_module(f"{package}.checkpoint_manager" if package == THEIRS else package)
        self.model = tiny_llama()
        self.model.load_state_dict(full_state_of(self.model))
        # As `from_pretrained` leaves it.
        self.model.config.architectures = ["LlamaForCausalLM"]
        apply_fsdp2(
            self.model, {"mesh": init_device_mesh("cpu", (WORLD,)), "reshard_after_forward": True}, {}
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        # The lists of verl's configuration, of which one refers to the other.
        contents = "{save_contents: [model, optimizer, extra, hf_model], load_contents: '${.save_contents}'}"
        self.manager = self.module.FSDPCheckpointManager(
            model=self.model,
            optimizer=self.optimizer,
            lr_scheduler=self.schedule,
            processing_class=Tokenizer(),
            checkpoint_config=OmegaConf.create(contents),
        )

    def train(self) -> None:
        train(self.model, self.optimizer)
        self.schedule.step()

    def save(self, root: str, step: int) -> None:
        """As verl's trainers: the actor's part, the data loader's, the tracker."""
        folder = os.path.join(root, f"global_step_{step}")
        self.manager.save_checkpoint(
            local_path=os.path.join(folder, "actor"),
            hdfs_path=None,
            global_step=step,
            max_ckpt_to_keep=KEEP,
        )
        if dist.get_rank() == 0:
            torch.save({"step": step}, os.path.join(folder, "data.pt"))
            Path(self.names.get_checkpoint_tracker_filename(root)).write_text(str(step))
        dist.barrier()

    def load(self, root: str) -> str:
        folder = self.names.find_latest_ckpt_path(root)
        self.manager.load_checkpoint(
            local_path=os.path.join(folder, "actor"), hdfs_path=None, del_local_after_load=False
        )
        return os.path.basename(folder)

    def state(self) -> dict[str, Any]:
        """What has to come back; drawing from the generators tells their states."""
        return {
            "model": bits(self.model.state_dict()),
            "optimizer": bits(self.optimizer.state_dict()["state"]),
            "rate": self.schedule.get_last_lr(),
            "draws": [torch.rand(1).item(), random.random(), float(numpy.random.rand())],
        }


def runs(api: Any, package: str, root: str) -> list[dict[str, Any]]:
    """Train and save four steps; stop, resume, and go on. The states at the end of both."""
    environment()
    worker = Worker(package)
    for step in (1, 2, 3, 4):
        torch.manual_seed(10 * step + dist.get_rank())
        random.seed(step)
        numpy.random.seed(step)
        worker.train()
        worker.save(root, step)
    finish = getattr(worker.manager, "finish", lambda: None)
    finish()
    saved = worker.state()
    fresh = Worker(package)
    assert fresh.load(root) == "global_step_4"
    loaded = fresh.state()
    fresh.train()
    fresh.manager.finish() if package == OURS else None
    return [saved, loaded, fresh.state()]


def goes_on(api: Any, package: str, root: str) -> None:
    """Save after a restart, which theirs forgets its steps by."""
    worker = Worker(package)
    worker.load(root)
    for step in (5, 6):
        worker.train()
        worker.save(root, step)
    if package == OURS:
        worker.manager.finish()
    dist.barrier()


def actors(root: Path) -> list[int]:
    return sorted(int(path.parent.name.rpartition("_")[2]) for path in root.glob("global_step_*/actor"))


def files_in(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


@pytest.fixture(scope="module")
def both(workers, tmp_path_factory) -> dict[str, tuple[Path, list[Any]]]:
    """Of each manager: its root, and what its ranks said."""
    found = {}
    for package in (THEIRS, OURS):
        root = tmp_path_factory.mktemp(package)
        found[package] = root, workers(runs, package, str(root))
    return found


def test_what_comes_back(both) -> None:
    (_, theirs), (_, ours) = both[THEIRS], both[OURS]
    for saved, loaded, _ in (*theirs, *ours):
        assert loaded == saved
    assert ours == theirs


def test_what_is_on_disk(both) -> None:
    from safetensors.torch import load_file

    theirs, ours = (files_in(both[package][0] / "global_step_4" / "actor") for package in (THEIRS, OURS))
    for name in ("fsdp_config.json", "huggingface/tokenizer.json", "huggingface/config.json"):
        facts = [json.loads(files.pop(name)) for files in (theirs, ours)]
        for one in facts:
            # Theirs says bfloat16, whatever the weights are.
            one.pop("dtype", None)
            one.pop("torch_dtype", None)
        assert facts[0] == facts[1]
    weights = "huggingface/model.safetensors"
    loaded = [load_file(both[package][0] / "global_step_4/actor" / weights) for package in (THEIRS, OURS)]
    assert set(loaded[0]) == set(loaded[1])
    assert all(torch.equal(value, loaded[1][key]) for key, value in loaded[0].items())
    # The rest of theirs are pickles of each rank; of ours one sharded checkpoint, and the manifest.
    pickles = {
        f"{part}_world_size_{WORLD}_rank_{rank}.pt"
        for part in ("model", "optim", "extra_state")
        for rank in range(WORLD)
    }
    assert set(theirs) - {weights, "huggingface/generation_config.json"} == pickles
    assert {name.partition("/")[0] for name in set(ours) - {weights}} == {"dist_ckpt", "manifest.json"}


def test_what_is_removed(workers, both) -> None:
    roots = {package: root for package, (root, _) in both.items()}
    assert {package: actors(root) for package, root in roots.items()} == {THEIRS: [3, 4], OURS: [3, 4]}
    for package, root in roots.items():
        workers(goes_on, package, str(root))
    # After a restart theirs counts what the new process saves, and the others stay.
    assert {package: actors(root) for package, root in roots.items()} == {THEIRS: [3, 4, 5, 6], OURS: [5, 6]}
