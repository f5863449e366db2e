"""torch's `dcp.save` and `dcp.load` with this room's writer and reader: with the other's, and with damage."""

from __future__ import annotations

import dataclasses
import os
import warnings
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from damaging import flip
from packaging.version import Version
from qwen import build, differences, expected, fill
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from torch_dcp_backport import dist_checkpointing
from torch_dcp_backport.compat import DTensor, Shard
from torch_dcp_backport.dist_checkpointing import validation
from torch_dcp_backport.dist_checkpointing._src import metadata
from torch_dcp_backport.dist_checkpointing._src.metadata import RecordPlace
from torch_dcp_backport.dist_checkpointing.storage import CheckedReader, CheckedWriter
from torch_dcp_backport.dist_checkpointing.training_state import sharded_state_dict, state_of
from torch_dcp_backport.regression import meter

MIB = 2**20
# torch 2.4's FSDP2 refuses every state dict on a 2-D mesh, with or without us.
HSDP = "HSDP" if Version(torch.__version__).release >= (2, 5) else "FSDP"


@dataclasses.dataclass
class Odd:
    value: int = 3


def extra(filled: bool) -> dict[str, Any]:
    step = 7 if filled else 0
    return {"step": step, "nested": {"rates": [0.5 * step, "a"], "empty": torch.ones(0, 3) * step}}


def saved(api: Any, folder: Path, is_ours: bool, kind: str = "FSDP") -> None:
    model, optimizer = build(kind)
    fill(sharded_state_dict(model, optimizer))
    state = {**state_of(model, optimizer), "extra": extra(True)}
    dcp.save(state, storage_writer=CheckedWriter(folder) if is_ours else dcp.FileSystemWriter(folder))


def loaded(api: Any, folder: Path, is_ours: bool, kind: str) -> None:
    model, optimizer = build(kind)
    state = {**state_of(model, optimizer), "extra": extra(False)}
    dcp.load(state, storage_reader=CheckedReader(folder) if is_ours else dcp.FileSystemReader(folder))
    assert state["extra"]["step"] == 7
    assert state["extra"]["nested"]["rates"] == [3.5, "a"]
    assert differences(sharded_state_dict(model, optimizer)) == []


@pytest.mark.parametrize(("writer", "reader"), [(True, False), (False, True), (True, True)])
def test_each_reads_what_the_other_wrote(ranks: Any, tmp_path: Path, writer: bool, reader: bool) -> None:
    ranks(saved, tmp_path, writer, world=4)
    for kind, world in (("FSDP", 4), ("FSDP", 3), (HSDP, 4)):
        ranks(loaded, tmp_path, reader, kind, world=world)


def loaded_by_load(api: Any, folder: Path) -> None:
    model, optimizer = build("FSDP")
    state = sharded_state_dict(model, optimizer)
    dist_checkpointing.load({"model": state["model"]}, folder)
    assert differences(state["model"]) == []


def test_it_is_a_checkpoint_of_this_room(ranks: Any, tmp_path: Path) -> None:
    ranks(saved, tmp_path, True, world=4)
    assert dist_checkpointing.verify(tmp_path) == []
    ranks(loaded_by_load, tmp_path, world=2)
    # torch's own tool wants its planner's data.
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_to_torch_save(tmp_path, tmp_path / "whole.pt")
    state = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert state["extra"]["nested"]["rates"] == [3.5, "a"]
    part = dist_checkpointing.load_tensors_metadata(tmp_path)["model.embed_tokens.weight"]
    assert torch.equal(state["model"]["embed_tokens.weight"], expected(part))


def damaged(api: Any, folder: Path, kind: str) -> str:
    model, optimizer = build(kind)
    with pytest.raises(CheckpointException) as caught:
        dcp.load(state_of(model, optimizer), storage_reader=CheckedReader(folder))
    return str(caught.value)


def test_a_flipped_bit_is_told_on_every_rank(ranks: Any, tmp_path: Path) -> None:
    ranks(saved, tmp_path, True, world=2)
    path = tmp_path / "__1_0.distcp"
    flip(path)
    for text in ranks(damaged, tmp_path, "FSDP", world=2):
        assert "wrong checksum" in text


def fails(api: Any, folder: Path) -> str:
    model, optimizer = build("FSDP")
    if dist.get_rank() == 1:

        def full(fd: int, length: int) -> None:
            raise OSError(28, "No space left on device")

        from torch_dcp_backport.publish import disk

        disk.reserve = full
    with pytest.raises(CheckpointException) as caught:
        dcp.save(state_of(model, optimizer), storage_writer=CheckedWriter(folder))
    dist.barrier()
    return str(caught.value)


def test_a_failed_save_leaves_no_mixture(ranks: Any, pools: Any, tmp_path: Path) -> None:
    ranks(saved, tmp_path, True, world=2)
    for text in ranks(fails, tmp_path, world=2):
        assert "No space left on device" in text
    pools.get(2).close()  # what it imports has changed
    assert not dist_checkpointing.check_is_distributed_checkpoint(tmp_path)
    with pytest.raises(dist_checkpointing.CheckpointingException, match="no whole"):
        CheckedReader(tmp_path).read_metadata()
    ranks(saved, tmp_path, True, world=2)
    ranks(loaded, tmp_path, True, "FSDP", world=2)


