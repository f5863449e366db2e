"""verl 0.5.0's own programs on the CPU, and what stands in for what a CPU has not: flash attention, workers
of data loaders. Its trainers and workers are as they are; a name of theirs is our manager.
"""

from __future__ import annotations

import copy
import functools
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from client import environment, full_state_of, tiny_llama

#: Rows of the data, and of them in a step of all ranks.
ROWS, BATCH, LENGTH = 16, 4, 8


def write_model(folder: Path) -> None:
    """A model of transformers with a tokenizer, as `from_pretrained` opens it."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model = tiny_llama()
    model.load_state_dict(full_state_of(model))
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "<pad>": 2, "<unk>": 3, "a": 4}, "<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)


def without_flash_attention() -> None:
    """verl asks for it by name, and a CPU has none."""
    import transformers

    for kind in (transformers.AutoModelForCausalLM, transformers.AutoModelForTokenClassification):
        opened = kind.from_pretrained.__func__
        if getattr(opened, "is_stand_in", False):
            continue

        def from_pretrained(cls: Any, *args: Any, opened: Any = opened, **options: Any) -> Any:
            options["attn_implementation"] = "eager"
            if options.get("config") is not None:
                options["config"]._attn_implementation = "eager"
            return opened(cls, *args, **options)

        from_pretrained.is_stand_in = True  # type: ignore[attr-defined]
        kind.from_pretrained = classmethod(from_pretrained)


def silent(*_: Any, **__: Any) -> None:
    """In the place of what asks a CPU for an accelerator's memory."""


class Rows(torch.utils.data.Dataset):
    """Rows as verl's SFTDataset gives them."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        draw = torch.Generator().manual_seed(number)
        ids = torch.randint(4, 128, (LENGTH,), generator=draw)
        ones = torch.ones(LENGTH, dtype=torch.long)
        return {
            "input_ids": ids,
            "attention_mask": ones,
            "position_ids": ones.cumsum(0) - 1,
            "loss_mask": ones,
        }


def sft_trainer(model: Path, root: Path, manager: Any, steps: int, **settings: Any) -> Any:
    """verl's FSDPSFTTrainer, with its manager or ours."""
    import cpu_fsdp
    from omegaconf import OmegaConf
    from torch.distributed.device_mesh import init_device_mesh
    from torchdata.stateful_dataloader import StatefulDataLoader
    from verl.trainer import fsdp_sft_trainer
    from verl.utils import hf_tokenizer

    environment()
    cpu_fsdp.install()
    without_flash_attention()
    fsdp_sft_trainer.FSDPCheckpointManager = manager
    fsdp_sft_trainer.log_gpu_memory_usage = silent
    here = {"num_workers": 0, "pin_memory": False}
    fsdp_sft_trainer.StatefulDataLoader = lambda **asked: StatefulDataLoader(**{**asked, **here})
    config = OmegaConf.load(Path(fsdp_sft_trainer.__file__).parent / "config" / "sft_trainer.yaml")
    asked: dict[str, Any] = {
        "data": {"train_batch_size": BATCH, "micro_batch_size_per_gpu": 1, "max_length": LENGTH},
        "model": {"partial_pretrain": str(model), "enable_gradient_checkpointing": False},
        "optim": {"lr": 1e-2},
        "trainer": {
            "default_local_dir": str(root),
            "total_epochs": 2,
            "total_training_steps": steps,
            "logger": ["console"],
            "save_freq": 1,
            "device": "cpu",
            **settings,
        },
    }
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    pair = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("dp", "sp"))
    return fsdp_sft_trainer.FSDPSFTTrainer(
        config=OmegaConf.merge(config, asked),
        device_mesh=mesh,
        ulysses_device_mesh=pair,
        tokenizer=hf_tokenizer(str(model)),
        train_dataset=Rows(),
        val_dataset=Rows(),
    )


def worker(kind: str, model: Path, manager: Any, **checkpoint: Any) -> Any:
    """verl's ActorRolloutRefWorker as an actor, or its CriticWorker, with its model made."""
    import cpu_fsdp
    import verl.workers.fsdp_workers as workers
    from omegaconf import OmegaConf

    environment()
    os.environ.update(WG_BACKEND="ray", RAY_LOCAL_WORLD_SIZE=os.environ["LOCAL_WORLD_SIZE"])
    cpu_fsdp.install()
    without_flash_attention()
    workers.FSDPCheckpointManager = manager
    workers.log_gpu_memory_usage = silent
    folder = Path(workers.__file__).parents[1] / "trainer" / "config"
    single = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    config = copy.deepcopy(generated(folder))
    config.actor_rollout_ref.model.path = config.critic.model.path = str(model)
    config.critic.model.tokenizer_path = str(model)
    config.actor_rollout_ref.actor.strategy = config.critic.strategy = "fsdp2"
    for part in (config.actor_rollout_ref.actor, config.critic):
        part.ppo_micro_batch_size_per_gpu = 1
        part.checkpoint = checkpoint
    config.critic.forward_micro_batch_size_per_gpu = 1
    config.actor_rollout_ref.actor.optim.total_training_steps = 10
    for part in (config.actor_rollout_ref.actor.fsdp_config, config.critic.model.fsdp_config):
        OmegaConf.update(part, "mixed_precision", single, force_add=True)
    made = (
        workers.ActorRolloutRefWorker(config.actor_rollout_ref, role="actor")
        if kind == "actor"
        else workers.CriticWorker(config.critic)
    )
    made.init_model()
    return made


@functools.cache
def generated(folder: Path) -> Any:
    """verl's own configuration, as its programs open it."""
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    with initialize_config_dir(str(folder), version_base=None):
        config = compose("ppo_trainer")
    OmegaConf.set_struct(config, False)
    return config
