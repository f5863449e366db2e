"""The parts that need no ranks: sizes, settings, schedules, chunks of logits, names."""

from __future__ import annotations

import re
import types
from typing import Any

import pytest
import small
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torch_dcp_backport import engine
from torch_dcp_backport.engine import build, config, heads
from torch_dcp_backport.engine.base import BaseEngine

TP = build.compat.HAS_STRIDED


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ((4,), (1, 4, 1)),
        ((4, 8), (1, 4, 1)),
        ((4, 2), (2, 2, 1)),
        ((4, 1), (4, 1, 1)),
        ((1, 1), (1, 1, 1)),
        *([((8, -1, 2), (1, 4, 2)), ((2, -1, 2), (1, 1, 2))] if TP else []),
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
    ],
)
def test_sizes_that_do_not_divide(asked: Any, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        engine.sizes_of(*asked)


@pytest.mark.parametrize(
    ("kind", "given", "says"),
    [
        (config.EngineConfig, {"offload_policy": True, "param_offload": True}, "excludes param_offload=True"),
        (config.EngineConfig, {"ulysses_sequence_parallel_size": 2}, "ulysses_sequence_parallel_size=2"),
        (config.EngineConfig, {"fsdp_sise": 2}, "fsdp_sise"),
        (config.EngineConfig, {"model_dtype": "fp31"}, "'fp31' is no dtype"),
        (config.EngineConfig, {"mixed_precision": {"param_dtype": "b"}}, "'b' is no dtype"),
        (config.EngineConfig, {"gradient_sync": "never"}, "neither 'each' nor 'last'"),
        (config.OptimizerConfig, {"optimizer": "AdamX"}, "'AdamX' is none of torch.optim"),
        (config.EngineConfig, types.SimpleNamespace(qat=types.SimpleNamespace(enable=True)), "qat"),
        (
            config.ModelConfig,
            types.SimpleNamespace(lora_adapter_path="a"),
            "lora_adapter_path is not offered",
        ),
        (config.ModelConfig, types.SimpleNamespace(lora={"merge": True}), "lora.merge is not offered"),
        (config.OptimizerConfig, types.SimpleNamespace(optimizer_impl="torchao.optim"), "optimizer_impl"),
    ],
)
def test_settings_that_are_refused(kind: Any, given: Any, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        config.settings(kind, given)


def test_settings_of_other_objects_and_batches() -> None:
    given = types.SimpleNamespace(path="a", local_path="b", lora_rank=3, use_remove_padding=True)
    assert config.settings(config.ModelConfig, given) == config.ModelConfig(path="b", lora_rank=3)
    own = config.settings(config.EngineConfig, {"max_token_len_per_gpu": 7, "infer_max_token_len_per_gpu": 9})
    assert own.limit({}, False) == (None, 7)
    assert own.limit({}, True) == (None, 9)
    assert own.limit({"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 3}, True) == (3, None)
    assert own.sharding == build.Sharding(True, torch.bfloat16, torch.float32, False)


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
    with pytest.raises(ValueError, match="'linear'"):
        engine.schedule(optimizer, "linear")
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
