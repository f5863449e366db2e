"""set_state_dict is one call: everything fits and is written, or nothing is. And what loading code costs."""

from __future__ import annotations

import copy
import gc
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from heard import heard
from hooked import HOWS, WRAPPERS, Tower, error_of, given, options, unwrapped, whole_state, wrapped
from models import fully_shard, local_of
from pool import on_ranks
from test_bad_input import same_everywhere
from torch import nn

from torch_dcp_backport import compat, transfer
from torch_dcp_backport.regression import meter
from torch_dcp_backport.state_dict.model.load import ModelPlanner
from torch_dcp_backport.state_dict.model.outline import outline_of
from torch_dcp_backport.state_dict.options import StateDictOptions
from torch_dcp_backport.state_dict.source import StateSource
from torch_dcp_backport.state_dict.verify import verify_options


def trained(wrapper: str) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    """A model and two optimizers that have stepped once."""
    torch.manual_seed(0)
    model = wrapped(Tower(), wrapper)
    inner = unwrapped(model)
    optims: list[torch.optim.Optimizer] = [
        torch.optim.AdamW([*inner.before.parameters(), *inner.pair.parameters()], lr=0.1),
        torch.optim.SGD(inner.after.parameters(), lr=0.2, momentum=0.9),
    ]
    for number, param in enumerate(model.parameters()):
        param.grad = torch.full_like(param, number + 1.0)
    for optim in optims:
        optim.step()
        optim.zero_grad()
    return model, optims


def everything(model: nn.Module, optims: list[torch.optim.Optimizer]) -> dict[str, torch.Tensor]:
    """Copies of every tensor of the model and of the optimizers, as this rank holds them."""
    held = {key: local_of(value).clone() for key, value in model.state_dict().items()}
    for number, optim in enumerate(optims):
        for index, states in optim.state_dict()["state"].items():
            for name, value in states.items():
                held[f"{number}.{index}.{name}"] = local_of(value).clone()
    return held


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return set(left) == set(right) and all(torch.equal(value, right[key]) for key, value in left.items())


def spoil(where: str, model_state: dict[str, Any], optim_state: dict[str, Any]) -> None:
    if where == "model shape":
        model_state["pair.b.weight"] = torch.ones(5, 4)
    elif where == "model key":
        del model_state["pair.b.weight"]
    elif where == "first optimizer":
        optim_state["state"]["pair.b.weight"]["exp_avg"] = torch.ones(5, 4)
    elif where == "second optimizer":
        optim_state["state"]["after.weight"]["momentum_buffer"] = "text"


def all_or_nothing(api: Any, wrapper: str, how: str, where: str, call: str) -> str:
    model, optims = trained(wrapper)
    full = api.StateDictOptions(full_state_dict=True)
    model_state, optim_state = api.get_state_dict(model, optims, options=full)
    model_state = {key: value + 1 for key, value in model_state.items()}
    optim_state = copy.deepcopy(optim_state)
    for states in optim_state["state"].values():
        for value in states.values():
            if torch.is_tensor(value):
                value.add_(1)
    before = everything(model, optims)
    spoil(where, model_state, optim_state)
    chosen = options(api, how)
    mine = given(model_state, how), given(optim_state, how)

    def load() -> Any:
        if call == "optimizers":
            return api.set_optimizer_state_dict(model, optims, mine[1], options=chosen)
        return api.set_state_dict(
            model, optims, model_state_dict=mine[0], optim_state_dict=mine[1], options=chosen
        )

    text = error_of(load)
    if where == "nothing":
        assert not text, text
        after = everything(model, optims)
        for key, value in before.items():
            if call == "both" or key[0].isdigit():
                assert torch.equal(after[key], value + 1), key
        return ""
    if dist.get_world_size() > 1 and (how == "rank0" or wrapper == "fsdp2"):
        same_everywhere(("", text) if not text else ("error", text))
    assert same(everything(model, optims), before), "something was written"
    return text


