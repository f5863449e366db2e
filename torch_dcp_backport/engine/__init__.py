"""Training under FSDP2, as functions that any loop can call, and as an engine under verl's names.

Knows models and optimizers; must never know Megatron, and imports transformers and peft where they are asked
for alone.
"""

from torch_dcp_backport.private_members import require

require("engine")

from torch_dcp_backport.engine._src.base import BaseEngine, EngineContext, EngineRegistry
from torch_dcp_backport.engine._src.batches import (
    Limit,
    Micro,
    Plan,
    micro_batches,
    model_inputs,
    plan,
    restored,
)
from torch_dcp_backport.engine._src.build import (
    Sharding,
    fill,
    language_model,
    materialize,
    parameters_on_meta,
    shard,
    tensors_of,
    units_of,
    value_model,
)
from torch_dcp_backport.engine._src.config import EngineConfig, ModelConfig, OptimizerConfig
from torch_dcp_backport.engine._src.export import whole_tensors
from torch_dcp_backport.engine._src.fsdp import FSDPEngine, FSDPEngineWithLMHead, FSDPEngineWithValueHead
from torch_dcp_backport.engine._src.fused import linear_log_probs
from torch_dcp_backport.engine._src.groups import param_groups
from torch_dcp_backport.engine._src.heads import entropy, log_probs, next_log_probs, sft_loss, values
from torch_dcp_backport.engine._src.mesh import Grid, Sizes, arrange, sizes_of
from torch_dcp_backport.engine._src.move import move_model, move_optimizer
from torch_dcp_backport.engine._src.reach import drop_unreached
from torch_dcp_backport.engine._src.step import Stepped, divisor_of, grad_norm, schedule, step

__all__ = [
    "BaseEngine", "EngineConfig", "EngineContext", "EngineRegistry", "FSDPEngine", "FSDPEngineWithLMHead",
    "FSDPEngineWithValueHead", "Grid", "Limit", "Micro", "ModelConfig", "OptimizerConfig", "Plan",
    "Sharding", "Sizes", "Stepped", "arrange", "divisor_of", "drop_unreached", "entropy", "fill", "grad_norm",
    "language_model", "linear_log_probs", "log_probs", "materialize", "micro_batches", "model_inputs",
    "move_model",
    "move_optimizer", "next_log_probs", "param_groups", "parameters_on_meta", "plan", "restored", "schedule",
    "sft_loss", "shard", "sizes_of", "step", "tensors_of", "units_of", "value_model", "values",
    "whole_tensors",
]  # fmt: skip
