"""What does not fit is one error on every rank, with HF key and parameter, before anything was written."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from decoders import (
    Decoder,
    differences,
    expected,
    inner,
    models_of,
    read_folder,
    spot_of,
    write_file,
    write_folder,
)
from pool import RankError, on_ranks

from torch_dcp_backport import transfer
from torch_dcp_backport.megatron import Parallel, load_hf

QWEN, TIED = Decoder(), Decoder(tied=True)
Q = "model.layers.1.self_attn.q_proj.weight"


def refused(api: Any, folder: str, decoder: Decoder, here: dict[str, Any]) -> str:
    """The text of a load's error, where all parameters are as they were.

    `here`: "models" (of another decoder), "tp", "pp", "layers" by rank, "style", "folder" by rank, "spoil".
    """
    rank = dist.get_rank()
    built = here.get("models", decoder)
    style = here.get("style", "mcore")
    spot = spot_of(
        built,
        style,
        rank,
        here.get("tp", 2),
        here.get("pp", 2),
        rows=here.get("rows", 0),
        ep=here.get("ep", 1),
    )
    models = models_of(built, spot, built.tensors())
    layers = here["layers"][rank] if "layers" in here else (spot.chunks if style == "verl" else None)
    if "spoil" in here:
        globals()[here["spoil"]](inner(models[0]), rank)
    before = [param.detach().clone() for model in models for param in model.parameters() if not param.is_meta]
    source = here.get("folder", {}).get(rank, folder)
    parallel = here.get("parallel") or Parallel(spot.tp_rank, spot.tp_size, spot.ep_rank, spot.ep_size)
    with pytest.raises(RuntimeError) as caught:
        load_hf(models, source, parallel=parallel, layers=layers, files=here.get("files", "auto"))
    after = [param.detach() for model in models for param in model.parameters() if not param.is_meta]
    assert all(torch.equal(a, b) or (a.isnan() & b.isnan()).all() for a, b in zip(before, after))
    return str(caught.value)


def on_meta(model: torch.nn.Module, rank: int) -> None:
    if rank == 2:
        layer = model.decoder.layers[0].mlp.linear_fc2  # type: ignore[union-attr, index]
        layer.weight = torch.nn.Parameter(layer.weight.to("meta"))


def shared_layer(model: torch.nn.Module, rank: int) -> None:
    if rank > 1:
        model.decoder.layers[0].layer_number = 2  # type: ignore[union-attr, index]


def other_numbers(model: torch.nn.Module, rank: int) -> None:
    if rank > 1:
        for layer in model.decoder.layers:  # type: ignore[union-attr]
            layer.layer_number += 4


def adapter(model: torch.nn.Module, rank: int) -> None:
    if rank == 0:
        model.decoder.lora_a = torch.nn.Parameter(torch.zeros(2))  # type: ignore[union-attr]


def without(key: str) -> dict[str, torch.Tensor]:
    return {name: value for name, value in QWEN.tensors().items() if name != key}


LONGER = Decoder(layers=5).tensors()
IN_Q = rf"{Q} \(in decoder.layers.1.self_attention.linear_qkv.weight of rank 0\)"
#: case -> (tensors of the files, what is special, what the error says)
CASES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "missing": (without(Q), {}, f"not in the files: {IN_Q}"),
    "missing norm": (
        without("model.norm.weight"),
        {},
        "model.norm.weight .*decoder.final_layernorm.weight of rank 2",
    ),
    "unexpected": (
        {**QWEN.tensors(), Q.replace("q_proj", "o_proj").replace("weight", "bias"): torch.zeros(16)},
        {},
        "in the files, and held by no rank: model.layers.1.self_attn.o_proj.bias",
    ),
    "longer": (LONGER, {}, r"held by no rank: model.layers.4.\* \(12 tensors\)"),
    "shorter": (
        Decoder(layers=3).tensors(),
        {},
        r"not in the files: model.layers.3.\* \(such as model.layers.3.inp",
    ),
    "shape": (
        {**QWEN.tensors(), Q: torch.zeros(16, 12)},
        {},
        rf"wrong shape in the files: {IN_Q} \(expected \(16, 16\) by config.json, got \(16, 12\)\)",
    ),
    "no head": (without("lm_head.weight"), {}, "lm_head.weight .*tie_word_embeddings=false"),
    "quantised": (
        {**QWEN.tensors(), Q: torch.zeros(16, 16, dtype=torch.int8)},
        {},
        f"quantised in the files: {IN_Q}",
    ),
    "heads": (
        None,
        {"models": Decoder(heads=8, kv_heads=2), "tp": 2},
        r"ranks 0-1?.*|wrong shape: decoder.layers.0.self_attention.linear_qkv.weight of rank",
    ),
    "tp of another size": (
        None,
        {"models": Decoder(intermediate=12)},
        r"wrong shape: decoder.layers.0.mlp.linear_fc1.weight of rank 0, for model.layers.0.mlp.gate\S+ "
        r"\(expected \(24, 16\), got \(12, 16\)\)",
    ),
    "vocabulary": (
        None,
        {"models": Decoder(vocab=30)},
        "15 rows on each of 2 TP ranks, where the vocabulary has 32",
    ),
    "two stages": (None, {"spoil": "shared_layer"}, r"in two stages: layers \[1\]"),
    "no stage": (None, {"spoil": "other_numbers"}, r"held by no rank: model.layers.2.\* \(12 tensors\)"),
    "meta": (None, {"spoil": "on_meta"}, "on the meta device, .*: decoder.layers.0.mlp.linear_fc2.weight"),
    "adapter": (None, {"spoil": "adapter"}, "in its Hugging Face files: decoder.lora_a"),
    "no numbers": (None, {"style": "verl", "layers": [None] * 4}, "pass layers="),
    "wrong layers": (
        None,
        {"layers": [[[0, 1]]] * 4},
        r"layers= says \[0, 1\], and the modules' layer_number \[2, 3\]",
    ),
    "chunks": (None, {"layers": [[[0], [1]]] * 4}, "layers= has 2 chunks, and the model has 1"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_does_not_fit_is_one_error_on_every_rank(ranks, tmp_path, case):
    tensors, here, says = CASES[case]
    write_folder(tmp_path, QWEN, tensors if tensors is not None else QWEN.tensors())
    if case == "heads":
        (tmp_path / "config.json").write_text(json.dumps({**QWEN.config, "num_attention_heads": 3}))
        says = "3 heads, which 2 KV heads cannot share"
    texts = ranks(refused, str(tmp_path), QWEN, here)
    assert len(set(texts)) == 1
    assert "nothing was changed" in texts[0]
    assert re.search(says, texts[0]), texts[0]


#: HF tensor -> the parameter that it is a part of.
KINDS = {
    "model.embed_tokens.weight": "embedding.word_embeddings.weight of rank 0",
    "model.layers.0.input_layernorm.weight": "decoder.layers.0.input_layernorm.weight of rank 0",
    "model.layers.3.self_attn.k_proj.weight": "decoder.layers.1.self_attention.linear_qkv.weight of rank 2",
    "model.layers.3.self_attn.v_proj.bias": "decoder.layers.1.self_attention.linear_qkv.bias of rank 2",
    "model.layers.1.self_attn.o_proj.weight": "decoder.layers.1.self_attention.linear_proj.weight of rank 0",
    "model.layers.1.post_attention_layernorm.weight": "decoder.layers.1.pre_mlp_layernorm.weight of rank 0",
    "model.layers.2.mlp.up_proj.weight": "decoder.layers.0.mlp.linear_fc1.weight of rank 2",
    "model.layers.2.mlp.down_proj.weight": "decoder.layers.0.mlp.linear_fc2.weight of rank 2",
    "lm_head.weight": "output_layer.weight of rank 2",
}


@pytest.mark.parametrize("key", KINDS)
def test_a_missing_tensor_is_named_with_its_parameter(ranks, tmp_path, key):
    write_folder(tmp_path, QWEN, without(key))
    texts = ranks(refused, str(tmp_path), QWEN, {})
    assert len(set(texts)) == 1
    assert f"not in the files: {key} (in {KINDS[key]})" in texts[0]


#: What is special -> (parallel of every rank, the text).
EXPERTS = Decoder("qwen2_moe", experts=4, expert_rows=6, shared_rows=10)
EXPERT = "model.layers.0.mlp.experts"
SPARSE: dict[str, tuple[dict[str, Any], str, str]] = {
    "a router": (
        {},
        "model.layers.0.mlp.gate.weight",
        r"gate.weight \(in decoder.layers.0.mlp.router.weight",
    ),
    "an expert": (
        {},
        f"{EXPERT}.3.up_proj.weight",
        rf"not in the files: {EXPERT}.3.up_proj.weight \(in decoder.layers.0.mlp.experts.local_experts.1.lin",
    ),
    "the shared one": (
        {},
        "model.layers.0.mlp.shared_expert.down_proj.weight",
        "in decoder.layers.0.mlp.shared_experts.linear_fc2.weight of rank 0",
    ),
    "no EP": (
        {"parallel": Parallel(0, 1)},
        "",
        rf"in the files, and held by no rank: {EXPERT}.2.gate_proj.weight",
    ),
    "EP": ({"parallel": Parallel(0, 1, 2, 2)}, "", "there is no EP rank 2 of 2"),
    "too many": (
        {"models": EXPERTS._replace(experts=6)},
        "",
        "wrong shape: decoder.layers.0.mlp.router.weight",
    ),
    "TP of experts": (
        {"parallel": Parallel(0, 1, 0, 1, 0, 4)},
        "",
        "moe_intermediate_size cannot be cut .*a multiple of the experts' TP 4, got 6",
    ),
}


@pytest.mark.parametrize("case", SPARSE)
def test_experts_that_do_not_fit_are_one_error_on_every_rank(ranks, tmp_path, case):
    here, gone, says = SPARSE[case]
    tensors = {key: value for key, value in EXPERTS.tensors().items() if key != gone}
    write_folder(tmp_path, EXPERTS, tensors)
    texts = ranks(refused, str(tmp_path), EXPERTS, {"tp": 1, "pp": 1, "ep": 2, **here})
    assert len(set(texts)) == 1
    assert re.search(says, texts[0]), texts[0]


def reversed_chunks(api: Any, folder: str) -> list[str]:
    spot = spot_of(QWEN, "mcore", dist.get_rank(), 2, 2, vpp=2)
    models = models_of(QWEN, spot, QWEN.tensors())
    load_hf(models[::-1], folder, parallel=Parallel(spot.tp_rank, 2))
    return differences(models, expected(QWEN, spot, QWEN.tensors()))


def test_chunks_in_another_order_are_known_by_their_layers(ranks, tmp_path):
    write_folder(tmp_path, QWEN, QWEN.tensors())
    assert ranks(reversed_chunks, str(tmp_path)) == [[]] * 4


def killed(api: Any, folder: str, victim: int) -> str:
    rank = dist.get_rank()
    spot = spot_of(QWEN, "mcore", rank, dist.get_world_size() // 2, 2)
    models = models_of(QWEN, spot, QWEN.tensors())
    if rank == victim:
        transfer.configure(progress=lambda _: os.kill(os.getpid(), signal.SIGKILL))
    try:
        load_hf(models, folder, parallel=Parallel(spot.tp_rank, spot.tp_size), files="rank0")
    except transfer.TransferError as error:
        Path(folder, f"rank-{rank}").write_text(str(error))
    return ""


#: Of four ranks some have nothing to do with the dead one; two are started in half the time.
@pytest.mark.parametrize(("victim", "world"), [(0, 2), (3, 4)])
def test_a_rank_that_dies_while_rank_0_reads_for_all_is_told(ranks, tmp_path, victim, world):
    write_folder(tmp_path, QWEN, QWEN.tensors())
    with pytest.raises(RankError, match=f"the process of rank {victim} died"):
        ranks(killed, str(tmp_path), victim, world=world)
    told = {path.name: path.read_text() for path in tmp_path.glob("rank-*")}
    assert sorted(told) == [f"rank-{rank}" for rank in range(world) if rank != victim]
    assert all(re.search("broken off while|no agreement with", text) for text in told.values())
    assert not any("nothing was changed" in text for text in told.values())


def torn(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("files", ["auto", "shared", "rank0"])
@pytest.mark.parametrize("case", ["torn", "elsewhere", "revision", "nowhere", "not on the first"])
def test_ranks_that_see_other_files(ranks, tmp_path, case, files):
    good, other = tmp_path / "good", tmp_path / "other"
    write_folder(good, QWEN, QWEN.tensors())
    write_folder(other, QWEN, {key: value + 1 for key, value in QWEN.tensors().items()})
    here: dict[str, Any] = {"files": files}
    says, first = "the ranks see different files", str(good)
    if case == "torn":
        torn(good)
        says = "no whole safetensors file: .*model.safetensors"
    elif case == "elsewhere":
        here["folder"] = {3: str(tmp_path / "none"), 2: str(other)}
        says += ".*rank 2: .*rank 3: .* is no folder"
    elif case == "revision":
        here["folder"] = {2: str(other)}
    elif case == "nowhere":
        first, says = str(tmp_path / "none"), "no model here.*is no folder"
    else:
        here["folder"] = {0: str(tmp_path / "none")}
        says += "|no model here"
    if files == "rank0" and case in ("elsewhere", "revision"):
        # The first rank's alone count.
        with pytest.raises(RankError, match="DID NOT RAISE"):
            ranks(refused, first, QWEN, here)
        return
    texts = ranks(refused, first, QWEN, here)
    assert len(set(texts)) == 1
    assert re.search(says, texts[0]), texts[0]


def with_head(api: Any, folder: str) -> dict[str, str]:
    rank = dist.get_rank()
    spot = spot_of(TIED, "mcore", rank, 2, 2)
    models = models_of(TIED, spot, TIED.tensors())
    report = load_hf(models, folder, parallel=Parallel(spot.tp_rank, 2))
    assert not differences(models, expected(TIED, spot, TIED.tensors()))
    return dict(report.left)


def test_tied_with_another_head_is_an_error_and_an_equal_one_is_ignored(ranks, tmp_path):
    tensors = TIED.tensors()
    embedding = tensors["model.embed_tokens.weight"]
    write_folder(tmp_path / "same", TIED, {**tensors, "lm_head.weight": embedding.clone()})
    for left in ranks(with_head, str(tmp_path / "same")):
        assert left == {"lm_head.weight": "equal to the embedding"}
    write_folder(tmp_path / "other", TIED, {**tensors, "lm_head.weight": embedding + 1})
    texts = ranks(refused, str(tmp_path / "other"), TIED, {})
    assert len(set(texts)) == 1
    assert "lm_head.weight" in texts[0]
    assert "model.embed_tokens.weight" in texts[0]


def value_model(api: Any, folder: str, is_there: bool) -> tuple[tuple[str, ...], dict[str, str], list[str]]:
    rank = dist.get_rank()
    spot = spot_of(QWEN, "verl", rank, 2, 2)._replace(value_head=True)
    hf = {**QWEN.tensors(), "score.weight": torch.ones(1, 16, dtype=torch.bfloat16)}
    models = models_of(QWEN, spot, hf)
    said: dict[str, Any] = {"parallel": Parallel(spot.tp_rank, 2), "layers": spot.chunks}
    report = load_hf(models, folder, value_head=True, **said)
    if is_there:
        api.save_hf(models, folder + "-saved", like=folder, **said)
    return report.kept, dict(report.left), differences(models, expected(QWEN, spot, hf))


def test_a_value_head_is_loaded_or_left_alone_and_said(ranks, tmp_path):
    write_folder(tmp_path / "lm", QWEN, QWEN.tensors())
    for rank, (kept, left, differ) in enumerate(ranks(value_model, str(tmp_path / "lm"), False)):
        assert left == {"lm_head.weight": "no value head of one row"}
        assert list(kept) == differ == (["lm_head.weight"] if rank > 1 else [])
    labels = {"score.weight": torch.ones(2, 16, dtype=torch.bfloat16), "score.bias": torch.ones(2)}
    write_folder(tmp_path / "labels", QWEN, {**without("lm_head.weight"), **labels})
    for _, left, _ in ranks(value_model, str(tmp_path / "labels"), False):
        assert left == dict.fromkeys(labels, "no value head of one row")
    score = {**without("lm_head.weight"), "score.weight": torch.ones(1, 16, dtype=torch.bfloat16)}
    # The module has none, and would compute other values without it.
    write_folder(tmp_path / "bias", QWEN, {**score, "score.bias": torch.ones(1)})
    with pytest.raises(RankError, match=r"in the files, and held by no rank: score.bias"):
        ranks(value_model, str(tmp_path / "bias"), False)
    write_folder(tmp_path / "value", QWEN, score)
    assert all(answer == ((), {}, []) for answer in ranks(value_model, str(tmp_path / "value"), True))
    got = read_folder(tmp_path / "value-saved")
    assert set(got) == set(score)
    assert torch.equal(got["score.weight"], score["score.weight"])


def cast(api: Any, folder: str) -> tuple[dict[str, Any], dict[str, int]]:
    rank = dist.get_rank()
    spot = spot_of(QWEN, "mcore", rank, 2, 2, rows=20)
    hf = QWEN.tensors()
    models = models_of(QWEN, spot, hf, torch.float32)
    report = load_hf(models, folder, parallel=Parallel(spot.tp_rank, 2))
    assert not differences(models, expected(QWEN, spot, hf))
    api.save_hf(
        models,
        folder + "-saved",
        like=folder,
        parallel=Parallel(spot.tp_rank, 2),
        how=api.Export(dtype=torch.float16),
    )
    return dict(report.cast), dict(report.padded)


def test_another_dtype_is_cast_and_said(ranks, tmp_path):
    write_folder(tmp_path / "m", QWEN, QWEN.tensors())
    for rank, (dtypes, padded) in enumerate(ranks(cast, str(tmp_path / "m"))):
        assert set(dtypes.values()) == {torch.bfloat16}
        name = "output_layer.weight" if rank > 1 else "embedding.word_embeddings.weight"
        assert padded == ({name: 8} if rank % 2 else {})
    got = read_folder(tmp_path / "m-saved")
    assert all(torch.equal(got[key], value.half()) for key, value in QWEN.tensors().items())
    assert json.loads((tmp_path / "m-saved" / "config.json").read_text())["torch_dtype"] == "float16"


# --- exports ---


def save(api: Any, folder: str, like: str, how: dict[str, Any], end: str = "") -> str:
    """The text of a save's error; nothing where it went well."""
    rank = dist.get_rank()
    spot = spot_of(QWEN, "mcore", rank, dist.get_world_size() // 2, 2)
    parallel = Parallel(spot.tp_rank, spot.tp_size)
    models = models_of(QWEN, spot, QWEN.tensors())
    load_hf(models, like, parallel=parallel)
    if end == "no layer" and rank > 1:
        models[0].module.module.decoder.layers = torch.nn.ModuleList()  # type: ignore[union-attr, operator]
    if end == "dtype" and rank == 1:
        models[0].float()
    victim = int(end[-1]) if end.startswith("killed") else -1
    if end.startswith("killed while it moves") and rank == victim:
        transfer.configure(progress=lambda _: os.kill(os.getpid(), signal.SIGKILL))
    if end.startswith("killed before") and rank == victim:
        os.rename = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    if end.startswith("write") and rank == int(end[-1]):
        os.pwrite = failing(os.pwrite)
    try:
        api.save_hf(models, folder, like=like, parallel=parallel, how=api.Export(**how))
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def failing(write: Any) -> Any:
    calls = []

    def fails(*args: Any) -> int:
        calls.append(args)
        if len(calls) == 5:
            os.pwrite = write
            raise OSError(5, "the disk is broken")
        return int(write(*args))

    return fails


@pytest.fixture
def model(tmp_path: Path) -> str:
    write_folder(tmp_path / "hf", QWEN, QWEN.tensors())
    return str(tmp_path / "hf")


@pytest.mark.parametrize(
    ("end", "says"),
    [
        ("no layer", "held by no rank: model.layers.2.* and in 1 more layer(s)"),
        ("dtype", "is held as torch.bfloat16 and torch.float32: pass a dtype"),
        ("write on rank 0", "the disk is broken"),
        ("write on rank 3", "rank 3: OSError: [Errno 5] the disk is broken"),
    ],
)
@pytest.mark.parametrize("is_there", [False, True])
def test_an_export_that_fails_leaves_the_folder_as_it_was(ranks, model, tmp_path, end, says, is_there):
    target, old = tmp_path / "saved", {key: value + 1 for key, value in QWEN.tensors().items()}
    if is_there:
        write_folder(target, QWEN, old, files=2)
    texts = ranks(save, str(target), model, {"file_bytes": 3000, "overwrite": True}, end)
    assert len(set(texts)) == 1
    assert says in texts[0]
    if is_there:
        got = read_folder(target)
        assert all(torch.equal(got[key], old[key]) for key in old)
    assert target.exists() == is_there
    assert not list(tmp_path.rglob("*.partial"))


def test_an_older_model_is_not_overwritten_unasked(ranks, model, tmp_path):
    write_folder(tmp_path / "saved", QWEN, QWEN.tensors(), files=2)
    texts = ranks(save, str(tmp_path / "saved"), model, {})
    assert len(set(texts)) == 1
    assert "Export(overwrite=True) replaces a model" in texts[0]
    assert ranks(save, str(tmp_path / "saved"), model, {"overwrite": True}) == [""] * 4
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]


