"""The arithmetic of boxes, runs, records and shares, against brute force."""

from __future__ import annotations

import io
import pickle
import struct
import warnings
import zipfile
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version

from torch_dcp_backport import dist_checkpointing as room
from torch_dcp_backport.dist_checkpointing._src import body, foreign, writer
from torch_dcp_backport.dist_checkpointing._src.body import (
    Form,
    RunningSum,
    ZipEntry,
    bytes_to_words,
    combined,
    ending,
)
from torch_dcp_backport.dist_checkpointing._src.files import BytesSource, Damaged, ReadSource
from torch_dcp_backport.dist_checkpointing._src.load import keeps_values
from torch_dcp_backport.dist_checkpointing._src.metadata import (
    Chunk,
    Index,
    RecordPlace,
    Stored,
    from_bytes,
    to_bytes,
)
from torch_dcp_backport.dist_checkpointing._src.plans import (
    Holders,
    WriteShare,
    cut,
    least_loaded,
    plan_of,
)
from torch_dcp_backport.dist_checkpointing._src.records import form_of, pieces
from torch_dcp_backport.dist_checkpointing._src.table import (
    Row,
    RowTable,
    alike_of,
    covered,
    fills,
    findings_of,
    overlapping,
)
from torch_dcp_backport.dist_checkpointing._src.unpickle import Refused
from torch_dcp_backport.transfer import Box
from torch_dcp_backport.transfer._src.layout import whole

SIZES = st.lists(st.integers(1, 7), min_size=0, max_size=4).map(tuple)


@st.composite
def nested(draw: Any) -> tuple[Box, Box]:
    """A stored box, and a part of it."""
    size = draw(SIZES)
    base = tuple(draw(st.integers(0, 3)) for _ in size)
    starts = tuple(draw(st.integers(0, extent - 1)) for extent in size)
    sizes = tuple(draw(st.integers(1, extent - start)) for extent, start in zip(size, starts))
    return Box(base, size), Box(tuple(map(sum, zip(base, starts))), sizes)


@settings(deadline=None)
@given(nested(), st.sampled_from([1, 2, 8]), st.integers(1, 200), st.integers(0, 40))
def test_pieces_have_every_byte_of_a_part_once(
    boxes: tuple[Box, Box], itemsize: int, largest: int, gap: int
) -> None:
    stored, part = boxes
    values = torch.arange(stored.numel).view(stored.size)
    wanted = values[part.within(stored)].flatten().tolist()
    got: list[int] = []
    for piece in pieces(stored, part, itemsize, largest, gap):
        span = piece.stop - piece.start
        assert span <= largest or piece.box.numel == 1
        elements = values[piece.box.within(stored)].flatten().tolist()
        assert (min(elements) * itemsize, (max(elements) + 1) * itemsize) == (piece.start, piece.stop)
        read = sorted(elements)
        holes = [(after - before - 1) * itemsize for before, after in zip(read, read[1:])]
        assert max(holes, default=0) <= gap
        got += elements
    assert sorted(got) == sorted(wanted)
    assert len(got) == len(wanted)


@settings(deadline=None, max_examples=60)
@given(SIZES, st.sampled_from([torch.float32, torch.bfloat16, torch.bool, torch.complex128, torch.int8]))
def test_a_record_is_what_torch_loads(size: tuple[int, ...], dtype: torch.dtype) -> None:
    check_record(size, dtype)


DTYPES = [
    torch.float64, torch.float16, torch.int64, torch.int32, torch.int16, torch.uint8, torch.complex64,
    torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [(), (0, 3), (70, 100), (5, 1)])
def test_records_of_other_dtypes_and_with_a_table(size: tuple[int, ...], dtype: torch.dtype) -> None:
    check_record(size, dtype)


def record_of(form: Form, data: bytes) -> bytes:
    total = RunningSum(form.grain)
    total.add(memoryview(data))
    return b"".join((form.head(total.crc), data, form.tail(total.crc, total.table)))


def check_record(size: tuple[int, ...], dtype: torch.dtype) -> None:
    form = form_of(dtype, size)
    data = bytes(number % 2 for number in range(form.nbytes))
    record = record_of(form, data)
    assert len(record) == form.length
    assert form.at % 64 == 0
    value = torch.load(io.BytesIO(record), weights_only=True)
    assert (value.dtype, tuple(value.shape)) == (dtype, size)
    assert value.is_contiguous()
    assert bytes(value.reshape(-1).view(torch.uint8).tolist()) == data
    with zipfile.ZipFile(io.BytesIO(record)) as archive:
        assert archive.testzip() is None
    # And as a record that somebody else has written.
    place = RecordPlace("file", 7, len(record))
    located = foreign.locate(BytesSource(bytearray(7) + bytearray(record), "file"), place, size)
    assert located is not None
    assert (located.dtype, located.at, located.nbytes) == (dtype, 7 + form.at, form.nbytes)


