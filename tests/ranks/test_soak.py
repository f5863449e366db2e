"""Hundreds of loads and saves in the same processes: nothing grows."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cpu_fsdp import BETWEEN
from models import build, full_state
from torch import nn

from torch_dcp_backport.regression import meter

CYCLES, WARM = 60 if BETWEEN else 200, 20
SLACK = 2 * meter.MIB


def cycle(api: Any, model: nn.Module, optim: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Everything loaded from rank 0, and saved to it."""
    load = api.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    save = api.StateDictOptions(full_state_dict=True, cpu_offload=True)
    api.set_model_state_dict(model, state, options=load)
    states = api.get_optimizer_state_dict(model, optim, options=save)
    api.set_optimizer_state_dict(model, optim, states, options=load)
    api.get_model_state_dict(model, options=save)


def held() -> dict[str, int]:
    return {
        "file descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count() + len(os.listdir("/proc/self/task")),
        "process groups": len(dist.distributed_c10d._world.pg_map),
    }


def soak(api: Any) -> int:
    model = build()
    optim = torch.optim.Adam(model.parameters())
    state = full_state() if dist.get_rank() == 0 else {}
    for _ in range(WARM):
        cycle(api, model, optim, state)
    before, memory = held(), meter.resident()
    for _ in range(CYCLES):
        cycle(api, model, optim, state)
    assert held() == before
    after = meter.resident()
    assert memory is not None
    assert after is not None
    return after - memory


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="memory and files are read from /proc")
def test_nothing_grows(ranks):
    assert max(ranks(soak)) < SLACK
