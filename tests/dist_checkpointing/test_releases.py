"""Files of other releases of torch, of Megatron and of this package, read on this one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from releases import FOLDER, OBJECT, STEP, known_to

from torch_dcp_backport import dist_checkpointing as room
from torch_dcp_backport.dist_checkpointing import ShardedObject, ShardedTensor
from torch_dcp_backport.dist_checkpointing.storage import CheckedReader

RELEASES = sorted(path.name for path in FOLDER.iterdir() if path.is_dir())


def expected(name: str) -> dict[str, torch.Tensor]:
    return {**known_to(name), "scalar": torch.tensor(2.5)}


def blank(name: str) -> dict[str, torch.Tensor]:
    return {
        key: torch.zeros(value.nbytes, dtype=torch.uint8).view(value.dtype).view(value.shape)
        for key, value in expected(name).items()
    }


def wrong(name: str, found: dict[str, Any]) -> list[str]:
    """Keys whose values, or dtypes, are others."""
    return [
        key
        for key, value in expected(name).items()
        if found[key].dtype != value.dtype
        or found[key].shape != value.shape
        or not torch.equal(bits(found[key]), bits(value))
    ]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).contiguous().view(torch.uint8)


def test_there_are_files_of_each() -> None:
    assert {name.rpartition("-")[0] for name in RELEASES} == {"torch", "megatron-core", "ours"}


@pytest.mark.parametrize("name", RELEASES)
def test_they_are_read(name: str) -> None:
    folder = FOLDER / name
    assert room.verify(folder) == []
    targets = blank(name)
    state: dict[str, Any] = {key: ShardedTensor.from_dtensor(key, value) for key, value in targets.items()}
    # torch saves what is in a nested dict one by one.
    key = "object.seed" if name.startswith("torch") else "object"
    state["object"] = ShardedObject(key, None, (1,), (0,))
    loaded = room.load(state, folder)
    assert wrong(name, targets) == []
    if name.startswith("torch"):
        assert loaded["object"] == OBJECT["seed"]
    else:
        assert loaded["step"] == STEP
        assert loaded["object"]["seed"] == OBJECT["seed"]
        assert torch.equal(loaded["object"]["state"], OBJECT["state"])


def loaded_by_dcp(folder: Path, reader: Any) -> dict[str, Any]:
    state: dict[str, Any] = blank(folder.name)
    if folder.name.startswith("torch"):
        state |= {"object": {"seed": [0, 0, 0], "state": torch.zeros(5, dtype=torch.uint8)}, "step": 0}
    dcp.load(state, storage_reader=reader)
    return state


@pytest.mark.parametrize("name", RELEASES)
def test_they_are_read_by_our_reader(name: str) -> None:
    state = loaded_by_dcp(FOLDER / name, CheckedReader(FOLDER / name))
    assert wrong(name, state) == []
    assert state.get("step", STEP) == STEP


@pytest.mark.parametrize("name", [name for name in RELEASES if not name.startswith("megatron")])
def test_torch_reads_them_too(name: str) -> None:
    """Megatron's metadata names its own classes."""
    assert wrong(name, loaded_by_dcp(FOLDER / name, dcp.FileSystemReader(FOLDER / name))) == []
