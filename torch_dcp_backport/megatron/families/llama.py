"""Llama and Mistral. A table alone."""

from __future__ import annotations

from torch_dcp_backport.megatron.families.common import (
    DENSE_NORM,
    DOWN,
    DOWN_BIAS,
    GATE_UP,
    GATE_UP_BIAS,
    INPUT_NORM,
    OUT,
    OUT_BIAS,
    QKV,
    QKV_BIAS,
)
from torch_dcp_backport.megatron.families.table import Family

LLAMA = Family(
    kinds=("llama",),
    rows=(
        INPUT_NORM,
        QKV,
        QKV_BIAS.when_also("attention_bias"),
        OUT,
        OUT_BIAS.when_also("attention_bias"),
        DENSE_NORM,
        GATE_UP,
        GATE_UP_BIAS.when_also("mlp_bias"),
        DOWN,
        DOWN_BIAS.when_also("mlp_bias"),
    ),
    flags={"attention_bias": False, "mlp_bias": False},
)
MISTRAL = Family(kinds=("mistral",), rows=(INPUT_NORM, QKV, OUT, DENSE_NORM, GATE_UP, DOWN))
