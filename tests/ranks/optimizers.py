"""Optimizers, wrappers and ways of saving of the optimizer tests, and what an optimizer holds."""

from __future__ import annotations

import copy
from typing import Any, Optional

import torch
import torch.distributed as dist
from models import Model, build, local_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from values import value_of

WRAPPERS = ("plain", "ddp", "fsdp2")
#: How a state dict is saved and loaded again.
WAYS = ("sharded", "flat", "full", "full-flat", "rank0", "rank0-flat")


def wrapped(kind: str, seed: int = 0) -> nn.Module:
    if kind == "fsdp2":
        return build()
    torch.manual_seed(seed)
    return DistributedDataParallel(Model()) if kind == "ddp" else Model()


def options_of(api: Any, way: str, get: bool, **more: Any) -> Any:
    full, flat, rank0 = not way.startswith(("sharded", "flat")), way.endswith("flat"), way.startswith("rank0")
    return api.StateDictOptions(
        full_state_dict=full,
        flatten_optimizer_state_dict=flat,
        cpu_offload=rank0 and get,
        broadcast_from_rank0=rank0 and not get,
        **more,
    )


def saved(api: Any, model: nn.Module, optims: Any, way: str, **more: Any) -> Any:
    """What a checkpoint of these would hold: nothing in it is alive."""
    return copy.deepcopy(
        api.get_optimizer_state_dict(model, optims, options=options_of(api, way, get=True, **more))
    )


def load(api: Any, model: nn.Module, optims: Any, state: Any, way: str, **more: Any) -> None:
    api.set_optimizer_state_dict(model, optims, state, options=options_of(api, way, get=False, **more))


def step(model: nn.Module, optim: torch.optim.Optimizer, salt: str = "", only: Optional[Any] = None) -> None:
    """A step with gradients by hand (FSDP2's own step needs streams that the CPU lacks on older torch).

    `only(name)`: whether a parameter gets a gradient.
    """
    mine = {param for group in optim.param_groups for param in group["params"]}
    for name, param in model.named_parameters():
        if param not in mine or not param.requires_grad or not (only is None or only(name)):
            continue
        grad = torch.zeros_like(param)
        rank = dist.get_rank() if hasattr(param, "_local_tensor") else 0
        local = local_of(grad)
        local.copy_(value_of(f"{name}{salt}{rank}", tuple(local.shape)))
        param.grad = grad
    optim.step()
    for param in model.parameters():
        param.grad = None


def frozen(value: Any) -> Any:
    """A copy of what a state is on this rank, that compares."""
    if torch.is_tensor(value):
        local = local_of(value)
        return type(value).__name__, local.dtype, tuple(value.shape), local.tolist()
    if isinstance(value, dict):
        return {key: frozen(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(frozen, value))
    return value


def held(optim: torch.optim.Optimizer) -> dict[str, Any]:
    """What an optimizer holds on this rank."""
    return {
        "state": [
            frozen(optim.state[param]) if optim.state.get(param) else None
            for group in optim.param_groups
            for param in group["params"]
        ],
        "groups": [
            {key: frozen(value) for key, value in group.items() if key != "params"}
            for group in optim.param_groups
        ],
    }


def weights(model: nn.Module) -> Any:
    return [local_of(param.detach()).tolist() for param in model.parameters()]
