"""What the clients' tests share: torchrun's environment, a training step, what a rank holds."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from models import fully_shard, local_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from values import value_of

#: {key: (dtype, shape of the local tensor, digest of its bits)}
Bits = dict[str, tuple[str, tuple[int, ...], str]]


def environment() -> None:
    """What torchrun would have set for this rank."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, GROUP_RANK="0", WORLD_SIZE=world, LOCAL_WORLD_SIZE=world)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1", TORCHELASTIC_RUN_ID="test")


def full_state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """A full checkpoint of `model`, which may be on the meta device: the same values on every rank."""
    return {
        key: value_of(key, tuple(value.shape), value.dtype)
        for key, value in model.state_dict().items()
        if torch.is_tensor(value)
    }


def train(model: nn.Module, optimizer: Any) -> None:
    """A step with gradients that need no forward pass: FSDP2 has none on the CPU before torch 2.7."""
    for parameter in model.parameters():
        parameter.grad = parameter.detach() * 0.5
    optimizer.step()
    optimizer.zero_grad()


def tensors(tree: Any, prefix: str = "") -> dict[str, torch.Tensor]:
    """The tensors of a nested dict or list by their dotted path."""
    if torch.is_tensor(tree):
        return {prefix: tree}
    items = (
        tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, (list, tuple)) else ()
    )
    return {
        path: value
        for key, branch in items
        for path, value in tensors(branch, f"{prefix}.{key}" if prefix else str(key)).items()
    }


def bits(tree: Any) -> Bits:
    """The tensors of a tree bit for bit, DTensors by their local tensor."""
    found = {}
    for path, value in tensors(tree).items():
        local = local_of(value).contiguous()
        digest = hashlib.sha256(local.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        found[path] = (str(local.dtype), tuple(local.shape), digest)
    return found


def excess(tree: Any) -> dict[str, tuple[int, int]]:
    """{path: (bytes of the storage that it keeps alive, bytes of its own)} where the first is larger.

    For models whose parameters divide evenly: FSDP2 pads other shards. Without our own meter, whose import
    would activate.
    """
    locals_ = {path: local_of(value) for path, value in tensors(tree).items()}
    sizes = {
        path: (local.untyped_storage().nbytes(), local.numel() * local.element_size())
        for path, local in locals_.items()
    }
    return {path: (held, own) for path, (held, own) in sizes.items() if held > own}


def facts(**trees: Any) -> dict[str, Any]:
    """What a test compares between orders ("bits") and what only ours must hold to ("excess")."""
    return {
        "bits": {name: bits(tree) for name, tree in trees.items()},
        "excess": {name: excess(tree) for name, tree in trees.items()},
    }


def tiny_llama() -> nn.Module:
    """A transformers model on the default device, its weights not set on purpose."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": False}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads))


def shard_layers(model: nn.Module, layers: Iterable[nn.Module]) -> None:
    """FSDP2 over all ranks, layer by layer and then the rest."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
