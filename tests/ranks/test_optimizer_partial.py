"""Parameters without a state: never used, frozen, or of a stateless optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from heard import heard
from models import local_of
from optimizers import WAYS, WRAPPERS, frozen, held, load, saved, step, weights, wrapped
from pool import on_ranks
from torch import nn

#: Optimizers whose first states train as none would.
NEUTRAL: dict[str, dict[str, Any]] = {
    "Adam": {"weight_decay": 0.5, "amsgrad": True},
    "AdamW": {},
    "RAdam": {},
    "Adamax": {},
    "Adadelta": {},
    "RMSprop": {"momentum": 0.5, "centered": True},
    "Adafactor": {},
}
#: Those whose first states say something else than none.
OTHERS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.5, "dampening": 0.25},
    "Rprop": {},
    "NAdam": {},
    "ASGD": {"weight_decay": 0.5},
}
KINDS = {**NEUTRAL, **OTHERS}


def optimizer_of(model: nn.Module, kind: str, lr: float = 0.125) -> torch.optim.Optimizer:
    return getattr(torch.optim, kind)(model.parameters(), lr=lr, **KINDS[kind])


def is_used(name: str) -> bool:
    return not name.endswith(("even.weight", "row"))


def part_used(wrapper: str, kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = wrapped(wrapper)
    optim = optimizer_of(model, kind)
    step(model, optim, only=is_used)
    return model, optim


def skip_where_absent(kind: str, wrapper: str) -> None:
    if not hasattr(torch.optim, kind):
        pytest.skip("not in this torch")
    if kind in ("Adafactor", "Rprop") and wrapper == "fsdp2":
        pytest.skip("torch's step takes no DTensors in every release")


# The functions below run on the ranks.


def resume(api: Any, wrapper: str, kind: str, way: str) -> None:
    """A model part of which was never used is saved, loaded, and trained on as if nothing had been."""
    model, optim = part_used(wrapper, kind)
    before = held(optim)
    state = saved(api, model, optim, way)
    assert held(optim) == before
    names = {name.replace("module.", "") for name, _ in model.named_parameters()}
    if state:
        rows = {key for key in state if key.startswith("state.")} if way.endswith("flat") else state["state"]
        has = {name for name in names if any(row.startswith((name, f"state.{name}.")) for row in rows)}
        assert has == (names if kind in NEUTRAL else {name for name in names if is_used(name)})
    other = wrapped(wrapper)
    with torch.no_grad():
        for mine, its in zip(other.parameters(), model.parameters()):
            local_of(mine).copy_(local_of(its))
    fresh = optimizer_of(other, kind, lr=1.0)
    with heard() as lines:
        load(api, other, fresh, state, way)
    expected = 0 if kind in NEUTRAL or (way.startswith("rank0") and dist.get_rank()) else 1
    assert len(lines) == expected, lines
    assert all("start from nothing, for instance" in line for line in lines)
    assert weights(other) == weights(model)
    for param, its in zip(other.parameters(), model.parameters()):
        if kind in NEUTRAL and its not in optim.state:
            assert all(not local_of(value).any() or value == 1 for value in fresh.state[param].values())
    if kind not in NEUTRAL:
        assert held(fresh) == held(optim)
    for group in (*optim.param_groups, *fresh.param_groups):
        # A scheduler went on meanwhile: what starts later starts with the rate of then.
        group["lr"] *= 0.5
    for salt in ("one", "two"):
        step(model, optim, salt)
        step(other, fresh, salt)
    assert held(fresh) == held(optim)
    assert weights(other) == weights(model)


def frozen_since(api: Any, wrapper: str, way: str, ignore: bool) -> None:
    model = wrapped(wrapper)
    optim = torch.optim.Adam(model.parameters())
    step(model, optim)
    model.requires_grad_(False)
    list(model.parameters())[-1].requires_grad_(True)
    state, want = saved(api, model, optim, way, ignore_frozen_params=ignore), held(optim)
    for had_states in (False, True):
        other = wrapped(wrapper, seed=1)
        fresh = torch.optim.Adam(other.parameters(), lr=1.0)
        if had_states:
            step(other, fresh, "other")
        for mine, its in zip(other.parameters(), model.parameters()):
            mine.requires_grad_(its.requires_grad)
        load(api, other, fresh, state, way, ignore_frozen_params=ignore)
        assert held(fresh) == want


def never_trainable(api: Any, wrapper: str, way: str, ignore: bool) -> None:
    """Frozen from the start, in the optimizer all the same: no states, before and after."""
    model = wrapped(wrapper)
    next(model.parameters()).requires_grad_(False)
    optim = torch.optim.Adam(model.parameters())
    step(model, optim)
    state, want = saved(api, model, optim, way, ignore_frozen_params=ignore), held(optim)
    other = wrapped(wrapper, seed=1)
    next(other.parameters()).requires_grad_(False)
    fresh = torch.optim.Adam(other.parameters(), lr=1.0)
    with heard() as lines:
        load(api, other, fresh, state, way, ignore_frozen_params=ignore)
    assert held(fresh) == want
    assert not lines


class Plain(torch.optim.Optimizer):
    """Not torch's own, with a state that its first step makes."""

    def __init__(self, params: Any, lr: float = 0.5) -> None:
        super().__init__(params, {"lr": lr, "decay": 0.5})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    state.setdefault("mean", torch.zeros_like(param)).add_(param.grad)


