"""Experts of megatron-core's GroupedMLP: two parameters of a layer hold those of all experts, transposed."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from decoders import (
    Decoder,
    Spot,
    differences,
    expected,
    inner,
    module_of,
    read_folder,
    spot_of,
    write_folder,
)
from torch import nn

from torch_dcp_backport.megatron import Parallel, load_hf

MODELS = {
    "qwen3_moe": Decoder("qwen3_moe", layers=2, experts=4, expert_rows=10, dense=(1,)),
    "qwen2_moe": Decoder("qwen2_moe", layers=2, experts=6, expert_rows=6, shared_rows=4),
}


def grouped(params: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Parameters with those of modules of their own as `x @ weight1[e]` and `x @ weight2[e]` want them."""
    found: dict[str, torch.Tensor] = {}
    stacks: dict[str, list[torch.Tensor]] = {}
    for name, value in params.items():
        expert = re.fullmatch(r"(.*\.mlp\.experts\.)local_experts\.\d+\.linear_fc([12])\.weight", name)
        if expert is None:
            found[name] = value
        else:
            stacks.setdefault(f"{expert[1]}weight{expert[2]}", []).append(value.t())
    for name, values in stacks.items():
        hidden = values[0].shape[0 if name.endswith("1") else 1]
        shape = (hidden, -1) if name.endswith("1") else (-1, hidden)
        found[name] = torch.stack(values).reshape(shape)
    return found


def model_of(decoder: Decoder, spot: Spot) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    wanted = grouped(expected(decoder, spot, decoder.tensors())[0])
    model = module_of(wanted, spot, spot.chunks[0])
    for layer in inner(model).decoder.layers:  # type: ignore[union-attr]
        if hasattr(layer.mlp, "experts"):
            layer.mlp.experts.num_local_experts = decoder.experts // spot.ep_size
    return model, wanted


def there_and_back(api: Any, folder: str, name: str) -> list[str]:
    decoder = MODELS[name]
    spot = spot_of(decoder, "mcore", dist.get_rank(), 2, 1, ep=2)
    parallel = Parallel(spot.tp_rank, 2, spot.ep_rank, 2)
    model, wanted = model_of(decoder, spot)
    assert any(name.endswith("mlp.experts.weight1") for name in wanted)
    load_hf(model, folder, parallel=parallel)
    api.save_hf(model, f"{folder}-saved", like=folder, parallel=parallel)
    return differences([model], [wanted])


@pytest.mark.parametrize("name", MODELS)
def test_grouped_experts_are_loaded_and_saved(ranks, tmp_path, name):
    tensors = MODELS[name].tensors()
    write_folder(tmp_path / "hf", MODELS[name], tensors)
    assert ranks(there_and_back, str(tmp_path / "hf"), name) == [[]] * 4
    got = read_folder(tmp_path / "hf-saved")
    assert set(got) == set(tensors)
    assert all(torch.equal(got[key], value) for key, value in tensors.items())


def test_grouped_experts_of_another_number_are_an_error_that_names_one(tmp_path):
    decoder = MODELS["qwen3_moe"]
    write_folder(tmp_path, decoder, decoder.tensors())
    model, _ = model_of(decoder, spot_of(decoder, "mcore", 0, 1, 1))
    inner(model).decoder.layers[0].mlp.experts.num_local_experts = 2  # type: ignore[union-attr, index]
    with pytest.raises(
        RuntimeError, match=r"wrong shape: decoder.layers.0.mlp.experts.weight1\[0\] of rank 0"
    ):
        load_hf(model, tmp_path)
    del inner(model).decoder.layers[0].mlp.experts.num_local_experts  # type: ignore[union-attr, index]
    with pytest.raises(RuntimeError, match=r"in its Hugging Face files: .*experts.weight1"):
        load_hf(model, tmp_path)
