"""`save(torch_metadata=False)`: `.metadata` is the packed index alone; ours read it, torch's say why not."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import qwen
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from pool import on_ranks

from torch_dcp_backport.dist_checkpointing import (
    CheckpointingException,
    ShardedObject,
    ShardedTensor,
    load,
    load_common_state_dict,
    load_plain_tensors,
    load_sharded_metadata,
    load_tensors_metadata,
    remove_sharded_tensors,
    save,
    verify,
)
from torch_dcp_backport.dist_checkpointing._src import metadata, packed
from torch_dcp_backport.dist_checkpointing.storage import CheckedReader
from torch_dcp_backport.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from torch_dcp_backport.dist_checkpointing.training_state import (
    load_training_state,
    save_training_state,
    sharded_state_dict,
)

REASON = (
    "this checkpoint was saved with torch_metadata=False and has no index for readers of torch: load it with "
    "torch_dcp_backport's dist_checkpointing, or give dcp load its CheckedReader as the storage_reader"
)


def state_of(rank: int, world: int, value: float = 0.0) -> dict[str, Any]:
    """Rows, columns, replicas, an uneven cut, flattened ranges, an empty tensor, objects, a common value."""
    made = ShardedTensor.from_rank_offsets
    whole = torch.arange(world * 6.0).view(world, 6) + value
    flat = torch.arange(rank * 6.0, rank * 6.0 + 6) + value
    return {
        "rows": made("rows", whole[rank : rank + 1].clone(), (0, rank, world)),
        "columns": [
            made(f"columns.{number}", whole.T.contiguous()[:, rank : rank + 1].clone(), (1, rank, world))
            for number in range(3)
        ],
        "replica": made("replica", torch.arange(700.0) + value, replica_id=rank),
        "scalar": made("scalar", torch.tensor(value), replica_id=rank),
        "empty": made("empty", torch.zeros(0, 3), replica_id=rank),
        "flat": ShardedTensor.from_rank_offsets_flat(
            "flat", flat, (world * 6,), flattened_range=slice(rank * 6, rank * 6 + 6)
        ),
        "rng": ShardedObject("rng", {"of": rank}, (world,), (rank,)),
        "step": 3,
    }


def tensors_of(state: dict[str, Any]) -> list[torch.Tensor]:
    parts = [*state["columns"], *(state[key] for key in ("rows", "replica", "scalar", "empty", "flat"))]
    return [part.data if isinstance(part, ShardedTensor) else part for part in parts]


@on_ranks(world=2)
def test_every_kind_of_value_comes_back(room: Any, tmp_path: Path) -> None:
    """Twice by one plan, and once with torch's index between: what is kept of a plan is of one of the two."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for number, torch_metadata in enumerate((False, True, False)):
        save(state_of(rank, world, number), tmp_path, torch_metadata=torch_metadata)
        dist.barrier()
        assert (tmp_path / ".metadata").read_bytes().startswith(b"\x80\x03cthis") is not torch_metadata
        loaded = load(state_of(rank, world, 9.0), tmp_path)
        assert all(map(torch.equal, tensors_of(loaded), tensors_of(state_of(rank, world, number))))
        assert (loaded["rng"], loaded["step"]) == ({"of": rank}, 3)
        assert verify(tmp_path) == []
        dist.barrier()


def saved(room: Any, folder: str, kind: str) -> None:
    model, optimizer = qwen.build(kind)
    qwen.fill(sharded_state_dict(model, optimizer))
    save_training_state(folder, model, optimizer, extra={"step": 7}, torch_metadata=False)


def loaded(room: Any, folder: str, kind: str) -> tuple[list[str], int]:
    model, optimizer = qwen.build(kind)
    extra = load_training_state(folder, model, optimizer)
    return qwen.differences(sharded_state_dict(model, optimizer)), extra["step"]


@pytest.mark.parametrize("source", ["FSDP", "plain"])
def test_a_model_and_its_optimizer_come_back_on_other_ranks(ranks: Any, tmp_path: Path, source: str) -> None:
    ranks(saved, str(tmp_path), source, world=4)
    for kind, world in (("FSDP", 4), ("FSDP", 3), ("plain", 2)):
        assert ranks(loaded, str(tmp_path), kind, world=world) == [([], 7)] * world


def test_a_state_without_tensors_comes_back(tmp_path: Path) -> None:
    save({"step": 3}, tmp_path, torch_metadata=False)
    assert load({}, tmp_path) == {"step": 3}
    save({}, tmp_path, torch_metadata=False)
    assert load({}, tmp_path) == {}
    assert verify(tmp_path) == []


def test_a_save_in_the_background_leaves_it_out(tmp_path: Path) -> None:
    queue = AsyncCallsQueue()
    queue.schedule_async_request(
        save(state_of(0, 1, 2.0), tmp_path, async_sharded_save=True, torch_metadata=False)
    )
    queue.maybe_finalize_async_calls(blocking=True)
    queue.close()
    assert (tmp_path / ".metadata").read_bytes().startswith(b"\x80\x03cthis")
    assert all(map(torch.equal, tensors_of(load(state_of(0, 1), tmp_path)), tensors_of(state_of(0, 1, 2.0))))


@pytest.mark.parametrize("count", [0, 1, 100])
def test_the_bytes_of_the_file_are_those_of_the_index(tmp_path: Path, count: int) -> None:
    state = {str(n): ShardedTensor.from_rank_offsets(str(n), torch.ones(2)) for n in range(count)}
    save(state, tmp_path)
    with_torch = (tmp_path / ".metadata").read_bytes()
    save(state, tmp_path, torch_metadata=False)
    data = (tmp_path / ".metadata").read_bytes()
    index, same = packed.read(tmp_path / ".metadata"), pickle.loads(with_torch).torch_dcp_backport
    assert index is not None
    assert (index.data, index.sums) == (same["packed"], same["crc32"])
    assert len(index.sums) == 4 * count
    assert len(data) - len(index.data) - len(index.sums) == 450
    assert len(data) < len(with_torch)


