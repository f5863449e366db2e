"""get_model_state_dict: FSDP2, HSDP, DDP, plain; sharded, full, offloaded."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import two_dim_support
from models import Model, build, full_state, local_of
from pool import on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

CHUNK = 4096


def loaded(api: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
    model, state = build(**kwargs), full_state()
    api.set_model_state_dict(model, dict(state), options=api.StateDictOptions(full_state_dict=True))
    return model, state


def check(got: dict[str, Any], state: dict[str, Any]) -> None:
    assert list(got) == list(state)
    for key, value in got.items():
        assert not hasattr(value, "_local_tensor"), f"{key} is a DTensor"
        assert torch.equal(value, state[key]), f"{key} differs"
        assert value.dtype == state[key].dtype
        assert not value.requires_grad


def full(api: Any, offload: bool, mesh_shape: tuple[int, ...]) -> None:
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard")) if mesh_shape else None
    model, state = loaded(api, mesh=mesh)
    got = api.get_model_state_dict(
        model, options=api.StateDictOptions(full_state_dict=True, cpu_offload=offload)
    )
    if offload and dist.get_rank():
        assert got == {}
    else:
        check(got, state)
        for key, param in model.named_parameters():
            mine = local_of(param).untyped_storage().data_ptr()
            assert got[key].untyped_storage().data_ptr() != mine or not local_of(param).numel()


def ranks_differ(api: Any) -> str:
    """Rank 1's model has another head: one error on every rank instead of a hang."""

    class Other(Model):
        def __init__(self) -> None:
            super().__init__()
            if dist.get_rank() == 1:
                self.head = torch.nn.Linear(8, 36, bias=False)

    model = build(kind=Other)
    with pytest.raises(RuntimeError) as caught:
        api.get_model_state_dict(model, options=api.StateDictOptions(full_state_dict=True))
    return str(caught.value)


@pytest.mark.parametrize("offload", [True, False])
@pytest.mark.parametrize("mesh_shape", [(), (2, 2)], ids=["fsdp", "hsdp"])
def test_full_state_is_whole(ranks, mesh_shape, offload):
    with two_dim_support() if mesh_shape else contextlib.nullcontext():
        ranks(full, offload, mesh_shape)


@pytest.mark.parametrize("offload", [True, False])
def test_one_rank_alone(ranks, offload):
    ranks(full, offload, (), world=1)


@on_ranks()
def test_shards_are_the_models_own(api: Any) -> None:
    model, state = loaded(api)
    got = api.get_model_state_dict(model)
    assert list(got) == list(state)
    for key, param in model.named_parameters():
        assert local_of(got[key]).data_ptr() == local_of(param).data_ptr()
    moved = api.get_model_state_dict(model, options=api.StateDictOptions(cpu_offload=True))
    assert list(moved) == list(state)


@on_ranks()
def test_meshes_inside_the_world(api: Any) -> None:
    """Two halves of the world hold models of their own: each gathers by itself."""
    halves = init_device_mesh("cpu", (2, 2), mesh_dim_names=("half", "shard"))
    model, state = loaded(api, mesh=halves["shard"])
    check(api.get_model_state_dict(model, options=api.StateDictOptions(full_state_dict=True)), state)


@on_ranks()
def test_partial_sums_are_added_up(api: Any) -> None:
    """A buffer that DTensor still has to add up."""
    from torch_dcp_backport.compat import DTensor

    try:
        from torch.distributed.tensor import Partial
    except ImportError:
        from torch.distributed._tensor.placement_types import Partial
    mesh = init_device_mesh("cpu", (4,))
    model = torch.nn.Module()
    model.register_buffer("total", DTensor.from_local(torch.ones(3), mesh, [Partial()], run_check=False))
    got = api.get_model_state_dict(model, options=api.StateDictOptions(full_state_dict=True))
    assert torch.equal(got["total"], torch.full((3,), 4.0))


@on_ranks(world=2)
def test_ddp_and_frozen_parameters(api: Any) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(Model())
    want = model.module.state_dict()
    check(api.get_model_state_dict(model, options=api.StateDictOptions(full_state_dict=True)), want)
    half = api.get_model_state_dict(model, options=api.StateDictOptions(ignore_frozen_params=True))
    assert list(half) == list(want)
    model.module.embed.weight.requires_grad_(False)
    half = api.get_model_state_dict(model, options=api.StateDictOptions(ignore_frozen_params=True))
    assert set(want) - set(half) == {"embed.weight"}


def test_ranks_that_differ_hear_of_it(ranks):
    for text in ranks(ranks_differ):
        assert "rank 1: held differently: head.weight" in text
        assert "(36, 8)" in text
        assert "(32, 8)" in text