@pytest.mark.parametrize(
    ("end", "world", "is_there"),
    [
        ("killed while it moves, rank 0", 2, True),
        ("killed while it moves, rank 1", 2, True),
        ("killed while it moves, rank 3", 4, False),
        ("killed before publish, rank 0", 2, False),
        ("killed before publish, rank 0", 2, True),
    ],
)
def test_a_killed_rank_leaves_a_whole_model_or_none(ranks, model, tmp_path, end, world, is_there):
    target, old = tmp_path / "saved", {key: value + 1 for key, value in QWEN.tensors().items()}
    if is_there:
        write_folder(target, QWEN, old, files=2)
    how = {"file_bytes": 3000, "overwrite": True}
    with pytest.raises(RankError, match=f"the process of {end[-6:]} died"):
        ranks(save, str(target), model, how, end, world=world)
    if is_there:
        got = read_folder(target)
        assert all(torch.equal(got[key], old[key]) for key in old)
    assert target.exists() == is_there
    # What the dead process left is cleared away, and is in nobody's way.
    assert ranks(save, str(target), model, how, world=2) == [""] * 2
    got = read_folder(target)
    assert all(torch.equal(got[key], value) for key, value in QWEN.tensors().items())
    assert not list(tmp_path.rglob("*.partial"))


@on_ranks()
def test_a_rank_that_does_not_know_its_place_is_told_what_to_pass(api: Any, model: str) -> None:
    """No place in a TP group is known."""
    spot = spot_of(QWEN, "mcore", dist.get_rank(), 2, 2)
    with pytest.raises(RuntimeError, match="pass parallel=Parallel"):
        load_hf(models_of(QWEN, spot, QWEN.tensors()), model)


def test_a_process_without_a_group_needs_no_parallel(tmp_path, model):
    from torch_dcp_backport.megatron import save_hf

    spot = spot_of(QWEN, "mcore", 0, 1, 1)
    models = models_of(QWEN, spot, QWEN.tensors())
    load_hf(models, model)
    assert not differences(models, expected(QWEN, spot, QWEN.tensors()))
    save_hf(models, tmp_path / "saved", like=model)
    got = read_folder(tmp_path / "saved")
    assert all(torch.equal(got[key], value) for key, value in QWEN.tensors().items())
    write_file(tmp_path / "hf" / "model.safetensors", without(Q))
    with pytest.raises(RuntimeError, match="not in the files"):
        load_hf(models, model)
