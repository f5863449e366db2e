"""torchao's optimizers, whose states are wrappers around 8-bit codes: a get keeps their class, as torch's."""

from __future__ import annotations

from typing import Any

import pool
import pytest
import torch
import torch.distributed as dist
from pool import on_ranks
from torch import nn

try:
    from torch.distributed.fsdp import fully_shard
except ImportError:  # torch 2.4 and 2.5
    from torch.distributed._composable.fsdp import fully_shard

pools, ranks = pool.fixtures(pool.OURS)
#: Values of a tensor that torchao codes at all, in blocks of 256.
SIZE = 256


def trained(wrapper: str, factor: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    from torchao.prototype.low_bit_optim import AdamW8bit

    torch.manual_seed(0)
    model = nn.Linear(SIZE, SIZE)
    if wrapper == "fsdp2":
        fully_shard(model)
    optim = AdamW8bit(model.parameters())
    for param in model.parameters():
        param.grad = torch.full_like(param, factor)
    optim.step()
    optim.zero_grad()
    return model, optim


def local_of(value: torch.Tensor) -> torch.Tensor:
    return getattr(value, "_local_tensor", value)


def dense(value: torch.Tensor) -> torch.Tensor:
    return torch.empty(value.shape).copy_(value)


@pytest.mark.parametrize("way", ["all", "rank0"])
@pytest.mark.parametrize("wrapper", ["plain", "fsdp2"])
@on_ranks(world=2)
def test_states_keep_their_class(api: Any, wrapper: str, way: str) -> None:
    """The states of the optimizer that is loaded are those of the saved one, and of the same class."""
    from torchao.prototype.low_bit_optim.subclass_8bit import OptimState8bit

    model, optim = trained(wrapper, 1.0)
    offload = way == "rank0"
    got = api.get_optimizer_state_dict(
        model, optim, options=api.StateDictOptions(full_state_dict=True, cpu_offload=offload)
    )
    if offload and dist.get_rank():
        assert got == {}
    else:
        for name in ("exp_avg", "exp_avg_sq"):
            value = got["state"]["weight"][name]
            assert type(value) is OptimState8bit
            assert value.shape == (SIZE, SIZE)
    other, fresh = trained(wrapper, 5.0)
    options = api.StateDictOptions(full_state_dict=True, broadcast_from_rank0=offload)
    api.set_optimizer_state_dict(other, fresh, got, options=options)
    for mine, theirs in zip(other.parameters(), model.parameters()):
        for name in ("exp_avg", "exp_avg_sq"):
            loaded, saved = (
                local_of(one.state[param][name]) for one, param in ((fresh, mine), (optim, theirs))
            )
            assert type(loaded) is type(saved)
            torch.testing.assert_close(dense(loaded), dense(saved))
    for param in other.parameters():
        param.grad = torch.ones_like(param)
    fresh.step()
