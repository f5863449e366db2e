"""The user's own error comes through, everyone hears of it, and nothing is held on to."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Layer, Model, build, check_values, full_state
from pool import OURS, Pool, on_ranks
from test_bad_input import error_of, same_everywhere
from test_optimizer import full_optimizer_state, optimizer_of
from torch import nn

from torch_dcp_backport.regression.meter import live_storages
from torch_dcp_backport.state_dict import destination
from torch_dcp_backport.transfer._src import engine


class Custom(nn.Linear):
    """Its own loading code does nothing but what torch's does."""

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)


class WithCustom(Model):
    def __init__(self) -> None:
        super().__init__()
        self.custom = Custom(4, 4)


@on_ranks(world=0)
def test_without_a_process_group_errors_are_what_they_were(api: Any) -> None:
    full = api.StateDictOptions(full_state_dict=True)
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: .*bias"):
        api.set_model_state_dict(Custom(4, 4), {"weight": torch.ones(4, 4)}, options=full)
    broadcast = api.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    with pytest.raises(ValueError, match="Default process group has not been initialized"):
        api.set_model_state_dict(nn.Linear(4, 4), {}, options=broadcast)


class Wrapper(torch.optim.Optimizer):
    """As accelerate's: an Optimizer that was never initialised as one."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    state = property(lambda self: self.inner.state)
    defaults = property(lambda self: self.inner.defaults)

    @property
    def param_groups(self) -> Any:
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: Any) -> None:
        self.inner.param_groups = groups

    def state_dict(self) -> Any:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.inner.load_state_dict(state_dict)

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


@on_ranks()
def test_an_optimizer_that_wraps_another_one_is_loaded(api: Any) -> None:
    model = build()
    inner = optimizer_of(model, "AdamW")
    state = full_optimizer_state(model, inner)
    options = api.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    mine = state if dist.get_rank() == 0 else {}
    api.set_optimizer_state_dict(model, Wrapper(inner), mine, options=options)
    got = api.get_optimizer_state_dict(model, inner, options=api.StateDictOptions(full_state_dict=True))
    for fqn, states in state["state"].items():
        assert all(torch.equal(got["state"][fqn][name], value) for name, value in states.items()), fqn


class Lazy(dict):
    """Makes its tensors when they are asked for."""

    def __getitem__(self, key: str) -> torch.Tensor:
        return super().__getitem__(key)()

    def items(self) -> Any:
        return ((key, self[key]) for key in self)

    def values(self) -> Any:
        return (self[key] for key in self)


class Unreadable(Mapping):
    def __getitem__(self, key: str) -> torch.Tensor:
        raise OSError("the file is gone")

    def __iter__(self) -> Iterator[str]:
        return iter(["embed.weight"])

    def __len__(self) -> int:
        return 1


def unreadable(api: Any, how: str) -> tuple[str, str]:
    model = build()
    faulty = {"rank0": 0, "all": 2}[how]
    given = full_state() if how == "all" else {}
    options = api.StateDictOptions(full_state_dict=True, broadcast_from_rank0=how == "rank0")
    mine = Unreadable() if dist.get_rank() == faulty else given
    error = error_of(lambda: api.set_model_state_dict(model, mine, options=options))
    same_everywhere(error)
    return error


@pytest.mark.parametrize("how", ["rank0", "all"])
@on_ranks()
def test_a_dict_that_makes_its_tensors_is_read_as_needed(api: Any, how: str) -> None:
    model, state = build(), full_state()
    mine = Lazy((key, lambda value=value: value.clone()) for key, value in state.items())
    options = api.StateDictOptions(full_state_dict=True, broadcast_from_rank0=how == "rank0")
    api.set_model_state_dict(model, mine if how == "all" or dist.get_rank() == 0 else {}, options=options)
    check_values(model, state)


@pytest.mark.parametrize("how", ["rank0", "all"])
def test_a_dict_that_cannot_be_read_is_an_error_on_every_rank(ranks, how):
    for kind, text in ranks(unreadable, how):
        assert kind == "RuntimeError"
        assert "OSError: the file is gone" in text
        assert "nothing was changed" in text


def failing_torch(made: list[Any], most: int) -> Any:
    def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        if len(made) == most:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        tensor = torch.empty(*args, **kwargs)
        made.append(weakref.ref(tensor))
        return tensor

    return SimpleNamespace(**{**vars(torch), "empty": empty})


def no_room(api: Any, how: str) -> tuple[str, str]:
    """Rank 2 finds no memory for its third shard, and another rank's loading code is its own."""
    model = build("meta", kind=WithCustom)
    state, made = full_state(WithCustom), []
    options = api.StateDictOptions(full_state_dict=True, broadcast_from_rank0=how == "rank0")
    given = state if how == "all" or dist.get_rank() == 0 else {}
    gc.collect()
    gc.disable()
    # Else a transfer as small as this one is not worth the question, and rank 2 raises alone.
    engine.SMALL, small = 0, engine.SMALL
    try:
        if dist.get_rank() == 2:
            destination.torch = failing_torch(made, 2)
        try:
            api.set_model_state_dict(model, given, options=options)
            error = "", ""
        except RuntimeError as caught:
            error = type(caught).__name__, str(caught)
        assert [one for one in made if one() is not None] == [], "the error holds on to what was made"
    finally:
        gc.enable()
        destination.torch, engine.SMALL = torch, small
    dist.barrier()
    return error


