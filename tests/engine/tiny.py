"""Tiny models of transformers' families, with what makes a family differ from the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import small
import torch

SIZES = {
    "vocab_size": small.VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 32,
    "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4, "v_head_dim": 4,
}  # fmt: skip
ROUTED = {
    "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "n_group": 1,
    "topk_group": 1,
}  # fmt: skip
WINDOWS = {"use_sliding_window": True, "max_window_layers": 1}
DROPOUTS = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
OPTIONS: dict[str, dict[str, Any]] = {
    "aria_text": {"moe_num_experts": 6, "moe_topk": 2},
    "cohere": {"use_qk_norm": True},
    "deepseek_v2": {**ROUTED, **LATENT},
    "deepseek_v3": {**ROUTED, **LATENT, "first_k_dense_replace": 1},
    "dots1": {
        **ROUTED, "n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.0,
        "max_window_layers": 1,
    },
    "ernie4_5_moe": {
        "moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 8, "moe_layer_start_index": 0,
    },
    "flex_olmo": {"num_experts": 4, "num_experts_per_tok": 2},
    "glm4_moe": ROUTED,
    "gpt-sw3": DROPOUTS,
    "gpt2": DROPOUTS,
    "gpt_bigcode": DROPOUTS,
    "gpt_neox": {"attention_bias": True},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "longcat_flash": {
        **LATENT, "num_layers": 2, "n_routed_experts": 6, "zero_expert_num": 2, "moe_topk": 2,
        "expert_ffn_hidden_size": 8, "ffn_hidden_size": 24,
    },
    "mixtral": {"num_local_experts": 4},
    "modernbert-decoder": {"pad_token_id": 0},
    "phi": {"qk_layernorm": True},
    "qwen2": WINDOWS,
    "qwen2_moe": EXPERTS,
    "qwen3": WINDOWS,
    "qwen3_moe": EXPERTS,
    "qwen3_next": {
        **EXPERTS, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 4,
        "linear_value_head_dim": 4, "layer_types": ["linear_attention", "full_attention"],
    },
    "seed_oss": {"residual_dropout": 0.0, "attention_dropout": 0.0},
}  # fmt: skip


def configured(family: str, **options: Any) -> Any:
    import transformers

    sizes = dict(SIZES)
    if family == "longcat_flash":
        del sizes["num_hidden_layers"]
    return transformers.AutoConfig.for_model(family, **{**sizes, **OPTIONS.get(family, {}), **options})


def model(family: str, *, scale: float = 0.3, **options: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(configured(family, **options)).float()
    with torch.no_grad():
        for name, param in made.named_parameters():
            # Else they begin as ones and zeros, and attention as an average.
            param.copy_(scale * torch.randn_like(param) + ("norm" in name))
    return made


def write(folder: Path, family: str, **options: Any) -> Any:
    made = model(family, **options)
    made.save_pretrained(folder)
    return made
