"""Files as verl's own FSDP manager writes them: each rank's shards, loaded on the same ranks or merged."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from test_fsdp1 import trainer_of as fsdp1
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from trainer import Trainer, same

from torch_dcp_backport import hf
from torch_dcp_backport.__main__ import main
from torch_dcp_backport.checkpoint import FSDPCheckpointManager
from torch_dcp_backport.checkpoint._src import verl
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


#: Of a checkpoint that has both kinds of files, and of one that has verl's alone.
BOTH, ALONE = ["model", "optimizer", "extra", "verl"], ["verl"]


def manager_of(trainer: Trainer, contents: list[str], **options: Any) -> FSDPCheckpointManager:
    settings = {"save_contents": contents, "load_contents": contents}
    return FSDPCheckpointManager(
        trainer.model, trainer.optimizer, trainer.schedule, checkpoint_config=settings, trust=True, **options
    )


def sharded(root: Path, seed: int, how: str) -> Trainer:
    return fsdp1(root, seed, False) if how == "FSDP1 without a mesh" else trainer_of(root, seed)


def written(api: Any, root: Path, how: str, contents: list[str]) -> None:
    trainer = sharded(root, 0, how)
    trainer.train(3 + dist.get_rank(), 2)
    manager_of(trainer, contents).save_checkpoint(root / "actor", global_step=1)
    before = trainer.state()
    fresh = sharded(root, 9, how)
    fresh.loader.position = trainer.loader.position
    manager_of(fresh, contents).load_checkpoint(root / "actor")
    assert same(fresh.state(), before)
    states = []
    for each in (trainer, fresh):
        each.train(5, 3)
        states.append(each.state())
    assert same(*states)


@pytest.mark.parametrize("how", ["FSDP2", "FSDP1 without a mesh"])
@pytest.mark.parametrize("contents", [BOTH, ALONE], ids="-".join)
def test_verl_in_save_contents_writes_its_files(ranks, tmp_path: Path, how: str, contents: list[str]) -> None:
    ranks(written, tmp_path, how, contents, world=2)
    names = {path.name for path in (tmp_path / "actor").iterdir()}
    pickles = {verl.name_of(part, 2, rank) for part in ("model", "optim", "extra_state") for rank in (0, 1)}
    own = {"dist_ckpt"} if contents == BOTH else set()
    assert names == {*pickles, *own, "manifest.json", "fsdp_config.json", "huggingface"} - (
        set() if (tmp_path / "actor" / "huggingface").exists() else {"huggingface"}
    )
    # The versions of modules, which their own loading code asks for.
    state = verl.loaded(tmp_path / "actor", "model", 2, 0)
    assert state._metadata[""] == {"version": 1}


def test_files_that_a_load_brings_from_a_store_are_known_as_verls(tmp_path: Path) -> None:
    """Before they are here, no rank can see who saved them."""
    trainer, url = trainer_of(tmp_path), str(tmp_path / "store" / "actor")
    trainer.train(1)
    manager = manager_of(trainer, ALONE)
    manager.save_checkpoint(tmp_path / "actor", url, 1)
    manager.finish()
    shutil.rmtree(tmp_path / "actor")
    fresh = trainer_of(tmp_path, 9)
    manager_of(fresh, ALONE).load_checkpoint(tmp_path / "actor", url)
    before, after = trainer.state(), fresh.state()
    assert all(map(torch.equal, before["parameters"], after["parameters"]))
    assert all(map(torch.equal, before["moments"], after["moments"]))


def test_files_that_nothing_could_load_again_are_not_written(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    with pytest.raises(ValueError, match="verl alone could not be loaded again"):
        FSDPCheckpointManager(trainer.model, trainer.optimizer, checkpoint_config={"save_contents": ["verl"]})


def refused(api: Any, root: Path, optimizer: str) -> str:
    trainer = trainer_of(root, 7)
    if optimizer != "AdamW":
        trainer.optimizer = getattr(torch.optim, optimizer)(trainer.model.parameters(), lr=0.1)
        trainer.schedule = torch.optim.lr_scheduler.StepLR(trainer.optimizer, 1)
    before = [part.clone() for part in trainer.state()["parameters"]]
    state = trainer.optimizer.state_dict()["state"]
    with pytest.raises(CheckpointingException) as caught:
        manager_of(trainer, ALONE).load_checkpoint(root / "actor")
    assert all(map(torch.equal, before, trainer.state()["parameters"]))
    assert trainer.optimizer.state_dict()["state"] == state
    return str(caught.value)


def spoil(folder: Path, what: str) -> str:
    """Make a rank's files those of another training; return the optimizer that they are loaded into."""
    part = "optim" if "optim" in what or "exp" in what or "class" in what else "extra_state"
    path = folder / f"{part}_world_size_2_rank_1.pt"
    state = torch.load(path, weights_only=False)
    if what == "no exp_avg_sq":
        del state["state"][0]["exp_avg_sq"]
    elif what == "no optim.state":
        del state["state"]
    elif what == "no schedule":
        state["lr_scheduler"] = None
    elif what == "no lr_scheduler":
        del state["lr_scheduler"]
    elif what == "half of rng":
        del state["rng"]["random"]
    torch.save(state, path)
    return "SGD" if what == "another class" else "AdamW"


