"""Models that are not what their config.json says are refused, and named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from decoders import Decoder, inner, models_of, read_folder, spot_of

from torch_dcp_backport import hf
from torch_dcp_backport.megatron import Parallel, load_hf, save_hf

QWEN2, QWEN3, LLAMA = Decoder(layers=2), Decoder("qwen3", layers=2), Decoder("llama", layers=2)


def whole(decoder: Decoder) -> tuple[torch.nn.Module, dict[str, Any]]:
    """A model of one process, with its values."""
    spot = spot_of(decoder, "mcore", 0, 1, 1)
    (model,) = models_of(decoder, spot, decoder.tensors())
    load_hf(model, hf.Given(decoder.tensors(), decoder.config))
    return model, decoder.config


def drop(model: torch.nn.Module, name: str, layers: int) -> None:
    for layer in range(layers):
        parent, _, last = f"decoder.layers.{layer}.{name}".rpartition(".")
        delattr(inner(model).get_submodule(parent), last)


@pytest.mark.parametrize(
    ("decoder", "name", "layers", "says"),
    [
        (QWEN2, "self_attention.linear_qkv.bias", 1, "held by no rank: model.layers.0.self_attn.q_proj.bias"),
        (QWEN2, "self_attention.linear_qkv.bias", 2, "0.self_attn.k_proj.bias and in 1 more layer"),
        (QWEN3, "self_attention.q_layernorm.weight", 1, "layers.0.self_attn.q_norm.weight"),
        (QWEN3, "self_attention.k_layernorm.weight", 1, "layers.0.self_attn.k_norm.weight"),
        (LLAMA, "mlp.linear_fc2.weight", 1, "layers.0.mlp.down_proj.weight"),
        (LLAMA, "mlp.linear_fc1.weight", 1, "layers.0.mlp.up_proj.weight"),
        (LLAMA, "self_attention.linear_proj.weight", 1, "layers.0.self_attn.o_proj.weight"),
        (LLAMA, "input_layernorm.weight", 1, "layers.0.input_layernorm.weight"),
    ],
)
def test_a_model_without_a_part_is_not_exported(tmp_path, decoder, name, layers, says):
    model, config = whole(decoder)
    save_hf(model, tmp_path / "whole", like=config)
    assert set(read_folder(tmp_path / "whole")) == set(decoder.tensors())
    drop(model, name, layers)
    with pytest.raises(RuntimeError) as caught:
        save_hf(model, tmp_path / "saved", like=config)
    assert "held by no rank" in str(caught.value)
    assert says in str(caught.value)
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize(
    ("decoder", "changed", "says"),
    [
        (QWEN2, {"model_type": "llama"}, "not in a llama model .*: model.layers.0.self_attn.q_proj.bias"),
        (QWEN3, {"model_type": "llama"}, "not in a llama model .*: model.layers.0.self_attn.q_norm.weight"),
        (LLAMA, {"model_type": "qwen2"}, "held by no rank: model.layers.0.self_attn.q_proj.bias and in 1"),
        (LLAMA, {"attention_bias": True}, "held by no rank: model.layers.0.self_attn.o_proj.bias"),
        (LLAMA, {"mlp_bias": True}, "held by no rank: model.layers.0.mlp.gate_proj.bias"),
        (QWEN3, {"attention_bias": True}, "held by no rank: model.layers.0.self_attn.q_proj.bias"),
        (LLAMA, {"num_hidden_layers": 1}, r"not in a llama model .*: model.layers.1.\*"),
        (LLAMA, {"num_hidden_layers": 3}, r"held by no rank: model.layers.2.\*"),
    ],
)
def test_a_model_of_another_configuration_is_not_exported(tmp_path, decoder, changed, says):
    model, config = whole(decoder)
    with pytest.raises(RuntimeError, match=says):
        save_hf(model, tmp_path / "saved", like={**config, **changed})
    assert not (tmp_path / "saved").exists()


def test_biases_that_the_configuration_asks_for_are_exported(tmp_path):
    model, config = whole(LLAMA)
    for layer in inner(model).decoder.layers:  # type: ignore[union-attr]
        for name in ("linear_qkv", "linear_proj"):
            linear = layer.self_attention.get_submodule(name)
            linear.bias = torch.nn.Parameter(torch.ones(len(linear.weight)).bfloat16())
    save_hf(model, tmp_path / "saved", like={**config, "attention_bias": True})
    assert "model.layers.1.self_attn.o_proj.bias" in read_folder(tmp_path / "saved")


def with_lm_head(api: Any) -> str:
    spot = spot_of(QWEN2, "mcore", dist.get_rank(), 2, 2)
    hf_tensors = QWEN2.tensors()
    models = models_of(QWEN2, spot, hf_tensors)
    with pytest.raises(RuntimeError) as caught:
        load_hf(
            models,
            hf.Given(hf_tensors, QWEN2.config),
            value_head=True,
            parallel=Parallel(spot.tp_rank, 2),
        )
    assert all(param.isnan().all() for model in models for param in model.parameters())
    return str(caught.value)


def test_a_head_of_many_rows_is_no_value_head(ranks):
    (text,) = set(ranks(with_lm_head))
    for rank in (2, 3):
        name = f"output_layer.weight of rank {rank}, for a value head"
        assert f"wrong shape: {name} (expected (1, 16), got (16, 16))" in text
