"""Exports that several ranks write, each what it holds, into the same files."""

from __future__ import annotations

import contextlib
import os
import random
from pathlib import Path
from typing import Any, Optional
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from test_state_dicts import CONFIG, MESHES, VALUES, bits, state_of

from torch_dcp_backport import hf
from torch_dcp_backport.hf import Part, Share
from torch_dcp_backport.hf._src import sharing
from torch_dcp_backport.hf._src.sharing import WritePlan
from torch_dcp_backport.hf._src.writing import Files, HostBytes
from torch_dcp_backport.transfer import Box, Call, TensorInfo, groups_of, spread_of


@pytest.mark.parametrize("seed", range(20))
def test_a_box_is_written_where_it_belongs(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    shape = tuple(dice.randint(1, 4) for _ in range(seed % 5))
    offset = tuple(dice.randrange(extent) for extent in shape)
    size = tuple(dice.randint(0, extent - start) for extent, start in zip(shape, offset))
    value = torch.randn(shape).to(dice.choice([torch.float32, torch.bfloat16]))
    inside = tuple(slice(start, start + extent) for start, extent in zip(offset, size))
    wanted = torch.zeros_like(value)
    wanted[inside] = value[inside]
    infos = {"before": TensorInfo((3,), torch.int8), "x": TensorInfo(shape, value.dtype)}
    files = Files(infos, 10**6)
    files.make(tmp_path)
    files.write_box("x", Box(offset, size), HostBytes(value.nbytes)(value[inside], value.dtype))
    files.close()
    (tmp_path / "config.json").write_text("{}")
    got = hf.Folder(tmp_path).part("x", Box((0,) * len(shape), shape))
    assert torch.equal(bits(got), bits(wanted))


def test_replicas_share_the_work_and_narrow_slices_travel() -> None:
    tensors = {
        "rows": TensorInfo((8, 256), torch.float32),
        "columns": TensorInfo((8, 256), torch.float32),
        "far": TensorInfo((8, 256), torch.float32),
        "both": TensorInfo((8, 8), torch.float32),
    }
    halves = Box((0, 0), (4, 256)), Box((4, 0), (4, 256))
    sides = Box((0, 0), (8, 8)), Box((0, 8), (8, 248))
    quarters = Box((0, 0), (8, 4)), Box((0, 4), (8, 4))
    spreads = {
        "rows": spread_of((8, 256), {0: halves[:1], 1: halves[1:], 2: halves[:1], 3: halves[1:]}),
        # A narrow block, and one that is not.
        "columns": spread_of((8, 256), {0: sides[:1], 1: sides[1:]}),
        "far": spread_of((8, 256), {1: halves[:1], 7: halves[1:]}),
        "both": spread_of((8, 8), {0: quarters[:1], 1: quarters[1:]}),
    }
    plan = WritePlan(Share(tensors, spreads, {}), (0, 1, 2, 3))
    assert plan.boxes == {
        0: [("rows", halves[0])],
        1: [("rows", halves[1]), ("columns", sides[1]), ("far", halves[0])],
        2: [],
        3: [],
    }
    assert plan.rest == {"columns": [sides[0]], "far": [halves[1]], "both": [Box((0, 0), (8, 8))]}
    two = {"rows": tensors["rows"], "again": tensors["rows"]}
    plan = WritePlan(Share(two, {"rows": spreads["rows"], "again": spreads["rows"]}, {}), (0, 1, 2, 3))
    assert {rank: len(boxes) for rank, boxes in plan.boxes.items()} == {0: 1, 1: 1, 2: 1, 3: 1}


def in_turns(api: Any, folder: Path) -> tuple[int, list[int]]:
    """(bytes that this rank wrote, tensors that travel) of columns in turns, as gpt-oss has gate and up."""
    rank, wrote, write = dist.get_rank(), 0, os.pwrite
    # Two experts of 4 x 512 x 2; a rank has half of the rows, of an expert.
    expert, rows = divmod(rank, 2)
    value = torch.arange(2 * 4 * 512 * 2, dtype=torch.float32).view(2, 4, 512, 2)
    boxes = {
        place: [Box((place // 2, 0, place % 2 * 256, turn), (1, 4, 256, 1)) for turn in (0, 1)]
        for place in range(4)
    }
    # Gate above up, and transposed, as Megatron has them.
    mine = value[expert, :, rows * 256 : rows * 256 + 256].permute(2, 1, 0).contiguous()
    parts = [Part(box, part.t()[None, :, :, None]) for box, part in zip(boxes[rank], mine)]
    info = TensorInfo(tuple(value.shape), value.dtype)
    share = Share({"x": info}, {"x": spread_of(info.shape, boxes)}, {"x": parts})
    target = hf.ExportTarget(folder, hf.Export(), {"config.json": b"{}"}, is_examined=True)

    def watched(file: int, data: Any, offset: int) -> int:
        nonlocal wrote
        wrote += len(data) if offset else 0
        return write(file, data, offset)

    with mock.patch.object(os, "pwrite", watched), Call("cannot save", "collect", groups_of()) as call:
        hf.export(call, call.agree_on_wants(), share, target)
    return wrote, list(WritePlan(share, (0, 1, 2, 3)).rest)


def test_columns_in_turns_are_written_together_where_they_are_held(ranks, tmp_path: Path) -> None:
    assert ranks(in_turns, tmp_path / "m") == [(4 * 512 * 4, [])] * 4
    got = hf.Folder(tmp_path / "m").part("x", Box((0,) * 4, (2, 4, 512, 2)))
    assert torch.equal(got.flatten(), torch.arange(got.numel(), dtype=torch.float32))


def save(
    api: Any, folder: Path, name: str, far: tuple[int, ...] = (), broken: Optional[int] = None
) -> tuple[str, int]:
    """(the text of a save's error, bytes of tensors that this rank wrote itself)."""
    rank, wrote, write = dist.get_rank(), 0, os.pwrite

    def watched(file: int, data: Any, offset: int) -> int:
        nonlocal wrote
        if rank == broken:
            raise OSError(28, "no space left on the device")
        # Headers are at the beginning.
        wrote += len(data) if offset else 0
        return write(file, data, offset)

    options: dict[str, Any] = {"like": CONFIG, "how": api.Export(file_bytes=100)}
    with contextlib.ExitStack() as patches:
        if rank in far:
            patches.enter_context(mock.patch.object(Files, "join", return_value=False))
        for place, name_of, value in (
            (sharing, "SHORTEST_RUN", 1),
            (sharing, "TURN_BYTES", 30),
            (os, "pwrite", watched),
        ):
            patches.enter_context(mock.patch.object(place, name_of, value))
        try:
            api.save_state_dict(state_of(name), folder, **options)
        except RuntimeError as error:
            return f"{type(error).__name__}: {error}", wrote
    return "", wrote


@pytest.mark.parametrize("far", [(), (2,), (1, 2, 3)])
@pytest.mark.parametrize("name", MESHES)
def test_who_sees_the_files_writes_and_the_others_send(ranks, tmp_path: Path, name: str, far) -> None:
    texts, counts = zip(*ranks(save, tmp_path / "m", name, far))
    assert set(texts) == {""}
    source = hf.Folder(tmp_path / "m")
    assert not source.problems
    for key, value in VALUES.items():
        whole = Box((0,) * value.dim(), tuple(value.shape))
        assert torch.equal(bits(source.part(key, whole)), bits(value)), key
    # Nothing is written twice.
    assert sum(counts) == sum(value.nbytes for value in VALUES.values())
    assert [rank for rank, count in enumerate(counts) if not count] == list(far)


@pytest.mark.parametrize("broken", [1, 3])
@pytest.mark.parametrize("is_there", [False, True])
def test_a_rank_that_cannot_write_is_one_error_and_no_export(ranks, tmp_path, broken, is_there) -> None:
    if is_there:
        (tmp_path / "m").mkdir()
        (tmp_path / "m" / "notes").write_text("mine")
    texts, _ = zip(*ranks(save, tmp_path / "m", "rows", (), broken))
    assert len(set(texts)) == 1
    assert texts[0].startswith("RuntimeError")
    assert f"rank {broken}: OSError: [Errno 28] no space left on the device" in texts[0]
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == ["m", "m/notes"] * is_there


def cannot_say_where(api: Any, folder: Path) -> str:
    """The error of a save whose first rank has no memory to say where its files are."""
    with mock.patch.object(Files, "shared_folder", side_effect=MemoryError("no room")):
        try:
            api.save_state_dict(state_of("rows"), folder, like=CONFIG)
        except RuntimeError as error:
            return str(error)
    return ""


def test_a_first_rank_that_cannot_say_where_its_files_are_is_one_error(ranks, tmp_path: Path) -> None:
    (text,) = set(ranks(cannot_say_where, tmp_path / "m"))
    assert "rank 0: MemoryError: no room" in text
    assert not os.listdir(tmp_path)


def unseen(api: Any, folder: Path) -> bool:
    """Whether this rank takes another machine's folder of the same name for the first rank's."""
    infos = {"x": TensorInfo((2,), torch.float32)}
    files = Files(infos, 100)
    if dist.get_rank() == 0:
        files.make(folder)
    shared_folder = files.shared_folder(folder)
    dist.barrier()
    assert shared_folder is not None
    found = [
        shared_folder,
        shared_folder._replace(boot="another"),
        shared_folder._replace(inode=1),
        shared_folder._replace(device=-1),
    ]
    return [Files(infos, 100).join(one) for one in found] == [True, False, False, False]


def test_a_folder_that_is_not_the_same_is_not_written_into(ranks, tmp_path: Path) -> None:
    assert all(ranks(unseen, tmp_path))


def late(api: Any, folder: Path) -> str:
    """The text of the error of a save whose last rank hears only at the end that there was no room."""
    close = os.close

    def full(file: int) -> None:
        name = os.readlink(f"/proc/self/fd/{file}")
        close(file)
        if name.endswith(".safetensors"):
            raise OSError(122, "the quota is used up")

    broken = dist.get_rank() == dist.get_world_size() - 1
    with mock.patch.object(os, "close", full) if broken else contextlib.nullcontext():
        try:
            api.save_state_dict(state_of("rows"), folder, like=CONFIG, how=api.Export(file_bytes=100))
        except RuntimeError as error:
            left = [name for name in os.listdir("/proc/self/fd") if is_of(folder, name)]
            return f"{error}{left or ''}"
    return ""


def is_of(folder: Path, file: str) -> bool:
    with contextlib.suppress(OSError):
        return str(folder.parent) in os.readlink(f"/proc/self/fd/{file}")
    return False


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="needs Linux")
def test_a_file_system_that_tells_of_a_full_disk_at_the_end(ranks, tmp_path: Path) -> None:
    texts = ranks(late, tmp_path / "m")
    assert len(set(texts)) == 1
    assert texts[0].endswith("rank 3: OSError: [Errno 122] the quota is used up")
    assert not list(tmp_path.iterdir())