def large(api: Any, folder: Path, world: int) -> tuple[float, float]:
    """(bytes read / own bytes, peak above the state) of a load on another number of ranks."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    local = torch.ones(8192 // dist.get_world_size(), 4096)
    state = {"w": DTensor.from_local(local, mesh, [Shard(0)])}
    if dist.get_world_size() == world:
        dcp.save(state, storage_writer=CheckedWriter(folder))
        return 0.0, 0.0
    dcp.load(state, storage_reader=CheckedReader(folder))
    local.zero_()
    known, before = meter.forget_peak(), meter.resident()
    reads = int(Path("/proc/self/io").read_text().split()[1]) if os.path.exists("/proc/self/io") else 0
    dcp.load(state, storage_reader=CheckedReader(folder))
    peak = float(meter.peak_resident() - before) if known else 0.0
    reads = int(Path("/proc/self/io").read_text().split()[1]) - reads if reads else local.nbytes
    assert bool((local == 1).all())
    return reads / local.nbytes, peak


def test_it_reads_slices_of_chunks(ranks: Any, tmp_path: Path) -> None:
    ranks(large, tmp_path, 2, world=2)
    for ratio, peak in ranks(large, tmp_path, 2, world=4):
        assert ratio <= 1.02
        assert peak <= 16 * MIB


def test_objects_of_other_classes_need_trust(tmp_path: Path) -> None:
    dcp.save({"odd": Odd(5)}, storage_writer=CheckedWriter(tmp_path))
    with pytest.raises(CheckpointException, match="Odd, which is not known to be harmless"):
        dcp.load({"odd": Odd()}, storage_reader=CheckedReader(tmp_path))
    state = {"odd": Odd()}
    dcp.load(state, storage_reader=CheckedReader(tmp_path, trust=True))
    assert state["odd"] == Odd(5)


def test_torch_makes_nothing_of_the_files_own_bytes(tmp_path: Path) -> None:
    """Flags of a dtype that the check passes over, and numpy's own unpickling takes."""
    import numpy
    from test_values import ARRAY, EIGHT, crafted, dtype, text

    state = b"K\x03" + text("|") + b"NNN" + b"J\xff\xff\xff\xff" * 2 + b"K\x3f"
    array = ARRAY + b"(K\x01(K\x01t" + dtype("S8", state) + b"\x89" + EIGHT + b"tb"
    folder = tmp_path / "crafted"
    dcp.save({"odd": numpy.zeros(1, "S8")}, storage_writer=CheckedWriter(folder))
    path = folder / "__0_0.distcp"
    # As an attacker would: with the sizes and checksums of the new bytes.
    data = crafted(array)
    index = metadata.from_bytes((folder / ".metadata").read_bytes())
    index.objects["odd"] = RecordPlace(path.name, 0, len(data), crc32(data))
    path.write_bytes(data)
    (folder / ".metadata").write_bytes(metadata.to_bytes(index))
    loaded = {"odd": None}
    dcp.load(loaded, storage_reader=CheckedReader(folder))
    assert loaded["odd"].dtype == numpy.dtype("S8")
    assert loaded["odd"].tobytes() == b"A" * 8


def keys_of(folder: Path, reader: Any) -> list[str]:
    state: dict[str, Any] = {}
    _load_state_dict(state, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return list(state)


def test_keys_come_in_torchs_order(tmp_path: Path) -> None:
    state = {"step": "a", "w": torch.ones(2), "name": "b", "v": torch.ones(3)}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "native"))
    dcp.save(state, storage_writer=CheckedWriter(tmp_path / "ours"))
    expected = keys_of(tmp_path / "native", dcp.FileSystemReader(tmp_path / "native"))
    for folder in (tmp_path / "native", tmp_path / "ours"):
        for reader in (CheckedReader(folder), dcp.FileSystemReader(folder)):
            assert keys_of(folder, reader) == expected


def test_removed_keys_leave_the_others_in_their_places(tmp_path: Path) -> None:
    state = {"step": "a", "model": {"w": torch.ones(2), "inner": {"v": torch.ones(3)}}, "b": torch.ones(1)}
    dcp.save(state, storage_writer=CheckedWriter(tmp_path))
    dist_checkpointing.remove_sharded_tensors(tmp_path, "b")
    assert dist_checkpointing.verify(tmp_path) == []
    loaded: dict[str, Any] = {}
    _load_state_dict(
        loaded,
        storage_reader=dcp.FileSystemReader(tmp_path),
        planner=_EmptyStateDictLoadPlanner(),
        no_dist=True,
    )
    assert list(loaded) == ["step", "model"]
    assert torch.equal(loaded["model"]["inner"]["v"], torch.ones(3))


