"""Scenarios of model state: every wrapper with every meaningful set of options."""

from __future__ import annotations

from typing import Any

import torch
from scenario import scenario
from torch import nn
from wrappers import FSDP1S, SHARDED2, WHOLE, Net, Odd, fill, full_state, live, on_rank0, wrap, zero

EVERY = (*WHOLE, *SHARDED2, *FSDP1S)
#: Wrappers that hold whole tensors under other names; fewer options for them are enough.
NAMES_ONLY = tuple(kind for kind in WHOLE if kind not in ("plain", "ddp"))
LAYOUTS = tuple(kind for kind in EVERY if kind not in NAMES_ONLY)
GET_OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"cpu_offload": True},
    {"full_state_dict": True},
    {"full_state_dict": True, "cpu_offload": True},
)


def rows(kinds: tuple[str, ...], options: tuple[dict[str, Any], ...], **more: Any) -> list[dict[str, Any]]:
    return [{"kind": kind, "options": one, **more} for kind in kinds for one in options]


@scenario("get model", rows(LAYOUTS, GET_OPTIONS))
@scenario("get model", rows(NAMES_ONLY, GET_OPTIONS[::3]))
def get(api: Any, kind: str, options: dict[str, Any]) -> Any:
    model = wrap(kind, fill(Net()))
    return api.get_model_state_dict(model, options=api.StateDictOptions(**options))


@scenario("get model", rows(("plain", "fsdp2"), (GET_OPTIONS[0], GET_OPTIONS[3]), world=1))
@scenario("get model", rows(("plain", "ddp", "fsdp2"), (GET_OPTIONS[0], GET_OPTIONS[2], GET_OPTIONS[3])))
def get_odd(api: Any, kind: str, options: dict[str, Any]) -> Any:
    model = wrap(kind, fill(Odd()))
    return api.get_model_state_dict(model, options=api.StateDictOptions(**options))


FROZEN = ({"ignore_frozen_params": True}, {"ignore_frozen_params": True, "full_state_dict": True})


@scenario("get model", rows(("plain", "ddp", "fsdp2", "ckpt", "tp", "fsdp1"), FROZEN))
def get_frozen(api: Any, kind: str, options: dict[str, Any]) -> Any:
    model = wrap(kind, fill(Net(frozen=True)))
    return api.get_model_state_dict(model, options=api.StateDictOptions(**options))


@scenario("get model", rows(("plain", "ddp", "fsdp2", "hsdp", "fsdp1"), GET_OPTIONS[::2]))
def get_tied(api: Any, kind: str, options: dict[str, Any]) -> Any:
    model = wrap(kind, fill(Net(tied=True)))
    state = api.get_model_state_dict(model, options=api.StateDictOptions(**options))
    one, other = state["embed.weight"], state["head.weight"]
    return state, "tied" if torch.is_tensor(one) and one.data_ptr() == other.data_ptr() else "apart"


SUBMODULES = ({}, {"keep_submodule_prefixes": False}, {"full_state_dict": True})


@scenario("get model", rows(("plain", "ddp", "fsdp2", "ckpt"), SUBMODULES))
def get_submodules(api: Any, kind: str, options: dict[str, Any]) -> Any:
    model = wrap(kind, fill(Net()))
    block = next(module for name, module in model.named_modules() if name.endswith("blocks.1"))
    return api.get_model_state_dict(model, submodules={block}, options=api.StateDictOptions(**options))


@scenario("get model", [{"kind": kind} for kind in ("plain", "fsdp2", "tp")])
def get_of_submodule(api: Any, kind: str) -> Any:
    """As Lightning does it: one call per submodule."""
    model = wrap(kind, fill(Net()))
    return {
        name: api.get_model_state_dict(module)
        for name, module in model.named_modules()
        if any(True for _ in module.parameters(recurse=False))
    }


ALL, BROADCAST = {"full_state_dict": True}, {"full_state_dict": True, "broadcast_from_rank0": True}
SET_OPTIONS: tuple[dict[str, Any], ...] = (ALL, BROADCAST, {**BROADCAST, "cpu_offload": True})


