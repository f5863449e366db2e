"""The model that `verify` loads and its checkpoint on disk: Qwen2's shape, random weights, no download.

Must not use the code under test: the checkpoint is read back by other means.
"""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

DTYPE = torch.bfloat16
SEED = 20250
FILES = 4  # about so many, whatever the size, so that there is an index


@dataclass(frozen=True)
class Size:
    """A Qwen2 configuration."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int


SIZES = {
    "full": Size(896, 24, 14, 2, 4864, 151936),  # Qwen2.5-0.5B
    "tiny": Size(256, 4, 4, 2, 1024, 16384),
}


def build(size: str, device: str, *, library: bool) -> nn.Module:
    """Make the model, its embeddings tied; on a device its values are arbitrary."""
    model = (_from_library if library else _built_in)(SIZES[size])
    if device != "meta":
        model = model.to_empty(device=device)
        tie(model)
    return model


def tie(model: nn.Module) -> None:
    model.get_submodule("lm_head").weight = model.get_submodule("model.embed_tokens").weight


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    return list(model.get_submodule("model.layers").children())


def _from_library(size: Size) -> nn.Module:
    library = importlib.import_module("transformers")  # an extra, and only partly typed
    config = library.Qwen2Config(
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        intermediate_size=size.intermediate,
        vocab_size=size.vocabulary,
        max_position_embeddings=32768,
        rope_theta=1e6,
        tie_word_embeddings=True,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(DTYPE)
    try:
        with torch.device("meta"):
            model: nn.Module = library.Qwen2ForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    return model


def _built_in(size: Size) -> nn.Module:
    """Make parameters of the same names and shapes, in the same tree, without a forward."""
    head = size.hidden // size.heads
    kv = size.kv_heads * head

    def linear(rows: int, columns: int, bias: bool = False) -> nn.Module:
        return nn.Linear(columns, rows, bias=bias, device="meta", dtype=DTYPE)

    def norm() -> nn.Module:
        module = nn.Module()
        module.weight = nn.Parameter(torch.empty(size.hidden, device="meta", dtype=DTYPE))
        return module

    def layer() -> nn.Module:
        attention = {
            "q_proj": linear(size.hidden, size.hidden, bias=True),
            "k_proj": linear(kv, size.hidden, bias=True),
            "v_proj": linear(kv, size.hidden, bias=True),
            "o_proj": linear(size.hidden, size.hidden),
        }
        mlp = {
            "gate_proj": linear(size.intermediate, size.hidden),
            "up_proj": linear(size.intermediate, size.hidden),
            "down_proj": linear(size.hidden, size.intermediate),
        }
        return _tree(
            {
                "self_attn": _tree(attention),
                "mlp": _tree(mlp),
                "input_layernorm": norm(),
                "post_attention_layernorm": norm(),
            }
        )

    embedding = nn.Embedding(size.vocabulary, size.hidden, device="meta", dtype=DTYPE)
    inner = {
        "embed_tokens": embedding,
        "layers": nn.ModuleList(layer() for _ in range(size.layers)),
        "norm": norm(),
    }
    model = _tree({"model": _tree(inner), "lm_head": linear(size.vocabulary, size.hidden)})
    tie(model)
    return model


def _tree(children: dict[str, nn.Module]) -> nn.Module:
    """Make a container of modules: FSDP2 refuses torch's own."""
    module = nn.Module()
    for name, child in children.items():
        module.add_module(name, child)
    return module


def write_checkpoint(size: str, folder: str, *, library: bool) -> dict[str, int]:
    """Write random weights in files of a few hundred MB with an index, the tied weight stored once."""
    model = build(size, "cpu", library=library)
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.02, generator=generator)
    size_in_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    if library:
        cast(Any, model).save_pretrained(
            folder, max_shard_size=size_in_bytes // FILES, safe_serialization=True
        )
    else:
        _write_torch_files(dict(model.named_parameters()), Path(folder), size_in_bytes // FILES)
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "bytes": size_in_bytes,
        "files": len(set(Checkpoint(folder).files.values())),
    }


def _write_torch_files(parameters: dict[str, nn.Parameter], folder: Path, most: int) -> None:
    groups: list[dict[str, torch.Tensor]] = [{}]
    filled = 0
    for name, parameter in parameters.items():
        if groups[-1] and filled + parameter.nbytes > most:
            groups.append({})
            filled = 0
        groups[-1][name] = parameter.detach()
        filled += parameter.nbytes
    files = {}
    for number, group in enumerate(groups, 1):
        file = f"pytorch_model-{number:05d}-of-{len(groups):05d}.bin"
        torch.save(group, folder / file)
        files.update(dict.fromkeys(group, file))
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


class Checkpoint:
    """The files on disk, read tensor by tensor or rows by rows."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        (index,) = self._folder.glob("*.index.json")
        self.files: dict[str, str] = json.loads(index.read_text())["weight_map"]

    def rows(self, key: str, first: int, last: int) -> torch.Tensor:
        path = self._folder / self.files[self._stored(key)]
        if path.suffix == ".safetensors":
            from safetensors import safe_open

            with safe_open(str(path), framework="pt") as opened:
                part: torch.Tensor = opened.get_slice(self._stored(key))[first:last]
                return part
        full: torch.Tensor = torch.load(path, mmap=True, weights_only=True)[self._stored(key)]
        return full[first:last].clone()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return all of it in memory of our own (not mapped files), the tied weight under both its names."""
        state = {}
        for file in sorted(set(self.files.values())):
            if file.endswith(".safetensors"):
                from safetensors import safe_open

                with safe_open(str(self._folder / file), framework="pt") as opened:
                    keys = opened.keys()
                    state.update({key: opened.get_tensor(key).clone() for key in keys})
            else:
                loaded = torch.load(self._folder / file, mmap=True, weights_only=True)
                state.update({key: tensor.clone() for key, tensor in loaded.items()})
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
        return state

    def _stored(self, key: str) -> str:
        return "model.embed_tokens.weight" if key == "lm_head.weight" else key
