"""The roles of a Megatron model's parameters, by name: verl's, and megatron-core's in both specs.

Tables alone; must never look at a tensor.
"""

from __future__ import annotations

import re
from typing import NamedTuple, Optional

EMBED, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
#: Where a value head of one row may be in files; the first is what an export writes.
VALUE_HEADS = ("score.weight", HEAD, "reward_head.weight")
#: The first head's bias, where transformers classifies tokens; a head in Megatron has none.
SCORE_BIAS = "score.bias"
#: Old files hold them; they are computed.
COMPUTED = re.compile(r"(.*\.)?rotary_emb\.inv_freq")


class Role(NamedTuple):
    """The HF tensors that a parameter is made of, and its cut among TP ranks."""

    #: "whole", "rows", "columns", "vocab", "qkv" or "head".
    cut: str
    #: HF names; in a layer without the layer's prefix, and of an expert with {} for its number.
    keys: tuple[str, ...]
    #: The number of the expert: in a module's name among those of its rank, else in the full model.
    expert: Optional[int] = None


LAYERS = "decoder.layers."
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")

#: verl's names are those of HF, except for fused parameters.
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
    # The spec of TransformerEngine has the norms in the linear layers behind them, the local spec has not.
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
MCORE_MOE = {
    "mlp.router.weight": Role("whole", ("mlp.gate.weight",)),
    "mlp.shared_experts.linear_fc1.weight": Role(
        "rows", ("mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.up_proj.weight")
    ),
    "mlp.shared_experts.linear_fc2.weight": Role("columns", ("mlp.shared_expert.down_proj.weight",)),
    "mlp.shared_experts.gate_weight": Role("whole", ("mlp.shared_expert_gate.weight",)),
}
#: Of an expert: cut among the ranks of the expert TP group.
EXPERT = {
    "linear_fc1.weight": Role("rows", ("mlp.experts.{}.gate_proj.weight", "mlp.experts.{}.up_proj.weight")),
    "linear_fc2.weight": Role("columns", ("mlp.experts.{}.down_proj.weight",)),
}
#: An expert's part of a GroupedMLP's parameter, as `model.parameters_of` names it.
GROUPED = re.compile(r"mlp\.experts\.weight([12])\[(\d+)\]")
#: Modules of their own, or one module of TransformerEngine with a parameter for each.
EXPERTS = re.compile(r"mlp\.experts\.(?:local_experts\.(\d+)\.)?(linear_fc[12]\.weight)(\d*)")


class Style(NamedTuple):
    """The names of a family of modules, and the roles behind them."""

    name: str
    #: The prefix of a layer's number within its chunk.
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
            LAYERS,
            {**MCORE, **MCORE_MOE},
            {
                "embedding.word_embeddings.weight": Role("vocab", (EMBED,)),
                "decoder.final_layernorm.weight": Role("whole", (NORM,)),
                "output_layer.weight": Role("head", (HEAD,)),
            },
        ),
    )
}
ROLES = (*VERL.values(), *MCORE_MOE.values(), *EXPERT.values())
#: HF names in a layer, in the order of an export.
ORDER = {key: number for number, key in enumerate(key for role in ROLES for key in role.keys)}
LAST = len(ORDER)
NUMBER = re.compile(r"(?<=^mlp\.experts\.)\d+")


def role_of(style: Style, name: str) -> Optional[tuple[Role, Optional[int]]]:
    """Return a parameter's (role, layer within the chunk or None); None for a name not in the tables."""
    if not name.startswith(style.layers):
        role = style.outside.get(name)
        return (role, None) if role is not None else None
    number, _, rest = name[len(style.layers) :].partition(".")
    role = style.in_layer.get(rest)
    if role is None and style.name == "mcore":
        role = role_of_expert(rest)
    return (role, int(number)) if role is not None and number.isdigit() else None


def role_of_expert(rest: str) -> Optional[Role]:
    part = GROUPED.fullmatch(rest)
    if part is not None:
        return EXPERT[f"linear_fc{part[1]}.weight"]._replace(expert=int(part[2]))
    match = EXPERTS.fullmatch(rest)
    numbers = [number for number in match.group(1, 3) if number] if match is not None else []
    # A module for each, or a parameter for each.
    return EXPERT[match.group(2)]._replace(expert=int(numbers[0])) if match and len(numbers) == 1 else None


def hf_keys(role: Role, layer: Optional[int]) -> tuple[str, ...]:
    """Return the full HF keys of a role; `layer` is the model's, from 0."""
    keys = role.keys if role.expert is None else tuple(key.format(role.expert) for key in role.keys)
    return keys if layer is None else tuple(f"model.layers.{layer}.{key}" for key in keys)


def hf_order(key: str) -> tuple[int, int, int, str]:
    """Return a key's place in an export, for sorting: embedding, layers, norm, heads."""
    prefix = "model.layers."
    if key.startswith(prefix):
        number, _, rest = key[len(prefix) :].partition(".")
        expert = NUMBER.search(rest)
        if expert is None:
            return int(number), ORDER.get(rest, LAST), -1, key
        place = ORDER.get(NUMBER.sub("{}", rest), LAST)
        # All of an expert, then the next expert.
        return int(number), LAST + int(expert[0]), place, key
    return (-1, 0, -1, key) if key == EMBED else (2**62, int(key != NORM), -1, key)
