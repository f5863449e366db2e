"""A small Qwen2 of transformers: loaded into Megatron layouts, saved, and opened again, bit for bit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from decoders import Decoder, models_of, spot_of

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
