"""Optimizers that are not torch's own: wrappers of others, methods and states of their own."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from heard import heard
from optimizers import WAYS, frozen, load, saved
from pool import on_ranks
from torch import nn


class Counting(torch.optim.SGD):
    """Counts its steps in a key of its own; its `load_state_dict` calls the argument `state`."""

    steps = 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # type: ignore[override]
        self.steps = state.get("steps", -1)
        super().load_state_dict({key: value for key, value in state.items() if key != "steps"})


class ByPlace(torch.optim.SGD):
    """Its `load_state_dict` takes its argument by place alone."""

    def load_state_dict(self, state_dict: Mapping[str, Any], /) -> None:  # type: ignore[override]
        super().load_state_dict(dict(state_dict))


class Unknown(torch.optim.Optimizer):
    """Its first step makes states of many kinds."""

    STATES: Mapping[str, Any] = {
        "form": "nf4",
        "pair": (torch.full((2,), 3.0), 4, "a"),
        "nested": {"deep": [(torch.ones(1), None)], "texts": ["b", 1]},
        "listed": [torch.zeros(1)],
    }

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param] = {"momentum": torch.ones_like(param), **copy.deepcopy(dict(self.STATES))}


class Wrapper(torch.optim.Optimizer):
    """Steps by another optimizer, whose state dict is a part of its own."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self.inner = inner

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.inner.state_dict()}


def fresh_of(kind: type[torch.optim.Optimizer]) -> tuple[nn.Linear, torch.optim.Optimizer]:
    model = nn.Linear(2, 2)
    if kind is Unknown:
        return model, Unknown(model.parameters(), {})
    return model, kind(model.parameters(), momentum=0.5)  # type: ignore[call-arg]


def stepped(kind: type[torch.optim.Optimizer]) -> tuple[nn.Linear, torch.optim.Optimizer]:
    model, optim = fresh_of(kind)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optim.step()
    return model, optim


@pytest.mark.parametrize("way", WAYS)
@on_ranks(world=2)
def test_tuples_and_texts_in_states_come_back_as_they_were(api: Any, way: str) -> None:
    model, optim = stepped(Unknown)
    state = saved(api, model, optim, way)
    other, fresh = fresh_of(Unknown)
    load(api, other, fresh, state, way)
    for param in other.parameters():
        assert frozen(fresh.state[param]) == frozen({"momentum": torch.ones_like(param), **Unknown.STATES})


@pytest.mark.parametrize("kind", [Counting, ByPlace])
@pytest.mark.parametrize("way", ["sharded", "flat", "full", "rank0-flat"])
@on_ranks(world=2)
def test_load_state_dict_may_name_its_argument_as_it_likes(
    api: Any, kind: type[torch.optim.Optimizer], way: str
) -> None:
    model, optim = stepped(kind)
    state = saved(api, model, optim, way)
    other, fresh = fresh_of(kind)
    load(api, other, fresh, state, way)
    assert torch.equal(fresh.state[other.weight]["momentum_buffer"], torch.ones(2, 2))


@on_ranks(world=2)
def test_what_an_optimizer_has_beside_states_and_groups_is_named(api: Any) -> None:
    model, optim = stepped(Counting)
    with heard() as lines:
        state = api.get_optimizer_state_dict(model, optim)
    assert set(state) == {"state", "param_groups"}
    (line,) = lines
    assert "state_dict() of Counting has 'steps', which the state dict by FQN leaves out" in line


@on_ranks(world=2)
def test_a_wrapper_without_states_of_its_own_is_named(api: Any) -> None:
    model, optim = stepped(torch.optim.SGD)
    wrapper = Wrapper(optim)
    with pytest.raises(KeyError, match=r"state_dict\(\) of Wrapper has no 'state' and no 'param_groups'"):
        api.get_optimizer_state_dict(model, wrapper)
    assert len(api.get_optimizer_state_dict(model, wrapper.inner)["state"]) == 2


@on_ranks(world=2)
def test_what_is_no_optimizer_is_named(api: Any) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(TypeError, match="optimizers is a Linear: expected an Optimizer, or several"):
        api.get_optimizer_state_dict(model, model)
