"""A model with Qwen2's shapes, parallelised in several ways, and values for all of its training state."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from models import fully_shard
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from values import value_of

from torch_dcp_backport.dist_checkpointing import ShardedTensor
from torch_dcp_backport.dist_checkpointing.dict_utils import nested_values

#: How a model is spread -> the shape of its mesh, for a world size.
KINDS = {
    "plain": lambda world: (),
    "FSDP": lambda world: (world,),
    "HSDP": lambda world: (2, world // 2),
    "TP x FSDP": lambda world: (world // 2, 2),
}


class Attention(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(hidden, hidden)
        self.k_proj = nn.Linear(hidden, hidden // heads)
        self.v_proj = nn.Linear(hidden, hidden // heads)
        self.o_proj = nn.Linear(hidden, hidden, bias=False)


class MLP(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)


class Layer(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.self_attn = Attention(hidden, 7)
        self.mlp = MLP(hidden, inner)
        self.input_layernorm = nn.LayerNorm(hidden, bias=False)


class Qwen(nn.Module):
    """Shapes of Qwen2, with uneven ones at 3 and 8 ranks; the head is tied to the embedding."""

    def __init__(self, layers: int = 2, hidden: int = 56, inner: int = 152, words: int = 301) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(words, hidden)
        self.layers = nn.ModuleList(Layer(hidden, inner) for _ in range(layers))
        self.lm_head = nn.Linear(hidden, words, bias=False)
        self.lm_head.weight = self.embed_tokens.weight
        self.register_buffer("inv_freq", torch.zeros(4))


def build(kind: str, **shape: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model of zeros and its AdamW."""
    model = Qwen(**shape)
    for value in (*model.parameters(), *model.buffers()):
        value.detach().zero_()
    names = {"HSDP": ("replicate", "shard"), "TP x FSDP": ("data", "tensor")}.get(kind)
    mesh_shape = KINDS[kind](dist.get_world_size())
    if mesh_shape:
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
        if kind == "TP x FSDP":
            for layer in model.layers:
                plan: dict[str, Any] = {f"mlp.{name}": ColwiseParallel() for name in ("gate_proj", "up_proj")}
                plan.update({"mlp.down_proj": RowwiseParallel(), "self_attn.o_proj": RowwiseParallel()})
                parallelize_module(layer, mesh["tensor"], plan)
            mesh = mesh["data"]
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.25)


def expected(part: ShardedTensor) -> torch.Tensor:
    """What this part of a training state has."""
    # The head is the embedding.
    whole = value_of(part.key.replace("lm_head", "embed_tokens"), tuple(part.global_shape), part.dtype)
    return whole[part.global_slice()] if part.global_shape else whole


def parts_of(state: Any) -> list[ShardedTensor]:
    return [part for part in nested_values(state) if isinstance(part, ShardedTensor)]


def fill(state: Any) -> None:
    for part in parts_of(state):
        assert part.data is not None
        part.data.copy_(expected(part))


def differences(state: Any) -> list[str]:
    return [part.key for part in parts_of(state) if not torch.equal(part.data, expected(part))]
