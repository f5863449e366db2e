"""What stands beside weights: as `save_pretrained` of model, tokenizer and processor would have it."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from test_hf_export import qwen2

from torch_dcp_backport import hf
from torch_dcp_backport.checkpoint import FSDPCheckpointManager, export_checkpoint
from torch_dcp_backport.dist_checkpointing import CheckpointingException

GENERATION = {"do_sample": True, "temperature": 0.6, "eos_token_id": [1, 2], "pad_token_id": 2}
#: Not what transformers writes: a copy is one byte for byte.
TEXT = json.dumps(GENERATION, separators=(",", ":"))
CODE = "# of this model\n"
MANAGER = "torch_dcp_backport.checkpoint"


def tokenizer(template: str = "{{ messages }}") -> Any:
    transformers = pytest.importorskip("transformers")
    library = pytest.importorskip("tokenizers")
    inner = library.Tokenizer(library.models.WordLevel({"a": 0, "b": 1, "c": 2}, unk_token="a"))
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="a", eos_token="b")
    made.chat_template = template
    return made


def base(folder: Path) -> Path:
    """The folder of a model: weights, tokenizer, several chat templates, code, a generation configuration."""
    qwen2(False).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    (folder / "generation_config.json").write_text(TEXT)
    (folder / "modeling_own.py").write_text(CODE)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("rag")
    return folder


def saved(step: Path, model: Any, contents: tuple[str, ...] = ("model",), **options: Any) -> set[str]:
    config = {"save_contents": list(contents)}
    FSDPCheckpointManager(model, None, checkpoint_config=config, **options).save_checkpoint(step)
    return {path.relative_to(step / "huggingface").as_posix() for path in files_in(step / "huggingface")}


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def loaded(folder: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


def from_config(folder: Path) -> Any:
    """As an engine makes a model: its generation configuration is derived, and knows no sampling."""
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_config(config)
    assert model.generation_config.do_sample is not True
    return model


@pytest.mark.parametrize("make", [loaded, from_config], ids=lambda make: make.__name__)
@pytest.mark.parametrize("is_told", [True, False], ids=["like", "name_or_path"])
def test_everything_of_the_models_own_folder_goes_along(tmp_path: Path, make, is_told: bool) -> None:
    folder = base(tmp_path / "base")
    model = make(folder)
    if is_told:
        model.config._name_or_path = "nowhere"
    names = saved(tmp_path / "step", model, like=folder if is_told else None)
    out = tmp_path / "step" / "huggingface"
    own = {path.relative_to(folder).as_posix() for path in files_in(folder)} - {"model.safetensors"}
    assert names == own
    for name in own - {"config.json"}:
        assert (out / name).read_bytes() == (folder / name).read_bytes()
    transformers = pytest.importorskip("transformers")
    opened = transformers.AutoTokenizer.from_pretrained(out)
    assert opened.chat_template["default"] == "{{ messages }}"
    assert set(opened.chat_template) == {"default", "rag"}
    # And into what is exported of it.
    export_checkpoint(tmp_path / "step", tmp_path / "out")
    assert {path.relative_to(tmp_path / "out").as_posix() for path in files_in(tmp_path / "out")} == {
        *own,
        "model.safetensors",
    }
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert again.generation_config.eos_token_id == [1, 2]
    assert again.generation_config.do_sample is True


def test_the_tokenizer_that_was_handed_over_goes_before_the_folders(tmp_path: Path) -> None:
    folder = base(tmp_path / "base")
    changed = tokenizer("{{ changed }}")
    names = saved(tmp_path / "step", loaded(folder), processing_class=changed)
    out = tmp_path / "step" / "huggingface"
    # It has a single template: another of the folder would be another tokenizer's.
    assert "additional_chat_templates/rag.jinja" not in names
    assert {"modeling_own.py", "generation_config.json", "tokenizer.json"} <= names
    transformers = pytest.importorskip("transformers")
    assert transformers.AutoTokenizer.from_pretrained(out).chat_template == "{{ changed }}"


def test_a_generation_configuration_that_was_changed_is_the_models(tmp_path: Path) -> None:
    folder = base(tmp_path / "base")
    model = loaded(folder)
    model.generation_config.temperature = 0.9
    saved(tmp_path / "step", model)
    found = json.loads((tmp_path / "step" / "huggingface" / "generation_config.json").read_text())
    assert found["temperature"] == 0.9
    assert found["eos_token_id"] == [1, 2]


def test_one_that_transformers_refuses_to_save_stops_no_training(tmp_path: Path, caplog) -> None:
    """Sampling settings without sampling: it loads them, and raises where they are saved."""
    folder = base(tmp_path / "base")
    model = loaded(folder)
    model.generation_config.do_sample = False
    with pytest.raises(ValueError, match="invalid"):
        model.generation_config.save_pretrained(tmp_path / "refused")
    with caplog.at_level(logging.WARNING, MANAGER):
        names = saved(tmp_path / "step", model, ("model", "hf_model"))
    assert "without a valid generation configuration" in caplog.text
    assert {"config.json", "generation_config.json", "model.safetensors"} <= names
    found = json.loads((tmp_path / "step" / "huggingface" / "generation_config.json").read_text())
    assert (found["temperature"], found["eos_token_id"]) == (0.6, [1, 2])
    manager = FSDPCheckpointManager(qwen2(False), None, checkpoint_config={"load_contents": ["model"]})
    manager.load_checkpoint(tmp_path / "step")


class Broken:
    def save_pretrained(self, folder: str) -> None:
        Path(folder, "tokenizer_config.json").write_text("half")
        raise OSError(5, "the network is gone")


def test_a_tokenizer_that_cannot_be_saved_stops_no_training(tmp_path: Path, caplog) -> None:
    folder = base(tmp_path / "base")
    with caplog.at_level(logging.WARNING, MANAGER):
        names = saved(tmp_path / "step", loaded(folder), processing_class=Broken())
    assert "without the tokenizer or processor: OSError: [Errno 5] the network is gone" in caplog.text
    # The folder's own takes its place, and nothing half.
    assert (tmp_path / "step/huggingface/tokenizer_config.json").read_bytes() == (
        folder / "tokenizer_config.json"
    ).read_bytes()
    assert not [name for name in names if ".part" in name]
    assert not list((tmp_path / "step").rglob(".*.part"))


def test_the_class_is_that_of_the_model_not_of_the_files_it_was_made_of(tmp_path: Path) -> None:
    """A value model of a language model's folder."""
    transformers = pytest.importorskip("transformers")
    folder = base(tmp_path / "base")
    config = transformers.AutoConfig.from_pretrained(folder, num_labels=1)
    model = transformers.AutoModelForTokenClassification.from_config(config)
    names = saved(tmp_path / "step", model, ("model", "hf_model"))
    # It does not generate.
    assert "generation_config.json" not in names
    found = json.loads((tmp_path / "step" / "huggingface" / "config.json").read_text())
    assert found["architectures"] == ["Qwen2ForTokenClassification"]
    assert model.config.architectures == ["Qwen2ForCausalLM"]
    export_checkpoint(tmp_path / "step", tmp_path / "out")
    for place in (tmp_path / "step" / "huggingface", tmp_path / "out"):
        opened, info = transformers.AutoModelForTokenClassification.from_pretrained(
            place, output_loading_info=True
        )
        assert not any(info.values()), info
        assert all(torch.equal(value, opened.state_dict()[key]) for key, value in model.state_dict().items())


