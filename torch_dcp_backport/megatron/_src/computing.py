"""A GPTModel's TransformerConfig beside config.json: whether the model computes what the files are for.

Numbers that decide where a row goes are problems: the same rows may be other heads. Those that decide the
forward pass alone are for a warning. Must never talk to other ranks; values that are not known are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Optional

import torch
from torch import nn
from torch.nn import functional

from torch_dcp_backport.hf import CONFIG
from torch_dcp_backport.megatron._src.shape import Shape
from torch_dcp_backport.megatron.families.forward import FORWARD, Forward
from torch_dcp_backport.megatron.families.towers import text_of
from torch_dcp_backport.transfer import Problem

#: The names by which a TransformerConfig is known.
KNOWN_BY = ("num_attention_heads", "num_query_groups", "kv_channels", "layernorm_epsilon")
#: A name that the model's configuration does not have.
ABSENT = object()
#: transformers' name of an activation -> what it computes.
ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "swish": functional.silu,
    "gelu": functional.gelu,
    "gelu_pytorch_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu_new": lambda x: functional.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": functional.relu,
}
EPSILONS = ("rms_norm_eps", "layer_norm_eps", "norm_eps")


class Apart(NamedTuple):
    """A value of the model, and the one that the files are for."""

    name: str
    got: object
    key: str
    expected: object

    def __str__(self) -> str:
        return f"{self.name}={self.got!r} ({self.expected!r} by {self.key})"


def config_of(module: nn.Module) -> Any:
    """Return a GPTModel's TransformerConfig; None where it has none."""
    config = getattr(module, "config", None)
    return config if all(hasattr(config, name) for name in KNOWN_BY) else None


def misplaced(module: nn.Module, shape: Shape) -> list[Problem]:
    """Return problems for what decides where a row goes, and the model has otherwise than the files."""
    config = config_of(module)
    if config is None:
        return []
    problems = []
    for name, got, key, expected in _layout(config, shape):
        if got is not ABSENT and got != expected:
            problem = f"the model's TransformerConfig has another {name}"
            problems.append(Problem(problem, "", f"{got}", f"{expected}, as {key} of {CONFIG} says"))
    return problems


def _layout(config: Any, shape: Shape) -> Iterator[Apart]:
    """Yield the numbers of a model's layout, each beside that of the files."""

    def own(name: str) -> Any:
        return getattr(config, name, ABSENT)

    def pair(name: str, number: str, got: object = ABSENT) -> Apart:
        key = shape.family.formulas[number].partition(" or ")[0]
        return Apart(name, own(name) if got is ABSENT else got, key, shape.number(number))

    yield pair("num_layers", "layers")
    yield pair("hidden_size", "hidden")
    yield pair("num_attention_heads", "heads")
    if getattr(config, "multi_latent_attention", False) and shape.number("kv_rank"):
        yield pair("q_lora_rank", "q_rank", own("q_lora_rank") or 0)
        yield pair("kv_lora_rank", "kv_rank")
        yield pair("qk_head_dim", "nope")
        yield pair("qk_pos_emb_head_dim", "rope")
        yield pair("v_head_dim", "v_dim")
    else:
        yield pair("num_query_groups", "kv_heads", own("num_query_groups") or own("num_attention_heads"))
        yield pair("kv_channels", "head_dim")
    sparse = [shape.is_sparse(layer) for layer in range(shape.layers)]
    if not all(sparse):
        yield pair("ffn_hidden_size", "intermediate")
    if "experts" in shape.family.formulas:
        yield pair("num_moe_experts", "experts", own("num_moe_experts") or 0)
    elif own("num_moe_experts"):
        yield Apart("num_moe_experts", own("num_moe_experts"), "model_type", 0)
    if any(sparse):
        rows = own("moe_ffn_hidden_size")
        yield pair("moe_ffn_hidden_size", "expert_rows", own("ffn_hidden_size") if rows is None else rows)
        if "shared_rows" in shape.family.formulas:
            name = "moe_shared_expert_intermediate_size"
            yield pair(name, "shared_rows", own(name) or 0)
    if any(row.cut == "gate_up" for row in shape.family.every_row()):
        yield Apart("gated_linear_unit", own("gated_linear_unit"), "model_type", True)


