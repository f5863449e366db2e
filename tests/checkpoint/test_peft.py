"""Beside peft itself: what it merges, and what it opens. In the lanes that have it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_hf_export import qwen2

from torch_dcp_backport.checkpoint import FSDPCheckpointManager, export_checkpoint

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
