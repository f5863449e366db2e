"""Every family's files in megatron-core's layout, and back, bit for bit; what is refused."""

from __future__ import annotations

import json
import re
import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from decoders import aligned, inner, read_folder
from family_models import (
    BESIDE,
    EVERY,
    FAMILIES,
    SIZES,
    Rank,
    config_of,
    held,
    stage_module,
    stage_of,
    tensors_of,
    with_prediction,
    write,
)
from heard import heard
from values import value_of

from torch_dcp_backport import hf, megatron
from torch_dcp_backport.dist_checkpointing import CheckpointingException, load_tensors_metadata, verify
from torch_dcp_backport.hf._src import filling
from torch_dcp_backport.megatron._src.shape import misfits, shape_of
from torch_dcp_backport.megatron.convert import convert
from torch_dcp_backport.transfer import Box, last_report
from torch_dcp_backport.transfer._src import once

pytest.importorskip("transformers")
#: Name -> (TP, PP, EP).
GRIDS = {"tp 4": (4, 1, 1), "tp 2, pp 2": (2, 2, 1), "tp 1, pp 2, ep 2": (1, 2, 2), "tp 2, ep 2": (2, 1, 2)}
TIED = ("gemma2", "gemma3_text")
#: Text towers, which are no models of their own here.
NOT_ALONE = ("qwen3_vl_moe_text", "qwen2_5_vl")


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


class Asked(hf.Folder):
    """A folder that remembers which boxes were asked for."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.asked: list[tuple[str, Box]] = []

    def part(self, key: str, box: Box) -> torch.Tensor:
        self.asked.append((key, box))
        return super().part(key, box)


@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_vl_moe_text"])
def test_of_a_tensor_of_all_experts_only_an_experts_part_is_asked_for(tmp_path: Path, name: str) -> None:
    tensors = tensors_of(name)
    write(name, tmp_path, tensors)
    layers, rank = list(range(4)), Rank(0, 1, 0, 1)
    wanted = stage_of(name, tensors, rank, layers, False)
    module, source = stage_module(wanted, layers), Asked(tmp_path)
    megatron.load_hf(module, source, parallel=megatron.Parallel(*rank))
    got = held(module)
    assert all(torch.equal(got[key], value) for key, value in wanted.items())
    packed = [box.size[0] for key, box in source.asked if "experts.gate_up_proj" in key]
    assert packed
    assert set(packed) == {1}


def test_turned_gate_and_up_are_not_taken_for_others_where_down_is_square(tmp_path: Path) -> None:
    name = "gpt_oss"
    config = config_of(name, intermediate_size=SIZES["hidden_size"])
    layers, rank = list(range(4)), Rank(0, 1, 0, 1)
    tensors = tensors_of(name)
    for key in [key for key in tensors if "experts." in key and not key.endswith("_bias")]:
        rows = 32 if "gate_up" in key else 16
        tensors[key] = torch.zeros(4, 16, rows, dtype=torch.bfloat16)
    for key in [key for key in tensors if key.endswith("gate_up_proj_bias")]:
        tensors[key] = torch.zeros(4, 32, dtype=torch.bfloat16)
    module = stage_module(stage_of(name, tensors, rank, layers, False), layers)
    turned = {
        key: value.mT.contiguous() if "_proj" in key and value.dim() == 3 else value
        for key, value in tensors.items()
    }
    write(name, tmp_path, turned)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(RuntimeError, match=r"wrong shape in the files: \S+gate_up_proj ") as caught:
        megatron.load_hf(module, tmp_path, parallel=megatron.Parallel(*rank))
    assert "(expected (4, 16, 32) by config.json, got (4, 32, 16))" in str(caught.value)


@pytest.mark.parametrize("rows", [8, 16], ids=["gate and up are square", "down is square"])
def test_experts_that_transformers_5_writes_turned_are_loaded(tmp_path: Path, rows: int) -> None:
    """Of a sparse Qwen3-VL: one of a layer's two tensors tells it where the other one is square."""
    name, said = "qwen3_vl_moe_text", {"moe_intermediate_size": rows}
    tensors = tensors_of(name)
    for key in [key for key in tensors if "experts." in key]:
        shape = (4, 16, 2 * rows) if "gate_up" in key else (4, rows, 16)
        tensors[key] = value_of(key, shape, torch.bfloat16)
    turned = {key: value.mT.contiguous() if "experts." in key else value for key, value in tensors.items()}
    write(name, tmp_path / "hf", turned, **said)
    layers, rank = list(range(4)), Rank(0, 1)
    wanted = stage_of(name, tensors, rank, layers, False)
    module = stage_module(wanted, layers)
    megatron.load_hf(module, tmp_path / "hf", parallel=megatron.Parallel(*rank))
    assert all(torch.equal(held(module)[key], value) for key, value in wanted.items())
    convert(tmp_path / "hf", tmp_path / "ckpt")
    convert(tmp_path / "ckpt", tmp_path / "back")
    back = read_folder(tmp_path / "back")
    assert all(torch.equal(back[key], value) for key, value in tensors.items())


