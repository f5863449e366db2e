"""A small Qwen2 of transformers: loaded into Megatron layouts, saved, and opened again, bit for bit."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from decoders import Decoder, models_of, spot_of, write_folder

from torch_dcp_backport.megatron.convert import convert

transformers = pytest.importorskip("transformers")

KINDS = {
    "qwen2": Decoder("qwen2", vocab=48, tied=True),
    "qwen3": Decoder("qwen3", head_dim=6, vocab=48),
    "llama": Decoder("llama", heads=8, kv_heads=4, head_dim=2, vocab=48),
}


def original(decoder: Decoder, folder: Path) -> Any:
    config = transformers.AutoConfig.for_model(**decoder.config)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, torch_dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="4KB")
    return model


def there_and_back(api: Any, folder: str, decoder: Decoder, style: str) -> None:
    spot = spot_of(decoder, style, dist.get_rank(), 2, 2, rows=40)
    models = models_of(decoder, spot, decoder.tensors())
    said: dict[str, Any] = {"parallel": api.Parallel(spot.tp_rank, 2)}
    if style == "verl":
        said["layers"] = spot.chunks
    api.load_hf(models, folder, **said)
    api.save_hf(models, folder + "-saved", like=folder, how=api.Export(file_bytes=6000), **said)


@pytest.mark.parametrize("style", ["verl", "mcore"])
@pytest.mark.parametrize("kind", KINDS)
def test_from_pretrained_opens_an_export_bit_for_bit(ranks, tmp_path, kind, style):
    os.environ["HF_HUB_OFFLINE"] = "1"
    model = original(KINDS[kind], tmp_path / "hf")
    ranks(there_and_back, str(tmp_path / "hf"), KINDS[kind], style)
    again, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf-saved", torch_dtype="auto", output_loading_info=True
    )
    assert not any(info.values()), info
    state = again.state_dict()
    assert set(state) == set(model.state_dict())
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
    ids = torch.arange(12).view(2, 6)
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)


def bare(api: Any, folder: str, decoder: Decoder) -> None:
    spot = spot_of(decoder, "mcore", dist.get_rank(), 2, 2, rows=40)
    models = models_of(decoder, spot, decoder.tensors())
    said: dict[str, Any] = {"parallel": api.Parallel(spot.tp_rank, 2)}
    api.load_hf(models, folder, **said)
    like = {**decoder.config, "architectures": ["Qwen2ForCausalLM"]}
    api.save_hf(models, folder + "-saved", like=like, **said)


def test_files_of_a_model_without_its_head_are_opened_as_transformers_does(ranks, tmp_path):
    os.environ["HF_HUB_OFFLINE"] = "1"
    model = original(KINDS["qwen2"], tmp_path / "whole")
    model.model.save_pretrained(tmp_path / "hf")
    ranks(bare, str(tmp_path / "hf"), KINDS["qwen2"])
    again, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf-saved", torch_dtype="auto", output_loading_info=True
    )
    assert not any(info.values()), info
    assert all(torch.equal(again.state_dict()[key], value) for key, value in model.state_dict().items())


def test_the_configuration_of_a_value_model_says_so(tmp_path):
    """Made of a language model's folder, as a critic is."""
    decoder = KINDS["qwen3"]
    original(decoder, tmp_path / "hf")
    tensors = {key: value for key, value in decoder.tensors().items() if key != "lm_head.weight"}
    head = torch.randn(1, decoder.hidden, dtype=torch.bfloat16)
    write_folder(tmp_path / "critic", decoder, {**tensors, "score.weight": head}, files=1)
    shutil.copy(tmp_path / "hf" / "config.json", tmp_path / "critic" / "config.json")
    convert(tmp_path / "critic", tmp_path / "ckpt")
    convert(tmp_path / "ckpt", tmp_path / "back")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "back")
    assert (config.architectures, config.num_labels) == (["Qwen3ForSequenceClassification"], 1)
    opened, info = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "back", torch_dtype="auto", output_loading_info=True
    )
    assert not any(info.values()), info
    assert torch.equal(opened.score.weight, head)
    # verl opens it so; the bias that the class has begins as zero.
    critic = transformers.AutoModelForTokenClassification.from_pretrained(
        tmp_path / "back", torch_dtype="auto"
    )
    assert torch.equal(critic.score.weight, head)
    assert not critic.score.bias.any()