def keys_of_both(api: Any, wrapper: str, how: str) -> tuple[list[str], list[str]]:
    model, optims = trained(wrapper)
    full = api.StateDictOptions(full_state_dict=True)
    state, optim_state = api.get_state_dict(model, optims, options=full)
    del state["after.bias"]
    state["more"] = torch.ones(2)
    keys = api.set_state_dict(
        model,
        optims,
        model_state_dict=given(state, how),
        optim_state_dict=given(optim_state, how),
        options=options(api, how, strict=False),
    )
    return keys.missing_keys, keys.unexpected_keys


def model_fails_last(api: Any, how: str) -> str:
    """The model's own hook fails, after its optimizer was written."""
    model, optims = trained("fsdp2")
    full = api.StateDictOptions(full_state_dict=True)
    model_state, optim_state = api.get_state_dict(model, optims, options=full)

    def fail(*_: Any) -> None:
        if dist.get_rank() == 1:
            raise OSError("no such vocabulary")

    model.pair._register_load_state_dict_pre_hook(fail)
    return error_of(
        lambda: api.set_state_dict(
            model,
            optims,
            model_state_dict=given(model_state, how),
            optim_state_dict=given(optim_state, how),
            options=options(api, how),
        )
    )


@pytest.mark.parametrize("wrapper", WRAPPERS)
@on_ranks()
def test_ranks_whose_loading_code_differs_move_the_same_beside_an_optimizer(api: Any, wrapper: str) -> None:
    """Of the model alone, and of one rank's: the optimizers have none."""
    model, optims = trained(wrapper)
    full = api.StateDictOptions(full_state_dict=True)
    model_state, optim_state = copy.deepcopy(api.get_state_dict(model, optims, options=full))
    want = everything(model, optims)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1)
    if dist.get_rank() == 1:
        unwrapped(model).pair._register_load_state_dict_pre_hook(lambda *_: None)
    api.set_state_dict(
        model,
        optims,
        model_state_dict=given(model_state, "rank0"),
        optim_state_dict=given(optim_state, "rank0"),
        options=options(api, "rank0"),
    )
    assert same(everything(model, optims), want)


class Hooked(nn.Linear):
    """Counts what is alive when it is loaded."""

    seen: ClassVar[list[int]] = []
    base = 0

    def _load_from_state_dict(self, *args: Any) -> None:
        gc.collect()
        alive = sum(nbytes for nbytes, _ in meter.live_storages().values())
        type(self).seen.append(alive - type(self).base)
        super()._load_from_state_dict(*args)


