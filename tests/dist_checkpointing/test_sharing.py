"""Loads in which ranks read together: the same values, every byte from the disk once, faults told on all."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from damaging import flip
from hypothesis import given, settings
from hypothesis import strategies as st
from pool import Pool, RankError
from spreads import differences, same, state_of
from values import Failing

from torch_dcp_backport.dist_checkpointing import CheckpointingException, ShardedObject, ShardedTensor
from torch_dcp_backport.dist_checkpointing._src import sharing
from torch_dcp_backport.dist_checkpointing._src.metadata import Chunk, Index, RecordPlace, Stored
from torch_dcp_backport.dist_checkpointing.serialization import (
    get_default_load_sharded_strategy,
    get_default_save_sharded_strategy,
)
from torch_dcp_backport.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from torch_dcp_backport.regression import meter
from torch_dcp_backport.transfer import Box, whole
from torch_dcp_backport.transfer._src.settings import DEFAULT
from torch_dcp_backport.transfer._src.spread import intersection

MIB = 2**20
SHAPE = (2048, 4096)  # 32 MiB of float32; a quarter of a row has 4 KiB


def reading(room: Any, state: Any, folder: Path, group: Any = None) -> Any:
    strategy = FullyParallelLoadStrategyWrapper(get_default_load_sharded_strategy(folder), group)
    return room.load(state, folder, strategy)


def saved(room: Any, folder: Path, seed: int) -> None:
    strategy = FullyParallelSaveStrategyWrapper(get_default_save_sharded_strategy("torch_dist"))
    room.save(state_of(seed, 0, True), folder, strategy)


def loaded(room: Any, folder: Path, seed: int, spread: int, is_halved: bool) -> list[str]:
    group, world = None, dist.get_world_size()
    if is_halved and world > 1:
        halves = [dist.new_group(range(world // 2)), dist.new_group(range(world // 2, world))]
        group = halves[dist.get_rank() >= world // 2]
    return differences(reading(room, state_of(seed, spread, False), folder, group), seed, spread)


@pytest.mark.parametrize("seed", range(6))
def test_any_spread_to_any_other(ranks: Any, tmp_path: Path, seed: int) -> None:
    old, new = [(4, 4), (4, 3), (3, 4), (1, 4), (4, 1), (2, 4)][seed]
    ranks(saved, tmp_path, seed, world=old)
    for spread in range(3):
        assert ranks(loaded, tmp_path, seed, spread, spread == 2, world=new) == [[]] * new


def part_of(dim: int | None, groups: int = 1, dtype: torch.dtype = torch.float32) -> ShardedTensor:
    """This rank's part of a tensor: cut along an axis within each of some groups of ranks, or whole."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if dim is None:
        return ShardedTensor.from_rank_offsets("w", torch.zeros(SHAPE, dtype=dtype), replica_id=rank)
    cuts = world // groups
    size = list(SHAPE)
    size[dim] //= cuts
    place = (dim, rank % cuts, cuts)
    return ShardedTensor.from_rank_offsets(
        "w", torch.zeros(size, dtype=dtype), place, replica_id=rank // cuts
    )


def values() -> torch.Tensor:
    return torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.float32).view(SHAPE)


def save_large(room: Any, folder: Path) -> None:
    part = part_of(0)
    part.data.copy_(values()[tuple(slice(o, o + n) for o, n in zip(part.global_offset, part.local_shape))])
    room.save({"w": part, "other": torch.tensor([1, 2])}, folder)


def read_large(
    room: Any, folder: Path, dim: int | None, groups: int, dtype: torch.dtype
) -> tuple[int, float]:
    """(bytes that this rank asked of files, peak above what was there)"""
    part = part_of(dim, groups, dtype)
    expected = values()[tuple(slice(o, o + n) for o, n in zip(part.global_offset, part.local_shape))].to(
        dtype
    )
    reading(room, {"w": part}, folder)
    assert torch.equal(part.data, expected)
    part.data.zero_()
    known = meter.forget_peak()
    before = meter.resident()
    reading(room, {"w": part}, folder)
    peak = float(meter.peak_resident() - before) if known else 0.0
    assert torch.equal(part.data, expected)
    return room.storage_report().nbytes, peak


