"""States as optimizers that are not torch's own have them, and states that share memory."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import local_of
from optimizers import WRAPPERS, held, load, saved, step, weights, wrapped
from pool import on_ranks
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


class OneBased(torch.optim.Optimizer):
    """Its counter starts at 1: at 0 the bias correction divides by zero."""

    def __init__(self, params: Any, lr: float = 0.5) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["step"] = 1
                    state["mean"] = torch.zeros_like(param)
                state["mean"].mul_(0.5).add_(param.grad, alpha=0.5)
                scale = 1 / (1 - 0.5 ** state["step"])
                param.data.add_(state["mean"], alpha=-group["lr"] * scale)
                state["step"] += 1


class Counting(torch.optim.Adam):
    """Of a known kind, but for a step of its own."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for state in self.state.values():
            state["mu_product"] = state.get("mu_product", 7.0)


@pytest.mark.parametrize("kind", WRAPPERS)
@on_ranks(world=2)
def test_only_known_optimizers_are_rewound(api: Any, kind: str) -> None:
    model = wrapped(kind)
    optim = OneBased(model.parameters())
    before = weights(model)
    state = saved(api, model, optim, "sharded")
    assert weights(model) == before
    assert all(states["step"] == 2 for states in state["state"].values())
    load(api, model, optim, state, "rank0" if kind == "ddp" else "sharded")
    step(model, optim)
    assert all(torch.isfinite(local_of(param)).all() for param in model.parameters())
    counting = Counting(model.parameters())
    api.get_optimizer_state_dict(model, counting)
    assert all((float(one["step"]), one["mu_product"]) == (1.0, 7.0) for one in counting.state.values())


@pytest.mark.parametrize("kind", WRAPPERS)
@on_ranks(world=2, fixture="fixed")
def test_first_states_hold_nothing_of_the_parameters(api: Any, kind: str) -> None:
    """The first states are zeros: weight decay, and a parameter that is not finite, leave nothing in them."""
    for maker in (torch.optim.Adam, torch.optim.RAdam, torch.optim.SGD, torch.optim.RMSprop):
        model = wrapped(kind)
        with torch.no_grad():
            for param in model.parameters():
                local_of(param).fill_(3.0)
            local_of(param).fill_(torch.inf)
        before = weights(model)
        more = {} if maker is torch.optim.RAdam or maker is torch.optim.Adam else {"momentum": 0.5}
        optim = maker(model.parameters(), lr=0.5, weight_decay=0.5, **more)
        api.get_optimizer_state_dict(model, optim)
        assert weights(model) == before
        assert optim.state
        for states in optim.state.values():
            assert all(not local_of(value).any() for value in states.values()), maker


@on_ranks(world=2, fixture="fixed")
def test_hooks_of_a_step_do_not_run_in_a_get(api: Any) -> None:
    """Nothing of the user's sees the making of first states: no hook, no scheduler's count."""
    model = wrapped("plain")
    optim = torch.optim.Adam(model.parameters())
    seen: list[Any] = []
    optim.register_step_pre_hook(lambda *_: seen.append("pre"))
    optim.register_step_post_hook(lambda *_: seen.append("post"))
    scheduler = torch.optim.lr_scheduler.StepLR(optim, 1)
    counts = getattr(optim, "_opt_called", None), scheduler.last_epoch
    api.get_optimizer_state_dict(model, optim)
    assert not seen
    assert (getattr(optim, "_opt_called", None), scheduler.last_epoch) == counts


