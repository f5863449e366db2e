"""Scenarios in which the model's loading code takes part, and corners where ours was not torch's."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
import torch.distributed as dist
from cases_model import ALL, BROADCAST, given, rows
from scenario import scenario
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from wrappers import fully_shard, live, mesh_of

THREE: tuple[dict[str, Any], ...] = ({}, ALL, BROADCAST)
FULL: tuple[dict[str, Any], ...] = (ALL, BROADCAST)
KINDS = ("plain", "ddp", "fsdp2")


def wrap(kind: str, model: nn.Module) -> nn.Module:
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "fsdp2":
        return fully_shard(model, mesh=mesh_of(dist.get_world_size())) or model
    return model


def full_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every tensor full of another number, in the module's order."""
    return {
        key: torch.full_like(value, number + 1.0)
        for number, (key, value) in enumerate(model.state_dict().items())
    }


def load(api: Any, kind: str, model: nn.Module, state: Any, options: dict[str, Any]) -> Any:
    """(the call's result, what the model holds then). Without full tensors the state is made shards of."""
    parallel = wrap(kind, model)
    if kind == "fsdp2" and not options.get("full_state_dict"):
        own = parallel.state_dict()
        for key, value in own.items():
            local = state[key].chunk(dist.get_world_size())[dist.get_rank()] if value.dim() else state[key]
            with torch.no_grad():
                own[key] = type(value).from_local(local, value.device_mesh, value.placements, run_check=False)
        state = own
    alone = options.get("broadcast_from_rank0") and dist.get_rank()
    result = api.set_model_state_dict(
        parallel, {} if alone else state, options=api.StateDictOptions(**options)
    )
    return result, live(parallel)


class Pair(nn.Module):
    def __init__(self, hook: Any) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4, bias=False)
        self.b = nn.Linear(4, 4, bias=False)
        self._register_load_state_dict_pre_hook(hook, with_module=True)


def swap(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    a, b = prefix + "a.weight", prefix + "b.weight"
    state[a], state[b] = state[b], state[a]


def add_current(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, param in module.named_parameters():
        state[prefix + name] = state[prefix + name] + param.detach()


def drop(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, param in module.named_parameters():
        if state[prefix + name].shape != param.shape:
            del state[prefix + name]


HOOKS = {"swap": swap, "add_current": add_current}


@scenario(
    "load hooks",
    [{"hook": hook, **row} for hook in ("swap", "add_current") for row in rows(KINDS, THREE)],
    world=2,
)
def sees(api: Any, hook: str, kind: str, options: dict[str, Any]) -> Any:
    model = nn.Sequential(nn.Linear(4, 4), Pair(HOOKS[hook]))
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(10.0)
    return load(api, kind, model, full_of(model), options)


@scenario("load hooks", rows(("plain", "ddp"), ({"strict": False}, {**ALL, "strict": False})), world=2)
def drops_a_misfit(api: Any, kind: str, options: dict[str, Any]) -> Any:
    model = nn.Sequential(nn.Linear(4, 4), Pair(drop))
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(10.0)
    state = full_of(model)
    state["1.a.weight"] = torch.ones(7, 4)
    return load(api, kind, model, state, options)


def forgive(module: nn.Module, keys: Any) -> None:
    keys.missing_keys.clear()
    keys.unexpected_keys.clear()


@scenario("load hooks", rows(("plain",), ({}, ALL)), world=2)
def forgives(api: Any, kind: str, options: dict[str, Any]) -> Any:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model.register_load_state_dict_post_hook(forgive)
    state = full_of(model)
    state["2.weight"] = torch.ones(1)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(10.0)
    return load(api, kind, model, state, options)


class Versioned(nn.Module):
    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        if metadata.get("version", None) in (None, 1):
            state[prefix + "weight"] = -state[prefix + "weight"]
        super()._load_from_state_dict(state, prefix, metadata, *rest)


@scenario(
    "load hooks", [{"version": one, **row} for one in (1, 2) for row in rows(("plain",), ({}, ALL))], world=2
)
def reads_the_version(api: Any, version: int, kind: str, options: dict[str, Any]) -> Any:
    model = nn.Sequential(nn.Linear(4, 4), Versioned())
    state = OrderedDict(full_of(model))
    state._metadata = OrderedDict({"": {"version": 1}, "1": {"version": version}})
    return load(api, kind, model, state, options)


@scenario("load hooks", rows(("plain", "ddp"), ({}, ALL)), world=2)
def old_batch_norm(api: Any, kind: str, options: dict[str, Any]) -> Any:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    state = full_of(model)
    del state["1.num_batches_tracked"]
    return load(api, kind, model, state, options)


@scenario("load hooks", rows(("plain",), THREE[:2]), world=2)
def old_weight_norm(api: Any, kind: str, options: dict[str, Any]) -> Any:
    old = nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 3)))
    new = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)))
    return load(api, kind, new, full_of(old), options)


