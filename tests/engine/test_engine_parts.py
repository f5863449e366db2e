"""The parts that need no ranks: sizes, settings, schedules, chunks of logits, names."""

from __future__ import annotations

import dataclasses
import math
import re
import types
from pathlib import Path
from typing import Any

import pytest
import small
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from torch_dcp_backport import engine
from torch_dcp_backport.engine import BaseEngine
from torch_dcp_backport.engine._src import build, checks, config, heads, verl

TP = build.compat.HAS_STRIDED


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ((4,), (1, 4, 1, 1)),
        ((4, 8), (1, 4, 1, 1)),
        ((4, 2), (2, 2, 1, 1)),
        ((4, 1), (4, 1, 1, 1)),
        ((1, 1), (1, 1, 1, 1)),
        ((4, -1, 1, 2), (1, 4, 1, 2)),
        *([((8, -1, 2), (1, 4, 2, 1)), ((2, -1, 2), (1, 1, 2, 1))] if TP else []),
    ],
)
def test_sizes_of_a_mesh(asked: Any, expected: Any) -> None:
    assert engine.sizes_of(*asked) == expected


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ((4, 3), "fsdp_size=3 does not divide 4"),
        ((4, 0), "fsdp_size=0"),
        ((4, -2), "fsdp_size=-2"),
        ((4, -1, 3), "tp_size=3 does not divide 4"),
        ((4, -1, 0), "tp_size=0"),
        ((8, 2, 2), "2 replicas: not offered with tp_size=2"),
        ((4, -1, 1, 3), "ulysses_sequence_parallel_size=3 does not divide 4"),
        ((4, -1, 1, 0), "ulysses_sequence_parallel_size=0"),
        ((8, -1, 2, 2), "ulysses_sequence_parallel_size=2 is not offered with tp_size=2"),
    ],
)
def test_sizes_that_do_not_divide(asked: Any, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        engine.sizes_of(*asked)


@pytest.mark.parametrize(
    ("kind", "asked", "says"),
    [
        (config.EngineConfig, {"offload_policy": True, "param_offload": True}, "excludes param_offload=True"),
        (
            config.EngineConfig,
            {"ulysses_sequence_parallel_size": 2, "use_remove_padding": False},
            "ulysses_sequence_parallel_size=2 needs use_remove_padding=True",
        ),
        (
            config.EngineConfig,
            {"ulysses_sequence_parallel_size": 2, "tp_size": 2},
            "ulysses_sequence_parallel_size=2 is not offered with tp_size=2",
        ),
        (config.ModelConfig, {"use_remove_padding": "False"}, "use_remove_padding='False': expected True or"),
        (config.EngineConfig, {"fsdp_sise": 2}, "fsdp_sise"),
        (config.EngineConfig, {"model_dtype": "fp31"}, "'fp31' is no dtype"),
        (config.EngineConfig, {"mixed_precision": {"param_dtype": "b"}}, "'b' is no dtype"),
        (config.EngineConfig, {"gradient_sync": "never"}, "neither 'each' nor 'last'"),
        (config.OptimizerConfig, {"optimizer": "AdamX"}, "'AdamX' is none of torch.optim"),
        (config.EngineConfig, types.SimpleNamespace(qat=types.SimpleNamespace(enable=True)), "qat"),
        (
            config.ModelConfig,
            types.SimpleNamespace(lora={"rank": 4}),
            "lora.rank is not offered",
        ),
        (config.ModelConfig, types.SimpleNamespace(lora={"merge": "no"}), "lora.merge='no'"),
        (
            config.ModelConfig,
            {"lora": {"merged": True}},
            "no setting of lora: merged; there are merge, rank,",
        ),
        (config.ModelConfig, {"lora": True}, "lora=True: expected a mapping"),
        (
            config.OptimizerConfig,
            types.SimpleNamespace(optimizer_impl="bitsandbytes.optim", optimizer="AdamW8bit"),
            "optimizer_impl is not offered: got 'bitsandbytes.optim': it is 'torch.optim'; take 'AdamW'",
        ),
        (config.OptimizerConfig, {"optimizer": "AdamW8bit"}, "none of torch.optim; take 'AdamW'"),
        (config.OptimizerConfig, {"optimizer": "Adafactor"}, "'Adafactor' is not offered: it averages"),
        (config.OptimizerConfig, {"optimizer": "Muon"}, "'Muon' is not offered: it orthogonalizes whole"),
        (config.OptimizerConfig, {"optimizer": "LBFGS"}, "'LBFGS' is not offered: its step computes"),
        (config.OptimizerConfig, {"optimizer": "SparseAdam"}, "'SparseAdam' is not offered: it takes sparse"),
        (config.EngineConfig, {"qat": {"enable": True}}, "qat.enable is not offered: got True"),
        (config.EngineConfig, types.SimpleNamespace(brand_new=3), "brand_new=3 is not known"),
        (config.EngineConfig, {"mixed_precision": {"param_dtype": "fp16"}}, "param_dtype is float16"),
        (
            config.EngineConfig,
            {"mixed_precision": {"reduce_dtype": torch.float16}},
            "reduce_dtype is float16",
        ),
        (config.EngineConfig, {"model_dtype": "fp16"}, "model_dtype is float16"),
        (config.EngineConfig, {"dtype": "float16"}, "param_dtype is float16"),
        (config.EngineConfig, {"model_dtype": torch.int8}, "torch.int8 is no dtype"),
        (config.EngineConfig, {"mixed_precision": {"buffer_dtype": "bf16"}}, "buffer_dtype='bf16'"),
        (config.EngineConfig, {"mixed_precision": {"parma_dtype": "bf16"}}, "parma_dtype"),
        (
            config.EngineConfig,
            {"wrap_policy": {"transformer_layer_cls": "Block"}},
            "wrap_policy: transformer_layer_cls",
        ),
        (
            config.EngineConfig,
            {"micro_batch_size_per_gpu": 0},
            "micro_batch_size_per_gpu=0: expected a whole",
        ),
        (config.EngineConfig, {"micro_batch_size_per_gpu": True}, "micro_batch_size_per_gpu=True"),
        (config.EngineConfig, {"infer_max_token_len_per_gpu": 1.5}, "infer_max_token_len_per_gpu=1.5"),
        (
            config.EngineConfig,
            {"use_dynamic_bsz": "False"},
            "use_dynamic_bsz='False': expected True or False",
        ),
        (config.EngineConfig, {"fsdp_size": "all"}, "fsdp_size='all'"),
        (config.EngineConfig, {"seed": -1}, "seed=-1"),
        (config.ModelConfig, {"lora_rank": -1}, "lora_rank=-1"),
        (config.ModelConfig, {"trust_remote_code": "no"}, "trust_remote_code='no'"),
        (config.OptimizerConfig, {"clip_grad": 0.0}, "clip_grad=0.0: expected a number above 0, or None"),
        (config.OptimizerConfig, {"clip_grad": -1}, "clip_grad=-1"),
        (config.OptimizerConfig, {"clip_grad": float("nan")}, "clip_grad=nan"),
        (
            config.OptimizerConfig,
            {"grad_clip": 0.5},
            "grad_clip=0.5: only verl's own objects have it (`clip_grad` has it",
        ),
        (config.OptimizerConfig, {"lr": -1e-3}, "lr=-0.001: expected a number at least 0"),
        (config.OptimizerConfig, {"lr": float("inf")}, "lr=inf"),
        (config.OptimizerConfig, {"lr": "fast"}, "lr='fast'"),
        (config.OptimizerConfig, {"weight_decay": -0.1}, "weight_decay=-0.1"),
        (
            config.OptimizerConfig,
            {"betas": [0.9, 1.0]},
            "betas=1.0: expected a number at least 0 and below 1",
        ),
        (config.OptimizerConfig, {"betas": [0.9]}, "betas=[0.9]: expected two numbers"),
        (config.OptimizerConfig, {"lr_warmup_steps": 0.5}, "lr_warmup_steps=0.5"),
        (config.OptimizerConfig, {"lr_warmup_steps_ratio": 1.1}, "lr_warmup_steps_ratio=1.1"),
        (
            config.OptimizerConfig,
            {"lr_warmup_steps_ratio": 0.1},
            "lr_warmup_steps_ratio=0.1 needs total_training_",
        ),
        (config.OptimizerConfig, {"min_lr_ratio": -0.1}, "min_lr_ratio=-0.1"),
        (config.OptimizerConfig, {"num_cycles": float("nan")}, "num_cycles=nan"),
    ],
)
def test_settings_that_are_refused(kind: Any, asked: Any, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        config.settings(kind, asked)


def test_settings_of_other_objects_and_batches() -> None:
    asked = types.SimpleNamespace(path="a", local_path="b", lora_rank=3, use_remove_padding=True)
    expected = config.ModelConfig(path="b", lora_rank=3, use_remove_padding=True)
    assert config.settings(config.ModelConfig, asked) == expected
    own = config.settings(config.EngineConfig, {"max_token_len_per_gpu": 7, "infer_max_token_len_per_gpu": 9})
    assert own.limit({}, False) == (None, 7)
    assert own.limit({}, True) == (None, 9)
    assert own.limit({"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 3}, True) == (3, None)
    assert own.sharding == build.Sharding(True, torch.bfloat16, torch.float32, False)


def test_settings_as_yaml_has_them() -> None:
    """Its 1e-5 is text."""
    made = config.settings(config.OptimizerConfig, {"lr": "1e-5", "betas": ["0.8", 0.9], "clip_grad": None})
    assert (made.lr, made.betas, made.clip_grad) == (1e-5, (0.8, 0.9), None)
    assert config.settings(
        config.OptimizerConfig, {"lr": None, "clip_grad": "inf"}
    ) == config.OptimizerConfig(clip_grad=float("inf"))
    assert config.OptimizerConfig(lr=torch.tensor(1e-3)).lr.item() == pytest.approx(1e-3)  # type: ignore[attr-defined]
    own = config.settings(config.EngineConfig, {"micro_batch_size_per_gpu": "2", "fsdp_size": 2.0})
    assert (own.micro_batch_size_per_gpu, own.fsdp_size) == (2, 2)
    assert own.limit({"use_dynamic_bsz": False}, False) == (2, None)
    assert config.EngineConfig(seed="9007199254740993").seed == 2**53 + 1  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="use_dynamic_bsz='False'"):
        own.limit({"use_dynamic_bsz": "False"}, False)


def test_half_precision_without_training() -> None:
    own = config.settings(
        config.EngineConfig,
        {"forward_only": True, "model_dtype": "fp16", "mixed_precision": {"param_dtype": "fp16"}},
    )
    assert own.sharding.param_dtype == torch.float16


def test_the_dtype_of_a_mixed_precision_without_any() -> None:
    asked = {"dtype": "fp32", "mixed_precision": {"reduce_dtype": "bf16", "buffer_dtype": "fp32"}}
    own = config.settings(config.EngineConfig, asked)
    assert own.sharding == build.Sharding(True, torch.float32, torch.bfloat16, False)


NUMBERS = st.one_of(st.integers(), st.floats(), st.booleans(), st.text(), st.none(), st.lists(st.integers()))


@given(NUMBERS, st.booleans(), st.integers(-5, 5))
def test_a_number_is_read_or_refused(value: Any, as_text: bool, least: int) -> None:
    """As Python reads it; neither of a bool nor of what is not finite."""
    asked = str(value) if as_text else value
    try:
        expected = None if isinstance(asked, (bool, list)) or asked is None else float(asked)
    except (ValueError, OverflowError):
        expected = None
    is_right = expected is not None and math.isfinite(expected) and expected >= least
    for read, is_taken in (
        (checks.number(least), is_right),
        (checks.whole(least), is_right and float(asked).is_integer()),
        (checks.clip, expected is not None and expected > 0),
    ):
        if is_taken:
            assert float(read("it", asked)) == expected
        else:
            with pytest.raises(ValueError, match=re.escape(f"it={asked!r}: expected a ")):
                read("it", asked)


def test_what_changes_no_value_is_noted() -> None:
    asked = {"forward_prefetch": True, "use_torch_compile": False, "wrap_policy": {"disable": True}}
    assert config.settings(config.EngineConfig, asked).no_effect == (
        "wrap_policy.disable=True has no effect here: units are blocks",
        "forward_prefetch=True has no effect here: speed; FSDP2 prefetches on its own",
    )
    assert config.settings(config.ModelConfig, {"use_liger": False}).no_effect == ()


@dataclasses.dataclass
class Later:
    """As a later release of verl may have its settings."""

    seed: int = 7
    _target_: str = "there"
    brand_new: float = 0.5


def test_settings_of_megatrons_adapters_are_noted() -> None:
    lora = {"merge": True, "type": "lora", "alpha": 32, "adapter_path": None}
    made = config.ModelConfig(lora=lora)
    assert made.is_merged
    assert made.no_effect == ("no effect here: lora.type='lora', lora.alpha=32; they are Megatron's",)
    # verl 0.9's files list all of them beside a rank of 0, which is no adapter.
    assert config.ModelConfig(lora={**lora, "rank": 0}).no_effect == ()
    assert config.ModelConfig(lora=None) == config.ModelConfig(lora={})  # type: ignore[arg-type]


def test_a_setting_that_nobody_knows_is_noted_or_refused() -> None:
    made = config.settings(config.EngineConfig, Later())
    assert made.seed == 7
    assert made.no_effect == ("brand_new=0.5, which is not known, has no effect here",)
    with pytest.raises(ValueError, match=re.escape("brand_new=0.7 is not known")):
        config.settings(config.EngineConfig, Later(brand_new=0.7))


@dataclasses.dataclass
class Deferring:
    """As verl 0.9's object."""

    use_no_sync_for_gradient_accumulation: Any = True
    pad_to_length: bool = False
    turbo_config: Any = dataclasses.field(default_factory=dict)


def test_the_moment_of_a_reduction_has_another_name_in_verl() -> None:
    for asked, expected in ((Deferring(), "last"), (Deferring(False), "each"), (Deferring(None), "each")):
        made = config.settings(config.EngineConfig, asked)
        assert (made.gradient_sync, made.no_effect) == (expected, ())
    name = "use_no_sync_for_gradient_accumulation"
    assert config.settings(config.EngineConfig, {name: True}).gradient_sync == "last"
    assert config.settings(config.EngineConfig, {name: True, "gradient_sync": "last"}).gradient_sync == "last"
    with pytest.raises(
        ValueError, match=re.escape(f"{name}=True is gradient_sync='last', and gradient_sync")
    ):
        config.settings(config.EngineConfig, {name: True, "gradient_sync": "each"})
    with pytest.raises(ValueError, match=f"{name}=1: expected True or False"):
        config.settings(config.EngineConfig, Deferring(1))
    (told,) = config.settings(config.EngineConfig, {"pad_to_length": True}).no_effect
    assert told.startswith("pad_to_length=True has no effect here")


class Rewarding(engine.FSDPEngineWithValueHead):
    """A program's own engine, as it registers it with verl."""

    model_type = "reward_model"


def test_the_type_of_a_model_is_that_of_the_class(tmp_path: Path) -> None:
    for kind, own, others in (
        (engine.FSDPEngineWithLMHead, "language_model", ["value_model", "reward_model", "vaule_model"]),
        (engine.FSDPEngineWithValueHead, "value_model", ["vaule_model", "diffusion_model", 1]),
        (Rewarding, "reward_model", ["value_model", "rewrad_model"]),
    ):
        for asked in (None, "", "language_model", own):
            kind({"path": "nowhere", "model_type": asked}, device="cpu")
            kind(types.SimpleNamespace(path="nowhere", model_type=asked), device="cpu")
        for asked in others:
            with pytest.raises(ValueError, match=f"model_type is not offered: got {asked!r}, .* a {own}"):
                kind({"path": "nowhere", "model_type": asked}, device="cpu")


@dataclasses.dataclass
class LaterQat:
    """As an object of a later release, which has a field more."""

    enable: bool = False
    brand_new: int = 1


def test_a_setting_within_a_setting_is_known_or_refused(tmp_path: Path) -> None:
    for kind, name, wrong, says in (
        ("model", "mtp", {"enabel": True}, "no setting of mtp: enabel; .*; did you mean enable?"),
        ("model", "mtp", {"enable_trian": True}, "mtp: enable_trian; .*; did you mean enable_train?"),
        ("model", "tiled_mlp", {"enabeld": True}, "tiled_mlp: enabeld; there are enabled, num_shards; did"),
        ("model", "tiled_mlp", {"enabled": True, "shards": 2}, "tiled_mlp: shards; .*mean num_shards?"),
        ("model", "fused_kernel_options", {"impl_backnd": "torch"}, "options: impl_backnd; .*impl_backend?"),
        ("engine", "router_replay", {"mod": "R2"}, "router_replay: mod; .*; did you mean mode?"),
        ("engine", "qat", {"enabel": True}, "qat: enabel; .*; did you mean enable?"),
        ("engine", "qat", {"wholly_unlike": 1, "enable": False}, "no setting of qat: wholly_unlike; there"),
        ("engine", "qat", {3: 1}, "no setting of qat: 3; there are enable,"),
        ("engine", "qat", True, "qat=True: expected a mapping with enable, mode"),
        ("engine", "router_replay", "R2", "router_replay='R2': expected a mapping with mode"),
        ("model", "mtp", ["enable"], "expected a mapping with enable, enable_train"),
        ("engine", "qat", LaterQat(brand_new=2), "no setting of qat: brand_new; there are"),
        ("engine", "qat", types.SimpleNamespace(enabel=True), "qat: enabel; .*; did you mean enable?"),
    ):
        asked: Any = {
            "model": ({"path": "nowhere", name: wrong}, {}),
            "engine": ({"path": "x"}, {name: wrong}),
        }
        match = says.replace("?", r"\?")
        with pytest.raises(ValueError, match=match):
            engine.FSDPEngineWithLMHead(*asked[kind], device="cpu")
        if kind == "engine":
            with pytest.raises(ValueError, match=match):
                config.settings(config.EngineConfig, types.SimpleNamespace(**{name: wrong}))
    for idle in (None, False, {}, {"_target_": "a.Class", "enable": False, "mode": "w4a4"}, LaterQat()):
        assert config.settings(config.EngineConfig, {"qat": idle}).no_effect == ()
    asked = {"path": "x", "tiled_mlp": {"enabled": True, "num_shards": 2}}
    (told,) = config.settings(config.ModelConfig, asked).no_effect
    assert told.startswith("tiled_mlp.enabled=True has no effect here")


#: What verl alone has, and is served.
OF_VERL = ("local_path", "local_hf_config_path", "tokenizer", "processor", "model_type")


def test_every_setting_of_ours_is_in_the_table() -> None:
    # Which verl does not have, or for Megatron alone.
    own = {"tp_size", "gradient_sync", "no_decay", "lr_wsd_decay_steps", "lr_wsd_decay_style"}
    for kind, known in (
        (config.ModelConfig, verl.MODEL),
        (config.EngineConfig, verl.ENGINE),
        (config.OptimizerConfig, verl.OPTIMIZER),
    ):
        names = {entry.name for entry in dataclasses.fields(kind)} - own
        served = {name for name, entry in known.items() if entry.does == verl.SERVED}
        assert served - {*OF_VERL, *verl.RENAMED} == names


def test_the_table_of_settings_is_in_the_documentation() -> None:
    page = Path(__file__).parents[2] / "docs" / "engine.md"
    assert verl.table() in page.read_text(), "print(torch_dcp_backport.engine._src.verl.table())"


def test_steps_of_the_warm_up() -> None:
    """As in verl, no steps of its own are a part of all."""
    for steps, expected in ((None, 5), (-1, 5), (0, 5), (3, 3)):
        asked = {"lr_warmup_steps": steps, "lr_warmup_steps_ratio": 0.1, "total_training_steps": 50}
        assert config.OptimizerConfig(**asked).warmup == expected


@pytest.mark.parametrize("kind", ["constant", "cosine"])
def test_rates(kind: str) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    made = engine.schedule(optimizer, kind, warmup=2, total=6, least=0.25)
    rates = []
    for _ in range(7):
        rates.append(made.get_last_lr()[0])
        optimizer.step()
        made.step()
    middle = 2 * (0.25 + 0.75 / 2)
    assert rates[:3] == [0.0, 1.0, 2.0]
    assert rates[4] == pytest.approx(2.0 if kind == "constant" else middle)
    assert rates[6] == pytest.approx(2.0 if kind == "constant" else 0.5)


def test_rates_that_are_none() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    with pytest.raises(ValueError, match="'polynomial' is none of 'constant', 'cosine', 'linear'"):
        engine.schedule(optimizer, "polynomial")
    for kind in ("linear", "wsd"):
        with pytest.raises(ValueError, match=f"'{kind}' needs total_training_steps, got 0"):
            engine.schedule(optimizer, kind)
    with pytest.raises(ValueError, match="needs lr_wsd_decay_steps, got 0"):
        engine.schedule(optimizer, "wsd", total=8)
    with pytest.raises(ValueError, match=r"lr_wsd_decay_steps=5 and .* of 4 steps .*_steps=8"):
        engine.schedule(optimizer, "wsd", total=8, warmup=4, decay=5)
    with pytest.raises(ValueError, match="lr_wsd_decay_style='sqrt' is none of 'linear', 'cosine'"):
        engine.schedule(optimizer, "wsd", total=8, decay=2, decay_style="sqrt")
    with pytest.raises(ValueError, match="total_training_steps, got 0"):
        engine.schedule(optimizer, "cosine")


@pytest.mark.parametrize("chunk", [1, 100, heads.CHUNK])
def test_chunks_change_neither_values_nor_gradients(chunk: int) -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 5, 7, requires_grad=True)
    labels = torch.randint(0, 7, (3, 5))
    logs = logits.log_softmax(-1)
    expected = logs.gather(-1, labels[..., None])[..., 0], -(logs.exp() * logs).sum(-1)
    found = engine.log_probs(logits, labels, chunk=chunk), engine.entropy(logits, chunk=chunk)
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other)
        weights = torch.randn(3, 5)
        gradients = [
            torch.autograd.grad((part * weights).sum(), logits, retain_graph=True)[0] for part in (one, other)
        ]
        torch.testing.assert_close(*gradients)
    shifted = engine.next_log_probs(logits, labels)
    torch.testing.assert_close(shifted[:, 2], logs[:, 2].gather(-1, labels[:, 3:4])[:, 0])
    assert not shifted[:, -1].any()
    assert engine.log_probs(logits[:0], labels[:0]).shape == (0, 5)


def test_chunks_keep_no_second_copy_of_the_logits() -> None:
    """What autograd keeps of a chunk in float32 would be twice the logits in bfloat16."""
    logits = torch.randn(64, 50).bfloat16().requires_grad_()
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() != logits.untyped_storage().data_ptr():
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        engine.log_probs(logits, torch.zeros(64, dtype=torch.long), chunk=500)
    assert sum(kept.values()) < logits.nbytes


def test_token_ids_of_32_bits() -> None:
    logits, ids = torch.randn(2, 5, 7), torch.randint(7, (2, 5))
    assert torch.equal(engine.next_log_probs(logits, ids.int()), engine.next_log_probs(logits, ids))


def test_next_tokens_need_no_copy_of_the_logits() -> None:
    logits, ids = torch.randn(3, 5, 7).bfloat16(), torch.randint(0, 7, (3, 5))
    sizes: list[int] = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = func(*args, **(kwargs or {}))
            if (
                isinstance(found, torch.Tensor)
                and found.untyped_storage()._cdata != logits.untyped_storage()._cdata
            ):
                sizes.append(found.numel())
            return found

    with Sizes():
        engine.next_log_probs(logits, ids, chunk=7)
    assert max(sizes) == ids.numel()


def test_units_are_blocks_and_ends_that_nothing_shares() -> None:
    tied, untied = small.model(), small.model(is_tied=False)
    assert engine.units_of(tied) == [tied.layers[1], tied.layers[0]]
    assert engine.units_of(untied) == [untied.layers[1], untied.layers[0], untied.embed]
    for said in ("Block", small.Block, ["Block"], {small.Block}, ("Block",)):
        assert engine.units_of(tied, said) == engine.units_of(tied)
    assert engine.units_of(tied, ()) == []
    assert engine.units_of(tied, "LayerNorm") == [tied.layers[1].norm, tied.layers[0].norm]


@pytest.mark.parametrize("said", ["Blok", {"Block", "Blok"}])
def test_a_block_class_that_does_not_occur(said: Any) -> None:
    with pytest.raises(
        ValueError, match="no module is a Blok; there are Block, Embedding, LayerNorm, Linear"
    ):
        engine.units_of(small.model(), said)


def test_a_parameter_in_two_units_is_refused() -> None:
    """Each would train its own."""
    made = small.model()
    with pytest.raises(ValueError, match=r"embed.weight, head.weight are .* units: embed, the rest"):
        engine.units_of(made, ["Block", "Embedding"])
    made.layers[1].out.weight = made.layers[0].out.weight
    with pytest.raises(ValueError, match=r"layers.0.out.weight, layers.1.out.weight are one parameter"):
        engine.units_of(made)
    assert engine.units_of(made, ()) == []


def test_parameters_on_meta_and_real_buffers() -> None:
    with engine.parameters_on_meta(torch.bfloat16):
        made = small.Model()
    assert {(param.is_meta, param.dtype) for param in made.parameters()} == {(True, torch.bfloat16)}
    assert torch.equal(made.positions, small.model().positions)
    assert made.head.weight is made.embed.weight
    assert not torch.nn.Linear(1, 1).weight.is_meta
    engine.materialize(made, torch.device("cpu"))
    assert made.head.weight is made.embed.weight
    assert torch.equal(made.positions, small.model().positions)
    assert not any(tensor.is_meta for tensor in engine.tensors_of(made).values())
    engine.materialize(made, torch.device("cpu"), buffers=torch.device("meta"))
    assert [name for name, buffer in made.named_buffers() if buffer.is_meta] == ["positions"]
    assert not any(param.is_meta for param in made.parameters())


def test_buffers_on_meta_that_no_file_has_are_refused_by_name() -> None:
    """Memory without values would be handed on as the model's positions."""
    with torch.device("meta"):
        made = torch.nn.ModuleDict({"model": small.Model(), "norm": torch.nn.BatchNorm1d(2)})
    with pytest.raises(
        ValueError, match=r"materialize: model\.positions: buffers on meta that no state dict"
    ):
        engine.materialize(made, torch.device("cpu"))
    assert all(tensor.is_meta for tensor in (*made.parameters(), *made.buffers()))
    made.model.register_buffer("positions", small.model().positions, persistent=False)
    engine.materialize(made, torch.device("cpu"))
    assert torch.equal(made.model.positions, small.model().positions)
    assert not any(tensor.is_meta for tensor in (*made.parameters(), *made.buffers()))


def test_a_registry_finds_engines_by_names() -> None:
    assert (
        engine.EngineRegistry.get_engine_cls("language_model", "fsdp2", "cpu") is engine.FSDPEngineWithLMHead
    )
    made = engine.EngineRegistry.new("value_model", "fsdp", {"path": "somewhere"}, device="cpu")
    assert isinstance(made, engine.FSDPEngineWithValueHead)
    with pytest.raises(KeyError, match=r"no engine for .*'megatron'"):
        engine.EngineRegistry.get_engine_cls("language_model", "megatron", "cpu")
    with pytest.raises(TypeError, match="int is no BaseEngine"):
        engine.EngineRegistry.register("language_model", "fsdp")(int)  # type: ignore[type-var]

    @engine.EngineRegistry.register("language_model", "fsdp", ["cpu"])
    class Second(BaseEngine):
        pass

    assert (
        engine.EngineRegistry.get_engine_cls("language_model", "fsdp", "cpu") is engine.FSDPEngineWithLMHead
    )


def test_padding_says_nothing() -> None:
    """Neither what it says of a row's first token, which depends on how rows are cut, nor what cannot be."""
    logits, ids = torch.randn(2, 5, 7), torch.randint(1, 7, (2, 5))
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 0]])
    logits[0, :2, :] = -torch.inf
    logits[1, 3, 0] = -torch.inf
    found = heads.next_log_probs(logits, ids * mask, mask)
    assert (found != 0).tolist() == [[False, False, True, True, False], [True, True, True, False, False]]
    data = {"loss_mask": mask, "batch_num_tokens": 7, "dp_size": 1}
    assert torch.isfinite(heads.sft_loss({"log_probs": found}, data)[0])
    kept = logits[1]
    expected = torch.distributions.Categorical(logits=kept).entropy()
    torch.testing.assert_close(heads.entropy(kept), expected)


def test_an_engine_of_a_vendor_goes_before_that_of_any() -> None:
    class Registry(engine.EngineRegistry):
        _engines: Any = {}  # noqa: RUF012

    class Own(engine.BaseEngine):
        pass

    class Any_(engine.BaseEngine):
        pass

    Registry.register("reward_model", "mine", "npu", vendor="huawei")(Own)
    Registry.register("reward_model", ["mine"], ["npu", "cuda"])(Any_)
    Registry.register("reward_model", "other", "cuda", vendor=["amd", "metax"])(Own)
    assert Registry.get_engine_cls("reward_model", "mine", "npu") is Own
    assert Registry.get_engine_cls("reward_model", "mine", "npu", vendor="another") is Any_
    assert Registry.get_engine_cls("reward_model", "mine", "cuda") is Any_
    assert Registry.get_engine_cls("reward_model", "other", "cuda", vendor="metax") is Own
    with pytest.raises(KeyError, match=r"no engine for \('reward_model', 'other', 'cuda', 'nvidia'\)"):
        Registry.get_engine_cls("reward_model", "other", "cuda", vendor="nvidia")
