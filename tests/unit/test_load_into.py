"""What an optimizer's own load_state_dict() is handed: lists that torch does not have to search."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from torch_dcp_backport.state_dict.optim.load import load_into


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


class Own(torch.optim.AdamW):
    seen: Any = None

    def load_state_dict(self, state_dict: Any) -> None:
        Own.seen = [type(group["params"]) for group in state_dict["param_groups"]]
        super().load_state_dict(state_dict)


@pytest.mark.parametrize("hooked", [False, True])
def test_code_that_is_not_torchs_gets_lists(hooked: bool) -> None:
    optim = adamw(4, torch.optim.AdamW if hooked else Own)

    def look(_: Any, state_dict: Any) -> None:
        Own.seen = [type(group["params"]) for group in state_dict["param_groups"]]

    if hooked:
        optim.register_load_state_dict_pre_hook(look)
    Own.seen = None
    load_into(optim, named(adamw(4)))
    assert Own.seen == [list, list]


def test_torchs_errors_are_the_same() -> None:
    optim = adamw(4)
    with pytest.raises(KeyError, match="param_groups"):
        load_into(optim, {})
    state = named(adamw(4))
    state["param_groups"].pop()
    with pytest.raises(ValueError, match="different number of parameter groups"):
        load_into(optim, state)
