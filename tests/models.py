"""Models of the rank tests, and values that every rank can compute by itself."""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from values import value_of

try:
    from torch.distributed.fsdp import fully_shard
except ImportError:  # torch 2.4 and 2.5
    from torch.distributed._composable.fsdp import fully_shard


class Layer(nn.Module):
    """Even and uneven weights, a one-row weight, a scalar buffer, a transient buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.even = nn.Linear(8, 16)
        self.uneven = nn.Linear(5, 7, bias=False)
        self.row = nn.Parameter(torch.zeros(1, 6))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("scale", torch.ones(3))
        self.register_buffer("cache", torch.zeros(4), persistent=False)


class Model(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 8)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(8, 32, bias=False)
        if tied:
            self.head.weight = self.embed.weight


class WithExtraState(Model):
    def __init__(self) -> None:
        super().__init__()
        self.extra = ExtraState()


class ExtraState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.note: Any = {"seen": 0}

    def get_extra_state(self) -> Any:
        return self.note

    def set_extra_state(self, state: Any) -> None:
        self.note = state


def build(
    device: str = "cpu", mesh: Optional[DeviceMesh] = None, kind: type[nn.Module] = Model, **kwargs: Any
) -> nn.Module:
    """An FSDP2 model with zeros, or on the meta device."""
    with torch.device(device):
        model = kind(**kwargs)
    if device != "meta":
        for value in (*model.parameters(), *model.buffers()):
            value.detach().zero_()
    mesh = mesh or init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def full_state(kind: type[nn.Module] = Model, **kwargs: Any) -> dict[str, torch.Tensor]:
    """A full checkpoint of a model."""
    with torch.device("meta"):
        state = kind(**kwargs).state_dict()
    return {
        key: value_of(key, tuple(value.shape), value.dtype) if torch.is_tensor(value) else value
        for key, value in state.items()
    }


def whole(value: Any) -> Any:
    """A DTensor gathered by torch itself; anything else as it is."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def check_values(model: nn.Module, expected: dict[str, Any]) -> None:
    """Every value of `model` is bit-equal to `expected`, and nothing is left on the meta device."""
    state = model.state_dict()
    assert set(state) == set(expected), set(state) ^ set(expected)
    for key, value in state.items():
        if torch.is_tensor(value):
            assert not value.is_meta, f"{key} is still on the meta device"
            assert torch.equal(whole(value), expected[key]), f"{key} differs"
        else:
            assert value == expected[key], key


def local_of(value: torch.Tensor) -> torch.Tensor:
    return value._local_tensor if hasattr(value, "_local_tensor") else value.detach()


def check_storages(values: dict[str, Any], world: int) -> None:
    """No local tensor's storage is larger than the (padded) shard."""
    for key, value in values.items():
        if not torch.is_tensor(value) or value.dim() == 0:
            continue
        local = local_of(value)
        rows = -(-value.shape[0] // world) if hasattr(value, "_local_tensor") else value.shape[0]
        most = rows * (value.numel() // max(value.shape[0], 1)) * value.element_size()
        held = local.untyped_storage().nbytes()
        assert held <= most, f"{key} of {tuple(value.shape)} holds {held} bytes, its shard has {most}"
