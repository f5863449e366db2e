"""Small models of every family, and what parameters must hold: by torch.cat and chunk alone."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from decoders import Spot, inner, module_of, write_file
from torch import nn
from values import value_of

Tensors = dict[str, torch.Tensor]
SIZES: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 40,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LATENT: dict[str, Any] = {
    **SIZES,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
    "rope_interleave": True,
}
#: Of a layer of multi-token prediction: the files' name -> megatron-core's.
BESIDE = {"enorm": "enorm", "hnorm": "hnorm", "shared_head.norm": "final_layernorm"}
ROUTER_BIAS = "mlp.router.expert_bias"


class Rank(NamedTuple):
    """A rank's place in its groups."""

    tp: int
    tp_size: int
    ep: int = 0
    ep_size: int = 1

    def rows(self, value: torch.Tensor) -> torch.Tensor:
        return value.chunk(self.tp_size)[self.tp]

    def columns(self, value: torch.Tensor) -> torch.Tensor:
        return value.chunk(self.tp_size, 1)[self.tp]

    def gated(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.rows(gate), self.rows(up)])

    def fused(
        self, config: dict[str, Any], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """megatron-core's rows of query, key and value: group by group."""
        groups = zip(*(part.chunk(config["num_key_value_heads"]) for part in (q, k, v)))
        return self.rows(torch.cat([torch.cat(group) for group in groups]))


#: (config, the layer's HF tensors by their names in it, the place) -> the parameters of a layer.
Layer = Callable[[dict[str, Any], Tensors, Rank], Tensors]


def attention(config: dict[str, Any], hf: Tensors, rank: Rank) -> Tensors:
    found = {
        "input_layernorm.weight": hf["input_layernorm.weight"],
        "self_attention.linear_proj.weight": rank.columns(hf["self_attn.o_proj.weight"]),
    }
    for kind in ("weight", "bias"):
        if f"self_attn.q_proj.{kind}" in hf:
            parts = (hf[f"self_attn.{name}_proj.{kind}"] for name in "qkv")
            found[f"self_attention.linear_qkv.{kind}"] = rank.fused(config, *parts)
    for name in "qk":
        if f"self_attn.{name}_norm.weight" in hf:
            found[f"self_attention.{name}_layernorm.weight"] = hf[f"self_attn.{name}_norm.weight"]
    return found


def mlp(hf: Tensors, rank: Rank, norm: str = "post_attention_layernorm") -> Tensors:
    return {
        "pre_mlp_layernorm.weight": hf[f"{norm}.weight"],
        "mlp.linear_fc1.weight": rank.gated(hf["mlp.gate_proj.weight"], hf["mlp.up_proj.weight"]),
        "mlp.linear_fc2.weight": rank.columns(hf["mlp.down_proj.weight"]),
    }


def experts(hf: Tensors, rank: Rank, path: str, names: tuple[str, str, str], count: int) -> Tensors:
    """Experts as modules of their own; their TP is that of the rest."""
    found: Tensors = {}
    for here, number in enumerate(torch.arange(count).chunk(rank.ep_size)[rank.ep].tolist()):
        gate, up, down = (hf[f"{path}.{number}.{name}.weight"] for name in names)
        found[f"mlp.experts.local_experts.{here}.linear_fc1.weight"] = rank.gated(gate, up)
        found[f"mlp.experts.local_experts.{here}.linear_fc2.weight"] = rank.columns(down)
    return found


def plain(config: dict[str, Any], hf: Tensors, rank: Rank) -> Tensors:
    return {**attention(config, hf, rank), **mlp(hf, rank)}


def mixtral(config: dict[str, Any], hf: Tensors, rank: Rank) -> Tensors:
    moe = "block_sparse_moe"
    return {
        **attention(config, hf, rank),
        "pre_mlp_layernorm.weight": hf["post_attention_layernorm.weight"],
        "mlp.router.weight": hf[f"{moe}.gate.weight"],
        **experts(hf, rank, f"{moe}.experts", ("w1", "w3", "w2"), config["num_local_experts"]),
    }


def qwen3_moe(config: dict[str, Any], hf: Tensors, rank: Rank) -> Tensors:
    return {
        **attention(config, hf, rank),
        "pre_mlp_layernorm.weight": hf["post_attention_layernorm.weight"],
        "mlp.router.weight": hf["mlp.gate.weight"],
        **experts(hf, rank, "mlp.experts", ("gate_proj", "up_proj", "down_proj"), config["num_experts"]),
    }


def gemma(config: dict[str, Any], hf: Tensors, rank: Rank) -> Tensors:
    return {
        **attention(config, hf, rank),
        "self_attention.linear_proj.post_layernorm.weight": hf["post_attention_layernorm.weight"],
        **mlp(hf, rank, "pre_feedforward_layernorm"),
        "mlp.linear_fc2.post_layernorm.weight": hf["post_feedforward_layernorm.weight"],
    }


def with_halves(hf: Tensors) -> Tensors:
    gate, up = hf["mlp.gate_up_proj.weight"].chunk(2)
    return {**hf, "mlp.gate_proj.weight": gate, "mlp.up_proj.weight": up}


def phi3(config: dict[str, Any], hf: Tensors, rank: Rank) -> Tensors:
    dim = config["hidden_size"] // config["num_attention_heads"]
    sizes = [dim * config[f"num_{name}_heads"] for name in ("attention", "key_value", "key_value")]
    split = zip("qkv", hf["self_attn.qkv_proj.weight"].split(sizes))
    parts = {f"self_attn.{name}_proj.weight": part for name, part in split}
    return plain(config, {**with_halves(hf), **parts}, rank)


def glm(config: dict[str, Any], hf: Tensors, rank: Rank) -> Tensors:
    found = plain(config, with_halves(hf), rank)
    behind = ("post_self_attn_layernorm.weight", "post_mlp_layernorm.weight")
    return {**found, **{name: hf[name] for name in behind if name in hf}}


def deepseek(config: dict[str, Any], hf: Tensors, rank: Rank) -> Tensors:
    at, of = "self_attention", "self_attn"
    found = {
        "input_layernorm.weight": hf["input_layernorm.weight"],
        f"{at}.linear_kv_down_proj.weight": rank.rows(hf[f"{of}.kv_a_proj_with_mqa.weight"]),
        f"{at}.kv_layernorm.weight": hf[f"{of}.kv_a_layernorm.weight"],
        f"{at}.linear_kv_up_proj.weight": rank.rows(hf[f"{of}.kv_b_proj.weight"]),
        f"{at}.linear_proj.weight": rank.columns(hf[f"{of}.o_proj.weight"]),
    }
    if config["q_lora_rank"]:
        # Held whole by later releases of megatron-core; as it is, here.
        found[f"{at}.linear_q_down_proj.weight"] = hf[f"{of}.q_a_proj.weight"]
        found[f"{at}.q_layernorm.weight"] = hf[f"{of}.q_a_layernorm.weight"]
        found[f"{at}.linear_q_up_proj.weight"] = rank.rows(hf[f"{of}.q_b_proj.weight"])
    else:
        found[f"{at}.linear_q_proj.weight"] = rank.rows(hf[f"{of}.q_proj.weight"])
    if "mlp.gate.weight" not in hf:
        return {**found, **mlp(hf, rank)}
    shared = [hf[f"mlp.shared_experts.{name}_proj.weight"] for name in ("gate", "up", "down")]
    return {
        **found,
        "pre_mlp_layernorm.weight": hf["post_attention_layernorm.weight"],
        "mlp.router.weight": hf["mlp.gate.weight"],
        ROUTER_BIAS: hf["mlp.gate.e_score_correction_bias"],
        "mlp.shared_experts.linear_fc1.weight": rank.gated(*shared[:2]),
        "mlp.shared_experts.linear_fc2.weight": rank.columns(shared[2]),
        **experts(hf, rank, "mlp.experts", ("gate_proj", "up_proj", "down_proj"), config["n_routed_experts"]),
    }


def all_experts(hf: Tensors, rank: Rank, is_in_turns: bool) -> Tensors:
    """Of tensors that have all experts, turned: gate and up in turns, or one behind the other."""
    fused, down = hf["mlp.experts.gate_up_proj"], hf["mlp.experts.down_proj"]
    found: Tensors = {}
    for here, number in enumerate(torch.arange(len(down)).chunk(rank.ep_size)[rank.ep].tolist()):
        at = f"mlp.experts.local_experts.{here}."
        for kind, values in (("weight", fused), ("bias", hf.get("mlp.experts.gate_up_proj_bias"))):
            if values is not None:
                rows = values[number].transpose(0, -1)
                pair = (rows[::2], rows[1::2]) if is_in_turns else rows.chunk(2)
                found[f"{at}linear_fc1.{kind}"] = rank.gated(*pair)
        found[f"{at}linear_fc2.weight"] = rank.columns(down[number].t())
        if "mlp.experts.down_proj_bias" in hf:
            found[f"{at}linear_fc2.bias"] = hf["mlp.experts.down_proj_bias"][number]
    return found


def gpt_oss(config: dict[str, Any], hf: Tensors, rank: Rank) -> Tensors:
    return {
        **attention(config, hf, rank),
        "self_attention.linear_proj.bias": hf["self_attn.o_proj.bias"],
        "self_attention.core_attention.softmax_offset": rank.rows(hf["self_attn.sinks"]),
        "pre_mlp_layernorm.weight": hf["post_attention_layernorm.weight"],
        "mlp.router.weight": hf["mlp.router.weight"],
        "mlp.router.bias": hf["mlp.router.bias"],
        **all_experts(hf, rank, True),
    }


def qwen3_vl_moe(config: dict[str, Any], hf: Tensors, rank: Rank) -> Tensors:
    return {
        **attention(config, hf, rank),
        "pre_mlp_layernorm.weight": hf["post_attention_layernorm.weight"],
        "mlp.router.weight": hf["mlp.gate.weight"],
        **all_experts(hf, rank, False),
    }


MOE = {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}
SMALL_HEADS = {**SIZES, "head_dim": 6}
FAMILIES: dict[str, tuple[dict[str, Any], Layer]] = {
    "mistral": ({**SMALL_HEADS, "sliding_window": None}, plain),
    "mixtral": (MOE, mixtral),
    "gemma2": (SMALL_HEADS, gemma),
    "gemma3_text": (SMALL_HEADS, gemma),
    "phi3": (SIZES, phi3),
    "glm": ({**SMALL_HEADS, "attention_bias": True, "partial_rotary_factor": 1.0}, glm),
    "glm4": ({**SMALL_HEADS, "attention_bias": True}, glm),
    "gpt_oss": ({**MOE, "head_dim": 6}, gpt_oss),
    "deepseek_v3": (LATENT, deepseek),
    "deepseek_v3 without a rank of queries": ({**LATENT, "q_lora_rank": None}, deepseek),
}


#: Of which not everything is tried.
OTHERS: dict[str, tuple[dict[str, Any], Layer]] = {
    "qwen2": (SIZES, plain),
    "qwen2_5_vl": (SIZES, plain),
    "qwen3_vl_moe_text": ({**SMALL_HEADS, "num_experts": 4, "moe_intermediate_size": 8}, qwen3_vl_moe),
    "qwen3_moe": ({**SMALL_HEADS, "num_experts": 4, "moe_intermediate_size": 8}, qwen3_moe),
}
EVERY = {**FAMILIES, **OTHERS}
#: Name -> the model of transformers that has the same tensors.
TEXT = {"qwen2_5_vl": "qwen2"}


def config_of(name: str, **changed: Any) -> dict[str, Any]:
    return {"model_type": name.partition(" ")[0], "torch_dtype": "bfloat16", **EVERY[name][0], **changed}


def built(name: str, dtype: torch.dtype, **changed: Any) -> Any:
    """A model of transformers with a value of its own in every parameter and saved buffer."""
    import transformers

    made = transformers.AutoConfig.for_model(**config_of(name, **changed))
    model = transformers.AutoModelForCausalLM.from_config(made, attn_implementation="eager").to(dtype).eval()
    with torch.no_grad():
        for key, value in model.state_dict().items():
            value.copy_(value_of(key, tuple(value.shape), torch.float32))
    return model


def tensors_of(name: str) -> Tensors:
    if name == "qwen3_vl_moe_text":
        return packed()
    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory() as folder:
        # transformers 5 has experts in one tensor, and takes them apart as it writes.
        built(TEXT.get(name, name), torch.bfloat16).save_pretrained(folder)
        state = load_file(Path(folder, "model.safetensors"))
    # As files have it: routers choose in fp32.
    return {key: value.float() if key.endswith("correction_bias") else value for key, value in state.items()}


def packed() -> Tensors:
    """Files of a sparse text tower, from those of a model that has a tensor for each expert."""
    tensors = tensors_of("qwen3_moe")
    for layer in range(4):
        at = f"model.layers.{layer}.mlp.experts."
        gate, up, down = (
            torch.stack([tensors.pop(f"{at}{number}.{name}_proj.weight").t() for number in range(4)])
            for name in ("gate", "up", "down")
        )
        tensors[f"{at}gate_up_proj"] = torch.cat([gate, up], 2)
        tensors[f"{at}down_proj"] = down.contiguous()
    return tensors


def with_prediction(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Files with a fifth layer that predicts a word more: a sparse layer, and what is beside it."""
    at = "model.layers.4."
    layer = {
        key.replace("model.layers.3.", at): value + 1 for key, value in tensors.items() if ".layers.3." in key
    }
    beside = {f"{at}{name}.weight": torch.randn(16).bfloat16() for name in BESIDE}
    beside[f"{at}eh_proj.weight"] = torch.randn(16, 32).bfloat16()
    copies = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
    return {**tensors, **layer, **beside, **{at + name: tensors[of] for name, of in copies.items()}}


def write(name: str, folder: Path, tensors: Tensors, **changed: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_of(name, **changed)))
    write_file(folder / "model.safetensors", tensors)


def stage_of(name: str, hf: Tensors, rank: Rank, layers: list[int], is_tied: bool) -> Tensors:
    """The parameters of a stage; the vocabulary is padded to 48."""
    config, layer_of = EVERY[name]
    found: Tensors = {}
    for here, layer in enumerate(layers):
        at = f"model.layers.{layer}."
        own = {key[len(at) :]: value for key, value in hf.items() if key.startswith(at)}
        params = layer_of(config, own, rank)
        found.update((f"decoder.layers.{here}.{key}", value) for key, value in params.items())

    def vocab(value: torch.Tensor) -> torch.Tensor:
        return rank.rows(torch.cat([value, value.new_zeros(8, value.shape[1])]))

    embedding, is_last = hf["model.embed_tokens.weight"], config["num_hidden_layers"] - 1 in layers
    if 0 in layers:
        found["embedding.word_embeddings.weight"] = vocab(embedding)
    if is_last:
        found["decoder.final_layernorm.weight"] = hf["model.norm.weight"]
    if is_last and not (is_tied and 0 in layers):
        found["output_layer.weight"] = vocab(embedding if is_tied else hf["lm_head.weight"])
    return found


def stage_module(params: Tensors, layers: list[int]) -> nn.Module:
    """A chunk with these parameters, full of NaN; the bias of a router is a buffer, as in megatron-core."""
    spot = Spot("mcore", 0, 1, [layers], True, True, 0)
    module = module_of({key: value for key, value in params.items() if ROUTER_BIAS not in key}, spot, layers)
    for key, value in params.items():
        if ROUTER_BIAS in key:
            router = inner(module).get_submodule(key.rpartition(".")[0])
            router.register_buffer("expert_bias", torch.full_like(value, torch.nan))
    return module


def held(module: nn.Module) -> Tensors:
    return {**dict(inner(module).named_parameters()), **dict(inner(module).named_buffers())}
