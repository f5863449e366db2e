"""Optimizer loads in the corners that a second adversarial read found."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import two_dim_support
from hooked import HOWS, error_of, given, options, wrapped
from models import local_of
from pool import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module


def step(model: nn.Module, optim: torch.optim.Optimizer, skip: str = "") -> None:
    for number, (name, param) in enumerate(model.named_parameters()):
        if name != skip:
            param.grad = torch.full_like(param, 0.1 * (number + 1))
    optim.step()
    optim.zero_grad()


def numbered_in_part(api: Any, how: str) -> str:
    """A used state is never kept in silence where the numbered dict has none for it."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optim = torch.optim.Adam(model.parameters())
    step(model, optim, skip="1.bias")
    saved = copy.deepcopy(optim.state_dict())
    step(model, optim)
    return error_of(
        lambda: api.set_optimizer_state_dict(model, optim, given(saved, how), options=options(api, how))
    )


def other_stage(api: Any) -> str:
    """Rank 0's optimizer does not have this rank's parameters: told, not left out."""
    rank = dist.get_rank()
    full = nn.ModuleDict({"0": nn.Linear(4, 4), "1": nn.Linear(4, 4)})
    whole = torch.optim.Adam(full.parameters())
    step(full, whole)
    state = api.get_optimizer_state_dict(full, whole, options=api.StateDictOptions(full_state_dict=True))
    stage = nn.ModuleDict({str(rank): nn.Linear(4, 4)})
    optim = torch.optim.Adam(stage.parameters())
    return error_of(
        lambda: api.set_optimizer_state_dict(
            stage, optim, given(state, "rank0"), options=options(api, "rank0")
        )
    )


def empty_on_one(api: Any) -> str:
    model = wrapped(nn.Sequential(nn.Linear(4, 4)), "fsdp2")
    optim = torch.optim.Adam(model.parameters())
    step(model, optim)
    get = api.StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = api.get_optimizer_state_dict(model, optim, options=get)
    return error_of(lambda: api.set_optimizer_state_dict(model, optim, state, options=get))


def fails_on_one(api: Any, how: str, what: str) -> str:
    model = wrapped(nn.Sequential(nn.Linear(4, 4)), "fsdp2")
    optim = torch.optim.Adam(model.parameters())
    step(model, optim)
    state = api.get_optimizer_state_dict(model, optim, options=api.StateDictOptions(full_state_dict=True))
    if dist.get_rank() == 1:
        if what == "hook":

            def fail(_: Any) -> None:
                raise ValueError("not now")

            optim.register_state_dict_pre_hook(fail)
        else:
            optim.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    return error_of(
        lambda: api.set_optimizer_state_dict(model, optim, given(state, how), options=options(api, how))
    )


def post_hook_fails(api: Any, how: str) -> tuple[str, int, float]:
    """What load_state_dict() has written stays written."""
    model = wrapped(nn.Sequential(nn.Linear(4, 4)), "fsdp2")
    optim = torch.optim.Adam(model.parameters(), lr=0.5)
    step(model, optim)
    state = api.get_optimizer_state_dict(model, optim, options=api.StateDictOptions(full_state_dict=True))
    fresh = torch.optim.Adam(model.parameters(), lr=0.1)

    def fail(_: Any) -> None:
        if dist.get_rank() == 1:
            raise OSError("no disk")

    fresh.register_load_state_dict_post_hook(fail)
    text = error_of(
        lambda: api.set_optimizer_state_dict(model, fresh, given(state, how), options=options(api, how))
    )
    return text, len(fresh.state), fresh.param_groups[0]["lr"]


