"""Beside peft itself: what it merges, and what it opens. In the lanes that have it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_hf_export import qwen2

from torch_dcp_backport import hf
from torch_dcp_backport.checkpoint import FSDPCheckpointManager, export_checkpoint
from torch_dcp_backport.transfer._src import once

peft = pytest.importorskip("peft")

CASES: dict[str, dict[str, Any]] = {
    "all linear layers": {"target_modules": "all-linear"},
    "factors and ranks of their own": {
        "target_modules": ["q_proj", "down_proj"], "use_rslora": True, "alpha_pattern": {"q_proj": 5},
        "rank_pattern": {"layers.1.mlp.down_proj": 3},
    },
    "an embedding": {"target_modules": ["embed_tokens", "v_proj"]},
    "a whole module": {"target_modules": ["v_proj"], "modules_to_save": ["lm_head"]},
    "trained biases": {"target_modules": ["q_proj"], "bias": "all"},
    "biases of its own": {"target_modules": ["q_proj"], "lora_bias": True},
}  # fmt: skip


def without_torchao() -> None:
    """torchtune's, in one of the lanes that have peft, is older than any that peft takes, so it raises."""
    import peft.tuners.lora.torchao

    peft.tuners.lora.torchao.is_torchao_available = lambda: False


def adapted(dtype: torch.dtype, settings: dict[str, Any]) -> Any:
    without_torchao()
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, **settings)
    model = peft.get_peft_model(qwen2(False).to(dtype), config)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=draw) * 0.1)
    return model.eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_exports_are_what_peft_merges_and_opens_bit_for_bit(tmp_path: Path, name: str, dtype) -> None:
    import transformers

    model, step = adapted(dtype, CASES[name]), tmp_path / "global_step_1"
    contents = {"save_contents": ["model", "hf_model"]}
    FSDPCheckpointManager(model, None, checkpoint_config=contents).save_checkpoint(step, global_step=1)
    export_checkpoint(step, tmp_path / "merged")
    export_checkpoint(step, tmp_path / "alone", adapter="alone")
    trained = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    qwen2(False).to(dtype).save_pretrained(tmp_path / "base")
    for folder in (step / "adapter", tmp_path / "alone"):
        base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", torch_dtype=dtype)
        opened = peft.PeftModel.from_pretrained(base, folder)
        found = peft.get_peft_model_state_dict(opened, save_embedding_layers=False)
        assert set(found) == set(trained)
        assert all(torch.equal(found[key].to(value.dtype), value) for key, value in trained.items())
    expected = model.merge_and_unload().state_dict()
    for folder in (step / "huggingface", tmp_path / "merged"):
        opened, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder, torch_dtype=dtype, output_loading_info=True
        )
        assert not any(info.values()), info
        state = opened.state_dict()
        assert set(state) == set(expected)
        assert all(torch.equal(state[key], value) for key, value in expected.items())


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"target_modules": ["q_proj"], "use_dora": True}, "use_dora=True"),
        ({"target_modules": ["v_proj"], "trainable_token_indices": [1, 2]}, "trainable_token_indices="),
    ],
    ids=str,
)
def test_other_adapters_are_refused_by_name(tmp_path: Path, settings: dict[str, Any], says: str) -> None:
    step = tmp_path / "global_step_1"
    FSDPCheckpointManager(adapted(torch.float32, settings), None).save_checkpoint(step)
    with pytest.raises(Exception, match=says):
        export_checkpoint(step, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("active", ["default", "other"])
def test_of_two_adapters_the_active_one_is_merged(tmp_path: Path, active: str) -> None:
    import transformers

    model = adapted(torch.float32, {"target_modules": ["q_proj"]})
    model.add_adapter("other", peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["v_proj"]))
    model.set_adapter(active)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.add_(torch.randn_like(parameter))
    step = tmp_path / "global_step_1"
    contents = {"save_contents": ["model", "hf_model"]}
    FSDPCheckpointManager(model, None, checkpoint_config=contents).save_checkpoint(step, global_step=1)
    with pytest.raises(Exception, match=r"the adapters default, other, which of them is not known"):
        export_checkpoint(step, tmp_path / "out")
    export_checkpoint(step, tmp_path / "out", adapter_name=active)
    export_checkpoint(step, tmp_path / "alone", adapter_name=active, adapter="alone")
    trained = peft.get_peft_model_state_dict(model, adapter_name=active, save_embedding_layers=False)
    base = peft.PeftModel.from_pretrained(qwen2(False), tmp_path / "alone")
    found = peft.get_peft_model_state_dict(base, save_embedding_layers=False)
    assert set(found) == set(trained)
    assert all(torch.equal(found[key], value) for key, value in trained.items())
    expected = model.merge_and_unload(adapter_names=[active]).state_dict()
    for folder in (step / "huggingface", tmp_path / "out"):
        state = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
        assert set(state) == set(expected)
        assert all(torch.equal(state[key], value) for key, value in expected.items())


def unloaded(model: Any) -> Any:
    return model.merge_and_unload()


def taken_apart(model: Any) -> Any:
    return model.get_base_model()


def emptied(model: Any) -> Any:
    # A wrapper without an adapter does not run.
    model.delete_adapter("default")
    return model