def test_where_the_working_directory_changes_before_a_save(tmp_path: Path, monkeypatch) -> None:
    base(tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    manager = FSDPCheckpointManager(loaded(Path("base")), None, like="base")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    manager.save_checkpoint(tmp_path / "step")
    assert (tmp_path / "step" / "huggingface" / "modeling_own.py").read_text() == CODE


def grown() -> Any:
    model = qwen2(False)
    # As a program does that forgets the configuration.
    model.lm_head = torch.nn.Linear(16, 40, bias=False)
    return model


def test_an_export_that_is_refused_loses_no_step(tmp_path: Path, caplog) -> None:
    with caplog.at_level(logging.ERROR, MANAGER):
        names = saved(tmp_path / "step", grown(), ("model", "hf_model"))
    assert "is saved without the hf_model that was asked for" in caplog.text
    assert "not the shape of a Qwen2ForCausalLM: lm_head.weight" in caplog.text
    assert names == {"config.json"}
    manager = FSDPCheckpointManager(grown(), None, checkpoint_config={"load_contents": ["model"]})
    manager.load_checkpoint(tmp_path / "step")
    with pytest.raises(CheckpointingException, match=r"no hf_model[\s\S]*not the shape"):
        saved(tmp_path / "other", grown(), ("optimizer", "hf_model"))
    assert not (tmp_path / "other").exists()


def on_ranks(api: Any, root: Path) -> list[str]:
    texts = []
    for name, contents in (("a", ("model", "hf_model")), ("b", ("optimizer", "hf_model"))):
        try:
            saved(root / name, grown(), contents)
            texts.append("saved")
        except CheckpointingException as error:
            texts.append(str(error))
    return texts


def test_every_rank_goes_on_or_none(ranks, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    texts = {tuple(texts) for texts in ranks(on_ranks, tmp_path, world=2)}
    assert len(texts) == 1
    first, second = texts.pop()
    assert first == "saved"
    assert "not the shape of a Qwen2ForCausalLM" in second
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]


def test_a_full_disk_for_the_export_alone(tmp_path: Path, monkeypatch, caplog) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    pytest.importorskip("transformers")
    monkeypatch.setattr("torch_dcp_backport.hf._src.writing.reserve", full)
    with caplog.at_level(logging.ERROR, MANAGER):
        names = saved(tmp_path / "step", qwen2(False), ("model", "hf_model"))
    assert "No space left on device" in caplog.text
    assert names == {"config.json"}
    assert hf.Folder(tmp_path / "step" / "huggingface").absent


def own_classes() -> list[Any]:
    """A model of a program's own, and a class of transformers with more parameters."""
    transformers = pytest.importorskip("transformers")

    class Reward(transformers.PreTrainedModel):
        config_class = transformers.Qwen2Config
        _supports_sdpa = True

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.backbone = transformers.Qwen2Model(config)
            self.head = torch.nn.Linear(config.hidden_size, 1)

    class Mine(transformers.Qwen2ForCausalLM):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.extra = torch.nn.Linear(4, 4)

    return [Reward, Mine]


@pytest.mark.parametrize("number", [0, 1], ids=["its own", "derived"])
def test_a_class_of_the_program_is_named_as_save_pretrained_names_it(tmp_path: Path, number: int) -> None:
    kind = own_classes()[number]
    model = kind(qwen2(False).config)
    saved(tmp_path / "step", model, ("model", "hf_model"))
    model.save_pretrained(tmp_path / "expected")
    folders = (tmp_path / "step" / "huggingface", tmp_path / "expected")
    names = [json.loads((folder / "config.json").read_text())["architectures"] for folder in folders]
    assert names == [[kind.__name__]] * 2
    assert set(hf.Folder(folders[0]).tensors) == set(model.state_dict())


def test_what_a_process_has_noted_is_not_in_the_configuration(tmp_path: Path) -> None:
    """As transformers 4.51 notes that it chose how to attend; `from_pretrained` would not choose again."""
    model = qwen2(False)
    model.config._attn_implementation_autoset = True
    saved(tmp_path / "step", model)
    config = json.loads((tmp_path / "step" / "huggingface" / "config.json").read_text())
    assert config.get("_attn_implementation_autoset", False) is False
    assert model.config._attn_implementation_autoset is True
