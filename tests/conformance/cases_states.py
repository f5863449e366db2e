"""Scenarios of optimizers that are cut, shared, partly used, or not torch's own."""

from __future__ import annotations

from typing import Any

import torch
from cases_model import ALL, BROADCAST, given, rows
from cases_optim import FLAT, SET, all_states, dump, parameters, saved, states
from scenario import scenario
from torch import nn
from torch.optim import SGD, Adam, Optimizer
from wrappers import Net, fill, live, wrap

SOME = ("plain", "ddp", "fsdp2")
HOW: tuple[dict[str, Any], ...] = (*SET[:3], FLAT)


def model_of(kind: str, salt: str = "", **kwargs: Any) -> nn.Module:
    return wrap(kind, fill(Net(**kwargs), salt))


def reload(api: Any, model: nn.Module, optims: Any, other: nn.Module, fresh: Any, options: Any) -> Any:
    """From these into those; what those hold then."""
    state = saved(api, model, optims, options)
    api.set_optimizer_state_dict(other, fresh, state, options=api.StateDictOptions(**options))
    many = fresh if isinstance(fresh, tuple) else (fresh,)
    return [dump(one) for one in many]


@scenario("groups cut otherwise", rows(SOME, HOW))
def merged_groups(api: Any, kind: str, options: dict[str, Any]) -> Any:
    """Two saved groups into one, whose first parameters are the second's."""
    model = model_of(kind)
    params = parameters(model)
    optim = Adam(
        [{"params": params[3:], "lr": 0.5, "betas": (0.5, 0.75)}, {"params": params[:3], "lr": 0.25}]
    )
    other = model_of(kind, "other.")
    return reload(api, model, states(optim), other, Adam(parameters(other), lr=1.0), options)


@scenario("groups cut otherwise", rows(("plain", "fsdp2"), HOW))
def split_group(api: Any, kind: str, options: dict[str, Any]) -> Any:
    """One saved group into two."""
    model = model_of(kind)
    optim = states(Adam(parameters(model), lr=0.5))
    other = model_of(kind, "other.")
    params = parameters(other)
    fresh = Adam([{"params": params[:3], "lr": 0.25}, {"params": params[3:], "lr": 0.125}])
    return reload(api, model, optim, other, fresh, options)


class Custom(Optimizer):
    """Not torch's own: `make(param)` gives the states of a first step, which then counts to 1."""

    def __init__(self, params: Any, make: Any) -> None:
        super().__init__(params, {"lr": 0.5})
        self.make = make

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None and param not in self.state:
                    self.state[param] = self.make(param)


def one_based(param: torch.Tensor) -> dict[str, Any]:
    return {"step": 1, "mean": torch.zeros_like(param)}


@scenario("optimizers from elsewhere", rows(SOME, ({}, *SET[1:3])))
def counter_from_one(api: Any, kind: str, options: dict[str, Any]) -> Any:
    model = model_of(kind)
    optim = Custom(parameters(model), one_based)
    state = saved(api, model, optim, options)
    api.set_optimizer_state_dict(model, optim, state, options=api.StateDictOptions(**options))
    return dump(optim)


def master(param: torch.Tensor) -> dict[str, Any]:
    return {"master": param.detach().float(), "mean": torch.zeros_like(param)}


@scenario("shared memory", rows(SOME, SET[:3]))
def master_weights(api: Any, kind: str, options: dict[str, Any]) -> Any:
    """A state that is the parameter itself."""
    model = model_of(kind)
    optim = states(Custom(parameters(model), lambda param: {"master": param.detach().clone()}))
    other = model_of(kind, "other.")
    fresh = states(Custom(parameters(other), master), 0)
    return reload(api, model, optim, other, fresh, options), live(other)


def two(param: torch.Tensor) -> dict[str, Any]:
    return {"one": torch.zeros_like(param), "other": torch.zeros_like(param)}


def one_twice(param: torch.Tensor) -> dict[str, Any]:
    state = torch.zeros_like(param)
    return {"one": state, "other": state}


@scenario("shared memory", rows(SOME, SET[:3]))
def one_tensor_for_two_states(api: Any, kind: str, options: dict[str, Any]) -> Any:
    model = model_of(kind)
    other = model_of(kind, "other.")
    fresh = states(Custom(parameters(other), one_twice))
    return reload(api, model, states(Custom(parameters(model), two)), other, fresh, options)


@scenario("shared memory", rows(SOME, SET[:3]))
def earlier_state_dict(api: Any, kind: str, options: dict[str, Any]) -> Any:
    """What was taken before a load, after it."""
    model, other = model_of(kind), model_of(kind, "other.")
    fresh = states(Adam(parameters(other)), 5)
    taken = dict(fresh.state_dict())
    return reload(api, model, states(Adam(parameters(model))), other, fresh, options), taken


@scenario("frozen", rows(SOME, tuple({**one, "ignore_frozen_params": True} for one in HOW)))
def frozen_in_the_optimizer(api: Any, kind: str, options: dict[str, Any]) -> Any:
    """All parameters are in the optimizer, some without requires_grad."""
    model, other = model_of(kind, frozen=True), model_of(kind, "other.", frozen=True)
    options = dict(options)
    optim, fresh = states(Adam(model.parameters())), Adam(other.parameters(), lr=1.0)
    return reload(api, model, optim, other, fresh, options)


