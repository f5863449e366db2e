"""Tensor parallelism: a family of models is right, or refused by name before anything is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import small
import torch
from tiny import configured, write

from torch_dcp_backport import compat, engine
from torch_dcp_backport.engine._src import tensor_parallel

transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")
if not compat.HAS_STRIDED:
    pytest.skip("TP needs torch >= 2.5", allow_module_level=True)


def planned() -> dict[str, set[str]]:
    """Model type of each language model with a plan -> the plan's styles."""
    names = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    configs = {
        name: transformers.CONFIG_MAPPING[name] for name in names if name in transformers.CONFIG_MAPPING
    }
    plans = {name: getattr(config, "base_model_tp_plan", None) or {} for name, config in configs.items()}
    return {name: set(plan.values()) for name, plan in plans.items() if plan}


def made(folder: Path) -> Any:
    small.cpu_fsdp.install()
    plain = {"mixed_precision": {"param_dtype": None, "reduce_dtype": None}, "use_dynamic_bsz": False}
    built = engine.FSDPEngineWithLMHead(
        {"path": str(folder)},
        {**plain, "micro_batch_size_per_gpu": 4, "tp_size": 2},
        {"optimizer": "SGD", "lr": 0.05, "clip_grad": 0.3},
        device="cpu",
    )
    built.initialize()
    return built


def trained(api: Any, folders: dict[str, Path]) -> dict[str, Any]:
    return {family: small.trained(made(folder), range(1)) for family, folder in folders.items()}


def alone(model: Any) -> dict[str, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=0.01)
    loss = small.loss_of(model, small.batch(0))
    loss.backward()
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3))
    optimizer.step()
    return {"losses": [loss.item()], "norms": [norm], "weights": dict(model.named_parameters())}


PLANS = planned()
#: Plans of transformers 5 have styles for experts, and for norms of heads.
STYLES = {*tensor_parallel.STYLES, tensor_parallel.SUMMED}
OFFERED = sorted(family for family in tensor_parallel.FAMILIES & set(PLANS) if PLANS[family] <= STYLES)


def test_the_training_of_one_process(pools, tmp_path: Path) -> None:
    """Of each family that is offered, with biases and norms of heads where it may have some."""
    expected = {family: alone(write(tmp_path / family, family).train()) for family in OFFERED}
    for found in pools.run(trained, {family: tmp_path / family for family in OFFERED}, world=2):
        for family, reference in expected.items():
            try:
                small.same(found[family], reference, 2e-5)
            except AssertionError as error:
                raise AssertionError(family) from error


def test_the_families_are_in_the_documentation() -> None:
    page = (Path(__file__).parents[2] / "docs" / "engine.md").read_text()
    assert ", ".join(sorted(tensor_parallel.FAMILIES)) in " ".join(page.split())


def refused(api: Any, folders: dict[str, Path]) -> dict[str, str]:
    texts = {}
    for family, folder in folders.items():
        try:
            made(folder)
        except RuntimeError as error:
            texts[family] = str(error)
    return texts


def test_other_families_are_refused_by_name(ranks, tmp_path: Path) -> None:
    """Before anything is read: config.json is all that is there."""
    says = {
        family: f"tp_size=2 is not offered for '{family}': {why}"
        for family, why in tensor_parallel.REASONS.items()
        if family in PLANS and PLANS[family] <= STYLES
    }
    for family, name in {"olmo2": "Olmo2ForCausalLM", "qwen2_moe": "Qwen2MoeForCausalLM"}.items():
        styles = sorted(PLANS[family] - STYLES)
        if styles:
            says[family] = f"tp_size=2: the plan of a {name} has {styles}"
    assert {"olmo2", "qwen2_moe"} <= set(says)
    folders = {family: tmp_path / family for family in says}
    for family, folder in folders.items():
        configured(family).save_pretrained(folder)
    for found in ranks(refused, folders):
        for family, text in says.items():
            assert text in found[family], found[family]


@pytest.mark.parametrize(
    ("family", "options", "says"),
    [
        ("seed_oss", {"residual_dropout": 0.1}, "tp_size=2 is not offered with residual_dropout=0.1"),
        ("olmo", {"clip_qkv": 0.5}, "tp_size=2 is not offered with clip_qkv=0.5"),
        (
            "llama",
            {"intermediate_size": 25},
            "tp_size=2 does not divide the 25 features of model.layers.0.mlp.gate_",
        ),
    ],
)
def test_settings_that_it_does_not_go_with(
    ranks, tmp_path: Path, family: str, options: Any, says: str
) -> None:
    if family not in PLANS:
        pytest.skip(f"no {family} in transformers {transformers.__version__}")
    configured(family, **options).save_pretrained(tmp_path)
    texts = ranks(refused, {family: tmp_path})
    assert all(text == texts[0] for text in texts)
    assert says in texts[0][family]
