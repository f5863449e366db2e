"""Checkpoints of a model with adapters: exported as the merged model, or as the adapter in peft's format."""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import wrapped
from test_hf_export import BOTH, qwen2
from torch.distributed.device_mesh import init_device_mesh
from trainer import Trainer

from torch_dcp_backport import hf
from torch_dcp_backport.__main__ import main
from torch_dcp_backport.checkpoint import FSDPCheckpointManager, export_checkpoint
from torch_dcp_backport.dist_checkpointing import CheckpointingException
from torch_dcp_backport.dist_checkpointing.training_state import save_training_state
from torch_dcp_backport.regression import memory, meter

try:
    from torch.distributed.fsdp import fully_shard
except ImportError:  # torch 2.4 and 2.5
    from torch.distributed._composable.fsdp import fully_shard

IDS = torch.arange(12).view(2, 6)
MANAGER = "torch_dcp_backport.checkpoint"


def sharded(model: Any) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in [*model.get_base_model().model.layers, model]:
        fully_shard(layer, mesh=mesh)
    return model


def save(api: Any, root: Path, tied: bool) -> None:
    trainer = Trainer(root, sharded(wrapped.Wrapped(qwen2(tied))), config=BOTH)
    trainer.handler.save_checkpoint(1)
    assert trainer.handler.load_checkpoint() == 1


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_from_pretrained_opens_the_merged_model(ranks, tmp_path: Path, tied: bool, capsys) -> None:
    transformers = pytest.importorskip("transformers")
    os.environ["HF_HUB_OFFLINE"] = "1"
    ranks(save, tmp_path, tied, world=3)
    step = tmp_path / "global_step_1"
    shutil.copytree(step / "huggingface", tmp_path / "online")
    assert main(["checkpoint", "export", str(step), str(tmp_path / "offline")]) == 0
    model = wrapped.Wrapped(qwen2(tied)).eval()
    expected = wrapped.merged(model)
    with torch.no_grad():
        logits = model(IDS).logits
    for name in ("online", "offline"):
        opened, info = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / name, torch_dtype="auto", output_loading_info=True
        )
        assert not any(info.values()), info
        state = opened.state_dict()
        assert set(state) == set(expected)
        assert all(torch.equal(state[key], value) for key, value in expected.items())
        with torch.no_grad():
            torch.testing.assert_close(opened.eval()(IDS).logits, logits, atol=1e-5, rtol=1e-5)


