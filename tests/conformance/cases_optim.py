"""Scenarios of optimizer state."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from cases_model import ALL, BROADCAST, LAYOUTS, NAMES_ONLY, given, rows
from scenario import scenario
from torch import nn
from torch.optim import SGD, Adagrad, Adam, NAdam, Optimizer, RMSprop, Rprop
from wrappers import Net, Odd, fill, mesh_of, on_rank0, shard, wrap, zero


class Nested(Optimizer):
    """State as Shampoo-like optimizers have it: dicts under integer keys, lists, scalars."""

    def __init__(self, params: Any, lr: float = 0.1, extras: bool = False) -> None:
        super().__init__(params, {"lr": lr, "extras": extras})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["count"] = 0
                    state["factors"] = {
                        0: {"left": torch.zeros_like(param)},
                        1: {"left": torch.zeros_like(param), "rank": 3},
                    }
                    if group["extras"]:
                        state.update(nothing=None, empty={})
                state["count"] += 1


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda params: SGD(params, lr=0.1),
    "momentum": lambda params: SGD(params, lr=0.1, momentum=0.9),
    "adam": lambda params: Adam(params, lr=0.01, betas=(0.8, 0.9), weight_decay=0.5),
    "amsgrad": lambda params: Adam(params, lr=0.01, amsgrad=True),
    "tensor-lr": lambda params: Adam(params, lr=torch.tensor(0.25)),
    "adagrad": lambda params: Adagrad(params, lr=0.1),
    "rmsprop": lambda params: RMSprop(params, lr=0.1, momentum=0.5),
    "nadam": lambda params: NAdam(params, lr=0.1),
    "rprop": lambda params: Rprop(params, lr=0.1),
    "nested": Nested,
}
MORE = tuple(name for name in OPTIMIZERS if name not in ("adam",))
GET: tuple[dict[str, Any], ...] = (
    {},
    {"cpu_offload": True},
    {"full_state_dict": True},
    {"full_state_dict": True, "cpu_offload": True},
    {"flatten_optimizer_state_dict": True},
    {"flatten_optimizer_state_dict": True, "full_state_dict": True},
)
FLAT = {"flatten_optimizer_state_dict": True}
SOME_GET = rows(("plain",), (FLAT,)) + rows(("fsdp2",), ({}, ALL))
SOME_SET = rows(("plain",), (ALL, FLAT)) + rows(("fsdp2",), ({}, ALL, BROADCAST))


def parameters(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


def states(optim: Optimizer, salt: int = 1) -> Optimizer:
    """A step without effect to make the states, then values that no arithmetic of a release can change."""
    for group in optim.param_groups:
        for param in group["params"]:
            if param.requires_grad:
                param.grad = torch.zeros_like(param)
    rates = [group["lr"] for group in optim.param_groups]
    for group in optim.param_groups:
        group["lr"] = group["lr"] * 0
    optim.step()
    optim.zero_grad(set_to_none=True)
    for group, rate in zip(optim.param_groups, rates):
        group["lr"] = rate
    with torch.no_grad():
        for param, state in optim.state.items():
            write(state, param, salt)
    return optim


def write(state: dict[Any, Any], param: torch.Tensor, salt: int) -> None:
    for index, (name, value) in enumerate(state.items()):
        if isinstance(value, dict):
            write(value, param, salt + 1)
        elif torch.is_tensor(value) and value.dim() == 0:
            value.fill_(salt + 6)
        elif torch.is_tensor(value):
            value.copy_(param.detach() * (index + salt + 2))
        elif isinstance(value, int):
            state[name] = salt + 6


def made(kind: str, name: str, salt: str = "", **kwargs: Any) -> tuple[nn.Module, Optimizer]:
    model = wrap(kind, fill(Net(**kwargs), salt))
    return model, OPTIMIZERS[name](parameters(model))


def dump(optim: Optimizer) -> Any:
    """What the optimizer holds; FSDP1 orders the states of a FlatParameter by chance."""
    held = optim.state_dict()
    return {**held, "state": {key: in_order(value) for key, value in held["state"].items()}}


def in_order(state: dict[Any, Any]) -> dict[Any, Any]:
    return dict(sorted(state.items(), key=lambda item: str(item[0])))


@scenario("get optimizer", [{**row, "name": "adam"} for row in rows(LAYOUTS, GET)])
@scenario("get optimizer", [{**row, "name": "adam"} for row in rows(NAMES_ONLY, GET[3:5])])
@scenario("get optimizer", [{**row, "name": name} for name in MORE for row in SOME_GET])
def get(api: Any, kind: str, name: str, options: dict[str, Any]) -> Any:
    model, optim = made(kind, name)
    return api.get_optimizer_state_dict(model, states(optim), options=api.StateDictOptions(**options))


@scenario(
    "get optimizer", [{"kind": kind, "name": name} for kind in ("plain", "fsdp2") for name in OPTIMIZERS]
)
def get_fresh(api: Any, kind: str, name: str) -> Any:
    """Nothing was stepped yet; what get gives, and what it leaves behind."""
    model, optim = made(kind, name)
    return api.get_optimizer_state_dict(model, optim), dump(optim), [p.grad for p in model.parameters()]


@scenario("get optimizer", rows(("plain", "fsdp2", "fsdp1"), GET[::2]))
def get_frozen(api: Any, kind: str, options: dict[str, Any]) -> Any:
    model, optim = made(kind, "adam", frozen=True)
    return api.get_optimizer_state_dict(model, states(optim), options=api.StateDictOptions(**options))


@scenario("get optimizer", rows(("plain", "fsdp2"), GET[::2]))
def get_tied(api: Any, kind: str, options: dict[str, Any]) -> Any:
    model, optim = made(kind, "adam", tied=True)
    return api.get_optimizer_state_dict(model, states(optim), options=api.StateDictOptions(**options))


@scenario("get optimizer", rows(("plain", "fsdp2"), GET[::2]))
def get_odd(api: Any, kind: str, options: dict[str, Any]) -> Any:
    model = wrap(kind, fill(Odd()))
    optim = states(Adam(model.parameters()))
    return api.get_optimizer_state_dict(model, optim, options=api.StateDictOptions(**options))


GROUPS = ("two groups", "empty last", "empty first", "two empty", "two optimizers")


def grouped(model: nn.Module, how: str) -> tuple[Optimizer, ...]:
    params = parameters(model)
    some, rest = params[::2], params[1::2]
    if how == "two optimizers":
        return Adam(some, lr=0.5, betas=(0.7, 0.8)), SGD(rest, lr=0.25, momentum=0.9)
    groups: list[dict[str, Any]] = [
        {"params": some, "lr": 0.5, "betas": (0.7, 0.8)},
        {"params": rest, "lr": 0.25},
    ]
    if how in ("empty last", "two empty"):
        groups.append({"params": [], "lr": 0.125})
    if how in ("empty first", "two empty"):
        groups.insert(0, {"params": [], "lr": 0.0625})
    return (Adam(groups, lr=1.0),)


def all_states(optims: Iterable[Optimizer], salt: int = 1) -> tuple[Optimizer, ...]:
    return tuple(states(optim, salt) for optim in optims)


@scenario(
    "get optimizer, groups",
    [{"how": how, **row} for how in GROUPS for row in rows(("plain", "fsdp2"), (GET[0], GET[3], GET[4]))],
)
def get_groups(api: Any, how: str, kind: str, options: dict[str, Any]) -> Any:
    model = wrap(kind, fill(Net()))
    optims = all_states(grouped(model, how))
    return api.get_optimizer_state_dict(model, optims, options=api.StateDictOptions(**options))


# --- set -------------------------------------------------------------------------------------

SET: tuple[dict[str, Any], ...] = (
    {},
    ALL,
    BROADCAST,
    {**BROADCAST, "cpu_offload": True},
    FLAT,
    {**FLAT, **ALL},
)


def saved(api: Any, model: nn.Module, optims: Any, options: dict[str, Any]) -> Any:
    """A checkpoint of these, in the form that loading with `options` takes."""
    get = {key: value for key, value in options.items() if key in ("full_state_dict", *FLAT)}
    state = api.get_optimizer_state_dict(model, optims, options=api.StateDictOptions(**get))
    return given(state, options)


@scenario("set optimizer", [{**row, "name": "adam"} for row in rows(LAYOUTS, SET[:5])])
@scenario("set optimizer", [{**row, "name": "adam"} for row in rows(NAMES_ONLY, SET[2:3])])
@scenario("set optimizer", [{**row, "name": "adam"} for row in rows(("plain", "fsdp2"), SET[5:])])
@scenario(
    "set optimizer",
    [{**row, "name": name} for name in MORE for row in SOME_SET],
)
def load(api: Any, kind: str, name: str, options: dict[str, Any]) -> Any:
    """Into an optimizer with states of its own and other hyperparameters."""
    model, optim = made(kind, name)
    state = saved(api, model, states(optim), options)
    model, optim = made(kind, name, salt="other.")
    states(optim, 5)
    for group in optim.param_groups:
        group["lr"] = group["lr"] * 0.5
    api.set_optimizer_state_dict(model, optim, state, options=api.StateDictOptions(**options))
    return dump(optim)


@scenario(
    "set optimizer", [{**row, "name": name} for name in OPTIMIZERS for row in rows(("fsdp2",), SET[:3:2])]
)
@scenario("set optimizer", [{**row, "name": "adam"} for row in rows(("plain", "ddp", "fsdp1"), SET[:3])])
def load_fresh(api: Any, kind: str, name: str, options: dict[str, Any]) -> Any:
    """Into an optimizer that has made no step."""
    model, optim = made(kind, name)
    state = saved(api, model, states(optim), options)
    model, optim = made(kind, name, salt="other.")
    api.set_optimizer_state_dict(model, optim, state, options=api.StateDictOptions(**options))
    return dump(optim), [param.grad for param in model.parameters()]


@scenario(
    "set optimizer, groups",
    [{"how": how, **row} for how in GROUPS for row in rows(("plain", "fsdp2"), (*SET[:3], FLAT))],
)
def load_groups(api: Any, how: str, kind: str, options: dict[str, Any]) -> Any:
    model = wrap(kind, fill(Net()))
    state = saved(api, model, all_states(grouped(model, how)), options)
    model = wrap(kind, fill(Net(), "other."))
    optims = all_states(grouped(model, how), 5)
    for optim in optims:
        for group in optim.param_groups:
            group["lr"] = 1.0
    api.set_optimizer_state_dict(model, optims, state, options=api.StateDictOptions(**options))
    return [dump(optim) for optim in optims]


@scenario("set optimizer", rows(("plain", "fsdp2"), (*SET[:3], FLAT)))
def load_scheduled(api: Any, kind: str, options: dict[str, Any]) -> Any:
    """The checkpoint has a group value (initial_lr) that the optimizer has not."""
    model, optim = made(kind, "adam")
    for group in states(optim).param_groups:
        group["initial_lr"] = 0.75
    state = saved(api, model, optim, options)
    model, optim = made(kind, "adam", salt="other.")
    api.set_optimizer_state_dict(model, optim, state, options=api.StateDictOptions(**options))
    return dump(optim)


@scenario("set optimizer", rows(("plain", "fsdp2"), SET[:3]))
def load_before_scheduler(api: Any, kind: str, options: dict[str, Any]) -> Any:
    """The optimizer has a group value (initial_lr) that the checkpoint has not."""
    model, optim = made(kind, "adam")
    state = saved(api, model, states(optim), options)
    model, optim = made(kind, "adam", salt="other.")
    for group in states(optim, 5).param_groups:
        group["initial_lr"] = 0.75
    api.set_optimizer_state_dict(model, optim, state, options=api.StateDictOptions(**options))
    return dump(optim)


@scenario(
    "set optimizer",
    [{**row, "name": name} for name in ("adam", "sgd") for row in rows(("plain", "fsdp2"), SET[:3])],
)
def load_with_gradients(api: Any, kind: str, name: str, options: dict[str, Any]) -> Any:
    model, optim = made(kind, name)
    state = saved(api, model, states(optim), options)
    model, optim = made(kind, name, salt="other.")
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    api.set_optimizer_state_dict(model, optim, state, options=api.StateDictOptions(**options))
    return dump(optim), [param.grad for param in model.parameters()]


def reloaded(api: Any, make: Callable[[str], tuple[nn.Module, Optimizer]], options: dict[str, Any]) -> Any:
    """From an optimizer with states into a fresh one of another model; `make` takes a salt."""
    model, optim = make("")
    state = saved(api, model, states(optim), options)
    model, optim = make("other.")
    api.set_optimizer_state_dict(model, optim, state, options=api.StateDictOptions(**options))
    return dump(optim)


@scenario("set optimizer", rows(("plain", "fsdp2"), (*SET[:3], FLAT)))
def load_tied(api: Any, kind: str, options: dict[str, Any]) -> Any:
    return reloaded(api, lambda salt: made(kind, "adam", salt, tied=True), options)


@scenario("set optimizer", rows(("plain", "fsdp2", "fsdp1"), SET[:3]))
def load_frozen(api: Any, kind: str, options: dict[str, Any]) -> Any:
    return reloaded(api, lambda salt: made(kind, "adam", salt, frozen=True), options)


@scenario("set optimizer", rows(("plain", "fsdp2"), SET[:3]))
def load_all_parameters_some_frozen(api: Any, kind: str, options: dict[str, Any]) -> Any:
    """The optimizer was given the frozen parameters too."""

    def make(salt: str) -> tuple[nn.Module, Optimizer]:
        model = wrap(kind, fill(Net(frozen=True), salt))
        return model, Adam(model.parameters())

    return reloaded(api, make, options)


@scenario("set optimizer", rows(("plain", "fsdp2"), SET[:3]))
def load_odd(api: Any, kind: str, options: dict[str, Any]) -> Any:
    def make(salt: str) -> tuple[nn.Module, Optimizer]:
        model = wrap(kind, fill(Odd(), salt))
        return model, Adam(model.parameters())

    return reloaded(api, make, options)


@scenario("set optimizer", rows(("plain", "fsdp2"), SET[:3]))
def load_extras(api: Any, kind: str, options: dict[str, Any]) -> Any:
    """None and an empty dict among the states."""

    def make(salt: str) -> tuple[nn.Module, Optimizer]:
        model = wrap(kind, fill(Net(), salt))
        return model, Nested(model.parameters(), extras=True)

    return reloaded(api, make, options)


@scenario("set optimizer", rows(("plain", "fsdp2"), (*SET[:3], FLAT)))
def load_partly_initialised(api: Any, kind: str, options: dict[str, Any]) -> Any:
    """Only some parameters had gradients in the first step of the optimizer that is loaded into."""
    model, optim = made(kind, "adam")
    state = saved(api, model, states(optim), options)
    model, optim = made(kind, "adam", salt="other.")
    for param in parameters(model)[:3]:
        param.grad = torch.zeros_like(param)
    optim.step()
    optim.zero_grad(set_to_none=True)
    api.set_optimizer_state_dict(model, optim, state, options=api.StateDictOptions(**options))
    return dump(optim)


@scenario("get optimizer", rows(("plain", "fsdp2"), GET[::2]))
def get_partly_initialised(api: Any, kind: str, options: dict[str, Any]) -> Any:
    model, optim = made(kind, "adam")
    for param in parameters(model)[:3]:
        param.grad = torch.zeros_like(param)
    optim.step()
    optim.zero_grad(set_to_none=True)
    return api.get_optimizer_state_dict(model, optim, options=api.StateDictOptions(**options))


PARTS = (
    "no state of one parameter",
    "no state at all",
    "no step of one parameter",
    "unknown parameter",
    "no moment of one parameter",
)


@scenario(
    "set optimizer, other keys",
    [
        {"part": part, **row}
        for part in PARTS
        for row in rows(
            ("plain", "fsdp2"),
            tuple({**one, **loose} for one in SET[:3] for loose in ({}, {"strict": False})),
        )
    ],
)
@scenario(
    "set optimizer, other keys", [{"part": PARTS[0], **row} for row in rows(("ddp", "fsdp1"), ({}, ALL))]
)
def load_part(api: Any, part: str, kind: str, options: dict[str, Any]) -> Any:
    model, optim = made(kind, "adam")
    get = {key: value for key, value in options.items() if key == "full_state_dict"}
    state = api.get_optimizer_state_dict(model, states(optim), options=api.StateDictOptions(**get))
    if part == PARTS[0]:
        del state["state"]["head.weight"]
    elif part == PARTS[1]:
        state["state"].clear()
    elif part in (PARTS[2], PARTS[4]):
        del state["state"]["head.weight"]["step" if part == PARTS[2] else "exp_avg"]
    else:
        state["state"]["nobody.weight"] = {"step": torch.tensor(1.0), "exp_avg": torch.ones(2, 2)}
        state["param_groups"][0]["params"].append("nobody.weight")
    if options.get("broadcast_from_rank0"):
        state = on_rank0(state)
    model, optim = made(kind, "adam", salt="other.")
    states(optim, 5)
    api.set_optimizer_state_dict(model, optim, state, options=api.StateDictOptions(**options))
    return dump(optim)


@scenario("set optimizer", rows(("plain", "fsdp2"), ({}, ALL, BROADCAST)))
def load_numbers(api: Any, kind: str, options: dict[str, Any]) -> Any:
    """The optimizer's own state_dict(), with parameter numbers."""
    model, optim = made(kind, "adam")
    if options.get("full_state_dict"):
        model, optim = made("plain", "adam")
    state = given(states(optim).state_dict(), options)
    model, optim = made(kind, "adam", salt="other.")
    api.set_optimizer_state_dict(model, optim, state, options=api.StateDictOptions(**options))
    return dump(optim)


