"""`convert`: Hugging Face files to a sharded checkpoint and back, in one process."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

import pool
import pytest
import torch
import torch.distributed as dist
from decoders import Decoder, aligned, read_folder, write_folder

from torch_dcp_backport import hf, transfer
from torch_dcp_backport.__main__ import main
from torch_dcp_backport.dist_checkpointing import (
    CheckpointingException,
    ShardedObject,
    ShardedTensor,
    load_plain_tensors,
    load_tensors_metadata,
    save,
    verify,
)
from torch_dcp_backport.megatron.convert import convert
from torch_dcp_backport.regression import meter

MODELS = {
    "qwen2": Decoder(),
    "qwen3, tied": Decoder("qwen3", head_dim=6, tied=True),
    "llama": Decoder("llama", heads=8, kv_heads=4, head_dim=2),
    "sparse": Decoder("qwen2_moe", experts=4, expert_rows=10, shared_rows=6),
    "sparse and dense layers": Decoder("qwen3_moe", experts=3, expert_rows=10, dense=(0, 2)),
}
QWEN = MODELS["qwen2"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_folder(tmp_path / "hf", QWEN, QWEN.tensors(), files=3)
    return tmp_path / "hf"


def differences(folder: Path, tensors: dict[str, torch.Tensor]) -> list[str]:
    got = read_folder(folder)
    assert set(got) == set(tensors)
    return [key for key, value in tensors.items() if not torch.equal(got[key], value)]


@pytest.mark.parametrize("name", MODELS)
def test_there_and_back(tmp_path, name):
    decoder = MODELS[name]
    write_folder(tmp_path / "hf", decoder, decoder.tensors(), files=3)
    convert(tmp_path / "hf", tmp_path / "ckpt")
    assert verify(tmp_path / "ckpt") == []
    convert(tmp_path / "ckpt", tmp_path / "back", how=hf.Export(file_bytes=4000))
    assert differences(tmp_path / "back", decoder.tensors()) == []
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    # Where transformers is installed the class comes along.
    assert {key: config[key] for key in decoder.config} == decoder.config
    assert not list(tmp_path.glob(".*"))


def test_the_layout_is_that_of_stacked_layers(tmp_path, model):
    convert(model, tmp_path / "ckpt")
    stored = load_plain_tensors(tmp_path / "ckpt")
    tensors = QWEN.tensors()
    fc1 = torch.stack(
        [
            torch.cat([tensors[f"model.layers.{layer}.mlp.{name}_proj.weight"] for name in ("gate", "up")])
            for layer in range(QWEN.layers)
        ]
    )
    assert torch.equal(stored["decoder.layers.mlp.linear_fc1.weight"], fc1)
    q, k, v = (tensors[f"model.layers.1.self_attn.{name}_proj.bias"].chunk(2) for name in "qkv")
    assert torch.equal(
        stored["decoder.layers.self_attention.linear_qkv.bias"][1],
        torch.cat([q[0], k[0], v[0], q[1], k[1], v[1]]),
    )
    names = "decoder.layers.self_attention.linear_qkv.layer_norm_weight", "output_layer.weight"
    assert set(names) <= set(load_tensors_metadata(tmp_path / "ckpt"))


def test_a_dry_run_says_the_same_and_writes_nothing(tmp_path, model):
    said = convert(model, tmp_path / "ckpt", dry_run=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]
    assert said == convert(model, tmp_path / "ckpt")
    stored = load_tensors_metadata(tmp_path / "ckpt")
    assert {key: (one.global_shape, one.dtype) for key, one in stored.items()} == {
        key: tuple(info) for key, info in said.tensors.items()
    }
    back = convert(tmp_path / "ckpt", tmp_path / "back", how=hf.Export(file_bytes=4000), dry_run=True)
    assert not (tmp_path / "back").exists()
    assert back == convert(tmp_path / "ckpt", tmp_path / "back", how=hf.Export(file_bytes=4000))
    assert set(back.files) == {path.name for path in (tmp_path / "back").glob("*.safetensors")}


def test_a_value_head_comes_along(tmp_path):
    tensors = {key: value for key, value in QWEN.tensors().items() if key != "lm_head.weight"}
    tensors["score.weight"] = torch.ones(1, QWEN.hidden, dtype=torch.bfloat16)
    write_folder(tmp_path / "hf", QWEN, tensors)
    convert(tmp_path / "hf", tmp_path / "ckpt")
    convert(tmp_path / "ckpt", tmp_path / "back")
    assert differences(tmp_path / "back", tensors) == []


def test_another_dtype_is_for_files_alone(tmp_path, model):
    with pytest.raises(CheckpointingException, match="a checkpoint keeps the dtypes of the files"):
        convert(model, tmp_path / "ckpt", how=hf.Export(torch.float32))
    convert(model, tmp_path / "ckpt")
    convert(tmp_path / "ckpt", tmp_path / "back", how=hf.Export(torch.float32))
    got = read_folder(tmp_path / "back")
    assert all(torch.equal(got[key], value.float()) for key, value in QWEN.tensors().items())


# --- what does not fit ---


def without(tensors: dict[str, torch.Tensor], key: str) -> dict[str, torch.Tensor]:
    return {name: value for name, value in tensors.items() if name != key}


Q = "model.layers.1.self_attn.q_proj.weight"
TENSORS = QWEN.tensors()
FILES: dict[str, tuple[dict[str, torch.Tensor], str]] = {
    "missing": (without(TENSORS, Q), f"not in the files: {Q} "),
    "unexpected": ({**TENSORS, "model.layers.4.mlp.x": torch.zeros(1)}, r"held by no rank: model.layers.4"),
    "shape": ({**TENSORS, Q: torch.zeros(2, 2)}, rf"wrong shape in the files: {Q}.*got \(2, 2\)"),
    "quantised": ({**TENSORS, Q: torch.zeros(16, 16, dtype=torch.int8)}, f"quantised in the files: {Q}"),
    "dtypes": ({**TENSORS, Q: torch.zeros(16, 16)}, r"parts of decoder\S+linear_qkv.weight in two dtypes"),
}


@pytest.mark.parametrize("case", FILES)
def test_files_that_do_not_fit_are_an_error_and_leave_nothing(tmp_path, case):
    tensors, says = FILES[case]
    write_folder(tmp_path / "hf", QWEN, tensors)
    with pytest.raises(CheckpointingException, match=says):
        convert(tmp_path / "hf", tmp_path / "ckpt")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


def changed(folder: Path, **numbers: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**QWEN.config, **numbers}))
    return folder


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "more layers": ({"num_hidden_layers": 5}, r"wrong shape in the checkpoint: decoder.*got \(4, 16\)"),
    "another width": ({"intermediate_size": 12}, r"wrong shape in the checkpoint: \S+mlp.linear_fc1.weight"),
    "no biases": ({"model_type": "llama"}, r"not in a model with this config.json: \S+linear_qkv.bias"),
    "norms": (
        {"model_type": "qwen3"},
        r"not in the checkpoint: \S+q_layernorm.weight \(for \S+q_norm.weight",
    ),
    "tied": ({"tie_word_embeddings": True}, "not in a model with this config.json: output_layer.weight"),
    "words": ({"vocab_size": 40}, "32 rows on each of 1 TP ranks, where the vocabulary has 40"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_checkpoint_that_does_not_fit_is_an_error_and_leaves_nothing(tmp_path, model, case):
    numbers, says = CONFIGS[case]
    convert(model, tmp_path / "ckpt")
    with pytest.raises(CheckpointingException, match=says):
        convert(tmp_path / "ckpt", tmp_path / "back", like=changed(tmp_path / "like", **numbers))
    assert not (tmp_path / "back").exists()
    assert not list(tmp_path.glob(".*"))


def test_a_damaged_byte_is_an_error_and_the_target_is_as_it_was(tmp_path, model):
    convert(model, tmp_path / "ckpt")
    (path,) = (tmp_path / "ckpt").glob("*.distcp")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointingException, match=r"damaged|wrong checksum"):
        convert(tmp_path / "ckpt", tmp_path / "back")
    assert not (tmp_path / "back").exists()
    assert not list(tmp_path.glob(".*"))


def test_only_a_checkpoint_is_replaced_and_only_when_asked(tmp_path, model):
    out = tmp_path / "ckpt"
    convert(model, out)
    with pytest.raises(CheckpointingException, match="--overwrite replaces it"):
        convert(model, out)
    write_folder(tmp_path / "other", QWEN, {key: value + 1 for key, value in TENSORS.items()})
    convert(tmp_path / "other", out, how=hf.Export(overwrite=True))
    convert(out, tmp_path / "back")
    assert differences(tmp_path / "back", {key: value + 1 for key, value in TENSORS.items()}) == []
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.png").touch()
    with pytest.raises(CheckpointingException, match="photos holds no distributed checkpoint"):
        convert(model, tmp_path / "photos", how=hf.Export(overwrite=True))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "ckpt", "hf", "other", "photos"]


def forked(function: Callable[..., None], *args: object) -> Optional[int]:
    """How a process of its own ended, which has torch already: an import of it takes seconds."""
    process = pool.CONTEXT.Process(target=function, args=args)
    process.start()
    process.join(60)
    try:
        return process.exitcode
    finally:
        process.kill()
        process.join()


def killed(source: Path, target: Path, when: int) -> None:
    """Convert, and die at a rename."""
    rename, calls = os.rename, []

    def dies(*paths: Any) -> None:
        calls.append(paths)
        if len(calls) == when:
            os.kill(os.getpid(), signal.SIGKILL)
        rename(*paths)

    os.rename = dies  # type: ignore[assignment]
    convert(source, target, how=hf.Export(overwrite=True))


@pytest.mark.parametrize("when", [1, 2])
def test_a_conversion_that_is_killed_leaves_the_old_checkpoint(tmp_path, model, when):
    out = tmp_path / "ckpt"
    convert(model, out)
    # One rename puts the old one aside, the other the new one in its place.
    assert forked(killed, model, out, when) == -signal.SIGKILL
    if when == 1:
        assert verify(out) == []
        convert(model, out, how=hf.Export(overwrite=True))
        assert not list(tmp_path.glob(".*"))
        return
    old = tmp_path / ".ckpt.converting" / "old"
    assert verify(old) == []
    out.mkdir()
    for how in (None, hf.Export(overwrite=True)):
        with pytest.raises(CheckpointingException, match="move it away"):
            convert(model, out, how=how)
    out.rmdir()
    os.rename(old, out)
    convert(model, out, how=hf.Export(overwrite=True))


def test_what_comes_meanwhile_stays(tmp_path, model, monkeypatch):
    out, name = tmp_path / "ckpt", "torch_dcp_backport.megatron._src.to_checkpoint.companions_of"

    def comes(folder):
        out.mkdir()
        (out / "precious").write_text("mine")
        return {}

    monkeypatch.setattr(name, comes)
    with pytest.raises(CheckpointingException, match="not empty"):
        convert(model, out)
    assert (out / "precious").read_text() == "mine"
    assert not list(tmp_path.glob(".*"))


def test_source_and_target_apart(tmp_path, model):
    out = tmp_path / "ckpt"
    convert(model, out)
    write_folder(out / "inside", QWEN, QWEN.tensors(), files=1)
    link = tmp_path / "link"
    link.symlink_to(out)
    replaced = hf.Export(overwrite=True)
    pairs = ((out, out), (out, link), (out, out / "hf"), (out / "inside", out), (model, model))
    # Each in the other, whichever is made of which.
    nested = ((model, model / "ckpt"), (model, model / "a" / "b"), (out, tmp_path), (model, tmp_path))
    for source, target in (*pairs, *nested):
        with pytest.raises(CheckpointingException, match=r"is in the (source|target)"):
            convert(source, target, how=replaced)
    assert verify(out) == []
    # A link's folder is replaced, not the link.
    (out / "inside").rename(tmp_path / "inside")
    convert(model, link, how=replaced)
    assert link.is_symlink()
    assert verify(out) == []


@pytest.mark.parametrize("name", ["notes.txt", ".env"])
def test_what_stands_beside_a_checkpoint_is_not_replaced_with_it(tmp_path, model, name):
    out = tmp_path / "ckpt"
    convert(model, out)
    (out / name).write_text("mine")
    with pytest.raises(CheckpointingException, match=f"beside the checkpoint it has {name}: move that away"):
        convert(model, out, how=hf.Export(overwrite=True))
    assert (out / name).read_text() == "mine"
    assert verify(out) == []


def test_the_companions_of_files_are_the_new_models(tmp_path, model):
    """The chat template of an older model, and code that its config.json names, go with its weights."""
    like, code = tmp_path / "like", {"auto_map": {"AutoModel": "modeling_old.Old"}}
    write_folder(like, QWEN, QWEN.tensors(), files=1)
    for folder, names in ((model, ("vocab.bpe", "additional_chat_templates/rag.jinja")), (like, ())):
        for name in names:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text("new")
    convert(model, tmp_path / "ckpt")
    back = tmp_path / "back"
    write_folder(back, QWEN, QWEN.tensors(), files=1)
    (back / "config.json").write_text(json.dumps({**QWEN.config, **code}))
    for name in ("chat_template.jinja", "modeling_old.py", "generation_config.json", "notes.txt"):
        (back / name).write_text("old")
    convert(tmp_path / "ckpt", back, how=hf.Export(overwrite=True))
    found = {path.relative_to(back).as_posix() for path in back.rglob("*") if path.is_file()}
    assert found == {
        "config.json",
        "model.safetensors",
        "notes.txt",
        "vocab.bpe",
        "additional_chat_templates/rag.jinja",
    }


def test_files_of_a_model_without_its_head(tmp_path):
    """As transformers saves a Qwen3Model: the names are without `model.` before them."""
    decoder = MODELS["qwen3, tied"]
    tensors = decoder.tensors()
    write_folder(tmp_path / "hf", decoder, tensors, files=2)
    convert(tmp_path / "hf", tmp_path / "ckpt")
    short = {key.replace("model.", "", 1): value for key, value in tensors.items()}
    write_folder(tmp_path / "short", decoder, short, files=2)
    convert(tmp_path / "short", tmp_path / "same")
    convert(tmp_path / "same", tmp_path / "back")
    assert differences(tmp_path / "back", tensors) == []


TOWERS = {"model_type": "qwen2_5_vl", "text_config": {**QWEN.config, "model_type": "qwen2_5_vl_text"}}
VISION = {"visual.patch_embed.weight": torch.ones(3, dtype=torch.bfloat16)}


@pytest.mark.parametrize(
    ("decoder", "prefix", "towers"),
    [(QWEN, "model.", {}), (MODELS["qwen3, tied"], "", {}), (QWEN, "model.language_model.", TOWERS)],
    ids=["all", "without a head", "towers"],
)
def test_the_plan_says_what_is_held_beside_mapped_files(tmp_path, decoder, prefix, towers):
    """Copies of what is not aligned, also where the files have other names."""
    text = {key.replace("model.", prefix, 1): value for key, value in decoder.tensors().items()}
    tensors = {**text, **(VISION if towers else {})}
    write_folder(tmp_path / "hf", decoder, tensors, files=2)
    (tmp_path / "hf" / "config.json").write_text(json.dumps({**decoder.config, **towers}))
    aligned(tmp_path / "hf", but=("model-00002-of-00002.safetensors",))
    second = set(list(tensors)[1::2])
    held = sum(value.numel() * 2 for key, value in text.items() if key in second)
    assert convert(tmp_path / "hf", tmp_path / "ckpt", dry_run=True).memory == held
    aligned(tmp_path / "hf")
    assert convert(tmp_path / "hf", tmp_path / "ckpt", dry_run=True).memory == 0


def alone(api: Any, source: Path, target: Path) -> None:
    if dist.get_rank() == 0:
        convert(source, target)
    dist.barrier()


def test_it_is_not_collective(ranks, tmp_path, model):
    ranks(alone, model, tmp_path / "ckpt", world=2)
    assert verify(tmp_path / "ckpt") == []


# --- the command ---


def test_the_command_says_what_it_found_does_and_wrote(tmp_path, model, capsys):
    aligned(model)
    arguments = ["convert", str(model), str(tmp_path / "ckpt")]
    assert main([*arguments, "--dry-run"]) == 0
    plan = capsys.readouterr()
    assert re.search(r"decoder.layers.mlp.linear_fc1.weight +4x48x16 bfloat16", plan.out)
    assert "memory mapped files alone\n" in plan.out
    assert plan.out.endswith("nothing was written\n")
    assert not (tmp_path / "ckpt").exists()
    assert main(arguments) == 0
    said = capsys.readouterr()
    assert (
        f"found  {model}: Hugging Face files of a qwen2 model,\n       51 tensors, 17.5 KiB in 3 files"
        in said.out
    )
    assert f"does   {tmp_path}/ckpt: sharded checkpoint,\n       10 tensors, 17.5 KiB\n" in said.out
    assert f"wrote  {tmp_path}/ckpt: 10 tensors, 17.5 KiB, took " in said.out
    assert said.err.splitlines()[-1].startswith(f"[{'#' * 30}] 100 % of 17.5 KiB")
    assert main(["convert", str(tmp_path / "ckpt"), str(tmp_path / "back"), "--file-size", "4KB"]) == 0
    said = capsys.readouterr()
    assert "memory 64.0 MiB in one process, beside mapped files\n" in said.out
    assert re.search(
        r"does   \S+back: Hugging Face files,\n       51 tensors, 17.5 KiB in \d+ files", said.out
    )
    assert "100 % of 17.5 KiB" in said.err
    assert differences(tmp_path / "back", TENSORS) == []
    assert main(arguments) == 1
    again = capsys.readouterr()
    assert again.out == ""
    assert "--overwrite replaces it" in again.err


def sharded(state: dict[str, Any]) -> dict[str, Any]:
    return {
        key: ShardedTensor.from_rank_offsets(key, value)
        for key, value in state.items()
        if torch.is_tensor(value)
    }


def test_what_becomes_of_an_optimizer_is_said_by_name(tmp_path, model, capsys):
    convert(model, tmp_path / "ckpt")
    moment = "optimizer.state.exp_avg.output_layer.weight"
    state = {**load_plain_tensors(tmp_path / "ckpt"), moment: torch.ones(2)}
    (tmp_path / "full").mkdir()
    bucket = "optimizer.distributed.dp_group_idx_0.param_state"
    save({**sharded(state), "bucket": ShardedObject(bucket, {"exp_avg": 1}, (1,), (0,))}, tmp_path / "full")
    plan = convert(tmp_path / "full", tmp_path / "back", like=str(model), dry_run=True)
    assert set(plan.left) == {bucket, moment}
    assert "has it for any TP, PP and EP" in plan.left[moment]
    assert "a conversion with ep= (--ep)" in plan.left[bucket]
    arguments = ["convert", str(tmp_path / "full"), str(tmp_path / "back"), "--like", str(model), "--dry-run"]
    assert main(arguments) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"left {bucket}: the distributed optimizer's buckets" in said


@pytest.mark.parametrize(
    ("name", "moment", "says"),
    [
        ("qwen2", "optimizer.state.exp_avg.output_layer.weight", "any TP, PP and EP"),
        (
            "sparse",
            "optimizer.state.exp_avg.output_layer.weight",
            "any TP and PP at EP 1; for another EP convert it with ep= (--ep)",
        ),
        (
            "sparse",
            "chained_0.optimizer.state.exp_avg.output_layer.weight",
            "any TP and PP, and any EP above 1; for EP 1 convert it with ep= (--ep)",
        ),
    ],
    ids=["dense", "EP 1", "EP above 1"],
)
def test_where_an_optimizer_can_be_loaded_is_said(tmp_path, name, moment, says):
    write_folder(tmp_path / "hf", MODELS[name], MODELS[name].tensors())
    convert(tmp_path / "hf", tmp_path / "ckpt")
    state = {**load_plain_tensors(tmp_path / "ckpt"), moment: torch.ones(2)}
    (tmp_path / "full").mkdir()
    save(sharded(state), tmp_path / "full")
    plan = convert(tmp_path / "full", tmp_path / "back", like=str(tmp_path / "hf"), dry_run=True)
    assert plan.left[moment].endswith(f"the checkpoint has it for {says}")


def test_what_the_command_says_fits_a_terminal(tmp_path, capsys, monkeypatch):
    name = "sparse and dense layers"
    decoder = MODELS[name]._replace(layers=12)
    write_folder(tmp_path / "hf", decoder, decoder.tensors())
    monkeypatch.chdir(tmp_path)
    assert main(["convert", "hf", "ckpt", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert any("12 of " in line for line in lines)
    assert main(["convert", "--help"]) == 0
    said = capsys.readouterr().out
    assert "mixtral" in said
    assert "qwen2_5_vl" in said


def test_a_terminal_sees_a_bar_that_ends_at_the_whole(tmp_path, model, capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert main(["convert", str(model), str(tmp_path / "ckpt")]) == 0
    last = capsys.readouterr().err.split("\r")[-1]
    assert last.startswith(f"[{'#' * 30}] 100 % of 17.5 KiB")
    assert last.endswith("\n")
    assert len(last.rstrip("\n")) < 80


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--dtype", "green"), "argument --dtype: green: expected one of float64"),
        (("--dtype", "int8"), "argument --dtype: int8: expected one of float64"),
        (("--file-size", "0"), "argument --file-size: 0: no size such as 2GB"),
        (("--file-size", "two"), "argument --file-size: two: no size such as 2GB"),
    ],
    ids=str,
)
def test_wrong_values_of_options_are_refused(tmp_path, model, capsys, arguments, says):
    convert(model, tmp_path / "ckpt")
    assert main(["convert", str(tmp_path / "ckpt"), str(tmp_path / "x"), *arguments]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_a_source_that_is_not_there_is_named(tmp_path, capsys):
    assert main(["convert", str(tmp_path / "nothing"), str(tmp_path / "x")]) == 1
    assert f"{tmp_path}/nothing is no folder" in capsys.readouterr().err


def test_progress_of_a_cast_ends_with_the_bytes_that_are_written(tmp_path, model):
    """Twice as many are read."""
    wide = {key: value.float() for key, value in TENSORS.items()}
    write_folder(tmp_path / "wide", QWEN, wide, files=1)
    convert(tmp_path / "wide", tmp_path / "ckpt")
    shares: list[tuple[int, int]] = []
    transfer.configure(progress=lambda progress: shares.append((progress.done, progress.total)))
    try:
        for dtype in (torch.bfloat16, torch.float64):
            shares.clear()
            done = convert(tmp_path / "ckpt", tmp_path / str(dtype), how=hf.Export(dtype))
            assert shares[-1] == (done.nbytes, done.nbytes)
            assert all(0 <= part <= whole for part, whole in shares)
    finally:
        transfer.configure()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--like", "hf"), "a checkpoint keeps what is beside the files that it is made of"),
        (("--file-size", "1GB"), "the files of a checkpoint have the sizes of its tensors"),
        (("--file-size", "5GB"), "the files of a checkpoint have the sizes of its tensors"),
        (("--dtype", "bfloat16"), "a checkpoint keeps the dtypes of the files"),
    ],
    ids=str,
)
def test_what_means_nothing_to_a_checkpoint_is_refused(tmp_path, model, capsys, arguments, says):
    for more in ((), ("--dry-run",)):
        assert main(["convert", str(model), str(tmp_path / "ckpt"), *arguments, *more]) == 2
        assert says in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "ckpt").exists()
    options = hf.Export(torch.bfloat16, 10**9)
    with pytest.raises(CheckpointingException, match=r"the sizes of its tensors: file_bytes"):
        convert(model, tmp_path / "ckpt", like="hf", how=options)


def limited(source: Path, target: Path, room: int) -> None:
    with meter.data_limit(room):
        convert(source, target)


def test_memory_does_not_grow_with_the_model(tmp_path):
    """300 MiB in a process that gets 140 MiB: two buffers of 32, and what torch takes at the first call."""
    decoder = Decoder(
        layers=4, hidden=1024, heads=8, kv_heads=2, head_dim=128, intermediate=4096, vocab=60000
    )
    tensors = {key: torch.zeros(shape, dtype=torch.bfloat16) for key, shape in decoder.shapes().items()}
    nbytes = sum(value.nbytes for value in tensors.values())
    assert nbytes > 300 * 2**20
    write_folder(tmp_path / "hf", decoder, tensors, files=1)
    for source, target in (("hf", "ckpt"), ("ckpt", "back")):
        # Mapped files count as private data here, though no page of them is written: they come on top.
        mapped = nbytes if source == "hf" else 0
        assert forked(limited, tmp_path / source, tmp_path / target, mapped + 140 * 2**20) == 0
