"""Adapters of peft by their names alone: what they are merged into, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_dcp_backport import hf
from torch_dcp_backport.hf._src import adapters
from torch_dcp_backport.hf._src.adapters import Low, add
from torch_dcp_backport.transfer import Box, TensorInfo

PREFIX = "base_model.model."
LORA = {"peft_type": "LORA", "r": 2, "lora_alpha": 8}


@st.composite
def boxes(draw: Any) -> tuple[tuple[int, int], Box, int, bool]:
    """(rows and columns of a weight, a part of it, rank, whether the weight is turned)."""
    shape = draw(st.tuples(st.integers(1, 9), st.integers(1, 9)))
    starts = [draw(st.integers(0, extent - 1)) for extent in shape]
    sizes = [draw(st.integers(1, extent - start)) for extent, start in zip(shape, starts)]
    return shape, Box(tuple(starts), tuple(sizes)), draw(st.integers(1, 4)), draw(st.booleans())


@settings(deadline=None, max_examples=200)
@given(boxes())
def test_a_part_of_a_merged_weight_is_that_part_of_the_sum(case: Any) -> None:
    """Of whole numbers, so that no order of additions rounds."""
    (rows, columns), box, rank, is_turned = case
    draw = torch.Generator().manual_seed(rows * 10 + columns)
    weight = torch.randint(-9, 9, (rows, columns), generator=draw).double()
    wide, high = (rows, columns) if is_turned else (columns, rows)
    a = torch.randint(-9, 9, (rank, wide), generator=draw).double()
    b = torch.randint(-9, 9, (high, rank), generator=draw).double()
    delta = (b @ a) * 0.5
    whole = weight + (delta.T if is_turned else delta)
    place = tuple(slice(start, start + size) for start, size in zip(box.offset, box.size))
    part = weight[place].clone()
    add(part, box, Low("a", "b", 0.5, is_turned), a, b)
    assert torch.equal(part, whole[place])


def infos(**shapes: Any) -> dict[str, TensorInfo]:
    given_shapes = {key.replace("__", "."): shape for key, shape in shapes.items()}
    return {PREFIX + key: TensorInfo(shape, torch.float32) for key, shape in given_shapes.items()}


ADAPTED = infos(
    model__q__base_layer__weight=(6, 4),
    model__q__base_layer__bias=(6,),
    model__q__lora_A__default__weight=(2, 4),
    model__q__lora_B__default__weight=(6, 2),
    model__embed__base_layer__weight=(9, 4),
    model__embed__lora_embedding_A__default=(2, 9),
    model__embed__lora_embedding_B__default=(4, 2),
    head__original_module__weight=(9, 4),
    head__modules_to_save__default__weight=(9, 4),
    model__norm__weight=(4,),
)


def test_the_names_of_the_model_alone_and_what_is_added_to_them() -> None:
    plan = adapters.merged(ADAPTED, LORA)
    assert plan.names == {
        "model.q.weight": f"{PREFIX}model.q.base_layer.weight",
        "model.q.bias": f"{PREFIX}model.q.base_layer.bias",
        "model.embed.weight": f"{PREFIX}model.embed.base_layer.weight",
        "head.weight": f"{PREFIX}head.modules_to_save.default.weight",
        "model.norm.weight": f"{PREFIX}model.norm.weight",
    }
    assert plan.changed == {"model.q.weight", "model.embed.weight"}
    assert {key: (low.scale, low.is_turned) for key, low in plan.added.items()} == {
        "model.q.weight": (4.0, False),
        "model.embed.weight": (4.0, True),
    }
    # As `model.add_adapter` of transformers has them.
    plain = {key[len(PREFIX) :]: info for key, info in ADAPTED.items()}
    assert set(adapters.merged(plain, LORA).names) == set(plan.names)


@pytest.mark.parametrize(
    ("settings", "scale"),
    [
        ({}, 4.0),
        ({"use_rslora": True}, 8 / 2**0.5),
        ({"alpha_pattern": {"q": 3}}, 1.5),
        ({"alpha_pattern": {"model.q": 3, "q": 5}}, 1.5),
        # Not of a part of a name.
        ({"alpha_pattern": {"del.q": 3}}, 4.0),
        ({"rank_pattern": {"q": 2}, "r": 99}, 4.0),
    ],
    ids=str,
)
def test_the_factor_of_an_adapter(settings: dict[str, Any], scale: float) -> None:
    plan = adapters.merged(ADAPTED, {**LORA, **settings})
    assert plan.added["model.q.weight"].scale == scale


def with_two() -> dict[str, TensorInfo]:
    more = infos(model__q__lora_A__other__weight=(2, 4), model__q__lora_B__other__weight=(6, 2))
    return {**ADAPTED, **more}


def without(part: str) -> dict[str, TensorInfo]:
    return {key: info for key, info in ADAPTED.items() if part not in key}


def of(dtype: torch.dtype) -> dict[str, TensorInfo]:
    return {
        key: TensorInfo(info.shape, dtype) if "q.base_layer.weight" in key else info
        for key, info in ADAPTED.items()
    }


CONVOLUTION = infos(
    conv__base_layer__weight=(2, 2, 3, 3),
    conv__lora_A__default__weight=(2, 2, 3, 3),
    conv__lora_B__default__weight=(2, 2, 1, 1),
)
MAGNITUDE = infos(model__q__lora_magnitude_vector__default__weight=(6,))
TOKENS = infos(model__e__token_adapter__trainable_tokens_delta__default=(2, 4))
PARAMETER = infos(x__base_layer__base_layer__weight=(6, 4))


@pytest.mark.parametrize(
    ("tensors", "changed", "says"),
    [
        (ADAPTED, {"peft_type": "IA3"}, "peft_type=IA3: only LoRA is merged"),
        (ADAPTED, {"use_dora": True}, "use_dora=True: such an adapter is not merged"),
        (ADAPTED, {"layer_replication": [[0, 2]]}, "layer_replication="),
        (ADAPTED, {"lora_alpha": None}, "lora_alpha=None is no number"),
        (with_two(), {}, "adapters default, other: which of them is not known"),
        (without("lora_B"), {}, "no whole adapter of a weight model.q.weight"),
        (without("q.base_layer.weight"), {}, "no whole adapter of a weight model.q.weight"),
        (of(torch.uint8), {}, "q.base_layer.weight is torch.uint8: an adapter of quantised weights"),
        ({**ADAPTED, **CONVOLUTION}, {}, "only adapters of matrices"),
        ({**ADAPTED, **MAGNITUDE}, {}, "is not known here"),
        ({**ADAPTED, **TOKENS}, {}, "is not known here"),
        ({**ADAPTED, **PARAMETER}, {}, "is not known here"),
    ],
    ids=str,
)
def test_what_cannot_be_merged_is_refused_by_name(tensors: Any, changed: dict[str, Any], says: str) -> None:
    with pytest.raises(adapters.CannotMerge, match=says):
        adapters.merged(tensors, {**LORA, **changed})


def test_a_bias_of_the_adapter_is_added_to_the_layers() -> None:
    plan = adapters.merged({**ADAPTED, **infos(model__q__lora_B__default__bias=(6,))}, LORA)
    assert plan.biases == {"model.q.bias": (f"{PREFIX}model.q.lora_B.default.bias", 4.0)}


def tensors_of(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return {key: torch.randn(info.shape, generator=draw).to(dtype) for key, info in ADAPTED.items()}


def test_a_state_dict_is_merged_on_its_way(tmp_path: Path) -> None:
    state = tensors_of()
    hf.save_state_dict(state, tmp_path / "m", like={"model_type": "made"}, adapter=LORA)
    source = hf.Folder(tmp_path / "m")
    q, embed = (state[f"{PREFIX}model.{name}.base_layer.weight"] for name in ("q", "embed"))
    a, b = (state[f"{PREFIX}model.q.lora_{part}.default.weight"] for part in "AB")
    left, right = (state[f"{PREFIX}model.embed.lora_embedding_{part}.default"] for part in "AB")
    expected = {
        "model.q.weight": q + (b @ a) * 4,
        "model.q.bias": state[f"{PREFIX}model.q.base_layer.bias"],
        "model.embed.weight": embed + ((right @ left) * 4).T,
        "head.weight": state[f"{PREFIX}head.modules_to_save.default.weight"],
        "model.norm.weight": state[f"{PREFIX}model.norm.weight"],
    }
    assert set(source.tensors) == set(expected)
    for key, value in expected.items():
        box = Box((0,) * value.dim(), tuple(value.shape))
        assert torch.equal(source.part(key, box), value), key


def test_a_tensor_under_two_names_of_which_one_has_an_adapter(tmp_path: Path) -> None:
    """Merged into both, the head would be another than the one that was trained."""
    state = {key: value for key, value in tensors_of().items() if "head" not in key}
    state[f"{PREFIX}head.weight"] = state[f"{PREFIX}model.embed.base_layer.weight"]
    with pytest.raises(RuntimeError, match=r"model.embed.weight has an adapter, and is head.weight, too"):
        hf.save_state_dict(state, tmp_path / "m", like={"model_type": "made"}, adapter=LORA)
    assert not list(tmp_path.iterdir())


def test_an_adapter_alone_is_as_peft_names_it(tmp_path: Path) -> None:
    state = tensors_of()
    saved = hf.save_adapter(state, tmp_path / "a", adapter={**LORA, "target_modules": {"q", "embed"}})
    assert set(saved.keys) == {
        f"{PREFIX}model.q.lora_A.weight",
        f"{PREFIX}model.q.lora_B.weight",
        f"{PREFIX}model.embed.lora_embedding_A",
        f"{PREFIX}model.embed.lora_embedding_B",
        f"{PREFIX}head.weight",
    }
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert names == ["adapter_config.json", "adapter_model.safetensors"]
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert config == {**LORA, "target_modules": ["embed", "q"]}
    with pytest.raises(RuntimeError, match="overwrite=True"):
        hf.save_adapter(state, tmp_path / "a", adapter=LORA)
    hf.save_adapter(state, tmp_path / "a", adapter=LORA, overwrite=True)
    for config, says in (
        ({**LORA, "bias": "lora_only"}, "lora_only"),
        ({"peft_type": "OFT"}, "peft_type=OFT"),
    ):
        with pytest.raises(RuntimeError, match=says):
            hf.save_adapter(state, tmp_path / "b", adapter=config)


def layer(path: str, rows: int, columns: int, bias: int = 0) -> dict[str, TensorInfo]:
    shapes = {f"{path}.weight": (rows, columns), **({f"{path}.bias": (bias,)} if bias else {})}
    return {f"{PREFIX}{name}": TensorInfo(shape, torch.float32) for name, shape in shapes.items()}


def square(path: str, rows: int = 4, columns: int = 4, turned: bool = False) -> dict[str, TensorInfo]:
    wide, high = (rows, columns) if turned else (columns, rows)
    shapes = {"base_layer.weight": (rows, columns), "lora_A.default.weight": (2, wide)}
    shapes["lora_B.default.weight"] = (high, 2)
    return {f"{PREFIX}{path}.{name}": TensorInfo(shape, torch.float32) for name, shape in shapes.items()}


#: Beside a square weight: what the model has else.
NEIGHBOURS: dict[str, tuple[str, dict[str, TensorInfo], Any, bool]] = {
    "gpt2": ("h.0.attn.c_proj", layer("h.0.mlp.c_fc", 4, 16, 16), None, True),
    "gpt2, the same name": ("h.0.attn.c_proj", square("h.0.mlp.c_proj", 16, 4, True), None, True),
    "starcoder": ("h.0.attn.c_proj", layer("h.0.mlp.c_fc", 16, 4, 16), None, False),
    "a head beside gpt2": ("h.0.attn.c_proj", {**layer("h.0.mlp.c_fc", 4, 16, 16), **square("lm_head", 9)},
                           None, True),
    "qwen": ("layers.0.q_proj", square("layers.0.k_proj", 2), None, False),
    "by its class": ("layers.0.q_proj", square("layers.0.k_proj", 2), {"layers.0.q_proj": True}, True),
}  # fmt: skip


@pytest.mark.parametrize("asked", [True, False, None])
@pytest.mark.parametrize("name", NEIGHBOURS)
def test_the_sides_of_a_square_weight_are_those_of_its_kind(name: str, asked: Any) -> None:
    """Whatever fan_in_fan_out says: it is that of the last layer, and peft goes by each layer's class."""
    path, neighbours, transposed, expected = NEIGHBOURS[name]
    config = {**LORA, "fan_in_fan_out": asked}
    plan = adapters.merged({**square(path), **neighbours}, config, transposed=transposed)
    assert plan.added[f"{path}.weight"].is_turned is expected


