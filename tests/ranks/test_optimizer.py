"""get/set_optimizer_state_dict: every optimizer kind, nested and flat, full and sharded."""

from __future__ import annotations

import copy
import hashlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Model, build, check_storages, local_of, value_of, whole
from pool import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

KINDS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 1e-2, "betas": (0.8, 0.9), "foreach": False},
    "Adam": {"lr": 1e-2, "amsgrad": True},
    "SGD": {"lr": 1e-2},
    "SGD-momentum": {"lr": 1e-2, "momentum": 0.9},
    "AdamW-tensor-lr": {"lr": 1e-2, "foreach": False},
    "Adagrad": {"lr": 1e-2},
}


def optimizer_of(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    """Two param groups with different hyperparameters; embed.weight alone in the second."""
    settings = dict(KINDS[kind])
    if kind.endswith("tensor-lr"):
        settings["lr"] = torch.tensor(settings["lr"])
    params = dict(model.named_parameters())
    second = [params.pop(key) for key in list(params) if key.endswith("embed.weight")]
    other_lr = torch.tensor(0.5) if kind.endswith("tensor-lr") else 0.5
    groups = [{"params": list(params.values())}, {"params": second, "lr": other_lr, "initial_lr": 0.25}]
    return getattr(torch.optim, kind.partition("-")[0])(groups, **settings)


def train_a_step(model: nn.Module, optim: torch.optim.Optimizer, salt: str = "") -> None:
    """Gradients by hand: FSDP2's own step needs streams that the CPU lacks on older torch."""
    for name, param in model.named_parameters():
        grad = torch.zeros_like(param)
        rank = dist.get_rank() if hasattr(param, "_local_tensor") else 0
        local = local_of(grad)
        local.copy_(value_of(f"{name}{salt}{rank}", tuple(local.shape)))
        param.grad = grad
    optim.step()
    optim.zero_grad(set_to_none=True)


def full_optimizer_state(model: nn.Module, optim: torch.optim.Optimizer, salt: str = "") -> dict[str, Any]:
    """An AdamW checkpoint made by hand, without any library code."""
    names = {param: name for name, param in model.named_parameters()}
    groups, states = [], {}
    for index, group in enumerate(optim.param_groups):
        saved = {key: value for key, value in group.items() if key != "params"}
        saved["weight_decay"] = 0.125 + index
        saved["params"] = [names[param] for param in group["params"]]
        groups.append(saved)
        for param in group["params"]:
            name, shape = names[param], tuple(param.shape)
            states[name] = {
                "step": torch.tensor(7.0),
                "exp_avg": value_of(f"{name}.avg{salt}", shape),
                "exp_avg_sq": value_of(f"{name}.sq{salt}", shape).abs(),
            }
    return {"state": states, "param_groups": groups}


def snapshot(optim: torch.optim.Optimizer) -> str:
    """A digest of every state value of this rank."""
    text = hashlib.sha256()
    for group in optim.param_groups:
        text.update(repr({key: value for key, value in group.items() if key != "params"}).encode())
        for param in group["params"]:
            for name, value in sorted(optim.state.get(param, {}).items()):
                text.update(name.encode())
                text.update(
                    local_of(value).numpy().tobytes() if torch.is_tensor(value) else repr(value).encode()
                )
    return text.hexdigest()


def params_digest(model: nn.Module) -> str:
    return hashlib.sha256(b"".join(local_of(one).numpy().tobytes() for one in model.parameters())).hexdigest()


def full(api: Any, how: str = "rank0", **more: Any) -> Any:
    return api.StateDictOptions(full_state_dict=True, broadcast_from_rank0=how == "rank0", **more)


# The functions below run on the ranks.


def load(api: Any, how: str) -> None:
    model = build()
    optim = optimizer_of(model, "AdamW")
    state = full_optimizer_state(model, optim)
    before, weights = copy.deepcopy(state), params_digest(model)
    mine = state if how == "all" or dist.get_rank() == 0 else {}
    api.set_optimizer_state_dict(model, optim, mine, options=full(api, how))
    assert params_digest(model) == weights
    names = {param: name for name, param in model.named_parameters()}
    for group, saved in zip(optim.param_groups, before["param_groups"]):
        for key, value in saved.items():
            assert key == "params" or group[key] == value, (key, group[key], value)
        assert type(group["betas"]) is tuple
        for param in group["params"]:
            got, want = optim.state[param], before["state"][names[param]]
            assert set(got) == set(want)
            for key in want:
                assert torch.equal(whole(got[key]), want[key]), f"{names[param]}.{key}"
                assert got[key].dtype == want[key].dtype
            check_storages({key: value for key, value in got.items() if key != "step"}, dist.get_world_size())
            assert param.grad is None
    if mine:
        assert state["param_groups"] == before["param_groups"]
        assert all(
            torch.equal(state["state"][n][k], before["state"][n][k]) for n in names.values() for k in want
        )


def round_trip(api: Any, kind: str, flat: bool, offload: bool, ddp: bool = False) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        if ddp:
            torch.manual_seed(0)
            model: nn.Module = DistributedDataParallel(Model())
        else:
            model = build()
        return model, optimizer_of(model, kind)

    model, optim = make()
    train_a_step(model, optim)
    want = snapshot(optim)
    saved = api.get_optimizer_state_dict(
        model, optim, options=full(api, "all", cpu_offload=offload, flatten_optimizer_state_dict=flat)
    )
    if offload and dist.get_rank() != 0:
        assert saved == {}
    elif not flat:
        for states in saved["state"].values():
            assert all(type(value) is not type(next(model.parameters())) for value in states.values())
            assert not any(hasattr(value, "_local_tensor") for value in states.values())
    other, fresh = make()
    weights = params_digest(other)
    how = "rank0" if offload else "all"
    api.set_optimizer_state_dict(
        other, fresh, saved, options=full(api, how, flatten_optimizer_state_dict=flat)
    )
    assert snapshot(fresh) == want
    assert params_digest(other) == weights


def trained(api: Any, get_first: bool, make: Any) -> list[torch.Tensor]:
    model = build()
    for param in model.parameters():
        local_of(param.detach()).fill_(0.5)
    optim = make(model.parameters())
    if get_first:
        api.get_optimizer_state_dict(model, optim)
    for step in range(3):
        for param in model.parameters():
            param.grad = torch.full_like(param, 0.25 * (step + 1))
        optim.step()
    return [local_of(param).clone() for param in model.parameters()]


def partly_started(model: nn.Module) -> torch.optim.Optimizer:
    """Only its first parameter had a gradient so far."""
    optim = torch.optim.Adam(model.parameters(), lr=0.5)
    first = next(iter(model.parameters()))
    first.grad = torch.zeros_like(first)
    optim.step()
    optim.zero_grad(set_to_none=True)
    return optim


def stand_ins_are_bounded(api: Any) -> int:
    """The most bytes of stand-ins for parameters that initialising the states held at a time."""
    from torch_dcp_backport.state_dict.optim import initial

    kept, initial.PLACEHOLDER_BYTES = initial.PLACEHOLDER_BYTES, 256
    model = build()
    optim = torch.optim.Adam(model.parameters())
    most = []

    def spy(twin: Any, *args: Any, **kwargs: Any) -> Any:
        assert twin is not optim
        most.append(sum(local_of(one).nbytes for group in twin.param_groups for one in group["params"]))
        return init_group(twin, *args, **kwargs)

    init_group = torch.optim.Adam._init_group
    torch.optim.Adam._init_group = spy
    try:
        initial.init_optim_state(optim)
    finally:
        torch.optim.Adam._init_group = init_group
        initial.PLACEHOLDER_BYTES = kept
    assert all(param in optim.state for param in model.parameters())
    assert all(param.grad is None for param in model.parameters())
    return max(most)


# The tests.


@pytest.mark.parametrize("how", ["rank0", "all"])
def test_full_state_is_loaded_bit_for_bit(ranks, how):
    ranks(load, how)


def test_no_state_keeps_the_full_tensor_alive(fixed):
    fixed(load, "rank0")


@pytest.mark.parametrize("offload", [True, False])
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_round_trip(ranks, kind, flat, offload):
    ranks(round_trip, kind, flat, offload)


@pytest.mark.parametrize("offload", [True, False])
def test_round_trip_ddp(ranks, offload):
    ranks(round_trip, "AdamW", False, offload, True, world=2)


@pytest.mark.parametrize("flat", [False, True])
@on_ranks()
def test_sharded_round_trip(api: Any, flat: bool) -> None:
    model = build()
    optim = optimizer_of(model, "AdamW")
    train_a_step(model, optim)
    want = snapshot(optim)
    options = api.StateDictOptions(flatten_optimizer_state_dict=flat)
    saved = copy.deepcopy(api.get_optimizer_state_dict(model, optim, options=options))
    other = build()
    fresh = optimizer_of(other, "AdamW")
    api.set_optimizer_state_dict(other, fresh, saved, options=options)
    assert snapshot(fresh) == want


@on_ranks(fixture="fixed")
def test_stateless_optimizer(api: Any) -> None:
    round_trip(api, "SGD", flat=False, offload=True)


@on_ranks(fixture="fixed")
def test_load_while_gradients_are_present(api: Any) -> None:
    model = build()
    optim = optimizer_of(model, "AdamW")
    state = full_optimizer_state(model, optim)
    grads = []
    for param in model.parameters():
        param.grad = torch.ones_like(param)
        grads.append(param.grad)
    api.set_optimizer_state_dict(model, optim, state if dist.get_rank() == 0 else {}, options=full(api))
    assert all(param.grad is grad for param, grad in zip(model.parameters(), grads))
    assert float(optim.state[model.embed.weight]["step"]) == 7.0


@on_ranks(fixture="fixed")
def test_an_empty_group_keeps_every_groups_values(api: Any) -> None:
    """A param group without parameters that is not the last one."""

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = build()
        groups = [{"params": [], "lr": 0.75}, {"params": list(model.parameters()), "lr": 0.125}]
        return model, torch.optim.AdamW(groups)

    model, optim = make()
    train_a_step(model, optim)
    saved = api.get_optimizer_state_dict(model, optim, options=full(api, "all", cpu_offload=True))
    other, fresh = make()
    fresh.param_groups[0]["lr"] = fresh.param_groups[1]["lr"] = 9.0
    api.set_optimizer_state_dict(other, fresh, saved, options=full(api))
    assert [group["lr"] for group in fresh.param_groups] == [0.75, 0.125]
    assert [group["betas"] for group in fresh.param_groups] == [(0.9, 0.999)] * 2


@on_ranks(fixture="fixed")
def test_values_of_loaded_groups_reach_every_rank(api: Any) -> None:
    """A value that only the loaded groups have (initial_lr of a scheduler) arrives on every rank."""
    model = build()
    optim = optimizer_of(model, "AdamW")
    state = full_optimizer_state(model, optim)
    for group in state["param_groups"]:
        group["from_scheduler"] = 0.5
    api.set_optimizer_state_dict(model, optim, state if dist.get_rank() == 0 else {}, options=full(api))
    assert [group.get("from_scheduler") for group in optim.param_groups] == [0.5, 0.5]


@on_ranks(fixture="fixed")
def test_a_get_before_the_first_step_changes_no_training(api: Any) -> None:
    """A get before the first step: the counter of steps starts where it would have without."""
    for make in (
        lambda params: torch.optim.Adam(params, lr=0.1),
        lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.1)),
        lambda params: torch.optim.NAdam(params, lr=0.1),
        lambda params: torch.optim.RAdam(params, lr=0.1),
        lambda params: torch.optim.Adamax(params, lr=0.1),
        lambda params: torch.optim.ASGD(params, lr=0.1),
        lambda params: torch.optim.RMSprop(params, lr=0.1, momentum=0.5),
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.5),
    ):
        for one, other in zip(trained(api, True, make), trained(api, False, make)):
            assert torch.equal(one, other), make(nn.Linear(1, 1).parameters())


