"""MegatronCheckpointManager with megatron-core's own GPTModel: another TP and PP, files for transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from decoders import Decoder, read_folder
from gpt import gpt
from pool import Pool

from torch_dcp_backport.checkpoint import MegatronCheckpointManager

pytest.importorskip("megatron.core")
transformers = pytest.importorskip("transformers")

DECODER = Decoder("qwen2", vocab=48)


@pytest.fixture(scope="module")
def manager_ranks():
    pool = Pool(4, "torch_dcp_backport.megatron", timeout=60.0, limit=170.0)
    yield pool.run
    pool.close()


def trained(models: list[torch.nn.Module], steps: int) -> torch.optim.Optimizer:
    """Steps whose gradients are the weights: the same at any cut."""
    optimizer = torch.optim.AdamW([param for model in models for param in model.parameters()], lr=0.1)
    step(optimizer, steps)
    return optimizer


def step(optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = param.detach().clone()
        optimizer.step()


def manager_of(models: list[torch.nn.Module], optimizer: Any, hf: str) -> MegatronCheckpointManager:
    contents = ["model", "optimizer", "extra", "hf_model"]
    return MegatronCheckpointManager(
        model=models,
        optimizer=optimizer,
        hf_config=transformers.AutoConfig.from_pretrained(hf),
        checkpoint_config={"save_contents": contents},
    )


def saves(api: Any, hf: str, root: str, cut: tuple[int, int, int]) -> None:
    models = gpt(DECODER, *cut)
    api.load_hf(models, hf)
    manager_of(models, trained(models, 2), hf).save_checkpoint(f"{root}/global_step_2", global_step=2)


def resumes(api: Any, hf: str, root: str, cut: tuple[int, int, int]) -> None:
    models = gpt(DECODER, *cut)
    for param in (param for model in models for param in model.parameters()):
        param.data.fill_(1.0)
    optimizer = trained(models, 0)
    manager = manager_of(models, optimizer, hf)
    manager.load_checkpoint(f"{root}/global_step_2")
    step(optimizer, 1)
    manager.save_checkpoint(f"{root}/global_step_3", global_step=3)
    dist.barrier()


@pytest.mark.parametrize("cut", [(2, 2, 1), (2, 2, 2), (1, 4, 1), (2, 1, 1)])
def test_a_training_goes_on_at_another_cut(manager_ranks, tmp_path: Path, cut: tuple[int, int, int]) -> None:
    hf, root = tmp_path / "hf", tmp_path / "root"
    torch.manual_seed(0)
    made = transformers.AutoConfig.for_model(**{**DECODER.config, "torch_dtype": "float32"})
    model = transformers.AutoModelForCausalLM.from_config(made)
    model.save_pretrained(hf)
    manager_ranks(saves, str(hf), str(root), (2, 2, 1))
    manager_ranks(resumes, str(hf), str(root), cut)
    optimizer = trained([model], 2)
    for number in (2, 3):
        saved = read_folder(root / f"global_step_{number}" / "huggingface")
        expected = model.state_dict()
        assert set(saved) == set(expected)
        assert all(torch.equal(saved[key], expected[key]) for key in saved)
        step(optimizer, 1)
    config = transformers.AutoModelForCausalLM.from_pretrained(root / "global_step_3" / "huggingface").config
    assert config.model_type == "qwen2"
