"""`strict` and an optimizer's dict: what it lacks is an error on every rank, and nothing is written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from heard import heard
from optimizers import WAYS, WRAPPERS, held, load, saved, step, wrapped
from pool import on_ranks
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1

#: What is cut out of a dict: parameters of their whole states, and states of parameters.
CUTS: dict[str, tuple[tuple[str, str], ...]] = {
    "one parameter": (("head.weight", ""),),
    "three parameters": (("head.weight", ""), ("embed.weight", ""), ("layers.1.row", "")),
    "a moment": (("head.weight", "exp_avg"),),
    "a counter": (("layers.0.row", "step"),),
    "some of each": (("head.weight", ""), ("layers.1.row", "exp_avg_sq"), ("layers.1.row", "step")),
}


def cut(state: Any, cuts: tuple[tuple[str, str], ...]) -> None:
    """Take states out of a dict, nested or flat; the dict of a rank that has none stays empty."""
    for fqn, name in cuts if state else ():
        if "state" not in state:
            for key in [key for key in state if key.startswith(f"state.{fqn}.{name}".rstrip("."))]:
                if not name or key == f"state.{fqn}.{name}":
                    del state[key]
        elif name:
            del state["state"][fqn][name]
        else:
            del state["state"][fqn]


def error_of(api: Any, model: nn.Module, optims: Any, state: Any, way: str, **more: Any) -> str:
    with pytest.raises(RuntimeError) as raised:
        load(api, model, optims, state, way, **more)
    return str(raised.value)


def check_named(text: str, cuts: tuple[tuple[str, str], ...]) -> None:
    assert "Missing optimizer state for parameter '" in text
    assert "strict=False" in text
    for fqn, name in cuts:
        assert repr(fqn) in text
        assert not name or repr(name) in text


@pytest.mark.parametrize("what", CUTS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
@on_ranks(world=2)
def test_all_that_is_missing_is_named_and_nothing_is_written(
    api: Any, wrapper: str, way: str, what: str
) -> None:
    model = wrapped(wrapper)
    optim = torch.optim.AdamW(model.parameters(), lr=0.5)
    step(model, optim)
    state = saved(api, model, optim, way)
    cut(state, CUTS[what])
    stepped, fresh = (torch.optim.AdamW(model.parameters(), lr=1.0) for _ in range(2))
    step(model, stepped, "other")
    for target in (stepped, fresh):
        before = held(target)
        check_named(error_of(api, model, target, state, way), CUTS[what])
        assert held(target) == before
        if way.startswith(("full", "rank0")) or not any(name for _, name in CUTS[what]):
            load(api, model, target, state, way, strict=False)
            assert target.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("way", ["sharded", "flat", "full", "rank0"])
@on_ranks(world=2)
def test_model_and_optimizer_in_one_call(api: Any, way: str) -> None:
    """Neither is written; the error is that of the optimizer."""
    model = wrapped("fsdp2")
    optim = torch.optim.Adam(model.parameters())
    step(model, optim)
    state = saved(api, model, optim, way)
    cut(state, CUTS["some of each"])
    full = way in ("full", "rank0")
    whole = api.StateDictOptions(full_state_dict=full, cpu_offload=way == "rank0")
    weights = {
        name: value + 1 if torch.is_tensor(value) else value
        for name, value in api.get_model_state_dict(model, options=whole).items()
    }
    before = [param.detach().clone() for param in model.parameters()]
    options = api.StateDictOptions(full_state_dict=full, broadcast_from_rank0=way == "rank0")
    with pytest.raises(RuntimeError, match="Missing optimizer state") as raised:
        api.set_state_dict(model, optim, model_state_dict=weights, optim_state_dict=state, options=options)
    check_named(str(raised.value), CUTS["some of each"])
    assert all(torch.equal(mine, its) for mine, its in zip(model.parameters(), before))


@pytest.mark.parametrize("way", WAYS)
@on_ranks(world=2)
def test_the_missing_states_of_all_optimizers_are_named(api: Any, way: str) -> None:
    def make() -> tuple[nn.Module, list[torch.optim.Optimizer]]:
        model = wrapped("fsdp2")
        params = list(model.parameters())
        return model, [torch.optim.Adam(params[:2]), torch.optim.RMSprop(params[2:])]

    model, optims = make()
    for optim in optims:
        step(model, optim)
    state = saved(api, model, optims, way)
    cuts = (("embed.weight", ""), ("head.weight", "square_avg"))
    cut(state, cuts)
    other, fresh = make()
    check_named(error_of(api, other, fresh, state, way), cuts)
    assert not any(optim.state for optim in fresh)


@pytest.mark.parametrize("way", WAYS)
@on_ranks(world=2)
def test_which_states_are_needed_is_decided_by_the_saved_settings(api: Any, way: str) -> None:
    """The dict's settings replace the optimizer's: without AMSGrad no step needs its maximum."""
    model = wrapped("fsdp2")

    def adam(amsgrad: bool) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), amsgrad=amsgrad)

    plain, maximal = adam(False), adam(True)
    step(model, plain)
    step(model, maximal)
    for optim in (plain, maximal):
        for target in (adam(False), adam(True)):
            load(api, model, target, saved(api, model, optim, way), way)
            assert target.param_groups[0]["amsgrad"] is optim.param_groups[0]["amsgrad"]
            step(model, target, "on")
    state = saved(api, model, maximal, way)
    cuts = (("head.weight", "max_exp_avg_sq"),)
    cut(state, cuts)
    for target in (adam(False), adam(True)):
        check_named(error_of(api, model, target, state, way), cuts)


@pytest.mark.parametrize("way", ["full", "rank0"])
@on_ranks(world=2)
def test_a_model_on_the_meta_device(api: Any, way: str) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    made = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optim = torch.optim.Adam(made.parameters())
    step(made, optim)
    state = saved(api, made, optim, way)
    cuts = (("0.weight", ""), ("1.bias", "exp_avg"))
    cut(state, cuts)
    fresh = torch.optim.Adam(model.parameters())
    check_named(error_of(api, model, fresh, state, way), cuts)
    assert all(param.is_meta for param in model.parameters())


@pytest.mark.parametrize("way", ["sharded", "full", "rank0"])
@pytest.mark.parametrize("use_orig_params", [False, True])
@on_ranks(world=2)
def test_fsdp1(api: Any, use_orig_params: bool, way: str) -> None:
    """Rank 0 alone may have the dict: the others hear of it, and do not wait for its share."""

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        device = torch.device("cpu")
        net = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
        net["b"] = FSDP1(net["b"], device_id=device, use_orig_params=use_orig_params)
        model = FSDP1(net, device_id=device, use_orig_params=use_orig_params)
        return model, torch.optim.Adam(model.parameters())

    for used in (True, False):
        model, optim = make()
        for name, param in model.named_parameters():
            if param.numel() and (used or "b" not in name.split(".")):
                param.grad = torch.ones_like(param)
        optim.step()
        state = api.get_optimizer_state_dict(model, optim, options=options_of_fsdp1(api, way, get=True))
        if way != "rank0" or dist.get_rank() == 0:
            assert set(state["state"]) == {"a.weight", "a.bias", "b.weight", "b.bias"}
        other, fresh = make()
        api.set_optimizer_state_dict(other, fresh, state, options=options_of_fsdp1(api, way, get=False))
        for cuts in ((("b.weight", ""), ("b.bias", "")), (("a.bias", ""), ("b.weight", "step"))):
            less = (
                {**state, "state": {fqn: dict(one) for fqn, one in state["state"].items()}} if state else {}
            )
            cut(less, cuts)
            other, fresh = make()
            with pytest.raises(RuntimeError) as raised:
                api.set_optimizer_state_dict(
                    other, fresh, less, options=options_of_fsdp1(api, way, get=False)
                )
            check_named(str(raised.value), cuts)
            assert not fresh.state


def options_of_fsdp1(api: Any, way: str, get: bool) -> Any:
    rank0 = way == "rank0"
    return api.StateDictOptions(
        full_state_dict=way != "sharded", cpu_offload=rank0 and get, broadcast_from_rank0=rank0 and not get
    )


class Slow(torch.optim.Optimizer):
    """Not torch's own: two states, which its first step makes."""

    def __init__(self, params: Any, lr: float = 0.5) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    for name in ("mean", "slow"):
                        self.state[param].setdefault(name, torch.zeros_like(param)).add_(param.grad)


