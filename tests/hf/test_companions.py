"""The small files beside weights: the new model's, none of the old one's, and the caller's own stay."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest
import torch

from torch_dcp_backport import hf
from torch_dcp_backport.transfer.layout import whole

BOX = whole((2, 2))
WEIGHTS = {"weight": torch.ones(2, 2)}
#: Of a model with code of its own and several chat templates; a file's content is its name.
FILES = (
    "generation_config.json", "tokenizer_config.json", "vocab.json", "merges.txt", "vocab.bpe", "source.spm",
    "spiece.model", "qwen.tiktoken", "chat_template.jinja", "additional_chat_templates/rag.jinja",
    "modeling_own.py", "parts/__init__.py", "parts/norms.py", "parts/deep/layers.py",
)  # fmt: skip
CONFIG = {"model_type": "own", "auto_map": {"AutoModelForCausalLM": "modeling_own.Own"}}
#: What stands in such a folder, and is of no use to a loader.
OTHERS = (
    "README.md", "model.safetensors.index.json.bak", "adapter_config.json", ".gitattributes",
    "notes/a.py.txt", "not-a-package/x.py", "__pycache__/modeling_own.py",
    "additional_chat_templates/notes.md",
)  # fmt: skip


def fill(folder: Path, names: tuple[str, ...], config: object = CONFIG) -> Path:
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    if "modeling_own.py" in names:
        (folder / "modeling_own.py").write_text("from .parts.norms import Norm\n")
        (folder / "parts/norms.py").write_text(
            "from .deep.layers import Layer\n    from .deep import layers\n"
        )
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def names_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_everything_that_a_loader_reads_goes_along(tmp_path: Path) -> None:
    like = fill(tmp_path / "like", (*FILES, *OTHERS))
    hf.save_state_dict(WEIGHTS, tmp_path / "m", like=like)
    assert names_in(tmp_path / "m") == {*FILES, "config.json", "model.safetensors"}
    for name in (*FILES, "config.json"):
        assert (tmp_path / "m" / name).read_bytes() == (like / name).read_bytes()


MINE = ("notes.txt", "train.py", "README.md", "results.json", "logs/events.json", "parts/mine.py")


@pytest.mark.parametrize("kept", [(), ("generation_config.json", "additional_chat_templates/rag.jinja")])
def test_the_old_models_files_go_with_its_weights_and_the_callers_stay(tmp_path: Path, kept, caplog) -> None:
    target = tmp_path / "m"
    hf.save_state_dict(WEIGHTS, target, like=fill(tmp_path / "old", FILES))
    for name in (*MINE, ".hidden"):
        (target / name).parent.mkdir(exist_ok=True)
        (target / name).write_text("mine")
    new = fill(tmp_path / "new", kept, {"model_type": "other"})
    with pytest.raises(RuntimeError, match="overwrite=True"):
        hf.save_state_dict(WEIGHTS, target, like=new)
    assert names_in(target) == {*FILES, *MINE, ".hidden", "config.json", "model.safetensors"}
    with caplog.at_level(logging.WARNING, "torch_dcp_backport.hf"):
        saved = hf.save_state_dict(WEIGHTS, target, like=new, how=hf.Export(overwrite=True))
    assert names_in(target) == {*kept, *MINE, ".hidden", "config.json", "model.safetensors"}
    assert set(saved.removed) == {*FILES} - {*kept}
    assert not (target / "parts" / "deep").exists()
    assert all((target / name).read_text() == "mine" for name in MINE)
    assert "left as they were: README.md, logs, notes.txt, parts, results.json, train.py" in caplog.text


def test_a_tokenizer_that_was_there_before_the_first_export_stays(tmp_path: Path) -> None:
    target = fill(tmp_path / "m", FILES)
    hf.save_state_dict(WEIGHTS, target, like=CONFIG)
    assert names_in(target) == {*FILES, "config.json", "model.safetensors"}


def test_an_export_into_the_folder_that_it_is_like_changes_the_weights_alone(tmp_path: Path) -> None:
    target = fill(tmp_path / "m", (*FILES, *MINE))
    for value in (1, 2):
        state = {"weight": torch.full((2, 2), float(value))}
        hf.save_state_dict(state, target, like=target, how=hf.Export(overwrite=True))
        assert names_in(target) == {*FILES, *MINE, "config.json", "model.safetensors"}


def test_an_adapter_in_the_target_is_the_model_that_a_loader_would_open(tmp_path: Path) -> None:
    target = tmp_path / "m"
    target.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (target / name).write_text("{}")
    with pytest.raises(RuntimeError, match=r"holds adapter_config.json; Export\(overwrite=True\)"):
        hf.save_state_dict(WEIGHTS, target, like=CONFIG)
    hf.save_state_dict(WEIGHTS, target, like=CONFIG, how=hf.Export(overwrite=True))
    assert names_in(target) == {"config.json", "model.safetensors"}


def test_whenever_it_dies_no_weights_stand_beside_the_other_models_files(tmp_path: Path, monkeypatch) -> None:
    """A chat template that the new model does not have, and another that both have under the same name."""
    target, states = tmp_path / "m", []
    own, shared = "additional_chat_templates/rag.jinja", "chat_template.jinja"
    old = fill(tmp_path / "old", (own, shared), {"model_type": "same"})
    new = fill(tmp_path / "new", (shared,), {"model_type": "same"})
    (new / shared).write_text("new")
    hf.save_state_dict(WEIGHTS, target, like=old)

    def look() -> None:
        if (target / "config.json").exists():
            is_new = bool(hf.Folder(target).part("weight", BOX)[0, 0] == 2)
            template = (target / shared).read_text() == "new"
            states.append((is_new, template, not (target / own).exists()))

    for name in ("rename", "unlink", "rmdir"):
        step = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *paths, step=step, **how: (look(), step(*paths, **how)))
    state = {"weight": torch.full((2, 2), 2.0)}
    hf.save_state_dict(state, target, like=new, how=hf.Export(overwrite=True))
    monkeypatch.undo()
    look()
    assert set(states) == {(False, False, False), (True, True, True)}
    assert names_in(target) == {shared, "config.json", "model.safetensors"}


def test_a_folder_where_a_template_is_to_be_is_an_error_before_anything_changes(tmp_path: Path) -> None:
    target = tmp_path / "m"
    hf.save_state_dict(WEIGHTS, target, like=CONFIG)
    (target / "additional_chat_templates").write_text("a file")
    before = names_in(target)
    like = fill(tmp_path / "like", FILES)
    with pytest.raises(RuntimeError, match="is there, and no folder"):
        hf.save_state_dict(WEIGHTS, target, like=like, how=hf.Export(overwrite=True))
    assert names_in(target) == before
