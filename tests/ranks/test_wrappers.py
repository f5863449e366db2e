"""Other wrappers must not lose by the replacement: FSDP1, TP, FSDP2 over TP, activation checkpointing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import two_dim_support
from models import fully_shard, value_of
from packaging.version import Version
from pool import on_ranks
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.down(self.up(x)))


def state_of_net() -> dict[str, torch.Tensor]:
    return {key: value_of(key, tuple(value.shape)) for key, value in Net().state_dict().items()}


def full(api: Any, how: str = "rank0", **more: Any) -> Any:
    return api.StateDictOptions(full_state_dict=True, broadcast_from_rank0=how == "rank0", **more)


def fsdp1(use_orig_params: bool) -> nn.Module:
    torch.manual_seed(0)
    net = Net()
    net.up = FSDP1(net.up, device_id=torch.device("cpu"), use_orig_params=use_orig_params)
    return FSDP1(net, device_id=torch.device("cpu"), use_orig_params=use_orig_params)


def load_and_get(api: Any, model: nn.Module, how: str) -> None:
    state = state_of_net()
    mine = dict(state) if how == "all" or dist.get_rank() == 0 else {}
    api.set_model_state_dict(model, mine, options=full(api, how))
    got = api.get_model_state_dict(model, options=full(api, "all"))
    assert set(got) == set(state)
    for key, value in got.items():
        assert torch.equal(value, state[key]), key
    kept = api.get_model_state_dict(model, options=full(api, "all", cpu_offload=True))
    assert set(kept) == (set(state) if dist.get_rank() == 0 else set())


def optimizer_of_fsdp1(api: Any, use_orig_params: bool) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = fsdp1(use_orig_params)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def full_state(model: nn.Module, optim: torch.optim.Optimizer) -> Any:
        return api.get_optimizer_state_dict(model, optim, options=full(api, "all"))

    model, optim = make()
    torch.manual_seed(1 + dist.get_rank())
    model(torch.randn(2, 8)).sum().backward()
    optim.step()
    optim.zero_grad()
    want = full_state(model, optim)
    saved = api.get_optimizer_state_dict(model, optim, options=full(api, "all", cpu_offload=True))
    other, fresh = make()
    api.set_optimizer_state_dict(other, fresh, saved, options=full(api))
    got = full_state(other, fresh)
    assert set(got["state"]) == set(want["state"]) == set(state_of_net())
    for fqn, states in want["state"].items():
        for name, value in states.items():
            assert torch.equal(torch.as_tensor(got["state"][fqn][name]), torch.as_tensor(value)), (fqn, name)


def tensor_parallel(api: Any, how: str, device: str, fsdp: bool) -> None:
    with torch.device(device):
        model = Net()
    if fsdp:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        tp = mesh["tp"]
    else:
        tp = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    parallelize_module(model, tp, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if fsdp:
        fully_shard(model, mesh=mesh["dp"])
    load_and_get(api, model, how)


@pytest.mark.parametrize("how", ["rank0", "all"])
@pytest.mark.parametrize("use_orig_params", [True, False])
@on_ranks(world=2)
def test_fsdp1(api: Any, use_orig_params: bool, how: str) -> None:
    """Read back through FSDP1 itself: its full get frees live storage on the CPU, with or without us."""
    model, state = fsdp1(use_orig_params), state_of_net()
    mine = dict(state) if how == "all" or dist.get_rank() == 0 else {}
    api.set_model_state_dict(model, mine, options=full(api, how))
    with FSDP1.summon_full_params(model):
        for key, param in model.named_parameters():
            assert torch.equal(param, state[key.replace("_fsdp_wrapped_module.", "")]), key


def test_fsdp1_optimizer(ranks):
    # With use_orig_params torch's own round trip is not exact on the CPU.
    ranks(optimizer_of_fsdp1, False, world=2)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("how", ["rank0", "all"])
def test_tensor_parallel(ranks, how, device):
    ranks(tensor_parallel, how, device, False)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("how", ["rank0", "all"])
def test_fsdp2_over_tensor_parallel(ranks, how, device):
    with two_dim_support():
        ranks(tensor_parallel, how, device, True)


@pytest.mark.skipif(
    Version(torch.__version__).release < (2, 7), reason="FSDP2 cannot run on the CPU before torch 2.7"
)
@on_ranks()
def test_load_after_a_forward_pass(api: Any) -> None:
    """A forward pass alone (evaluation, generation) leaves the root's parameters whole."""
    model = Net()
    fully_shard(model)
    with torch.no_grad():
        model(torch.ones(2, 8))
    assert not any(hasattr(param, "_local_tensor") for param in model.parameters())
    load_and_get(api, model, "rank0")
    optim = torch.optim.AdamW(model.parameters())
    model.unshard()
    saved = api.get_optimizer_state_dict(model, optim, options=full(api, "all"))
    assert set(saved["state"]) == set(state_of_net())


@pytest.mark.parametrize("how", ["rank0", "all"])
@on_ranks()
def test_activation_checkpointing(api: Any, how: str) -> None:
    model = Net()
    model.up = checkpoint_wrapper(model.up)
    fully_shard(model.up)
    fully_shard(model)
    load_and_get(api, model, how)
