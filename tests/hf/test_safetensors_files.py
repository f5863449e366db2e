"""Safetensors files, folders of them, and exports: whole, or an error that names file and tensor."""

from __future__ import annotations

import json
import os
import re
import resource
from pathlib import Path

import pytest
import torch

from torch_dcp_backport import hf
from torch_dcp_backport.hf._src import format as file_format
from torch_dcp_backport.hf._src.files import ExportDraft
from torch_dcp_backport.hf._src.format import FormatError, make_header, read_header
from torch_dcp_backport.hf._src.writing import planned
from torch_dcp_backport.transfer import Box, TensorInfo
from torch_dcp_backport.transfer._src.layout import whole

TENSORS = {
    "a": torch.arange(12, dtype=torch.float32).view(3, 4),
    "b": torch.arange(5, dtype=torch.bfloat16),
    "c": torch.tensor(7.0),
    "none": torch.empty(0, 3),
}


def infos(tensors: dict[str, torch.Tensor]) -> dict[str, TensorInfo]:
    return {key: TensorInfo(tuple(value.shape), value.dtype) for key, value in tensors.items()}


def data_of(value: torch.Tensor) -> bytes:
    return value.reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""


def write(path: Path, tensors: dict[str, torch.Tensor] = TENSORS) -> Path:
    header, places = make_header(infos(tensors))
    path.write_bytes(header + b"".join(data_of(tensors[key]) for key in places))
    return path


def model(folder: Path, tensors: dict[str, torch.Tensor] = TENSORS) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "made"}')
    write(folder / "model.safetensors", tensors)
    return folder


def test_a_header_says_what_it_was_made_of(tmp_path):
    entries = read_header(write(tmp_path / "x.safetensors"))
    assert {key: entry.info for key, entry in entries.items()} == infos(TENSORS)
    _, places = make_header(infos(TENSORS))
    assert entries == places


def test_the_library_reads_what_is_written_here_and_the_other_way_round(tmp_path):
    library = pytest.importorskip("safetensors.torch")
    got = library.load_file(write(tmp_path / "x.safetensors"))
    assert all(torch.equal(got[key], value) for key, value in TENSORS.items())
    library.save_file(TENSORS, tmp_path / "y.safetensors")
    entries = read_header(tmp_path / "y.safetensors")
    assert {key: entry.info for key, entry in entries.items()} == infos(TENSORS)


def broken(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "0 bytes"),
        (b"\x80\x02}q\x00.", "6 bytes"),
        (b"version https://git-lfs.github.com/spec/v1\n", "which cannot hold the header"),
        (broken(b"{"), "no JSON"),
        (broken([]), "no JSON object"),
        (broken(b'{"a": {}, "a": {}}'), "'a' twice"),
        (broken({"a": {"dtype": "F32"}}), "a has no dtype, shape and data_offsets"),
        (broken({"a": {**ENTRY, "dtype": "Q4"}}, bytes(8)), "a is of the dtype 'Q4'"),
        (broken({"a": {**ENTRY, "shape": [-2]}}, bytes(8)), "a has the shape"),
        (broken({"a": {**ENTRY, "shape": [3]}}, bytes(8)), "a has 8 bytes, where .* takes 12"),
        (broken({"a": ENTRY}, bytes(7)), "15 bytes|63 bytes|bytes, where its header speaks of"),
        (broken({"a": ENTRY}, bytes(9)), "where its header speaks of"),
        (broken({"a": ENTRY, "b": ENTRY}, bytes(8)), "b begins at byte|a begins at byte"),
    ],
)
def test_a_torn_file_is_refused(tmp_path, content, says):
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(FormatError, match=says):
        read_header(tmp_path / "x.safetensors")


def test_slices_are_views_of_the_mapped_file(tmp_path):
    source = hf.Folder(model(tmp_path / "m"))
    assert not source.problems
    assert torch.equal(source.part("a", Box((1, 1), (2, 2))), TENSORS["a"][1:3, 1:3])
    assert torch.equal(source.part("b", Box((2,), (3,))), TENSORS["b"][2:5])
    assert torch.equal(source.part("c", whole(())), TENSORS["c"])
    assert source.part("none", whole((0, 3))).shape == (0, 3)
    row = source.part("a", Box((0, 0), (1, 4)))
    assert row.untyped_storage().nbytes() == (tmp_path / "m" / "model.safetensors").stat().st_size


def test_tensors_at_odd_addresses_are_read(tmp_path):
    folder = model(tmp_path / "m")
    value = torch.arange(12, dtype=torch.float32).view(3, 4)
    entries = {
        "x": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "a": {"dtype": "F32", "shape": [3, 4], "data_offsets": [3, 51]},
        "c": {"dtype": "F32", "shape": [], "data_offsets": [51, 55]},
    }
    (folder / "model.safetensors").write_bytes(
        broken(entries, b"xyz" + data_of(value) + data_of(TENSORS["c"]))
    )
    source = hf.Folder(folder)
    assert torch.equal(source.part("c", whole(())), TENSORS["c"])
    assert torch.equal(source.part("a", Box((1, 1), (2, 2))), value[1:3, 1:3])


