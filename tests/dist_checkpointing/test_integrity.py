"""The SHA-256 of every file, on request: saved with the rest or not at all, compared before a load."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from damaging import flip

from torch_dcp_backport import dist_checkpointing as room
from torch_dcp_backport.dist_checkpointing import CheckpointingException, ShardedObject, ShardedTensor
from torch_dcp_backport.dist_checkpointing.serialization import remove_sharded_tensors
from torch_dcp_backport.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from torch_dcp_backport.dist_checkpointing.validation import (
    save_integrity_manifest,
    verify_integrity_manifest,
)
from torch_dcp_backport.publish import disk


def state_of(value: float) -> dict[str, Any]:
    rank = dist.get_rank() if dist.is_initialized() else 0
    world = dist.get_world_size() if dist.is_initialized() else 1
    large = torch.full((40_000,), value + rank)
    return {
        "large": ShardedTensor.from_rank_offsets("large", large, (0, rank, world)),
        "small": ShardedTensor.from_rank_offsets("small", torch.full((3,), value), (0, rank, world)),
        "rng": ShardedObject("rng", {"rank": rank}, (world,), (rank,)),
        "step": 1,
    }


def saved(room: Any, folder: Path, value: float, background: bool = False) -> None:
    request = room.save(state_of(value), folder, async_sharded_save=background, verify_integrity=True)
    if background:
        queue = AsyncCallsQueue()
        queue.schedule_async_request(request)
        queue.close()


def listed(folder: Path) -> dict[str, str]:
    known = json.loads((folder / "integrity.json").read_text())
    assert known["algorithm"] == "sha256"
    return dict(known["files"])


def digests(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.iterdir()
        if path.name != "integrity.json"
    }


@pytest.mark.parametrize("background", [False, True], ids=["now", "in the background"])
def test_every_file_is_listed(ranks: Any, tmp_path: Path, background: bool) -> None:
    ranks(saved, tmp_path, 1.0, background)
    assert len(listed(tmp_path)) == 4 + 3
    assert listed(tmp_path) == digests(tmp_path)
    assert room.verify(tmp_path) == []
    assert ranks(loaded, tmp_path) == [""] * 4
    verify_integrity_manifest(tmp_path)


def loaded(room: Any, folder: Path) -> str:
    """The error of a load that compares; it must have left the tensors alone."""
    state = state_of(0.0)
    state["large"].data.zero_()
    try:
        room.load(state, folder, verify_integrity=True)
    except CheckpointingException as error:
        assert bool((state["large"].data == 0).all())
        return str(error)
    assert bool((state["large"].data == 1.0 + dist.get_rank()).all())
    return ""


def other_step(folder: Path) -> None:
    """A file of another step, whole in itself, and with the same sizes."""
    shutil.copy(folder.parent / "other" / "__2_0.distcp", folder)


FAULTS = {
    "the file of another step": (other_step, "a file is not the one that was saved (wrong SHA-256): __2_0"),
    "a file is gone": (
        lambda folder: (folder / "__1_0.distcp").unlink(),
        "a file cannot be read: __1_0.distcp",
    ),
    "a flipped bit": (lambda folder: flip(folder / "__3_0.distcp"), "(wrong SHA-256): __3_0.distcp"),
    "no list": (lambda folder: (folder / "integrity.json").unlink(), "has no integrity.json: it was saved"),
    "no JSON": (lambda folder: (folder / "integrity.json").write_text("{"), "integrity.json is damaged"),
    "another algorithm": (
        lambda folder: (folder / "integrity.json").write_text('{"algorithm": "md5", "files": {}}'),
        "has another algorithm: md5",
    ),
    "a file outside": (
        lambda folder: (folder / "integrity.json").write_text(
            '{"algorithm": "sha256", "files": {"../other/common.pt": "0"}}'
        ),
        "a file outside the checkpoint's folder: '../other/common.pt'",
    ),
    "an unlisted file": (
        lambda folder: (folder / "integrity.json").write_text('{"algorithm": "sha256", "files": {}}'),
        "integrity.json does not list a file: __0_0.distcp",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_told_on_every_rank_before_anything_is_loaded(
    ranks: Any, tmp_path: Path, fault: str
) -> None:
    for name, value in (("one", 1.0), ("other", 1.0 if fault != "the file of another step" else 2.0)):
        (tmp_path / name).mkdir()
        ranks(saved, tmp_path / name, value)
    folder = tmp_path / "one"
    damage, words = FAULTS[fault]
    damage(folder)
    (text,) = set(ranks(loaded, folder))
    assert words in text
    if fault != "no list":
        assert any(words in problem for problem in room.verify(folder))
        with pytest.raises(CheckpointingException):
            verify_integrity_manifest(folder)


def test_no_bit_of_the_list_can_be_another(tmp_path: Path) -> None:
    room.save(state_of(1.0), tmp_path, verify_integrity=True)
    path = tmp_path / "integrity.json"
    before = path.read_bytes()
    for place in range(0, len(before), 7):
        data = bytearray(before)
        data[place] ^= 1
        path.write_bytes(data)
        if json_of(path) != json.loads(before):
            assert room.verify(tmp_path) != [], place
        path.write_bytes(before)
    assert room.verify(tmp_path) == []


def json_of(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except ValueError:
        return None


def test_a_list_is_never_that_of_an_older_checkpoint(tmp_path: Path) -> None:
    room.save(state_of(1.0), tmp_path, verify_integrity=True)
    room.save(state_of(2.0), tmp_path)
    assert not (tmp_path / "integrity.json").exists()
    assert room.verify(tmp_path) == []


def test_the_marker_comes_after_the_list(tmp_path: Path) -> None:
    steps: list[str] = []
    disk.on_step = steps.append
    try:
        room.save(state_of(1.0), tmp_path, verify_integrity=True)
    finally:
        disk.on_step = None
    order = [steps.index(f"rename {name}") for name in (".metadata", "integrity.json", "metadata.json")]
    assert order == sorted(order)
    assert "sync folder" in steps[order[1] : order[2]]


def test_removed_keys(tmp_path: Path) -> None:
    room.save(state_of(1.0), tmp_path, verify_integrity=True)
    remove_sharded_tensors(tmp_path, "large")
    assert listed(tmp_path) == digests(tmp_path)
    assert room.verify(tmp_path) == []
    save_integrity_manifest(tmp_path)
    assert listed(tmp_path) == digests(tmp_path)


def test_the_command(tmp_path: Path) -> None:
    room.save(state_of(1.0), tmp_path, verify_integrity=True)
    path = tmp_path / "integrity.json"
    known = json.loads(path.read_text())
    known["files"]["common.pt"] = "0" * 64
    path.write_text(json.dumps(known))
    command = [sys.executable, "-m", "torch_dcp_backport", "checkpoint", "verify", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, check=False, text=True)
    assert done.returncode == 1
    assert "wrong SHA-256): common.pt" in done.stdout
