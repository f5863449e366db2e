"""Models of the scenarios, and every way in which torch wraps or shards one."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP
from values import value_of

try:
    from torch.distributed.fsdp import fully_shard
except ImportError:  # torch 2.4 and 2.5
    from torch.distributed._composable.fsdp import fully_shard


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4, bias=False)
        self.norm = nn.LayerNorm(4)
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("cache", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.down(self.up(x)))


class Net(nn.Module):
    """Even dimensions on up to 4 ranks; the first block is frozen where asked."""

    def __init__(self, tied: bool = False, frozen: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(4, 8, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        if frozen:
            self.blocks[0].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Odd(nn.Module):
    """Shapes that do not divide: uneven, one row, empty, scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.uneven = nn.Linear(3, 7)
        self.row = nn.Parameter(torch.zeros(1, 6))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.register_buffer("scalar", torch.tensor(0.5))
        self.register_buffer("none", torch.zeros(0))
        self.blocks = nn.ModuleList()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.uneven(x) * self.row.sum()


def fill(model: nn.Module, salt: str = "") -> nn.Module:
    """The same values on every rank, by name."""
    with torch.no_grad():
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            value.copy_(value_of(salt + name, tuple(value.shape), value.dtype))
    return model


def zero(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for value in (*model.parameters(), *model.buffers()):
            value.zero_()
    return model


def full_state(make: Callable[[], nn.Module] = Net, salt: str = "ckpt.") -> dict[str, Any]:
    """A full checkpoint of the unwrapped model."""
    return dict(fill(make(), salt).state_dict())


def on_rank0(state: dict[str, Any]) -> dict[str, Any]:
    return dict(state) if dist.get_rank() == 0 else {}


def mesh_of(*shape: int, names: Optional[tuple[str, ...]] = None) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def world() -> int:
    return dist.get_world_size()


def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if hasattr(model, "head"):
        parallelize_module(model, mesh, {"head": ColwiseParallel()})
    return model


def checkpointed(model: nn.Module) -> nn.Module:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(block)
    return model


def fsdp2_tp(model: nn.Module) -> nn.Module:
    mesh = mesh_of(2, world() // 2, names=("dp", "tp"))
    return shard(tensor_parallel(model, mesh["tp"]), mesh["dp"])


def fsdp1(model: nn.Module, orig: bool = True, **kwargs: Any) -> nn.Module:
    device = torch.device("cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for index, block in enumerate(model.blocks):
            model.blocks[index] = FSDP1(block, device_id=device, use_orig_params=orig, **kwargs)
        return FSDP1(model, device_id=device, use_orig_params=orig, **kwargs)


def replicated(model: nn.Module) -> nn.Module:
    from torch.distributed._composable.replicate import replicate

    return replicate(model)


def compiled(model: nn.Module) -> nn.Module:
    """Never run, so any backend does; the default one takes ten seconds to import."""
    return torch.compile(model, backend="eager")


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda model: model,
    "ddp": DDP,
    "replicate": replicated,
    "compile": compiled,
    "ddp(compile)": lambda model: DDP(compiled(model)),
    "compile(ddp)": lambda model: compiled(DDP(model)),
    "ckpt": checkpointed,
    "ddp(ckpt)": lambda model: DDP(checkpointed(model)),
    "fsdp2": lambda model: shard(model, mesh_of(world())),
    "fsdp2(ckpt)": lambda model: shard(checkpointed(model), mesh_of(world())),
    "compile(fsdp2)": lambda model: compiled(shard(model, mesh_of(world()))),
    "tp": lambda model: tensor_parallel(model, mesh_of(world())),
    "fsdp2+tp": fsdp2_tp,
    "hsdp": lambda model: shard(model, mesh_of(2, world() // 2, names=("rep", "shard"))),
    "fsdp1": fsdp1,
    "fsdp1(ckpt)": lambda model: fsdp1(checkpointed(model)),
    "fsdp1-flat": lambda model: fsdp1(model, orig=False),
    "compile(fsdp1)": lambda model: compiled(fsdp1(model)),
    "fsdp1-hsdp": lambda model: fsdp1(
        model,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        device_mesh=mesh_of(2, world() // 2, names=("rep", "shard")),
    ),
}
SHARDED2 = ("fsdp2", "fsdp2(ckpt)", "compile(fsdp2)", "tp", "fsdp2+tp", "hsdp")
WHOLE = ("plain", "ddp", "replicate", "compile", "ddp(compile)", "compile(ddp)", "ckpt", "ddp(ckpt)")
FSDP1S = ("fsdp1", "fsdp1(ckpt)", "fsdp1-flat", "compile(fsdp1)", "fsdp1-hsdp")


def wrap(kind: str, model: nn.Module) -> nn.Module:
    return WRAPPERS[kind](model)


def live(model: nn.Module) -> dict[str, Any]:
    """What a model holds: parameters and buffers by their own names."""
    unwrapped = {id(module) for module in model.modules() if isinstance(module, FSDP1)}
    if unwrapped:
        with FSDP1.summon_full_params(model):
            return {name: value.detach().clone() for name, value in model.named_parameters()} | {
                name: value.clone() for name, value in model.named_buffers()
            }
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
