"""Gemma 2 and Gemma 3: norms in front of attention and MLP, and behind them. A table alone.

Their norms multiply by one more than the weight: Megatron's model needs `layernorm_zero_centered_gamma`.
"""

from __future__ import annotations

from torch_dcp_backport.megatron.families.common import (
    DOWN,
    GATE_UP,
    INPUT_NORM,
    OUT,
    OUT_BIAS,
    QK_NORMS,
    QKV,
    QKV_BIAS,
)
from torch_dcp_backport.megatron.families.table import Family, row

# Megatron-Bridge has the norms behind in the linear layers, mbridge in the layer under HF's names.
BEHIND_ATTENTION = row(
    "self_attention.linear_proj.post_layernorm.weight post_attention_layernorm.weight",
    "whole",
    "post_attention_layernorm.weight: hidden",
    is_under_each=True,
)
MLP_NORM = row(
    "mlp.linear_fc1.layer_norm_weight pre_mlp_layernorm.weight",
    "whole",
    "pre_feedforward_layernorm.weight: hidden",
)
BEHIND_MLP = row(
    "mlp.linear_fc2.post_layernorm.weight post_feedforward_layernorm.weight",
    "whole",
    "post_feedforward_layernorm.weight: hidden",
    is_under_each=True,
)
ATTENTION = (INPUT_NORM, QKV, QKV_BIAS.when_also("attention_bias"))
BEHIND = (OUT, OUT_BIAS.when_also("attention_bias"), BEHIND_ATTENTION, MLP_NORM, GATE_UP, DOWN, BEHIND_MLP)
#: Config files leave out what is as the class has it.
DEFAULTS = {
    "heads": "num_attention_heads or 8",
    "kv_heads": "num_key_value_heads or 4",
    "head_dim": "head_dim or 256",
}

GEMMA2 = Family(
    kinds=("gemma2",),
    rows=(*ATTENTION, *BEHIND),
    numbers={**DEFAULTS, "vocab": "vocab_size or 256000"},
    flags={"attention_bias": False},
    is_tied=True,
)
GEMMA3 = Family(
    kinds=("gemma3_text",),
    rows=(*ATTENTION, *QK_NORMS, *BEHIND),
    numbers={**DEFAULTS, "vocab": "vocab_size or 262208"},
    flags={"attention_bias": False},
    is_tied=True,
)
