"""megatron-core's GPTModel from files of each family that it has the layers of: transformers' logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from family_models import SIZES, built, config_of, tensors_of, with_prediction, write
from gpt import forward, initialise
from heard import heard
from pool import Pool

from torch_dcp_backport import dist_checkpointing
from torch_dcp_backport.megatron.convert import convert

pytest.importorskip("megatron.core")
pytest.importorskip("transformers")

#: Name -> (TP, EP); each on four ranks.
CASES = {"mistral": (2, 1), "mixtral": (1, 4), "phi3": (2, 1), "deepseek_v3": (2, 1)}
FP32 = {"torch_dtype": "float32", "rms_norm_eps": 1e-6, "rope_theta": 10000.0}
CHANGED: dict[str, dict[str, Any]] = {
    # Of a group of experts the best two decide, of all here.
    "deepseek_v3": {"topk_group": 2, "routed_scaling_factor": 1.0, "norm_topk_prob": True}
}


class Attention(torch.nn.Module):
    """Causal attention with values of another width than keys, which megatron-core's own does not have."""

    def __init__(self, *_: Any, softmax_scale: float, **__: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> Any:
        q, k, v = (part.permute(1, 2, 0, 3) for part in (query, key, value))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return out.permute(2, 0, 1, 3).flatten(2)


def transformer_config(config: dict[str, Any], tp: int, ep: int) -> Any:
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    heads = config["num_attention_heads"]
    common: dict[str, Any] = {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "num_attention_heads": heads,
        "num_query_groups": config["num_key_value_heads"],
        "kv_channels": config.get("head_dim", config["hidden_size"] // heads),
        "ffn_hidden_size": config["intermediate_size"],
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "layernorm_epsilon": 1e-6,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": True,
        "perform_initialization": False,
        "params_dtype": torch.float32,
        "pipeline_dtype": torch.float32,
        **dict.fromkeys(("persist_layer_norm", "bias_activation_fusion", "masked_softmax_fusion"), False),
        **dict.fromkeys(("bias_dropout_fusion", "apply_rope_fusion", "gradient_accumulation_fusion"), False),
        "tensor_model_parallel_size": tp,
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": tp,
        "moe_router_load_balancing_type": "none",
    }
    if config["model_type"] == "mixtral":
        common.update(num_moe_experts=4, moe_ffn_hidden_size=config["intermediate_size"], moe_router_topk=2)
        common.update(moe_router_pre_softmax=False)
    if config["model_type"] != "deepseek_v3":
        return TransformerConfig(**common)
    return MLATransformerConfig(
        **common,
        qk_layernorm=True,
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
        moe_router_topk_scaling_factor=1.0,
        moe_layer_freq=[0, 1, 1, 1],
    )


def model_of(config: dict[str, Any], tp: int, ep: int, predicts: int = 0) -> torch.nn.Module:
    initialise(tp, 1, ep=ep)
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.models.gpt.gpt_model import GPTModel

    made = transformer_config(config, tp, ep)
    made.mtp_num_layers = predicts or None
    spec = gpt_layer_specs.get_gpt_decoder_block_spec(
        made, use_transformer_engine=False, normalization="RMSNorm"
    )
    if config["model_type"] == "deepseek_v3":
        for layer in spec.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = Attention
    more = {}
    if predicts:
        more["mtp_block_spec"] = gpt_layer_specs.get_gpt_mtp_block_spec(
            made, spec, use_transformer_engine=False
        )
    model = GPTModel(
        made,
        spec,
        **more,
        vocab_size=64,
        max_sequence_length=32,
        position_embedding_type="rope",
        rotary_base=10000,
        parallel_output=False,
    )
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(torch.nan)
    return model.eval()


class Sizes:
    """What `gpt.forward` asks of a decoder."""

    hidden, vocab = SIZES["hidden_size"], SIZES["vocab_size"]


def logits(api: Any, folder: str, config: dict[str, Any], tp: int, ep: int) -> torch.Tensor:
    model = model_of(config, tp, ep)
    with heard("megatron") as said:
        api.load_hf(model, folder)
    # It is built as the files say.
    assert not said
    assert not any(param.isnan().any() for param in model.parameters())
    out = forward(model, Sizes)  # type: ignore[arg-type]
    again = model_of(config, tp, ep)
    api.save_hf(model, f"{folder}-saved", like=folder)
    api.load_hf(again, f"{folder}-saved")
    assert all(map(torch.equal, model.parameters(), again.parameters()))
    assert all(map(torch.equal, model.buffers(), again.buffers()))
    return out


def out_of_a_checkpoint(api: Any, folder: str, config: dict[str, Any], tp: int, ep: int) -> list[str]:
    """What a converted checkpoint fills otherwise than the files do, in the names that the model asks for."""
    model, other = model_of(config, tp, ep), model_of(config, tp, ep)
    state = dist_checkpointing.load({"model": model.sharded_state_dict()}, f"{folder}-ckpt")
    model.load_state_dict(state["model"])
    api.load_hf(other, folder)
    wanted = {**dict(other.named_parameters()), **dict(other.named_buffers())}
    got = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return [key for key, value in wanted.items() if not torch.equal(got[key], value)]


def states_asked_for(api: Any, folder: str, config: dict[str, Any]) -> tuple[list[str], list[str], list[str]]:
    """States that a model of prediction asks for; parameters that are unlike the files', or not filled."""
    model, other = model_of(config, 1, 1, 1), model_of(config, 1, 1, 1)
    asked = model.sharded_state_dict()
    objects = sorted({part.key for part in asked.values() if part.key.endswith("_extra_state")})
    state = dist_checkpointing.load({"model": asked}, f"{folder}-ckpt")
    model.load_state_dict(state["model"])
    api.load_hf(other, folder)
    wanted = dict(other.named_parameters())
    unlike = [key for key, value in model.named_parameters() if not torch.equal(value, wanted[key])]
    return objects, unlike, [key for key, value in wanted.items() if value.isnan().any()]


@pytest.fixture(scope="module")
def core_ranks():
    pool = Pool(4, "torch_dcp_backport.megatron", timeout=60.0, limit=170.0)
    yield pool.run
    pool.close()


@pytest.mark.parametrize("name", CASES)
def test_the_logits_are_those_of_transformers(core_ranks, tmp_path, name):
    tp, ep = CASES[name]
    changed = {**FP32, **CHANGED.get(name, {})}
    model = built(name, torch.float32, **changed)
    with torch.no_grad():
        for value in model.state_dict().values():
            value.mul_(0.3)
        wanted = model(torch.arange(8).view(1, 8)).logits
    tensors = {key: value.clone() for key, value in model.state_dict().items()}
    write(name, tmp_path / "hf", tensors, **changed)
    for got in core_ranks(logits, str(tmp_path / "hf"), config_of(name, **changed), tp, ep):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    convert(tmp_path / "hf", tmp_path / "hf-ckpt")
    said = str(tmp_path / "hf"), config_of(name, **changed), tp, ep
    assert core_ranks(out_of_a_checkpoint, *said) == [[]] * 4


def test_a_checkpoint_with_multi_token_prediction_is_what_the_model_asks_for(core_ranks, tmp_path) -> None:
    """The states of its modules are where their modules are: beside a layer, or in it."""
    changed = {**FP32, **CHANGED["deepseek_v3"], "num_nextn_predict_layers": 1}
    tensors = with_prediction({key: value.float() for key, value in tensors_of("deepseek_v3").items()})
    write("deepseek_v3", tmp_path / "hf", tensors, **changed)
    convert(tmp_path / "hf", tmp_path / "hf-ckpt")
    said = str(tmp_path / "hf"), config_of("deepseek_v3", **changed)
    for objects, unlike, unfilled in core_ranks(states_asked_for, *said):
        assert "mtp.layers.0.eh_proj._extra_state" in objects
        assert any(key.startswith("mtp.layers.0.transformer_layer.") for key in objects)
        assert (unlike, unfilled) == ([], [])
