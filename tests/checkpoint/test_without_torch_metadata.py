"""`torch_metadata=False` of a handler and of managers: it reaches each `.metadata`, and all loads of ours."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import fully_shard
from pool import on_ranks
from torch import nn
from trainer import Loader, Trainer

from torch_dcp_backport.checkpoint import (
    CheckpointHandler,
    FSDPCheckpointManager,
    MegatronCheckpointManager,
)
from torch_dcp_backport.dist_checkpointing import CheckpointingException, verify

#: The first bytes of a `.metadata` without torch's index.
ALONE = b"\x80\x03cthis checkpoint was saved with torch_metadata=False"


def are_alone(root: Path) -> list[bool]:
    return [path.read_bytes().startswith(ALONE) for path in sorted(root.rglob(".metadata"))]


class Average:
    """An object of the user's, whose tensor is saved as a sharded checkpoint of its own."""

    def __init__(self, value: float) -> None:
        self.value = torch.full((5,), value)

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_handlers_option_reaches_every_part_of_a_step(tmp_path: Path, is_async: bool) -> None:
    config = {"async_save": is_async}
    trainer = Trainer(tmp_path, config=config, torch_metadata=False, state={"ema": Average(3.0)})
    trainer.train()
    trainer.handler.save_checkpoint(1)
    trainer.handler.finish()
    assert are_alone(tmp_path) == [True, True]
    average = Average(0.0)
    other = Trainer(tmp_path, state={"ema": average})
    assert other.handler.load_checkpoint() == 1
    before, after = trainer.state(), other.state()
    assert all(map(torch.equal, before["parameters"], after["parameters"]))
    assert torch.equal(average.value, torch.full((5,), 3.0))
    assert [verify(path.parent) for path in tmp_path.rglob(".metadata")] == [[], []]
    other.handler.save_checkpoint(2)
    assert are_alone(tmp_path) == [True, True, False, False]


def test_a_managers_option_reaches_its_checkpoint(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    manager = FSDPCheckpointManager(model, torch_metadata=False)
    manager.save_checkpoint(tmp_path / "alone")
    CheckpointHandler(manager, default_local_dir=tmp_path / "run").save_checkpoint(1)
    assert are_alone(tmp_path) == [True, True]
    fresh = nn.Linear(3, 2)
    FSDPCheckpointManager(fresh).load_checkpoint(tmp_path / "alone")
    assert torch.equal(fresh.weight, model.weight)


@pytest.mark.parametrize("value", ["False", 0, None])
def test_only_a_bool_is_taken(tmp_path: Path, value: Any) -> None:
    text = re.escape(f"torch_metadata={value!r}: expected a bool, got a {type(value).__name__}")
    with pytest.raises(ValueError, match=text):
        CheckpointHandler(None, Loader(), default_local_dir=tmp_path, torch_metadata=value)
    with pytest.raises(ValueError, match=text):
        FSDPCheckpointManager(nn.Linear(2, 2), torch_metadata=value)
    with pytest.raises(ValueError, match=text):
        MegatronCheckpointManager(None, None, model=nn.Linear(2, 2), torch_metadata=value)


@on_ranks(world=2)
def test_shards_of_two_ranks_come_back(api: Any, tmp_path: Path) -> None:
    def made(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4))
        fully_shard(model)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    model, optimizer = made(0)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    manager = FSDPCheckpointManager(model, optimizer)
    CheckpointHandler(manager, default_local_dir=tmp_path, torch_metadata=False).save_checkpoint(1)
    assert are_alone(tmp_path) == [True]
    fresh, other = made(1)
    CheckpointHandler(FSDPCheckpointManager(fresh, other), default_local_dir=tmp_path).load_checkpoint()
    for own, saved in zip(fresh.parameters(), model.parameters()):
        assert torch.equal(own.to_local(), saved.to_local())
        states = other.state[own], optimizer.state[saved]
        assert torch.equal(*(state["exp_avg"].to_local() for state in states))


@on_ranks(world=2)
def test_ranks_that_differ_in_it_are_told(api: Any, tmp_path: Path) -> None:
    is_first = dist.get_rank() == 0
    text = r"rank 1: .*torch_metadata \(expected True as on rank 0, got False\)"
    handler = CheckpointHandler(
        FSDPCheckpointManager(nn.Linear(2, 2)), default_local_dir=tmp_path, torch_metadata=is_first
    )
    with pytest.raises(CheckpointingException, match=text):
        handler.save_checkpoint(1)
    manager = FSDPCheckpointManager(nn.Linear(2, 2), torch_metadata=is_first)
    with pytest.raises(CheckpointingException, match=text):
        manager.save_checkpoint(tmp_path / "alone")
    assert list(tmp_path.rglob(".metadata")) == []
