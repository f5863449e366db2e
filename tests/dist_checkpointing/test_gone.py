"""A rank that is late or killed, in any round of a call: the error of the others names it, and no other."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool, RankError

from torch_dcp_backport.dist_checkpointing import ShardedTensor
from torch_dcp_backport.transfer._src import object_collectives

WORLD = 4
#: Seconds: of the backend, and of the rank that is late.
TIMEOUT, LATE = 8.0, 13.0


@pytest.fixture
def pool() -> Iterator[Pool]:
    pool = Pool(WORLD, "torch_dcp_backport.dist_checkpointing", timeout=TIMEOUT, limit=60.0)
    yield pool
    pool.close()


def rows() -> ShardedTensor:
    return ShardedTensor.from_rank_offsets("w", torch.ones(2, 3), (0, dist.get_rank(), WORLD))


def saved(room: Any, folder: str) -> None:
    room.save({"w": rows()}, folder)


def told(room: Any, folder: str, call: str, victim: int, kill: bool, rounds: int) -> str:
    """Save or load; one rank fails to come to a round. The error of the others."""
    begin, count = object_collectives.Round.__init__, 0

    def failing(*args: Any) -> None:
        nonlocal count
        if count == rounds:
            if kill:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(LATE)
        count += 1
        begin(*args)

    if dist.get_rank() == victim:
        object_collectives.Round.__init__ = failing
    try:
        getattr(room, call)({"w": rows()}, folder)
    except room.CheckpointingException as error:
        text = str(error).replace("\n", " ")
        if dist.get_rank() == victim:
            return ""
        raise AssertionError(f"TOLD {text}") from None
    return "no error"


#: (the call, the rank, whether it is killed and not late, the round that it does not come to)
CASES = [
    ("save", 0, True, 1),
    ("load", 0, True, 0),
    ("load", 0, False, 0),
    ("save", 2, True, 0),
    ("load", 2, True, 1),
    ("save", 2, False, 1),
    ("load", 2, False, 0),
]


@pytest.mark.parametrize(("call", "victim", "kill", "rounds"), CASES)
def test_it_is_named(pool: Pool, tmp_path: Path, call: str, victim: int, kill: bool, rounds: int) -> None:
    pool.run(saved, str(tmp_path))
    with pytest.raises(RankError) as caught:
        pool.run(told, str(tmp_path), call, victim, kill, rounds)
    errors = re.findall("AssertionError: TOLD (.*)", str(caught.value))
    assert len(errors) == WORLD - 1, str(caught.value)
    named = f"rank {victim}(: the rank)? is gone, or too late|, and rank {victim} did not come;"
    for error in errors:
        assert re.search(named, error), error
        assert len(re.findall("gone, or too late|did not come", error)) == 1, error
