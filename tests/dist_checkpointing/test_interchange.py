"""Checkpoints between this room and torch's own DCP, of several ranks, both ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from packaging.version import Version
from spreads import same
from torch.distributed.device_mesh import init_device_mesh
from values import value_of

from torch_dcp_backport import dist_checkpointing as room
from torch_dcp_backport.compat import Shard
from torch_dcp_backport.dist_checkpointing import ShardedObject, ShardedTensor

try:
    from torch.distributed.tensor import DTensor
except ImportError:  # torch 2.4
    from torch.distributed._tensor import DTensor

ALONE: dict[str, Any] = {"no_dist": True} if Version(torch.__version__).release >= (2, 7) else {}
SHAPES = {"matrix": (7, 5), "large": (300, 41), "row": (1, 9), "deep": (9, 5, 2), "vector": (6,)}
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.float64, torch.bool)


def dtensors(dim: int, filled: bool) -> dict[str, DTensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rank, tensors = dist.get_rank(), {}
    for (key, shape), dtype in zip(SHAPES.items(), DTYPES):
        axis = min(dim, len(shape) - 1)
        whole = value_of(key, shape, dtype)
        parts = whole.chunk(mesh.size(), axis)
        local = parts[rank] if rank < len(parts) else whole.narrow(axis, 0, 0)
        local = (
            local.contiguous() if filled else torch.zeros_like(local, memory_format=torch.contiguous_format)
        )
        tensors[key] = DTensor.from_local(
            local, mesh, [Shard(axis)], run_check=False, shape=whole.shape, stride=whole.stride()
        )
    return tensors


def saved_by_dcp(room: Any, folder: str) -> None:
    dcp.save({"model": dtensors(0, True), "note": {"lr": 0.5}}, checkpoint_id=folder)


def loaded_by_us(room: Any, folder: str) -> list[str]:
    tensors = dtensors(1, False)
    asked: dict[str, Any] = {
        key: ShardedTensor.from_dtensor(f"model.{key}", value) for key, value in tensors.items()
    }
    asked["lr"] = ShardedObject("note.lr", None, (1,), (0,), dist.get_rank())
    result = room.load(asked, folder)
    assert result["lr"] == 0.5
    return wrong(tensors)


def wrong(tensors: dict[str, DTensor]) -> list[str]:
    expected = dtensors(1, True)
    return [
        key
        for key, value in tensors.items()
        if not same(value._local_tensor.reshape(-1), expected[key]._local_tensor.reshape(-1))
    ]


def test_we_load_what_dcp_saved(ranks: Any, tmp_path: Path) -> None:
    ranks(saved_by_dcp, str(tmp_path))
    assert ranks(loaded_by_us, str(tmp_path), world=3) == [[]] * 3


def saved_by_us(room: Any, folder: str) -> None:
    tensors = dtensors(0, True)
    room.save(
        {key: ShardedTensor.from_dtensor(f"model.{key}", value) for key, value in tensors.items()}, folder
    )


def loaded_by_dcp(room: Any, folder: str) -> list[str]:
    tensors = dtensors(1, False)
    dcp.load({"model": dict(tensors)}, checkpoint_id=folder)
    return wrong(tensors)


def test_dcp_loads_what_we_saved(ranks: Any, tmp_path: Path) -> None:
    ranks(saved_by_us, str(tmp_path))
    assert ranks(loaded_by_dcp, str(tmp_path), world=3) == [[]] * 3


def test_torch_makes_one_file_of_what_we_saved(ranks: Any, tmp_path: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    ranks(saved_by_us, str(tmp_path))
    dcp_to_torch_save(str(tmp_path), str(tmp_path / "one.pt"))
    state = torch.load(tmp_path / "one.pt", weights_only=True)
    for (key, shape), dtype in zip(SHAPES.items(), DTYPES):
        assert same(state[f"model.{key}"], value_of(key, shape, dtype))


def views(values: torch.Tensor) -> dict[str, torch.Tensor]:
    """Tensors whose values are not those in their memory."""
    return {
        "conj": values.conj(),
        "conj transposed": values.conj().t(),
        "neg": torch._neg_view(values.real.contiguous()),
        "neg strided": values.conj().imag,
    }


def resolved(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg()


COMPLEX = torch.complex(torch.arange(8000.0), torch.arange(1.0, 8001.0)).view(80, 100)


@pytest.mark.parametrize("saved_by", ["torch", "us"])
def test_conjugated_and_negated_views(tmp_path: Path, saved_by: str) -> None:
    saved = views(COMPLEX)
    if saved_by == "torch":
        dcp.save(saved, checkpoint_id=str(tmp_path), **ALONE)
    else:
        room.save({key: ShardedTensor.from_dtensor(key, value) for key, value in saved.items()}, tmp_path)
    assert room.verify(tmp_path) == []
    state = {
        key: ShardedTensor(key, None, value.dtype, value.shape, value.shape, (0, 0), None)
        for key, value in saved.items()
    }
    loaded = room.load(state, tmp_path)
    for key, value in saved.items():
        assert torch.equal(loaded[key], resolved(value)), key


def test_what_is_loaded_into_conjugated_and_negated_views(tmp_path: Path) -> None:
    saved = {key: resolved(value).contiguous() for key, value in views(COMPLEX).items()}
    room.save({key: ShardedTensor.from_dtensor(key, value) for key, value in saved.items()}, tmp_path)
    targets = views(torch.zeros_like(COMPLEX))
    # Each from a checkpoint of its own: their memory is one.
    for key, target in targets.items():
        room.load({key: ShardedTensor.from_dtensor(key, target)}, tmp_path)
        assert torch.equal(resolved(target), saved[key]), key
