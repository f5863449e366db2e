"""The roles of a Megatron model's parameters, by name: megatron-core's in both specs, and verl's.

A family's table has the names within a layer; here are the others. Must never look at a tensor.
"""

from __future__ import annotations

import re
from typing import NamedTuple, Optional

from torch_dcp_backport.megatron.families.table import Family, Row

EMBED, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
#: Where a value head of one row may be in files; the first is what an export writes.
VALUE_HEADS = ("score.weight", HEAD, "reward_head.weight")
#: The first head's bias, where transformers classifies tokens; a head in Megatron has none.
SCORE_BIAS = "score.bias"
#: Old files hold them; they are computed.
COMPUTED = re.compile(r"(.*\.)?rotary_emb\.inv_freq")
#: A layer's prefix in the files.
LAYER = re.compile(r"model\.layers\.(\d+)\.")
LAYERS = "decoder.layers."
#: A parameter of multi-token prediction: its number, and its name in the layer of it, or beside that.
PREDICTED = re.compile(r"mtp\.layers\.(\d+)\.(?:(?:transformer_layer|mtp_model_layer)\.(.+)|(.+))")
#: An expert's part of a GroupedMLP's parameter, as `model.parameters_of` names it.
GROUPED = re.compile(r"mlp\.experts\.weight([12])\[(\d+)\]")
#: Modules of their own, or one module of TransformerEngine with a parameter for each.
EXPERTS = re.compile(r"mlp\.experts\.(?:local_experts\.(\d+)\.)?(linear_fc[12]\.(?:weight|bias))(\d*)")
#: megatron-core's name within a layer -> verl's, in modules of verl's own.
VERL = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.weight": "self_attn.qkv_proj.weight",
    "self_attention.linear_qkv.bias": "self_attn.qkv_proj.bias",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.linear_proj.bias": "self_attn.o_proj.bias",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.weight": "mlp.gate_up_proj.weight",
    "mlp.linear_fc1.bias": "mlp.gate_up_proj.bias",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    "mlp.linear_fc2.bias": "mlp.down_proj.bias",
}


class Role(NamedTuple):
    """The HF tensors that a parameter is made of, and its cut among TP ranks."""

    #: A cut of `families.table.CUTS`, or "vocab" or "head".
    cut: str
    #: HF names; in a layer without the layer's prefix, and of an expert with {} for its number.
    keys: tuple[str, ...]
    #: The number of the expert: in a module's name among those of its rank, else in the full model.
    expert: Optional[int] = None

    @staticmethod
    def of(row: Row, expert: Optional[int] = None) -> Role:
        return Role(row.cut, row.keys, expert)


class Style(NamedTuple):
    """The names of a kind of modules: megatron-core's, or verl's own."""

    name: str
    #: The prefix of a layer's number within its chunk.
    layers: str
    outside: dict[str, Role]


STYLES = {
    style.name: style
    for style in (
        Style(
            "verl",
            "model.layers.",
            {
                "model.embed_tokens.weight": Role("vocab", (EMBED,)),
                "model.norm.weight": Role("whole", (NORM,)),
                "lm_head.weight": Role("head", (HEAD,)),
            },
        ),
        Style(
            "mcore",
            LAYERS,
            {
                "embedding.word_embeddings.weight": Role("vocab", (EMBED,)),
                "decoder.final_layernorm.weight": Role("whole", (NORM,)),
                "output_layer.weight": Role("head", (HEAD,)),
            },
        ),
    )
}


def role_of(style: Style, family: Family, name: str) -> Optional[tuple[Role, Optional[int]]]:
    """Return a parameter's (role, layer within the chunk or None); None for a name not in the tables.

    Layers of multi-token prediction count from -1 downwards.
    """
    predicted = PREDICTED.fullmatch(name) if style.name == "mcore" else None
    if predicted is not None:
        beside = next((Role.of(row) for row in family.prediction if predicted[3] in row.names), None)
        found = role_in_layer(style, family, predicted[2]) if predicted[2] else beside
        return (found, -1 - int(predicted[1])) if found is not None and family.prediction else None
    if not name.startswith(style.layers):
        role = style.outside.get(name)
        return (role, None) if role is not None else None
    number, _, rest = name[len(style.layers) :].partition(".")
    role = role_in_layer(style, family, rest)
    return (role, int(number)) if role is not None and number.isdigit() else None


def role_in_layer(style: Style, family: Family, rest: str) -> Optional[Role]:
    """Return the role of a parameter by its name within a layer."""
    for row in family.rows:
        names = (
            row.names if style.name == "mcore" else tuple(VERL[name] for name in row.names if name in VERL)
        )
        if rest in names:
            return Role.of(row)
    return _role_of_expert(family, rest) if style.name == "mcore" else None


def _role_of_expert(family: Family, rest: str) -> Optional[Role]:
    grouped, match = GROUPED.fullmatch(rest), EXPERTS.fullmatch(rest)
    if grouped is not None:
        name, numbers = f"linear_fc{grouped[1]}.weight", [grouped[2]]
    elif match is not None:
        # A module for each, or a parameter for each.
        name, numbers = match[2], [number for number in match.group(1, 3) if number]
    else:
        return None
    row = next((row for row in family.experts if name in row.names), None)
    return Role.of(row, int(numbers[0])) if row is not None and len(numbers) == 1 else None


def hf_keys(role: Role, layer: Optional[int]) -> tuple[str, ...]:
    """Return the full HF keys of a role; `layer` is the model's, from 0."""
    keys = role.keys if role.expert is None else tuple(key.format(role.expert) for key in role.keys)
    return keys if layer is None else tuple(f"model.layers.{layer}.{key}" for key in keys)