@on_ranks(fixture="fixed")
def test_fresh_counters_of_every_group_and_portion(api: Any) -> None:
    """Several groups, and more parameters than one portion of temporary gradients takes."""
    from torch_dcp_backport.state_dict.optim import initial

    kept, initial.PLACEHOLDER_BYTES = initial.PLACEHOLDER_BYTES, 64
    try:
        for kind, name, values in (
            (torch.optim.Adam, "step", (0.0, 0.0)),
            (torch.optim.Rprop, "step_size", (0.25, 0.5)),
        ):
            model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
            groups = [{"params": list(one.parameters())} for one in model]
            groups[1]["lr"] = 0.5
            optim = kind(groups, lr=0.25)
            api.get_optimizer_state_dict(model, optim)
            for group, value in zip(optim.param_groups, values):
                for param in group["params"]:
                    assert (optim.state[param][name] == value).all(), (kind, name, value)
    finally:
        initial.PLACEHOLDER_BYTES = kept


@on_ranks()
def test_a_flat_load_without_a_state_is_an_error(api: Any) -> None:
    """As with the nested form: strict, and a parameter that has a state which the dict has not."""
    model = build()
    optim = torch.optim.Adam(model.parameters(), lr=0.5)
    train_a_step(model, optim)
    flat = api.StateDictOptions(flatten_optimizer_state_dict=True)
    state = api.get_optimizer_state_dict(model, optim, options=flat)
    for key in [key for key in state if key.startswith("state.head.weight.")]:
        del state[key]
    before = snapshot(optim)
    with pytest.raises(RuntimeError, match=r"Missing optimizer state for parameter 'head\.weight'"):
        api.set_optimizer_state_dict(model, optim, dict(state), options=flat)
    assert snapshot(optim) == before
    loose = api.StateDictOptions(flatten_optimizer_state_dict=True, strict=False)
    api.set_optimizer_state_dict(model, optim, dict(state), options=loose)


