"""Checkpoints that are damaged, cut short or crafted: an error on every rank, never other values."""

from __future__ import annotations

import contextlib
import enum
import importlib
import io
import os
import pickle
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from torch_dcp_backport import dist_checkpointing as room
from torch_dcp_backport.dist_checkpointing import CheckpointingException, ShardedObject, ShardedTensor
from torch_dcp_backport.dist_checkpointing._src import metadata, unpickle, values
from torch_dcp_backport.dist_checkpointing._src.files import Damaged
from torch_dcp_backport.dist_checkpointing._src.reader import RecordReader

VALUES = {
    "small": torch.arange(12.0).view(3, 4),
    "large": torch.arange(4800, dtype=torch.float32).view(48, 100),
}
STATE = {"step": 3, "rates": [0.1, {"warm": True}]}
OBJECT = {"seed": torch.arange(5)}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    state: dict[str, Any] = {key: ShardedTensor.from_dtensor(key, value) for key, value in VALUES.items()}
    room.save({**state, **STATE, "rng": ShardedObject("rng", OBJECT, (1,), (0,))}, folder)
    return folder


def load(folder: Path) -> dict[str, Any]:
    """The small tensor whole, and parts of the large one: rows, and columns."""
    state: dict[str, Any] = {
        "small": ShardedTensor("small", None, torch.float32, (3, 4), (3, 4), (0, 0), None),
        "rows": ShardedTensor("large", None, torch.float32, (7, 100), (48, 100), (20, 0), None),
        "columns": ShardedTensor("large", None, torch.float32, (48, 9), (48, 100), (0, 5), None),
        "rng": ShardedObject("rng", None, (1,), (0,)),
    }
    result: dict[str, Any] = room.load(state, folder, validate_access_integrity=False)
    return result


def is_right(result: dict[str, Any]) -> bool:
    return (
        torch.equal(result["small"], VALUES["small"])
        and torch.equal(result["rows"], VALUES["large"][20:27])
        and torch.equal(result["columns"], VALUES["large"][:, 5:14])
        and torch.equal(result["rng"]["seed"], OBJECT["seed"])
        and {key: result[key] for key in STATE} == STATE
    )


def test_a_flipped_bit_is_an_error_wherever_it_is(checkpoint: Path) -> None:
    assert is_right(load(checkpoint))
    outcomes: dict[str, list[int]] = {}
    for path in sorted(checkpoint.iterdir()):
        content = path.read_bytes()
        step = 64 if path.suffix != ".json" else 8
        for number, bit in enumerate(range(0, 8 * len(content), step)):
            flipped = bytearray(content)
            # Another bit of the byte each time.
            flipped[bit // 8] ^= 1 << number % 8
            path.write_bytes(flipped)
            try:
                result = load(checkpoint)
            except CheckpointingException:
                outcomes.setdefault(path.name, [0, 0])[0] += 1
            else:
                assert is_right(result), f"{path.name}, byte {bit // 8}"
                outcomes.setdefault(path.name, [0, 0])[1] += 1
        path.write_bytes(content)
    unread = outcomes.pop("__0_0.distcp")
    assert all(passed == 0 for _, passed in outcomes.values()), outcomes
    assert unread[0] > 0
    # Columns take all grains of the large tensor.
    assert unread[1] == 0


def test_a_flipped_bit_in_any_grain_of_a_large_record(tmp_path: Path) -> None:
    """Above 32 KiB a record has a table of checksums, and is not read whole."""
    value = torch.arange(64 * 1024, dtype=torch.float32).view(64, 1024)
    room.save({"wide": ShardedTensor.from_dtensor("wide", value)}, tmp_path)
    path = tmp_path / "__0_0.distcp"
    content = path.read_bytes()
    begin = content.index(value.numpy().tobytes())
    parts = {
        "rows": ShardedTensor("wide", None, torch.float32, (20, 1024), (64, 1024), (44, 0), None),
        "columns": ShardedTensor("wide", None, torch.float32, (64, 9), (64, 1024), (0, 1015), None),
    }
    for name, part in parts.items():
        # The first and the last row of each, and all in between: a run ends in any grain.
        wanted = value[44:] if name == "rows" else value[:, 1015:]
        for row in range(44, 64):
            flipped = bytearray(content)
            flipped[begin + (row * 1024 + 1020) * 4] ^= 1
            path.write_bytes(flipped)
            with pytest.raises(CheckpointingException, match="wrong checksum"):
                room.load({name: part}, tmp_path, validate_access_integrity=False)
        path.write_bytes(content)
        loaded = room.load({name: part}, tmp_path, validate_access_integrity=False)
        assert torch.equal(loaded[name], wanted)


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "common.pt", "metadata.json"])
@pytest.mark.parametrize("keep", [None, 0.0, 0.5, -1])
def test_a_file_that_is_missing_or_cut_short(checkpoint: Path, name: str, keep: Any) -> None:
    path = checkpoint / name
    content = path.read_bytes()
    path.unlink()
    if keep is not None:
        path.write_bytes(content[: int(len(content) * keep) if keep >= 0 else -1])
    target = torch.full((3, 4), 7.0)
    with pytest.raises(CheckpointingException) as caught:
        room.load({"small": ShardedTensor.from_dtensor("small", target)}, checkpoint)
    if name != ".metadata" or keep is None:
        assert name in str(caught.value)
    assert torch.equal(target, torch.full((3, 4), 7.0))


