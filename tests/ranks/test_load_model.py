"""set_model_state_dict with full tensors: FSDP2, DDP and plain models."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import two_dim_support
from models import (
    ExtraState,
    Model,
    WithExtraState,
    build,
    check_storages,
    check_values,
    full_state,
    fully_shard,
    local_of,
)
from pool import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from values import value_of

BROADCAST = {"full_state_dict": True, "broadcast_from_rank0": True}


def given(state: dict[str, Any], how: str) -> dict[str, Any]:
    return state if how == "all" or dist.get_rank() == 0 else {}


def options(api: Any, how: str, **more: Any) -> Any:
    return api.StateDictOptions(full_state_dict=True, broadcast_from_rank0=how == "rank0", **more)


# The functions below run on the ranks, with the API under test as their first argument.


def load(api: Any, how: str, device: str, mesh_shape: tuple[int, ...] = ()) -> None:
    mesh = None
    if mesh_shape:
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard"))
    model, state = build(device, mesh), full_state()
    result = api.set_model_state_dict(model, given(dict(state), how), options=options(api, how))
    assert not result.missing_keys
    assert not result.unexpected_keys
    check_values(model, state)
    check_storages(dict(model.named_parameters()), mesh_shape[-1] if mesh_shape else dist.get_world_size())


def load_tied(api: Any, device: str) -> None:
    model, state = build(device, tied=True), full_state(tied=True)
    state["head.weight"] = state["embed.weight"]
    api.set_model_state_dict(model, given(dict(state), "rank0"), options=options(api, "rank0"))
    assert model.head.weight is model.embed.weight
    check_values(model, state)


class Formats(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3)
        self.layers = nn.ModuleList()


class Float8(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8, 4).to(torch.float8_e4m3fn), requires_grad=False)
        self.layers = nn.ModuleList()


class TwoNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 4)
        self.other = self.one
        self.layers = nn.ModuleList()


# The tests.


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("how", ["rank0", "all"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_rank_gets_its_slices_bit_for_bit(ranks, world, how, device):
    ranks(load, how, device, world=world)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("how", ["rank0", "all"])
def test_hsdp_replicas_get_the_same(ranks, how, device):
    with two_dim_support():
        ranks(load, how, device, (2, 2))


def test_no_shard_keeps_the_full_tensor_alive(fixed):
    fixed(load, "rank0", "meta")


@pytest.mark.parametrize("device", ["cpu", "meta"])
@on_ranks()
def test_dtype_is_kept_or_taken(api: Any, device: str) -> None:
    """Materialised parameters keep their dtype, those from meta take the checkpoint's."""
    model = build(device)
    state = {
        key: value.bfloat16() if value.is_floating_point() else value for key, value in full_state().items()
    }
    api.set_model_state_dict(model, given(dict(state), "rank0"), options=options(api, "rank0"))
    dtype = torch.bfloat16 if device == "meta" else torch.float32
    assert {param.dtype for param in model.parameters()} == {dtype}
    check_values(
        model, {key: value.to(dtype) if value.is_floating_point() else value for key, value in state.items()}
    )


def test_tied_weights_stay_tied(ranks):
    ranks(load_tied, "cpu")


def test_tied_weights_stay_tied_from_meta(fixed):
    fixed(load_tied, "meta")


@on_ranks(fixture="fixed")
def test_a_meta_parameter_leaves_the_others_in_place(api: Any) -> None:
    """A parameter on the meta device must not make the real ones new objects: an optimizer holds them."""
    model, state = build(), full_state()
    model.adapter = nn.Linear(4, 4, bias=False, device="meta")
    state["adapter.weight"] = torch.ones(4, 4)
    before = dict(model.named_parameters())
    api.set_model_state_dict(model, given(dict(state), "rank0"), options=options(api, "rank0"))
    for key, param in model.named_parameters():
        assert param is before[key] or key == "adapter.weight", f"{key} was replaced"
    check_values(model, state)


