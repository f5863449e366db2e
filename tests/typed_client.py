"""What a client's type checker sees; tools/check_wheel.py runs `mypy --strict` on it."""

from __future__ import annotations

from typing import Any, Optional

import torch

import torch_dcp_backport
from torch_dcp_backport import transfer
from torch_dcp_backport.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)


def load(model: torch.nn.Module, optim: torch.optim.Optimizer, state: dict[str, torch.Tensor]) -> int:
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    keys = set_model_state_dict(model, {**state}, options=options)
    missing: list[str] = keys.missing_keys
    set_optimizer_state_dict(model, optim, get_optimizer_state_dict(model, [optim]), options=options)
    return len(missing)


def save(model: torch.nn.Module) -> list[str]:
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return list(state)


def what_happened() -> tuple[str, str, dict[str, Any]]:
    status = torch_dcp_backport.status()
    outcome: str = status.outcome
    return outcome, status.reason, status.to_dict()


def tune() -> int:
    transfer.configure(staging_bytes=16 * 2**20, progress=lambda so_far: print(so_far.done, so_far.total))
    report: Optional[transfer.Report] = torch_dcp_backport.transfer.last_report()
    return report.bytes_received if report is not None else 0
