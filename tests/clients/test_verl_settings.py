"""OmegaConf's values, as verl's configurations have them, in managers and in optimizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torch_dcp_backport.checkpoint import FSDPCheckpointManager
from torch_dcp_backport.dist_checkpointing import load_common_state_dict
from torch_dcp_backport.dist_checkpointing.training_state import load_training_state, save_training_state


def manager_of(config: Any) -> FSDPCheckpointManager:
    return FSDPCheckpointManager(nn.Linear(2, 2), checkpoint_config=config)


def test_a_configuration_without_content_is_none() -> None:
    from omegaconf import DictConfig, OmegaConf

    everything = ("model", "optimizer", "extra")
    assert manager_of(DictConfig(None)).checkpoint_save_contents == everything
    assert manager_of(OmegaConf.create({"save_contents": None})).checkpoint_load_contents == everything
    one = OmegaConf.create({"wanted": ["model"], "checkpoint": {"save_contents": "${wanted}"}})
    assert manager_of(one.checkpoint).checkpoint_save_contents == ("model",)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("save_contents: ???", r"checkpoint_config\.save_contents has no value"),
        ("save_contents: [model, '???']", r"checkpoint_config\.save_contents\[1\] has no value"),
        ("load_contents: ${nowhere}", r"checkpoint_config\.load_contents has no value: .*nowhere"),
        ("save_contents: {model: true}", "save_contents={'model': True}: expected a list of model"),
        ("async_save: 'False'", "async_save='False': expected True or False"),
    ],
)
def test_a_setting_without_a_value_is_refused_by_name(text: str, says: str) -> None:
    from omegaconf import OmegaConf

    with pytest.raises(ValueError, match=says):
        manager_of(OmegaConf.create(text))


def trained(betas: Any) -> tuple[nn.Linear, torch.optim.Optimizer]:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), betas=betas)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


def test_lists_in_an_optimizer_are_saved_as_lists(tmp_path: Path) -> None:
    from omegaconf import OmegaConf

    betas = OmegaConf.create({"betas": [0.8, 0.95]}).betas
    (tmp_path / "state").mkdir()
    save_training_state(tmp_path / "state", *trained(betas))
    model, optimizer = trained(betas)
    FSDPCheckpointManager(model, optimizer).save_checkpoint(tmp_path / "step", global_step=1)
    for folder in (tmp_path / "state", tmp_path / "step" / "dist_ckpt"):
        # Without trust: a class of OmegaConf would be refused.
        group = load_common_state_dict(folder)["optimizer"]["param_groups"][0]
        assert type(group["betas"]) is list
        assert group["betas"] == [0.8, 0.95]
    other, its = trained((0.8, 0.95))
    load_training_state(tmp_path / "state", other, its)
    FSDPCheckpointManager(other, its).load_checkpoint(tmp_path / "step")
    assert list(its.param_groups[0]["betas"]) == [0.8, 0.95]
