"""Scenarios that stand alone: odd models, odd meshes, odd input, the deprecated forms."""

from __future__ import annotations

import io
from typing import Any

import torch
import torch.distributed as dist
from cases_model import ALL, BROADCAST, given, rows
from cases_optim import Adam, dump, saved, states
from scenario import scenario
from torch import nn
from wrappers import (
    Net,
    compiled,
    fill,
    fsdp1,
    full_state,
    fully_shard,
    live,
    mesh_of,
    on_rank0,
    shard,
    tensor_parallel,
    wrap,
    zero,
)

THREE: tuple[dict[str, Any], ...] = ({}, ALL, BROADCAST)


def round_trip(api: Any, make: Any, options: dict[str, Any]) -> Any:
    """Get from a filled model, set into a zeroed one."""
    get = {key: value for key, value in options.items() if key == "full_state_dict"}
    state = api.get_model_state_dict(make(fill), options=api.StateDictOptions(**get))
    shown = dict(state)
    model = make(zero)
    result = api.set_model_state_dict(model, given(state, options), options=api.StateDictOptions(**options))
    return shown, result, live(model)


# --- models ----------------------------------------------------------------------------------


class Extra(nn.Module):
    def __init__(self, value: Any = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 4))
        self.value = value

    def get_extra_state(self) -> Any:
        return self.value

    def set_extra_state(self, state: Any) -> None:
        self.value = state


EXTRAS: dict[str, Any] = {
    "dict": {"seen": 3, "names": ["a", "b"]},
    "tensor": torch.arange(6.0).view(2, 3),
    "number": 7,
    "bytes": io.BytesIO(b"abc"),
    "none": None,
}


class WithExtra(nn.Module):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(Extra(value)), nn.Linear(4, 4)])
        self.extra = Extra(value)


@scenario(
    "extra state",
    [
        {"extra": extra, **row}
        for extra in EXTRAS
        for row in rows(("plain", "fsdp2", "ddp"), THREE)
        if extra in ("dict", "tensor") or row["kind"] == "fsdp2"
    ],
)
def extra_state(api: Any, extra: str, kind: str, options: dict[str, Any]) -> Any:
    kept = []

    def make(prepare: Any) -> nn.Module:
        model = prepare(WithExtra(EXTRAS[extra] if prepare is fill else None))
        kept[:] = [module for module in model.modules() if isinstance(module, Extra)]
        return wrap(kind, model)

    return round_trip(api, make, options), [module.value for module in kept]


@scenario("extra state", [{"options": one} for one in ({}, ALL)])
def extra_state_fsdp1(api: Any, options: dict[str, Any]) -> Any:
    model = fsdp1(fill(WithExtra({"seen": 1})))
    return api.get_model_state_dict(model, options=api.StateDictOptions(**options))


class Shared(nn.Module):
    """One module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 4)
        self.other = self.one
        self.blocks = nn.ModuleList()


@scenario("shared", rows(("plain", "ddp", "fsdp2"), THREE))
def shared_module(api: Any, kind: str, options: dict[str, Any]) -> Any:
    return round_trip(api, lambda prepare: wrap(kind, prepare(Shared())), options)


@scenario("shared", rows(("plain", "ddp", "fsdp2"), THREE))
def shared_parameter(api: Any, kind: str, options: dict[str, Any]) -> Any:
    return round_trip(api, lambda prepare: wrap(kind, prepare(Net(tied=True))), options)


@scenario(
    "shared", [{"kind": kind, "keys": keys} for kind in ("plain", "fsdp2") for keys in ("embed", "head")]
)
def one_name_of_two(api: Any, kind: str, keys: str) -> Any:
    """The checkpoint holds a tied parameter under one of its names."""
    state = full_state(lambda: Net(tied=True))
    del state["head.weight" if keys == "embed" else "embed.weight"]
    model = wrap(kind, zero(Net(tied=True)))
    options = api.StateDictOptions(full_state_dict=True, strict=False)
    return api.set_model_state_dict(model, state, options=options), live(model)


@scenario("shared", rows(("fsdp2",), (ALL, BROADCAST)))
def tied_meta(api: Any, kind: str, options: dict[str, Any]) -> Any:
    with torch.device("meta"):
        model = Net(tied=True)
    for block in model.blocks:
        block.cache = torch.zeros(2)
    model = wrap(kind, model)
    state = given(full_state(lambda: Net(tied=True)), options)
    api.set_model_state_dict(model, state, options=api.StateDictOptions(**options))
    tied = model.embed.weight is model.head.weight
    return live(model), "tied" if tied else "apart"


class Renaming(nn.Module):
    """A child whose name its state dict hooks leave out, as the modifiers method declares."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 8)
        self.blocks = nn.ModuleList()
        self._register_state_dict_hook(strip)
        self._register_load_state_dict_pre_hook(add, with_module=True)

    def _fqn_modifiers(self) -> dict[str, str]:
        return {"weight": "inner", "bias": "inner"}