def computed_otherwise(module: nn.Module, shape: Shape, config: Mapping[str, Any]) -> list[str]:
    """Return what a model computes otherwise than the files say, each with both values.

    Args:
        module: a chunk of megatron-core's.
        shape: the numbers of config.json.
        config: its content.
    """
    own, forward = config_of(module), FORWARD.get(shape.kind)
    if own is None or forward is None:
        return []  # a family that the user has added: its class is not known
    said, _ = text_of(config)
    parts = (
        *_of_layers(own, forward, said),
        *_of_attention(own, forward, said, shape),
        *_of_positions(module, own, forward, said),
        *(_of_routers(own, forward, said, shape) if shape.experts else ()),
    )
    return [str(part) for part in parts if part.got is not ABSENT and not _is_equal(part.got, part.expected)]


def _is_equal(got: object, expected: object) -> bool:
    numbers = (int, float)
    if isinstance(got, numbers) and isinstance(expected, numbers):
        return math.isclose(got, expected, rel_tol=1e-6)
    return got == expected


def _of_layers(own: Any, forward: Forward, said: Mapping[str, Any]) -> Iterator[Apart]:
    """Yield what norms and MLPs do."""
    yield Apart("normalization", getattr(own, "normalization", ABSENT), "model_type", "RMSNorm")
    for key in EPSILONS:
        if said.get(key) is not None:
            yield Apart("layernorm_epsilon", own.layernorm_epsilon, key, said[key])
            break
    name = "layernorm_zero_centered_gamma"
    yield Apart(name, getattr(own, name, ABSENT), "model_type", forward.is_zero_centred)
    asked = forward.activation or said.get("hidden_activation") or said.get("hidden_act")
    wanted = ACTIVATIONS.get(asked) if isinstance(asked, str) else None
    function = getattr(own, "activation_func", None)
    if wanted is not None and callable(function) and not _is_same(function, wanted):
        got = getattr(function, "__name__", repr(function))
        yield Apart("activation_func", got, "hidden_act", asked)
    yield Apart(
        "glu_linear_offset", getattr(own, "glu_linear_offset", ABSENT), "model_type", forward.linear_offset
    )
    if forward.linear_offset:
        name = "activation_func_clamp_value"
        yield Apart(name, getattr(own, name, ABSENT), "swiglu_limit", said.get("swiglu_limit", 7.0))


