"""megatron-core's GPTModel on the CPU: it computes what transformers does, and is saved as it was loaded."""

from __future__ import annotations

import importlib
import multiprocessing
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from decoders import Decoder, read_folder
from gpt import forward, gpt
from heard import heard
from packaging.version import Version
from pool import Pool
from programs import blocks, blocks_below, output_of

from torch_dcp_backport.megatron.convert import convert

pytest.importorskip("megatron.core")
transformers = pytest.importorskip("transformers")

IS_OLDER = Version(version("megatron-core")).release < (0, 16)
CASES = {
    "qwen2": Decoder("qwen2", vocab=48),
    "qwen3": Decoder("qwen3", head_dim=6, vocab=48),
    "qwen2_moe": Decoder("qwen2_moe", vocab=48, experts=4, expert_rows=12, shared_rows=20),
    "qwen3_moe": Decoder("qwen3_moe", head_dim=6, vocab=48, experts=4, expert_rows=12),
    "sparse and dense": Decoder(
        "qwen2_moe", vocab=48, experts=4, expert_rows=12, shared_rows=20, dense=(1, 2)
    ),
    "llama, tied": Decoder("llama", heads=8, kv_heads=4, head_dim=2, vocab=48, tied=True),
}


@pytest.fixture(scope="module")
def core_ranks():
    pool = Pool(4, "torch_dcp_backport.megatron", timeout=60.0, limit=170.0)
    yield pool.run
    pool.close()


def logits(api: Any, folder: str, decoder: Decoder, tp: int, ep: int) -> torch.Tensor:
    (model,) = gpt(decoder, tp, 1, ep=ep)
    with heard("megatron") as said:
        report = api.load_hf(model, folder)
    # It is built as the files say.
    assert not said
    assert not report.kept
    return forward(model, decoder)


def round_trip(api: Any, folder: str, decoder: Decoder, vpp: int, to: str) -> list[int]:
    tp, ep = (1, 2) if decoder.experts and vpp == 1 else (2, 1)
    models = gpt(decoder, tp, 2, vpp, ep=ep)
    report = api.load_hf(models, folder)
    assert not any(param.isnan().any() for model in models for param in model.parameters())
    api.save_hf(models, to, like=folder)
    return list(report.padded.values())


def through_checkpoint(
    api: Any, room: str, folders: tuple[str, str, str], decoder: Decoder
) -> tuple[list[str], list[str]]:
    """Parameters that come otherwise out of a checkpoint than out of files, and what else does.

    Args:
        room: the module of `load` and `save`, called as Megatron-LM does.
        folders: of the files, of the checkpoint that was converted from them, and where a new one goes.
    """
    files, checkpoint, to = folders
    dist_checkpointing = importlib.import_module(room)
    (model,) = gpt(decoder, *((1, 2) if decoder.experts else (2, 2)), ep=2 if decoder.experts else 1)
    state = dist_checkpointing.load({"model": model.sharded_state_dict()}, checkpoint)
    model.load_state_dict(state.pop("model"))
    loaded = {name: param.detach().clone() for name, param in model.named_parameters()}
    api.load_hf(model, files)
    other = [name for name, param in model.named_parameters() if not torch.equal(param, loaded[name])]
    if dist.get_rank() == 0:
        os.makedirs(to)
    dist.barrier()
    # Megatron's writes from processes of its own.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    dist_checkpointing.save({"model": model.sharded_state_dict(), "args": "any"}, to)
    return other, sorted(state)


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, tmp_path: Any) -> tuple[str, Decoder, Any]:
    decoder = CASES[request.param]
    config = {**decoder.config, "torch_dtype": "float32", "rms_norm_eps": 1e-6, "rope_theta": 10000.0}
    torch.manual_seed(0)
    made = transformers.AutoConfig.for_model(**config)
    model = transformers.AutoModelForCausalLM.from_config(made, attn_implementation="eager").eval()
    with torch.no_grad():
        for param in model.parameters():
            # Norms of one and biases of zero would hide that they are elsewhere.
            param.add_(torch.randn_like(param) * 0.2)
    model.save_pretrained(tmp_path / "hf")
    return str(tmp_path / "hf"), decoder, model


@pytest.mark.parametrize("cut", ["tp 2", "tp 4", "ep 4"])
def test_the_logits_are_those_of_transformers(core_ranks, case, cut):
    folder, decoder, model = case
    tp, ep = {"tp 2": (2, 1), "tp 4": (4, 1), "ep 4": (1, 4)}[cut]
    if decoder.kv_heads < tp and IS_OLDER:
        pytest.skip("megatron-core before 0.16 has no KV heads fewer than TP")
    if ep > 1 and not decoder.experts:
        pytest.skip("no experts")
    with torch.no_grad():
        wanted = model(torch.arange(8).view(1, 8)).logits
    for got in core_ranks(logits, folder, decoder, tp, ep):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("vpp", [1, 2])
def test_a_model_of_two_stages_is_saved_as_it_was_loaded(core_ranks, case, vpp, tmp_path):
    folder, decoder, _ = case
    core_ranks(round_trip, folder, decoder, vpp, str(tmp_path / "saved"))
    got, wanted = read_folder(tmp_path / "saved"), read_folder(tmp_path / "hf")
    assert set(got) == set(wanted)
    assert all(torch.equal(got[key], wanted[key]) for key in wanted)


@pytest.mark.parametrize(
    "room", ["torch_dcp_backport.dist_checkpointing", "megatron.core.dist_checkpointing"]
)
def test_a_converted_checkpoint_is_what_the_model_loads_and_saves(core_ranks, case, room, tmp_path):
    folder, decoder, _ = case
    convert(folder, tmp_path / "converted")
    folders = folder, str(tmp_path / "converted"), str(tmp_path / "theirs")
    for other, unknown in core_ranks(through_checkpoint, room, folders, decoder):
        assert other == []
        assert unknown == ["checkpoint_version", "iteration"]
    convert(tmp_path / "theirs", tmp_path / "back", like=folder)
    got, wanted = read_folder(tmp_path / "back"), read_folder(tmp_path / "hf")
    assert set(got) == set(wanted)
    assert all(torch.equal(got[key], wanted[key]) for key in wanted)


def test_megatrons_own_calls_save_and_load_by_this_package(tmp_path: Path) -> None:
    program = blocks_below(Path(__file__).parents[2] / "docs/stacks.md", "python")["Megatron-LM"]
    shown = "print(dist_checkpointing.save.__module__)"
    output = output_of(["-c", f"{program}\n{shown}"], tmp_path)
    assert output.splitlines()[-1].startswith("torch_dcp_backport.dist_checkpointing")
    assert (tmp_path / "step_1" / "metadata.json").is_file()


def test_the_quickstart_with_a_gpt_model_loads_and_saves(tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "docs/megatron.md"
    (program,) = (text for text in blocks(page, "python") if "from megatron.core" in text)
    shown = "{'embedding.word_embeddings.weight': 14, 'output_layer.weight': 14}"
    assert shown in program
    assert shown in output_of(["-c", program], tmp_path)
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.vocab_size == 50
