"""Models of several towers: which family their text tower is of, and where files have it. A table alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Tower(NamedTuple):
    """The text tower of a model of several."""

    #: The model_type whose table it has.
    kind: str
    #: Prefixes that files have had for it, where the table has `model.`; the first that fits counts.
    prefixes: tuple[str, ...]


NEW, OLD = "model.language_model.", "model."
TOWERS = {
    "qwen2_vl": Tower("qwen2", (NEW, OLD)),
    "qwen2_5_vl": Tower("qwen2", (NEW, OLD)),
    "qwen3_vl": Tower("qwen3", (NEW,)),
    "qwen3_vl_moe": Tower("qwen3_vl_moe_text", (NEW,)),
    "gemma3": Tower("gemma3_text", (NEW, "language_model.model.")),
}
#: A head of its own, as older files call it.
OLD_HEAD = "language_model.lm_head.weight"


def text_of(config: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Return (the configuration of the text tower, the model_type of all towers).

    A model of a single tower is its own text tower; the second value is then empty.
    """
    kind = config.get("model_type")
    tower = TOWERS.get(kind) if isinstance(kind, str) else None
    if tower is None or not isinstance(kind, str):
        return dict(config), ""
    part = config.get("text_config")
    # Older files have the numbers of the text at the top.
    text = {**config, **part} if isinstance(part, Mapping) else dict(config)
    tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings"))
    return {**text, "model_type": tower.kind, "tie_word_embeddings": tied}, kind