def test_a_record_of_another_save_is_an_error(checkpoint: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    state: dict[str, Any] = {key: ShardedTensor.from_dtensor(key, value + 1) for key, value in VALUES.items()}
    room.save({**state, **STATE, "rng": ShardedObject("rng", OBJECT, (1,), (0,))}, other)
    shutil.copy(other / "__0_0.distcp", checkpoint)
    with pytest.raises(CheckpointingException, match=r"small: __0_0\.distcp: .*wrong checksum"):
        load(checkpoint)


class Crafted:
    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize(
    ("function", "args"),
    [(os.system, ("true",)), (eval, ("1",)), (getattr, ("x", "upper")), (torch.load, ("x",))],
)
def test_metadata_that_would_run_code_is_refused(
    checkpoint: Path, function: Callable[..., Any], args: Any
) -> None:
    (checkpoint / ".metadata").write_bytes(pickle.dumps(Crafted(function, *args)))
    with pytest.raises(CheckpointingException, match="which a checkpoint's metadata has no use for"):
        load(checkpoint)


def test_a_program_is_not_run() -> None:
    """torch.load up to 2.5 gives a module, whose loading code has run, with weights_only too."""
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(torch.nn.Identity()), file)
    with pytest.raises(values.Unloadable, match="TorchScript"):
        values.loads(file.getvalue())
    assert torch.equal(values.loads(values.dumps({"a": torch.ones(2)}))["a"], torch.ones(2))


def test_damaged_metadata_is_not_unpickled(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = bytearray((checkpoint / metadata.NAME).read_bytes())
    data[10] ^= 1
    monkeypatch.setattr(metadata, "SafeUnpickler", None)
    with pytest.raises(metadata.Refused, match="checksum"):
        metadata.from_bytes(bytes(data))


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (ShardedTensor(7, torch.ones(2), torch.float32, (2,), (2,), (0,), (1,)), "7"),
        (ShardedTensor("a", torch.ones(2), torch.float32, (2.0,), (2,), (0,), (1,)), "float"),
        (
            ShardedTensor("a", torch.ones(2), torch.float32, (2,), (2,), (0,), (1,), replica_id=None),
            "NoneType",
        ),
        (ShardedTensor("o/shard_0_1", torch.ones(2), torch.float32, (2,), (2,), (0,), (1,)), "/shard_"),
        (ShardedObject("o", 1, (1,), (0.0,)), "float"),
    ],
)
def test_what_could_not_be_loaded_again_is_not_saved(checkpoint: Path, part: Any, words: str) -> None:
    before = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
    with pytest.raises(CheckpointingException, match=words):
        room.save({"part": part}, checkpoint)
    assert {path.name: path.read_bytes() for path in checkpoint.iterdir()} == before


def test_a_file_outside_the_folder_is_refused(checkpoint: Path) -> None:
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    del metadata.torch_dcp_backport
    for info in metadata.storage_data.values():
        info.relative_path = "../" + info.relative_path
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointingException, match="a file outside the checkpoint's folder"):
        load(checkpoint)