@pytest.mark.parametrize(
    ("path", "asked", "turned"),
    [
        ("h.0.c_proj", False, None),
        ("h.0.c_proj", True, True),
        ("q_proj", True, None),
        ("q_proj", False, False),
    ],
)
def test_a_square_weight_of_which_nothing_tells_is_refused(path: str, asked: bool, turned: Any) -> None:
    config = {**LORA, "fan_in_fan_out": asked}
    if turned is None:
        with pytest.raises(adapters.CannotMerge, match=rf"{path}.weight is square, and nothing tells"):
            adapters.merged(square(path), config)
    else:
        assert adapters.merged(square(path), config).added[f"{path}.weight"].is_turned is turned


def test_the_caller_knows_the_sides_of_a_square_weight(tmp_path: Path) -> None:
    state = {key: torch.randn(info.shape) for key, info in square("q_proj").items()}
    a, b = (state[f"{PREFIX}q_proj.lora_{part}.default.weight"] for part in "AB")
    like = {"model_type": "made"}
    with pytest.raises(RuntimeError, match="transposed="):
        hf.save_state_dict(state, tmp_path / "m", like=like, adapter={**LORA, "fan_in_fan_out": True})
    hf.save_state_dict(state, tmp_path / "m", like=like, adapter=LORA, transposed={"q_proj": True})
    found = hf.Folder(tmp_path / "m").part("q_proj.weight", Box((0, 0), (4, 4)))
    assert torch.equal(found, state[f"{PREFIX}q_proj.base_layer.weight"] + ((b @ a) * 4).T)