@on_ranks(fixture="fixed")
def test_flat_states_may_be_none_and_lists(api: Any) -> None:
    """States that are neither tensors nor numbers, on the way to a flat dict and back."""
    model = nn.Linear(2, 2)
    optim = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    for param in model.parameters():
        optim.state[param] = {"momentum_buffer": torch.ones_like(param), "none": None, "list": [1, 2]}
    flat = api.StateDictOptions(flatten_optimizer_state_dict=True)
    state = api.get_optimizer_state_dict(model, optim, options=flat)
    assert (state["state.weight.none"], state["state.weight.list"]) == (None, [1, 2])
    for param in model.parameters():
        optim.state[param].update(none=0, list=[])
    api.set_optimizer_state_dict(model, optim, state, options=flat)
    assert optim.state[model.weight]["none"] is None
    assert optim.state[model.weight]["list"] == [1, 2]


@on_ranks(fixture="fixed")
def test_a_flat_load_of_a_stateless_optimizer_leaves_no_junk(api: Any) -> None:
    """A flat state dict of a stateless optimizer leaves no empty states behind."""
    model = build()
    optim = torch.optim.SGD(model.parameters(), lr=0.5)
    flat = api.StateDictOptions(flatten_optimizer_state_dict=True)
    state = api.get_optimizer_state_dict(model, optim, options=flat)
    api.set_optimizer_state_dict(model, optim, state, options=flat)
    assert not optim.state


