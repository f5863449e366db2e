"""accelerate's own loader for FSDP2: a broadcast of each whole tensor, then every rank cuts its shard."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from accelerate.utils.fsdp_utils import fsdp2_load_full_state_dict
from torch import nn
from torch.distributed.checkpoint.state_dict import (  # noqa: F401  benchmarked ways have all of them
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)


def set_model_state_dict(model: nn.Module, state: dict[str, Any], *, options: StateDictOptions) -> None:
    # Of the Accelerator it reads this one attribute.
    fsdp2_load_full_state_dict(SimpleNamespace(is_main_process=dist.get_rank() == 0), model, state)
