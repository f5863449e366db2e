"""A state dict that a trainer takes once and saves again and again, with FSDP2's uneven shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from models import fully_shard
from packaging.version import Version
from pool import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from torch_dcp_backport.compat import from_local, fsdp2_parameters, local_part

TORCH = Version(torch.__version__).release[:2]
AFFECTED = (2, 4) <= TORCH < (2, 7)
#: Rows of 4 ranks: even, uneven, and fewer than ranks.
SIZES = (8, 5, 1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for size in SIZES:
            self.register_parameter(f"rows_{size}", nn.Parameter(torch.arange(3.0 * size).view(size, 3)))


def full(value: float) -> dict[str, torch.Tensor]:
    return {f"rows_{size}": torch.full((size, 3), value) for size in SIZES}


def options(api: Any, **fields: bool) -> Any:
    return api.StateDictOptions(full_state_dict=True, **fields)


def load_shards(api: Any, model: nn.Module, folder: str) -> None:
    shards = {
        name: from_local(torch.full_like(local_part(value), 7), value)
        for name, value in model.state_dict().items()
    }
    model.load_state_dict(shards)


def load_full(api: Any, model: nn.Module, folder: str) -> None:
    api.set_model_state_dict(model, full(7), options=options(api))


def load_from_rank_0(api: Any, model: nn.Module, folder: str) -> None:
    state = full(7) if torch.distributed.get_rank() == 0 else {}
    api.set_model_state_dict(model, state, options=options(api, broadcast_from_rank0=True))


def load_from_the_disk(api: Any, model: nn.Module, folder: str) -> None:
    dcp.save(full(7), checkpoint_id=folder)
    state = api.get_model_state_dict(model)
    dcp.load(state, checkpoint_id=folder)
    api.set_model_state_dict(model, state)


def move(api: Any, model: nn.Module, folder: str) -> None:
    model.to("cpu")
    load_shards(api, model, folder)


CHANGES = {
    change.__name__: change for change in (load_shards, load_full, load_from_rank_0, load_from_the_disk, move)
}


def same(model: nn.Module, kept: dict[str, Any], value: float) -> None:
    """The model, what was kept, and the memory that FSDP2 gathers are one."""
    params = dict(model.named_parameters())
    for name, tensor in kept.items():
        local = local_part(params[name])
        assert torch.all(local == value), f"{name} has {local.unique()}"
        assert torch.all(local_part(tensor) == value), f"what was kept of {name} is stale"
    for record in fsdp2_parameters(model):
        gathered, local = record._sharded_param_data, local_part(record.sharded_param)
        assert torch.equal(gathered[: local.numel()], local.flatten())
        assert not gathered[local.numel() :].any()


@pytest.mark.skipif((2, 7) <= TORCH < (2, 13), reason="torch >= 2.7 is left as it is")
@pytest.mark.parametrize("change", CHANGES)
@on_ranks(broken=AFFECTED, fixture="fixed")
def test_a_state_dict_that_is_kept_stays_the_models(api: Any, tmp_path: Path, change: str) -> None:
    folder = str(tmp_path / "saved")
    model = Model()
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    kept = model.state_dict()
    for _ in range(2):
        CHANGES[change](api, model, folder)
        same(model, kept, 7)
        # As an optimizer does.
        for param in model.parameters():
            local_part(param).fill_(9)
        same(model, kept, 9)


@on_ranks()
def test_shards_that_are_not_in_place_are_padded(api: Any) -> None:
    """What is not in place is padded, as before: other dtypes, other parameters, a meta model."""
    mesh = init_device_mesh("cpu", (4,))
    model = Model()
    fully_shard(model, mesh=mesh)
    model.to(torch.float64)
    load_shards(api, model, "")
    same(model, model.state_dict(), 7)
    other = {
        name: from_local(torch.full_like(local_part(value), 5), value)
        for name, value in model.state_dict().items()
    }
    model.load_state_dict(other, assign=True)
    same(model, model.state_dict(), 5)
    with torch.device("meta"):
        empty = Model()
    fully_shard(empty, mesh=mesh)
    empty.to_empty(device="cpu")
    load_shards(api, empty, "")
    same(empty, empty.state_dict(), 7)