@scenario("load hooks", rows(("plain",), THREE[:2]), world=2)
def fake_quantizer(api: Any, kind: str, options: dict[str, Any]) -> Any:
    from torch.ao.quantization import FakeQuantize, MovingAveragePerChannelMinMaxObserver

    def build() -> nn.Module:
        return nn.Sequential(FakeQuantize(MovingAveragePerChannelMinMaxObserver, quant_min=0, quant_max=255))

    trained = build()
    trained(torch.arange(12.0).view(3, 4))
    return load(api, kind, build(), dict(trained.state_dict()), options)


# --- corners ---------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight


@scenario(
    "exact",
    [{"order": one, **row} for one in ("module", "reversed") for row in rows(KINDS, FULL)],
    world=2,
)
def tied_values_differ(api: Any, order: str, kind: str, options: dict[str, Any]) -> Any:
    state = {"embed.weight": torch.full((6, 4), 1.0), "head.weight": torch.full((6, 4), 2.0)}
    if order == "reversed":
        state = dict(reversed(state.items()))
    return load(api, kind, Tied(), state, options)


class SameModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.listed = nn.ParameterList([nn.Parameter(torch.zeros(4))])
        self.listed.append(self.listed[0])


@scenario("exact", rows(("plain", "ddp"), THREE), world=2)
def two_names_in_one_module(api: Any, kind: str, options: dict[str, Any]) -> Any:
    model = SameModule()
    full = {key: value for key, value in options.items() if key == "full_state_dict"}
    state = api.get_model_state_dict(wrap(kind, SameModule()), options=api.StateDictOptions(**full))
    state = {key: torch.full_like(value, 3.0) for key, value in state.items()}
    return list(state), load(api, kind, model, state, options)


@scenario("exact", rows(("plain", "fsdp2"), FULL), world=2)
def frozen_left_out(api: Any, kind: str, options: dict[str, Any]) -> Any:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[0].requires_grad_(False)
        with torch.no_grad():
            for number, param in enumerate(model.parameters()):
                param.fill_(number)
        return wrap(kind, model)

    get = api.StateDictOptions(full_state_dict=True, ignore_frozen_params=True)
    state = api.get_model_state_dict(build(), options=get)
    state = {key: value + 1 for key, value in state.items()}
    model = build()
    chosen = api.StateDictOptions(**options, ignore_frozen_params=True)
    keys = list(state)
    # Keys are judged by the table of other keys; here the values.
    api.set_model_state_dict(model, given(state, options), options=chosen)
    return keys, live(model)


class Odd(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("sparse", (torch.eye(3) * value).to_sparse())


@scenario("exact", rows(("plain",), ({}, ALL)), world=2)
def sparse_buffer(api: Any, kind: str, options: dict[str, Any]) -> Any:
    state = dict(Odd(4.0).state_dict())
    model = Odd(1.0)
    result = api.set_model_state_dict(model, given(state, options), options=api.StateDictOptions(**options))
    return result, model.sparse.to_dense()
