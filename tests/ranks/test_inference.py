"""Calls inside torch.inference_mode(): what they make can be trained, what was made there can be loaded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Model, build, check_values, full_state, local_of
from optimizers import held, load, options_of, saved, step, wrapped
from pool import on_ranks
from torch import nn

OPTIMIZERS = ("AdamW", "Adamax")


def given(state: dict[str, Any], how: str) -> dict[str, Any]:
    return state if how == "all" or dist.get_rank() == 0 else {}


def is_normal(value: torch.Tensor) -> bool:
    return not value.is_inference() and not local_of(value).is_inference()


def check_trainable(model: nn.Module) -> None:
    for key, value in (*model.named_parameters(), *model.named_buffers()):
        if "cache" not in key:  # not persistent: no checkpoint has it
            assert is_normal(value), key
    step(model, torch.optim.SGD(model.parameters(), lr=0.5))


def check_states(optim: torch.optim.Optimizer) -> None:
    assert optim.state
    for states in optim.state.values():
        for name, value in states.items():
            assert not torch.is_tensor(value) or is_normal(value), name


@pytest.mark.parametrize("how", ["rank0", "all"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("kind", ["plain", "fsdp2"])
@on_ranks(world=2)
def test_a_model_can_be_trained(api: Any, kind: str, device: str, how: str) -> None:
    if kind == "fsdp2":
        model = build(device)
    else:
        with torch.device(device):
            model = Model()
    options = api.StateDictOptions(full_state_dict=True, broadcast_from_rank0=how == "rank0")
    with torch.inference_mode():
        api.set_model_state_dict(model, given(full_state(), how), options=options)
        assert torch.is_inference_mode_enabled()
    for name, value in model.named_buffers():
        if value.is_meta:
            assert "cache" in name
    check_trainable(model)


@pytest.mark.parametrize("is_fresh", [True, False])
@pytest.mark.parametrize("way", ["sharded", "full", "rank0", "rank0-flat"])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("kind", ["plain", "fsdp2"])
@on_ranks(world=2)
def test_states_of_an_optimizer_can_be_trained(
    api: Any, kind: str, name: str, way: str, is_fresh: bool
) -> None:
    maker: Any = getattr(torch.optim, name)
    model = wrapped(kind)
    optim = maker(model.parameters(), lr=0.5)
    step(model, optim)
    state, want = saved(api, model, optim, way), held(optim)
    other = maker(model.parameters(), lr=0.5)
    if not is_fresh:
        step(model, other, salt="other")
    with torch.inference_mode():
        load(api, model, other, state, way)
    assert held(other) == want
    check_states(other)
    step(model, other)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("kind", ["plain", "fsdp2"])
@on_ranks(world=2)
def test_first_states_can_be_trained(api: Any, kind: str, name: str) -> None:
    """A get before the first step: the optimizer has the states from then on."""
    model = wrapped(kind)
    optim = getattr(torch.optim, name)(model.parameters(), lr=0.5)
    with torch.inference_mode():
        api.get_optimizer_state_dict(model, optim)
    check_states(optim)
    step(model, optim)


@pytest.mark.parametrize("how", ["rank0", "all"])
@on_ranks(world=2)
def test_model_and_optimizer_in_one_call_can_be_trained(api: Any, how: str) -> None:
    model = build("meta")
    state, options = full_state(), options_of(api, "rank0" if how == "rank0" else "full", get=False)
    trained = build()
    optim = torch.optim.AdamW(trained.parameters())
    step(trained, optim)
    of_optimizer = saved(api, trained, optim, "full")
    fresh = torch.optim.AdamW(model.parameters())
    with torch.inference_mode():
        api.set_state_dict(
            model,
            fresh,
            model_state_dict=given(state, how),
            optim_state_dict=given(of_optimizer, how),
            options=options,
        )
    check_states(fresh)
    check_trainable(model)


@pytest.mark.parametrize("how", ["rank0", "all"])
@on_ranks(world=2)
def test_a_model_that_was_made_in_inference_mode_is_loaded_there(api: Any, how: str) -> None:
    """Its own tensors can be written in that mode alone."""
    options = api.StateDictOptions(full_state_dict=True, broadcast_from_rank0=how == "rank0")
    with torch.inference_mode():
        model = Model()
        assert model.head.weight.is_inference()
        api.set_model_state_dict(model, given(full_state(), how), options=options)
        check_values(model, full_state())
