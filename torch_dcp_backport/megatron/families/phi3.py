"""Phi-3, Phi-3.5 and Phi-4: query, key and value are one tensor, and so are gate and up. A table alone."""

from __future__ import annotations

from torch_dcp_backport.megatron.families.common import DENSE_NORM, DOWN, FUSED_GATE_UP, INPUT_NORM, OUT
from torch_dcp_backport.megatron.families.table import Family, row

PHI3 = Family(
    kinds=("phi3",),
    rows=(
        INPUT_NORM,
        row(
            "self_attention.linear_qkv.weight",
            "qkv",
            "self_attn.qkv_proj.weight: heads*head_dim+2*kv_heads*head_dim, hidden",
        ),
        *(OUT, DENSE_NORM, FUSED_GATE_UP, DOWN),
    ),
)