def test_readers_of_torch_say_how_it_is_read(tmp_path: Path) -> None:
    save({"w": ShardedTensor.from_rank_offsets("w", torch.arange(4.0))}, tmp_path, torch_metadata=False)
    target = {"w": torch.zeros(4)}
    with pytest.raises(BaseException, match=re.escape(REASON)):
        dcp.load(target, checkpoint_id=tmp_path)
    with pytest.raises(ModuleNotFoundError, match=re.escape(REASON)):
        dcp.FileSystemReader(tmp_path).read_metadata()
    assert torch.equal(target["w"], torch.zeros(4))
    dcp.load(target, storage_reader=CheckedReader(tmp_path))
    assert torch.equal(target["w"], torch.arange(4.0))


def test_a_program_without_this_package_hears_the_same(tmp_path: Path) -> None:
    save({"w": ShardedTensor.from_rank_offsets("w", torch.arange(4.0))}, tmp_path, torch_metadata=False)
    program = (
        "import sys; sys.modules['torch_dcp_backport'] = None\n"
        "import torch, torch.distributed.checkpoint as dcp\n"
        f"dcp.load({{'w': torch.zeros(4)}}, checkpoint_id={str(tmp_path)!r})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ""}
    )
    assert done.returncode
    assert REASON in done.stderr


def test_all_that_looks_at_a_checkpoint_reads_it(tmp_path: Path) -> None:
    plain, alone = tmp_path / "plain", tmp_path / "alone"
    for folder in (plain, alone):
        folder.mkdir()
        save(state_of(0, 1, 1.0), folder, verify_integrity=True, torch_metadata=folder is plain)
    assert list(load_tensors_metadata(alone)) == list(load_tensors_metadata(plain))
    assert list(load_sharded_metadata(alone)) == list(load_sharded_metadata(plain))
    assert load_common_state_dict(alone) == load_common_state_dict(plain) == {"step": 3}
    assert load_plain_tensors(alone).keys() == load_plain_tensors(plain).keys()
    assert CheckedReader(alone).read_metadata() == CheckedReader(plain).read_metadata()
    assert verify(alone) == []
    assert load(state_of(0, 1), alone, verify_integrity=True)["step"] == 3


def test_a_rewritten_index_is_without_torchs_too(tmp_path: Path) -> None:
    save(state_of(0, 1, 1.0), tmp_path, verify_integrity=True, torch_metadata=False)
    remove_sharded_tensors(tmp_path, "columns")
    assert (tmp_path / ".metadata").read_bytes().startswith(b"\x80\x03cthis")
    wanted = {key: value for key, value in state_of(0, 1).items() if key != "columns"}
    assert torch.equal(load(wanted, tmp_path, strict="raise_all")["replica"], torch.arange(700.0) + 1)
    assert "columns.0" not in load_tensors_metadata(tmp_path)
    assert verify(tmp_path) == []


def test_a_file_with_other_bytes_is_refused(tmp_path: Path) -> None:
    """Each byte in turn, and each length: one error of ours, and nothing that was asked for is written."""
    save(
        {"w": ShardedTensor.from_rank_offsets("w", torch.arange(4.0)), "a": 1}, tmp_path, torch_metadata=False
    )
    path, target = tmp_path / ".metadata", torch.full((4,), 7.0)
    whole = path.read_bytes()
    flipped = (whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(len(whole)))
    for data in (*flipped, *(whole[:end] for end in range(0, len(whole), 7))):
        path.write_bytes(data)
        with pytest.raises(CheckpointingException, match=r"\.metadata cannot be read"):
            load({"w": ShardedTensor.from_rank_offsets("w", target)}, tmp_path)
    assert torch.equal(target, torch.full((4,), 7.0))


def test_an_index_that_is_not_understood_is_an_error(tmp_path: Path, monkeypatch: Any) -> None:
    """Of a later release, with a right checksum: there is no index of torch's to take in its place."""
    with monkeypatch.context() as patch:
        patch.setattr(packed, "to_bytes", lambda *_: b"\2\0\0\0\0\0\0\0{}")
        save({"w": ShardedTensor.from_rank_offsets("w", torch.arange(5.0))}, tmp_path, torch_metadata=False)
    with pytest.raises(CheckpointingException, match=r"\.metadata cannot be read: it has no packed index"):
        load({}, tmp_path)
    with pytest.raises(metadata.Refused, match="no packed index"):
        metadata.from_bytes((tmp_path / ".metadata").read_bytes())


@pytest.mark.parametrize("value", ["no", 0, None])
def test_only_a_bool_is_taken(tmp_path: Path, value: Any) -> None:
    text = f"torch_metadata={value!r}: expected a bool, got a {type(value).__name__}"
    with pytest.raises(CheckpointingException, match=re.escape(text)):
        save({"step": 3}, tmp_path, torch_metadata=value)
    assert list(tmp_path.iterdir()) == []


@on_ranks(world=3)
def test_ranks_that_differ_in_it_are_told(room: Any, tmp_path: Path) -> None:
    rank = dist.get_rank()
    with pytest.raises(
        CheckpointingException, match=r"rank 1: .*torch_metadata \(expected True as on rank 0, got False"
    ) as caught:
        save(state_of(rank, 3), tmp_path, torch_metadata=rank != 1)
    texts: list[Any] = [None] * 3
    dist.all_gather_object(texts, str(caught.value))
    assert len(set(texts)) == 1
    assert list(tmp_path.iterdir()) == []
