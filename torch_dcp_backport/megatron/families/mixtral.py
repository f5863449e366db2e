"""Mixtral. A table alone."""

from __future__ import annotations

from torch_dcp_backport.megatron.families.common import INPUT_NORM, OUT, QKV, SPARSE_NORM
from torch_dcp_backport.megatron.families.table import Family, row

MIXTRAL = Family(
    kinds=("mixtral",),
    rows=(
        *(INPUT_NORM, QKV, OUT, SPARSE_NORM),
        row("mlp.router.weight", "whole", "block_sparse_moe.gate.weight: experts, hidden", when="sparse"),
    ),
    experts=(
        row(
            "linear_fc1.weight",
            "gate_up",
            "block_sparse_moe.experts.{}.w1.weight: expert_rows, hidden",
            "block_sparse_moe.experts.{}.w3.weight: expert_rows, hidden",
        ),
        row("linear_fc2.weight", "columns", "block_sparse_moe.experts.{}.w2.weight: hidden, expert_rows"),
    ),
    numbers={"experts": "num_local_experts or num_experts", "expert_rows": "intermediate_size"},
)