def test_objects_that_would_run_code_are_refused_unless_trusted(tmp_path: Path) -> None:
    state = {"rng": ShardedObject("rng", Crafted(len, "abc"), (1,), (0,)), "w": 1}
    room.save(state, tmp_path)
    asked = {"rng": ShardedObject("rng", None, (1,), (0,))}
    with pytest.raises(CheckpointingException, match=r"trust=True"):
        room.load(asked, tmp_path)
    assert room.load(asked, tmp_path, trust=True) == {"rng": 3, "w": 1}
    room.save({"w": Crafted(len, "abc")}, tmp_path)
    with pytest.raises(CheckpointingException, match=r"common state .* trust=True"):
        room.load({}, tmp_path)
    assert room.load({}, tmp_path, trust=True) == {"w": 3}


@pytest.mark.parametrize(
    ("marker", "words"),
    [
        ('{"sharded_backend": "zarr"}', "another format: zarr 1"),
        ('{"sharded_backend": "torch_dist", "sharded_backend_version": 2}', "another format: torch_dist 2"),
        ("[]", "is damaged, or of another format"),
    ],
)
def test_another_format_is_refused(checkpoint: Path, marker: str, words: str) -> None:
    (checkpoint / "metadata.json").write_text(marker)
    with pytest.raises(CheckpointingException, match=words):
        load(checkpoint)


def test_a_folder_without_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder, words in ((tmp_path, "holds no distributed checkpoint"), (tmp_path / "no", "is no folder")):
        with pytest.raises(CheckpointingException, match=words):
            room.load({}, folder)
    assert not room.check_is_distributed_checkpoint(tmp_path)


def test_the_folder_of_a_managers_step_says_where_its_checkpoint_is(tmp_path: Path) -> None:
    (tmp_path / "dist_ckpt").mkdir()
    with pytest.raises(CheckpointingException, match=f"that of the step is in {tmp_path}/dist_ckpt"):
        room.load({}, tmp_path)


def sets_an_attribute(module: str, name: str, made: bytes = b"") -> bytes:
    """A pickle that sets an attribute of what a name stands for, or of what `made` makes of it."""
    named = b"c" + module.encode() + b"\n" + name.encode() + b"\n" + made
    # BUILD of (None, {"crafted": 1}): the second is set with setattr.
    return b"\x80\x02" + named + b"N}X\x07\x00\x00\x00craftedK\x01s\x86b."


@pytest.mark.parametrize(
    ("module", "name"),
    [*unpickle.METADATA, *unpickle.TENSORS, ("torch", "float32"), ("pathlib", "PosixPath")],
)
@pytest.mark.parametrize("allowed", [unpickle.METADATA, unpickle.TENSORS], ids=["metadata", "record"])
def test_a_pickle_cannot_change_what_it_names(module: str, name: str, allowed: Any) -> None:
    target = getattr(importlib.import_module(module), name)
    for made in (b"", b"(K\x00tR", b")R"):
        with contextlib.suppress(unpickle.Refused):
            unpickle.SafeUnpickler(sets_an_attribute(module, name, made), allowed, unpickle.FOREIGN).read()
        found = [
            target,
            *unpickle.METADATA.values(),
            *unpickle.TENSORS.values(),
            *unpickle.Maker.__subclasses__(),
        ]
        found += list(target) if isinstance(target, enum.EnumMeta) else []
        changed = [each for each in found if hasattr(each, "crafted")]
        for each in changed:
            del each.crafted
        assert changed == []


def test_zeros_are_not_made_by_their_number() -> None:
    data = b"\x80\x02cbuiltins\nbytearray\nJ\x00\x00\x00\x40\x85R."
    with pytest.raises(unpickle.Refused, match="makes bytes of a int"):
        unpickle.SafeUnpickler(data, unpickle.METADATA).read()


NESTED = b")" + b"\x85" * 10**6
BEFORE = (
    b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81}(X\x13\x00\x00\x00state_dict_metadata}"
)


