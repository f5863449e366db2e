"""Every family's files in megatron-core's layout, and back, bit for bit; what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from decoders import read_folder
from family_models import FAMILIES, Rank, config_of, held, stage_module, stage_of, tensors_of, write

from torch_dcp_backport import megatron
from torch_dcp_backport.dist_checkpointing import CheckpointingException, verify
from torch_dcp_backport.megatron.convert import convert
from torch_dcp_backport.megatron.shape import misfits, shape_of

pytest.importorskip("transformers")
#: Name -> (TP, PP, EP).
GRIDS = {"tp 4": (4, 1, 1), "tp 2, pp 2": (2, 2, 1), "tp 1, pp 2, ep 2": (1, 2, 2), "tp 2, ep 2": (2, 1, 2)}
TIED = ("gemma2", "gemma3_text")


def there_and_back(
    api: Any, folder: str, name: str, tensors: dict[str, torch.Tensor]
) -> dict[str, list[str]]:
    """Grid -> parameters that are not what they must be."""
    number, differ = dist.get_rank(), {}
    for grid, (tp, pp, ep) in GRIDS.items():
        if ep > 1 and not any(".experts." in key for key in tensors):
            continue
        rank = Rank(number % tp, tp, number // (tp * pp) % ep, ep)
        stage, per_stage = number // tp % pp, 4 // pp
        layers = list(range(stage * per_stage, (stage + 1) * per_stage))
        wanted = stage_of(name, tensors, rank, layers, name in TIED)
        module = stage_module(wanted, layers)
        said = {"parallel": api.Parallel(*rank)}
        report = api.load_hf(module, folder, **said)
        got = held(module)
        assert set(got) == set(wanted)
        assert not report.left
        differ[grid] = [key for key, value in wanted.items() if not torch.equal(got[key], value)]
        api.save_hf(module, f"{folder}-{grid}", like=folder, **said)
    return differ


@pytest.mark.parametrize("name", FAMILIES)
def test_files_are_loaded_cut_and_saved_bit_for_bit(ranks, tmp_path: Path, name: str) -> None:
    tensors = tensors_of(name)
    write(name, tmp_path / "hf", tensors)
    for differ in ranks(there_and_back, str(tmp_path / "hf"), name, tensors):
        assert differ
        assert not any(differ.values()), differ
        for grid in differ:
            back = read_folder(tmp_path / f"hf-{grid}")
            assert list(back) == list(dict.fromkeys(back))
            assert set(back) == set(tensors)
            assert all(torch.equal(back[key], value) for key, value in tensors.items())


@pytest.mark.parametrize("name", FAMILIES)
def test_files_are_converted_and_back_bit_for_bit(tmp_path: Path, name: str) -> None:
    tensors = tensors_of(name)
    write(name, tmp_path / "hf", tensors)
    said = convert(tmp_path / "hf", tmp_path / "ckpt", dry_run=True)
    assert said == convert(tmp_path / "hf", tmp_path / "ckpt")
    assert verify(tmp_path / "ckpt") == []
    convert(tmp_path / "ckpt", tmp_path / "back")
    back = read_folder(tmp_path / "back")
    assert set(back) == set(tensors)
    assert all(torch.equal(back[key], value) for key, value in tensors.items())


@pytest.mark.parametrize("name", FAMILIES)
def test_a_tensor_that_is_missing_is_named(tmp_path: Path, name: str) -> None:
    """Whichever it is of the last layer: the table speaks of each."""
    tensors = tensors_of(name)
    shape = shape_of(config_of(name))
    of_layer = [key for key in tensors if key.startswith("model.layers.3.")]
    assert {shape.order(key)[0] for key in of_layer} == {3}
    for key in of_layer:
        assert shape.hf_shape(key) == tuple(tensors[key].shape), key
    key = of_layer[len(of_layer) // 2]
    write(name, tmp_path / "hf", {other: value for other, value in tensors.items() if other != key})
    with pytest.raises(CheckpointingException, match=f"not in the files: {re.escape(key)}"):
        convert(tmp_path / "hf", tmp_path / "ckpt")
    assert not (tmp_path / "ckpt").exists()


def test_config_json_need_not_have_what_its_class_has() -> None:
    config = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 8}
    shape = shape_of({"model_type": "gemma3_text", **config})
    assert (shape.tied, shape.vocab, shape.number("heads"), shape.number("head_dim")) == (
        True,
        262208,
        8,
        256,
    )
    assert not shape_of({"model_type": "gemma2", **config, "tie_word_embeddings": False}).tied


def test_a_family_that_has_no_table_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'qwen3_next', which is refused: .*linear attention"):
        shape_of({"model_type": "qwen3_next"})
    with pytest.raises(ValueError, match=r"model_type 'mamba'; these are known: .*mixtral.*deepseek_v3"):
        shape_of({"model_type": "mamba"})


@pytest.mark.parametrize(
    ("name", "tp", "etp", "says"),
    [
        (
            "mixtral",
            2,
            5,
            "intermediate_size cannot be cut (expected a multiple of the experts' TP 5, got 24)",
        ),
        ("phi3", 3, 1, "num_attention_heads cannot be cut (expected a multiple of TP 3, got 4)"),
        ("deepseek_v3", 3, 1, "num_attention_heads cannot be cut (expected a multiple of TP 3, got 4)"),
        (
            "deepseek_v3",
            1,
            3,
            "moe_intermediate_size cannot be cut (expected a multiple of the experts' TP 3, got 8)",
        ),
    ],
)
def test_numbers_that_tp_does_not_divide_are_named(name: str, tp: int, etp: int, says: str) -> None:
    assert says in map(str, misfits(shape_of(config_of(name)), tp, "mcore", etp))


# --- a family of one's own ---


def test_a_family_is_a_table(tmp_path: Path) -> None:
    """Of a Llama whose MLP has other names, and one tensor for gate and up."""
    llama = megatron.family_of("llama")
    mlp = (
        megatron.row("mlp.linear_fc1.weight", "gate_up", "ffn.in.weight: 2*ffn, hidden"),
        megatron.row("mlp.linear_fc2.weight", "columns", "ffn.out.weight: hidden, ffn"),
    )
    rows = tuple(
        row
        for row in llama.rows
        if ".linear_fc1.weight" not in row.names[0] and "linear_fc2" not in row.names[0]
    )
    rows = tuple(row for row in rows if "linear_fc1.bias" not in row.names[0])
    megatron.add_family(
        megatron.Family(("llama_of_ours",), (*rows, *mlp), numbers={"ffn": "ffn_size"}, flags=llama.flags)
    )
    config = {**config_of("mistral"), "model_type": "llama_of_ours", "ffn_size": 24}
    shape = shape_of(config)
    tensors = {"model.embed_tokens.weight": torch.randn(40, 16), "model.norm.weight": torch.randn(16)}
    tensors["lm_head.weight"] = torch.randn(40, 16)
    for layer in range(4):
        names = {f"model.layers.{layer}.{name}" for name in shape.names_in(layer)}
        tensors.update((name, torch.randn(shape.hf_shape(name))) for name in sorted(names))
    assert tensors["model.layers.3.ffn.in.weight"].shape == (48, 16)
    write("mistral", tmp_path / "hf", tensors)
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    convert(tmp_path / "hf", tmp_path / "ckpt")
    convert(tmp_path / "ckpt", tmp_path / "back")
    back = read_folder(tmp_path / "back")
    assert set(back) == set(tensors)
    assert all(torch.equal(back[key], value) for key, value in tensors.items())


NORM = ("input_layernorm.weight", "whole", "norm.weight: hidden")
TABLES: dict[str, tuple[dict[str, Any], str]] = {
    "a number": (
        {"rows": (megatron.row("x", "whole", "y: width"),)},
        "x speaks of width, which the table has not",
    ),
    "a word": ({"rows": (megatron.row(*NORM, when="often"),)}, "speaks of often, which the table has not"),
    "two things": (
        {"rows": (megatron.row(*NORM), megatron.row("input_layernorm.weight", "whole", "z: hidden"))},
        "input_layernorm.weight stands for two things: norm.weight, and z",
    ),
    "two shapes": (
        {"rows": (megatron.row(*NORM), megatron.row("w", "whole", "norm.weight: vocab"))},
        "norm.weight has two shapes",
    ),
    "experts": (
        {"rows": (), "experts": (megatron.row("linear_fc1.weight", "rows", "e: hidden"),)},
        "has no {}",
    ),
    "parts": ({"rows": (megatron.row("w", "qkv", "a: hidden", "b: hidden"),)}, "has 2 tensors, not 1 or 3"),
    "known": ({"kinds": ("llama",), "rows": ()}, "llama is known already"),
    "dense": ({"rows": (), "dense": ("every_other",)}, "every_other says nothing of dense layers"),
}


@pytest.mark.parametrize("case", TABLES)
def test_a_table_that_cannot_be_is_refused(case: str) -> None:
    given, says = TABLES[case]
    with pytest.raises(ValueError, match=says.replace("{", r"\{")):
        megatron.add_family(megatron.Family(**{"kinds": ("no_such_kind",), **given}))
    with pytest.raises(ValueError, match="no_such_kind"):
        megatron.family_of("no_such_kind")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("w", "diagonal", "a: hidden"), "the cut 'diagonal'; these exist: whole, rows"),
        (("w", "rows", "a hidden"), "has the tensor 'a hidden', where 'key: size, size' is needed"),
        (("w", "rows"), "needs a name and an HF tensor"),
    ],
)
def test_a_row_that_cannot_be_is_refused(arguments: tuple[str, ...], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        megatron.row(*arguments)