@pytest.mark.parametrize("how", ["rank0", "all"])
@on_ranks(fixture="fixed")
def test_the_callers_dict_is_left_as_it_is(api: Any, how: str) -> None:
    model, state = build(), full_state()
    mine = given(dict(state), how)
    kept, keys = dict(mine), list(mine)
    api.set_model_state_dict(model, mine, options=options(api, how))
    assert list(mine) == keys
    assert all(mine[key] is kept[key] for key in mine)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("how", ["rank0", "all"])
@on_ranks(world=2)
def test_ddp(api: Any, how: str, compiled: bool) -> None:
    torch.manual_seed(0)
    inner = torch.compile(Model()) if compiled else Model()
    model = DistributedDataParallel(inner)
    state = full_state()
    before = local_of(next(iter(model.parameters()))).untyped_storage().data_ptr()
    api.set_model_state_dict(model, given(dict(state), how), options=options(api, how))
    check_values(inner._orig_mod if compiled else inner, state)
    assert local_of(next(iter(model.parameters()))).untyped_storage().data_ptr() == before


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("how", ["rank0", "all"])
@on_ranks(world=2)
def test_plain_model(api: Any, how: str, device: str) -> None:
    with torch.device(device):
        model = Model()
    if device == "meta":
        model.layers[0].cache = model.layers[1].cache = None
    state = full_state()
    mine = given(dict(state), how)
    api.set_model_state_dict(model, mine, options=options(api, how))
    check_values(model, state)
    for key, param in model.named_parameters():
        if key in mine:
            assert param.untyped_storage().data_ptr() != mine[key].untyped_storage().data_ptr(), (
                f"{key} aliases"
            )


@on_ranks()
def test_extra_state_travels(api: Any) -> None:
    model = build(kind=WithExtraState)
    state = full_state(kind=WithExtraState)
    state["extra._extra_state"] = {"seen": 7}
    api.set_model_state_dict(model, given(dict(state), "rank0"), options=options(api, "rank0"))
    assert model.extra.note == {"seen": 7}
    assert isinstance(model.extra, ExtraState)


@on_ranks()
def test_odd_sources_are_exact(api: Any) -> None:
    """Transposed, expanded and requires_grad sources; -0.0 and NaN payloads bit for bit."""
    model, state = build(), full_state()
    odd = dict(state)
    odd["embed.weight"] = state["embed.weight"].t().contiguous().t()
    odd["head.weight"] = nn.Parameter(state["head.weight"])
    odd["layers.0.even.bias"] = torch.tensor(-0.0).expand(16)
    bits = torch.full((16, 8), 0x7FC01234, dtype=torch.int32)
    odd["layers.0.even.weight"] = bits.view(torch.float32)
    api.set_model_state_dict(model, given(odd, "rank0"), options=options(api, "rank0"))
    assert torch.equal(model.embed.weight.full_tensor(), state["embed.weight"])
    assert torch.equal(model.head.weight.full_tensor(), state["head.weight"])
    rows = local_of(model.layers[0].even.weight).view(torch.int32)
    assert torch.equal(rows, bits[: len(rows)])
    assert torch.equal(
        local_of(model.layers[0].even.bias).view(torch.int32), torch.full((4,), -(2**31)).int()
    )


@on_ranks()
def test_not_strict_reports_on_every_rank(api: Any) -> None:
    """strict=False: what is missing stays, and is reported; what is extra is reported, on every rank."""
    model, state = build(), full_state()
    partial = dict(state)
    del partial["head.weight"]
    partial["unknown"] = torch.ones(2)
    result = api.set_model_state_dict(
        model, given(partial, "rank0"), options=options(api, "rank0", strict=False)
    )
    assert result.missing_keys == ["head.weight"]
    assert result.unexpected_keys == ["unknown"]
    check_values(model, {**state, "head.weight": torch.zeros(32, 8)})


@on_ranks()
def test_one_parameter_at_a_time(api: Any) -> None:
    """As Lightning calls it: one parameter at a time, on submodules."""
    model, state = build(), full_state()
    for name, module in model.named_modules():
        for key, _ in module.named_parameters(recurse=False):
            one = {key: state[f"{name}.{key}"]}
            api.set_model_state_dict(module, one, options=options(api, "all", strict=False))
    for key, param in model.named_parameters():
        assert torch.equal(param.full_tensor(), state[key]), key


