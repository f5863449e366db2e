"""The engine's checkpoints and exports: what they hold beside weights, and the files that it begins from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import small
import torch

from torch_dcp_backport import engine
from torch_dcp_backport.checkpoint import export_checkpoint

test_qwen = pytest.importorskip("test_engine_transformers")

GENERATION = {"do_sample": True, "top_p": 0.8, "eos_token_id": [1, 2]}
CONTENTS = {"save_contents": ["model", "hf_model"]}


class Tokenizer:
    """As far as a checkpoint looks at one."""

    def save_pretrained(self, folder: str) -> None:
        Path(folder, "tokenizer_config.json").write_text('{"of": "the object"}')


class Settings:
    """As verl's own object: it has read the tokenizer already."""

    def __init__(self, folder: Path) -> None:
        self.path = self.local_path = str(folder)
        self.tokenizer, self.processor = Tokenizer(), None


def base(folder: Path) -> Any:
    model = test_qwen.write(folder)
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    (folder / "tokenizer_config.json").write_text('{"of": "the folder"}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return model


def run(api: Any, folder: Path, kind: str, root: Path) -> dict[str, torch.Tensor]:
    small.cpu_fsdp.install()
    plain = {"mixed_precision": {"param_dtype": None, "reduce_dtype": None}}
    weights: dict[str, torch.Tensor] = {}
    for name, settings in (("path", {"path": str(folder)}), ("object", Settings(folder))):
        made: Any = engine.EngineRegistry.new(
            kind, "fsdp2", settings, plain, {"optimizer": "SGD"}, CONTENTS, device="cpu"
        )
        made.initialize()
        made.save_checkpoint(root / name / "global_step_1", global_step=1)
        weights = dict(made.get_per_tensor_param(dtype=None)[0])
    return {key: value.clone() for key, value in weights.items()}


@pytest.mark.parametrize("kind", ["language_model", "value_model"])
def test_a_checkpoint_opens_as_the_model_that_was_trained(ranks, tmp_path: Path, kind: str) -> None:
    import transformers

    base(tmp_path / "base")
    weights = ranks(run, tmp_path / "base", kind, tmp_path / "runs")[0]
    names = {"language_model": "AutoModelForCausalLM", "value_model": "AutoModelForTokenClassification"}
    for name, owner in (("path", "the folder"), ("object", "the object")):
        step = tmp_path / "runs" / name / "global_step_1"
        export_checkpoint(step, tmp_path / name)
        for place in (step / "huggingface", tmp_path / name):
            opened, info = getattr(transformers, names[kind]).from_pretrained(place, output_loading_info=True)
            assert not any(info.values()), info
            state = opened.state_dict()
            assert set(state) == set(weights)
            assert all(torch.equal(state[key], value) for key, value in weights.items())
            assert type(opened).__name__ in json.loads((place / "config.json").read_text())["architectures"]
            assert json.loads((place / "tokenizer_config.json").read_text()) == {"of": owner}
            generation = place / "generation_config.json"
            assert generation.exists() == (kind == "language_model")
            if kind == "language_model":
                assert json.loads(generation.read_text()) == GENERATION
                assert opened.generation_config.eos_token_id == [1, 2]
            assert (place / "chat_template.jinja").exists() == (name == "path")


def opens(api: Any, folder: Path) -> dict[str, torch.Tensor]:
    built = test_qwen.made(folder)
    return {key: value.clone() for key, value in built.get_per_tensor_param(dtype=None)[0]}


@pytest.mark.parametrize("kind", ["Qwen2Model", "Qwen3MoeForCausalLM"])
def test_what_transformers_opens_is_opened(ranks, tmp_path: Path, kind: str) -> None:
    """Files of a model without its head; and of experts, which some releases have in a single tensor."""
    import transformers

    config = getattr(transformers, {"Qwen2Model": "Qwen2Config"}.get(kind, "Qwen3MoeConfig"))(
        vocab_size=small.VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=kind == "Qwen2Model",
        **({} if kind == "Qwen2Model" else {"num_experts": 4, "moe_intermediate_size": 12, "head_dim": 4}),
    )  # fmt: skip
    torch.manual_seed(0)
    getattr(transformers, kind)(config).save_pretrained(tmp_path)
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    expected = opened.state_dict()
    for found in ranks(opens, tmp_path):
        assert set(found) == set(expected)
        assert all(torch.equal(found[key], value) for key, value in expected.items())


def test_files_of_a_model_with_a_head_fill_the_model_without(tmp_path: Path) -> None:
    import transformers

    test_qwen.write(tmp_path)
    model = transformers.Qwen2Model(transformers.AutoConfig.from_pretrained(tmp_path))
    engine.fill(model, tmp_path)
    expected = transformers.Qwen2Model.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(value, expected[key]) for key, value in model.state_dict().items())