@pytest.mark.parametrize("function", ["get", "partly", "set"])
@pytest.mark.parametrize("name", ["Adam", "Adadelta", "ASGD", "NAdam", "Rprop"])
@on_ranks(world=2)
def test_hooks_of_all_optimizers_do_not_run_where_states_are_made(api: Any, name: str, function: str) -> None:
    """The program's hooks see its own steps alone; ranks make first states of different numbers."""
    maker: Any = getattr(torch.optim, name)
    model = wrapped("plain")
    optim = maker(model.parameters(), lr=0.5)
    step(model, optim)
    options = api.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    state = api.get_optimizer_state_dict(model, optim) if dist.get_rank() == 0 else {}
    seen: list[str] = []

    def barrier(*_: Any) -> None:
        seen.append("hook")
        dist.barrier()

    class_step = maker.step

    @functools.wraps(class_step)
    def counted(*args: Any, **kwargs: Any) -> Any:
        seen.append("class")
        return class_step(*args, **kwargs)

    def call(optim: torch.optim.Optimizer) -> None:
        if function == "get":
            api.get_optimizer_state_dict(model, optim)
        elif function == "partly":
            # One rank's optimizer has some states, and makes the others for the dict.
            step(model, optim, only=lambda name: "embed" in name and dist.get_rank() == 0)
            seen.clear()
            api.get_optimizer_state_dict(model, optim)
        else:
            api.set_optimizer_state_dict(model, optim, state, options=options)

    hooks = [register_optimizer_step_pre_hook(barrier), register_optimizer_step_post_hook(barrier)]
    maker.step = counted
    try:
        other = maker(model.parameters(), lr=0.5)
        call(other)
        assert not seen
        # They are all there, also after an error.
        missing = maker([torch.nn.Parameter(torch.ones(3))], lr=0.5)
        with pytest.raises((KeyError, RuntimeError)):
            call(missing)
        assert not seen
        step(model, other)
        assert seen == ["class", "hook", "hook"]
    finally:
        maker.step = class_step
        for hook in hooks:
            hook.remove()


# --- shared memory ---------------------------------------------------------------------------


def master_weights(api: Any, kind: str, way: str) -> None:
    """`state["master"] = p.detach().float()` is the parameter itself where that is float32 already."""

    def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = wrapped(kind, seed)
        optim = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
        step(model, optim)
        for param in model.parameters():
            optim.state[param]["master"] = param.detach().float()
        return model, optim

    model, optim = make(0)
    state, want = saved(api, model, optim, way), held(optim)
    model, optim = make(1)
    with torch.no_grad():
        for param in model.parameters():
            local_of(param).fill_(5.0)
    before = weights(model)
    load(api, model, optim, state, way)
    assert weights(model) == before
    assert held(optim) == want


