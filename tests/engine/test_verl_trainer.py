"""verl 0.7's SFT trainer with this package's `CheckpointHandler` in the place of its own, by one name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import test_engine_verl
import torch
from test_engine_verl import stepped, weights_of, worker_of

from torch_dcp_backport.checkpoint import CheckpointHandler

workers = test_engine_verl.workers


class Loader:
    """The position of a StatefulDataLoader."""

    def __init__(self) -> None:
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def trainer_of(root: Path, worker: Any) -> Any:
    """verl's own trainer, as far as it makes its handler."""
    from omegaconf import OmegaConf
    from verl.trainer import sft_trainer

    sft_trainer.CheckpointHandler = CheckpointHandler
    trainer = object.__new__(sft_trainer.SFTTrainer)
    settings = {"default_local_dir": str(root), "max_ckpt_to_keep": 2, "resume_mode": "auto"}
    empty = {"resume_from_path": None, "default_hdfs_dir": None}
    model = {"lora_rank": 8, "lora_alpha": 16}
    trainer.config = OmegaConf.create({"trainer": {**settings, **empty}, "model": model})
    trainer.rank, trainer.engine, trainer.train_dataloader = 0, worker.engine, Loader()
    trainer._build_ckpt_handler()
    return trainer


def run(api: Any, folder: Path, root: Path) -> None:
    trainer = trainer_of(root, worker := worker_of(folder, "sft"))
    assert trainer.ckpt_handler.load_checkpoint() == 0
    for step in (1, 2, 3):
        stepped(worker, "sft", step)
        trainer.train_dataloader.position = step
        trainer.ckpt_handler.save_checkpoint(step=step)
    trainer.ckpt_handler.finish()
    stepped(worker, "sft", 4)
    resumed = trainer_of(root, again := worker_of(folder, "sft"))
    assert resumed.ckpt_handler.load_checkpoint() == 3
    assert resumed.train_dataloader.position == 3
    stepped(again, "sft", 4)
    expected = weights_of(worker)
    assert all(torch.equal(value, expected[name]) for name, value in weights_of(again).items())


@pytest.mark.filterwarnings("ignore")
def test_it_resumes(workers: Any, tmp_path: Path) -> None:
    test_engine_verl.test_qwen.write(tmp_path / "m")
    workers(run, tmp_path / "m", tmp_path / "run")
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names == {"global_step_2", "global_step_3", "latest_checkpointed_iteration.txt"}
    facts = json.loads((tmp_path / "run" / "global_step_3" / "lora_train_meta.json").read_text())
    assert facts == {"r": 8, "lora_alpha": 16, "task_type": "CAUSAL_LM"}
