"""`verify`, and the command `checkpoint`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from packaging.version import Version

from torch_dcp_backport import __main__
from torch_dcp_backport import dist_checkpointing as room
from torch_dcp_backport.dist_checkpointing import ShardedObject, ShardedTensor

ALONE: dict[str, Any] = {"no_dist": True} if Version(torch.__version__).release >= (2, 7) else {}
VALUES = {"a": torch.arange(20000.0).view(100, 200), "b": torch.arange(6).view(2, 3)}


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    state: dict[str, Any] = {key: ShardedTensor.from_dtensor(key, value) for key, value in VALUES.items()}
    room.save({**state, "rng": ShardedObject("rng", [1], (1,), (0,)), "step": 3}, tmp_path)
    return tmp_path


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    dcp.save({**VALUES, "t": VALUES["a"].t(), "n": [1, "x"]}, checkpoint_id=str(tmp_path), **ALONE)
    return tmp_path


def test_a_whole_checkpoint_of_ours(ours: Path) -> None:
    assert room.verify(ours) == []


def test_a_whole_checkpoint_of_torch(theirs: Path) -> None:
    assert room.verify(theirs) == []


@pytest.mark.parametrize("kind", ["ours", "theirs"])
def test_a_flipped_bit_of_values_is_found_in_either(request: Any, kind: str) -> None:
    folder: Path = request.getfixturevalue(kind)
    (path,) = (path for path in folder.glob("__*") if path.stat().st_size > 80000)
    content = path.read_bytes()
    # Values in the middle of the large tensor.
    at = content.index(VALUES["a"][50].numpy().tobytes())
    path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    (problem,) = room.verify(folder)
    assert problem.startswith(f"a: {path.name}: ")
    assert "wrong checksum" in problem


def test_a_missing_file_is_told_once(ours: Path) -> None:
    (ours / "__0_0.distcp").unlink()
    assert room.verify(ours) == [
        f"__0_0.distcp cannot be read: a ([Errno 2] No such file or directory: '{ours / '__0_0.distcp'}')"
    ]


def test_the_command(ours: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["checkpoint", "inspect", str(ours)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["key", "dtype", "shape", "records", "files", "bytes"]
    assert lines[1].split()[:5] == ["a", "float32", "100x200", "1", "1"]
    assert lines[-1].startswith("2 tensors, 1 objects, ")
    assert __main__.main(["checkpoint", "inspect", str(ours), "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)["entries"]
    assert [(entry["key"], entry["kind"]) for entry in entries] == [
        ("a", "tensor"),
        ("b", "tensor"),
        ("rng/shard_0_1", "object"),
    ]
    assert __main__.main(["checkpoint", "verify", str(ours)]) == 0
    assert capsys.readouterr().out.startswith("whole: 2 tensors")
    (ours / "__0_0.distcp").write_bytes(b"")
    assert __main__.main(["checkpoint", "verify", str(ours)]) == 1
    assert capsys.readouterr().out.startswith("damaged: 1 problem(s)\n  __0_0.distcp is cut short: a")
    (ours / "metadata.json").unlink()
    for arguments in (["--json"], []):
        assert __main__.main(["checkpoint", "inspect", str(ours), *arguments]) == 1
    output = capsys.readouterr()
    assert "it has no metadata.json" in json.loads(output.out)["problems"][0]
    assert "it has no metadata.json" in output.err


def test_keys_that_no_terminal_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = "a\udc80\x1b[31m"
    room.save({"a": ShardedTensor.from_dtensor(key, torch.ones(1))}, tmp_path)
    for arguments in (["inspect"], ["verify"], ["inspect", "--json"]):
        assert __main__.main(["checkpoint", arguments[0], str(tmp_path), *arguments[1:]]) == 0
    output = capsys.readouterr().out
    assert "a\\udc80\\x1b[31m" in output
    assert "\x1b" not in output