def given(state: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    return on_rank0(state) if options.get("broadcast_from_rank0") else dict(state)


@scenario("set model", rows(LAYOUTS, SET_OPTIONS))
@scenario("set model", rows(NAMES_ONLY, SET_OPTIONS[1:2]))
def load_full(api: Any, kind: str, options: dict[str, Any]) -> Any:
    model = wrap(kind, zero(Net()))
    state = given(full_state(), options)
    result = api.set_model_state_dict(model, state, options=api.StateDictOptions(**options))
    return result, live(model)


@scenario("set model", rows(("plain", "fsdp2", "fsdp2(ckpt)", "tp", "fsdp2+tp", "hsdp"), SET_OPTIONS))
def load_meta(api: Any, kind: str, options: dict[str, Any]) -> Any:
    with torch.device("meta"):
        model = Net()
    model = wrap(kind, model)
    for block in model.modules():
        if hasattr(block, "cache"):
            block.cache = torch.zeros(2)
    state = given(full_state(), options)
    result = api.set_model_state_dict(model, state, options=api.StateDictOptions(**options))
    return result, live(model)


@scenario("set model", rows(("plain", "ddp", "fsdp2"), SET_OPTIONS[:2]))
def load_odd(api: Any, kind: str, options: dict[str, Any]) -> Any:
    model = wrap(kind, zero(Odd()))
    state = given(full_state(Odd), options)
    result = api.set_model_state_dict(model, state, options=api.StateDictOptions(**options))
    return result, live(model)


@scenario("set model", [{"kind": kind} for kind in EVERY])
def load_own(api: Any, kind: str) -> Any:
    """Without options: the same layout that get gives."""
    state = api.get_model_state_dict(wrap(kind, fill(Net())))
    model = wrap(kind, zero(Net()))
    return api.set_model_state_dict(model, state), live(model)


@scenario("set model", rows(("plain", "ddp", "fsdp2", "hsdp"), SET_OPTIONS[:2]))
def load_tied(api: Any, kind: str, options: dict[str, Any]) -> Any:
    model = wrap(kind, zero(Net(tied=True)))
    state = given(full_state(lambda: Net(tied=True)), options)
    result = api.set_model_state_dict(model, state, options=api.StateDictOptions(**options))
    return result, live(model)


LOOSE = ({"strict": False}, {**ALL, "strict": False}, {**BROADCAST, "strict": False})
KEYS = ("missing", "unexpected", "both")


def with_keys(state: dict[str, Any], keys: str) -> dict[str, Any]:
    if keys in ("missing", "both"):
        del state["blocks.1.down.weight"]
    if keys in ("unexpected", "both"):
        state["extra.weight"] = torch.ones(4, 4)
    return state


@scenario(
    "set model, other keys",
    [
        {"kind": kind, "keys": keys, "options": options}
        for kind in ("plain", "ddp", "fsdp2")
        for keys in KEYS
        for options in (*LOOSE, {}, ALL, BROADCAST)
    ],
)
def load_keys(api: Any, kind: str, keys: str, options: dict[str, Any]) -> Any:
    model = wrap(kind, zero(Net()))
    if options.get("full_state_dict"):
        state = with_keys(full_state(), keys)
        if options.get("broadcast_from_rank0"):
            state = on_rank0(state)
    else:
        state = with_keys(dict(api.get_model_state_dict(wrap(kind, fill(Net())))), keys)
    result = api.set_model_state_dict(model, state, options=api.StateDictOptions(**options))
    return result, live(model)


@scenario("set model", rows(("fsdp2", "plain"), SET_OPTIONS[:2]))
def load_dtype(api: Any, kind: str, options: dict[str, Any]) -> Any:
    """A float32 checkpoint into a bfloat16 model."""
    model = wrap(kind, zero(Net()).to(torch.bfloat16))
    state = given(full_state(), options)
    result = api.set_model_state_dict(model, state, options=api.StateDictOptions(**options))
    return result, live(model)


@scenario("set model", rows(("fsdp2", "plain"), SET_OPTIONS[:2]))
def load_meta_dtype(api: Any, kind: str, options: dict[str, Any]) -> Any:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8)).to(torch.bfloat16)
    model.blocks = []
    model = wrap(kind, model)
    state = given(full_state(lambda: nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))), options)
    result = api.set_model_state_dict(model, state, options=api.StateDictOptions(**options))
    return result, live(model)


@scenario("set model", rows(("fsdp2", "plain"), (ALL, BROADCAST)))
def load_lora(api: Any, kind: str, options: dict[str, Any]) -> Any:
    """The base on the meta device, an adapter with memory."""
    model = Net()
    with torch.device("meta"):
        model.blocks = Net().blocks
    for block in model.blocks:
        block.cache, block.count = torch.zeros(2), torch.tensor(0)
    model = wrap(kind, model)
    state = given(full_state(), options)
    result = api.set_model_state_dict(model, state, options=api.StateDictOptions(**options))
    return result, live(model)


@scenario("set model", [{"options": one} for one in (ALL, BROADCAST)])
def load_strided_source(api: Any, options: dict[str, Any]) -> Any:
    """channels_last and transposed tensors in the checkpoint."""

    def make() -> nn.Module:
        model = nn.Module()
        model.conv = nn.Conv2d(4, 4, 2)
        model.linear = nn.Linear(4, 8)
        model.blocks = nn.ModuleList()
        return model

    state = full_state(make)
    state["conv.weight"] = state["conv.weight"].contiguous(memory_format=torch.channels_last)
    state["linear.weight"] = state["linear.weight"].t().contiguous().t()
    model = wrap("fsdp2", zero(make()))
    result = api.set_model_state_dict(model, given(state, options), options=api.StateDictOptions(**options))
    return result, live(model)


@scenario(
    "set model, dtypes",
    [
        {"dtype": dtype, "options": options}
        for dtype in ("float64", "float16", "bfloat16", "float8_e4m3fn", "int8", "int64", "bool", "complex64")
        for options in (ALL, BROADCAST)
    ],
)
def load_each_dtype(api: Any, dtype: str, options: dict[str, Any]) -> Any:
    kind = getattr(torch, dtype)

    def make() -> nn.Module:
        model = nn.Module()
        model.weight = nn.Parameter(torch.zeros(5, 4).to(kind), requires_grad=False)
        model.register_buffer("mask", torch.zeros(3).to(kind))
        model.blocks = nn.ModuleList()
        return model

    state = {key: value_like(f"ckpt.{key}", value) for key, value in make().state_dict().items()}
    with torch.device("meta"):
        fresh = make()
    result = []
    for model in (make(), fresh):
        model = wrap("fsdp2", model)
        api.set_model_state_dict(model, given(state, options), options=api.StateDictOptions(**options))
        result.append(live(model))
    return result


def value_like(key: str, value: torch.Tensor) -> torch.Tensor:
    from values import value_of

    return value_of(
        key, tuple(value.shape), torch.float32 if "float8" in str(value.dtype) else value.dtype
    ).to(value.dtype)
