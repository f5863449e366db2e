"""What the parameters of a Megatron model are, by their names: verl's, and megatron-core's in both specs.

Tables alone; must never look at a tensor.
"""

from __future__ import annotations

import re
from typing import NamedTuple, Optional

EMBED, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
#: Where a value head of one row may be in files; the first is what an export writes.
VALUE_HEADS = ("score.weight", HEAD, "reward_head.weight")
#: Old files hold them; they are computed.
COMPUTED = re.compile(r"(.*\.)?rotary_emb\.inv_freq")


class Role(NamedTuple):
    """What a parameter holds: the HF tensors that it is made of, and how it is cut among TP ranks."""

    #: "whole", "rows", "columns", "vocab", "qkv" or "head".
    cut: str
    #: HF names; in a layer without the layer's prefix.
    keys: tuple[str, ...]


QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")

#: verl's names are those of HF but for the fused ones.
VERL = {
    "input_layernorm.weight": Role("whole", ("input_layernorm.weight",)),
    "self_attn.qkv_proj.weight": Role("qkv", tuple(f"{name}.weight" for name in QKV)),
    "self_attn.qkv_proj.bias": Role("qkv", tuple(f"{name}.bias" for name in QKV)),
    "self_attn.q_norm.weight": Role("whole", ("self_attn.q_norm.weight",)),
    "self_attn.k_norm.weight": Role("whole", ("self_attn.k_norm.weight",)),
    "self_attn.o_proj.weight": Role("columns", ("self_attn.o_proj.weight",)),
    "self_attn.o_proj.bias": Role("whole", ("self_attn.o_proj.bias",)),
    "post_attention_layernorm.weight": Role("whole", ("post_attention_layernorm.weight",)),
    "mlp.gate_up_proj.weight": Role("rows", tuple(f"{name}.weight" for name in GATE_UP)),
    "mlp.gate_up_proj.bias": Role("rows", tuple(f"{name}.bias" for name in GATE_UP)),
    "mlp.down_proj.weight": Role("columns", ("mlp.down_proj.weight",)),
    "mlp.down_proj.bias": Role("whole", ("mlp.down_proj.bias",)),
}
MCORE = {
    # The spec of TransformerEngine has the norms in the linear layers behind them, the local one has not.
    "self_attention.linear_qkv.layer_norm_weight": VERL["input_layernorm.weight"],
    "input_layernorm.weight": VERL["input_layernorm.weight"],
    "self_attention.linear_qkv.weight": VERL["self_attn.qkv_proj.weight"],
    "self_attention.linear_qkv.bias": VERL["self_attn.qkv_proj.bias"],
    "self_attention.q_layernorm.weight": VERL["self_attn.q_norm.weight"],
    "self_attention.k_layernorm.weight": VERL["self_attn.k_norm.weight"],
    "self_attention.linear_proj.weight": VERL["self_attn.o_proj.weight"],
    "self_attention.linear_proj.bias": VERL["self_attn.o_proj.bias"],
    "mlp.linear_fc1.layer_norm_weight": VERL["post_attention_layernorm.weight"],
    "pre_mlp_layernorm.weight": VERL["post_attention_layernorm.weight"],
    "mlp.linear_fc1.weight": VERL["mlp.gate_up_proj.weight"],
    "mlp.linear_fc1.bias": VERL["mlp.gate_up_proj.bias"],
    "mlp.linear_fc2.weight": VERL["mlp.down_proj.weight"],
    "mlp.linear_fc2.bias": VERL["mlp.down_proj.bias"],
}


class Style(NamedTuple):
    """How a family of modules names and cuts."""

    name: str
    #: What comes before the number of a layer within its chunk.
    layers: str
    in_layer: dict[str, Role]
    outside: dict[str, Role]


STYLES = {
    style.name: style
    for style in (
        Style(
            "verl",
            "model.layers.",
            VERL,
            {
                "model.embed_tokens.weight": Role("vocab", (EMBED,)),
                "model.norm.weight": Role("whole", (NORM,)),
                "lm_head.weight": Role("head", (HEAD,)),
            },
        ),
        Style(
            "mcore",
            "decoder.layers.",
            MCORE,
            {
                "embedding.word_embeddings.weight": Role("vocab", (EMBED,)),
                "decoder.final_layernorm.weight": Role("whole", (NORM,)),
                "output_layer.weight": Role("head", (HEAD,)),
            },
        ),
    )
}
#: HF names in a layer, in the order of an export.
ORDER = {key: number for number, key in enumerate(key for role in VERL.values() for key in role.keys)}
LAST = len(ORDER)


def role_of(style: Style, name: str) -> Optional[tuple[Role, Optional[int]]]:
    """(role, layer within the chunk or None) of a parameter; None for a name that is not in the tables."""
    if not name.startswith(style.layers):
        role = style.outside.get(name)
        return (role, None) if role is not None else None
    number, _, rest = name[len(style.layers) :].partition(".")
    role = style.in_layer.get(rest)
    return (role, int(number)) if role is not None and number.isdigit() else None


def hf_keys(role: Role, layer: Optional[int]) -> tuple[str, ...]:
    """The full HF keys of a role; `layer` is the model's, from 0."""
    return role.keys if layer is None else tuple(f"model.layers.{layer}.{key}" for key in role.keys)


def hf_order(key: str) -> tuple[int, int, str]:
    """Where a key stands in an export: embedding, layers, norm, heads."""
    prefix = "model.layers."
    if key.startswith(prefix):
        number, _, rest = key[len(prefix) :].partition(".")
        return int(number), ORDER.get(rest, LAST), key
    return (-1, 0, key) if key == EMBED else (2**62, int(key != NORM), key)
