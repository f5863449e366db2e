"""What an optimizer's own load_state_dict() is handed: lists that torch does not have to search."""

from __future__ import annotations

import copy
import functools
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from torch_dcp_backport.state_dict.optim.own import HOME, IndexedParams, load_into

CAST = "_process_value_according_to_param_policy"


class Name(str):
    """Counts how often it is compared."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Name.compared += 1
        return str.__eq__(self, other)  # type: ignore[no-any-return]

    __hash__ = str.__hash__


def adamw(count: int, kind: type[torch.optim.Optimizer] = torch.optim.AdamW) -> torch.optim.Optimizer:
    params = [nn.Parameter(torch.full((2,), float(number))) for number in range(count)]
    optim = kind([{"params": params[:2], "lr": 0.5}, {"params": params[2:]}])  # type: ignore[call-arg]
    for number, param in enumerate(params):
        param.grad = torch.full((2,), float(number + 1))
    optim.step()
    return optim


def named(optim: torch.optim.Optimizer) -> dict[str, Any]:
    state: dict[str, Any] = copy.deepcopy(optim.state_dict())
    for group in state["param_groups"]:
        group["params"] = [Name(f"layers.{number}.weight") for number in group["params"]]
    state["state"] = {Name(f"layers.{number}.weight"): value for number, value in state["state"].items()}
    return state


def test_torch_finds_a_parameter_without_a_search() -> None:
    source, optim = adamw(300), adamw(300)
    optim.state.clear()
    state = named(source)
    Name.compared = 0
    load_into(optim, state)
    assert Name.compared < 300 * 20, "a list would be searched 900 times, 150 names each"
    got, expected = optim.state_dict(), source.state_dict()
    assert got["param_groups"] == expected["param_groups"]
    assert all(type(group["params"]) is list for group in (*state["param_groups"], *optim.param_groups))
    for number, states in expected["state"].items():
        assert list(got["state"][number]) == list(states)
        assert all(torch.equal(got["state"][number][key], value) for key, value in states.items())


def test_groups_keep_what_is_theirs() -> None:
    """A step stays as it is but in groups that are fused: torch asks for each parameter's group."""
    source, optim = adamw(6), adamw(6)
    state = named(source)
    for states in state["state"].values():
        states["step"] = states["step"].double()
    state["param_groups"][0]["fused"] = True
    load_into(optim, state)
    kinds = [optim.state[param]["step"].dtype for group in optim.param_groups for param in group["params"]]
    assert kinds == [torch.float32] * 2 + [torch.float64] * 4
    assert type(copy.deepcopy(IndexedParams(["a"]))) is list


def kinds_in(state_dict: Any) -> list[type]:
    return [type(group["params"]) for group in state_dict["param_groups"]]


class Own(torch.optim.AdamW):
    def load_state_dict(self, state_dict: Any) -> None:
        self.seen = kinds_in(state_dict)
        super().load_state_dict(state_dict)


class Around(torch.optim.Optimizer):
    """As accelerate's and Lightning's: another optimizer's methods under its own name."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    @property
    def load_state_dict(self) -> Any:  # type: ignore[override]
        return self.inner.load_state_dict


class Instead:
    """Stands before a static method, as wrapt's wrappers do: passes for it, and calls something else."""

    def __init__(self, function: Any, called: Any) -> None:
        self.__func__ = function
        self.called = called

    def __get__(self, instance: object, owner: object) -> Any:
        return self.called


def seen_by(way: str, monkeypatch: pytest.MonkeyPatch) -> list[type]:
    """The kinds of lists that code which is not torch's gets to see."""
    seen: list[type] = []
    optim: Any = adamw(4, Own if way == "own" else torch.optim.AdamW)
    native, cast = Optimizer.load_state_dict, getattr(Optimizer, CAST)

    def instead(self: Any, state_dict: Any) -> None:
        seen.extend(kinds_in(state_dict))
        native(self, state_dict)

    def look(_: Any, state_dict: Any) -> None:
        seen.extend(kinds_in(state_dict))

    def policy(param: Any, value: Any, number: Any, groups: Any, key: Any = None) -> Any:
        seen.extend(type(group["params"]) for group in groups)
        return cast(param, value, number, groups, key)

    def copied(value: Any) -> Any:
        seen.extend(type(group["params"]) for group in value)
        return copy.deepcopy(value)

    if way in ("hook", "wrapper", "bound", "partial"):
        optim.register_load_state_dict_pre_hook(look)
    other: Any = adamw(4)
    if way == "wrapper":
        optim = Around(optim)
    elif way == "bound":
        other.load_state_dict, optim = optim.load_state_dict, other
    elif way == "partial":
        other.load_state_dict, optim = functools.partial(Optimizer.load_state_dict, self=optim), other
    elif way == "class":
        monkeypatch.setattr(Optimizer, "load_state_dict", instead)
    elif way == "class, wrapped":
        monkeypatch.setattr(Optimizer, "load_state_dict", functools.wraps(native)(instead))
    elif way == "class, decorated":
        monkeypatch.setattr(Optimizer, "load_state_dict", torch.no_grad()(instead))
    elif way == "cast":
        monkeypatch.setattr(Optimizer, CAST, staticmethod(policy))
    elif way == "cast, wrapped":
        monkeypatch.setattr(Optimizer, CAST, Instead(cast, policy))
    elif way == "dispatched":
        dispatch = torch.overrides.wrap_torch_function(lambda self, state_dict: look(self, state_dict) or ())
        monkeypatch.setattr(Optimizer, "load_state_dict", dispatch(native))
    elif way == "name in torch's module":
        kind = type("Mine", (Optimizer,), {CAST: staticmethod(policy)})
        monkeypatch.setattr(sys.modules[HOME], "Optimizer", kind)
    elif way == "copies":
        monkeypatch.setattr(sys.modules[HOME], "deepcopy", copied)
    elif way == "proxy":
        wrapt = pytest.importorskip("wrapt")

        def around(wrapped: Any, _: Any, args: Any, kwargs: Any) -> Any:
            seen.extend(kinds_in(kwargs["state_dict"]))
            return wrapped(*args, **kwargs)

        optim.load_state_dict = wrapt.FunctionWrapper(optim.load_state_dict, around)
    load_into(optim, named(adamw(4)))
    return seen or optim.seen  # type: ignore[no-any-return]


WAYS = [
    "own",
    "hook",
    "wrapper",
    "bound",
    "partial",
    "class",
    "class, wrapped",
    "class, decorated",
    "cast",
    "cast, wrapped",
    "dispatched",
    "name in torch's module",
    "copies",
    "proxy",
]


@pytest.mark.parametrize("way", WAYS)
def test_code_that_is_not_torchs_gets_lists(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(seen_by(way, monkeypatch)) == {list}


def test_a_load_of_full_states_makes_use_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_dcp_backport.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    model = nn.Linear(2, 2)
    optim = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optim.step()
    asked: list[object] = []
    native = IndexedParams.__contains__
    monkeypatch.setattr(
        IndexedParams, "__contains__", lambda self, name: asked.append(name) or native(self, name)
    )
    options = StateDictOptions(full_state_dict=True)
    set_optimizer_state_dict(
        model, optim, get_optimizer_state_dict(model, optim, options=options), options=options
    )
    assert {"weight", "bias"} == set(asked)


def test_torchs_errors_are_the_same() -> None:
    state = named(adamw(4))
    state["param_groups"].pop()
    with pytest.raises(ValueError, match="different number of parameter groups"):
        load_into(adamw(4), state)