def test_a_table_verifies_every_run_of_grains() -> None:
    form = form_of(torch.uint8, (50000,))
    total = RunningSum(form.grain)
    total.add(memoryview(bytes(50000)))
    words = bytes_to_words(total.table)
    assert (form.grain, len(words), words[-1]) == (4096, 13, total.crc)
    assert form_of(torch.float32, (2**31,)).table_bytes <= 2**20


@given(st.binary(max_size=300), st.binary(max_size=300), st.integers(0, 70_000))
def test_checksums_of_parts_give_that_of_the_whole(first: bytes, second: bytes, zeros: int) -> None:
    second += bytes(zeros)
    assert combined(crc32(first), crc32(second), len(second)) == crc32(first + second)


@pytest.mark.parametrize("numels", [(), (3,), (10**6,), (16_384, 2 * 10**6, 1, 40_000, 10**6 + 1)])
@pytest.mark.parametrize("is_flat", [True, False])
def test_the_checksum_of_a_file_is_known_once_it_is_written(
    tmp_path: Path, numels: tuple[int, ...], is_flat: bool
) -> None:
    works = []
    for numel in numels:
        data = torch.randn(numel) if is_flat else torch.randn(numel, 2)[:, 0]
        works.append(writer.WriteWork(data, whole((numel,)), whole((numel,))))
    for objects in ([], [b"", b"abc", bytes(100_000)]):
        path = tmp_path / f"{len(objects)}"
        output = writer.write(path, works, objects, lambda nbytes: None)
        data = path.read_bytes() if path.exists() else b""
        assert (output.nbytes, output.crc) == (len(data), crc32(data))
        assert pickle.loads(pickle.dumps(output)) == output


def test_sizes_beyond_four_gib_have_their_fields() -> None:
    form = form_of(torch.uint8, (2**33,))
    head, tail = form.head(1), form.tail(1, bytes(form.table_bytes))
    assert form.length == len(head) + 2**33 + len(tail)
    entry = ZipEntry("archive/data/0", 2**33, 1, 100)
    assert entry.sizes() in head
    assert b"PK\6\6" in tail
    assert b"PK\6\7" in tail
    assert b"PK\6\6" not in ending(3, 100, 1000)