@on_ranks()
def test_sharded_round_trip(api: Any) -> None:
    """Without full_state_dict: DTensors of get_model_state_dict go back as they are."""
    model, state = build(), full_state()
    api.set_model_state_dict(model, given(dict(state), "rank0"), options=options(api, "rank0"))
    saved = copy.deepcopy(api.get_model_state_dict(model))
    other = build()
    api.set_model_state_dict(other, saved)
    check_values(other, state)


@on_ranks(fixture="fixed")
def test_a_source_that_is_not_contiguous(api: Any) -> None:
    """A source that is not contiguous; torch broadcasts its memory as if it were."""
    state = full_state(Formats)
    state["conv.weight"] = state["conv.weight"].contiguous(memory_format=torch.channels_last)
    model = build(kind=Formats)
    api.set_model_state_dict(model, given(dict(state), "rank0"), options=options(api, "rank0"))
    check_values(model, state)


@on_ranks(fixture="fixed")
def test_float8_travels(api: Any) -> None:
    """gloo has no float8; bytes travel."""
    weight = value_of("weight", (8, 4)).to(torch.float8_e4m3fn)
    with torch.device("meta"):
        model = Float8()
    model = fully_shard(model, mesh=init_device_mesh("cpu", (4,))) or model
    api.set_model_state_dict(model, given({"weight": weight}, "rank0"), options=options(api, "rank0"))
    mine = local_of(model.weight).view(torch.uint8)
    assert torch.equal(mine, weight.chunk(4)[dist.get_rank()].view(torch.uint8))


@pytest.mark.parametrize("wrapper", ["fsdp2", "ddp"])
@on_ranks(fixture="fixed")
def test_a_module_under_two_names(api: Any, wrapper: str) -> None:
    """model.state_dict() has both names of a module; torch knows one."""
    state = full_state(TwoNames)
    state.update({"other.weight": state["one.weight"], "other.bias": state["one.bias"]})
    model = build(kind=TwoNames) if wrapper == "fsdp2" else DistributedDataParallel(TwoNames())
    api.set_model_state_dict(model, given(dict(state), "rank0"), options=options(api, "rank0"))
    if wrapper == "fsdp2":
        check_values(model, state)
    else:
        check_values(model.module, state)


@on_ranks(fixture="fixed")
def test_one_name_of_a_tied_weight_is_enough(api: Any) -> None:
    """As safetensors save tied weights: under one name."""
    state = full_state(tied=True)
    kept = {key: value for key, value in state.items() if key != "head.weight"}
    model = build(tied=True)
    result = api.set_model_state_dict(model, given(dict(kept), "rank0"), options=options(api, "rank0"))
    assert not result.missing_keys
    check_values(model, {**state, "head.weight": kept["embed.weight"]})


@on_ranks(fixture="fixed")
def test_the_model_is_freed(api: Any) -> None:
    # A plain model: FSDP2 itself keeps its models alive on torch 2.4 and 2.5.
    model = Model()
    gone = weakref.ref(model)
    api.set_model_state_dict(model, given(full_state(), "rank0"), options=options(api, "rank0"))
    api.get_model_state_dict(model)
    del model
    gc.collect()
    assert gone() is None


@on_ranks()
def test_a_complete_state_dict_misses_nothing(api: Any) -> None:
    """Modules whose hooks rename or make keys: nothing is missing."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    for layer in (
        checkpoint_wrapper(nn.Linear(3, 3)),
        nn.utils.spectral_norm(nn.Linear(3, 3)),
        nn.BatchNorm1d(3),
    ):
        model = nn.Sequential(nn.Linear(3, 3), layer)
        other = nn.Sequential(nn.Linear(3, 3), copy.deepcopy(layer))
        options = api.StateDictOptions(full_state_dict=True)
        state = api.get_model_state_dict(model, options=options)
        found = api.set_model_state_dict(other, state, options=options)
        assert (found.missing_keys, found.unexpected_keys) == ([], []), type(layer)
        for key, value in api.get_model_state_dict(other, options=options).items():
            assert torch.equal(value, state[key]), key
