"""The numbers of a model, as its config.json has them. Knows nothing of ranks or tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Optional

from torch_dcp_backport.transfer import Problem

KINDS = ("qwen2", "qwen3", "llama")


@dataclass(frozen=True)
class Shape:
    """A decoder of one of `KINDS`."""

    kind: str
    layers: int
    hidden: int
    heads: int
    #: Key and value heads; each serves `heads / kv_heads` query heads.
    kv_heads: int
    #: Of one head; not always `hidden / heads`.
    head_dim: int
    intermediate: int
    vocab: int
    #: Whether the files hold no lm_head, since it is the embedding.
    tied: bool
    #: Whether all four projections of the attention have biases; those of q, k and v Qwen2 has in any case.
    attention_bias: bool
    #: Whether those of the MLP have.
    mlp_bias: bool

    def has(self, name: str) -> bool:
        """Whether every layer has this tensor, by its HF name in the layer."""
        module, _, part = name.rpartition(".")
        module = module.rpartition(".")[2]
        if module in ("q_norm", "k_norm"):
            return self.kind == "qwen3"
        if part == "weight":
            return True
        if module in ("gate_proj", "up_proj", "down_proj"):
            return self.mlp_bias
        return self.attention_bias or (self.kind == "qwen2" and module != "o_proj")

    def hf_shape(self, key: str) -> tuple[int, ...]:
        """The shape of a tensor in the files, by its HF key."""
        name, _, kind = key.rpartition(".")
        sizes = self._sizes(name.rpartition(".")[2])
        return sizes if kind == "weight" else sizes[:1]

    def _sizes(self, module: str) -> tuple[int, ...]:
        heads, groups = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "embed_tokens": (self.vocab, self.hidden),
            "lm_head": (self.vocab, self.hidden),
            "q_proj": (heads, self.hidden),
            "k_proj": (groups, self.hidden),
            "v_proj": (groups, self.hidden),
            "o_proj": (self.hidden, heads),
            "gate_proj": (self.intermediate, self.hidden),
            "up_proj": (self.intermediate, self.hidden),
            "down_proj": (self.hidden, self.intermediate),
            "q_norm": (self.head_dim,),
            "k_norm": (self.head_dim,),
        }.get(module, (self.hidden,))


def shape_of(config: Mapping[str, Any]) -> Shape:
    """The numbers of a config.json.

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
    return Shape(
        kind=kind,
        layers=number("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=number("intermediate_size"),
        vocab=number("vocab_size"),
        tied=bool(config.get("tie_word_embeddings", False)),
        # The classes of the others do not read it.
        attention_bias=kind != "qwen2" and bool(config.get("attention_bias", False)),
        mlp_bias=kind == "llama" and bool(config.get("mlp_bias", False)),
    )


def misfits(shape: Shape, tp_size: int, style: str) -> list[Problem]:
    """Numbers that a TP size does not divide; `style` is "verl" or "mcore"."""
    found = []
    for name, value in (("num_attention_heads", shape.heads), ("intermediate_size", shape.intermediate)):
        if value % tp_size:
            found.append(Problem(f"{name} cannot be cut", "", f"{value}", f"a multiple of TP {tp_size}"))
    if shape.kv_heads % tp_size and tp_size % shape.kv_heads:
        expected = f"a multiple or a divisor of TP {tp_size}"
        found.append(Problem("num_key_value_heads cannot be cut", "", f"{shape.kv_heads}", expected))
    rows = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    if style == "mcore" and rows % tp_size:
        # It deals out the rows of all groups, not the groups.
        found.append(Problem("linear_qkv cannot be cut", "", f"{rows} rows", f"a multiple of TP {tp_size}"))
    return found