def sharded(folder: Path, index: dict[str, str]) -> Path:
    model(folder)
    (folder / "model.safetensors").unlink()
    write(folder / "one.safetensors", {"a": TENSORS["a"]})
    write(folder / "two.safetensors", {"b": TENSORS["b"]})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def test_several_files_are_one_model(tmp_path):
    source = hf.Folder(sharded(tmp_path / "m", {"a": "one.safetensors", "b": "two.safetensors"}))
    assert not source.problems
    assert torch.equal(source.part("b", Box((0,), (5,))), TENSORS["b"])


@pytest.mark.parametrize(
    ("index", "says"),
    [
        ({"a": "two.safetensors", "b": "two.safetensors"}, "not in the file that the index says: a"),
        (
            {"a": "one.safetensors", "b": "three.safetensors"},
            "no whole safetensors file: .*three.safetensors",
        ),
        ({"a": "one.safetensors", "z": "two.safetensors"}, "not in the file that the index says: z"),
    ],
)
def test_an_index_that_lies_is_a_problem(tmp_path, index, says):
    text = "\n".join(map(str, hf.Folder(sharded(tmp_path / "m", index)).problems))
    assert re.search(says, text), text


@pytest.mark.parametrize("name", ["../two.safetensors", "/two.safetensors", "a/../../two.safetensors"])
def test_an_index_that_leaves_its_folder_is_a_problem(tmp_path, name):
    folder = sharded(tmp_path / "m", {"a": "one.safetensors", "b": name})
    write(tmp_path / "two.safetensors", {"b": TENSORS["b"]})
    assert "a file outside of the folder" in str(hf.Folder(folder).problems)


def test_a_pipe_is_not_waited_for(tmp_path):
    folder = sharded(tmp_path / "m", {"a": "one.safetensors", "b": "pipe.safetensors"})
    os.mkfifo(folder / "pipe.safetensors")
    assert "not a regular file" in str(hf.Folder(folder).problems)


def test_a_key_in_two_files_and_two_models_in_a_folder_are_problems(tmp_path):
    folder = sharded(tmp_path / "m", {"a": "one.safetensors", "b": "two.safetensors"})
    write(folder / "two.safetensors", {"a": TENSORS["a"], "b": TENSORS["b"]})
    assert "in two files: a (expected one, got one.safetensors and two.safetensors)" in map(
        str, hf.Folder(folder).problems
    )
    write(folder / "model.safetensors")
    assert "two models in one folder" in str(hf.Folder(folder).problems)


def test_another_revision_of_the_same_shapes_has_another_digest(tmp_path):
    first = hf.Folder(model(tmp_path / "one", {"a": torch.zeros(1000)})).digest()
    assert first == hf.Folder(model(tmp_path / "two", {"a": torch.zeros(1000)})).digest()
    assert first != hf.Folder(model(tmp_path / "three", {"a": torch.full((1000,), 1e-6)})).digest()


@pytest.mark.parametrize("missing", ["folder", "config.json", "model.safetensors"])
def test_what_is_not_there_is_absent_and_no_problem(tmp_path, missing):
    folder = model(tmp_path / "m")
    source = hf.Folder(tmp_path / "elsewhere" if missing == "folder" else folder)
    if missing != "folder":
        (folder / missing).unlink()
        source = hf.Folder(folder)
    assert source.absent
    assert not source.problems


# --- exports ---


def exported(
    target: Path, tensors: dict[str, torch.Tensor], file_bytes: int, overwrite: bool = False
) -> list[str]:
    draft = ExportDraft(target, overwrite)
    draft.reserve(infos(tensors), file_bytes)
    draft.add("config.json", b'{"model_type": "made"}')
    for key, value in tensors.items():
        draft.files.write(key, 0, memoryview(data_of(value)))
    draft.sync()
    draft.switch()
    return draft.finish()


def content(folder: Path) -> dict[str, torch.Tensor]:
    source = hf.Folder(folder)
    assert not source.absent
    assert not source.problems
    return {key: source.part(key, whole(info.shape)).clone() for key, info in source.tensors.items()}


def same(folder: Path, tensors: dict[str, torch.Tensor]) -> bool:
    got = content(folder)
    return set(got) == set(tensors) and all(torch.equal(got[key], tensors[key]) for key in got)


NEW = {key: value + 1 for key, value in TENSORS.items()}


