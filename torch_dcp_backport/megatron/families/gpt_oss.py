"""gpt-oss: sinks; all experts of a layer are one tensor, with gate and up in turns. A table alone."""

from __future__ import annotations

from torch_dcp_backport.megatron.families.common import INPUT_NORM, OUT, OUT_BIAS, QKV, QKV_BIAS, SPARSE_NORM
from torch_dcp_backport.megatron.families.table import Family, row

GPT_OSS = Family(
    kinds=("gpt_oss",),
    rows=(
        *(INPUT_NORM, QKV, QKV_BIAS.when_also("attention_bias")),
        row("self_attention.core_attention.softmax_offset", "rows", "self_attn.sinks: heads"),
        *(OUT, OUT_BIAS.when_also("attention_bias"), SPARSE_NORM),
        row("mlp.router.weight", "whole", "mlp.router.weight: experts, hidden"),
        row("mlp.router.bias", "whole", "mlp.router.bias: experts"),
    ),
    experts=(
        row("linear_fc1.weight", "gate_up", "mlp.experts.gate_up_proj: experts, hidden, expert_rows|2"),
        row("linear_fc1.bias", "gate_up", "mlp.experts.gate_up_proj_bias: experts, expert_rows|2"),
        row("linear_fc2.weight", "columns", "mlp.experts.down_proj: experts, expert_rows, hidden"),
        row("linear_fc2.bias", "whole", "mlp.experts.down_proj_bias: experts, hidden"),
    ),
    numbers={
        "experts": "num_local_experts or num_experts",
        "expert_rows": "intermediate_size",
        "head_dim": "head_dim or 64",
        "kv_heads": "num_key_value_heads or 8",
    },
    flags={"attention_bias": True},
)
