"""What one rank asks for otherwise, or passes wrongly, is one error on every rank."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from decoders import Decoder, inner, models_of, read_folder, spot_of, write_folder
from test_megatron_verl import Config, parallel_state

from torch_dcp_backport import hf, megatron
from torch_dcp_backport.megatron import Export, Parallel, load_hf

QWEN = Decoder(layers=2)


def here(style: str = "mcore") -> tuple[list[torch.nn.Module], dict[str, Any]]:
    spot = spot_of(QWEN, style, dist.get_rank(), 2, 1)
    said: dict[str, Any] = {"parallel": Parallel(spot.tp_rank, 2)}
    if style == "verl":
        said["layers"] = spot.chunks
    return models_of(QWEN, spot, QWEN.tensors()), said


def told(call: Any) -> str:
    with pytest.raises(RuntimeError) as caught:
        call()
    return str(caught.value)


def asked_otherwise(api: Any, folder: str, case: str) -> str:
    models, said = here()
    other = dist.get_rank() == 2
    if case.startswith("load"):
        args: dict[str, Any] = {
            "load, files": {"files": "shared" if other else "rank0"},
            "load, value_head": {"value_head": other},
        }[case]
        return told(lambda: load_hf(models, folder, **said, **args))
    load_hf(models, folder, **said)
    if case.startswith("gather"):
        config = {**QWEN.config, **({"vocab_size": 30} if other and "config" in case else {})}
        dtype = torch.float32 if other and "dtype" in case else torch.bfloat16
        return told(lambda: api.gather_hf(models, config=config, dtype=dtype, **said))
    how = {
        "save, dtype": Export(dtype=torch.float32) if other else None,
        "save, file_bytes": Export(file_bytes=1000) if other else None,
        "save, overwrite": Export(overwrite=other),
    }[case]
    return told(lambda: api.save_hf(models, folder + "-saved", like=folder, how=how, **said))


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("load, files", "files (expected 'rank0' as on rank 0, got 'shared')"),
        ("load, value_head", "value_head (expected False as on rank 0, got True)"),
        ("save, dtype", "dtype (expected None as on rank 0, got torch.float32)"),
        ("save, file_bytes", "file_bytes (expected 5000000000 as on rank 0, got 1000)"),
        ("save, overwrite", "overwrite (expected False as on rank 0, got True)"),
        ("gather, dtype", "dtype (expected torch.bfloat16 as on rank 0, got torch.float32)"),
        ("gather, config", "vocab of config.json (expected 32 as on rank 0, got 30)"),
    ],
)
def test_what_differs_between_ranks_is_named_with_both_values(ranks, tmp_path, case, says):
    write_folder(tmp_path / "hf", QWEN, QWEN.tensors())
    texts = ranks(asked_otherwise, str(tmp_path / "hf"), case)
    assert len(set(texts)) == 1
    assert f"rank 2: not the same on every rank: {says}" in texts[0]
    assert not (tmp_path / "hf-saved").exists()


def of_a_table(api: Any, folder: str) -> str:
    """Rank 2 knows the family by another table, of the same names and sizes."""
    qwen = megatron.family_of("qwen2")
    other = dataclasses.replace(qwen, rows=qwen.rows[::-1] if dist.get_rank() == 2 else qwen.rows)
    megatron.add_family(dataclasses.replace(other, kinds=("qwen2_of_ours",)))
    models, said = here()
    return told(lambda: load_hf(models, folder, **said))


def test_tables_that_differ_between_ranks_are_an_error(ranks, tmp_path):
    write_folder(tmp_path / "hf", QWEN._replace(model_type="qwen2_of_ours"), QWEN.tensors())
    texts = ranks(of_a_table, str(tmp_path / "hf"))
    assert len(set(texts)) == 1
    assert "rank 2: not the same on every rank: the table of qwen2_of_ours (expected " in texts[0]


def of_a_dict(api: Any) -> str:
    models, said = here()
    config = {**QWEN.config, "tie_word_embeddings": dist.get_rank() == 2}
    return told(lambda: load_hf(models, hf.Given(QWEN.tensors(), config), **said))


def test_the_configurations_of_a_dict_are_compared(ranks):
    (text,) = set(ranks(of_a_dict))
    assert "rank 2: not the same on every rank: tied of config.json (expected False as on rank 0" in text


def passed_wrongly(api: Any, folder: str, case: str) -> str:
    models, said = here()
    bad = dist.get_rank() == 2
    if case == "folder":
        return told(lambda: load_hf(models, 5 if bad else folder, **said))  # type: ignore[arg-type]
    if case == "models":
        return told(lambda: load_hf(None if bad else models, folder, **said))  # type: ignore[arg-type]
    load_hf(models, folder, **said)
    if case == "target":
        target: Any = 5 if bad else folder + "-saved"
        return told(lambda: api.save_hf(models, target, like=folder, **said))
    if case == "how":
        how: Any = torch.float32 if bad else None
        return told(lambda: api.save_hf(models, folder + "-saved", like=folder, how=how, **said))
    if case == "int8":
        return told(lambda: api.gather_hf(models, config=QWEN.config, dtype=torch.int8, **said))
    if case == "text":
        return told(lambda: api.gather_hf(models, config=QWEN.config, dtype="bfloat16", **said))
    return told(lambda: api.gather_hf(models, config=None if bad else QWEN.config, **said))


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("folder", "rank 2: TypeError: a int is neither a folder nor an hf.Source"),
        ("models", "rank 2: TypeError: models is a NoneType"),
        ("target", "rank 2: TypeError: "),
        ("how", "rank 2: TypeError: a dtype, where an Export is needed"),
        ("config", "rank 2: TypeError: a NoneType is neither a mapping nor a configuration"),
        ("int8", "ranks 0-3: ValueError: dtype=torch.int8: weights are cast to floating-point numbers"),
        ("text", "ranks 0-3: TypeError: dtype='bfloat16' is no torch.dtype"),
    ],
)
def test_an_argument_of_another_kind_is_told_to_every_rank(ranks, tmp_path, case, says):
    write_folder(tmp_path / "hf", QWEN, QWEN.tensors())
    (text,) = set(ranks(passed_wrongly, str(tmp_path / "hf"), case))
    assert says in text
    assert not (tmp_path / "hf-saved").exists()


def old_call(api: Any, case: str) -> str:
    rank = dist.get_rank()
    models, _ = here("verl")
    hf_tensors: Any = QWEN.tensors()
    config: Any = Config(QWEN)
    sys.modules["megatron.core.parallel_state"] = parallel_state(rank % 2, 2, 0, 1)
    try:
        if case == "merge":
            api.load_state_dict_to_megatron_qwen2(hf_tensors, models, config, torch.bfloat16)
        if rank == 2:
            config = None if case in ("config", "merge") else config
            config = Config(QWEN._replace(layers=5)) if case == "layers" else config
            models = None if case == "models" else models  # type: ignore[assignment]
            hf_tensors = 3 if case == "dict" else hf_tensors
        if case == "merge":
            return told(lambda: api.merge_megatron_ckpt_qwen2(models, config, torch.float32))
        return told(lambda: api.load_state_dict_to_megatron_qwen2(hf_tensors, models, config, torch.bfloat16))
    finally:
        del sys.modules["megatron.core.parallel_state"]


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("config", "rank 2: TypeError: a NoneType is neither a mapping"),
        ("merge", "rank 2: TypeError: a NoneType is neither a mapping"),
        ("layers", r"rank 2: ValueError: layers= says [0, 1, 2, 3, 4], and the chunk has 2 layers"),
        ("models", "rank 2: TypeError: models is a NoneType"),
        ("dict", "rank 2: TypeError: state_dict is a int"),
    ],
)
def test_the_old_calls_tell_every_rank(ranks, case, says):
    (text,) = set(ranks(old_call, case))
    assert says in text


def freed(api: Any, folder: str, call: str) -> str:
    models, said = here()
    load_hf(models, folder, **said)
    norm = inner(models[0]).decoder.final_layernorm.weight  # type: ignore[union-attr]
    if dist.get_rank() == 2:
        norm.untyped_storage().resize_(0)  # type: ignore[union-attr, operator]
    if call == "load":
        return told(lambda: load_hf(models, folder, **said))
    return told(lambda: api.save_hf(models, folder + "-saved", like=folder, **said))


@pytest.mark.parametrize("call", ["load", "save"])
def test_a_parameter_whose_memory_was_freed_is_named(ranks, tmp_path, call):
    write_folder(tmp_path / "hf", QWEN, QWEN.tensors())
    (text,) = set(ranks(freed, str(tmp_path / "hf"), call))
    assert "rank 2: its memory was freed: decoder.final_layernorm.weight" in text


def saved_like(api: Any, folder: str) -> None:
    models, said = here()
    load_hf(models, folder, **said)
    api.save_hf(models, folder + "-saved", like={**QWEN.config, "dtype": {"": "float32"}}, **said)


def test_a_dtype_that_is_no_text_is_replaced(ranks, tmp_path):
    write_folder(tmp_path / "hf", QWEN, QWEN.tensors())
    ranks(saved_like, str(tmp_path / "hf"))
    assert set(read_folder(tmp_path / "hf-saved")) == set(QWEN.tensors())
    assert hf.Folder(tmp_path / "hf-saved").config["dtype"] == "bfloat16"
