"""The index of a checkpoint: planned and written from columns, packed, and read again as the same boxes."""

from __future__ import annotations

import contextlib
import itertools
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import MetadataIndex

from torch_dcp_backport.dist_checkpointing import (
    CheckpointingException,
    ShardedObject,
    ShardedTensor,
    load,
    save,
)
from torch_dcp_backport.dist_checkpointing._src import metadata, packed, plans
from torch_dcp_backport.dist_checkpointing._src.body import Output, RecordInfo
from torch_dcp_backport.dist_checkpointing._src.metadata import RecordPlace
from torch_dcp_backport.dist_checkpointing._src.records import form_of
from torch_dcp_backport.dist_checkpointing._src.table import (
    ObjectRow,
    Row,
    RowTable,
    alike_of,
    covered,
    findings_of,
    overlapping,
)
from torch_dcp_backport.dist_checkpointing._src.unpickle import Refused
from torch_dcp_backport.transfer import Box

#: Extents of a mesh: replicas, shards of the first axis, shards of the last axis.
MESHES = st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3))
SHAPES = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 9)) | st.tuples(st.integers(0, 9)) | st.just(())
)
LARGE = (700, 900)


def part_of(extent: int, part: int, parts: int) -> tuple[int, int]:
    """As FSDP2 cuts: (start, size), of which the last ones may be empty."""
    each = -(-extent // parts)
    start = min(part * each, extent)
    return start, min(each, extent - start)


def tables_of(mesh: tuple[int, int, int], shapes: list[tuple[int, ...]], turned: bool) -> dict[int, RowTable]:
    """The tables of a mesh's ranks; each third tensor is of one group of ranks alone, as experts are."""
    replicas, rows, columns = mesh
    places = list(itertools.product(range(replicas), range(rows), range(columns)))
    tables = {}
    for rank, (replica, row, column) in enumerate(
        sorted(places, key=lambda place: place[::-1]) if turned else places
    ):
        own = []
        for number, shape in enumerate(shapes):
            cuts = [(0, extent) for extent in shape]
            is_expert, is_main = number % 3 == 2, replica == 0
            if is_expert and column != number % columns:
                continue
            if shape:
                cuts[0] = part_of(shape[0], row, rows)
            if len(shape) > 1 and not is_expert:
                cuts[-1] = part_of(shape[-1], column, columns)
            else:
                is_main = is_main and (column == 0 or is_expert)
            is_main = is_main and (bool(shape) or row == 0)
            dtype = torch.float32 if number % 2 else torch.bfloat16
            offset, size = tuple(start for start, _ in cuts), tuple(size for _, size in cuts)
            own.append(Row(f"w{number}", dtype, shape, offset, size, is_main))
        tables[rank] = RowTable(own, [ObjectRow("rng", f"rng/shard_{rank}_{len(places)}", (len(places),))])
    return tables


def written(tables: dict[int, RowTable], plan: plans.Plan) -> dict[int, tuple[plans.WriteShare, Output]]:
    """What each rank has written by its share, which it was sent."""
    results = {}
    crc = 0
    for rank, sent in plan.shares().items():
        share = pickle.loads(pickle.dumps(sent)).share_of(tables[rank].rows().outline)
        at, records = 0, []
        for item in share.tensors:
            crc = (crc + 0x9E3779B1) % 2**32
            length = form_of(tables[rank].tensors[item.number].dtype, item.box.size).length
            records.append(RecordInfo(at, length, crc))
            at += length
        objects = [RecordInfo(at + 10 * number, 10, rank) for number in share.objects]
        output = Output(f"__{rank}_0.distcp", at, records, objects)
        results[rank] = share, pickle.loads(pickle.dumps(output))
    return results


@settings(deadline=None, max_examples=60)
@given(MESHES, SHAPES, st.booleans(), st.booleans())
def test_an_index_has_what_the_ranks_have_written(
    tmp_path_factory: Any,
    mesh: tuple[int, int, int],
    shapes: list[tuple[int, ...]],
    turned: bool,
    balanced: bool,
) -> None:
    """Uneven parts, empty parts, replicas, tensors of some ranks alone; packed, and as torch has it."""
    shapes = [*shapes, LARGE, *shapes, (), LARGE]
    tables = tables_of(mesh, shapes, turned)
    assert findings_of(tables) == []
    plan = plans.plan_of(alike_of(tables), balanced)
    by_rank = written(tables, plan)
    path = tmp_path_factory.mktemp("index") / metadata.NAME
    description = plans.Description(plan)
    outputs = {rank: output for rank, (_, output) in by_rank.items()}
    path.write_bytes(description.to_bytes(outputs, (1, 2)))
    assert path.read_bytes() == description.to_bytes(outputs, (1, 2))

    expected: dict[str, dict[Box, RecordPlace]] = {}
    for rank, (share, output) in by_rank.items():
        for item, record in zip(share.tensors, output.tensors):
            row = tables[rank].tensors[item.number]
            boxes = expected.setdefault(row.key, {})
            assert item.box not in boxes
            boxes[item.box] = RecordPlace(output.file, *record)
    for key, boxes in expected.items():
        shape = shapes[int(key[1:])]
        assert overlapping(boxes) is None
        assert covered(boxes) == torch.Size(shape).numel()

    found = packed.read(path)
    assert found is not None
    whole, few = metadata.from_bytes(path.read_bytes()), metadata.from_packed(found)
    theirs = pickle.loads(path.read_bytes())
    for index in (whole, few):
        assert {
            key: {chunk.box: chunk.place for chunk in stored.chunks} for key, stored in index.tensors.items()
        } == expected
        assert all(index.tensors[key].shape == shapes[int(key[1:])] for key in expected)
        assert len(index.objects) == len(tables)
        assert index.common == (1, 2)
    assert few.ends == whole.ends
    assert few.order == whole.order == list(theirs.state_dict_metadata)
    for key, boxes in expected.items():
        for box, place in boxes.items():
            info = theirs.storage_data[MetadataIndex(key, torch.Size(box.offset))]
            assert (info.relative_path, info.offset, info.length) == place[:3]
            assert list(few.tensors[key].parts_of(box)) == [(metadata.Chunk(box, place), box)]
        if shapes[int(key[1:])] == LARGE:
            part = Box((3, 5), (600, 800))
            pieces = sorted(whole.tensors[key].parts_of(part), key=lambda pair: pair[1].offset)
            assert sorted(few.tensors[key].parts_of(part), key=lambda pair: pair[1].offset) == pieces


def packed_of_some() -> bytes:
    tables = tables_of((2, 2, 2), [(5, 3), (4,), (6, 6), ()], False)
    plan = plans.plan_of(alike_of(tables))
    outputs = {rank: output for rank, (_, output) in written(tables, plan).items()}
    return plans.Description(plan).content(outputs, (1, 2)).index


@settings(deadline=None)
@given(st.data())
def test_a_packed_index_with_other_bytes_is_refused_or_read(data: Any) -> None:
    """Its checksum is compared before; what gets by that is no error of another kind, and takes no memory."""
    whole = bytearray(packed_of_some())
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    content = bytes(whole[: data.draw(st.sampled_from((len(whole), len(whole) // 2, 9, 0)))])
    with contextlib.suppress(Refused):
        for block in packed.from_bytes(content).blocks:
            list(packed.boxes_of(block))


def test_parts_without_elements_that_nothing_checks() -> None:
    tables = {rank: RowTable([Row("w", torch.float32, (4,), (4,), (0,))]) for rank in range(2)}
    plan = plans.plan_of(alike_of(tables))
    outputs = {rank: output for rank, (_, output) in written(tables, plan).items()}
    content = plans.Description(plan).content(outputs, None)
    index = metadata.from_bytes(b"".join(content))
    assert (index.tensors["w"].shape, list(index.tensors["w"].chunks)) == ((4,), [])
    few = metadata.from_packed(packed.Packed(content.index, b"", None))
    assert (few.tensors["w"].shape, list(few.tensors["w"].chunks), few.ends) == ((4,), [], {})


def small_of(path: Path) -> bytes:
    index = metadata.from_bytes(path.read_bytes())
    return metadata.to_bytes(index)


def state_of(value: float) -> dict[str, Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    made = ShardedTensor.from_rank_offsets
    return {
        **{f"w{n}": made(f"w{n}", torch.full((3, 5), value + rank + n), (0, rank, world)) for n in range(7)},
        "odd": made("odd", torch.full((4,), value), replica_id=rank),
        "rng": ShardedObject("rng", f"of {rank}", (world,), (rank,)),
        "step": 3,
    }


def expected_of(value: float, world: int) -> dict[str, torch.Tensor]:
    tensors = {
        f"w{n}": torch.cat([torch.full((3, 5), value + rank + n) for rank in range(world)]) for n in range(7)
    }
    return {**tensors, "odd": torch.full((4,), value)}


def saved_and_loaded(room: Any, folder: str) -> list[bool]:
    outcomes = []
    for value in (1.0, 2.0):  # the second time by the same plan
        room.save(state_of(value), folder)
        dist.barrier()
        loaded, wanted = room.load(state_of(0.0), folder), state_of(value)
        tensors = [key for key in wanted if isinstance(wanted[key], ShardedTensor)]
        outcomes.append(all(torch.equal(loaded[key], wanted[key].data) for key in tensors))
        outcomes.append(loaded["rng"] == f"of {dist.get_rank()}")
        dist.barrier()
    return outcomes


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_load_by_the_packed_index_and_torch_by_its_own(ranks: Any, tmp_path: Path, world: int) -> None:
    assert ranks(saved_and_loaded, str(tmp_path), world=world) == [[True] * 4] * world
    path = tmp_path / metadata.NAME
    assert packed.read(path) is not None
    whole = {key: torch.zeros_like(value) for key, value in expected_of(2.0, world).items()}
    dcp.load(whole, storage_reader=dcp.FileSystemReader(tmp_path))
    assert all(torch.equal(whole[key], value) for key, value in expected_of(2.0, world).items())


def loads(room: Any, folder: str) -> str:
    try:
        loaded, wanted = room.load(state_of(0.0), folder), state_of(2.0)
        return str(torch.equal(loaded["w3"], wanted["w3"].data))
    except CheckpointingException as error:
        return str(error)


def save_in_another_form(room: Any, folder: str) -> None:
    real = packed.to_bytes
    plans.forget()
    packed.to_bytes = lambda *arguments: b"\2\0\0\0\0\0\0\0{}"
    try:
        room.save(state_of(2.0), folder)
    finally:
        packed.to_bytes = real
        plans.forget()


def test_a_packed_index_that_is_not_understood_is_passed_over(ranks: Any, tmp_path: Path) -> None:
    ranks(save_in_another_form, str(tmp_path), world=2)
    assert packed.read(tmp_path / metadata.NAME) is not None
    assert set(ranks(loads, str(tmp_path), world=2)) == {"True"}


@pytest.mark.parametrize("how", ["without", "damaged", "another's"])
def test_a_load_without_a_packed_index_takes_the_whole_metadata(ranks: Any, tmp_path: Path, how: str) -> None:
    """As a program that has none writes it; damaged, it is not whole: that is said."""
    ranks(saved_and_loaded, str(tmp_path), world=2)
    path = tmp_path / metadata.NAME
    data = bytearray(path.read_bytes())
    if how == "without":
        path.write_bytes(small_of(path))
    elif how == "damaged":
        data[data.index(b"packed") + 40] ^= 1
        path.write_bytes(data)
    else:
        # A foot that lies behind the pickle of another save.
        path.write_bytes(small_of(path) + data[-200:])
    assert packed.read(path) is None
    texts = set(ranks(loads, str(tmp_path), world=2))
    if how == "without":
        assert texts == {"True"}
    else:
        (text,) = texts
        assert "its checksum is wrong" in text


@pytest.mark.parametrize("key", ["\ud83d\ude00", "\ud83d", "\U0001f600", '"\\u00e9"'])
def test_a_key_of_any_characters_comes_back_as_it_was(tmp_path: Path, key: str) -> None:
    save({"w": ShardedTensor.from_rank_offsets(key, torch.arange(3.0))}, tmp_path)
    back = load({"w": ShardedTensor.from_rank_offsets(key, torch.zeros(3))}, tmp_path)
    assert torch.equal(back["w"], torch.arange(3.0))