@pytest.mark.parametrize(
    ("dim", "groups", "dtype"),
    [
        (None, 1, torch.float32),  # DDP: replicas of all of it
        (1, 1, torch.float32),  # rows to columns
        (0, 2, torch.float32),  # HSDP
        (1, 2, torch.bfloat16),
    ],
)
def test_every_byte_is_read_once(
    ranks: Any, tmp_path: Path, dim: int | None, groups: int, dtype: torch.dtype
) -> None:
    ranks(save_large, tmp_path)
    results = ranks(read_large, tmp_path, dim, groups, dtype)
    nbytes = 4 * SHAPE[0] * SHAPE[1]
    assert nbytes <= sum(read for read, _ in results) <= 1.02 * nbytes
    assert max(read for read, _ in results) <= 1.1 * nbytes / 4
    # A window, and the buffers of the transfer.
    assert max(peak for _, peak in results) <= 40 * MIB


def damaged(room: Any, folder: Path) -> str:
    part = part_of(None)
    with pytest.raises(CheckpointingException) as caught:
        reading(room, {"w": part}, folder)
    dist.barrier()
    return str(caught.value)


def test_a_flipped_bit_is_told_on_every_rank(ranks: Any, tmp_path: Path) -> None:
    ranks(save_large, tmp_path)
    path = tmp_path / "__2_0.distcp"
    flip(path)
    (text,) = set(ranks(damaged, tmp_path))
    assert "damaged" in text
    assert "__2_0.distcp" in text
    assert "do not use what was being loaded" in text


def objects_of(filled: bool) -> dict[str, ShardedObject]:
    """Objects that all ranks want, that each wants alone, and that the first two want."""
    rank = dist.get_rank()
    state = {
        "all": ShardedObject("all", torch.arange(50_000) if filled else None, (1,), (0,), rank),
        "own": ShardedObject("own", {"rank": rank} if filled else None, (4,), (rank,)),
    }
    if rank < 2:
        state["some"] = ShardedObject("some", list(range(9999)) if filled else None, (1,), (0,), rank)
    return state


def save_objects(room: Any, folder: Path) -> None:
    room.save(objects_of(True), folder)


def read_objects(room: Any, folder: Path, together: bool) -> int:
    """Bytes that this rank asked of files."""
    state: dict[str, Any] = objects_of(False)
    result = reading(room, state, folder) if together else room.load(state, folder)
    assert torch.equal(result["all"], torch.arange(50_000))
    assert result["own"] == {"rank": dist.get_rank()}
    assert result.get("some") == (list(range(9999)) if dist.get_rank() < 2 else None)
    return int(room.storage_report().nbytes)


def test_every_object_is_read_once(ranks: Any, tmp_path: Path) -> None:
    ranks(save_objects, tmp_path)
    stored = sum(path.stat().st_size for path in tmp_path.glob("*.distcp"))
    assert sum(ranks(read_objects, tmp_path, True)) == stored
    assert sum(ranks(read_objects, tmp_path, False)) > 3 * stored


def damaged_object(room: Any, folder: Path) -> str:
    with pytest.raises(CheckpointingException) as caught:
        reading(room, objects_of(False), folder)
    dist.barrier()
    return str(caught.value)


def test_a_flipped_bit_of_an_object_is_told_on_every_rank(ranks: Any, tmp_path: Path) -> None:
    ranks(save_objects, tmp_path)
    flip(max(tmp_path.glob("*.distcp"), key=lambda path: path.stat().st_size))
    (text,) = set(ranks(damaged_object, tmp_path))
    # Of those that only got it, too.
    assert "rank 0: damaged (__0_0.distcp" in text
    assert "ranks 1-3: damaged (all/shard_0_1: __0_0.distcp" in text


def killed(room: Any, folder: Path) -> str:
    """A rank dies between two windows; the others are told, and end."""
    import os

    sharing.PORTION = sharing.WINDOW = 2**20
    native, count = sharing.send, 0

    def send(*args: Any) -> None:
        nonlocal count
        count += 1
        if count == 3 and dist.get_rank() == 3:
            os.kill(os.getpid(), 9)
        native(*args)

    sharing.send = send  # type: ignore[assignment]
    part = part_of(None)
    try:
        reading(room, {"w": part}, folder)
    except CheckpointingException as error:
        return str(error)
    return "nothing was told"


def connected(room: Any) -> None:
    others = [other for other in range(4) if other != dist.get_rank()]
    for work in [call(torch.zeros(1), other) for other in others for call in (dist.isend, dist.irecv)]:
        assert work is not None
        work.wait()


