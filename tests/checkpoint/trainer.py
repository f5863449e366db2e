"""A training without gradients: every step changes every parameter and draws random numbers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn

from torch_dcp_backport.checkpoint import CheckpointHandler, FSDPCheckpointManager


class Loader:
    def __init__(self) -> None:
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Trainer:
    def __init__(
        self, root: Path, model: nn.Module | None = None, *, config: Any = None, **options: Any
    ) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4)) if model is None else model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)
        self.loader = Loader()
        self.manager = FSDPCheckpointManager(
            self.model, self.optimizer, self.schedule, checkpoint_config=config
        )
        self.handler = CheckpointHandler(self.manager, self.loader, default_local_dir=root, **options)

    def train(self, seed: int = 0, gradient: int = 1) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        numpy.random.seed(seed)
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter) * gradient
        self.optimizer.step()
        self.schedule.step()
        self.loader.position += 1

    def state(self) -> dict[str, Any]:
        """What has to come back; drawing from the generators tells their states."""
        parameters = [_local(parameter).clone() for parameter in self.model.parameters()]
        moments = [
            _local(value).clone()
            for state in self.optimizer.state.values()
            for _, value in sorted(state.items())
            if isinstance(value, torch.Tensor)
        ]
        return {
            "parameters": parameters,
            "moments": moments,
            "rate": self.schedule.get_last_lr(),
            "position": self.loader.position,
            "draws": [torch.rand(1).item(), random.random(), float(numpy.random.rand())],
        }


def _local(tensor: Any) -> torch.Tensor:
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach()


def same(state: dict[str, Any], other: dict[str, Any]) -> bool:
    for name in ("parameters", "moments"):
        pairs = list(zip(state[name], other[name]))
        if len(state[name]) != len(other[name]) or not all(torch.equal(*pair) for pair in pairs):
            return False
    return all(state[name] == other[name] for name in ("rate", "position", "draws"))