@pytest.mark.parametrize(
    ("what", "says"),
    [
        (
            "another class",
            "the state of another optimizer: optimizer.param_groups.0 (a SGD) (expected dampening, ",
        ),
        ("no exp_avg_sq", "optimizer.state.0 (expected exp_avg, exp_avg_sq, step, got exp_avg, step)"),
        ("no optim.state", "missing in the file: optimizer.state"),
        ("no schedule", "saved without a scheduler; this manager has one"),
        ("no lr_scheduler", "missing in the file: extra_state.lr_scheduler"),
        ("half of rng", "missing in the file: extra_state.rng.random"),
    ],
)
def test_what_is_no_state_of_this_training_is_refused_before_a_write(
    ranks, tmp_path: Path, what: str, says: str
) -> None:
    ranks(as_verl, tmp_path, world=2)
    optimizer = spoil(tmp_path / "actor", what)
    (text,) = set(ranks(refused, tmp_path, optimizer, world=2))
    assert ("ranks 0-1: " if what == "another class" else "rank 1: ") in text
    assert says in text


def as_verl(api: Any, root: Path) -> None:
    trainer = trainer_of(root)
    trainer.train(3, 2)
    write_as_verl(trainer, root / "actor", 2, dist.get_rank())


def test_a_file_of_verl_that_was_changed_is_not_loaded_in_the_place_of_ours(tmp_path: Path, caplog) -> None:
    trainer, folder = trainer_of(tmp_path), tmp_path / "actor"
    trainer.train(1)
    manager = manager_of(trainer, BOTH)
    manager.save_checkpoint(folder, global_step=1)
    state = trainer.state()
    shutil.rmtree(folder / "dist_ckpt")
    fresh = trainer_of(tmp_path, 5)
    fresh.loader.position = trainer.loader.position
    manager_of(fresh, BOTH).load_checkpoint(folder)
    assert same(fresh.state(), state)
    path = folder / "model_world_size_1_rank_0.pt"
    changed = torch.load(path, weights_only=False)
    changed["0.bias"] += 1
    torch.save(changed, path)
    before = fresh.state()["parameters"]
    with pytest.raises(CheckpointingException, match=r"model_world_size_1_rank_0\.pt has "):
        manager_of(fresh, BOTH).load_checkpoint(folder)
    assert all(map(torch.equal, before, fresh.state()["parameters"]))
    # Files that were put there later are none of the save's.
    (folder / "manifest.json").unlink()
    FSDPCheckpointManager(trainer.model).save_checkpoint(tmp_path / "other", global_step=1)
    shutil.copy(tmp_path / "other" / "manifest.json", folder)
    with pytest.raises(CheckpointingException, match="not in the manifest of the save"):
        manager_of(fresh, BOTH).load_checkpoint(folder)


def test_a_step_of_ours_is_no_folder_of_verls(tmp_path: Path) -> None:
    """Also where one of verl's files is gone: nothing of it is loaded unverified."""
    trainer, folder = trainer_of(tmp_path), tmp_path / "global_step_3"
    config = {"save_contents": BOTH, "async_save": True}
    trainer.handler.engine = FSDPCheckpointManager(
        trainer.model, trainer.optimizer, trainer.schedule, checkpoint_config=config
    )
    trainer.train(1)
    trainer.handler.save_checkpoint(3)
    state = trainer.state()
    trainer.train(2)
    trainer.handler.finish()
    options: dict[str, Any] = {"resume_mode": "resume_path", "resume_from_path": folder}
    fresh = trainer_of(tmp_path, 5, **options)
    assert fresh.handler.load_checkpoint() == 3
    fresh_state = fresh.state()
    assert same({**fresh_state, "draws": state["draws"]}, state)
    # verl's files are of the moment of the save, too: training went on while the rest was written.
    other = trainer_of(tmp_path, 6)
    shutil.copytree(folder, tmp_path / "copy", ignore=shutil.ignore_patterns("dist_ckpt", "manifest.json"))
    other.manager.load_checkpoint(tmp_path / "copy")
    assert same({**other.state(), "position": 1, "draws": state["draws"]}, state)
    (folder / "optim_world_size_1_rank_0.pt").unlink()
    with pytest.raises(CheckpointingException, match=r"optim_world_size_1_rank_0\.pt: No such file"):
        trainer_of(tmp_path, 5, trust=True, **options).handler.load_checkpoint()


OPTIMIZERS = ("AdamW", "SGD", "Adamax", "RAdam", "RMSprop")


def test_each_optimizer_takes_its_own_state_alone(tmp_path: Path) -> None:
    """Also where the other's options are a part of its own (Adamax in AdamW), or its states are (RAdam)."""
    manager = {}
    for name in OPTIMIZERS:
        model = nn.Linear(2, 2)
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        settings = {"save_contents": ALONE, "load_contents": ["optimizer"]}
        manager[name] = FSDPCheckpointManager(model, optimizer, checkpoint_config=settings, trust=True)
        manager[name].save_checkpoint(tmp_path / name, global_step=1)
    for name in OPTIMIZERS:
        for other in OPTIMIZERS:
            if name == other:
                manager[name].load_checkpoint(tmp_path / other)
                continue
            with pytest.raises(CheckpointingException, match=r"of another optimizer|other states than this"):
                manager[name].load_checkpoint(tmp_path / other)