def test_a_record_beyond_four_gib(tmp_path: Path) -> None:
    """Of which the disk has the ends alone; torch maps it, and reads no checksum."""
    rows, width = 4500, 2**20
    form, last = form_of(torch.uint8, (rows, width)), bytes(range(256)) * (width // 256)
    path = tmp_path / "record"
    with open(path, "wb") as file:
        file.write(form.head(1))
        file.seek(form.at + (rows - 1) * width)
        file.write(last + form.tail(1, bytes(form.table_bytes)))
    assert path.stat().st_size == form.length > 2**32
    value = torch.load(path, mmap=True, weights_only=True)
    assert value.shape == (rows, width)
    assert value[-1].numpy().tobytes() == last
    assert not bool(value[4096].any())
    del value
    with zipfile.ZipFile(path) as archive:
        assert archive.getinfo("archive/data/0").file_size == rows * width
    with open(path, "rb") as file:
        place = RecordPlace(path.name, 0, form.length)
        located = foreign.locate(ReadSource(file.fileno(), path.name), place, (rows, width))
    assert located == (torch.uint8, form.at, rows * width, 1)


@pytest.mark.skipif(
    Version(torch.__version__).release < (2, 6),
    reason="up to 2.5 torch refuses places of eight bytes in a file below 4 GiB",
)
def test_records_with_sizes_of_eight_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As beyond 4 GiB: read by torch, by Python's zipfile, by us as ours, and as a stranger's."""
    monkeypatch.setattr(body, "LIMIT32", 20_000)
    value = torch.arange(10_000, dtype=torch.int32).view(100, 100)
    state = {"w": room.ShardedTensor.from_rank_offsets("w", value)}
    form_of.cache_clear()
    try:
        room.save(state, tmp_path)
        data = (tmp_path / "__0_0.distcp").read_bytes()
        form = form_of(torch.int32, (100, 100))
        assert len(data) == form.length
        assert data.count(struct.pack("<Q", value.nbytes)) >= 4
        assert b"PK\6\6" in data
        assert torch.equal(torch.load(io.BytesIO(data), weights_only=True), value)
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            assert archive.testzip() is None
            assert archive.read("archive/data/0") == value.numpy().tobytes()
        theirs = {"w": torch.zeros_like(value)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(theirs, storage_reader=dcp.FileSystemReader(tmp_path))
        assert torch.equal(theirs["w"], value)
        part = room.ShardedTensor("w", None, torch.int32, (30, 100), (100, 100), (70, 0), None)
        assert torch.equal(room.load({"w": part}, tmp_path, validate_access_integrity=False)["w"], value[70:])
        assert room.verify(tmp_path) == []
    finally:
        form_of.cache_clear()
    located = foreign.locate(
        BytesSource(bytearray(data), "file"), RecordPlace("file", 0, len(data)), (100, 100)
    )
    assert located == (torch.int32, form.at, value.nbytes, crc32(value.numpy().tobytes()))


@pytest.mark.parametrize("strides", ["transposed", "expanded", "narrowed"])
def test_records_of_torch_that_are_not_row_major(strides: str) -> None:
    value = {
        "transposed": torch.arange(6.0).view(2, 3).t(),
        "expanded": torch.arange(3.0).expand(2, 3),
        "narrowed": torch.arange(6.0).view(3, 2)[1:],
    }[strides]
    file = io.BytesIO()
    torch.save(value, file)
    data = bytearray(file.getvalue())
    assert (
        foreign.locate(BytesSource(data, "file"), RecordPlace("file", 0, len(data)), tuple(value.shape))
        is None
    )
    with pytest.raises(Damaged, match="has shape"):
        foreign.locate(BytesSource(data, "file"), RecordPlace("file", 0, len(data)), (1, 1, 1))


def test_metadata_comes_back_and_its_damage_is_seen() -> None:
    index = Index()
    chunks = [
        Chunk(Box((start, 0), (1, 4)), RecordPlace("__0_0.distcp", 100 * start, 100, 7 + start))
        for start in range(9)
    ]
    index.tensors["w"] = Stored(torch.bfloat16, (9, 4), chunks)
    index.objects["rng/shard_0_1"] = RecordPlace("__1_0.distcp", 0, 10, 2**32 - 1)
    index.common = (5, 6)
    data = to_bytes(index)
    again = from_bytes(data)
    assert again.tensors["w"].chunks == chunks
    assert (again.objects, again.common, again.is_ours) == (index.objects, (5, 6), True)
    assert [chunk.place.crc for chunk, _ in again.tensors["w"].parts_of(Box((2, 1), (3, 2)))] == [9, 10, 11]
    assert again.ends == {"__0_0.distcp": 900, "__1_0.distcp": 10}
    for cut_short in (data[:-1], data + b"x", data[:-4]):
        with pytest.raises(Refused):
            from_bytes(cut_short)


@settings(deadline=None)
@given(SIZES, st.integers(1, 9))
def test_a_cut_box_is_covered(size: tuple[int, ...], parts: int) -> None:
    boxes = cut(whole(size), parts)
    assert sum(box.numel for box in boxes) == whole(size).numel
    assert fills(boxes, size)


def rows_of(replicas: int, shards: int, sizes: list[int]) -> dict[int, RowTable]:
    """HSDP: every tensor in shards, each held by as many ranks as there are replicas."""
    tables = {}
    for rank in range(replicas * shards):
        replica, shard = divmod(rank, shards)
        tables[rank] = RowTable(
            [
                Row(f"{number}", torch.float32, (shards * size,), (shard * size,), (size,), replica == 0)
                for number, size in enumerate(sizes)
            ]
        )
    return tables


def shares_of(tables: dict[int, RowTable], balanced: bool = True) -> dict[int, WriteShare]:
    """What each rank writes, as it is told."""
    packed = pickle.loads(pickle.dumps(plan_of(alike_of(tables), balanced).shares()))
    return {rank: share.share_of(tables[rank].rows().outline) for rank, share in packed.items()}


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 4), st.integers(1, 4), st.lists(st.integers(10**5, 10**7), min_size=1, max_size=9))
def test_replicas_are_written_once_and_by_all_alike(replicas: int, shards: int, sizes: list[int]) -> None:
    tables = rows_of(replicas, shards, [*sizes, 2 * sum(sizes)])
    assert findings_of(tables) == []
    shares = shares_of(tables)
    load = {rank: sum(item.box.numel for item in share.tensors) for rank, share in shares.items()}
    assert sum(load.values()) == 3 * sum(sizes) * shards
    grain = 2 * max(sum(load.values()) // len(load) // 20, 256 * 1024 // 4)
    assert max(load.values()) <= sum(load.values()) / len(load) + grain
    written: dict[str, list[Box]] = {}
    for rank, share in shares.items():
        for item in share.tensors:
            written.setdefault(tables[rank].tensors[item.number].key, []).append(item.box)
    for number, size in enumerate([*sizes, 2 * sum(sizes)]):
        assert fills(written[str(number)], (shards * size,))


@settings(deadline=None)
@given(st.lists(st.tuples(st.sets(st.integers(0, 6), min_size=1), st.integers(1, 50)), max_size=60))
def test_the_least_loaded_holder_is_the_minimum_of_all(pieces: list[tuple[set[int], int]]) -> None:
    """Also of sets of holders that overlap, whose heaps do not hear of each other."""
    load, queues = dict.fromkeys(range(7), 0), dict[tuple[int, ...], list[tuple[int, int]]]()
    for ranks, nbytes in pieces:
        rank = least_loaded(Holders(ranks), load, queues)
        assert rank == min(ranks, key=lambda one: (load[one], one))
        load[rank] += nbytes


def test_hsdp_with_a_large_embedding_is_balanced() -> None:
    tables = rows_of(2, 2, [2**20] * 8 + [2**24])
    shares = shares_of(tables)
    load = [sum(item.box.numel for item in share.tensors) for share in shares.values()]
    assert max(load) / (sum(load) / 4) <= 1.05
    alone = shares_of(tables, balanced=False)
    assert [len(share.tensors) for share in alone.values()] == [9, 9, 0, 0]


def test_grids() -> None:
    assert not fills([Box((0,), (2,)), Box((3,), (1,))], (4,))
    assert not fills([Box((0, 0), (2, 1)), Box((0, 1), (1, 1))], (2, 2))
    assert fills([Box((), ())], ())


INT, LONG, FLOAT, DOUBLE = torch.int32, torch.int64, torch.float32, torch.float64


@pytest.mark.parametrize(
    ("stored", "asked", "keeps"),
    [
        (torch.bool, torch.uint8, True),
        (torch.uint8, torch.int8, False),
        (torch.uint8, torch.int16, True),
        (LONG, INT, False),
        (INT, FLOAT, True),
        (INT, DOUBLE, True),
        (LONG, DOUBLE, True),
        (torch.int8, torch.bfloat16, True),
        (torch.int16, torch.bfloat16, True),
        (FLOAT, DOUBLE, True),
        (DOUBLE, FLOAT, True),
        (FLOAT, torch.bfloat16, True),
        (torch.bfloat16, torch.float16, True),
        (torch.float16, torch.bfloat16, True),
        (torch.float16, FLOAT, True),
        (torch.float8_e4m3fn, torch.bfloat16, True),
        (torch.float8_e4m3fn, torch.float8_e5m2, False),
        (FLOAT, torch.complex64, True),
        (DOUBLE, torch.complex64, True),
        (FLOAT, torch.float8_e4m3fn, False),
        (torch.complex64, FLOAT, False),
        (FLOAT, LONG, False),
    ],
    ids=str,
)
def test_dtypes_that_hold_the_values_of_another(stored: torch.dtype, asked: torch.dtype, keeps: bool) -> None:
    assert keeps_values(stored, asked) == keeps


@settings(deadline=None)
@given(
    st.integers(0, 3).flatmap(
        lambda axes: st.lists(
            st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4)), min_size=axes, max_size=axes),
            max_size=8,
        )
    )
)
def test_what_boxes_cover_together(rows: list[list[tuple[int, int]]]) -> None:
    boxes = [Box(tuple(start for start, _ in row), tuple(size for _, size in row)) for row in rows]
    grid = torch.zeros((9,) * len(boxes[0].size) if boxes else (1,), dtype=torch.int64)
    for box in set(boxes):
        grid[box.within(whole(tuple(grid.shape)))] += 1
    assert covered(boxes) == int((grid > 0).sum())
    assert (overlapping(boxes) is not None) == bool((grid > 1).any())


def rows_beside_columns(count: int) -> list[Box]:
    """No grid, and no axis of which a box is all."""
    rows = [Box((number, 0), (1, count)) for number in range(count)]
    return rows + [Box((0, count + number), (count, 1)) for number in range(count)]


def test_many_boxes_that_are_no_grid() -> None:
    boxes = rows_beside_columns(30000)
    assert covered(boxes) == 2 * 30000**2
    assert overlapping(boxes) is None
    assert overlapping([*boxes, Box((5, 5), (2, 1))]) is not None


@pytest.mark.parametrize("dtype", sorted(writer.SHARED | {torch.bfloat16, torch.complex64}, key=str), ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (2, 3), (1, 2, 1)], ids=str)
def test_a_tensor_s_bytes_are_its_memory(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.zeros(shape, dtype=dtype)
    data = writer.bytes_of(tensor)
    assert (len(data), data.nbytes, data.format) == (tensor.nbytes, tensor.nbytes, "B")
    data[:] = bytes(number % 2 for number in range(data.nbytes))
    assert tensor.reshape(-1).view(torch.uint8).tolist() == list(data)