@scenario("set optimizer", [{"options": one} for one in (ALL, BROADCAST)])
def load_into_other_layout(api: Any, options: dict[str, Any]) -> Any:
    """Saved by a plain model, loaded into HSDP."""
    model, optim = made("plain", "adam")
    state = saved(api, model, states(optim), options)
    model, optim = made("hsdp", "adam", salt="other.")
    api.set_optimizer_state_dict(model, optim, state, options=api.StateDictOptions(**options))
    return dump(optim)


@scenario("set optimizer", [{"options": one} for one in ({}, ALL, BROADCAST)])
def load_bfloat16(api: Any, options: dict[str, Any]) -> Any:
    """A float32 checkpoint into bfloat16 states."""
    model, optim = made("fsdp2", "adam")
    state = saved(api, model, states(optim), options)
    model = shard(fill(Net(), "other.").to(torch.bfloat16), mesh_of(4))
    optim = states(Adam(model.parameters()))
    api.set_optimizer_state_dict(model, optim, state, options=api.StateDictOptions(**options))
    return dump(optim)


@scenario("get and set state", rows(("plain", "ddp", "fsdp2", "tp", "fsdp2+tp", "hsdp", "fsdp1"), SET[:2]))
@scenario("get and set state", rows(("plain", "fsdp2"), SET[2:3]))
def both(api: Any, kind: str, options: dict[str, Any]) -> Any:
    """get_state_dict() and set_state_dict()."""
    model, optim = made(kind, "adam")
    get = {key: value for key, value in options.items() if key == "full_state_dict"}
    model_state, optim_state = api.get_state_dict(model, states(optim), options=api.StateDictOptions(**get))
    shown = {**model_state}, dict(optim_state)
    model = wrap(kind, zero(Net()))
    optim = Adam(parameters(model))
    result = api.set_state_dict(
        model,
        optim,
        model_state_dict=given(model_state, options),
        optim_state_dict=given(optim_state, options),
        options=api.StateDictOptions(**options),
    )
    return shown, result, dump(optim)


@scenario("get and set state", rows(("plain",), SET[:2], world=0))
@scenario("get and set state", rows(("plain", "fsdp2"), SET[:3], world=1))
@scenario("get and set state", rows(("fsdp2",), SET[:3], world=2))
def both_worlds(api: Any, kind: str, options: dict[str, Any]) -> Any:
    return both(api, kind, options)