def inventory_of(state: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {key: transfer.TensorInfo(tuple(value.shape), value.dtype) for key, value in state.items()}


# The tests.


@pytest.mark.parametrize(
    "where", ["nothing", "model shape", "model key", "first optimizer", "second optimizer"]
)
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_model_and_optimizers_or_nothing(ranks, wrapper, how, where):
    for text in ranks(all_or_nothing, wrapper, how, where, "both", world=2):
        if where != "nothing":
            assert "nothing was changed" in text
            assert ("after.weight" if where == "second optimizer" else "pair.b.weight") in text


@pytest.mark.parametrize("where", ["nothing", "first optimizer", "second optimizer"])
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_all_optimizers_or_none(ranks, wrapper, how, where):
    for text in ranks(all_or_nothing, wrapper, how, where, "optimizers", world=2):
        assert ("nothing was changed" in text) == (where != "nothing")


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("wrapper", ["plain", "fsdp2"])
def test_a_call_for_both_returns_the_keys_of_the_model(ranks, wrapper, how):
    assert ranks(keys_of_both, wrapper, how, world=2) == [(["after.bias"], ["more"])] * 2


@pytest.mark.parametrize("how", HOWS)
def test_the_error_says_what_was_written(ranks, how):
    texts = ranks(model_fails_last, how)
    assert texts[1].startswith("OSError: no such vocabulary")
    for rank in (0, 2, 3):
        assert "rank 1: OSError: no such vocabulary" in texts[rank]
        assert "has written optimizer 0 (AdamW); optimizer 1 (SGD)" in texts[rank]


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
@on_ranks(world=2)
def test_loading_code_costs_one_owner_at_a_time(api: Any, wrapper: str, how: str) -> None:
    owner = 512 * 512 * 4
    model = wrapped(nn.Sequential(*(Hooked(512, 512, bias=False) for _ in range(3))), wrapper)
    state = (
        {f"{number}.weight": torch.full((512, 512), float(number)) for number in range(3)}
        if how == "all" or dist.get_rank() == 0
        else {}
    )
    transfer.configure(staging_bytes=256 * 1024)
    gc.collect()
    Hooked.seen, Hooked.base = [], sum(nbytes for nbytes, _ in meter.live_storages().values())
    try:
        api.set_model_state_dict(model, state, options=options(api, how))
    finally:
        transfer.configure()
    assert len(Hooked.seen) == 3
    shard = owner // dist.get_world_size() if wrapper == "fsdp2" else owner
    assert max(Hooked.seen) <= shard + 300 * 1024, Hooked.seen
    for key, value in whole_state(model).items():
        assert (value == int(key[0])).all()


@pytest.mark.parametrize("offload", ["no", "option", "policy"])
@on_ranks()
def test_what_lives_on_the_host_is_made_there(api: Any, offload: str) -> None:
    """Shards from meta are never made on the accelerator first, where they live on the host."""
    try:
        from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
    except ImportError:
        from torch.distributed._composable.fsdp import CPUOffloadPolicy, fully_shard
    with torch.device("meta"):
        model = Tower()
    more = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if offload == "policy" else {}
    model = fully_shard(model, **more) or model
    info = verify_options(
        model,
        (),
        False,
        options=StateDictOptions(
            full_state_dict=True, broadcast_from_rank0=True, cpu_offload=offload == "option"
        ),
    )
    state = dict(Tower().state_dict())
    source = StateSource(state if dist.get_rank() == 0 else {})
    planner = ModelPlanner(outline_of(model, info), source, [])
    asked: list[str] = []
    real = compat.current_device

    def accelerator(kind: str) -> torch.device:
        asked.append(kind)
        return torch.device("meta")

    compat.current_device = accelerator  # type: ignore[assignment]
    try:
        plan = planner.plan(source.inventory() if dist.get_rank() == 0 else inventory_of(state), ())
    finally:
        compat.current_device = real
    devices = {destination.device.type for destination in plan.destinations.values()}
    assert devices == ({"meta"} if offload == "no" else {"cpu"}), devices
    assert bool(asked) == (offload == "no")


@pytest.mark.parametrize("broadcast", [False, True])
@pytest.mark.parametrize("wrapper", ["plain", "fsdp2"])
@on_ranks()
def test_an_optimizer_of_parameters_on_the_meta_device_is_named(
    api: Any, wrapper: str, broadcast: bool
) -> None:
    """The load makes other parameters, and the optimizer would train those on the meta device."""
    whole = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optim = torch.optim.Adam(whole.parameters())
    whole(torch.ones(1, 4)).sum().backward()
    optim.step()
    of_model, of_optimizer = api.get_state_dict(whole, optim)
    with torch.device("meta"):
        model: nn.Module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if wrapper == "fsdp2":
        model = fully_shard(model) or model
    is_given = dist.get_rank() == 0 or not broadcast
    states = {
        "model_state_dict": of_model if is_given else {},
        "optim_state_dict": of_optimizer if is_given else {},
        "options": api.StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast),
    }
    early = torch.optim.Adam(model.parameters())
    with heard("state_dict") as lines:
        api.set_state_dict(model, early, **states)
    (line,) = lines if dist.get_rank() == 0 else ("4 parameter(s) (0.weight, ...)",)
    assert "4 parameter(s)" in line
    assert "(0.weight, ...)" in line
    assert all(param.is_meta for group in early.param_groups for param in group["params"])
    # Made after the load, it has the model's, and nothing is said.
    late = torch.optim.Adam(model.parameters())
    with heard("state_dict") as lines:
        api.set_state_dict(model, late, **states)
    assert lines == []
    assert {id(param) for param in late.state} == {id(param) for param in model.parameters()}
