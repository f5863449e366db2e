"""verl 0.5.0's trainer and workers as they are, with this package's manager under the name of theirs."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import verl_programs
from client import bits, train
from cpu_fsdp import RELEASE
from pool import Pool

WORLD, STEPS = 2, 6
#: What verl's defaults save, and what its tools read.
BOTH = ["model", "optimizer", "extra", "verl"]


@pytest.fixture(scope="module")
def workers() -> Iterator[Callable[..., list[Any]]]:
    imports = ("torch_dcp_backport.checkpoint", "verl.trainer.fsdp_sft_trainer", "verl.workers.fsdp_workers")
    pool = Pool(WORLD, "torch_dcp_backport.checkpoint", timeout=60.0, limit=300.0, imports=imports)
    yield pool.run
    pool.close()


def theirs() -> Any:
    from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

    return FSDPCheckpointManager


def state_of(trainer: Any) -> dict[str, Any]:
    return {
        "model": bits(trainer.fsdp_model.state_dict()),
        "optimizer": bits(trainer.optimizer.state_dict()["state"]),
        "rate": trainer.lr_scheduler.get_last_lr(),
        # No random number: a data loader draws a seed when it begins, also where a run goes on.
    }


class Stopped(Exception):
    """The process of a run ends here."""


def fitted(api: Any, model: Path, root: Path, is_ours: bool, stop: int) -> dict[str, Any]:
    """Run verl's own loop until its end, or until a step is saved after which the process would end."""
    torch.manual_seed(dist.get_rank())
    manager = api.FSDPCheckpointManager if is_ours else theirs()
    trainer = verl_programs.sft_trainer(model, root, manager, STEPS, max_ckpt_to_keep=2)
    saved = trainer.save_checkpoint

    def save_checkpoint(step: int) -> None:
        saved(step)
        if step == stop:
            raise Stopped

    trainer.save_checkpoint = save_checkpoint
    with contextlib.suppress(Stopped):
        trainer.fit()
    return state_of(trainer)


@pytest.mark.skipif(RELEASE < (2, 6), reason="verl's clipping needs torch 2.6")
@pytest.mark.filterwarnings("ignore")
def test_its_sft_run_resumes_as_if_it_had_not_stopped(workers: Any, tmp_path: Path) -> None:
    verl_programs.write_model(tmp_path / "m")
    expected = workers(fitted, tmp_path / "m", tmp_path / "whole", False, 0)
    ended = workers(fitted, tmp_path / "m", tmp_path / "run", True, 3)
    assert ended != expected
    resumed = workers(fitted, tmp_path / "m", tmp_path / "run", True, 0)
    for found, wanted in zip(resumed, expected):
        assert [name for name in wanted if found[name] != wanted[name]] == []
    names = {path.parent.name for path in (tmp_path / "run").glob("global_step_*/manifest.json")}
    assert names == {"global_step_5", "global_step_6"}


def parts_of(worker: Any) -> tuple[Any, Any, Any]:
    if hasattr(worker, "actor_module_fsdp"):
        return worker.actor_module_fsdp, worker.actor_optimizer, worker.actor_lr_scheduler
    return worker.critic_module, worker.critic_optimizer, worker.critic_lr_scheduler


def facts(worker: Any) -> dict[str, Any]:
    model, optimizer, schedule = parts_of(worker)
    return {
        "model": bits(model.state_dict()),
        "optimizer": bits(optimizer.state_dict()["state"]),
        "rate": schedule.get_last_lr(),
        "draw": torch.rand(1).item(),
    }


def trained(worker: Any, steps: int) -> Any:
    model, optimizer, schedule = parts_of(worker)
    for _ in range(steps):
        train(model, optimizer)
        schedule.step()
    return worker


def saved_and_loaded(api: Any, kind: str, model: Path, root: Path) -> dict[str, torch.Tensor]:
    folders = {name: str(root / name / "global_step_2" / kind) for name in ("theirs", "ours")}
    torch.manual_seed(dist.get_rank())
    own = trained(verl_programs.worker(kind, model, theirs()), 2)
    own.save_checkpoint(folders["theirs"], None, 2, 1)
    expected = facts(own)
    trusting = lambda **options: api.FSDPCheckpointManager(**options, trust=True)  # noqa: E731
    torch.manual_seed(dist.get_rank())
    ours = trained(verl_programs.worker(kind, model, api.FSDPCheckpointManager, save_contents=BOTH), 2)
    ours.save_checkpoint(folders["ours"], None, 2, 1)
    assert facts(ours) == expected
    # Each by each: verl's own manager reads our step, and ours that of verl's.
    for manager, folder in (
        (api.FSDPCheckpointManager, folders["ours"]),
        (theirs(), folders["ours"]),
        (trusting, folders["theirs"]),
    ):
        fresh = verl_programs.worker(kind, model, manager)
        # As its trainers call it; a critic's own default is True.
        fresh.load_checkpoint(folder, del_local_after_load=True)
        assert facts(fresh) == expected
        dist.barrier()
    assert Path(folders["ours"]).is_dir()
    assert Path(folders["theirs"]).is_dir()
    return {name: value.full_tensor() for name, value in parts_of(ours)[0].state_dict().items()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["actor", "critic"])
def test_its_worker_saves_and_loads(workers: Any, tmp_path: Path, kind: str) -> None:
    verl_programs.write_model(tmp_path / "m")
    whole = workers(saved_and_loaded, kind, tmp_path / "m", tmp_path)[0]
    if kind == "actor":
        folder = tmp_path / "ours" / "global_step_2" / kind
        command = [
            "merge",
            "--backend",
            "fsdp",
            "--local_dir",
            str(folder),
            "--target_dir",
            str(tmp_path / "out"),
        ]
        done = subprocess.run(
            [sys.executable, "-m", "verl.model_merger", *command], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert merged_is(tmp_path / "out", whole)


def merged_is(folder: Path, whole: dict[str, torch.Tensor]) -> bool:
    """Whether verl's merger, which writes bfloat16, wrote this model."""
    from transformers import AutoModelForCausalLM

    found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    return found.keys() == whole.keys() and all(
        torch.equal(found[name], value.bfloat16().float()) for name, value in whole.items()
    )