def test_a_rank_that_dies(ranks: Any, tmp_path: Path) -> None:
    ranks(save_large, tmp_path)
    pool = Pool(4, "torch_dcp_backport.dist_checkpointing", timeout=5.0, limit=60.0)
    # The first messages take longest, and more than a timeout on a busy machine.
    pool.run(connected)
    with pytest.raises(RankError) as caught:
        pool.run(killed, tmp_path)
    # No other process died of it.
    assert str(caught.value).count("died") == 1
    assert "the process of rank 3 died" in str(caught.value)


def asks_alone(room: Any, folder: Path, groups: str) -> str:
    """Ranks that do not agree on who reads together."""
    rank = dist.get_rank()
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    part = part_of(None)
    state = {"w": part}
    group = {"half and whole": {0: halves[0]}, "no group": {2: object()}}.get(groups, {}).get(rank)
    load = room.load if groups == "some alone" and rank > 1 else lambda *args: reading(room, *args, group)
    with pytest.raises(CheckpointingException) as caught:
        load(state, folder)
    assert not part.data.any()
    dist.barrier()
    return str(caught.value)


@pytest.mark.parametrize("groups", ["some alone", "half and whole", "no group"])
def test_ranks_with_other_groups_are_told(ranks: Any, tmp_path: Path, groups: str) -> None:
    ranks(save_large, tmp_path)
    (text,) = set(ranks(asks_alone, tmp_path, groups))
    assert ("do not have the same group" in text) or (groups == "no group" and "rank 2" in text)


def twice(room: Any, folder: Path) -> None:
    """One key under two names, once whole and once a part of it."""
    first, second = part_of(None), part_of(0)
    second.replica_id = 99
    reading(room, {"a": first, "b": second}, folder)
    assert torch.equal(first.data, values())
    offset = second.global_offset[0]
    assert torch.equal(second.data, values()[offset : offset + second.local_shape[0]])


def test_two_parts_with_elements_in_common(ranks: Any, tmp_path: Path) -> None:
    ranks(save_large, tmp_path)
    ranks(twice, tmp_path)


def read_columns(room: Any, folder: Path, together: bool) -> tuple[int, float]:
    """(bytes that this rank asked of files, peak above what was there), for a quarter of each row."""
    part = part_of(1)
    start = part.global_offset[1]
    expected = values()[:, start : start + part.local_shape[1]]
    room.load({"w": part}, folder, read_together=together)
    part.data.zero_()
    known = meter.forget_peak()
    before = meter.resident()
    room.load({"w": part}, folder, read_together=together)
    peak = float(meter.peak_resident() - before) if known else 0.0
    assert torch.equal(part.data, expected)
    return int(room.storage_report().nbytes), peak


def test_load_reads_together_when_told_to(ranks: Any, tmp_path: Path) -> None:
    ranks(save_large, tmp_path)
    nbytes = 4 * SHAPE[0] * SHAPE[1]
    results = ranks(read_columns, tmp_path, True)
    assert nbytes <= sum(read for read, _ in results) <= 1.02 * nbytes
    assert max(peak for _, peak in results) <= DEFAULT
    assert sum(read for read, _ in ranks(read_columns, tmp_path, False)) > 3 * nbytes