#: Models of several towers -> their configuration's parts.
VISION = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 16}
LARGE = {
    "qwen2_vl": {"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2},
    "qwen2_5_vl": VISION,
    "qwen3_vl": {**VISION, "deepstack_visual_indexes": [0]},
    "qwen3_vl_moe": {**VISION, "deepstack_visual_indexes": [0]},
}


def by_transformers(name: str, folder: Path) -> Any:
    """A model as this transformers makes it and writes its files and config.json."""
    transformers = pytest.importorskip("transformers")
    if name not in LARGE:
        kind = name.partition(" ")[0]
        made = transformers.AutoConfig.for_model(kind, **{**EVERY[name][0], "pad_token_id": 0})
        model = transformers.AutoModelForCausalLM.from_config(made)
    else:
        if name not in transformers.CONFIG_MAPPING:
            pytest.skip(f"transformers {transformers.__version__} has no {name}")
        text = {**SIZES, "head_dim": 4, "num_experts": 4, "moe_intermediate_size": 8}
        text["rope_scaling"] = {"rope_type": "default", "type": "mrope", "mrope_section": [1, 1, 0]}
        made = transformers.AutoConfig.for_model(name, text_config=text, vision_config=LARGE[name])
        model = transformers.AutoModelForImageTextToText.from_config(made)
    with torch.no_grad():
        for key, param in model.named_parameters():
            param.copy_(value_of(key, tuple(param.shape), torch.float32))
    model = model.to(torch.bfloat16)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", [*(name for name in EVERY if name not in NOT_ALONE), *LARGE])
def test_files_as_transformers_writes_them_are_converted(tmp_path: Path, name: str) -> None:
    """With the keys of config.json and the layout of this release: 5 has renamed some of both."""
    model = by_transformers(name, tmp_path / "hf")
    report = convert(tmp_path / "hf", tmp_path / "ckpt")
    wanted = read_folder(tmp_path / "hf")
    if name in LARGE:
        assert all("visual" in key for key in report.left)
        return
    assert not report.left
    convert(tmp_path / "ckpt", tmp_path / "back")
    back = read_folder(tmp_path / "back")
    assert set(back) == set(wanted)
    assert all(torch.equal(back[key], value) for key, value in wanted.items())
    opened = type(model).from_pretrained(tmp_path / "back", torch_dtype=torch.bfloat16)
    state = model.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in opened.state_dict().items())


@pytest.mark.parametrize("name", [*FAMILIES, "qwen3_vl_moe_text"])
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


@pytest.mark.parametrize("name", [*FAMILIES, "qwen3_vl_moe_text"])
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


# --- verl's functions ---

MERGES = {
    "mistral": "",
    "mixtral": "_mixtral",
    "deepseek_v3": "_dpskv3",
    "qwen3_moe": "_qwen_moe",
    "qwen2_5_vl": "_qwen2_5_vl",
}