def test_files_are_filled_in_order_and_a_large_tensor_has_its_own():
    sizes = {"a": 10, "b": 10, "c": 50, "d": 1}
    tensors = {key: TensorInfo((size,), torch.uint8) for key, size in sizes.items()}
    assert list(planned(tensors, 20).values()) == [["a", "b"], ["c"], ["d"]]
    assert planned(tensors, 100) == {"model.safetensors": ["a", "b", "c", "d"]}


@pytest.mark.parametrize("new_files", [10, 10**9])
@pytest.mark.parametrize("old_files", [0, 10, 10**9])
def test_an_export_takes_the_place_of_an_older_one(tmp_path, old_files, new_files):
    target = tmp_path / "deep" / "m"
    if old_files:
        exported(target, TENSORS, old_files)
        (target / "adapter_model.safetensors").write_bytes(b"not ours")
        with pytest.raises(FileExistsError, match="overwrite=True"):
            ExportDraft(target, False)
        assert same(target, TENSORS)
    removed = exported(target, NEW, new_files, overwrite=True)
    assert same(target, NEW)
    assert bool(removed) == (bool(old_files) and (old_files, new_files) != (10**9, 10**9))
    left = {path.name for path in target.iterdir() if path.suffix == ".safetensors"}
    known = (
        set(json.loads((target / "model.safetensors.index.json").read_text())["weight_map"].values())
        if new_files == 10
        else {"model.safetensors"}
    )
    assert left - {"adapter_model.safetensors"} == known
    assert not [path for path in (*target.iterdir(), *target.parent.iterdir()) if "partial" in path.name]
    assert (target / "adapter_model.safetensors").exists() == bool(old_files)


def test_the_library_and_an_empty_folder(tmp_path):
    library = pytest.importorskip("safetensors.torch")
    (tmp_path / "m").mkdir()
    exported(tmp_path / "m", TENSORS, 10**9)
    got = library.load_file(tmp_path / "m" / "model.safetensors")
    assert all(torch.equal(got[key], value) for key, value in TENSORS.items())


@pytest.mark.parametrize("is_there", [False, True])
def test_two_exports_at_once_are_refused_and_a_dead_one_is_cleared_away(tmp_path, is_there):
    target = tmp_path / "m"
    if is_there:
        exported(target, TENSORS, 10)
    first = ExportDraft(target, True)
    first.reserve(infos(NEW), 10)
    with pytest.raises(BlockingIOError, match=r"another export into .* is under way"):
        ExportDraft(target, True)
    # As the kernel does when its process dies.
    os.close(first.room._lock)
    exported(target, NEW, 10, overwrite=True)
    assert same(target, NEW)


NUMBERS = {"model_type": "made", "hidden_size": 8, "dtype": "float32"}


@pytest.mark.parametrize(
    ("there", "says"),
    [
        ({**NUMBERS, "hidden_size": 16}, r"another model: hidden_size \(expected 8, got 16\)"),
        ({**NUMBERS, "model_type": "llama"}, r"model_type \(expected 'made', got 'llama'\)"),
        ([1], "it cannot be read"),
        # As a caller puts it there before: of another release, in another dtype.
        ({**NUMBERS, "dtype": "bfloat16", "transformers_version": "9", "pad_token_id": 3}, ""),
    ],
)
def test_another_models_config_is_replaced_only_when_asked(tmp_path, there, says):
    target, before = tmp_path / "m", json.dumps(there)
    target.mkdir()
    (target / "config.json").write_text(before)
    if says:
        with pytest.raises(RuntimeError, match=says):
            hf.save_state_dict(TENSORS, target, like=NUMBERS)
        assert [(path.name, path.read_text()) for path in target.iterdir()] == [("config.json", before)]
    hf.save_state_dict(TENSORS, target, like=NUMBERS, how=hf.Export(overwrite=bool(says)))
    assert json.loads((target / "config.json").read_text()) == {**NUMBERS, "dtype": "float32"}
    assert same(target, TENSORS)


def test_no_room_is_an_error_before_anything_moves(tmp_path):
    exported(tmp_path / "m", TENSORS, 10**9)
    draft = ExportDraft(tmp_path / "m", True)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, hard))
    try:
        with pytest.raises(OSError, match=r"too large|space"):
            draft.reserve({"a": TensorInfo((2**22,), torch.uint8)}, 10**9)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    draft.discard()
    assert same(tmp_path / "m", TENSORS)
    assert not (tmp_path / "m" / ".partial").exists()


def test_a_header_that_readers_refuse_is_not_written(monkeypatch) -> None:
    monkeypatch.setattr(file_format, "MOST_HEADER", 1000)
    with pytest.raises(ValueError, match=r"20 tensors in a file make a header of [0-9]+ bytes, .* take 1000"):
        make_header({f"w{number}": TensorInfo((2,), torch.float32) for number in range(20)})