def some_tensors(seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    dtypes = [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.float8_e4m3fn]
    shapes = [(40, 24), (9, 7, 5), (3, 50), (), (64,)]
    tensors = zip(dtypes, shapes)
    return {str(dtype): torch.randint(0, 2, shape, generator=draw).to(dtype) for dtype, shape in tensors}


def boxes_at_random(shape: tuple[int, ...], draw: random.Random) -> list[Box]:
    """Boxes that may have elements in common, and some without any."""
    spans = [[sorted(draw.choices(range(extent + 1), k=2)) for extent in shape] for _ in range(4)]
    boxes = [Box(tuple(a for a, _ in span), tuple(b - a for a, b in span)) for span in spans]
    return [*boxes[: draw.randint(0, 4)], *draw.sample([whole(shape)], draw.randint(0, 1))]


def save_tensors(room: Any, folder: Path, seed: int) -> None:
    tensors = some_tensors(seed).items()
    room.save(
        {key: ShardedTensor.from_rank_offsets(key, t, replica_id=dist.get_rank()) for key, t in tensors},
        folder,
    )


def load_boxes(room: Any, folder: Path, seed: int) -> list[str]:
    """What two loads together and one alone did not bring, of boxes that each rank has drawn."""
    draw, wrong = random.Random(f"{seed} {dist.get_rank()}"), []
    native = sharing.PORTION, sharing.WINDOW
    sharing.PORTION, sharing.WINDOW = 256, 1024
    try:
        state: dict[str, list[ShardedTensor]] = {}
        for key, tensor in some_tensors(seed).items():
            shape = tuple(tensor.shape)
            state[key] = [
                ShardedTensor(key, None, tensor.dtype, box.size, shape, box.offset, None)
                for box in boxes_at_random(shape, draw)
            ]
        for together in (True, True, False):
            loaded = room.load(state, folder, validate_access_integrity=False, read_together=together)
            for key, tensor in some_tensors(seed).items():
                for got, part in zip(loaded[key], state[key]):
                    box = Box(part.global_offset, part.local_shape)
                    if not same(got, tensor[box.within(whole(tuple(tensor.shape)))]):
                        wrong.append(f"{key} {box} {together}")
    finally:
        sharing.PORTION, sharing.WINDOW = native
    return wrong


@pytest.mark.parametrize("world", [3, 4])
def test_ranks_that_want_unlike_boxes(ranks: Any, tmp_path: Path, world: int) -> None:
    for seed in range(3):
        folder = tmp_path / str(seed)
        folder.mkdir()
        ranks(save_tensors, folder, seed, world=4)
        assert ranks(load_boxes, folder, seed, world=world) == [[]] * world


def load_into_failing(room: Any, folder: Path) -> str:
    native = sharing.PORTION, sharing.WINDOW
    sharing.PORTION = sharing.WINDOW = 2**20  # many exchanges, of which none leaves a rank alone
    part = part_of(None)
    if dist.get_rank() == 2:
        part = replace(part, data=part.data.as_subclass(Failing))
    try:
        with pytest.raises(CheckpointingException) as caught:
            room.load({"w": part}, folder, read_together=True)
    finally:
        sharing.PORTION, sharing.WINDOW = native
    dist.barrier()
    return str(caught.value)


def test_a_destination_that_fails_is_told_on_every_rank(ranks: Any, tmp_path: Path) -> None:
    ranks(save_large, tmp_path)
    (text,) = set(ranks(load_into_failing, tmp_path))
    assert "rank 2: ValueError: no values are taken: w" in text
    assert "do not use what was being loaded" in text


def empty_part() -> ShardedTensor:
    return ShardedTensor.from_rank_offsets("empty", torch.zeros(0), replica_id=dist.get_rank())


def save_empty(room: Any, folder: Path) -> None:
    room.save({"empty": empty_part()}, folder)


def load_empty(room: Any, folder: Path, together: bool) -> str:
    with pytest.raises(CheckpointingException) as caught:
        room.load({"empty": empty_part()}, folder, read_together=together)
    dist.barrier()
    return str(caught.value)


def test_a_damaged_record_without_values_is_told_both_ways(ranks: Any, tmp_path: Path) -> None:
    ranks(save_empty, tmp_path)
    (path,) = [path for path in tmp_path.glob("*.distcp") if path.stat().st_size]
    path.write_bytes(bytes(path.stat().st_size))
    (text,) = {text for together in (True, False) for text in ranks(load_empty, tmp_path, together)}
    assert "ranks 0-3: damaged (empty: " in text


def load_many_boxes(room: Any, folder: Path) -> int:
    """Bytes that this rank asked of files for the same 2,048 rows as all ranks."""
    part = part_of(None)
    rows = [
        ShardedTensor(
            "w",
            part.data[row : row + 1],
            torch.float32,
            (1, SHAPE[1]),
            SHAPE,
            (row, 0),
            None,
            dist.get_rank(),
        )
        for row in range(SHAPE[0])
    ]
    room.load({"w": rows}, folder, validate_access_integrity=False, read_together=True)
    assert torch.equal(part.data, values())
    return int(room.storage_report().nbytes)


def test_a_tensor_of_many_boxes_is_read_by_each_rank_alone(ranks: Any, tmp_path: Path) -> None:
    ranks(save_large, tmp_path)
    assert min(ranks(load_many_boxes, tmp_path)) >= 4 * SHAPE[0] * SHAPE[1]


@pytest.mark.parametrize("count", [sharing.MOST_BOXES, sharing.MOST_BOXES + 1])
def test_the_most_boxes_of_a_common_plan(count: int) -> None:
    shape, index = (4 * count,), Index()
    index.tensors["w"] = Stored(torch.float32, shape, [Chunk(whole(shape), RecordPlace("f", 0, 1))])
    boxes = [Box((4 * number,), (3,)) for number in range(count)]
    half = count // 2
    wants = {0: (("w", tuple(boxes)),), 1: (("w", tuple(boxes[half:])),)}
    shares = sharing.shared_out(index, wants)
    assert bool(shares.portions) == (count <= sharing.MOST_BOXES)
    if not shares.portions:
        assert [box for _, _, box in shares.alone[1]] == boxes[half:]


def loaded_both_ways(room: Any, folder: Path, seed: int, spread: int) -> list[str]:
    found = []
    for together in (True, False):
        state = room.load(state_of(seed, spread, False), folder, read_together=together)
        found += differences(state, seed, spread)
    return found


def test_read_together_has_the_values_of_each_rank_alone(ranks: Any, tmp_path: Path) -> None:
    for seed in (1, 2):
        folder = tmp_path / str(seed)
        folder.mkdir()
        ranks(saved, folder, seed, world=4)
        for spread in range(3):
            assert ranks(loaded_both_ways, folder, seed, spread, world=3) == [[]] * 3


def told(room: Any, folder: Path, by_rank: list[Any]) -> str:
    part = part_of(None)
    with pytest.raises(CheckpointingException) as caught:
        room.load({"w": part}, folder, read_together=by_rank[dist.get_rank()])
    assert not part.data.any()
    dist.barrier()
    return str(caught.value)


@pytest.mark.parametrize(
    ("by_rank", "says"),
    [
        ([True, True, False, False], ["do not have the same group"]),
        ([True, True, "no", True], ["rank 2", "read_together='no': expected a bool, got a str"]),
    ],
    ids=["on some ranks", "no bool"],
)
def test_read_together_that_cannot_be_is_told_on_all(
    ranks: Any, tmp_path: Path, by_rank: list[Any], says: list[str]
) -> None:
    ranks(save_large, tmp_path)
    (text,) = set(ranks(told, tmp_path, by_rank))
    assert all(part in text for part in says), text


def test_another_format_is_refused() -> None:
    with pytest.raises(CheckpointingException, match=r"no such format: 'zarr' \(there is torch_dist alone\)"):
        get_default_save_sharded_strategy("zarr")


@st.composite
def wants(draw: Any) -> tuple[Index, dict[int, sharing.Wants]]:
    """A stored tensor in a grid of chunks, and disjoint boxes that ranks want of it."""
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=0, max_size=3)))

    def grid() -> list[Box]:
        boxes = [Box((0,) * len(shape), shape)]
        for dim, extent in enumerate(shape):
            place = draw(st.integers(0, extent))
            if 0 < place < extent:
                boxes = [part for box in boxes for part in (box.head(dim, place), box.tail(dim, place))]
        return boxes

    chunks = [Chunk(box, RecordPlace("f", number, 1)) for number, box in enumerate(grid())]
    index = Index()
    index.tensors["w"] = Stored(torch.float32, shape, chunks)
    by_rank = {}
    for rank in range(draw(st.integers(1, 4))):
        boxes = [box for box in grid() if draw(st.booleans())]
        by_rank[rank] = (("w", tuple(boxes)),)
    return index, by_rank


