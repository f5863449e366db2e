"""Plans of saves: used again where every rank has what it had, and never anything else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from torch_dcp_backport import dist_checkpointing as room
from torch_dcp_backport.dist_checkpointing import CheckpointingException, ShardedObject, ShardedTensor
from torch_dcp_backport.dist_checkpointing._src import columns, metadata, plans
from torch_dcp_backport.dist_checkpointing._src.metadata import Chunk, Index, RecordPlace, Stored
from torch_dcp_backport.transfer import Box


def state_of(value: float, text: str = "x", rows: int = 2) -> dict[str, Any]:
    rank = dist.get_rank() if dist.is_initialized() else 0
    world = dist.get_world_size() if dist.is_initialized() else 1
    large = torch.full((30_000,), value + rank)
    return {
        "cut": ShardedTensor.from_rank_offsets("cut", torch.full((rows, 3), value + rank), (0, rank, world)),
        "large": ShardedTensor.from_rank_offsets("large", large, (0, rank, world)),
        "replica": ShardedTensor.from_rank_offsets("replica", torch.full((99,), value), replica_id=rank),
        "rng": ShardedObject("rng", text, (world,), (rank,)),
        "step": value,
    }


def is_equal(loaded: dict[str, Any], saved: dict[str, Any]) -> bool:
    names = ("cut", "large", "replica")
    values = [(loaded["rng"], loaded["step"]), (saved["rng"].data, saved["step"])]
    return values[0] == values[1] and all(torch.equal(loaded[name], saved[name].data) for name in names)


def planned(room: Any, folder: Path) -> list[tuple[bool, bool]]:
    """For saves that follow each other: whether a plan was made for it, and whether all came back."""
    plans.forget()
    rank, outcomes = dist.get_rank(), []
    cases = [
        state_of(1.0),
        state_of(2.0),  # the same again, with other values
        state_of(3.0, "another text, and longer"),  # an object of another size
        state_of(4.0, "another text, and longer"),
        state_of(5.0, rows=3),  # another shape
        state_of(6.0, rows=3),
    ]
    more = state_of(7.0, rows=3)
    if rank == 1:  # one rank has one entry more
        more["extra"] = ShardedTensor.from_rank_offsets("extra", torch.ones(3))
    # The other ranks have kept the plan with it.
    cases += [more, state_of(8.0, rows=3), state_of(9.0, rows=3)]
    for number, state in enumerate(cases):
        place = folder / str(number)
        place.mkdir(exist_ok=True)
        dist.barrier()
        room.save(state, place)
        is_new = "planning" in room.storage_report().seconds
        extra = state.pop("extra", None)
        asked = state_of(0.0, rows=len(state["cut"].data))
        if extra is not None:
            asked["extra"] = extra
        outcomes.append((is_new, is_equal(room.load(asked, place), state)))
    return outcomes


def test_a_plan_is_used_again_where_nothing_has_changed_on_any_rank(ranks: Any, tmp_path: Path) -> None:
    for outcomes in ranks(planned, tmp_path):
        assert [is_right for _, is_right in outcomes] == [True] * len(outcomes)
        assert [is_new for is_new, _ in outcomes] == [
            True,
            False,
            False,
            False,
            True,
            False,
            True,
            True,
            False,
        ]
    for folder in tmp_path.iterdir():
        assert room.verify(folder) == []


def disagreeing(room: Any, folder: Path) -> list[str]:
    """A save that is planned, one that cannot be, and the first again: one rank has forgotten its plan."""
    plans.forget()
    room.save(state_of(1.0), folder)
    if dist.get_rank() == 3:
        plans.forget()
    room.save(state_of(2.0), folder)
    forgotten = "planning" in room.storage_report().seconds
    texts = []
    for wrong in (True, False):
        state = state_of(3.0)
        if wrong and dist.get_rank() == 1:
            state["cut"].replica_id = 1
        try:
            room.save(state, folder)
        except CheckpointingException as error:
            texts.append(str(error))
    state = state_of(0.0)
    assert is_equal(room.load(state, folder), state_of(3.0))
    return [str(forgotten), *texts]


def test_what_is_wrong_is_found_beside_a_plan(ranks: Any, tmp_path: Path) -> None:
    (outcome,) = set(map(tuple, ranks(disagreeing, tmp_path)))
    assert outcome[0] == "True"
    assert "no main replica of [2:4, 0:3]: cut" in outcome[1]
    assert len(outcome) == 2


def test_few_plans_are_kept_and_no_value(tmp_path: Path) -> None:
    plans.forget()
    for rows in range(2, 7):
        room.save(state_of(1.0, rows=rows), tmp_path)
    assert len(plans._kept) == plans.MOST
    value = state_of(1.0)
    room.save(value, tmp_path)
    value["replica"].data.fill_(5.0)
    room.save(value, tmp_path)
    assert torch.equal(room.load(state_of(0.0), tmp_path)["replica"], torch.full((99,), 5.0))


@pytest.mark.parametrize("count", [1, 41, 70])
@pytest.mark.parametrize("common", [None, (0, 0), (2**40, 0xFFFFFFFF)])
def test_checksums_are_filled_into_the_description(count: int, common: Any) -> None:
    index = Index()
    for number in range(count):
        # Checksums and keys that look like the bytes that stand for unknown ones.
        place = RecordPlace("__0_0.distcp", 0xA5A5 + 100 * number, 0xA5, 0xA5A5A5A5)
        key = "\xa5" * (number + 1)
        index.tensors[key] = Stored(torch.int8, (4,), [Chunk(Box((0,), (4,)), place)])
    index.is_ours, index.common = True, common
    beginning = columns.Beginning()
    b"".join(columns.Content(metadata.listing_of(index), beginning))
    assert beginning.data is not None
    sums = [0x01020304 * (number + 1) % 2**32 for number in range(count)]
    for crc, stored in zip(sums, index.tensors.values()):
        stored.chunks = [chunk._replace(place=chunk.place._replace(crc=crc)) for chunk in stored.chunks]
    data = b"".join(columns.Content(metadata.listing_of(index), beginning))
    assert data == metadata.to_bytes(index)
    found = metadata.from_bytes(data)
    assert [stored.chunks[0].place.crc for stored in found.tensors.values()] == sums
    assert found.common == common


AGAIN = """
import sys
import torch, torch.distributed as dist
from torch_dcp_backport.dist_checkpointing import ShardedTensor, load, save
own, folder = int(sys.argv[1]), sys.argv[2]
for step, rank in enumerate((own, (0, 2, 1)[own])):  # two processes change places
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet{step}", rank=rank, world_size=3)

    def state(value):
        # Replicas of one size: which rank writes which is all that differs.
        parts = {f"w{n}": torch.full((1000,), value * (step * 10.0 + n)) for n in range(6)}
        made = ShardedTensor.from_rank_offsets
        return {name: made(name, part, replica_id=rank) for name, part in parts.items()}

    save(state(1.0), f"{folder}/{step}")
    loaded = load(state(0.0), f"{folder}/{step}")
    assert all(torch.equal(loaded[name], part.data) for name, part in state(1.0).items()), (step, rank)
    dist.destroy_process_group()
"""


def test_processes_that_change_places(tmp_path: Path) -> None:
    """A restart within the processes: each wrote what the rank that it had been was to write."""
    for step in range(2):
        (tmp_path / str(step)).mkdir()
    command = [sys.executable, "-c", AGAIN]
    ranks = [subprocess.Popen([*command, str(rank), str(tmp_path)]) for rank in range(3)]
    assert [rank.wait(120) for rank in ranks] == [0, 0, 0]


def test_a_content_that_was_not_made_to_its_end_is_made_anew() -> None:
    index = Index()
    place = RecordPlace("__0_0.distcp", 0, 100, 7)
    index.tensors["w"] = Stored(torch.int8, (4,), [Chunk(Box((0,), (4,)), place)])
    beginning = columns.Beginning()
    for _ in columns.Content(metadata.listing_of(index), beginning):
        break  # a disk that is full
    assert beginning.data is None
    content = columns.Content(metadata.listing_of(index), beginning)
    assert b"".join(content) == b"".join(content) == metadata.to_bytes(index)
