"""Files as verl's own FSDP manager writes them: each rank's shards, loaded on the same ranks or merged."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from trainer import Trainer, same

from torch_dcp_backport import hf
from torch_dcp_backport.__main__ import main
from torch_dcp_backport.checkpoint import verl
from torch_dcp_backport.dist_checkpointing import CheckpointingException

try:
    from torch.distributed.fsdp import fully_shard
except ImportError:  # torch 2.4 and 2.5
    from torch.distributed._composable.fsdp import fully_shard

MODEL = {"load_contents": ["model"]}


def trainer_of(root: Path, seed: int = 0, shape: tuple[int, ...] = (), **options: Any) -> Trainer:
    """Of rows that no number of ranks divides; sharded where there are ranks."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 7))
    if dist.is_initialized():
        names = ("ddp", "fsdp") if len(shape) == 2 else ("fsdp",)
        mesh = init_device_mesh("cpu", shape or (dist.get_world_size(),), mesh_dim_names=names)
        for layer in [*model, model]:
            fully_shard(layer, mesh=mesh)
    trainer = Trainer(root, model, **options)
    trainer.manager.trust = True
    return trainer


def write_as_verl(trainer: Trainer, folder: Path, world: int, rank: int) -> None:
    """What `FSDPCheckpointManager.save_checkpoint` of verl 0.5.0 to 0.9.1 does with FSDP2."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = {"cpu": torch.get_rng_state(), "numpy": numpy.random.get_state(), "random": random.getstate()}
    parts = {
        "model": trainer.model.state_dict(),
        "optim": trainer.optimizer.state_dict(),
        "extra_state": {"lr_scheduler": trainer.schedule.state_dict(), "rng": rng},
    }
    for name, part in parts.items():
        torch.save(part, folder / f"{name}_world_size_{world}_rank_{rank}.pt")


def save(api: Any, root: Path, shape: tuple[int, ...] = ()) -> dict[str, torch.Tensor]:
    rank, world = dist.get_rank(), dist.get_world_size()
    trainer = trainer_of(root, shape=shape)
    trainer.train(3 + rank, 2)
    write_as_verl(trainer, root / "actor", world, rank)
    whole = {key: value.full_tensor() for key, value in trainer.model.state_dict().items()}
    before = trainer.state()
    dist.barrier()
    fresh = trainer_of(root, 9, shape)
    fresh.loader.position = trainer.loader.position
    fresh.manager.load_checkpoint(root / "actor")
    assert same(fresh.state(), before)
    # It goes on as the other one does.
    states = []
    for each in (trainer, fresh):
        each.train(5, 3)
        states.append(each.state())
    assert same(*states)
    dist.barrier()
    return whole


@pytest.mark.parametrize("shape", [(), (2, 2)], ids=["FSDP", "HSDP"])
def test_the_same_ranks_go_on_from_them(ranks, tmp_path: Path, shape: tuple[int, ...]) -> None:
    if shape and torch.__version__.startswith("2.4"):
        pytest.skip("torch 2.4 has no state_dict() of a module under HSDP, so there are no such files")
    world = 4 if shape else 3
    whole, *_ = ranks(save, tmp_path, shape, world=world)
    # One process merges them, too.
    alone = trainer_of(tmp_path, 5, config=MODEL)
    alone.manager.load_checkpoint(tmp_path / "actor")
    for key, value in alone.model.state_dict().items():
        assert torch.equal(value, whole[key])
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_text('{"model_type": "linear"}')
    command = ["checkpoint", "export", str(tmp_path / "actor"), str(tmp_path / "out")]
    command += ["--like", str(tmp_path / "config")]
    assert main(command) == 1
    assert not (tmp_path / "out").exists()
    assert main([*command, "--trust"]) == 0
    assert set(hf.Folder(tmp_path / "out").tensors) == set(whole)
    exported = {key: torch.zeros_like(value) for key, value in whole.items()}
    hf.load_state_dict(exported, tmp_path / "out")
    assert all(torch.equal(value, whole[key]) for key, value in exported.items())


def other_ranks(api: Any, root: Path, what: str) -> str:
    trainer = trainer_of(root, 7, config=MODEL if what in ("model", "odd") else None)
    trainer.manager.trust = what != "untrusted"
    before = [part.clone() for part in trainer.state()["parameters"]]
    if what == "odd" and dist.get_rank() == 1:
        trainer.manager.checkpoint_load_contents = ("model", "extra")
    try:
        trainer.manager.load_checkpoint(root / "actor")
    except CheckpointingException as error:
        assert all(map(torch.equal, before, trainer.state()["parameters"]))
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("model", ""),
        ("all", "saved by 1 ranks of verl's own manager, and loaded by 2"),
        ("untrusted", "trust=True reads them"),
        ("odd", "saved by 1 ranks of verl's own manager"),
        ("cut", "model_world_size_1_rank_0.pt cannot be read"),
        ("shape", "wrong shape: 0.weight"),
    ],
)
def test_other_ranks_get_the_model_or_one_error(ranks, tmp_path: Path, what: str, says: str) -> None:
    trainer = trainer_of(tmp_path)
    if what == "shape":
        trainer.model[0] = nn.Linear(6, 9)
    write_as_verl(trainer, tmp_path / "actor", 1, 0)
    path = tmp_path / "actor" / "model_world_size_1_rank_0.pt"
    if what == "cut":
        path.write_bytes(path.read_bytes()[:-100])
    asked = "model" if what in ("cut", "shape") else what
    (text,) = set(ranks(other_ranks, tmp_path, asked, world=2))
    assert bool(text) == bool(says), text
    assert says in text


def test_saves_by_different_ranks_in_one_folder_are_an_error(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    for world in (1, 2):
        write_as_verl(trainer, tmp_path / "actor", world, 0)
    with pytest.raises(CheckpointingException, match=r"saves by \[1, 2\] ranks"):
        trainer.manager.load_checkpoint(tmp_path / "actor")
    (tmp_path / "actor" / "model_world_size_1_rank_0.pt").unlink()
    with pytest.raises(CheckpointingException, match=r"model_world_size_2_rank_1\.pt cannot be read"):
        verl.model_of(tmp_path / "actor", 2)


def test_a_handler_goes_on_from_one_that_is_named(tmp_path: Path) -> None:
    trainer, folder = trainer_of(tmp_path), tmp_path / "global_step_7"
    trainer.train(1)
    write_as_verl(trainer, folder, 1, 0)
    torch.save(trainer.loader.state_dict(), folder / "data_0.pt")
    state = trainer.state()
    with pytest.raises(CheckpointingException, match=r"no step in .* is good"):
        trainer_of(tmp_path, trust=True).handler.load_checkpoint()
    options: dict[str, Any] = {"resume_mode": "resume_path", "resume_from_path": folder}
    resumed = trainer_of(tmp_path, 5, trust=True, **options)
    assert resumed.handler.load_checkpoint() == 7
    assert same(resumed.state(), state)
    resumed.handler.save_checkpoint(8)
    fresh = trainer_of(tmp_path)
    assert fresh.handler.load_checkpoint() == 8
