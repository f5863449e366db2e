"""Rows that several families share. A table alone."""

from __future__ import annotations

from torch_dcp_backport.megatron.families.table import row

# With TransformerEngine the norms are in the linear layers behind them; in the local spec they are not.
INPUT_NORM = row(
    "self_attention.linear_qkv.layer_norm_weight input_layernorm.weight",
    "whole",
    "input_layernorm.weight: hidden",
)
QKV = row(
    "self_attention.linear_qkv.weight",
    "qkv",
    "self_attn.q_proj.weight: heads*head_dim, hidden",
    "self_attn.k_proj.weight: kv_heads*head_dim, hidden",
    "self_attn.v_proj.weight: kv_heads*head_dim, hidden",
)
QKV_BIAS = row(
    "self_attention.linear_qkv.bias",
    "qkv",
    "self_attn.q_proj.bias: heads*head_dim",
    "self_attn.k_proj.bias: kv_heads*head_dim",
    "self_attn.v_proj.bias: kv_heads*head_dim",
)
QK_NORMS = (
    row("self_attention.q_layernorm.weight", "whole", "self_attn.q_norm.weight: head_dim"),
    row("self_attention.k_layernorm.weight", "whole", "self_attn.k_norm.weight: head_dim"),
)
OUT = row("self_attention.linear_proj.weight", "columns", "self_attn.o_proj.weight: hidden, heads*head_dim")
OUT_BIAS = row("self_attention.linear_proj.bias", "whole", "self_attn.o_proj.bias: hidden")

DENSE_NORM = row(
    "mlp.linear_fc1.layer_norm_weight pre_mlp_layernorm.weight",
    "whole",
    "post_attention_layernorm.weight: hidden",
    when="dense",
)
SPARSE_NORM = row(
    "pre_mlp_layernorm.weight mlp.linear_fc1.layer_norm_weight",
    "whole",
    "post_attention_layernorm.weight: hidden",
    when="sparse",
    is_under_each=True,
)
GATE_UP = row(
    "mlp.linear_fc1.weight",
    "gate_up",
    "mlp.gate_proj.weight: intermediate, hidden",
    "mlp.up_proj.weight: intermediate, hidden",
    when="dense",
)
GATE_UP_BIAS = row(
    "mlp.linear_fc1.bias",
    "gate_up",
    "mlp.gate_proj.bias: intermediate",
    "mlp.up_proj.bias: intermediate",
    when="dense",
)
DOWN = row("mlp.linear_fc2.weight", "columns", "mlp.down_proj.weight: hidden, intermediate", when="dense")
DOWN_BIAS = row("mlp.linear_fc2.bias", "whole", "mlp.down_proj.bias: hidden", when="dense")
#: Gate and up in one tensor of the files.
FUSED_GATE_UP = row(
    "mlp.linear_fc1.weight", "gate_up", "mlp.gate_up_proj.weight: 2*intermediate, hidden", when="dense"
)

ROUTER = row("mlp.router.weight", "whole", "mlp.gate.weight: experts, hidden", when="sparse")
EXPERTS = (
    row(
        "linear_fc1.weight",
        "gate_up",
        "mlp.experts.{}.gate_proj.weight: expert_rows, hidden",
        "mlp.experts.{}.up_proj.weight: expert_rows, hidden",
    ),
    row("linear_fc2.weight", "columns", "mlp.experts.{}.down_proj.weight: hidden, expert_rows"),
)
#: What a layer of multi-token prediction has beside those of a layer.
PREDICTION = (
    row("enorm.weight", "whole", "enorm.weight: hidden"),
    row("hnorm.weight", "whole", "hnorm.weight: hidden"),
    row("eh_proj.weight", "rows", "eh_proj.weight: hidden, 2*hidden"),
    row("final_layernorm.weight", "whole", "shared_head.norm.weight: hidden"),
)