@torch.no_grad()
def _is_same(function: Callable[..., Any], wanted: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Return whether two activations compute the same; a function that cannot be asked is taken to."""
    points = torch.linspace(-4, 4, 33, device="cpu")
    try:
        got = function(points.clone())
        return torch.allclose(got, wanted(points), rtol=1e-5, atol=1e-5)
    except Exception:  # of a program's own, or of an accelerator alone
        return True


def _of_attention(own: Any, forward: Forward, said: Mapping[str, Any], shape: Shape) -> Iterator[Apart]:
    """Yield what the softmax over the tokens is made of."""
    if not getattr(own, "multi_latent_attention", False):
        key = "query_pre_attn_scalar" if forward.has_query_scalar else "head_dim"
        scalar: Any = said.get(key) if forward.has_query_scalar else shape.number("head_dim")
        scale = getattr(own, "softmax_scale", ABSENT)
        if scale is None and own.kv_channels:
            scale = own.kv_channels**-0.5
        if scalar:
            yield Apart("softmax_scale", scale, key, scalar**-0.5)
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if name in said or hasattr(own, name):
            yield Apart(name, getattr(own, name, None) or None, name, said.get(name) or None)
    window, longest = said.get("sliding_window"), said.get("max_position_embeddings")
    if said.get("use_sliding_window") is False or (window and longest and window >= longest):
        window = None
    if "sliding_window" in said and bool(window) != bool(getattr(own, "window_size", None)):
        yield Apart("window_size", getattr(own, "window_size", None), "sliding_window", window)


def _of_positions(module: Any, own: Any, forward: Forward, said: Mapping[str, Any]) -> Iterator[Apart]:
    """Yield how positions turn queries and keys."""
    is_latent = bool(getattr(own, "multi_latent_attention", False))
    place = own if is_latent else module
    kind = getattr(module, "position_embedding_type", ABSENT)
    if kind is not ABSENT and kind not in ("rope", "mrope", "yarn"):
        yield Apart("position_embedding_type", kind, "model_type", "rope")
        return
    rope = rope_of(said)
    if rope.base is not None:
        yield Apart("rotary_base", getattr(place, "rotary_base", ABSENT), "rope_theta", rope.base)
    part = rope.part if rope.part is not None else forward.rotary_part
    if part is not None:
        yield Apart("rotary_percent", getattr(place, "rotary_percent", ABSENT), "partial_rotary_factor", part)
    if not is_latent:
        # Latent attention of megatron-core turns neighbours whatever it says.
        name = "rotary_interleaved"
        yield Apart(name, getattr(own, name, ABSENT), "model_type", forward.is_interleaved)
    if rope.scaling is not None:
        got = _scaling_of(module, own, is_latent, kind)
        yield Apart("rotary scaling", got, "rope_scaling", rope.scaling)


class Rope(NamedTuple):
    """What config.json says of rotary positions; None where it does not."""

    base: Optional[float]
    part: Optional[float]
    #: "none", "llama3", "linear 8.0", "yarn 40.0", or another name of transformers'.
    scaling: Optional[str]


def rope_of(said: Mapping[str, Any]) -> Rope:
    """Return the rotary positions of a config.json of any transformers: 5 has them in `rope_parameters`."""
    inner = said.get("rope_parameters")
    new = dict(inner) if isinstance(inner, Mapping) else {}
    if any(isinstance(value, Mapping) for value in new.values()):
        # For each kind of layers: those that see all tokens have Megatron's.
        new = dict(new.get("full_attention") or {})
        return Rope(new.get("rope_theta"), new.get("partial_rotary_factor"), None)
    old = said.get("rope_scaling")
    scaling = old if isinstance(old, Mapping) else new
    if "rope_local_base_freq" in said:
        return Rope(said.get("rope_theta"), said.get("partial_rotary_factor"), None)
    base = said.get("rope_theta", new.get("rope_theta"))
    part = said.get("partial_rotary_factor", new.get("partial_rotary_factor"))
    return Rope(base, part, _named(scaling))


def _named(scaling: Mapping[str, Any]) -> str:
    kind = scaling.get("rope_type", scaling.get("type"))
    # On text alone the positions of several dimensions are those of one.
    if kind in (None, "default", "mrope"):
        return "none"
    factor = scaling.get("factor")
    return f"{kind} {float(factor)}" if kind in ("linear", "yarn") and factor else str(kind)


def _scaling_of(module: Any, own: Any, is_latent: bool, kind: object) -> object:
    """Return the scaling of a model, named as that of the files."""
    factor: Any = getattr(own, "rotary_scaling_factor", 1.0)
    if is_latent:
        is_scaled = getattr(own, "rope_type", "") == "yarn" and factor != 1
        return f"yarn {float(factor)}" if is_scaled else "none"
    if getattr(module, "rotary_scaling", False):
        return "llama3"
    rotary = getattr(module, "rotary_pos_emb", None)
    if kind == "yarn":
        factor = getattr(rotary, "scaling_factor", None)
        return f"yarn {float(factor)}" if factor else ABSENT
    factor = getattr(rotary, "seq_len_interpolation_factor", None)
    return f"linear {float(factor)}" if factor else "none"


def _of_routers(own: Any, forward: Forward, said: Mapping[str, Any], shape: Shape) -> Iterator[Apart]:
    """Yield how tokens choose experts."""

    def got(name: str) -> Any:
        return getattr(own, name, ABSENT)

    chosen = said.get("num_experts_per_tok")
    if chosen is not None:
        yield Apart("moe_router_topk", got("moe_router_topk"), "num_experts_per_tok", chosen)
    yield Apart("moe_router_score_function", got("moe_router_score_function"), "model_type", forward.score)
    if forward.score == "softmax":
        key = "norm_topk_prob" if forward.is_normed is None else "model_type"
        is_normed = said.get(key) if forward.is_normed is None else forward.is_normed
        # A softmax before the choice leaves the weights of the chosen as they are.
        if is_normed is not None and chosen != 1 and got("moe_router_pre_softmax") == is_normed:
            yield Apart("moe_router_pre_softmax", is_normed, key, not is_normed)
        return
    factor = got("moe_router_topk_scaling_factor")
    if said.get("routed_scaling_factor") is not None and factor is not ABSENT:
        key = "routed_scaling_factor"
        yield Apart("moe_router_topk_scaling_factor", 1.0 if factor is None else factor, key, said[key])
    yield Apart("moe_router_enable_expert_bias", got("moe_router_enable_expert_bias"), "model_type", True)
    limit = _limit(said.get("n_group"), said.get("topk_group"))
    name = "moe_router_group_topk"
    if got(name) is not ABSENT and "n_group" in said:
        yield Apart(
            f"moe_router_num_groups, {name}",
            _limit(got("moe_router_num_groups"), got(name)),
            "n_group, topk_group",
            limit,
        )


def _limit(groups: Optional[int], chosen: Optional[int]) -> Optional[tuple[int, int]]:
    """Return (groups of experts, those of them that a token may choose from); None where it may from all."""
    return (groups, chosen) if groups and chosen and chosen < groups else None