@on_ranks(fixture="fixed")
def test_a_flat_load_reaches_parameters_without_states(api: Any) -> None:
    """Parameters that had no gradient so far get their states from a flat state dict too."""
    model = build()
    optim = torch.optim.Adam(model.parameters(), lr=0.5)
    train_a_step(model, optim)
    flat = api.StateDictOptions(flatten_optimizer_state_dict=True)
    state = api.get_optimizer_state_dict(model, optim, options=flat)
    other = partly_started(model)
    api.set_optimizer_state_dict(model, other, state, options=flat)
    assert snapshot(other) == snapshot(optim)


@on_ranks()
def test_several_optimizers(api: Any) -> None:
    def make() -> tuple[nn.Module, list[torch.optim.Optimizer]]:
        model = build()
        params = list(model.parameters())
        return model, [
            torch.optim.AdamW(params[:3], lr=0.5),
            torch.optim.SGD(params[3:], lr=0.25, momentum=0.9),
        ]

    model, optims = make()
    for salt, optim in enumerate(optims):
        train_a_step(model, optim, str(salt))
    want = [snapshot(optim) for optim in optims]
    saved = api.get_optimizer_state_dict(model, optims, options=full(api, "all", cpu_offload=True))
    other, fresh = make()
    api.set_optimizer_state_dict(other, fresh, saved, options=full(api))
    assert [snapshot(optim) for optim in fresh] == want


