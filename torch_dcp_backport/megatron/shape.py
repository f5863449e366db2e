"""The numbers of a model, as its config.json has them. Knows nothing of ranks or tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Optional

from torch_dcp_backport.megatron.names import ORDER
from torch_dcp_backport.transfer import Problem

KINDS = ("qwen2", "qwen3", "llama", "qwen2_moe", "qwen3_moe")


@dataclass(frozen=True)
class Shape:
    """A decoder of one of `KINDS`."""

    kind: str
    layers: int
    hidden: int
    heads: int
    #: Key and value heads; each serves `heads / kv_heads` query heads.
    kv_heads: int
    #: Of each head; not always `hidden / heads`.
    head_dim: int
    intermediate: int
    vocab: int
    #: Whether the files hold no lm_head, since it is the embedding.
    tied: bool
    #: Whether all four projections of the attention have biases.
    attention_bias: bool
    #: Whether the projections of the MLP have them.
    mlp_bias: bool
    #: Whether the projections to q, k and v alone have them.
    qkv_bias: bool = False

    #: Of every sparse layer; 0 in a dense model.
    experts: int = 0
    #: Of each expert.
    expert_intermediate: int = 0
    #: Of the expert that all words go through; 0 where there is none.
    shared_intermediate: int = 0
    #: The layers of a sparse model that are dense.
    dense: tuple[int, ...] = ()

    def is_sparse(self, layer: int) -> bool:
        return bool(self.experts) and layer not in self.dense

    @property
    def is_mixed(self) -> bool:
        """Return whether some layers are dense and some sparse."""
        return len({self.is_sparse(layer) for layer in range(self.layers)}) > 1

    def names_in(self, layer: int) -> frozenset[str]:
        """Return HF names of a layer's tensors, without its prefix; of experts with {} for the number."""
        return _names(self, self.is_sparse(layer))

    def hf_shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of a tensor in the files, by its HF key."""
        name, _, kind = key.rpartition(".")
        path, _, module = name.rpartition(".")
        width = self.intermediate
        if ".mlp.experts." in path:
            width = self.expert_intermediate
        elif path.endswith(".shared_expert"):
            width = self.shared_intermediate
        sizes = self._sizes(module, width)
        return sizes if kind == "weight" else sizes[:1]

    def _sizes(self, module: str, width: int) -> tuple[int, ...]:
        heads, groups = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "embed_tokens": (self.vocab, self.hidden),
            "lm_head": (self.vocab, self.hidden),
            "q_proj": (heads, self.hidden),
            "k_proj": (groups, self.hidden),
            "v_proj": (groups, self.hidden),
            "o_proj": (self.hidden, heads),
            "gate_proj": (width, self.hidden),
            "up_proj": (width, self.hidden),
            "down_proj": (self.hidden, width),
            "gate": (self.experts, self.hidden),
            "shared_expert_gate": (1, self.hidden),
            "q_norm": (self.head_dim,),
            "k_norm": (self.head_dim,),
        }.get(module, (self.hidden,))


@functools.cache
def _names(shape: Shape, is_sparse: bool) -> frozenset[str]:
    return frozenset(name for name in ORDER if _has(shape, is_sparse, name))


def _has(shape: Shape, is_sparse: bool, name: str) -> bool:
    path, _, part = name.rpartition(".")
    path, _, module = path.rpartition(".")
    if module in ("q_norm", "k_norm"):
        return shape.kind.startswith("qwen3")
    if path == "mlp.shared_expert" or module == "shared_expert_gate":
        return is_sparse and shape.shared_intermediate > 0
    if path == "mlp.experts.{}" or module == "gate":
        return is_sparse
    if path == "mlp":
        return not is_sparse and (part == "weight" or shape.mlp_bias)
    if part == "weight":
        return True
    return shape.attention_bias or (shape.qkv_bias and module != "o_proj")


def shape_of(config: Mapping[str, Any]) -> Shape:
    """Return the numbers of a config.json.

    Raises:
        ValueError: another kind of model, quantised weights, or numbers that are missing or do not fit.
    """
    kind = config.get("model_type")
    if kind not in KINDS:
        raise ValueError(f"config.json has the model_type {kind!r}; these are known: {', '.join(KINDS)}")
    if config.get("quantization_config"):
        raise ValueError("config.json has a quantization_config: quantised weights are not loaded")

    def number(name: str, default: Optional[int] = None) -> int:
        value: object = config.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"config.json has {name}={value!r}, where a positive number is needed")
        return value

    hidden, heads = number("hidden_size"), number("num_attention_heads")
    kv_heads = number("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ValueError(f"config.json has {heads} heads, which {kv_heads} KV heads cannot share")
    if config.get("head_dim") is None and kind == "qwen3":
        # Its class has a default of its own, whatever the other numbers are.
        head_dim = 128
    else:
        head_dim = number("head_dim", hidden // heads)
    layers = number("num_hidden_layers")
    return Shape(
        kind=kind,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=number("intermediate_size"),
        vocab=number("vocab_size"),
        tied=bool(config.get("tie_word_embeddings", False)),
        # The classes of the others do not read it.
        attention_bias=not kind.startswith("qwen2") and bool(config.get("attention_bias", False)),
        mlp_bias=kind == "llama" and bool(config.get("mlp_bias", False)),
        qkv_bias=kind == "qwen2" or (kind == "qwen2_moe" and bool(config.get("qkv_bias", True))),
        **(_experts(config, number, layers) if kind.endswith("_moe") else {}),
    )


def _experts(config: Mapping[str, Any], number: Callable[..., int], layers: int) -> dict[str, Any]:
    """Return the numbers that only sparse models have."""
    if config.get("num_experts") == 0:
        # transformers then makes every layer a dense one, whatever the other numbers are.
        return {}
    step, dense = number("decoder_sparse_step", 1), config.get("mlp_only_layers") or ()
    return {
        "experts": number("num_experts"),
        "expert_intermediate": number("moe_intermediate_size"),
        "shared_intermediate": (
            number("shared_expert_intermediate_size") if config["model_type"] == "qwen2_moe" else 0
        ),
        "dense": tuple(layer for layer in range(layers) if layer in dense or (layer + 1) % step),
    }


def misfits(shape: Shape, tp_size: int, style: str, etp_size: int = 1) -> list[Problem]:
    """Return problems for numbers that TP, or the experts' TP, does not divide; style: "verl", "mcore"."""
    sizes = [("num_attention_heads", shape.heads, tp_size)]
    if not shape.experts or shape.dense:
        sizes.append(("intermediate_size", shape.intermediate, tp_size))
    sizes.append(("shared_expert_intermediate_size", shape.shared_intermediate, tp_size))
    problems = [
        Problem(f"{name} cannot be cut", "", f"{value}", f"a multiple of TP {size}")
        for name, value, size in sizes
        if value % size
    ]
    if shape.expert_intermediate % etp_size:
        expected = f"a multiple of the experts' TP {etp_size}"
        problems.append(
            Problem("moe_intermediate_size cannot be cut", "", f"{shape.expert_intermediate}", expected)
        )
    if shape.kv_heads % tp_size and tp_size % shape.kv_heads:
        expected = f"a multiple or a divisor of TP {tp_size}"
        problems.append(Problem("num_key_value_heads cannot be cut", "", f"{shape.kv_heads}", expected))
    rows = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    if style == "mcore" and rows % tp_size:
        # It deals out the rows of all groups, not the groups.
        problems.append(
            Problem("linear_qkv cannot be cut", "", f"{rows} rows", f"a multiple of TP {tp_size}")
        )
    return problems