@pytest.mark.parametrize("way", WAYS)
@on_ranks(world=2)
def test_an_optimizer_that_is_not_torchs_own(api: Any, way: str) -> None:
    """A parameter has all the states that the first step makes, or, never used, none."""
    model = wrapped("fsdp2")
    optim = Slow(model.parameters())
    step(model, optim)
    state = saved(api, model, optim, way)
    cuts = (("head.weight", "slow"),)
    cut(state, cuts)
    fresh = Slow(model.parameters())
    check_named(error_of(api, model, fresh, state, way), cuts)
    assert not fresh.state
    cut(state, (("head.weight", ""),))
    load(api, model, fresh, state, way)
    assert len(fresh.state) == len(list(model.parameters())) - 1


class Late(Slow):
    """Has a state in its first step alone."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for state in self.state.values():
            state["steps"] = state.get("steps", 0) + 1
            if state["steps"] == 1:
                state["warm"] = torch.ones(1)
            else:
                state.pop("warm", None)


class Subclass(torch.optim.Adam):
    pass


@pytest.mark.parametrize("way", WAYS)
@on_ranks(world=2)
def test_a_state_that_no_parameter_has_is_not_missing(api: Any, way: str) -> None:
    """A later step took it away, or the saved settings have none."""
    model = wrapped("plain")
    cases: list[tuple[Any, Any]] = [
        (Late(model.parameters()), Late),
        (Subclass(model.parameters()), lambda params: Subclass(params, amsgrad=True)),
    ]
    for optim, make in cases:
        for _ in range(2):
            step(model, optim)
        fresh = make(model.parameters())
        load(api, model, fresh, saved(api, model, optim, way), way)
        assert len(fresh.state) == len(list(model.parameters()))


@pytest.mark.parametrize("way", WAYS)
@on_ranks(world=2)
def test_adagrad_makes_its_states_when_it_is_made(api: Any, way: str) -> None:
    model = wrapped("plain")
    optim = torch.optim.Adagrad(model.parameters())
    step(model, optim)
    state = saved(api, model, optim, way)
    cuts = (("head.weight", "sum"),)
    cut(state, cuts)
    check_named(error_of(api, model, torch.optim.Adagrad(model.parameters()), state, way), cuts)


@pytest.mark.parametrize("way", ["sharded", "full", "rank0"])
@on_ranks(world=2)
def test_numbered_states(api: Any, way: str) -> None:
    """torch.optim's own dict leaves out whole states of parameters that were never used, and no parts."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optim = torch.optim.Adam(model.parameters())
    step(model, optim, only=lambda name: name != "1.weight")
    state = optim.state_dict()
    fresh = torch.optim.Adam(model.parameters())
    with heard():
        load(api, model, fresh, state if way != "rank0" or dist.get_rank() == 0 else {}, way)
    assert model[1].weight not in fresh.state
    state["state"] = {number: dict(states) for number, states in state["state"].items()}
    del state["state"][0]["exp_avg"]
    fresh = torch.optim.Adam(model.parameters())
    text = error_of(api, model, fresh, state if way != "rank0" or dist.get_rank() == 0 else {}, way)
    check_named(text, ((("0.weight", "exp_avg"),) if way != "sharded" else (("0", "exp_avg"),)))
    assert not fresh.state


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("way", WAYS)
@on_ranks(world=2)
def test_an_optimizer_that_was_made_before_fully_shard(api: Any, way: str, stepped: bool) -> None:
    """The error says which parameter has taken the place of the optimizer's, and what to do."""
    model = wrapped("fsdp2")
    good = torch.optim.Adam(model.parameters())
    step(model, good)
    state = saved(api, model, good, way)
    params = [nn.Parameter(torch.zeros(param.shape)) for param in model.parameters()]
    early = torch.optim.Adam(params)
    if stepped:
        for param in params:
            param.grad = torch.ones_like(param)
        early.step()
    before = held(early)
    calls = (lambda: saved(api, model, early, way), lambda: load(api, model, early, state, way))
    for call in calls:
        with pytest.raises((KeyError, RuntimeError)) as raised:
            call()
        text = str(raised.value)
        assert "parameter 0 of Adam, of shape (32, 8), is not a parameter of the model" in text
        assert "'embed.weight' has this shape" in text
        assert "make the optimizer after them" in text
    assert held(early) == before