# The tests.


@pytest.mark.parametrize("way", ["sharded", "full-flat", "rank0"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("kind", KINDS)
def test_parameters_that_were_never_used(ranks, kind, wrapper, way):
    skip_where_absent(kind, wrapper)
    ranks(resume, wrapper, kind, way, world=2)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("wrapper", ["plain", "fsdp2"])
@pytest.mark.parametrize("kind", ["Adam", "SGD", "ASGD"])
@on_ranks(world=2)
def test_going_back_to_where_parameters_were_not_used(api: Any, kind: str, wrapper: str, way: str) -> None:
    """The optimizer itself has trained on with all parameters, and is set back."""
    model, optim = part_used(wrapper, kind)
    state, want = saved(api, model, optim, way), held(optim)
    step(model, optim, "on")
    load(api, model, optim, state, way)
    got = held(optim)
    assert got["groups"] == want["groups"]
    for mine, its in zip(got["state"], want["state"]):
        assert mine == its or (kind in NEUTRAL and its is None and mine["step"] == frozen(torch.tensor(0.0)))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("wrapper", ["plain", "fsdp2"])
@on_ranks(world=2)
def test_a_dict_without_the_states_of_unused_parameters(api: Any, wrapper: str, way: str) -> None:
    """torch's own get leaves them out, and its set refuses them: only `strict=False` takes them."""
    model, optim = part_used(wrapper, "Adam")
    state, want = saved(api, model, optim, way), held(optim)
    for key in list(state.get("state", state)):
        name = key.partition("state.")[2].rpartition(".")[0] if way.endswith("flat") else key
        if name and not key.startswith("param_groups") and not is_used(name):
            del state.get("state", state)[key]
    other = wrapped(wrapper, seed=1)
    fresh = optimizer_of(other, "Adam")
    with pytest.raises(
        RuntimeError, match=r"Missing optimizer state for parameter '.*row' \(and '.*even.weight'"
    ):
        load(api, other, fresh, state, way)
    assert not fresh.state
    if way.startswith("full"):
        # As trainers get the form of what they read: it leaves states before the first step.
        api.get_optimizer_state_dict(other, fresh)
    load(api, other, fresh, state, way, strict=False)
    assert held(fresh) == want


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("wrapper", ["plain", "fsdp2"])
@on_ranks(world=2)
def test_the_dict_of_another_optimizer_is_refused(api: Any, wrapper: str, way: str) -> None:
    """Of another kind, and of another model: never "parameters that start from nothing"."""
    model = wrapped(wrapper)
    sgd = torch.optim.SGD(model.parameters(), lr=0.5)
    state = saved(api, model, sgd, way)
    adam = torch.optim.Adam(model.parameters(), lr=1.0)
    match = r"key|another kind of optimizer, with '(momentum|dampening)' and without"
    with pytest.raises((RuntimeError, KeyError), match=match):
        load(api, model, adam, state, way)
    assert not adam.state
    assert adam.param_groups[0]["lr"] == 1.0
    other = wrapped(wrapper, seed=1)
    other.extra = nn.Linear(2, 2)
    step(model, adam)
    state = saved(api, model, adam, way)
    grown = torch.optim.Adam(other.parameters())
    if way.endswith("flat"):
        return
    with pytest.raises(RuntimeError, match=r"Missing optimizer state for parameter 'extra.weight'"):
        load(api, other, grown, state, way)
    assert not grown.state


@pytest.mark.parametrize("what", ["", "exp_avg_sq"])
@pytest.mark.parametrize("way", ["flat", "full-flat", "rank0-flat"])
@on_ranks(world=2)
def test_a_missing_state_in_a_flat_dict_names_the_parameter(api: Any, way: str, what: str) -> None:
    model = wrapped("fsdp2")
    optim = torch.optim.Adam(model.parameters())
    step(model, optim)
    state = saved(api, model, optim, way)
    before = held(optim)
    for key in [key for key in state if key.startswith(f"state.head.weight.{what}")]:
        del state[key]
    for target in (optim, torch.optim.Adam(model.parameters())):
        if target is not optim and not what:
            continue
        with pytest.raises(RuntimeError, match=r"Missing optimizer state for parameter 'head\.weight'"):
            load(api, model, target, state, way)
        load(api, model, target, state, way, strict=False)
    assert held(optim)["state"][:-1] == before["state"][:-1]


@pytest.mark.parametrize("ignore", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("case", [frozen_since, never_trainable])
def test_frozen_parameters(ranks, case, wrapper, way, ignore):
    ranks(case, wrapper, way, ignore, world=2)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
@on_ranks(world=2)
def test_a_stateless_optimizer_stays_stateless(api: Any, wrapper: str, way: str) -> None:
    """SGD without momentum, alone and beside Adam."""

    def make(seed: int) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
        model = wrapped(wrapper, seed)
        params = list(model.parameters())
        return model, [torch.optim.Adam(params[:3], lr=0.5), torch.optim.SGD(params[3:], lr=0.25)]

    model, optims = make(0)
    for optim in optims:
        step(model, optim)
    state = saved(api, model, optims, way)
    for stepped in (False, True):
        other, fresh = make(1)
        for optim in fresh:
            optim.param_groups[0]["lr"] = 1.0
            if stepped:
                step(other, optim, "other")
        with heard() as lines:
            load(api, other, fresh, state, way)
        assert [held(optim) for optim in fresh] == [held(optim) for optim in optims]
        assert not fresh[1].state
        assert not lines
    alone = torch.optim.SGD(model.parameters(), lr=0.5)
    step(model, alone)
    load(api, model, alone, saved(api, model, alone, way), way)
    assert not alone.state


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("wrapper", ["plain", "fsdp2"])
@on_ranks(world=2)
def test_an_unknown_optimizer_part_of_which_was_never_used(api: Any, wrapper: str, way: str) -> None:
    model = wrapped(wrapper)
    optim = Plain(model.parameters())
    step(model, optim, only=is_used)
    state, want = saved(api, model, optim, way), held(optim)
    other = wrapped(wrapper)
    fresh = Plain(other.parameters())
    load(api, other, fresh, state, way)
    assert held(fresh) == want


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("wrapper", ["plain", "fsdp2"])
@on_ranks(world=2)
def test_no_optimizer_is_written_where_one_of_them_cannot_be(api: Any, wrapper: str, way: str) -> None:
    """Several optimizers in one call: the first is not written where the second cannot be."""

    def make() -> tuple[nn.Module, list[torch.optim.Optimizer]]:
        model = wrapped(wrapper)
        params = list(model.parameters())
        return model, [Plain(params[:2]), torch.optim.Adam(params[2:4]), torch.optim.Adam(params[4:])]

    model, optims = make()
    for optim in optims:
        step(model, optim)
    state = saved(api, model, optims, way)
    for key in [key for key in state.get("state", state) if "head.weight" in key and "group" not in key]:
        del state.get("state", state)[key]
    before = [held(optim) for optim in optims]
    for optim in optims[:2]:
        optim.param_groups[0]["lr"] = 3.0
    with pytest.raises(RuntimeError, match=r"Missing optimizer state for parameter 'head\.weight'"):
        load(api, model, optims, state, way)
    assert [held(optim)["state"] for optim in optims] == [one["state"] for one in before]
    assert [optim.param_groups[0]["lr"] for optim in optims[:2]] == [3.0, 3.0]
    model, fresh = make()
    step(model, fresh[2])
    with pytest.raises(RuntimeError, match=r"Missing optimizer state for parameter 'head\.weight'"):
        load(api, model, fresh, state, way)
    assert not fresh[0].state
    assert not fresh[1].state