@pytest.mark.parametrize("change", [unloaded, taken_apart, emptied], ids=lambda change: change.__name__)
def test_an_adapter_is_what_has_tensors_in_the_model(tmp_path: Path, change: Any) -> None:
    """peft leaves its configurations at a model that it no longer wraps."""
    import transformers

    model = adapted(torch.float32, {"target_modules": ["q_proj"]})
    ids = torch.arange(9)[None]
    model = change(model).eval()
    logits = (model.base_model.model if change is emptied else model)(ids).logits
    contents = {"save_contents": ["model", "hf_model"]}
    FSDPCheckpointManager(model, None, checkpoint_config=contents).save_checkpoint(tmp_path / "step")
    assert (tmp_path / "step" / "adapter").exists() == (change is taken_apart)
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "step" / "huggingface").eval()
    torch.testing.assert_close(opened(ids).logits, logits, atol=1e-5, rtol=1e-5)


def test_an_adapter_that_was_injected(tmp_path: Path) -> None:
    import transformers

    without_torchao()
    model = peft.inject_adapter_in_model(peft.LoraConfig(r=4, target_modules=["q_proj"]), qwen2(False)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.normal_()
    contents = {"save_contents": ["model", "hf_model"]}
    FSDPCheckpointManager(model, None, checkpoint_config=contents).save_checkpoint(tmp_path / "step")
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "step" / "huggingface").eval()
    ids = torch.arange(9)[None]
    torch.testing.assert_close(opened(ids).logits, model(ids).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("targets", [["c_proj", "lm_head"], ["lm_head", "c_proj"], ["c_proj"]], ids=str)
def test_square_weights_of_two_kinds_of_layers(tmp_path: Path, targets: list[str]) -> None:
    """GPT-2's projections are (in, out), its head is not, and peft has one setting for both."""
    import transformers

    without_torchao()
    torch.manual_seed(0)
    sizes = {"vocab_size": 33, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    base = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, tie_word_embeddings=False))
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=targets)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.normal_()
    contents = {"save_contents": ["model", "hf_model"]}
    FSDPCheckpointManager(model, None, checkpoint_config=contents).save_checkpoint(tmp_path / "step")
    export_checkpoint(tmp_path / "step", tmp_path / "out")
    for asked in (True, False):
        config = {**model.peft_config["default"].to_dict(), "fan_in_fan_out": asked}
        how = hf.Export(overwrite=True)
        hf.save_state_dict(
            model.state_dict(), tmp_path / str(asked), like=base.config, adapter=config, how=how
        )
    expected = model.merge_and_unload().state_dict()
    for folder in ("step/huggingface", "out", "True", "False"):
        state = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / folder).state_dict()
        assert all(torch.equal(state[key], value) for key, value in expected.items()), folder


@pytest.mark.parametrize("targets", [["q_proj"], ["q_proj", "embed_tokens"]], ids=str)
def test_an_adapter_alone_of_a_vocabulary_that_has_grown(tmp_path: Path, targets: list[str]) -> None:
    import transformers

    without_torchao()
    qwen2(False).save_pretrained(tmp_path / "base")

    def base() -> Any:
        torch.manual_seed(1)
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        model.resize_token_embeddings(40)
        return model

    inner = base()
    with torch.no_grad():
        for layer in (inner.get_input_embeddings(), inner.get_output_embeddings()):
            layer.weight[33:] = torch.randn(7, 16)
    model = peft.get_peft_model(inner, peft.LoraConfig(r=4, target_modules=targets)).eval()
    model.save_pretrained(tmp_path / "expected")
    contents = {"save_contents": ["model", "hf_model"]}
    FSDPCheckpointManager(model, None, checkpoint_config=contents).save_checkpoint(tmp_path / "step")
    export_checkpoint(tmp_path / "step", tmp_path / "alone", adapter="alone")
    load = pytest.importorskip("safetensors.torch").load_file
    expected = load(tmp_path / "expected" / "adapter_model.safetensors")
    ids = torch.tensor([[1, 34, 39]])
    for folder in ("step/adapter", "alone"):
        found = load(tmp_path / folder / "adapter_model.safetensors")
        # Beside an embedding with an adapter peft leaves the head out, which has grown, too.
        assert set(found) - set(expected) <= {"base_model.model.lm_head.weight"}
        assert all(torch.equal(found[key], value) for key, value in expected.items())
        opened = peft.PeftModel.from_pretrained(base(), tmp_path / folder).eval()
        torch.testing.assert_close(opened(ids).logits, model(ids).logits)


def test_what_an_adapter_is_only_while_it_runs_is_said_once(tmp_path: Path, caplog) -> None:
    model = adapted(torch.float32, {"target_modules": ["q_proj"]})
    for layer in model.modules():
        if hasattr(layer, "set_scale"):
            layer.set_scale("default", 0.5)
            layer.enable_adapters(False)
    once.forget()
    manager = FSDPCheckpointManager(model, None, checkpoint_config={"save_contents": ["model", "hf_model"]})
    for step in range(2):
        manager.save_checkpoint(tmp_path / str(step))
    assert caplog.text.count("the adapter default is disabled in the model, and merged in hf_model") == 1
    assert caplog.text.count("the adapter default has the factor 1.0 in model.layers.0") == 1
