"""DeepSeek-V3 and its kin: latent attention (MLA), shared experts, a bias of the router. A table alone."""

from __future__ import annotations

from torch_dcp_backport.megatron.families.common import (
    DENSE_NORM,
    DOWN,
    EXPERTS,
    GATE_UP,
    PREDICTION,
    ROUTER,
    SPARSE_NORM,
)
from torch_dcp_backport.megatron.families.table import Family, row

Q_SIZE, KV_SIZE = "heads*nope+heads*rope", "heads*nope+heads*v_dim"
ATTENTION = (
    row("input_layernorm.weight", "whole", "input_layernorm.weight: hidden"),
    row(
        "self_attention.linear_q_proj.weight",
        "rows",
        f"self_attn.q_proj.weight: {Q_SIZE}, hidden",
        when="!q_rank",
    ),
    # Releases of megatron-core cut the two projections down, or hold them whole.
    row(
        "self_attention.linear_q_down_proj.weight",
        "rows or whole",
        "self_attn.q_a_proj.weight: q_rank, hidden",
        when="q_rank",
    ),
    row(
        "self_attention.linear_q_up_proj.layer_norm_weight self_attention.q_layernorm.weight",
        "whole",
        "self_attn.q_a_layernorm.weight: q_rank",
        when="q_rank",
        is_under_each=True,
    ),
    row(
        "self_attention.linear_q_up_proj.weight",
        "rows",
        f"self_attn.q_b_proj.weight: {Q_SIZE}, q_rank",
        when="q_rank",
    ),
    row(
        "self_attention.linear_kv_down_proj.weight",
        "rows or whole",
        "self_attn.kv_a_proj_with_mqa.weight: kv_rank+rope, hidden",
    ),
    row(
        "self_attention.linear_kv_up_proj.layer_norm_weight self_attention.kv_layernorm.weight",
        "whole",
        "self_attn.kv_a_layernorm.weight: kv_rank",
        is_under_each=True,
    ),
    row("self_attention.linear_kv_up_proj.weight", "rows", f"self_attn.kv_b_proj.weight: {KV_SIZE}, kv_rank"),
    row("self_attention.linear_proj.weight", "columns", "self_attn.o_proj.weight: hidden, heads*v_dim"),
)
ROUTER_BIAS = row(
    "mlp.router.expert_bias", "whole", "mlp.gate.e_score_correction_bias: experts", when="sparse"
)
SHARED = (
    row(
        "mlp.shared_experts.linear_fc1.weight",
        "gate_up",
        "mlp.shared_experts.gate_proj.weight: shared_rows, hidden",
        "mlp.shared_experts.up_proj.weight: shared_rows, hidden",
        when="sparse shared_rows",
    ),
    row(
        "mlp.shared_experts.linear_fc2.weight",
        "columns",
        "mlp.shared_experts.down_proj.weight: hidden, shared_rows",
        when="sparse shared_rows",
    ),
)

DEEPSEEK_V3 = Family(
    kinds=("deepseek_v3",),
    rows=(
        *ATTENTION,
        # The local spec of latent attention saves its norms under their own names.
        DENSE_NORM._replace(is_under_each=True),
        *(GATE_UP, DOWN, SPARSE_NORM, ROUTER, ROUTER_BIAS),
        *SHARED,
    ),
    experts=EXPERTS,
    numbers={
        "q_rank": "q_lora_rank or 0",
        "kv_rank": "kv_lora_rank",
        "nope": "qk_nope_head_dim",
        "rope": "qk_rope_head_dim",
        "v_dim": "v_head_dim",
        "experts": "n_routed_experts or num_local_experts",
        "expert_rows": "moe_intermediate_size",
        "shared_rows": "moe_intermediate_size*n_shared_experts or 0",
        "predicted": "num_nextn_predict_layers or 0",
    },
    dense=("first_k_dense_replace",),
    prediction=PREDICTION,
)