@on_ranks(world=2)
def test_an_optimizer_that_was_made_before_fsdp1(api: Any) -> None:
    net = nn.Linear(4, 4)
    early = torch.optim.Adam([nn.Parameter(torch.zeros(4, 4))])
    model = FSDP1(net, device_id=torch.device("cpu"))
    for options in (api.StateDictOptions(), api.StateDictOptions(full_state_dict=True)):
        with pytest.raises(KeyError, match="make the optimizer after them"):
            api.get_optimizer_state_dict(model, early, options=options)
        state = {"state": {}, "param_groups": [{"params": ["weight"], "lr": 0.5}]}
        with pytest.raises(RuntimeError, match="make the optimizer after them"):
            api.set_optimizer_state_dict(model, early, state, options=options)


@pytest.mark.parametrize("full", [False, True])
@on_ranks(world=2)
def test_an_empty_dict_on_one_rank_of_fsdp1_is_an_error_on_both(api: Any, full: bool) -> None:
    """FSDP1's own loading communicates: the rank with a dict would wait for the other one."""
    model = FSDP1(nn.Linear(4, 4), device_id=torch.device("cpu"))
    optim = torch.optim.Adam(model.parameters())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optim.step()
    options = api.StateDictOptions(full_state_dict=full)
    of_model, of_optimizer = api.get_state_dict(model, optim, options=options)
    with pytest.raises(RuntimeError, match="rank 1: the optimizer state dict is empty"):
        api.set_state_dict(
            model,
            optim,
            model_state_dict=of_model,
            optim_state_dict={} if dist.get_rank() == 1 else of_optimizer,
            options=options,
        )
