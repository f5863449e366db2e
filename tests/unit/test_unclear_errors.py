"""Errors that say what was given and what is expected, where a first version had to be guessed at."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from torch_dcp_backport import checkpoint, dist_checkpointing, megatron
from torch_dcp_backport.__main__ import main


def tensor_without_data(folder: Path) -> None:
    dist_checkpointing.ShardedTensor.from_rank_offsets("w", None)  # type: ignore[arg-type]


def load_without_integrity(folder: Path) -> None:
    tensor = dist_checkpointing.ShardedTensor.from_rank_offsets("w", torch.ones(2))
    dist_checkpointing.save({"w": tensor}, folder)
    dist_checkpointing.load({"w": tensor}, folder, verify_integrity=True)


def load_of_no_folder(folder: Path) -> None:
    megatron.load_hf(torch.nn.Linear(2, 2), folder / "nowhere")


def layers_that_are_no_chunks(folder: Path) -> None:
    linear = {"linear_qkv": torch.nn.Linear(2, 2), "linear_proj": torch.nn.Linear(2, 2)}
    layer = torch.nn.ModuleDict({"self_attention": torch.nn.ModuleDict(linear)})
    decoder = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([layer])})
    config = {
        "model_type": "llama", "num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 16, "vocab_size": 10, "tie_word_embeddings": True,
    }  # fmt: skip
    model = torch.nn.ModuleDict({"decoder": decoder})
    megatron.save_hf(model, folder / "out", like=config, layers=[0])  # type: ignore[list-item]


def export_of_no_checkpoint(folder: Path) -> None:
    checkpoint.export_checkpoint(folder, folder / "out")


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (tensor_without_data, "no local tensor: w (expected a tensor, got None)"),
        (load_without_integrity, " has no integrity.json: it was saved without verify_integrity=True"),
        (load_of_no_folder, "expected a folder with config.json and safetensors files, got rank 0: "),
        (layers_that_are_no_chunks, "layers=[0]: expected a list for each chunk, such as [[0, 1]]"),
        (export_of_no_checkpoint, "has no huggingface/config.json: is it a checkpoint?"),
    ],
)
def test_an_error_says_what_was_expected(tmp_path: Path, call: Callable[[Path], None], says: str) -> None:
    with pytest.raises((RuntimeError, dist_checkpointing.CheckpointingException)) as caught:
        call(tmp_path)
    assert says in str(caught.value)
    assert "Unknown:" not in str(caught.value)
    assert "AttributeError" not in str(caught.value)


def test_a_list_of_no_folder_says_that(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "list", str(tmp_path / "nowhere")]) == 1
    assert " ".join(capsys.readouterr().err.split()).endswith(f"there is no folder {tmp_path / 'nowhere'}")
    assert main(["checkpoint", "list", str(tmp_path)]) == 1
    assert " ".join(capsys.readouterr().err.split()).endswith(f"no steps in {tmp_path}")
