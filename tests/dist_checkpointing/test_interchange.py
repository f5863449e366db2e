"""Checkpoints between this room and torch's own DCP, of several ranks, both ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from spreads import same
from torch.distributed.device_mesh import init_device_mesh
from values import value_of

from torch_dcp_backport.compat import Shard
from torch_dcp_backport.dist_checkpointing import ShardedObject, ShardedTensor

try:
    from torch.distributed.tensor import DTensor
except ImportError:  # torch 2.4
    from torch.distributed._tensor import DTensor

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