def amsgrad_over_tp(api: Any) -> None:
    """The maximum's placements forget the order of the cuts up to torch 2.7."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(8, 8, bias=False))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError:
        from torch.distributed._composable.fsdp import fully_shard
    model = fully_shard(model, mesh=mesh["dp"]) or model
    optim = torch.optim.AdamW(model.parameters(), amsgrad=True, foreach=False)
    with torch.no_grad():
        param = model[0].weight
        param.grad = torch.zeros_like(param)
        local_of(param.grad).copy_(torch.arange(local_of(param).numel()).view(local_of(param).shape))
        local_of(param.grad).add_(100 * dist.get_rank())
    optim.step()
    whole = api.get_optimizer_state_dict(model, optim, options=api.StateDictOptions(full_state_dict=True))
    states = whole["state"]["0.weight"]
    assert torch.equal(states["max_exp_avg_sq"], states["exp_avg_sq"])
    api.set_optimizer_state_dict(model, optim, whole, options=api.StateDictOptions(full_state_dict=True))
    again = optim.state[param]
    assert torch.equal(local_of(again["max_exp_avg_sq"]), local_of(again["exp_avg_sq"]))


@pytest.mark.parametrize("how", HOWS)
@on_ranks(world=2)
def test_states_lie_as_their_parameter_does(api: Any, how: str) -> None:
    """States that the fresh optimizer does not expect lie in memory as their parameter does."""
    model = nn.Sequential(nn.Conv2d(4, 8, 3)).to(memory_format=torch.channels_last)
    optim = torch.optim.AdamW(model.parameters(), lr=0.1, amsgrad=True)
    step(model, optim)
    state = api.get_optimizer_state_dict(model, optim, options=api.StateDictOptions(full_state_dict=True))
    fresh = torch.optim.AdamW(model.parameters(), lr=0.1)
    api.set_optimizer_state_dict(model, fresh, given(state, how), options=options(api, how))
    for name, value in fresh.state[model[0].weight].items():
        saved = optim.state[model[0].weight][name]
        assert torch.equal(value, saved)
        assert value.stride() == saved.stride(), name


@pytest.mark.parametrize("kind", ["SGD", "Adam"])
@pytest.mark.parametrize("how", HOWS)
@on_ranks(world=2)
def test_numbered_without_states(api: Any, how: str, kind: str) -> None:
    """torch.optim's own dict: its hyperparameters count, also where it has no state."""
    model = wrapped(nn.Sequential(nn.Linear(4, 4)), "fsdp2" if how == "rank0" else "plain")
    build = {"SGD": torch.optim.SGD, "Adam": torch.optim.Adam}[kind]
    saved = build(model.parameters(), lr=0.5).state_dict()
    fresh = build(model.parameters(), lr=0.1)
    api.set_optimizer_state_dict(model, fresh, given(saved, how), options=options(api, how))
    assert fresh.param_groups[0]["lr"] == 0.5
    assert not fresh.state
    if how == "all":
        again = build(model.parameters(), lr=0.1)
        api.set_optimizer_state_dict(model, again, saved)
        assert again.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("how", HOWS)
def test_numbered_in_part(ranks, how):
    for text in ranks(numbered_in_part, how, world=2):
        assert "Missing optimizer state for parameter '1.bias'" in text


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("how", HOWS)
@on_ranks(world=2)
def test_an_empty_state_is_none(api: Any, how: str, flat: bool) -> None:
    """Who reads `optim.state[param]` leaves an empty dict there: it is as good as none."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optim = torch.optim.Adam(model.parameters())
    step(model, optim, skip="1.bias")
    assert not optim.state[model[1].bias]
    get = api.StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=flat)
    saved = copy.deepcopy(api.get_optimizer_state_dict(model, optim, options=get))
    step(model, optim)
    step(model, optim)
    chosen = options(api, how, flatten_optimizer_state_dict=flat)
    api.set_optimizer_state_dict(model, optim, given(saved, how), options=chosen)
    assert float(optim.state[model[1].bias]["step"]) == 0
    assert not optim.state[model[1].bias]["exp_avg"].any()


def test_states_of_another_stage_are_missed(ranks):
    for text in ranks(other_stage, world=2):
        assert "rank 1: Missing optimizer state: 1.weight" in text
        assert "nothing was changed" in text


def test_an_empty_dict_on_one_rank(ranks):
    for text in ranks(empty_on_one, world=2):
        assert "rank 1: the optimizer state dict is empty" in text


@pytest.mark.parametrize("what", ["hook", "foreign parameter"])
@pytest.mark.parametrize("how", HOWS)
def test_an_optimizer_that_fails_on_one_rank_is_heard_of(ranks, how, what):
    for text in ranks(fails_on_one, how, what, world=2):
        assert "rank 1: " in text
        assert ("not now" if what == "hook" else "not a parameter of the model") in text
        assert "nothing was changed" in text


@pytest.mark.parametrize("how", HOWS)
def test_what_was_written_before_a_post_hook_failed_stays(ranks, how):
    results = ranks(post_hook_fails, how, world=2)
    assert results[1][0].startswith("OSError: no disk")
    assert "rank 0 has written its states" in results[0][0]
    assert {result[1:] for result in results} == {(2, 0.5)}


def test_states_that_forget_the_order_of_the_cuts(ranks):
    with two_dim_support():
        ranks(amsgrad_over_tp)