@scenario("frozen", rows(SOME, HOW))
def frozen_since(api: Any, kind: str, options: dict[str, Any]) -> Any:
    """Parameters that have states, and no requires_grad any more."""
    model, other = model_of(kind), model_of(kind, "other.")
    optim, fresh = states(Adam(model.parameters())), states(Adam(other.parameters(), lr=1.0), 5)
    for one in (model, other):
        next(one.parameters()).requires_grad_(False)
    return reload(api, model, optim, other, fresh, options)


@scenario("several optimizers", rows(SOME, HOW))
def adam_and_stateless(api: Any, kind: str, options: dict[str, Any]) -> Any:
    def make(salt: str) -> Any:
        model = model_of(kind, salt)
        params = parameters(model)
        return model, (Adam(params[:3], lr=0.5), SGD(params[3:], lr=0.25))

    (model, optims), (other, fresh) = make(""), make("other.")
    return reload(api, model, all_states(optims), other, fresh, options)


class ReadOnly(Optimizer):
    """Another optimizer, whose groups cannot be replaced from outside."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner

    param_groups = property(lambda self: self.inner.param_groups)
    state = property(lambda self: self.inner.state)
    defaults = property(lambda self: self.inner.defaults)

    def state_dict(self) -> Any:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.inner.load_state_dict(state_dict)

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)


@scenario("optimizers from elsewhere", rows(SOME, SET[:3]))
def read_only_groups(api: Any, kind: str, options: dict[str, Any]) -> Any:
    model, other = model_of(kind), model_of(kind, "other.")
    inner = Adam(parameters(other), lr=1.0)
    optim = ReadOnly(states(Adam(parameters(model), lr=0.5)))
    state = saved(api, model, optim, options)
    api.set_optimizer_state_dict(other, ReadOnly(inner), state, options=api.StateDictOptions(**options))
    return dump(inner)


def small(param: torch.Tensor) -> dict[str, Any]:
    return {"history": torch.zeros(1), "past": [], "begun": torch.zeros(3), "kept": torch.zeros_like(param)}


def grown(param: torch.Tensor) -> dict[str, Any]:
    return {
        "history": torch.arange(4.0),
        "past": [torch.ones_like(param), torch.full_like(param, 2.0)],
        "begun": None,
        "kept": torch.ones_like(param),
    }


def used(optim: Custom) -> Custom:
    for param in optim.param_groups[0]["params"]:
        optim.state[param] = optim.make(param)
    return optim


@scenario("optimizers from elsewhere", rows(SOME, SET[:3]))
def grown_states(api: Any, kind: str, options: dict[str, Any]) -> Any:
    """A tensor grew, a list filled, a tensor became None."""
    model, other = model_of(kind), model_of(kind, "other.")
    optim = used(Custom(parameters(model), grown))
    return reload(api, model, optim, other, Custom(parameters(other), small), options)


PARTLY: dict[str, Any] = {
    "adam": lambda params: Adam(params, lr=0.01, weight_decay=0.5),
    "momentum": lambda params: SGD(params, lr=0.1, momentum=0.9),
    "custom": lambda params: Custom(params, one_based),
}


def part_of(optim: Optimizer) -> Optimizer:
    """With the states of every other parameter."""
    states(optim)
    for param in optim.param_groups[0]["params"][1::2]:
        optim.state.pop(param)
    return optim


@scenario(
    "partly used",
    [{"name": name, **row} for name in PARTLY for row in rows(("plain", "fsdp2"), (ALL, FLAT, {}))],
)
def get_partly_used(api: Any, name: str, kind: str, options: dict[str, Any]) -> Any:
    model = model_of(kind)
    optim = part_of(PARTLY[name](parameters(model)))
    return api.get_optimizer_state_dict(model, optim, options=api.StateDictOptions(**options)), dump(optim)


@scenario(
    "partly used",
    [
        {"name": name, **row}
        for name in PARTLY
        for row in rows(("plain", "fsdp2"), (*HOW, {**BROADCAST, "strict": False}))
    ],
)
def set_partly_used(api: Any, name: str, kind: str, options: dict[str, Any]) -> Any:
    """A dict as torch's own get gives it, into an optimizer that has made no step."""
    model, other = model_of(kind), model_of(kind, "other.")
    optim = states(PARTLY[name](parameters(model)))
    get = {key: value for key, value in options.items() if key == "full_state_dict"}
    state = api.get_optimizer_state_dict(model, optim, options=api.StateDictOptions(**get))
    names = list(state["state"])[1::2]
    state = {**state, "state": {key: value for key, value in state["state"].items() if key not in names}}
    if options.get(next(iter(FLAT))):
        state = flat_of(state)
    fresh = PARTLY[name](parameters(other))
    state = given(state, options)
    api.set_optimizer_state_dict(other, fresh, state, options=api.StateDictOptions(**options))
    return dump(fresh)


def flat_of(state: dict[str, Any]) -> dict[str, Any]:
    (group,) = state["param_groups"]
    flat = {f"state.{fqn}.{name}": one for fqn, held in state["state"].items() for name, one in held.items()}
    for fqn in group["params"]:
        flat.update({f"param_groups.{fqn}.{key}": one for key, one in group.items() if key != "params"})
    return flat