@pytest.mark.parametrize("how", ["rank0", "all"])
def test_a_rank_without_memory_is_heard_of_and_keeps_nothing(ranks, how):
    errors = ranks(no_room, how)
    for rank, (kind, text) in enumerate(errors):
        assert kind == "RuntimeError"
        assert "can't allocate memory" in text
        assert "rank 2: " in text or (how == "all" and rank == 2)


class Unstepped(torch.optim.Optimizer):
    """Makes its states in its first step; not one of torch's."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param].setdefault("moment", torch.zeros_like(param))


@on_ranks(world=2)
def test_an_error_that_is_kept_keeps_no_states_that_were_made_for_the_load(api: Any) -> None:
    model = nn.Linear(256, 256, bias=False)
    optimizer = Unstepped(model.parameters())
    before = live_storages().keys()
    options = api.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    with pytest.raises(RuntimeError, match="Unexpected key") as caught:
        api.set_state_dict(
            model,
            optimizer,
            model_state_dict={"nothing": torch.zeros(1)},
            optim_state_dict={"state": {}, "param_groups": [{"lr": 0.1, "params": ["weight"]}]},
            options=options,
        )
    gc.collect()
    left = sum(nbytes for storage, (nbytes, _) in live_storages().items() if storage not in before)
    assert left < 64 * 1024, left
    del caught


def test_the_models_are_what_they_are_meant_to_be():
    assert any(isinstance(module, Layer) for module in WithCustom().modules())


def all_but(api: Any, missing: list[int], more: int) -> str:
    """A load that some ranks never come to; `more` keys make the inventory longer than its first message."""
    if dist.get_rank() in missing:
        return ""
    model = build()
    state = {**full_state(), **{f"more.{number}": torch.zeros(1) for number in range(more)}}
    options = api.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    with pytest.raises(RuntimeError) as error:
        api.set_model_state_dict(model, state if dist.get_rank() == 0 else {}, options=options)
    return str(error.value).partition(": ")[0]


def said_without(missing: list[int], more: int) -> list[str]:
    pool = Pool(6, OURS, timeout=4.0, limit=40.0)
    try:
        return pool.run(all_but, missing, more)
    finally:
        pool.close()


def test_rank_0_names_the_ranks_that_never_came() -> None:
    cases = [([1], 0), ([2], 1000), ([3], 0), ([4, 5], 0)]
    with ThreadPoolExecutor(len(cases)) as executor:  # they mostly wait
        answers = list(executor.map(lambda case: said_without(*case), cases))
    for (missing, _), said in zip(cases, answers):
        who = "ranks 4-5" if len(missing) > 1 else f"rank {missing[0]}"
        assert said[0] in (
            f"nothing was changed; no agreement with {who}",
            f"nothing was changed; the inventory of rank 0 did not arrive everywhere; {who} did not come",
        )
        for rank in set(range(1, 6)) - set(missing):
            assert said[rank] in (
                "nothing was changed; no agreement with rank 0, which may be waiting for another rank itself",
                "nothing was changed; the inventory of rank 0 did not arrive everywhere",
            )