def shared_states(api: Any, kind: str, way: str) -> None:
    """Two states of one tensor, as in a checkpoint of an optimizer where they are two."""

    def make(share: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = wrapped(kind)
        optim = OneBased(model.parameters())
        step(model, optim)
        for index, param in enumerate(model.parameters()):
            state = optim.state[param]
            state["slow"] = state["mean"] if share else state["mean"] + index + 1
            # Another tensor on the same memory.
            state["old"] = state["mean"].detach() if share else state["mean"] - index - 1
        return model, optim

    model, optim = make(False)
    state, want = saved(api, model, optim, way), held(optim)
    model, optim = make(True)
    load(api, model, optim, state, way)
    assert held(optim) == want


def earlier_state_dict(api: Any, kind: str, way: str) -> None:
    """A state dict that was taken before, and the tensors that somebody else holds, stay what they were."""
    model = wrapped(kind)
    optim = torch.optim.Adam(model.parameters())
    step(model, optim)
    taken = optim.state_dict()
    own = {id(value): value for states in optim.state.values() for value in states.values()}
    before, values = copy.deepcopy(taken), {key: local_of(value).clone() for key, value in own.items()}
    other = torch.optim.Adam(model.parameters())
    step(model, other, "other")
    load(api, model, optim, saved(api, model, other, way), way)
    assert held(optim)["state"] == held(other)["state"]
    for number, states in before["state"].items():
        for name, value in states.items():
            assert torch.equal(local_of(value), local_of(taken["state"][number][name])), name
    assert all(torch.equal(local_of(own[key]), value) for key, value in values.items())


@pytest.mark.parametrize("way", ["sharded", "full", "full-flat", "rank0"])
@pytest.mark.parametrize("kind", WRAPPERS)
@pytest.mark.parametrize("case", [master_weights, shared_states, earlier_state_dict])
def test_nothing_is_written_through_an_alias(ranks, case, kind, way):
    ranks(case, kind, way, world=2)


# --- wrappers and odd states -----------------------------------------------------------------


class ReadOnly(torch.optim.Optimizer):
    """Another optimizer, whose groups and states are looked at and not replaced."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    @property
    def param_groups(self) -> Any:
        return self.inner.param_groups

    @property
    def state(self) -> Any:
        return self.inner.state

    @property
    def defaults(self) -> Any:
        return self.inner.defaults

    def state_dict(self) -> Any:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.inner.load_state_dict(state_dict)

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)


@pytest.mark.parametrize("way", ["sharded", "full", "rank0"])
@pytest.mark.parametrize("kind", WRAPPERS)
@on_ranks(world=2)
def test_param_groups_may_be_a_read_only_property(api: Any, kind: str, way: str) -> None:
    model = wrapped(kind)
    optim = torch.optim.AdamW(model.parameters(), lr=0.5)
    step(model, optim)
    state, want = saved(api, model, ReadOnly(optim), way), held(optim)
    model = wrapped(kind, seed=1)
    before = weights(model)
    inner = torch.optim.AdamW(model.parameters(), lr=1.0)
    load(api, model, ReadOnly(inner), state, way)
    assert held(inner) == want
    assert weights(model) == before
    fresh = torch.optim.AdamW(model.parameters(), lr=1.0)
    assert len(saved(api, model, ReadOnly(fresh), "sharded")["state"]) == len(list(model.parameters()))
    assert fresh.param_groups[0]["lr"] == 1.0


class History(torch.optim.Optimizer):
    """Its states change their shape, and some are not there at first, as those of L-BFGS and Shampoo."""

    def __init__(self, params: Any, lr: float = 0.5) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state.update(
                        step=0,
                        losses=torch.zeros(0),
                        past=[],
                        begun=None,
                        spare=torch.zeros(3),
                        note=torch.zeros(2),
                        table={},
                        mean=torch.zeros_like(param),
                    )
                    continue
                state["step"] += 1
                state["losses"] = torch.cat([state["losses"], torch.tensor([float(state["step"])])])
                state["past"] = [*state["past"], torch.full_like(param, float(state["step"]))][-2:]
                state["begun"] = torch.ones(4)
                state["spare"] = None
                state["note"] = 7
                state["table"] = {"left": torch.full((2, 2), 3.0), "rank": 4}
                state["mean"].add_(1.0)
                state["later"] = 5


@pytest.mark.parametrize("used", [0, 6])
@pytest.mark.parametrize("way", ["sharded", "full", "rank0", "full-flat"])
@pytest.mark.parametrize("kind", WRAPPERS)
@on_ranks(world=2)
def test_states_may_have_another_form_in_the_checkpoint(api: Any, kind: str, way: str, used: int) -> None:
    """A checkpoint of a used optimizer into a fresh one, and of a fresh one into a used one."""

    def make(steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = wrapped(kind)
        optim = History(model.parameters())
        for _ in range(steps):
            step(model, optim)
        return model, optim

    model, optim = make(2 if used else 4)
    state, want = saved(api, model, optim, way), held(optim)
    model, optim = make(used)
    load(api, model, optim, state, way)
    got = held(optim)
    if not used:
        assert got == want
        return
    # Fewer steps were saved: what is there is loaded.
    for mine, its in zip(got["state"], want["state"]):
        assert {name: mine[name] for name in its} == its


@pytest.mark.parametrize("way", ["sharded", "full", "rank0"])
@pytest.mark.parametrize("kind", WRAPPERS)
@on_ranks(world=2)
def test_momentum_that_has_not_begun(api: Any, kind: str, way: str) -> None:
    """None for momentum that has not begun, as torch saved it until 2.1."""
    model = wrapped(kind)
    optim = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    step(model, optim)
    state = saved(api, model, optim, way)
    for states in state.get("state", {}).values():
        states["momentum_buffer"] = None
    load(api, model, optim, state, way)
    assert all(states == {"momentum_buffer": None} for states in optim.state.values())
