"""Qwen2, Qwen2.5, Qwen3 and their sparse models. A table alone."""

from __future__ import annotations

from torch_dcp_backport.megatron.families.common import (
    DENSE_NORM,
    DOWN,
    EXPERTS,
    GATE_UP,
    INPUT_NORM,
    OUT,
    OUT_BIAS,
    QK_NORMS,
    QKV,
    QKV_BIAS,
    ROUTER,
    SPARSE_NORM,
)
from torch_dcp_backport.megatron.families.table import Family, row

SHARED = (
    row(
        "mlp.shared_experts.linear_fc1.weight",
        "gate_up",
        "mlp.shared_expert.gate_proj.weight: shared_rows, hidden",
        "mlp.shared_expert.up_proj.weight: shared_rows, hidden",
        when="sparse shared_rows",
    ),
    row(
        "mlp.shared_experts.linear_fc2.weight",
        "columns",
        "mlp.shared_expert.down_proj.weight: hidden, shared_rows",
        when="sparse shared_rows",
    ),
    row(
        "mlp.shared_experts.gate_weight",
        "whole",
        "mlp.shared_expert_gate.weight: 1, hidden",
        when="sparse shared_rows",
    ),
)
SPARSE = {"experts": "num_experts or num_local_experts", "expert_rows": "moe_intermediate_size"}
#: The layers that are dense, and those that only every so many layers are sparse.
STEPS = ("mlp_only_layers", "decoder_sparse_step")

QWEN2 = Family(kinds=("qwen2",), rows=(INPUT_NORM, QKV, QKV_BIAS, OUT, DENSE_NORM, GATE_UP, DOWN))
QWEN2_MOE = Family(
    kinds=("qwen2_moe",),
    rows=(
        *(INPUT_NORM, QKV, QKV_BIAS.when_also("qkv_bias"), OUT),
        *(DENSE_NORM, GATE_UP, DOWN, SPARSE_NORM, ROUTER),
        *SHARED,
    ),
    experts=EXPERTS,
    numbers={**SPARSE, "shared_rows": "shared_expert_intermediate_size"},
    flags={"qkv_bias": True},
    dense=STEPS,
)
OF_QWEN3 = (
    INPUT_NORM,
    QKV,
    QKV_BIAS.when_also("attention_bias"),
    *QK_NORMS,
    OUT,
    OUT_BIAS.when_also("attention_bias"),
)
QWEN3 = Family(
    kinds=("qwen3",),
    rows=(*OF_QWEN3, DENSE_NORM, GATE_UP, DOWN),
    # Its class has a default of its own, whatever the other numbers are.
    numbers={"head_dim": "head_dim or 128"},
    flags={"attention_bias": False},
)
#: The text tower of a sparse Qwen3-VL: all experts of a layer are in one tensor, gate in front of up.
QWEN3_VL_MOE_TEXT = Family(
    kinds=("qwen3_vl_moe_text",),
    rows=(*OF_QWEN3, DENSE_NORM, GATE_UP, DOWN, SPARSE_NORM, ROUTER),
    experts=(
        row("linear_fc1.weight", "gate_up", "mlp.experts.gate_up_proj: experts, hidden, 2|expert_rows"),
        row("linear_fc2.weight", "columns", "mlp.experts.down_proj: experts, expert_rows, hidden"),
    ),
    numbers=SPARSE,
    flags={"attention_bias": False},
    dense=STEPS,
)
#: The families of whose packed experts transformers 5 writes both dimensions exchanged.
TURNED_BY_5 = QWEN3_VL_MOE_TEXT.kinds
QWEN3_MOE = Family(
    kinds=("qwen3_moe",),
    rows=(*OF_QWEN3, DENSE_NORM, GATE_UP, DOWN, SPARSE_NORM, ROUTER),
    experts=EXPERTS,
    numbers=SPARSE,
    flags={"attention_bias": False},
    dense=STEPS,
)
