"""A GPTModel that is built otherwise than config.json says: refused, or warned of; never a false alarm."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from decoders import inner
from family_models import EVERY, Rank, config_of, held, stage_module, stage_of, tensors_of, write
from heard import heard
from torch.nn import functional

from torch_dcp_backport.megatron._src.computing import rope_of

pytest.importorskip("transformers")
SAYS = "the model computes otherwise than config.json says"
#: What files say of the forward pass, beside their numbers.
SAID: dict[str, Any] = {"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu"}
OF_FAMILY: dict[str, dict[str, Any]] = {
    "gemma2": {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3_text": {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 24},
    "glm": {"partial_rotary_factor": 1.0},
    "glm4": {"partial_rotary_factor": 0.5},
    "deepseek_v3": {"routed_scaling_factor": 2.5, "norm_topk_prob": True},
    "qwen3_moe": {"num_experts_per_tok": 2, "norm_topk_prob": True},
    "qwen3_vl_moe_text": {"num_experts_per_tok": 2, "norm_topk_prob": False},
}


def said_of(name: str) -> dict[str, Any]:
    return {**SAID, **OF_FAMILY.get(name.partition(" ")[0], {})}


def tanh_gelu(x: torch.Tensor) -> torch.Tensor:
    return functional.gelu(x, approximate="tanh")


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


def transformer_config(name: str, config: dict[str, Any]) -> dict[str, Any]:
    """megatron-core's settings for a family, under the names of TransformerConfig."""
    kind, heads = name.partition(" ")[0], config["num_attention_heads"]
    head = config.get("head_dim", config["hidden_size"] // heads)
    made: dict[str, Any] = {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "num_attention_heads": heads,
        "num_query_groups": config["num_key_value_heads"],
        "kv_channels": head,
        "ffn_hidden_size": config["intermediate_size"],
        "gated_linear_unit": True,
        "activation_func": functional.silu,
        "normalization": "RMSNorm",
        "layernorm_epsilon": 1e-6,
        "layernorm_zero_centered_gamma": False,
        "rotary_interleaved": False,
        "softmax_scale": None,
        "window_size": None,
        "num_moe_experts": None,
        "multi_latent_attention": False,
    }
    experts = next((config[key] for key in ("num_experts", "num_local_experts") if key in config), None)
    if experts:
        is_normed = config.get("norm_topk_prob", True)
        made.update(num_moe_experts=experts, moe_router_topk=2, moe_router_score_function="softmax")
        made.update(moe_router_pre_softmax=not is_normed, moe_shared_expert_intermediate_size=None)
        made["moe_ffn_hidden_size"] = config.get("moe_intermediate_size", config["intermediate_size"])
    if kind.startswith("gemma"):
        made.update(layernorm_zero_centered_gamma=True, activation_func=tanh_gelu, softmax_scale=24**-0.5)
    if kind == "gemma2":
        made.update(attn_logit_softcapping=50.0, final_logit_softcapping=30.0)
    if kind.startswith("glm"):
        made["rotary_interleaved"] = True
    if kind == "gpt_oss":
        made.update(activation_func=quick_gelu, glu_linear_offset=1.0, activation_func_clamp_value=7.0)
        made["window_size"] = (128, 0)
    if kind == "deepseek_v3":
        made.update(
            multi_latent_attention=True,
            num_query_groups=heads,
            kv_channels=head,
            q_lora_rank=config["q_lora_rank"],
            kv_lora_rank=config["kv_lora_rank"],
            qk_head_dim=config["qk_nope_head_dim"],
            qk_pos_emb_head_dim=config["qk_rope_head_dim"],
            v_head_dim=config["v_head_dim"],
            rope_type="rope",
            rotary_base=10000,
            rotary_percent=1.0,
            rotary_scaling_factor=1.0,
            num_moe_experts=config["n_routed_experts"],
            moe_ffn_hidden_size=config["moe_intermediate_size"],
            moe_shared_expert_intermediate_size=config["moe_intermediate_size"] * config["n_shared_experts"],
            moe_router_topk=2,
            moe_router_score_function="sigmoid",
            moe_router_enable_expert_bias=True,
            moe_router_topk_scaling_factor=2.5,
            moe_router_num_groups=config["n_group"],
            moe_router_group_topk=config["topk_group"],
        )
    return made


def gpt_model(name: str, tensors: Any, config: dict[str, Any], changed: dict[str, Any], rank: Rank) -> Any:
    """A stand-in for a GPTModel with its configuration; `changed` are attributes of either."""
    tied = "lm_head.weight" not in tensors
    module = stage_module(stage_of(name, tensors, rank, list(range(4)), tied), list(range(4)))
    own = transformer_config(name, config)
    outer = {
        "rotary_base": 10000,
        "rotary_percent": config.get("partial_rotary_factor", 1.0),
        "position_embedding_type": "rope",
        "rotary_scaling": False,
    }
    for key, value in changed.items():
        (outer if key in outer and not own["multi_latent_attention"] else own)[key] = value
    model = inner(module)
    model.config = SimpleNamespace(**own)
    for key, value in outer.items():
        setattr(model, key, value)
    return module


def filled(
    api: Any,
    folder: str,
    name: str,
    tensors: Any,
    config: dict[str, Any],
    changed: dict[str, Any],
    **said: Any,
) -> tuple[str, list[str], bool]:
    """(the error, the warnings, whether anything was written) of a load on two ranks of TP."""
    rank = Rank(dist.get_rank(), dist.get_world_size())
    module = gpt_model(name, tensors, config, changed, rank)
    error = ""
    with heard("megatron") as texts:
        try:
            api.load_hf(module, folder, parallel=api.Parallel(*rank), **said)
        except RuntimeError as failure:
            error = str(failure)
    is_written = not all(value.isnan().all() for value in held(module).values())
    return error, [text for text in texts if SAYS in text], is_written


def files(name: str, folder: Path) -> tuple[Any, dict[str, Any]]:
    tensors, said = tensors_of(name), said_of(name)
    write(name, folder, tensors, **said)
    return tensors, config_of(name, **said)


@pytest.mark.parametrize("name", EVERY)
def test_a_model_that_is_built_as_the_files_say_is_no_alarm(pools, tmp_path: Path, name: str) -> None:
    tensors, config = files(name, tmp_path)
    for error, texts, _ in pools.run(filled, str(tmp_path), name, tensors, config, {}, world=2):
        assert (error, texts) == ("", [])


#: (family, what the model has otherwise, what the error says): the same rows in another order.
MISPLACED = [
    (
        "qwen2",
        {"num_attention_heads": 2, "kv_channels": 8, "num_query_groups": 1},
        ["another num_attention_heads", "2", "4, as num_attention_heads of config.json says"],
    ),
    ("qwen2", {"num_query_groups": 4}, ["another num_query_groups", "2, as num_key_value_heads"]),
    ("mistral", {"kv_channels": 12}, ["another kv_channels", "12", "6, as head_dim"]),
    ("qwen2", {"gated_linear_unit": False}, ["another gated_linear_unit", "False"]),
    ("qwen2", {"num_layers": 5}, ["another num_layers", "5", "4, as num_hidden_layers"]),
    ("qwen2", {"hidden_size": 32}, ["another hidden_size", "32", "16, as hidden_size"]),
    ("qwen2", {"ffn_hidden_size": 12}, ["another ffn_hidden_size", "12", "24, as intermediate_size"]),
    ("qwen2", {"num_moe_experts": 4}, ["another num_moe_experts", "4", "0, as model_type"]),
    ("mixtral", {"num_moe_experts": 8}, ["another num_moe_experts", "8", "4, as num_local_experts"]),
    ("mixtral", {"moe_ffn_hidden_size": 6}, ["another moe_ffn_hidden_size", "6", "24, as intermediate_size"]),
    ("deepseek_v3", {"qk_head_dim": 4, "qk_pos_emb_head_dim": 6}, ["another qk_head_dim", "6, as qk_nope"]),
    ("deepseek_v3", {"v_head_dim": 6, "qk_head_dim": 10}, ["another v_head_dim", "10, as v_head_dim"]),
]


@pytest.mark.parametrize(("name", "changed", "says"), MISPLACED, ids=str)
def test_a_model_with_rows_elsewhere_is_refused(pools, tmp_path: Path, name, changed, says) -> None:
    """On every rank, and before anything is written."""
    tensors, config = files(name, tmp_path)
    for said in ({}, {"compare": False}):
        results = pools.run(filled, str(tmp_path), name, tensors, config, changed, world=2, **said)
        assert len({error for error, *_ in results}) == 1
        for error, _, is_written in results:
            assert all(part in error for part in says), error
            assert not is_written


#: (family, what the model has otherwise, what the warning says): the same rows, and another forward pass.
OTHERWISE = [
    ("qwen2", {"rotary_interleaved": True}, "rotary_interleaved=True (False by model_type)"),
    ("glm", {"rotary_interleaved": False}, "rotary_interleaved=False (True by model_type)"),
    ("glm4", {"rotary_percent": 1.0}, "rotary_percent=1.0 (0.5 by partial_rotary_factor)"),
    ("qwen2", {"rotary_base": 1000000}, "rotary_base=1000000 (10000.0 by rope_theta)"),
    ("qwen2", {"rotary_scaling": True}, "rotary scaling='llama3' ('none' by rope_scaling)"),
    ("qwen2", {"position_embedding_type": "none"}, "position_embedding_type='none' ('rope' by model_type)"),
    ("deepseek_v3", {"rotary_base": 50000}, "rotary_base=50000 (10000.0 by rope_theta)"),
    (
        "deepseek_v3",
        {"rope_type": "yarn", "rotary_scaling_factor": 40},
        "rotary scaling='yarn 40.0' ('none' by rope_scaling)",
    ),
    ("qwen2", {"layernorm_epsilon": 1e-2}, "layernorm_epsilon=0.01 (1e-06 by rms_norm_eps)"),
    ("qwen2", {"normalization": "LayerNorm"}, "normalization='LayerNorm' ('RMSNorm' by model_type)"),
    ("qwen2", {"activation_func": functional.gelu}, "activation_func='gelu' ('silu' by hidden_act)"),
    ("gemma2", {"activation_func": functional.gelu}, "activation_func='gelu' ('gelu_pytorch_tanh' by"),
    ("qwen2", {"layernorm_zero_centered_gamma": True}, "layernorm_zero_centered_gamma=True (False by"),
    ("gemma2", {"layernorm_zero_centered_gamma": False}, "layernorm_zero_centered_gamma=False (True by"),
    ("gemma2", {"attn_logit_softcapping": None}, "attn_logit_softcapping=None (50.0 by attn_logit_soft"),
    (
        "gemma3_text",
        {"softmax_scale": None},
        f"softmax_scale={6**-0.5} ({24**-0.5} by query_pre_attn_scalar)",
    ),
    ("qwen2", {"softmax_scale": 1.0}, "softmax_scale=1.0 (0.5 by head_dim)"),
    ("mistral", {"window_size": (8, 0)}, "window_size=(8, 0) (None by sliding_window)"),
    ("mixtral", {"moe_router_topk": 1}, "moe_router_topk=1 (2 by num_experts_per_tok)"),
    ("mixtral", {"moe_router_pre_softmax": True}, "moe_router_pre_softmax=True (False by model_type)"),
    ("qwen3_moe", {"moe_router_pre_softmax": True}, "moe_router_pre_softmax=True (False by norm_topk_prob)"),
    ("mixtral", {"moe_router_score_function": "sigmoid"}, "moe_router_score_function='sigmoid' ('softmax'"),
    ("deepseek_v3", {"moe_router_topk_scaling_factor": None}, "moe_router_topk_scaling_factor=1.0 (2.5 by"),
    (
        "deepseek_v3",
        {"moe_router_group_topk": 2},
        "moe_router_group_topk=None ((2, 1) by n_group, topk_group)",
    ),
    ("gpt_oss", {"glu_linear_offset": 0.0}, "glu_linear_offset=0.0 (1.0 by model_type)"),
]


@pytest.mark.parametrize(("name", "changed", "says"), OTHERWISE, ids=str)
def test_a_model_with_another_forward_pass_is_warned_of_once(
    pools, tmp_path: Path, name, changed, says
) -> None:
    """One warning on the first rank that names both values; `compare=False` says nothing."""
    tensors, config = files(name, tmp_path)
    first, second = pools.run(filled, str(tmp_path), name, tensors, config, changed, world=2)
    assert [first[0], second[0], second[1]] == ["", "", []]
    assert len(first[1]) == 1
    assert says in first[1][0]
    silent = pools.run(filled, str(tmp_path), name, tensors, config, changed, world=2, compare=False)
    assert [texts for _, texts, _ in silent] == [[], []]


def saved(
    api: Any, folder: str, name: str, tensors: Any, config: dict[str, Any], changed: dict[str, Any]
) -> tuple[str, list[str]]:
    rank = Rank(dist.get_rank(), dist.get_world_size())
    module = gpt_model(name, tensors, config, changed, rank)
    with torch.no_grad():
        for value in held(module).values():
            value.fill_(1.0)
    error, where = "", {"parallel": api.Parallel(*rank)}
    with heard("megatron") as texts:
        try:
            api.save_hf(module, f"{folder}-saved", like=config, **where)
            api.gather_hf(module, config=config, **where, compare=False)
        except RuntimeError as failure:
            error = str(failure)
    return error, [text for text in texts if SAYS in text]


def test_an_export_is_compared_as_a_load_is(pools, tmp_path: Path) -> None:
    tensors, config = files("qwen2", tmp_path / "hf")
    said = str(tmp_path / "hf"), "qwen2", tensors, config
    for error, _ in pools.run(saved, *said, {"num_query_groups": 4}, world=2):
        assert "another num_query_groups" in error
    assert not (tmp_path / "hf-saved").exists()
    (error, texts), other = pools.run(saved, *said, {"rotary_base": 500000.0}, world=2)
    assert (error, other) == ("", ("", []))
    assert len(texts) == 1
    assert "rotary_base=500000.0 (10000.0 by rope_theta)" in texts[0]


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"rope_theta": 5e5, "rope_scaling": None}, (5e5, None, "none")),
        ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", "factor": 8}}, (5e5, None, "llama3")),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, (5e5, None, "none")),
        (
            {
                "rope_parameters": {
                    "rope_theta": 1e4,
                    "rope_type": "yarn",
                    "factor": 40,
                    "partial_rotary_factor": 0.5,
                }
            },
            (1e4, 0.5, "yarn 40.0"),
        ),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}, (None, None, "none")),
        (
            {
                "rope_parameters": {
                    "full_attention": {"rope_theta": 1e6},
                    "sliding_attention": {"rope_theta": 1e4},
                }
            },
            (1e6, None, None),
        ),
        ({}, (None, None, "none")),
    ],
    ids=str,
)
def test_positions_are_read_as_transformers_4_and_5_write_them(said: Any, expected: Any) -> None:
    assert tuple(rope_of(said)) == expected
    assert math.isclose(rope_of({**said, "rope_theta": 3.0}).base or 0, 3.0) or "full_attention" in str(said)
