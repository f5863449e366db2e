"""Values that a cast makes infinite, weights in fp8, names that no file can have."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from heard import heard
from torch.distributed.device_mesh import init_device_mesh

from torch_dcp_backport import hf

try:
    from torch.distributed.tensor import Shard, distribute_tensor
except ImportError:  # torch 2.4
    from torch.distributed._tensor import Shard, distribute_tensor

CONFIG = {"model_type": "made"}
SAYS = "values that are infinite or no numbers"


def exported(api: Any, folder: Path, kind: str, options: dict[str, Any]) -> tuple[str, list[str]]:
    """The error and the warnings of an export of shards, of which the last rank has one that is too large."""
    large, whole = torch.ones(8, 4), torch.ones(3)
    large[-1, -1] = {"large": 70000.0, "nan": torch.nan, "fine": 60000.0}[kind]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {"large": distribute_tensor(large, mesh, [Shard(0)]), "whole": whole}
    with heard("hf") as texts:
        try:
            api.save_state_dict(state, folder, like=CONFIG, how=hf.Export(**options))
        except RuntimeError as error:
            return str(error), []
    return "", [text for text in texts if SAYS in text]


@pytest.mark.parametrize("kind", ["large", "nan"])
def test_values_that_are_not_finite_after_a_cast_are_named(pools, tmp_path: Path, kind: str) -> None:
    """In one warning, on the first rank."""
    results = pools.run(exported, tmp_path / "out", kind, {"dtype": torch.float16}, world=2)
    assert [error for error, _ in results] == ["", ""]
    assert results[0][1] == [f"the export has 1 tensor(s) with {SAYS} in torch.float16: large"]
    assert results[1][1] == []
    assert (tmp_path / "out/model.safetensors").exists()


@pytest.mark.parametrize("options", [{"dtype": torch.float16}, {"dtype": torch.bfloat16}, {}], ids=str)
def test_finite_values_are_no_alarm(pools, tmp_path: Path, options: Any) -> None:
    for refuses in (False, True):
        asked = {**options, "refuse_infinite": refuses}
        for result in pools.run(exported, tmp_path / f"{refuses}", "fine", asked, world=2):
            assert result == ("", [])


@pytest.mark.parametrize(("kind", "options"), [("large", {"dtype": torch.float16}), ("nan", {})], ids=str)
def test_an_export_with_such_values_can_be_refused(pools, tmp_path: Path, kind: str, options: Any) -> None:
    """On every rank, and the folder is as it was."""
    asked = {**options, "refuse_infinite": True}
    for error, _ in pools.run(exported, tmp_path / "out", kind, asked, world=2):
        assert f"1 tensor(s) with {SAYS}" in error
        assert "large" in error
    assert not (tmp_path / "out/config.json").exists()


FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [2, 3]}, "torch_dtype": "bfloat16"}


def loaded(api: Any, folder: Path, names: list[str], dtype: torch.dtype) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state: dict[str, Any] = {}
    for name in names:
        shape = (2, 2) if name.endswith("_scale_inv") else (4, 6)
        kind = torch.float32 if name.endswith("_scale_inv") else dtype
        state[name] = distribute_tensor(torch.zeros(shape).to(kind), mesh, [Shard(0)])
    try:
        api.load_state_dict(state, folder)
    except RuntimeError as error:
        return str(error)
    return {name: value.full_tensor() for name, value in state.items() if value.dtype.itemsize > 1}


def write_fp8(folder: Path, config: dict[str, Any]) -> torch.Tensor:
    from safetensors.torch import save_file

    folder.mkdir()
    values = torch.arange(24.0).view(4, 6).to(torch.float8_e4m3fn)
    scales = torch.tensor([[0.5, 1.0], [2.0, 4.0]])
    save_file({"w": values, "w_scale_inv": scales}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    return (values.float() * scales.repeat_interleave(2, 0).repeat_interleave(3, 1)).bfloat16()


def test_blocks_in_fp8_are_read_as_what_they_stand_for(pools, tmp_path: Path) -> None:
    """Into plain weights; scales that a state dict has itself go as they are."""
    pytest.importorskip("safetensors")
    expected = write_fp8(tmp_path / "m", FP8)
    for found in pools.run(loaded, tmp_path / "m", ["w"], torch.bfloat16, world=2):
        assert torch.equal(found["w"], expected)
    for found in pools.run(loaded, tmp_path / "m", ["w_scale_inv"], torch.float32, world=2):
        assert found["w_scale_inv"].flatten().tolist() == [0.5, 1.0, 2.0, 4.0]


def test_another_quantisation_is_named(pools, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    write_fp8(tmp_path / "m", {"quantization_config": {"quant_method": "fbgemm_fp8"}})
    for found in pools.run(loaded, tmp_path / "m", ["w"], torch.bfloat16, world=2):
        assert "quantised weights, of which those in fp8 in blocks alone" in found
        assert "fbgemm_fp8" in found


HALF = "w\ud800"


def with_half(api: Any, folder: Path, way: str) -> str:
    half = "w\ud800"
    state = {half: torch.zeros(2), "other": torch.zeros(2)}
    try:
        if way == "save":
            api.save_state_dict(state, folder / "out", like=CONFIG)
        elif way == "load":
            api.load_state_dict(state, folder)
        else:
            api.load_state_dict({"other": torch.zeros(2)}, folder)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("way", ["save", "load", "files"])
def test_a_name_that_no_file_can_have_is_one_error(pools, tmp_path: Path, way: str) -> None:
    """A half of a character, as a name that was decoded with `surrogateescape` may have."""
    name = HALF if way == "files" else "other"
    header = json.dumps({name: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    texts = pools.run(with_half, tmp_path, way, world=2)
    assert len(set(texts)) == 1
    assert "a name with half of a character (a surrogate)" in texts[0]
    assert "w\\ud800" in texts[0]
