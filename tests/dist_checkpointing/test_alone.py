"""What fails on one rank alone, wherever that is, is one error on every rank: no other rank waits for it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from torch_dcp_backport.dist_checkpointing import (
    CheckpointingException,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from torch_dcp_backport.dist_checkpointing._src import load
from torch_dcp_backport.dist_checkpointing.training_state import load_training_state, save_training_state
from torch_dcp_backport.dist_checkpointing.validation import determine_global_metadata
from torch_dcp_backport.transfer._src import object_collectives, wire

WORLD = 2


def rows(data: Any = None, **kwargs: Any) -> ShardedTensor:
    """This rank's half of a tensor."""
    data = torch.ones(2, 3) if data is None else data
    return ShardedTensor.from_rank_offsets("w", data, (0, dist.get_rank(), WORLD), **kwargs)


def sparse() -> ShardedTensor:
    return rows(torch.ones(2, 3).to_sparse())


def stacked_sparse() -> ShardedTensor:
    data = torch.ones(2, 3).to_sparse_csr()
    return ShardedTensor("w", data, data.dtype, (2, 3), (WORLD, 2, 3), (1, 0, 0), None, 0, 1)


def failing(*_: Any) -> Any:
    raise RuntimeError("no such part")


def built(key: str, data: Any, replica_id: Any, flattened_range: Any) -> Any:
    return {"all": rows(data, replica_id=replica_id)}


def merged(parts: Any) -> Any:
    return parts["all"]


def factory(merge: Callable[..., Any], build: Callable[..., Any] = built) -> ShardedTensorFactory:
    return ShardedTensorFactory("w", torch.zeros(2, 3), build, merge)


def load_unopened(room: Any, folder: str, bad: bool, **options: Any) -> None:
    """A load for which a rank cannot open what the first rank sent."""
    error = {"side_effect": MemoryError("no room")} if bad else {"wraps": load.opened}
    with mock.patch.object(load, "opened", **error):
        room.load({"w": rows()}, folder, **options)


class Strange:
    """A folder whose path cannot be asked for."""

    def __fspath__(self) -> str:
        raise OSError("not mounted")


class Case:
    """What rank 1 does, where rank 0 does what is right; and words of the error."""

    def __init__(self, call: Callable[[Any, str, bool], Any], words: str) -> None:
        self.call = call
        self.words = words


CASES = {
    "a save to no folder": Case(
        lambda room, folder, bad: room.save({"w": rows()}, None if bad else folder), "rank 1: TypeError"
    ),
    "a save to a folder that cannot be asked for": Case(
        lambda room, folder, bad: room.save({"w": rows()}, Strange() if bad else folder),
        "rank 1: OSError: not mounted",
    ),
    "a load from no folder": Case(
        lambda room, folder, bad: room.load({"w": rows()}, None if bad else folder), "rank 1: TypeError"
    ),
    "a mode that is none": Case(
        lambda room, folder, bad: room.load({"w": rows()}, folder, strict="all" if bad else "raise_all"),
        "rank 1: ValueError: strict='all': expected one of assume_ok_unexpected",
    ),
    "a sparse tensor saved": Case(
        lambda room, folder, bad: room.save({"w": sparse() if bad else rows()}, folder),
        r"rank 1: a tensor without values in memory: w \(Tensor of layout torch.sparse_coo\)",
    ),
    "a sparse tensor in a stack": Case(
        lambda room, folder, bad: room.save({"w": stacked_sparse() if bad else rows()}, folder),
        r"rank 1: a tensor without values in memory: w \(Tensor of layout torch.sparse_csr\)",
    ),
    "a sparse tensor loaded into": Case(
        lambda room, folder, bad: room.load({"w": sparse() if bad else rows()}, folder),
        r"rank 1: a tensor cannot be written: w \(Tensor of layout torch.sparse_coo\)",
    ),
    "a replica that is no number": Case(
        lambda room, folder, bad: room.save({"w": rows(replica_id=[0] if bad else 0)}, folder),
        r"rank 1: w: \[0\] is a list, and not an int",
    ),
    "a replica of an object that is no number": Case(
        lambda room, folder, bad: room.load(
            {"o": ShardedObject("o", 1, (1,), (0,), None if bad else 0)}, folder
        ),
        "rank 1: o: None is a NoneType, and not an int",
    ),
    "plain tensors of no folder": Case(
        lambda room, folder, bad: room.load_plain_tensors(None if bad else folder), "rank 1: TypeError"
    ),
    "a factory that does not build": Case(
        lambda room, folder, bad: room.load({"w": factory(merged, failing if bad else built)}, folder),
        "rank 1: RuntimeError: no such part",
    ),
    "a factory that does not merge": Case(
        lambda room, folder, bad: room.load({"w": factory(failing if bad else merged)}, folder),
        "do not use what was being loaded.\n  rank 1: RuntimeError: no such part",
    ),
    "a checkpoint that cannot be opened": Case(load_unopened, "rank 1: MemoryError: no room"),
    "a checkpoint that cannot be opened, with its checksums": Case(
        lambda room, folder, bad: load_unopened(room, folder, bad, verify_integrity=True),
        "rank 1: MemoryError: no room",
    ),
    "parts that cannot be gathered": Case(
        lambda room, folder, bad: determine_global_metadata({"w": (rows(),) if bad else rows()}),
        "rank 1: w is in a tuple",
    ),
    "names that are taken": Case(
        lambda room, folder, bad: save_training_state(
            folder, nn.Linear(2, 2), extra={"model": 1} if bad else {}
        ),
        "rank 1: extra may not have model",
    ),
    "a further state that is none": Case(
        lambda room, folder, bad: load_training_state(folder, nn.Linear(2, 2), extra=1 if bad else {}),
        "rank 1: TypeError",
    ),
}


def saved(room: Any, folder: str) -> None:
    room.save({"w": rows()}, folder)


def told(room: Any, folder: str, case: str) -> str:
    try:
        CASES[case].call(room, folder, dist.get_rank() == 1)
    except CheckpointingException as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("case", CASES)
def test_what_one_rank_alone_does_wrong_is_told_on_every_rank(ranks: Any, tmp_path: Path, case: str) -> None:
    ranks(saved, str(tmp_path), world=WORLD)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    texts = ranks(told, str(tmp_path), case, world=WORLD)
    assert len(set(texts)) == 1, texts
    assert re.search(CASES[case].words, texts[0]), texts[0]
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def too_long(room: Any, folder: str, rank: int) -> str:
    """A load in which one rank, or the first one's answer, has more to say than a message takes."""
    if dist.get_rank() == rank:
        object_collectives.MOST = object_collectives.SPARE + 60
    try:
        room.load({"w": rows()}, folder)
    except CheckpointingException as error:
        return str(error)
    finally:
        object_collectives.MOST = wire.MOST
    return "no error"


@pytest.mark.parametrize("rank", range(WORLD))
def test_a_message_that_is_too_long_is_told(ranks: Any, tmp_path: Path, rank: int) -> None:
    ranks(saved, str(tmp_path), world=WORLD)
    texts = ranks(too_long, str(tmp_path), rank, world=WORLD)
    assert len(set(texts)) == 1, texts
    assert re.search(f"rank {rank}: a message of [0-9]+ bytes, where 60 are the most", texts[0]), texts[0]