class Config:
    """As a configuration of transformers gives itself."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values

    def to_dict(self) -> dict[str, Any]:
        return self.values


def filled_and_merged(
    api: Any, name: str, tensors: dict[str, torch.Tensor], config: dict[str, Any]
) -> list[str]:
    """What is wrong with a model that is filled and merged by verl's functions, on two stages of TP 2."""
    number = dist.get_rank()
    layers = [[0, 1], [2, 3]][number // 2]
    wanted = stage_of(name, tensors, Rank(number % 2, 2), layers, False)
    module = stage_module(wanted, layers)
    if name == "qwen2_5_vl":
        module = torch.nn.ModuleDict({"language_model": inner(module), "vision_model": torch.nn.Linear(2, 2)})
    answers = {"model_parallel_is_initialized": True}
    answers.update(get_tensor_model_parallel_rank=number % 2, get_tensor_model_parallel_world_size=2)
    state = types.SimpleNamespace(**{key: lambda value=value: value for key, value in answers.items()})
    sys.modules["megatron.core.parallel_state"] = state  # type: ignore[assignment]
    try:
        given = tensors if number == 0 else {}
        api.load_state_dict_to_megatron_gptmodel(given, [module], Config(config), torch.bfloat16)
        got = held(module["language_model"] if name == "qwen2_5_vl" else module)
        wrong = [key for key, value in wanted.items() if not torch.equal(got[key], value)]
        merge = getattr(api, f"merge_megatron_ckpt_gptmodel{MERGES[name]}")
        merged = merge([module], Config(config), torch.float32)
        assert set(merged) == (set(tensors) if number == 0 else set())
        other = Config({**config, "model_type": "gemma2"} if number == 0 else config)
        with pytest.raises(RuntimeError, match=r"rank.* the configuration has the model_type 'gemma2'"):
            api.merge_megatron_ckpt_gptmodel_mixtral([module], other, torch.float32)
        return wrong + [key for key, value in merged.items() if not torch.equal(value, tensors[key].float())]
    finally:
        del sys.modules["megatron.core.parallel_state"]


@pytest.mark.parametrize(
    ("merge", "kinds"),
    [
        ("_mixtral", "mixtral"),
        ("_dpskv3", "deepseek_v3"),
        ("_qwen_moe", "qwen2_moe or qwen3_moe"),
        ("_qwen2_5_vl", "qwen2_5_vl"),
    ],
)
def test_a_function_of_other_families_names_the_kind_of_the_model(merge: str, kinds: str) -> None:
    """Of a model that could be merged."""
    tensors, config = tensors_of("mistral"), config_of("mistral")
    module = stage_module(stage_of("mistral", tensors, Rank(0, 1), [0, 1, 2, 3], False), [0, 1, 2, 3])
    assert set(megatron.merge_megatron_ckpt_gptmodel([module], config, torch.float32)) == set(tensors)
    says = f"rank 0: ValueError: the configuration has the model_type 'mistral', and not {kinds}$"
    with pytest.raises(RuntimeError, match=says):
        getattr(megatron, f"merge_megatron_ckpt_gptmodel{merge}")([module], config, torch.float32)


@pytest.mark.parametrize("name", MERGES)
def test_verls_functions_fill_and_merge(ranks, name: str) -> None:
    assert ranks(filled_and_merged, name, tensors_of(name), config_of(name)) == [[]] * 4


@pytest.mark.parametrize("name", FAMILIES)
def test_a_tensor_that_is_missing_is_named(tmp_path: Path, name: str) -> None:
    """Whichever it is of the last layer: the table speaks of each."""
    tensors = tensors_of(name)
    shape = shape_of(config_of(name))
    of_layer = [key for key in tensors if key.startswith("model.layers.3.")]
    assert {shape.order(key)[0] for key in of_layer} == {3}
    for key in of_layer:
        assert shape.folded([key]).get(key, shape.hf_shape(key)) == tuple(tensors[key].shape), key
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


# --- towers, scales, predictions ---

VISION = {"visual.merger.weight": torch.ones(2, 2), "model.visual.norm.weight": torch.ones(3)}


def tower_of(prefix: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    renamed = {
        key.replace("model.", prefix, 1): value for key, value in tensors.items() if key != "lm_head.weight"
    }
    return {**renamed, "lm_head.weight": tensors["lm_head.weight"], **VISION}


@pytest.mark.parametrize("prefix", ["model.", "model.language_model."])
@pytest.mark.parametrize("is_nested", [False, True])
def test_the_text_tower_of_a_model_of_several_is_loaded(tmp_path: Path, prefix: str, is_nested: bool) -> None:
    tensors, config = tensors_of("qwen2_5_vl"), config_of("qwen2_5_vl")
    write("qwen2_5_vl", tmp_path / "hf", tower_of(prefix, tensors))
    if is_nested:
        text = {"model_type": "qwen2_5_vl_text", **SIZES}
        nested = {"model_type": "qwen2_5_vl", "text_config": text, "tie_word_embeddings": False}
        (tmp_path / "hf" / "config.json").write_text(json.dumps(nested))
    wanted = stage_of("qwen2_5_vl", tensors, Rank(0, 1), [0, 1, 2, 3], False)
    module = stage_module(wanted, [0, 1, 2, 3])
    report = megatron.load_hf(module, tmp_path / "hf", parallel=megatron.Parallel(0, 1))
    assert report.left == dict.fromkeys(VISION, "of another tower than the text's")
    got = held(module)
    assert all(torch.equal(got[key], value) for key, value in wanted.items())
    assert set(megatron.gather_hf(module, config=config, parallel=megatron.Parallel(0, 1))) == set(tensors)
    with pytest.raises(
        RuntimeError, match=r"a text tower alone is no model .*gather_hf.*model_type qwen2_5_vl"
    ):
        megatron.save_hf(module, tmp_path / "saved", like=config, parallel=megatron.Parallel(0, 1))
    assert not (tmp_path / "saved").exists()
    convert(tmp_path / "hf", tmp_path / "ckpt")
    with pytest.raises(CheckpointingException, match="a text tower alone is no model"):
        convert(tmp_path / "ckpt", tmp_path / "back")
    assert not (tmp_path / "back").exists()


def in_fp8(value: torch.Tensor, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(fp8, scales, what they stand for) of a matrix in blocks."""
    scales = torch.rand(-(-value.shape[0] // rows), -(-value.shape[1] // columns)) + 0.5
    each = scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[: value.shape[0], : value.shape[1]]
    small = (value.float() / each).to(torch.float8_e4m3fn)
    return small, scales, (small.float() * each).bfloat16()


def quantised(tensors: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(files, what they stand for) with each projection in fp8, behind everything else."""
    files, stand = {}, {}
    for key, value in tensors.items():
        files[key] = stand[key] = value
        if "_proj" in key:
            files[key], files[key + "_scale_inv"], stand[key] = in_fp8(value, 5, 3)
    return dict(sorted(files.items(), key=lambda entry: "_proj" in entry[0])), stand


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [5, 3]}


def fills(api: Any, folder: str, tensors: dict[str, torch.Tensor]) -> list[str]:
    rank = Rank(dist.get_rank() % 2, 2, dist.get_rank() // 2, 2)
    wanted = stage_of("deepseek_v3", tensors, rank, [0, 1, 2, 3], False)
    wrong = []
    for files in ("shared", "rank0"):
        module = stage_module(wanted, [0, 1, 2, 3])
        api.load_hf(module, folder, parallel=api.Parallel(*rank), files=files)
        got = held(module)
        wrong += [f"{files}: {key}" for key, value in wanted.items() if not torch.equal(got[key], value)]
    return wrong


def staged(api: Any, folder: str, tensors: dict[str, torch.Tensor], most: int) -> tuple[str, int]:
    """(what the last transfer was, the bytes of its buffers), of a load through the first rank."""
    rank = Rank(dist.get_rank() % 2, 2, dist.get_rank() // 2, 2)
    module = stage_module(stage_of("mixtral", tensors, rank, [0, 1, 2, 3], False), [0, 1, 2, 3])
    with mock.patch.object(filling, "STAGING_BYTES", most):
        api.load_hf(module, folder, parallel=api.Parallel(*rank), files="rank0")
    report = last_report()
    assert report is not None
    return report.operation, report.staging_bytes


def test_a_load_through_the_first_rank_has_small_buffers_on_every_rank(ranks, tmp_path: Path) -> None:
    tensors = tensors_of("mixtral")
    write("mixtral", tmp_path / "hf", tensors)
    assert filling.STAGING_BYTES == 8 * 2**20
    for operation, nbytes in ranks(staged, str(tmp_path / "hf"), tensors, 2**10):
        assert operation == "fill"
        assert 0 < nbytes <= 2**10


def test_blocks_in_fp8_are_dequantised_as_they_are_read(ranks, tmp_path: Path) -> None:
    files, stand = quantised(tensors_of("deepseek_v3"))
    write("deepseek_v3", tmp_path / "hf", files, quantization_config=FP8)
    assert ranks(fills, str(tmp_path / "hf"), stand) == [[]] * 4
    aligned(tmp_path / "hf")
    said = convert(tmp_path / "hf", tmp_path / "ckpt")
    assert said.memory == sum(
        2 * stand[key[: -len("_scale_inv")]].numel() for key in files if "_scale" in key
    )
    convert(tmp_path / "ckpt", tmp_path / "back")
    back = read_folder(tmp_path / "back")
    assert set(back) == set(stand)
    assert all(torch.equal(back[key], value) for key, value in stand.items())
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())


def test_scales_that_do_not_fit_are_named(tmp_path: Path) -> None:
    files, _ = quantised(tensors_of("deepseek_v3"))
    key = "model.layers.0.self_attn.o_proj.weight"
    write("deepseek_v3", tmp_path / "hf", files, quantization_config={**FP8, "weight_block_size": [4, 4]})
    with pytest.raises(
        CheckpointingException, match=rf"wrong shape for a weight of .*{re.escape(key)}_scale_inv"
    ):
        convert(tmp_path / "hf", tmp_path / "ckpt")
    del files[key + "_scale_inv"]
    write("deepseek_v3", tmp_path / "hf", files, quantization_config=FP8)
    with pytest.raises(CheckpointingException, match=rf"quantised in the files: {re.escape(key)}"):
        convert(tmp_path / "hf", tmp_path / "ckpt")
    write("deepseek_v3", tmp_path / "hf", files, quantization_config={"quant_method": "gptq"})
    with pytest.raises(CheckpointingException, match=r"quantization_config \(gptq\)"):
        convert(tmp_path / "hf", tmp_path / "ckpt")


PREDICTED = {"num_nextn_predict_layers": 1}


def predicts(api: Any, folder: str, tensors: dict[str, torch.Tensor]) -> list[str]:
    """What is wrong of two stages, the last of which predicts and so has the embedding, too."""
    number = dist.get_rank()
    rank, layers = Rank(number % 2, 2), [[0, 1], [2, 3]][number // 2]
    wanted = stage_of("deepseek_v3", tensors, rank, layers, False)
    if number // 2:
        # A layer more, by its name.
        fifth = stage_of("deepseek_v3", tensors, rank, [4], False)
        path = "mtp.layers.0."
        wanted.update(
            (key.replace("decoder.layers.0.", f"{path}transformer_layer."), value)
            for key, value in fifth.items()
            if key.startswith("decoder.layers.0.")
        )
        at = "model.layers.4."
        wanted.update((f"{path}{BESIDE[name]}.weight", tensors[f"{at}{name}.weight"]) for name in BESIDE)
        wanted[f"{path}eh_proj.weight"] = rank.rows(tensors[f"{at}eh_proj.weight"])
        first = stage_of("deepseek_v3", tensors, rank, [0], False)
        wanted["embedding.word_embeddings.weight"] = first["embedding.word_embeddings.weight"]
    module = stage_module(wanted, layers)
    parallel = api.Parallel(number % 2, 2)
    report = api.load_hf(module, folder, parallel=parallel)
    assert set(report.left.values()) == {"equal to the model's own"}
    got = held(module)
    api.save_hf(module, f"{folder}-saved", like=folder, parallel=parallel)
    return [key for key, value in wanted.items() if not torch.equal(got[key], value)]


def test_layers_of_multi_token_prediction_are_loaded_and_saved_where_they_are_held(
    ranks, tmp_path: Path
) -> None:
    tensors = with_prediction(tensors_of("deepseek_v3"))
    copies = [key for key in tensors if key.endswith(("4.embed_tokens.weight", "shared_head.head.weight"))]
    write("deepseek_v3", tmp_path / "hf", tensors, **PREDICTED)
    assert ranks(predicts, str(tmp_path / "hf"), tensors) == [[]] * 4
    convert(tmp_path / "hf", tmp_path / "ckpt")
    assert "mtp.layers.0.transformer_layer.mlp.router.weight" in load_tensors_metadata(tmp_path / "ckpt")
    convert(tmp_path / "ckpt", tmp_path / "back")
    for folder in ("hf-saved", "back"):
        back = read_folder(tmp_path / folder)
        assert set(back) == set(tensors) - set(copies)
        assert all(torch.equal(value, tensors[key]) for key, value in back.items())
    for key in copies:
        write("deepseek_v3", tmp_path / "other", {**tensors, key: tensors[key] + 1}, **PREDICTED)
        with pytest.raises(
            CheckpointingException, match=rf"other values than its original: {re.escape(key)}"
        ):
            convert(tmp_path / "other", tmp_path / "never")


def test_layers_of_multi_token_prediction_are_left_where_no_rank_holds_them(tmp_path: Path, caplog) -> None:
    tensors = with_prediction(tensors_of("deepseek_v3"))
    write("deepseek_v3", tmp_path / "hf", tensors, **PREDICTED)
    wanted = stage_of("deepseek_v3", tensors, Rank(0, 1), [0, 1, 2, 3], False)
    module = stage_module(wanted, [0, 1, 2, 3])
    report = megatron.load_hf(module, tmp_path / "hf", parallel=megatron.Parallel(0, 1))
    fifth = {key for key in tensors if key.startswith("model.layers.4.")}
    assert report.left == dict.fromkeys(fifth, "of multi-token prediction, which no rank holds")
    once.forget()
    megatron.save_hf(module, tmp_path / "saved", like=tmp_path / "hf", parallel=megatron.Parallel(0, 1))
    assert "1 layer(s) of multi-token prediction, and no rank holds them" in caplog.text
    assert set(read_folder(tmp_path / "saved")) == set(tensors) - fifth


def test_layers_of_multi_token_prediction_that_config_json_denies_are_an_error(tmp_path: Path) -> None:
    """It names the key of config.json."""
    tensors = with_prediction(tensors_of("deepseek_v3"))
    write("deepseek_v3", tmp_path / "hf", tensors, num_nextn_predict_layers=0)
    wanted = stage_of("deepseek_v3", tensors, Rank(0, 1), [0, 1, 2, 3], False)
    module = stage_module(wanted, [0, 1, 2, 3])
    says = r"model\.layers\.4\.\* \(expected no layers behind 4, as num_nextn_predict_layers=0 of config"
    with pytest.raises(RuntimeError, match=says):
        megatron.load_hf(module, tmp_path / "hf", parallel=megatron.Parallel(0, 1))
    with pytest.raises(CheckpointingException, match=says):
        convert(tmp_path / "hf", tmp_path / "ckpt")


def says(api: Any, name: str, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> list[str]:
    """The warnings of this rank at gathers of a model whose ranks hold its layers and no others."""
    rank, layers = Rank(dist.get_rank() % 2, 2), [[0, 1], [2, 3]][dist.get_rank() // 2]
    module = stage_module(stage_of(name, tensors, rank, layers, False), layers)
    if name == "qwen2_5_vl":
        module = torch.nn.ModuleDict({"language_model": inner(module), "vision_model": torch.nn.Linear(2, 2)})
    with heard("megatron") as said:
        for _ in range(2):
            api.gather_hf(module, config=config, parallel=api.Parallel(*rank))
    return said


@pytest.mark.parametrize(
    ("name", "more", "text"),
    [
        ("qwen2_5_vl", {}, "of a ModuleDict the language_model alone is loaded and saved, not vision_model"),
        (
            "deepseek_v3",
            PREDICTED,
            "config.json has 1 layer(s) of multi-token prediction, and no rank holds ",
        ),
    ],
)
def test_what_concerns_every_rank_is_said_by_the_first_alone(
    ranks, name: str, more: dict[str, Any], text: str
) -> None:
    first, *others = ranks(says, name, tensors_of(name), {**config_of(name), **more})
    assert [said.startswith(text) for said in first] == [True]
    assert others == [[]] * 3


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
    "a size that is cut": (
        {"rows": (megatron.row("w", "rows", "x: 128, hidden"),)},
        "w is cut as rows, and dimension 0 of x has the size 128, not a number of the table in each term",
    ),
    "a size that is cut, in a sum": (
        {"rows": (megatron.row("w", "columns", "x: vocab, 2*hidden+1"),)},
        r"w is cut as columns, and dimension 1 of x has the size 2\*hidden\+1",
    ),
    "no size that is cut": (
        {"rows": (megatron.row("w", "columns", "x: hidden"),)},
        "w is cut as columns, and dimension 1 of x has the size None",
    ),
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