@on_ranks()
def test_model_and_optimizer_in_one_call(api: Any) -> None:
    model = build()
    optim = optimizer_of(model, "AdamW")
    train_a_step(model, optim)
    want, weights = snapshot(optim), params_digest(model)
    model_state, optim_state = api.get_state_dict(model, optim, options=full(api, "all", cpu_offload=True))
    other = build()
    fresh = optimizer_of(other, "AdamW")
    result = api.set_state_dict(
        other, fresh, model_state_dict=model_state, optim_state_dict=optim_state, options=full(api)
    )
    assert not result.missing_keys
    assert snapshot(fresh) == want
    assert params_digest(other) == weights


@pytest.mark.parametrize("together", [False, True])
@on_ranks()
def test_none_from_the_other_ranks(api: Any, together: bool) -> None:
    """None from the ranks that did not read the file, as accelerate gives it."""
    model = build()
    optim = optimizer_of(model, "AdamW")
    train_a_step(model, optim)
    want, weights = snapshot(optim), params_digest(model)
    states = api.get_state_dict(model, optim, options=full(api, "all", cpu_offload=True))
    model_state, optim_state = states if dist.get_rank() == 0 else (None, None)
    other = build()
    fresh = optimizer_of(other, "AdamW")
    if together:
        arguments = {"model_state_dict": model_state, "optim_state_dict": optim_state}
        api.set_state_dict(other, fresh, **arguments, options=full(api))
    else:
        api.set_model_state_dict(other, model_state, options=full(api))
        api.set_optimizer_state_dict(other, fresh, optim_state, options=full(api))
    assert snapshot(fresh) == want
    assert params_digest(other) == weights


@on_ranks()
def test_the_optimizer_alone_through_set_state_dict(api: Any) -> None:
    """set_state_dict with an empty model state on every rank loads the optimizer and leaves the model."""
    model = build()
    optim = optimizer_of(model, "AdamW")
    state = full_optimizer_state(model, optim)
    weights = params_digest(model)
    mine = state if dist.get_rank() == 0 else {}
    result = api.set_state_dict(model, optim, model_state_dict={}, optim_state_dict=mine, options=full(api))
    assert not result.missing_keys
    assert params_digest(model) == weights
    assert float(optim.state[model.embed.weight]["step"]) == 7.0


def test_initialising_states_needs_no_full_set_of_gradients(ranks):
    # One weight may exceed the limit alone: embed.weight, 32 x 8 floats on 4 ranks.
    assert max(ranks(stand_ins_are_bounded)) <= 256


@on_ranks()
def test_numbered_parameters_need_the_same_groups(api: Any) -> None:
    """Parameter numbers name nothing where the groups differ."""
    model = build()
    params = list(model.parameters())
    optim = torch.optim.Adam([{"params": params[:2]}, {"params": params[2:]}])
    saved = torch.optim.Adam(params).state_dict()
    saved["state"] = {index: {"step": torch.tensor(1.0)} for index in range(len(params))}
    options = api.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    with pytest.raises(RuntimeError, match=rf"groups of \[{len(params)}\].*but the optimizer of \[2, "):
        api.set_optimizer_state_dict(model, optim, saved if dist.get_rank() == 0 else {}, options=options)
    assert not optim.state


@pytest.mark.parametrize("kind", ["Adam", "Adamax"])
@on_ranks()
def test_states_that_cannot_be_made_are_an_error_on_every_rank(api: Any, kind: str) -> None:
    """Rank 1 has no memory for the states that the optimizer makes itself."""
    model = build()
    maker: Any = getattr(torch.optim, kind)
    optim = maker(model.parameters())
    before = dict(optim.state)

    def no_memory(*_: Any) -> None:
        raise RuntimeError("can't allocate memory")

    init_group = maker._init_group
    if dist.get_rank() == 1:
        maker._init_group = no_memory
    options = api.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    match = r"rank 1: could not make the optimizer's states.*can't allocate"
    try:
        with pytest.raises(RuntimeError, match=match):
            api.set_optimizer_state_dict(model, optim, {}, options=options)
    finally:
        maker._init_group = init_group
    assert dict(optim.state) == before
