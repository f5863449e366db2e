"""Small models of transformers, with values of their own in every parameter and buffer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

SIZES = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
SPARSE = {**SIZES, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
DEEP = {
    **SPARSE, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
}  # fmt: skip
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
#: Name -> (class, class of the configuration, its settings).
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "a language model": ("Qwen2ForCausalLM", "Qwen2Config", SIZES),
    "a tied head": ("Qwen2ForCausalLM", "Qwen2Config", {**SIZES, "tie_word_embeddings": True}),
    "no head": ("Qwen2Model", "Qwen2Config", SIZES),
    "a value for each token": ("Qwen2ForTokenClassification", "Qwen2Config", {**SIZES, "num_labels": 1}),
    "a value for each text": ("LlamaForSequenceClassification", "LlamaConfig", {**SIZES, "num_labels": 3}),
    "experts": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**SPARSE, "num_experts": 4, "head_dim": 8}),
    "buffers": ("DeepseekV3ForCausalLM", "DeepseekV3Config", DEEP),
    "turned matrices": (
        "GPT2LMHeadModel", "GPT2Config",
        {"vocab_size": 40, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16},
    ),
    "an encoder": (
        "BertForMaskedLM", "BertConfig", {key: SIZES[key] for key in SIZES if key != "num_key_value_heads"}
    ),
    "an encoder and a decoder": (
        "T5ForConditionalGeneration", "T5Config",
        {"vocab_size": 40, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
    ),
    "pictures": (
        "LlavaForConditionalGeneration", "LlavaConfig",
        {
            "text_config": {"model_type": "llama", **SIZES}, "image_token_index": 3,
            "vision_config": {"model_type": "clip_vision_model", "image_size": 16, "patch_size": 8, **VISION},
        },
    ),
}  # fmt: skip


def made(name: str, seed: int = 0, **changed: Any) -> Any:
    """A model of a family, in evaluation; by transformers alone."""
    import transformers

    kind, configuration, settings = FAMILIES[name]
    model = getattr(transformers, kind)(getattr(transformers, configuration)(**{**settings, **changed}))
    draw = torch.Generator().manual_seed(seed)
    persistent = set(model.state_dict())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.1)
        for key, buffer in model.named_buffers():
            if key in persistent and buffer.is_floating_point():
                buffer.copy_(torch.randn(buffer.shape, generator=draw) * 0.1)
    return model.eval()


def opened(folder: Path, kind: Any) -> Any:
    """The model that `from_pretrained` opens, of which nothing is missing and nothing left out."""
    model, info = kind.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return model


def same(model: Any, other: Any) -> bool:
    state, found = model.state_dict(), other.state_dict()
    return set(state) == set(found) and all(torch.equal(value, found[key]) for key, value in state.items())
