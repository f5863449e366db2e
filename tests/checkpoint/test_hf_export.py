"""Checkpoints as Hugging Face files: saved beside by all ranks, or exported later by one process."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any, Optional

import pytest
import torch
import torch.distributed as dist
from damaging import flip
from torch.distributed.device_mesh import init_device_mesh
from trainer import Trainer

from torch_dcp_backport import hf
from torch_dcp_backport.__main__ import main
from torch_dcp_backport.checkpoint import FSDPCheckpointManager, export_checkpoint
from torch_dcp_backport.dist_checkpointing import CheckpointingException, ShardedTensor
from torch_dcp_backport.dist_checkpointing import save as save_sharded
from torch_dcp_backport.dist_checkpointing.training_state import save_training_state
from torch_dcp_backport.regression import memory, meter
from torch_dcp_backport.transfer._src.layout import whole

try:
    from torch.distributed.fsdp import fully_shard
except ImportError:  # torch 2.4 and 2.5
    from torch.distributed._composable.fsdp import fully_shard

BOTH = {"save_contents": ["model", "optimizer", "extra", "hf_model"]}


def qwen2(tied: bool) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=33,
        hidden_size=16,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        torch_dtype="float32",
    )
    return transformers.Qwen2ForCausalLM(config)


def save(api: Any, root: Path, tied: bool) -> None:
    model = qwen2(tied)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in [*model.model.layers, model]:
        fully_shard(layer, mesh=mesh)
    trainer = Trainer(root, model, config=BOTH)
    trainer.handler.save_checkpoint(1)
    assert trainer.handler.load_checkpoint() == 1


@pytest.mark.parametrize("tied", [True, False])
def test_from_pretrained_opens_both_bit_for_bit(ranks, tmp_path: Path, tied: bool, capsys) -> None:
    transformers = pytest.importorskip("transformers")
    os.environ["HF_HUB_OFFLINE"] = "1"
    ranks(save, tmp_path, tied, world=3)
    step = tmp_path / "global_step_1"
    # Its own files may be gone: they are of use to others only.
    online = tmp_path / "online"
    shutil.copytree(step / "huggingface", online)
    assert main(["checkpoint", "export", str(step), str(tmp_path / "offline")]) == 0
    assert f"in {tmp_path / 'offline'}" in capsys.readouterr().out
    model = qwen2(tied)
    ids = torch.arange(12).view(2, 6)
    for folder in (online, tmp_path / "offline"):
        assert ("lm_head.weight" in hf.Folder(folder).tensors) is not tied
        assert json.loads((folder / "config.json").read_text())["architectures"] == ["Qwen2ForCausalLM"]
        again, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder, torch_dtype="auto", output_loading_info=True
        )
        assert not any(info.values()), info
        state = again.state_dict()
        assert set(state) == set(model.state_dict())
        assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
        with torch.no_grad():
            assert torch.equal(again.eval()(ids).logits, model.eval()(ids).logits)


def test_a_model_without_a_configuration_has_no_such_files(tmp_path: Path) -> None:
    """Said before the training, not by its first save."""
    with pytest.raises(ValueError, match="no hf_model of a Sequential: it has no config"):
        Trainer(tmp_path, config=BOTH)


def test_they_are_never_loaded() -> None:
    with pytest.raises(ValueError, match="'hf_model' is not offered"):
        FSDPCheckpointManager(torch.nn.Linear(1, 1), None, checkpoint_config={"load_contents": ["hf_model"]})


CONFIG = {"model_type": "made"}


def saved(folder: Path, model: Optional[torch.nn.Module] = None) -> torch.nn.Module:
    folder.mkdir()
    model = torch.nn.Linear(3, 2).bfloat16() if model is None else model
    save_training_state(folder, model)
    return model


def test_a_folder_of_save_training_state_in_another_dtype(tmp_path: Path) -> None:
    model = saved(tmp_path / "a")
    written = export_checkpoint(
        tmp_path / "a", tmp_path / "b", like=CONFIG, how=hf.Export(torch.float32, file_bytes=12)
    )
    assert written.keys == ("bias", "weight") or written.keys == ("weight", "bias")
    source = hf.Folder(tmp_path / "b")
    assert source.config == CONFIG
    for key, value in model.state_dict().items():
        box = whole(tuple(value.shape))
        assert torch.equal(source.part(key, box), value.float())


def test_an_export_holds_two_buffers_and_no_model(tmp_path: Path) -> None:
    saved(tmp_path / "a", torch.nn.Linear(4096, 12288, bias=False))
    if not meter.forget_peak():
        pytest.skip("this system does not tell a process's peak memory")
    with memory.limit(peak=100 * 2**20):  # of 192 MiB
        export_checkpoint(tmp_path / "a", tmp_path / "b", like=CONFIG)


def damaged(folder: Path) -> None:
    path = next(folder.glob("*.distcp"))
    flip(path)


def cut_short(folder: Path) -> None:
    path = next(folder.glob("*.distcp"))
    path.write_bytes(path.read_bytes()[:100])


def no_index(folder: Path) -> None:
    (folder / ".metadata").unlink()


@pytest.mark.parametrize(
    ("harm", "says"),
    [(damaged, "are damaged"), (cut_short, "is cut short"), (no_index, "no whole checkpoint")],
)
def test_a_damaged_checkpoint_gives_no_model(tmp_path: Path, capsys, harm, says) -> None:
    saved(tmp_path / "a", torch.nn.Linear(300, 200))
    harm(tmp_path / "a")
    (tmp_path / "like").mkdir()
    (tmp_path / "like" / "config.json").write_text(json.dumps(CONFIG))
    paths = [str(tmp_path / name) for name in ("a", "b", "like")]
    assert main(["checkpoint", "export", *paths[:2], "--like", paths[2]]) == 1
    assert re.search(says, capsys.readouterr().err)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "like"]


def test_what_cannot_be_exported(tmp_path: Path) -> None:
    saved(tmp_path / "a")
    with pytest.raises(CheckpointingException, match=r"has no huggingface/config\.json: is it a checkpoint"):
        export_checkpoint(tmp_path / "a", tmp_path / "b")
    with pytest.raises(CheckpointingException, match=r"'x' is no torch\.dtype"):
        export_checkpoint(tmp_path / "a", tmp_path / "b", like=CONFIG, how=hf.Export("x"))  # type: ignore[arg-type]
    (tmp_path / "none").mkdir()
    save_sharded({"weight": ShardedTensor.from_dtensor("weight", torch.ones(2))}, tmp_path / "none")
    with pytest.raises(CheckpointingException, match="no model: no tensor's key begins with model"):
        export_checkpoint(tmp_path / "none", tmp_path / "b", like=CONFIG)
    export_checkpoint(tmp_path / "a", tmp_path / "b", like=CONFIG)
    with pytest.raises(CheckpointingException, match="overwrite=True"):
        export_checkpoint(tmp_path / "a", tmp_path / "b", like=CONFIG)
    export_checkpoint(tmp_path / "a", tmp_path / "b", like=CONFIG, how=hf.Export(overwrite=True))


def test_a_companion_that_was_damaged_gives_no_model(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    folder = trainer.handler.save_checkpoint(1)
    config = folder / "huggingface" / "config.json"
    assert not config.exists()
    trainer.model.config = Config()
    folder = trainer.handler.save_checkpoint(2)
    config = folder / "huggingface" / "config.json"
    export_checkpoint(folder, tmp_path / "out")
    config.write_text(config.read_text().replace("made", "mad3"))
    with pytest.raises(CheckpointingException, match=r"huggingface/config.json has CRC32"):
        export_checkpoint(folder, tmp_path / "other")


class Config:
    """A configuration as transformers', as far as it is used here."""

    architectures = ("Model",)

    def save_pretrained(self, folder: str) -> None:
        os.makedirs(folder, exist_ok=True)
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG))


def test_a_checkpoint_is_not_written_into(tmp_path: Path) -> None:
    saved(tmp_path / "a")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    for target in (tmp_path / "a", tmp_path / "a" / "huggingface", tmp_path / "link" / "x"):
        with pytest.raises(CheckpointingException, match="is in the checkpoint"):
            export_checkpoint(tmp_path / "a", target, like=CONFIG, how=hf.Export(overwrite=True))


def test_a_dtype_that_is_none_is_wrong_usage(tmp_path: Path, capsys) -> None:
    assert main(["checkpoint", "export", str(tmp_path), str(tmp_path / "b"), "--dtype", "save"]) == 2
    assert "argument --dtype: save: expected one of float64" in capsys.readouterr().err
