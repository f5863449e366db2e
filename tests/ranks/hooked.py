"""Models whose loading code takes part: hooks and loaders as users write them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from models import fully_shard
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

WRAPPERS = ("plain", "ddp", "fsdp2")
HOWS = ("all", "rank0")


class Pair(nn.Module):
    """Two layers of one shape; the pair's own loading hook is `hook`, which is called with the module."""

    def __init__(self, hook: Callable[..., None] | None = None) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4, bias=False)
        self.b = nn.Linear(4, 4, bias=False)
        if hook is not None:
            self._register_load_state_dict_pre_hook(hook, with_module=True)


class Tower(nn.Module):
    """A pair below a root with plain layers around it."""

    def __init__(self, hook: Callable[..., None] | None = None) -> None:
        super().__init__()
        self.before = nn.Linear(4, 4)
        self.pair = Pair(hook)
        self.after = nn.Linear(4, 4)


def wrapped(model: nn.Module, wrapper: str) -> nn.Module:
    """The model as it is, under DDP, or with FSDP2 on children that share no parameters and on the root."""
    if wrapper == "plain":
        return model
    if wrapper == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    names = Counter(id(param) for _, param in model.named_parameters(remove_duplicate=False))
    for child in model.children():
        params = list(child.parameters())
        is_container = isinstance(child, (nn.ModuleList, nn.ParameterList))
        if params and not is_container and all(names[id(param)] == 1 for param in params):
            fully_shard(child, mesh=mesh)
    return fully_shard(model, mesh=mesh) or model


def unwrapped(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


def options(api: Any, how: str, **more: Any) -> Any:
    return api.StateDictOptions(full_state_dict=True, broadcast_from_rank0=how == "rank0", **more)


def given(state: dict[str, Any], how: str) -> dict[str, Any]:
    return state if how == "all" or dist.get_rank() == 0 else {}


def fill(model: nn.Module, value: float) -> nn.Module:
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(value)
    return model


def whole_state(model: nn.Module) -> dict[str, Any]:
    """Canonical name -> whole tensor, gathered by torch itself."""
    state = unwrapped(model).state_dict()
    return {
        key: value.full_tensor() if hasattr(value, "full_tensor") else value for key, value in state.items()
    }


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


# --- hooks: (module, state_dict, prefix, local_metadata, strict, missing, unexpected, errors) -------


def swap(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    a, b = prefix + "a.weight", prefix + "b.weight"
    state[a], state[b] = state[b], state[a]


def add_current(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """The checkpoint holds differences."""
    for name, param in module.named_parameters():
        if prefix + name in state:
            state[prefix + name] = state[prefix + name] + param.detach()


def transpose(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for key in (prefix + "a.weight", prefix + "b.weight"):
        state[key] = state[key].t()


def rename(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """An old name of `a`."""
    if prefix + "old.weight" in state:
        state[prefix + "a.weight"] = state.pop(prefix + "old.weight")


def drop_misfits(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, param in module.named_parameters():
        if prefix + name in state and state[prefix + name].shape != param.shape:
            del state[prefix + name]


def cut_misfits(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, param in module.named_parameters():
        key = prefix + name
        if key in state and state[key].shape != param.shape:
            state[key] = state[key][: param.shape[0]]


def fail_on_one(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    if dist.get_rank() == 1:
        raise OSError("no such vocabulary")


def forgive(module: nn.Module, keys: Any) -> None:
    """A post-hook, as torch documents it."""
    keys.missing_keys.clear()
    keys.unexpected_keys.clear()


def double(module: nn.Module, keys: Any) -> None:
    module.weight.data.mul_(2)


class Versioned(nn.Module):
    """Loading code that upgrades checkpoints of the version before: there the sign was another."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        version = metadata.get("version", None)
        if version is None or version < 2:
            state[prefix + "weight"] = -state[prefix + "weight"]
        super()._load_from_state_dict(state, prefix, metadata, *rest)


class Sized(nn.Module):
    """Its extra state says how large its child is: torch calls the setter before the children are loaded."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.child = nn.Linear(size, size, bias=False)

    def get_extra_state(self) -> Any:
        return self.child.weight.shape[0]

    def set_extra_state(self, state: Any) -> None:
        if state < 0:
            raise OSError("no such size")
        if self.child.weight.shape[0] != state:
            self.child = nn.Linear(state, state, bias=False)
        with torch.no_grad():
            self.child.weight.fill_(-1.0)