@pytest.mark.parametrize("where", ["key", "offset"])
def test_a_tuple_in_a_million_others_ends_no_process(where: str) -> None:
    """Hashing one needs more stack than a thread has; it is a key of a dict, or of a dict of ours."""
    data = BEFORE + NESTED + b"K\x01sub."
    if where == "offset":
        index = b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\n)\x81}("
        index += b"X\x03\x00\x00\x00fqnX\x01\x00\x00\x00aX\x06\x00\x00\x00offset" + NESTED + b"ub"
        info = b"ctorch.distributed.checkpoint.filesystem\n_StorageInfo\n)\x81"
        data = BEFORE + b"X\x0c\x00\x00\x00storage_data}" + index + info + b"sub."
    code = (
        "import sys; from torch_dcp_backport.dist_checkpointing._src import metadata, unpickle\n"
        "try:\n metadata.from_bytes(sys.stdin.buffer.read())\n"
        "except unpickle.Refused as error:\n print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], input=data, capture_output=True, check=False)
    assert done.returncode == 0, done
    assert b"is not torch's metadata" in done.stdout


def test_many_tuples_that_are_in_no_other_are_read(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpickle, "DEEPEST", 3)
    data = (checkpoint / ".metadata").read_bytes()
    assert unpickle.tuples_in(data) > unpickle.DEEPEST
    assert set(metadata.from_bytes(data).tensors) == set(VALUES)
    with pytest.raises(unpickle.Refused, match="its checksum is wrong"):
        metadata.from_bytes(data[:-1] + b"?")


@pytest.mark.parametrize("is_nested", [False, True])
def test_many_tuples_without_room_for_their_stack(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, is_nested: bool
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    monkeypatch.setattr(unpickle, "DEEPEST", 3 if is_nested else 20)
    data = (checkpoint / ".metadata").read_bytes()
    assert unpickle.tuples_in(data) > unpickle.DEEPEST
    if is_nested:
        with pytest.raises(unpickle.Refused, match="more than 3 tuples"):
            metadata.from_bytes(BEFORE + NESTED + b"K\x01s.")
    else:
        assert set(metadata.from_bytes(data).tensors) == set(VALUES)


def test_a_record_of_many_tuples_is_refused() -> None:
    with pytest.raises(unpickle.Refused, match="tuples describe one tensor"):
        unpickle.TensorReader(b"\x80\x02}" + NESTED + b"K\x01s.")


def test_a_box_that_is_listed_twice_hides_no_gap(tmp_path: Path) -> None:
    halves = [
        ShardedTensor("w", torch.ones(2), torch.float32, (2,), (4,), (start,), None) for start in (0, 2)
    ]
    room.save({"w": halves}, tmp_path)
    whole = pickle.loads((tmp_path / ".metadata").read_bytes())
    del whole.torch_dcp_backport
    chunks = whole.state_dict_metadata["w"].chunks
    chunks[1] = chunks[0]
    (tmp_path / ".metadata").write_bytes(pickle.dumps(whole))
    assert "w: its boxes do not cover shape (4,) once" in room.verify(tmp_path)
    target = torch.zeros(4)
    with pytest.raises(CheckpointingException, match=r"all of \[0:4\]: w \(expected 4 elements, got 2"):
        room.load({"w": ShardedTensor.from_dtensor("w", target)}, tmp_path)
    assert torch.equal(target, torch.zeros(4))


def rewritten(folder: Path, change: Callable[[Any], None]) -> None:
    """Torch's metadata, with something else in it and no checksum of ours."""
    whole = pickle.loads((folder / ".metadata").read_bytes())
    del whole.torch_dcp_backport
    change(whole)
    (folder / ".metadata").write_bytes(pickle.dumps(whole))


def grow(name: str, size: int) -> Callable[[Any], None]:
    def change(whole: Any) -> None:
        for info in whole.storage_data.values():
            setattr(info, name, size)

    return change


def widen(whole: Any) -> None:
    entry = whole.state_dict_metadata["small"]
    entry.size = torch.Size((3, 2**50))
    for chunk in entry.chunks:
        chunk.sizes = torch.Size((3, 2**50))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (grow("length", 2**70), "not a place"),
        (grow("length", True), "not a place"),
        (grow("offset", 2**62), "not a place"),
        (grow("length", 2**40), "is cut short"),
        (widen, "has more values in .* than its record"),
    ],
)
def test_sizes_that_cannot_be_take_no_memory(
    checkpoint: Path, change: Callable[[Any], None], words: str
) -> None:
    rewritten(checkpoint, change)
    problems = room.verify(checkpoint)
    assert re.search(words, problems[0]), problems
    with pytest.raises(CheckpointingException, match=words):
        load(checkpoint)


def test_a_record_that_a_file_does_not_have_takes_no_memory(checkpoint: Path) -> None:
    with (
        RecordReader(checkpoint, True).open("__0_0.distcp") as source,
        pytest.raises(Damaged, match="ends at byte"),
    ):
        source.bytes_at(1, 2**60)
