"""The small files beside weights: the new model's, none of the old one's, and the caller's own stay."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest
import torch

from torch_dcp_backport import hf
from torch_dcp_backport.transfer._src.layout import whole

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


def snapshot(folder: Path) -> dict[str, str]:
    return {name: (folder / name).read_text(errors="replace") for name in names_in(folder)}


def test_an_export_removes_and_writes_nothing_behind_a_link(tmp_path: Path, caplog) -> None:
    """Templates, a package of code and the code that a config.json names, which other models share."""
    shared, target = tmp_path / "shared", tmp_path / "m"
    fill(shared, FILES)
    target.mkdir()
    for name in ("additional_chat_templates", "parts"):
        (target / name).symlink_to(shared / name)
    (target / "config.json").write_text(json.dumps({"auto_map": {"AutoModel": "parts.norms.Norm"}}))
    (target / "model.safetensors").write_text("old")
    before = snapshot(shared)
    how = hf.Export(overwrite=True)
    hf.save_state_dict(WEIGHTS, target, like={"model_type": "other"}, how=how)
    assert snapshot(shared) == before
    assert (target / "parts").is_symlink()
    assert (target / "additional_chat_templates").is_symlink()
    # The same content is there already; another is refused before anything changes.
    like = fill(tmp_path / "like", FILES)
    hf.save_state_dict(WEIGHTS, target, like=like, how=how)
    (like / "additional_chat_templates" / "rag.jinja").write_text("another")
    now = snapshot(target)
    for options in (how, None):
        place = target if options else tmp_path / "empty"
        place.mkdir(exist_ok=True)
        if not options:
            (place / "additional_chat_templates").symlink_to(shared / "additional_chat_templates")
        with pytest.raises(RuntimeError, match=r"additional_chat_templates is a link.*rag\.jinja"):
            hf.save_state_dict(WEIGHTS, place, like=like, how=options)
    assert snapshot(target) == now
    assert snapshot(shared) == before


def test_a_hidden_folder_that_is_a_link_is_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "elsewhere" / "old").mkdir(parents=True)
    (tmp_path / "elsewhere" / ".lock").touch()
    (tmp_path / "elsewhere" / "old" / "mine").touch()
    target = fill(tmp_path / "m", FILES)
    (target / ".partial").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RuntimeError, match=r"\.partial is a link"):
        hf.save_state_dict(WEIGHTS, target, like=CONFIG)
    assert (tmp_path / "elsewhere" / "old" / "mine").exists()


#: Like a model's files by a part of their names.
ALMOST = (
    "boosted.model", "my.vocab", "error.codes", "a.bpe", "a.spm", "a.tiktoken", "params.json",
    "processing_data.py", "tokenization_stats.py", "modeling_notes.py", "configuration_of_mine.py",
)  # fmt: skip


def test_a_name_that_is_only_like_a_models_is_the_callers(tmp_path: Path) -> None:
    target, how = tmp_path / "m", hf.Export(overwrite=True)
    hf.save_state_dict(WEIGHTS, target, like=fill(tmp_path / "old", FILES))
    for name in ALMOST:
        (target / name).write_text("mine")
    saved = hf.save_state_dict(WEIGHTS, target, like={"model_type": "other"}, how=how)
    assert set(saved.removed) == set(FILES)
    assert names_in(target) == {*ALMOST, "config.json", "model.safetensors"}


def test_an_old_index_removes_no_file_that_is_no_weights(tmp_path: Path) -> None:
    target = tmp_path / "m"
    hf.save_state_dict(WEIGHTS, target, like=CONFIG)
    named = ("README.md", "precious.bin", "part.safetensors", "pytorch_model-x.bin", "../outside.safetensors")
    for name in named:
        (target / name).write_text("mine")
    index = {"weight_map": dict(enumerate(named))}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    hf.save_state_dict(WEIGHTS, target, like=CONFIG, how=hf.Export(overwrite=True))
    assert names_in(target) == {"README.md", "precious.bin", "config.json", "model.safetensors"}
    assert (tmp_path / "outside.safetensors").read_text() == "mine"


def test_without_overwrite_no_file_of_the_callers_is_replaced(tmp_path: Path, caplog) -> None:
    target = tmp_path / "m"
    like = fill(tmp_path / "like", (*FILES, "notes.txt", "train.py", "requirements.txt"))
    target.mkdir()
    for name in ("notes.txt", "train.py", "requirements.txt", "tokenizer_config.json"):
        (target / name).write_text("mine")
    with caplog.at_level(logging.WARNING, "torch_dcp_backport.hf"):
        hf.save_state_dict(WEIGHTS, target, like=like)
    for name in ("notes.txt", "train.py", "requirements.txt"):
        assert (target / name).read_text() == "mine"
    assert "though the model's folder has others: notes.txt, requirements.txt, train.py" in caplog.text
    assert "replaced by the model's: tokenizer_config.json" in caplog.text
    assert names_in(target) == {*names_in(like), "model.safetensors"}
    # The model would run the caller's file.
    other = tmp_path / "n"
    other.mkdir()
    (other / "modeling_own.py").write_text("mine")
    with pytest.raises(RuntimeError, match=r"modeling_own.py is not the model's code of this name"):
        hf.save_state_dict(WEIGHTS, other, like=like)
    assert names_in(other) == {"modeling_own.py"}


def test_the_configuration_that_a_killed_export_took_away_is_kept_until_there_is_a_new_one(
    tmp_path: Path, monkeypatch
) -> None:
    target, how = tmp_path / "m", hf.Export(overwrite=True)
    hf.save_state_dict(WEIGHTS, target, like={"model_type": "one"})
    # As a kill leaves it between two renames.
    away = target / ".partial" / "old"
    away.mkdir(parents=True)
    (target / ".partial" / ".lock").touch()
    (target / "config.json").rename(away / "config.json")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("torch_dcp_backport.hf._src.writing.reserve", full)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="No space left"):
                hf.save_state_dict(WEIGHTS, target, like={"model_type": "two"}, how=how)
            assert json.loads((away / "config.json").read_text()) == {"model_type": "one"}
    hf.save_state_dict(WEIGHTS, target, like={"model_type": "two"}, how=how)
    assert not (target / ".partial").exists()
    assert json.loads((target / "config.json").read_text()) == {"model_type": "two"}