@pytest.mark.parametrize("rows", [9, 7])
@pytest.mark.parametrize("is_nested", [False, True])
def test_an_adapter_alone_brings_a_vocabulary_that_has_grown(tmp_path: Path, rows: int, is_nested) -> None:
    names = ("model.embed_tokens", "lm_head")
    tensors = {**layer(names[0], 9, 4), **layer(names[1], 9, 4), **square("model.q_proj"), **layer("n", 5, 4)}
    state = {key: torch.randn(info.shape) for key, info in tensors.items()}
    base = tmp_path / "base"
    base.mkdir()
    config = {"vocab_size": rows}
    (base / "config.json").write_text(json.dumps({"text_config": config} if is_nested else config))
    adapter = {**LORA, "base_model_name_or_path": str(base)}
    saved = hf.save_adapter(state, tmp_path / "a", adapter=adapter)
    thin = {f"{PREFIX}model.q_proj.lora_{part}.weight" for part in "AB"}
    assert set(saved.keys) - thin == ({f"{PREFIX}{name}.weight" for name in names} if rows == 7 else set())


def test_an_adapter_of_an_embedding_brings_the_embedding(tmp_path: Path) -> None:
    state = tensors_of()
    renamed = {key.replace(".embed.", ".embed_tokens."): value for key, value in state.items()}
    saved = hf.save_adapter(renamed, tmp_path / "a", adapter=LORA)
    assert f"{PREFIX}model.embed_tokens.base_layer.weight" in saved.keys
