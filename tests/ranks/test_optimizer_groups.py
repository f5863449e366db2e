"""Param groups that the loaded optimizer has cut in another way than the saved one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from optimizers import WRAPPERS, held, load, saved, step, wrapped
from pool import on_ranks


def merge(api: Any, kind: str, way: str, tensors: bool, expected: float) -> None:
    """Two saved groups become one, whose first parameter is of the second."""

    def rate(value: float) -> Any:
        return torch.tensor(value) if tensors else value

    model = wrapped(kind)
    params = list(model.parameters())
    optim = torch.optim.Adam(
        [
            {"params": params[3:], "lr": rate(0.5), "only_first": 1.0},
            {"params": params[:3], "lr": rate(0.25)},
        ],
        foreach=False,
    )
    step(model, optim)
    state = saved(api, model, optim, way)
    model = wrapped(kind, seed=1)
    other = torch.optim.Adam(model.parameters(), lr=rate(1.0), foreach=False)
    load(api, model, other, state, way)
    (group,) = other.param_groups
    assert float(group["lr"]) == expected
    assert torch.is_tensor(group["lr"]) == tensors
    assert group["betas"] == (0.9, 0.999)
    if not way.endswith("flat"):
        assert group["only_first"] == 1.0
    mine = held(optim)["state"]
    assert held(other)["state"] == mine[-3:] + mine[:-3]


@pytest.mark.parametrize("tensors", [False, True])
@pytest.mark.parametrize("way", ["sharded", "full", "rank0"])
@pytest.mark.parametrize("kind", WRAPPERS)
def test_the_last_saved_group_of_those_that_are_merged_wins(ranks, kind, way, tensors):
    ranks(merge, kind, way, tensors, 0.25, world=2)


def test_the_first_saved_parameter_of_merged_flat_groups_wins(ranks):
    """As torch has it: every parameter carries its group's values, and the group's first one is asked."""
    for way in ("flat", "full-flat", "rank0-flat"):
        ranks(merge, "plain", way, False, 0.25, world=2)


@pytest.mark.parametrize("way", ["sharded", "full", "rank0"])
@on_ranks(world=2)
def test_live_order_does_not_decide(api: Any, way: str) -> None:
    """The same, the other way round: the live order does not decide."""
    model = wrapped("plain")
    params = list(model.parameters())
    optim = torch.optim.SGD([{"params": params[:3], "lr": 0.5}, {"params": params[3:], "lr": 0.25}])
    state = saved(api, model, optim, way)
    other = torch.optim.SGD(model.parameters(), lr=1.0)
    load(api, model, other, state, way)
    assert other.param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize("way", ["sharded", "flat", "full", "rank0"])
@on_ranks(world=2)
def test_a_group_that_is_split_gives_its_values_to_both(api: Any, way: str) -> None:
    """One saved group becomes two: both get its values."""
    model = wrapped("plain")
    params = list(model.parameters())
    state = saved(api, model, torch.optim.SGD(params, lr=0.5, momentum=0.5), way)
    other = torch.optim.SGD([{"params": params[:3]}, {"params": params[3:], "lr": 0.25}], lr=1.0)
    load(api, model, other, state, way)
    assert [(group["lr"], group["momentum"]) for group in other.param_groups] == [(0.5, 0.5)] * 2


@pytest.mark.parametrize("way", ["flat", "full-flat"])
@on_ranks(world=2)
def test_a_group_without_parameters_keeps_its_values_in_a_flat_load(api: Any, way: str) -> None:
    model = wrapped("plain")
    groups = [{"params": [], "lr": 0.75}, {"params": list(model.parameters()), "lr": 0.125}]
    optim = torch.optim.AdamW(groups)
    state = saved(api, model, optim, way)
    load(api, model, optim, state, way)
    assert [group["lr"] for group in optim.param_groups] == [0.75, 0.125]
    assert [group["betas"] for group in optim.param_groups] == [(0.9, 0.999)] * 2