def strip(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    for key in list(state):
        if key.startswith(prefix + "inner."):
            state[prefix + key[len(prefix) + 6 :]] = state.pop(key)


def add(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name in ("weight", "bias"):
        if prefix + name in state:
            state[f"{prefix}inner.{name}"] = state.pop(prefix + name)


class HasRenaming(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Renaming()
        self.second = nn.Linear(4, 4)
        self.blocks = nn.ModuleList()


@scenario("renamed", rows(("plain", "fsdp2"), (ALL, BROADCAST)))
def load_renamed(api: Any, kind: str, options: dict[str, Any]) -> Any:
    state = {key: value.clone() for key, value in fill(HasRenaming(), "ckpt.").state_dict().items()}
    model = wrap(kind, zero(HasRenaming()))
    result = api.set_model_state_dict(model, given(state, options), options=api.StateDictOptions(**options))
    return sorted(state), result, live(model)


class Hooked(nn.Module):
    """A state dict hook that adds what is not a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.blocks = nn.ModuleList()
        self._register_state_dict_hook(
            lambda module, state, prefix, _: state.update(
                {prefix + "linear.number": 3, prefix + "linear.list": [1, torch.ones(2)]}
            )
        )


@scenario("hooks", rows(("fsdp2",), ({}, ALL, {**ALL, "cpu_offload": True}, {"cpu_offload": True})))
def hook_adds(api: Any, kind: str, options: dict[str, Any]) -> Any:
    model = wrap(kind, fill(Hooked()))
    model.linear.number = model.linear.list = None
    return api.get_model_state_dict(model, options=api.StateDictOptions(**options))


@scenario("meta", rows(("plain", "fsdp2"), ({}, ALL)))
def get_meta(api: Any, kind: str, options: dict[str, Any]) -> Any:
    with torch.device("meta"):
        model = Net()
    for block in model.blocks:
        block.count = torch.tensor(1)
    model = wrap(kind, model)
    return api.get_model_state_dict(model, options=api.StateDictOptions(**options, strict=False))


@scenario("meta", rows(("fsdp2",), (ALL, BROADCAST)))
def optimizer_after_meta(api: Any, kind: str, options: dict[str, Any]) -> Any:
    """An optimizer made before its model's parameters have memory."""
    model = Net()
    with torch.device("meta"):
        model.head = nn.Linear(4, 8, bias=False)
    model = wrap(kind, model)
    optim = Adam(model.parameters())
    api.set_model_state_dict(model, given(full_state(), options), options=api.StateDictOptions(**options))
    held = {id(param) for group in optim.param_groups for param in group["params"]}
    return {name: id(param) in held for name, param in model.named_parameters()}


@scenario("wrappers", rows(("ddp(ckpt)", "compile(ddp)", "fsdp2(ckpt)", "compile(fsdp2)"), THREE))
def nested_wrappers(api: Any, kind: str, options: dict[str, Any]) -> Any:
    return round_trip(api, lambda prepare: wrap(kind, prepare(Net())), options)


@scenario("wrappers", [{"options": one} for one in THREE])
def compiled_block(api: Any, options: dict[str, Any]) -> Any:
    """torch.compile around blocks below FSDP2, as many trainers do."""

    def make(prepare: Any) -> nn.Module:
        model = prepare(Net())
        for index, block in enumerate(model.blocks):
            model.blocks[index] = compiled(block)
        return shard(model, mesh_of(4))

    return round_trip(api, make, options)


@scenario("wrappers", [{"options": one} for one in THREE])
def compiled_in_place(api: Any, options: dict[str, Any]) -> Any:
    def make(prepare: Any) -> nn.Module:
        model = prepare(Net())
        for block in model.blocks:
            block.compile(backend="eager")
        return shard(model, mesh_of(4))

    return round_trip(api, make, options)


# --- meshes ----------------------------------------------------------------------------------


@scenario("meshes", [{"shape": shape, "options": one} for shape in ("1x4", "4x1") for one in THREE])
def size_one_axes(api: Any, shape: str, options: dict[str, Any]) -> Any:
    replicas, shards = map(int, shape.split("x"))

    def make(prepare: Any) -> nn.Module:
        return shard(prepare(Net()), mesh_of(replicas, shards, names=("rep", "shard")))

    return round_trip(api, make, options)


@scenario("meshes", [{"options": one} for one in THREE], world=8)
def three_dimensions(api: Any, options: dict[str, Any]) -> Any:
    """HSDP over TP on a 2 x 2 x 2 mesh, model and optimizer."""
    mesh = mesh_of(2, 2, 2, names=("rep", "shard", "tp"))

    def make(prepare: Any) -> nn.Module:
        return shard(tensor_parallel(prepare(Net()), mesh["tp"]), mesh["rep", "shard"])

    shown = round_trip(api, make, options)
    model = make(fill)
    state = saved(api, model, states(Adam(model.parameters())), options)
    model = make(zero)
    optim = Adam(model.parameters())
    api.set_optimizer_state_dict(model, optim, state, options=api.StateDictOptions(**options))
    return shown, dump(optim)


@scenario("meshes", [{"options": one} for one in THREE])
def sub_group(api: Any, options: dict[str, Any]) -> Any:
    """Two groups of two ranks (pipeline stages), each with its own FSDP2 model."""
    mesh = mesh_of(2, 2, names=("stage", "dp"))["dp"]
    return round_trip(api, lambda prepare: shard(prepare(Net()), mesh), options)


@scenario("meshes", [{"options": one} for one in (ALL, {**ALL, "cpu_offload": True})])
def without_rank0(api: Any, options: dict[str, Any]) -> Any:
    """A model on ranks 2 and 3 alone; the others do not call."""
    mesh = mesh_of(2, 2, names=("stage", "dp"))["dp"]
    if dist.get_rank() < 2:
        return None
    model = shard(fill(Net()), mesh)
    return api.get_model_state_dict(model, options=api.StateDictOptions(**options, strict=False))


@scenario("meshes", [{"options": one} for one in THREE[:2]])
def sub_group_fsdp1(api: Any, options: dict[str, Any]) -> Any:
    """FSDP1 over a group that is not the default one: an optimizer state dict of its ranks alone."""
    group = mesh_of(2, 2, names=("stage", "dp"))["dp"].get_group()
    model = fsdp1(fill(Net()), process_group=group)
    optim = states(Adam(model.parameters()))
    state = saved(api, model, optim, options)
    shown = dict(state)
    other = fsdp1(fill(Net(), "other."), process_group=group)
    target = Adam(other.parameters())
    api.set_optimizer_state_dict(other, target, state, options=api.StateDictOptions(**options))
    return shown, dump(target)


@scenario("meshes", [{"options": one} for one in THREE])
def other_dimension(api: Any, options: dict[str, Any]) -> Any:
    """FSDP2 that shards another dimension than the first."""
    import inspect

    from torch.distributed.tensor import Shard

    assert "shard_placement_fn" in inspect.signature(fully_shard).parameters, "torch >= 2.6"

    def make(prepare: Any) -> nn.Module:
        model = prepare(Net())
        fully_shard(
            model,
            mesh=mesh_of(4),
            shard_placement_fn=lambda param: Shard(1) if param.dim() > 1 else Shard(0),
        )
        return model

    return round_trip(api, make, options)


class UnevenNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.ModuleDict({"up": nn.Linear(4, 7), "down": nn.Linear(7, 4)})])


@scenario("meshes", [{"options": one} for one in THREE])
def uneven_tp(api: Any, options: dict[str, Any]) -> Any:
    return round_trip(api, lambda prepare: wrap("tp", prepare(UnevenNet())), options)


# --- input -----------------------------------------------------------------------------------

BAD = {
    "wrong shape": lambda state: state.update({"embed.weight": torch.zeros(9, 4)}),
    "wrong dimensions": lambda state: state.update({"embed.weight": torch.zeros(8)}),
    "a string": lambda state: state.update({"embed.weight": "x"}),
    "none": lambda state: state.update({"embed.weight": None}),
    "a meta tensor": lambda state: state.update({"embed.weight": torch.zeros(8, 4, device="meta")}),
    "a list for a tensor": lambda state: state.update({"embed.weight": [1.0]}),
    "empty": lambda state: state.clear(),
}


@scenario(
    "bad input",
    [{"bad": bad, **row} for bad in BAD for row in rows(("plain", "fsdp2"), (ALL, BROADCAST))],
)
def bad_input(api: Any, bad: str, kind: str, options: dict[str, Any]) -> Any:
    state = full_state()
    BAD[bad](state)
    model = wrap(kind, zero(Net()))
    result = api.set_model_state_dict(model, given(state, options), options=api.StateDictOptions(**options))
    return result, live(model)


@scenario("bad input", [{"kind": kind} for kind in ("plain", "fsdp2")])
def dict_on_rank0_alone(api: Any, kind: str) -> Any:
    """broadcast_from_rank0 was forgotten."""
    model = wrap(kind, zero(Net()))
    options = api.StateDictOptions(full_state_dict=True)
    return api.set_model_state_dict(model, on_rank0(full_state()), options=options), live(model)


@scenario("bad input", [{"options": one} for one in (ALL, BROADCAST)])
def sharded_given_as_full(api: Any, options: dict[str, Any]) -> Any:
    """DTensors in place of whole tensors."""
    state = api.get_model_state_dict(wrap("fsdp2", fill(Net())))
    model = wrap("fsdp2", zero(Net()))
    result = api.set_model_state_dict(model, given(state, options), options=api.StateDictOptions(**options))
    return result, live(model)


@scenario("bad input", world=1)
def broadcast_without_full(api: Any) -> Any:
    options = api.StateDictOptions(broadcast_from_rank0=True)
    return api.set_model_state_dict(Net(), full_state(), options=options)


@scenario("bad input", [{"call": call} for call in ("get", "set")], world=1)
def no_optimizer(api: Any, call: str) -> Any:
    if call == "get":
        return api.get_optimizer_state_dict(Net(), ())
    return api.set_optimizer_state_dict(Net(), (), {"state": {}, "param_groups": []})


@scenario("bad input", world=1)
def foreign_optimizer(api: Any) -> Any:
    """Its parameters are not the model's."""
    return api.get_optimizer_state_dict(Net(), Adam(Net().parameters()))


@scenario("bad input", [{"options": one} for one in ({}, ALL)], world=1)
def empty_state(api: Any, options: dict[str, Any]) -> Any:
    model = Net()
    optim = Adam(model.parameters())
    result = []
    for call in (
        lambda: api.set_model_state_dict(model, {}, options=api.StateDictOptions(**options)),
        lambda: api.set_optimizer_state_dict(model, optim, {}, options=api.StateDictOptions(**options)),
    ):
        try:
            result.append(call())
        except Exception as error:
            result.append(type(error).__name__)
    return result


@scenario("bad input", world=1)
def set_state_dict_without_model(api: Any) -> Any:
    """An empty model state dict means: only the optimizer."""
    model = fill(Net())
    state = api.get_optimizer_state_dict(model, states(Adam(model.parameters())))
    optim = Adam(model.parameters())
    result = api.set_state_dict(model, optim, model_state_dict={}, optim_state_dict=state)
    return result, dump(optim), live(model)


@scenario("caller's dict", rows(("plain", "ddp", "fsdp2"), THREE))
def left_as_it_was(api: Any, kind: str, options: dict[str, Any]) -> Any:
    """What is in the caller's dict after a load."""
    if options:
        state: Any = given(full_state(), options)
    else:
        state = dict(api.get_model_state_dict(wrap(kind, fill(Net()))))
    model = wrap(kind, zero(Net()))
    api.set_model_state_dict(model, state, options=api.StateDictOptions(**options))
    return state


@scenario("caller's dict", rows(("plain", "fsdp2"), THREE))
def optimizer_left_as_it_was(api: Any, kind: str, options: dict[str, Any]) -> Any:
    model = wrap(kind, fill(Net()))
    state = saved(api, model, states(Adam(model.parameters())), options)
    optim = Adam(model.parameters())
    api.set_optimizer_state_dict(model, optim, state, options=api.StateDictOptions(**options))
    return state


# --- deprecated and small --------------------------------------------------------------------


@scenario("deprecated", [{"kind": kind} for kind in ("plain", "ddp", "fsdp2")])
def modules_as_keys(api: Any, kind: str) -> Any:
    source, model = wrap(kind, fill(Net())), wrap(kind, zero(Net()))

    def block(root: nn.Module) -> nn.Module:
        return next(module for name, module in root.named_modules() if name.endswith("blocks.1"))

    state = {block(model): block(source).state_dict()}
    options = api.StateDictOptions(strict=False)
    return api.set_model_state_dict(model, state, options=options), live(model)


@scenario("deprecated", [{"kind": kind} for kind in ("plain", "fsdp2")])
def optimizer_of_submodules(api: Any, kind: str) -> Any:
    model = wrap(kind, fill(Net()))
    optim = states(Adam(model.parameters()))
    return api.get_state_dict(model, optim, submodules={model.blocks[1]})


@scenario("one value", [{"options": one} for one in (ALL, BROADCAST)])
def one_element_for_scalar(api: Any, options: dict[str, Any]) -> Any:
    """Old checkpoints hold scalars as vectors of one element."""
    state = full_state()
    state["blocks.0.count"] = state["blocks.0.count"].view(1)
    model = wrap("plain", zero(Net()))
    result = api.set_model_state_dict(model, given(state, options), options=api.StateDictOptions(**options))
    return result, live(model)


@scenario("one value", [{"kind": kind} for kind in ("plain", "ddp", "fsdp2", "compile")])
def patched_methods(api: Any, kind: str) -> Any:
    """_patch_model_state_dict: the model's own methods become get and set."""
    model, other = wrap(kind, fill(Net())), wrap(kind, zero(Net()))
    for one in (model, other):
        api._patch_model_state_dict(one)
    state = model.state_dict()
    shown = dict(state)
    other.load_state_dict(state)
    return shown, live(other)


@scenario("one value", [{"kind": kind} for kind in ("plain", "ddp", "fsdp2")])
def patched_optimizer_methods(api: Any, kind: str) -> Any:
    model, other = wrap(kind, fill(Net())), wrap(kind, fill(Net(), "other."))
    optim, target = states(Adam(model.parameters())), states(Adam(other.parameters()), 5)
    api._patch_optimizer_state_dict(model, optimizers=(optim,))
    api._patch_optimizer_state_dict(other, optimizers=(target,))
    state = optim.state_dict()
    shown = dict(state)
    target.load_state_dict(state)
    return shown, dict(target.state)[next(iter(other.parameters()))]


@scenario("one value", [{"kind": kind} for kind in ("plain", "fsdp2")])
def named_groups(api: Any, kind: str) -> Any:
    """An optimizer that was given names with its parameters (torch >= 2.6)."""
    model = wrap(kind, fill(Net()))
    optim = states(Adam(model.named_parameters()))
    state = api.get_optimizer_state_dict(model, optim)
    shown = {**state}
    other = wrap(kind, fill(Net(), "other."))
    target = Adam(other.named_parameters())
    api.set_optimizer_state_dict(other, target, state)
    return shown, dump(target)


@scenario("one value", [{"what": what} for what in ("model", "optimizer")], world=0)
def plain_process(api: Any, what: str) -> Any:
    """No process group at all: every option that makes sense."""
    model = fill(Net())
    optim = states(Adam(model.parameters()))
    result = []
    for options in ({}, ALL, {**ALL, "cpu_offload": True}, {"cpu_offload": True}):
        chosen = api.StateDictOptions(**options)
        if what == "model":
            state = api.get_model_state_dict(model, options=chosen)
            target: Any = zero(Net())
            outcome = api.set_model_state_dict(target, dict(state), options=chosen), live(target)
        else:
            state = api.get_optimizer_state_dict(model, optim, options=chosen)
            target = Adam(model.parameters())
            outcome = api.set_optimizer_state_dict(model, target, state, options=chosen), dump(target)
        result.append((dict(state), outcome))
    return result