def test_a_tensor_that_no_record_can_hold_is_not_saved(tmp_path: Path) -> None:
    state = {"w": torch.ones(2), "q": torch.quantize_per_tensor(torch.ones(4), 0.1, 3, torch.qint8)}
    with pytest.raises(
        CheckpointException, match=r"without values in memory: q \(quantized Tensor of torch.qint8\)"
    ):
        dcp.save(state, storage_writer=CheckedWriter(tmp_path))
    assert not (tmp_path / "metadata.json").exists()


def test_zeros_that_take_no_memory(tmp_path: Path) -> None:
    # As forward-mode differentiation makes them.
    dcp.save({"w": torch._efficientzerotensor((4,))}, storage_writer=CheckedWriter(tmp_path))
    loaded = torch.ones(4)
    dcp.load({"w": loaded}, storage_reader=CheckedReader(tmp_path))
    assert torch.equal(loaded, torch.zeros(4))


def test_a_tensor_of_many_axes(tmp_path: Path) -> None:
    # numpy up to 1.26 has no more than 32.
    value = torch.arange(4.0).view(*[1] * 32, 4)
    dcp.save({"w": value}, storage_writer=CheckedWriter(tmp_path))
    loaded = torch.zeros_like(value)
    dcp.load({"w": loaded}, storage_reader=CheckedReader(tmp_path))
    assert torch.equal(loaded, value)


def shrunk(numel: int, nbytes: int) -> torch.Tensor:
    tensor = torch.ones(numel)
    tensor.untyped_storage().resize_(nbytes)
    return tensor


@pytest.mark.parametrize(("numel", "nbytes"), [(8, 0), (8, 16), (30_000, 16)])
def test_memory_that_was_freed_is_neither_read_nor_written(tmp_path: Path, numel: int, nbytes: int) -> None:
    with pytest.raises(CheckpointException, match=r"without values in memory: w \(its memory was freed\)"):
        dcp.save({"w": shrunk(numel, nbytes)}, storage_writer=CheckedWriter(tmp_path / "first"))
    dcp.save({"w": torch.ones(numel)}, storage_writer=CheckedWriter(tmp_path / "second"))
    with pytest.raises(CheckpointException):
        dcp.load({"w": shrunk(numel, nbytes)}, storage_reader=CheckedReader(tmp_path / "second"))


def test_what_names_a_folder(tmp_path: Path) -> None:
    assert CheckedReader.validate_checkpoint_id(tmp_path)
    assert not CheckedReader.validate_checkpoint_id(tmp_path / "none")
    assert CheckedWriter.validate_checkpoint_id(tmp_path / "none")
    assert not CheckedWriter.validate_checkpoint_id("s3://there")


def hashed(api: Any, folder: Path, differs: bool = False) -> str:
    model, optimizer = build("FSDP")
    fill(sharded_state_dict(model, optimizer))
    is_hashed = not differs or dist.get_rank() == 0
    try:
        dcp.save(state_of(model, optimizer), storage_writer=CheckedWriter(folder, verify_integrity=is_hashed))
    except CheckpointException as error:
        return str(error)
    return ""


def local(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def compared(api: Any, folder: Path) -> str:
    model, optimizer = build("FSDP")
    state = state_of(model, optimizer)
    before = {key: local(value).clone() for key, value in state["model"].items()}
    try:
        dcp.load(state, storage_reader=CheckedReader(folder, verify_integrity=True))
    except CheckpointException as error:
        # Of other ranks' files, too: nothing was loaded.
        assert all(torch.equal(value, local(state["model"][key])) for key, value in before.items())
        return str(error)
    assert differences(sharded_state_dict(model, optimizer)) == []
    return ""


def test_digests_on_request(ranks: Any, tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other):
        assert set(ranks(hashed, folder, world=2)) == {""}
    assert dist_checkpointing.verify(one) == []
    validation.verify_integrity_manifest(one)
    assert set(ranks(compared, one, world=2)) == {""}
    # Whole in itself, and of another step: no checksum within it is wrong.
    path = other / "__1_0.distcp"
    ranks(saved, other, True, world=2)
    for text in ranks(compared, other, world=2):
        assert "has no integrity.json: it was saved without verify_integrity=True" in text
    changed = bytearray((one / path.name).read_bytes())
    changed[-1] ^= 1
    (one / path.name).write_bytes(changed)
    for text in ranks(compared, one, world=2):
        assert "a file is not the one that was saved (wrong SHA-256): __1_0.distcp" in text
    (one / "integrity.json").write_text('{"algorithm": "sha256", "files": {}}')
    for text in ranks(compared, one, world=2):
        assert "integrity.json does not list a file: .metadata" in text


def test_digests_on_some_ranks_alone_are_refused(ranks: Any, tmp_path: Path) -> None:
    for text in ranks(hashed, tmp_path, True, world=2):
        assert "no SHA-256 of __1_0.distcp: verify_integrity differs between ranks" in text
    assert not dist_checkpointing.check_is_distributed_checkpoint(tmp_path)