def test_the_adapter_alone_is_in_peft_s_format(ranks, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    ranks(save, tmp_path, False, world=2)
    step = tmp_path / "global_step_1"
    out = tmp_path / "alone"
    assert main(["checkpoint", "export", str(step), str(out), "--adapter", "alone"]) == 0
    state = wrapped.Wrapped(qwen2(False)).state_dict()
    expected = {key.replace(".default.", "."): value for key, value in state.items() if ".lora_" in key}
    for folder in (step / "adapter", out):
        assert sorted(path.name for path in folder.iterdir()) == [
            "adapter_config.json",
            "adapter_model.safetensors",
        ]
        config = json.loads((folder / "adapter_config.json").read_text())
        assert {key: config[key] for key in wrapped.SETTINGS} == wrapped.SETTINGS
        assert config["inference_mode"] is True
        found = load_file(folder / "adapter_model.safetensors")
        assert set(found) == set(expected)
        assert all(torch.equal(found[key], value) for key, value in expected.items())


def load_file(path: Path) -> Any:
    return pytest.importorskip("safetensors.torch").load_file(path)


def saved(root: Path, contents: list[str], **changed: Any) -> Path:
    model = wrapped.Wrapped(qwen2(False), **changed)
    FSDPCheckpointManager(model, None, checkpoint_config={"save_contents": contents}).save_checkpoint(root)
    return root


def test_no_option_writes_peft_s_names_beside_a_plain_configuration(tmp_path: Path) -> None:
    """A checkpoint of before: without the adapter's configuration nothing tells its factor."""
    pytest.importorskip("transformers")
    step = saved(tmp_path / "global_step_1", ["model"])
    shutil.rmtree(step / "adapter")
    (step / "manifest.json").unlink()
    with pytest.raises(CheckpointingException, match=r"no adapter/adapter_config.json: name a folder"):
        export_checkpoint(step, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "its").mkdir()
    (tmp_path / "its" / "adapter_config.json").write_text(json.dumps(wrapped.SETTINGS))
    arguments = [str(step), str(tmp_path / "out"), "--adapter-config", str(tmp_path / "its")]
    assert main(["checkpoint", "export", *arguments]) == 0
    expected = wrapped.merged(wrapped.Wrapped(qwen2(False)))
    assert set(hf.Folder(tmp_path / "out").tensors) == set(expected)


@pytest.mark.parametrize(
    ("changed", "says"),
    [({"use_dora": True}, "use_dora=True"), ({"peft_type": "VERA"}, "peft_type=VERA: only LoRA is merged")],
    ids=str,
)
def test_what_cannot_be_merged_is_named_and_the_step_is_saved(tmp_path: Path, changed, says, caplog) -> None:
    pytest.importorskip("transformers")
    with caplog.at_level(logging.ERROR, MANAGER):
        step = saved(tmp_path / "global_step_1", ["model", "hf_model"], **changed)
    assert "without the hf_model that was asked for" in caplog.text
    assert says in caplog.text or "only LoRA's own format" in caplog.text
    assert main(["checkpoint", "verify", str(step)]) == 0
    assert not (step / "huggingface" / "model.safetensors").exists()
    with pytest.raises(CheckpointingException, match=says):
        export_checkpoint(step, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    # A step that would have nothing of the model is none.
    with pytest.raises(CheckpointingException, match="no hf_model"):
        saved(tmp_path / "global_step_2", ["hf_model"], **changed)
    assert not (tmp_path / "global_step_2").exists()


def test_adapters_that_are_merged_at_a_save_would_be_added_again(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model = wrapped.Wrapped(qwen2(False))
    model.get_base_model().model.layers[0].self_attn.q_proj.merged_adapters.append("default")
    with pytest.raises(CheckpointingException, match="unmerge them before a save"):
        FSDPCheckpointManager(model, None).save_checkpoint(tmp_path / "global_step_1")
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_of_verls_own_manager(tmp_path: Path) -> None:
    """Its worker writes the adapter's configuration into a folder beside."""
    pytest.importorskip("transformers")
    model = wrapped.Wrapped(qwen2(False))
    folder = tmp_path / "actor"
    (folder / "lora_adapter").mkdir(parents=True)
    torch.save(model.state_dict(), folder / "model_world_size_1_rank_0.pt")
    (folder / "lora_adapter" / "adapter_config.json").write_text(json.dumps(wrapped.SETTINGS))
    like = {**model.config.to_dict(), "architectures": ["Qwen2ForCausalLM"]}
    export_checkpoint(folder, tmp_path / "out", like=like, trust=True)
    expected = wrapped.merged(model)
    source = hf.Folder(tmp_path / "out")
    assert set(source.tensors) == set(expected)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(found[key], value) for key, value in expected.items())


def test_a_merge_holds_a_few_buffers_and_no_model(tmp_path: Path) -> None:
    layers = torch.nn.Sequential(*(torch.nn.Linear(4096, 12288, bias=False) for _ in range(3)))
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList(wrapped.Adapted(layer) for layer in layers)
    (tmp_path / "a").mkdir()
    save_training_state(tmp_path / "a", model)
    del layers, model
    if not meter.forget_peak():
        pytest.skip("this system does not tell a process's peak memory")
    with memory.limit(peak=200 * 2**20):  # of 576 MiB
        export_checkpoint(
            tmp_path / "a", tmp_path / "b", like={"model_type": "made"}, adapter_config=wrapped.SETTINGS
        )
    names = {f"layers.{number}.weight" for number in range(3)}
    assert set(hf.Folder(tmp_path / "b").tensors) == names


def test_wrong_usage(tmp_path: Path, capsys) -> None:
    with pytest.raises(CheckpointingException, match="adapter='both' is neither 'merge' nor 'alone'"):
        export_checkpoint(tmp_path, tmp_path / "out", adapter="both")
    assert main(["checkpoint", "export", str(tmp_path), str(tmp_path / "out"), "--adapter", "both"]) == 2
    assert "--adapter" in capsys.readouterr().err


def left_over(model: Any) -> Any:
    """A model as peft 0.18 leaves it after `merge_and_unload`; the method is that of transformers."""

    def active_adapters() -> None:
        raise ValueError("No adapter loaded. Please load an adapter first.")

    model.peft_config = {"default": wrapped.Config()}
    model.active_adapters = active_adapters
    return model


def save_left_over(api: Any, root: Path) -> None:
    model = left_over(qwen2(False))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in [*model.model.layers, model]:
        fully_shard(part, mesh=mesh)
    Trainer(root, model, config=BOTH).handler.save_checkpoint(1)


def test_a_configuration_of_peft_without_tensors_is_no_adapter(ranks, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    ranks(save_left_over, tmp_path, world=2)
    step = tmp_path / "global_step_1"
    assert not (step / "adapter").exists()
    export_checkpoint(step, tmp_path / "out")
    expected = qwen2(False).state_dict()
    for folder in (step / "huggingface", tmp_path / "out"):
        state = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
        assert set(state) == set(expected)
        assert all(torch.equal(state[key], value) for key, value in expected.items())


def test_a_wrapper_whose_adapter_was_deleted_is_exported_as_its_model(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = wrapped.Wrapped(qwen2(False))
    expected = qwen2(False).state_dict()
    for layer in model.get_base_model().model.layers:
        for part in (layer.self_attn.q_proj.lora_A, layer.self_attn.q_proj.lora_B):
            del part["default"]
    model.peft_config.clear()
    contents = {"save_contents": ["model", "hf_model"]}
    FSDPCheckpointManager(model, None, checkpoint_config=contents).save_checkpoint(tmp_path / "s")
    state = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "s" / "huggingface").state_dict()
    assert all(torch.equal(state[key], value) for key, value in expected.items())


class Broken(wrapped.Config):
    """A configuration that cannot be read, on one rank or on all."""

    def to_dict(self) -> dict[str, Any]:
        if not dist.is_initialized() or dist.get_rank() == self.settings["fails_on"]:
            raise KeyError("no such setting")
        return super().to_dict()


def save_broken(api: Any, root: Path, rank: int) -> list[str]:
    texts = []
    for contents in (["model", "hf_model"], ["optimizer", "hf_model"]):
        model = wrapped.Wrapped(qwen2(False))
        model.peft_config = {"default": Broken(fails_on=rank)}
        manager = FSDPCheckpointManager(model, None, checkpoint_config={"save_contents": contents})
        try:
            manager.save_checkpoint(root / contents[0])
            texts.append("saved")
        except CheckpointingException as error:
            texts.append(str(error))
    return texts


@pytest.mark.parametrize("rank", [0, 1])
def test_whatever_an_adapter_raises_on_a_rank_the_step_is_saved(ranks, tmp_path: Path, rank: int) -> None:
    pytest.importorskip("transformers")
    texts = {tuple(texts) for texts in ranks(save_broken, tmp_path, rank, world=2)}
    assert len(texts) == 1
    first, second = texts.pop()
    assert first == "saved"
    assert "no hf_model" in second
    assert f"rank {rank}: KeyError" in second
    assert main(["checkpoint", "verify", str(tmp_path / "model")]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_an_export_that_raises_anything_costs_no_step(tmp_path: Path, monkeypatch, caplog) -> None:
    pytest.importorskip("transformers")

    def fails(*_: Any, **__: Any) -> None:
        raise LookupError("not foreseen")

    monkeypatch.setattr("torch_dcp_backport.checkpoint._src.fsdp.save_state_dict", fails)
    with caplog.at_level(logging.ERROR, MANAGER):
        step = saved(tmp_path / "global_step_1", ["model", "hf_model"])
    assert "without the hf_model that was asked for" in caplog.text
    assert "LookupError: not foreseen" in caplog.text
    assert main(["checkpoint", "verify", str(step)]) == 0


def test_an_adapter_without_a_task_names_the_class_of_its_model(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    step = saved(tmp_path / "global_step_1", ["model"])
    config = json.loads((step / "adapter" / "adapter_config.json").read_text())
    assert config["auto_mapping"] == {
        "base_model_class": "Qwen2ForCausalLM",
        "parent_library": "transformers.models.qwen2.modeling_qwen2",
    }
