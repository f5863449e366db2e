"""torchtune's own loader for FSDP2, as shipped: every rank holds the dict, and each tensor is scattered."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (  # noqa: F401  benchmarked ways have all of them
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torchtune.training import load_from_full_model_state_dict


def set_model_state_dict(model: nn.Module, state: dict[str, Any], *, options: StateDictOptions) -> None:
    if options.broadcast_from_rank0:
        raise NotImplementedError("this loader wants the full dict on every rank")
    load_from_full_model_state_dict(model, state, torch.device("cpu"), strict=True)
