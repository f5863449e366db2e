"""GLM-4 (`glm`), GLM-4-0414 (`glm4`, with norms behind attention and MLP). A table alone."""

from __future__ import annotations

from torch_dcp_backport.megatron.families.common import (
    DENSE_NORM,
    DOWN,
    FUSED_GATE_UP,
    INPUT_NORM,
    OUT,
    QKV,
    QKV_BIAS,
)
from torch_dcp_backport.megatron.families.table import Family, row

ATTENTION = (INPUT_NORM, QKV, QKV_BIAS.when_also("attention_bias"), OUT)
MLP = (DENSE_NORM, FUSED_GATE_UP, DOWN)
NUMBERS = {"head_dim": "head_dim or 128", "kv_heads": "num_key_value_heads or 2"}
FLAGS = {"attention_bias": True}

GLM = Family(kinds=("glm",), rows=(*ATTENTION, *MLP), numbers=NUMBERS, flags=FLAGS)
GLM4 = Family(
    kinds=("glm4",),
    rows=(
        *ATTENTION,
        row("post_self_attn_layernorm.weight", "whole", "post_self_attn_layernorm.weight: hidden"),
        *MLP,
        row("post_mlp_layernorm.weight", "whole", "post_mlp_layernorm.weight: hidden"),
    ),
    numbers=NUMBERS,
    flags=FLAGS,
)
