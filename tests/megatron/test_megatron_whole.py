"""Models that are not what their config.json says are refused, and named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from decoders import Decoder, inner, models_of, read_folder, spot_of, write_folder

from torch_dcp_backport import hf, transfer
from torch_dcp_backport.hf._src import blocks, sharing
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
        (
            QWEN3,
            {"model_type": "llama"},
            r"no llama model has in its Hugging Face files: \S+q_layernorm.weight",
        ),
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


TIED = QWEN2._replace(tied=True, vocab=30)
#: Larger than one step of a comparison.
LARGE = Decoder("llama", layers=2, hidden=512, heads=4, head_dim=4, vocab=20_000, tied=True)


def tied_head(api: Any, folder: str, decoder: Decoder, change: str) -> str:
    """The text of a save's error; nothing where it went well."""
    spot = spot_of(decoder, "mcore", dist.get_rank(), 2, 2, rows=decoder.vocab // 2 + 1)
    models = models_of(decoder, spot, decoder.tensors())
    said: dict[str, Any] = {"parallel": Parallel(spot.tp_rank, 2)}
    load_hf(models, hf.Given(decoder.tensors(), decoder.config), **said)
    for name, param in inner(models[0]).named_parameters():
        if change == "nan" and param.shape[0] == spot.rows:
            param.data[0] = torch.nan
        elif name == "output_layer.weight":
            # Of the last TP rank the last row is padding.
            at = {"one value": spot.rows - 3, "padding": spot.rows - 1}.get(change)
            if at is not None and spot.tp_rank == 1:
                param.data[at, -1] += 1
    texts = []
    for call in (
        lambda: api.gather_hf(models, config=decoder.config, **said),
        lambda: api.save_hf(models, folder, like=decoder.config, **said),
    ):
        try:
            call()
        except RuntimeError as error:
            texts.append(str(error))
    assert len(texts) in (0, 2)
    return "".join(texts[:1])


@pytest.mark.parametrize("decoder", [TIED, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("change", ["one value", "padding", "nan", "none"])
def test_a_tied_head_of_other_values_is_not_dropped(ranks, tmp_path, decoder, change):
    (text,) = set(ranks(tied_head, str(tmp_path / "saved"), decoder, change))
    assert ("a head of its own: lm_head.weight" in text) == (change == "one value"), text
    assert (tmp_path / "saved").exists() == (change != "one value")
    if change != "one value":
        assert "lm_head.weight" not in read_folder(tmp_path / "saved")


def fails_at_the_end(api: Any, folder: str) -> str:
    spot = spot_of(QWEN2, "mcore", dist.get_rank(), 4, 1)
    models = models_of(QWEN2, spot, QWEN2.tensors())
    part_of = blocks.part_of
    try:
        if dist.get_rank() == 1:
            blocks.part_of = broken  # type: ignore[assignment]
        with pytest.raises(transfer.TransferError) as caught:
            load_hf(models, folder, files="rank0", parallel=Parallel(spot.tp_rank, 4))
    finally:
        blocks.part_of = part_of
    return str(caught.value)


def broken(*_: Any) -> torch.Tensor:
    raise RuntimeError("the device is broken")


def test_a_load_is_over_when_it_is_over_on_every_rank(ranks, tmp_path):
    write_folder(tmp_path / "hf", QWEN2, QWEN2.tensors())
    texts = ranks(fails_at_the_end, str(tmp_path / "hf"))
    assert "the device is broken" in texts[1]


def test_parameters_of_one_memory_are_not_loaded_over_one_another(tmp_path):
    model, config = whole(QWEN2)
    embedding = inner(model).embedding.word_embeddings.weight  # type: ignore[union-attr]
    inner(model).output_layer.weight = torch.nn.Parameter(embedding.data)  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match=r"the same memory: .*output_layer.weight"):
        load_hf(model, hf.Given(QWEN2.tensors(), config))
    tied = {key: value for key, value in QWEN2.tensors().items() if key != "lm_head.weight"}
    load_hf(model, hf.Given(tied, {**config, "tie_word_embeddings": True}))


@pytest.mark.parametrize(
    ("is_sent", "kind", "says"),
    [
        (True, transfer.TransferError, "nothing was changed: the device is broken"),
        (False, RuntimeError, "nothing was changed(?s:.*)the device is broken: model.embed_tokens.weight"),
    ],
)
def test_a_save_that_breaks_off_says_that_nothing_was_changed(tmp_path, monkeypatch, is_sent, kind, says):
    model, config = whole(QWEN2)
    if is_sent:
        # As from ranks that do not see the files.
        monkeypatch.setattr(sharing, "is_narrow", lambda *_: True)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        monkeypatch.setattr(blocks, "part_of", broken)
        with pytest.raises(kind, match=says) as caught:
            save_hf(model, tmp_path / "saved", like=config)
    finally:
        dist.destroy_process_group()
    assert "loaded" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_configuration_that_cannot_be_read_is_named(tmp_path):
    model, _ = whole(QWEN2)
    (tmp_path / "like").mkdir()
    (tmp_path / "like" / "config.json").write_text("{")
    with pytest.raises(RuntimeError, match=f"like={tmp_path}/like"):
        save_hf(model, tmp_path / "saved", like=tmp_path / "like")
