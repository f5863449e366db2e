"""verl's SFT trainer (0.7 and 0.9) with this package's `CheckpointHandler` in the place of its own."""

from __future__ import annotations

import contextlib
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


# The data of a resumed run, with torchdata's own loader.

STEPS = 4


class Rows(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 2 * STEPS

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.tensor([number, 1]), "attention_mask": torch.ones(2, dtype=torch.int64)}


class Trained:
    """An engine that learns which rows it was trained on."""

    def __init__(self) -> None:
        self.rows: list[list[int]] = []

    def train_batch(self, data: Any) -> Any:
        from verl.utils import tensordict_utils

        self.rows.append(data["input_ids"][:, 0].tolist())
        return tensordict_utils.get_tensordict({}, {"metrics": {"loss": 0.0}})

    def step_profile(self) -> None:
        """As verl 0.9's worker."""

    def save_checkpoint(self, local_path: str, **_: Any) -> None:
        Path(local_path, "rows.json").write_text(json.dumps(self.rows))

    def load_checkpoint(self, path: str) -> None:
        self.rows = json.loads(Path(path, "rows.json").read_text())

    def is_mp_src_rank_with_outputs(self) -> bool:
        return True

    def get_data_parallel_rank(self) -> int:
        return 0

    def get_data_parallel_size(self) -> int:
        return 1

    def get_data_parallel_group(self) -> None:
        return None


def fitted(
    root: Path, workers: int, is_stateful: bool = False, until: int = 1000, **options: Any
) -> list[list[int]]:
    """verl's own loop over three epochs, saved at every step, and ended after `until`; its rows by steps."""
    from omegaconf import OmegaConf
    from torch.utils.data import DistributedSampler
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler
    from verl.trainer import sft_trainer

    class Ended(Exception):
        pass

    class Handler(CheckpointHandler):
        def save_checkpoint(self, step: int) -> Path:
            path = super().save_checkpoint(step)
            if step == until:
                raise Ended
            return path

    # It asks torch.cpu for an accelerator's memory.
    for name in ("aggressive_empty_cache", "log_gpu_memory_usage"):
        setattr(sft_trainer, name, lambda *_, **__: None)
    trainer = object.__new__(sft_trainer.SFTTrainer)
    trainer.engine = trainer.training_client = engine = Trained()
    sampler = StatefulDistributedSampler if is_stateful else DistributedSampler
    trainer.train_sampler = sampler(Rows(), shuffle=True, num_replicas=1, rank=0, drop_last=True)
    trainer.train_dataloader = StatefulDataLoader(
        Rows(), batch_size=2, sampler=trainer.train_sampler, num_workers=workers, drop_last=True
    )
    trainer.val_dataloader, trainer.device_name, trainer.global_batch_size, trainer.rank = None, "cpu", 2, 0
    trainer.total_training_steps, trainer.steps_per_epoch = 3 * STEPS, len(trainer.train_dataloader)
    trainer.save_freq, trainer.test_freq = 1, -1
    trainer.start_profile_step = trainer.end_profile_step = None
    settings = {"use_dynamic_bsz": True, "max_token_len_per_gpu": 8, "micro_batch_size_per_gpu": 2}
    trainer.config = OmegaConf.create(
        {
            "data": {**settings, "pad_mode": "right"},
            "model": {"use_remove_padding": False},
            "trainer": {
                "project_name": "p",
                "experiment_name": "e",
                "logger": ["console"],
                "total_epochs": 3,
            },
        }
    )
    trainer.model_config = type("Model", (), {"tokenizer": type("Tokenizer", (), {"pad_token_id": 0})})
    trainer.ckpt_handler = Handler(engine, trainer.train_dataloader, default_local_dir=root, **options)
    trainer.resume_global_step = trainer.ckpt_handler.load_checkpoint()
    with contextlib.suppress(Ended):
        trainer.fit()
    return engine.rows


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("is_stateful", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_that_is_resumed_at_any_step_trains_on_the_same_rows(
    tmp_path: Path, workers: int, is_stateful: bool
) -> None:
    """At the end of an epoch, too: the next one begins, as it does without a stop.

    A sampler that has a state of its own hears of the end, too: else it gives the rest of the old epoch.
    """
    expected = fitted(tmp_path / "whole", workers, is_stateful)
    assert len(expected) == 3 * STEPS
    assert expected[:STEPS] != expected[STEPS : 2 * STEPS]
    stops = (STEPS - 1, STEPS, STEPS + 1, 2 * STEPS)
    for stop in stops[1:2] if workers else stops:
        root = tmp_path / str(stop)
        assert fitted(root, workers, is_stateful, stop) == expected[:stop]
        assert fitted(root, workers, is_stateful) == expected
    # As a loop wants it that goes on with the epoch that it was in.
    root = tmp_path / "rest"
    fitted(root, workers, is_stateful, STEPS)
    assert fitted(root, workers, is_stateful, at_epoch_end="rest") == [
        *expected[:STEPS],
        *expected[2 * STEPS :],
    ]
