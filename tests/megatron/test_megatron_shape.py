"""config.json, and which layers a stage has."""

from __future__ import annotations

import pytest
from decoders import Decoder

from torch_dcp_backport.megatron import stages
from torch_dcp_backport.megatron._src.shape import shape_of

CONFIG = Decoder().config


def test_a_head_dim_of_its_own_counts():
    assert shape_of({**CONFIG, "head_dim": 24}).hf_shape("model.layers.0.self_attn.q_proj.weight") == (96, 16)
    assert shape_of({**CONFIG, "head_dim": None}).number("head_dim") == 4
    qwen3 = {key: value for key, value in CONFIG.items() if key != "head_dim"}
    assert shape_of({**qwen3, "model_type": "qwen3"}).number("head_dim") == 128


@pytest.mark.parametrize("kind", ["qwen2_moe", "qwen3_moe"])
def test_no_experts_are_a_dense_model(kind):
    sparse = Decoder(kind, experts=4, expert_rows=10, shared_rows=6 if kind == "qwen2_moe" else 0)
    shape = shape_of({**sparse.config, "num_experts": 0})
    dense = Decoder(kind.partition("_")[0])
    assert shape.names_in(0) == shape_of(dense.config).names_in(0)
    assert not shape.is_mixed
    for key, size in dense.shapes().items():
        assert shape.hf_shape(key) == size, key


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba'"),
        ({"quantization_config": {"bits": 4}}, "quantised weights are not loaded"),
        ({"num_hidden_layers": None}, "num_hidden_layers=None"),
        ({"hidden_size": "16"}, "hidden_size='16'"),
        ({"num_key_value_heads": 3}, "4 heads, which 3 KV heads cannot share"),
    ],
)
def test_a_config_that_cannot_be_says_why(change, says):
    with pytest.raises(ValueError, match=says):
        shape_of({**CONFIG, **change})


def test_layers_are_dealt_out_as_megatron_does():
    assert stages(4, 2) == [[[0, 1]], [[2, 3]]]
    # Chunk v of stage p begins at v * (L / vpp) + p * (L / pp / vpp).
    assert stages(12, 2, 3) == [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [10, 11]]]
    assert stages(6, 2, first=4) == [[[0, 1, 2, 3]], [[4, 5]]]
    assert stages(7, 3, first=2, last=1) == [[[0, 1]], [[2, 3, 4, 5]], [[6]]]


@pytest.mark.parametrize(
    "numbers", [(5, 2, 1, None, None), (6, 2, 2, None, None), (4, 2, 1, 3, 3), (4, 2, 1, 5, None)]
)
def test_layers_that_cannot_be_dealt_out_are_an_error(numbers):
    layers, pp, chunks, first, last = numbers
    with pytest.raises(ValueError, match=f"{layers} layers cannot be dealt out"):
        stages(layers, pp, chunks, first=first, last=last)
