"""Checkpoints of adapters alone: the weights below them are compared, wherever they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import on_ranks
from torch import nn

from torch_dcp_backport.checkpoint import FSDPCheckpointManager
from torch_dcp_backport.dist_checkpointing import CheckpointingException

ALONE = {"save_lora_only": True}


class Adapter:
    """The configuration of adapters, as peft has it on a model."""

    def to_dict(self) -> dict[str, Any]:
        return {"r": 2, "lora_alpha": 4, "peft_type": "LORA", "target_modules": ["base_layer"]}


class Adapted(nn.Module):
    """A linear layer with adapters, under peft's names."""

    def __init__(self, size: int = 8) -> None:
        super().__init__()
        self.base_layer = nn.Linear(size, size, bias=False).requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(size, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, size, bias=False)})


def model_of(*names: str, seed: int = 0) -> nn.ModuleDict:
    torch.manual_seed(seed)
    model = nn.ModuleDict({name: Adapted() for name in names})
    model.peft_config = {"default": Adapter()}
    return model


def manager_of(model: nn.Module) -> FSDPCheckpointManager:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return FSDPCheckpointManager(model, torch.optim.AdamW(trained), checkpoint_config=ALONE)


@pytest.mark.parametrize("change", ["turned", "rows", "value"])
def test_weights_of_the_same_numbers_in_another_order_are_others(tmp_path: Path, change: str) -> None:
    manager_of(model_of("q")).save_checkpoint(str(tmp_path), global_step=1)
    model = model_of("q")
    weight = model["q"].base_layer.weight
    with torch.no_grad():
        if change == "value":
            weight[0, 0] += 1
        else:
            weight.copy_((weight.t() if change == "turned" else weight.flip(0)).clone())
    other = r"nothing was changed.*over other weights: q\.base_layer\.weight has"
    with pytest.raises(CheckpointingException, match=f"(?s){other}"):
        manager_of(model).load_checkpoint(str(tmp_path))
    manager_of(model_of("q")).load_checkpoint(str(tmp_path))


@on_ranks(world=2)
def test_the_stages_of_a_pipeline_have_weights_of_their_own(api: Any, tmp_path: Path) -> None:
    rank = dist.get_rank()
    names = ("a", "b") if rank == 0 else ("c",)
    saved = model_of(*names, seed=rank)
    manager_of(saved).save_checkpoint(str(tmp_path), global_step=1)
    again = model_of(*names, seed=rank)
    with torch.no_grad():
        for name, parameter in again.named_parameters():
            if "lora" in name:
                parameter.zero_()
    manager_of(again).load_checkpoint(str(tmp_path))
    expected = saved.state_dict()
    assert all(value.equal(expected[name]) for name, value in again.state_dict().items())
    if rank == 1:
        with torch.no_grad():
            again["c"].base_layer.weight.zero_()
    with pytest.raises(CheckpointingException, match=r"over other weights: c\.base_layer\.weight has"):
        manager_of(again).load_checkpoint(str(tmp_path))
