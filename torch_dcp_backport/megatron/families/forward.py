"""How the models of each family compute, where config.json does not say it. A table alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Optional


class Forward(NamedTuple):
    """The facts of a family's forward pass that its class in transformers has, and config.json has not."""

    #: Whether norms multiply by one more than the weight.
    is_zero_centred: bool = False
    #: Whether rotary positions turn neighbouring elements of a head, and not its halves.
    is_interleaved: bool = False
    #: The part of a head that rotary positions turn, where config.json does not say it; None is not known.
    rotary_part: Optional[float] = 1.0
    #: The activation, where it is not the one that config.json names.
    activation: Optional[str] = None
    #: How routers make scores.
    score: str = "softmax"
    #: Whether the weights of the chosen experts sum up to one; None: as `norm_topk_prob` says.
    is_normed: Optional[bool] = None
    #: Whether attention scales by `query_pre_attn_scalar`.
    has_query_scalar: bool = False
    #: The value that the gated part of an MLP is moved by.
    linear_offset: float = 0.0


FORWARD: Mapping[str, Forward] = {
    **dict.fromkeys(
        ("llama", "mistral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "qwen3_vl_moe_text", "phi3"),
        Forward(),
    ),
    "mixtral": Forward(is_normed=True),
    **dict.fromkeys(("gemma2", "gemma3_text"), Forward(is_zero_centred=True, has_query_scalar=True)),
    **dict.fromkeys(("glm", "glm4"), Forward(is_interleaved=True, rotary_part=None)),
    "deepseek_v3": Forward(score="sigmoid"),
    "gpt_oss": Forward(activation="quick_gelu", is_normed=True, linear_offset=1.0),
}