@settings(deadline=None)
@given(wants(), st.sampled_from([16, 64, sharing.PORTION]))
def test_what_is_shared_out_is_what_was_wanted(case: Any, portion: int) -> None:
    index, by_rank = case
    native, sharing.PORTION = sharing.PORTION, portion
    try:
        shares = sharing.shared_out(index, by_rank)
    finally:
        sharing.PORTION = native
    everything = Box((0,) * len(index.tensors["w"].shape), index.tensors["w"].shape)

    def count(boxes: Iterable[Box]) -> torch.Tensor:
        counts = torch.zeros(everything.size, dtype=torch.int64)
        for box in boxes:
            counts[box.within(everything)] += 1
        return counts

    for rank, rows in by_rank.items():
        got = [box for _, _, box in shares.alone[rank]]
        got += [box for one in shares.portions for taker, box in one.parts if taker == rank]
        assert torch.equal(count(got), count(rows[0][1]))
    # Read once, by one of those that want it, for at least one other.
    assert count(one.box for one in shares.portions).max() <= 1
    for one in shares.portions:
        takers = {taker for taker, _ in one.parts}
        assert one.reader in takers
        assert len(takers) > 1
        assert all(intersection(one.box, box) == box for _, box in one.parts)
    parts = [(one.chunk, one.box) for one in shares.portions]
    parts += [(chunk, box) for listed in shares.alone.values() for _, chunk, box in listed]
    assert all(intersection(chunk.box, box) == box for chunk, box in parts)
