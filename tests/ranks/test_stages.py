"""Pipeline stages: every rank has a part of the model, and the replicas of a part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import value_of
from pool import on_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torch_dcp_backport import transfer
from torch_dcp_backport.compat import DTensor, Replicate
from torch_dcp_backport.transfer._src import plan

SHAPE = (64, 96)
NBYTES = 64 * 96 * 4


def two_stages(api: Any) -> transfer.Report:
    """Stages of two replicas each, loaded from rank 0."""
    rank = dist.get_rank()
    meshes = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])]
    own = rank // 2
    model = nn.Module()
    local = DTensor.from_local(torch.zeros(SHAPE), meshes[own], [Replicate()], run_check=False)
    model.register_parameter(f"w{own}", nn.Parameter(local))
    full = {f"w{number}": value_of(f"w{number}", SHAPE, torch.float32) for number in (0, 1)}
    options = api.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    api.set_model_state_dict(model, full if rank == 0 else {}, options=options)
    assert torch.equal(getattr(model, f"w{own}").to_local(), full[f"w{own}"])
    report = transfer.last_report()
    assert report is not None
    return report


def test_a_stage_gets_its_tensors_once_and_passes_them_on(ranks):
    reports = ranks(two_stages)
    # Rank 0 passes on to its own replica, and sends to the first rank of the other stage.
    assert [one.bytes_sent for one in reports] == [2 * NBYTES, 0, NBYTES, 0]
    assert [one.bytes_received for one in reports] == [0, NBYTES, NBYTES, NBYTES]


@pytest.mark.parametrize("place", [0, 3])
@on_ranks()
def test_every_rank_hears_of_wants_that_cannot_travel(api: Any, place: int) -> None:
    """A rank whose own list of wants cannot travel."""
    rank = dist.get_rank()
    model = nn.Module()
    model.register_parameter(f"w{rank // 2}", nn.Parameter(torch.zeros(SHAPE)))
    options = api.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    full = {f"w{number}": torch.ones(SHAPE) for number in (0, 1)}

    def fail(table: plan.WantTable) -> bytes:
        raise TypeError("a fault")

    real = plan.packed
    try:
        if rank == place:
            plan.packed = fail
        with pytest.raises(RuntimeError, match=rf"(?s)nothing was changed.*rank {place}.*a fault"):
            api.set_model_state_dict(model, full if rank == 0 else {}, options=options)
    finally:
        plan.packed = real
    assert not torch.any(getattr(model, f"w{rank // 2}"))


def parameter_of(model: nn.Module, own: int) -> torch.Tensor:
    return getattr(model, f"w{own}").detach()


@pytest.mark.parametrize("place", [0, 3])
@on_ranks()
def test_an_error_of_a_later_stage_does_not_say_that_nothing_changed(api: Any, place: int) -> None:
    """The same, when loading code of one stage is about to look: what moved before is written."""
    rank, own = dist.get_rank(), dist.get_rank() // 2
    model = nn.Module()
    model.register_parameter(f"w{own}", nn.Parameter(torch.zeros(SHAPE)))
    child = nn.Module()
    child.register_parameter("w", nn.Parameter(torch.zeros(SHAPE)))
    child._register_load_state_dict_pre_hook(lambda *_: None)
    model.add_module(f"c{own}", child)
    options = api.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    full = {name: torch.ones(SHAPE) for name in ("w0", "w1", "c0.w", "c1.w")}
    before = parameter_of(model, own).clone()
    real = plan.packed

    def fail(table: plan.WantTable) -> bytes:
        if torch.equal(parameter_of(model, own), before):
            return real(table)
        raise TypeError("a fault")

    try:
        if rank == place:
            plan.packed = fail
        with pytest.raises(RuntimeError, match=rf"(?s)rank {place}.*a fault") as caught:
            api.set_model_state_dict(model, full if rank == 0 else {}, options=options)
    finally:
        plan.packed = real
    assert "nothing was changed" not in str(caught.value)
    assert torch.all(parameter_of(model, own) == 1)
