"""A head that never makes whole logits: values, gradients, peak memory, and the engine's training with it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Optional

import pytest
import small
import torch
from heard import heard
from torch import nn

from torch_dcp_backport import compat, engine
from torch_dcp_backport.engine._src import fused, heads

TOKENS, WIDTH, VOCABULARY = 40, 12, 29


def drawn(dtype: torch.dtype = torch.float32, *, vocabulary: int = VOCABULARY) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(0)
    labels = torch.randint(vocabulary, (4, TOKENS // 4), generator=draw)
    labels[1, :3] = heads.NO_LABEL
    shapes = {"hidden": (4, TOKENS // 4, WIDTH), "weight": (vocabulary, WIDTH), "bias": (vocabulary,)}
    tensors: dict[str, Any] = {
        name: torch.randn(shape, generator=draw).to(dtype).requires_grad_() for name, shape in shapes.items()
    }
    temperature = torch.rand(4, TOKENS // 4, generator=draw) + 0.5
    return {**tensors, "labels": labels, "temperature": temperature}


def gradients(parts: dict[str, Any], total: torch.Tensor) -> list[torch.Tensor]:
    names = [name for name in ("hidden", "weight", "bias") if parts[name] is not None]
    return list(torch.autograd.grad(total, [parts[name] for name in names], retain_graph=True))


@pytest.mark.parametrize("chunk", [1, 5 * VOCABULARY, heads.CHUNK])
@pytest.mark.parametrize("left_out", [(), ("bias",), ("bias", "temperature")], ids=str)
def test_values_and_gradients_are_those_of_whole_logits(left_out: tuple[str, ...], chunk: int) -> None:
    parts = {name: None if name in left_out else value for name, value in drawn().items()}
    logits = nn.functional.linear(parts["hidden"], parts["weight"], parts["bias"])
    if parts["temperature"] is not None:
        logits = logits / parts["temperature"][..., None]
    expected = engine.log_probs(logits, parts["labels"]), engine.entropy(logits)
    order = ("hidden", "weight", "labels", "bias", "temperature")
    found = fused.log_probs_and_entropy(*(parts[name] for name in order), chunk)
    factors = [torch.linspace(-1, 2, TOKENS).view(4, -1), torch.linspace(2, -1, TOKENS).view(4, -1)]
    for own, other in zip(found, expected):
        torch.testing.assert_close(own, other, atol=1e-6, rtol=1e-6)
    totals = [sum((part * factor).sum() for part, factor in zip(both, factors)) for both in (found, expected)]
    for own, other in zip(*(gradients(parts, total) for total in totals)):
        torch.testing.assert_close(own, other, atol=1e-5, rtol=1e-5)
    alone = engine.linear_log_probs(
        parts["hidden"],
        parts["weight"],
        parts["labels"],
        bias=parts["bias"],
        temperature=parts["temperature"],
        chunk=chunk,
    )
    assert alone.equal(found[0])
    totals = [(own * factors[0]).sum() for own in (alone, expected[0])]
    for own, other in zip(*(gradients(parts, total) for total in totals)):
        torch.testing.assert_close(own, other, atol=1e-5, rtol=1e-5)


def test_a_tied_weight_gets_the_gradients_of_both_its_uses() -> None:
    parts = drawn()
    ids = parts["labels"].clamp_min(0)
    losses = []
    for head in (
        lambda hidden: engine.linear_log_probs(hidden, parts["weight"], parts["labels"], chunk=64),
        lambda hidden: engine.log_probs(hidden @ parts["weight"].t(), parts["labels"]),
    ):
        total = head(nn.functional.embedding(ids, parts["weight"])).sum()
        losses.append(torch.autograd.grad(total, parts["weight"])[0])
    torch.testing.assert_close(losses[0], losses[1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("is_autocast", [True, False])
def test_half_precision_and_autocast_are_those_of_a_linear_layer(is_autocast: bool) -> None:
    """The same bits of the logits; gradients are summed in float32, and have the dtype of the weight."""
    parts = drawn(torch.float32 if is_autocast else torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
        logits = nn.functional.linear(parts["hidden"], parts["weight"], parts["bias"])
        assert logits.dtype == torch.bfloat16
        expected = engine.log_probs(logits, parts["labels"])
        found = engine.linear_log_probs(
            parts["hidden"], parts["weight"], parts["labels"], bias=parts["bias"], chunk=5 * VOCABULARY
        )
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    for own, other in zip(gradients(parts, found.sum()), gradients(parts, expected.sum())):
        assert own.dtype == other.dtype
        torch.testing.assert_close(own, other, atol=0.05, rtol=0.02)


def peak_of(function: Any) -> int:
    """Bytes that torch's allocator for the CPU has given out at once, above those before."""
    with torch.profiler.profile(profile_memory=True) as seen:
        function()
    events = seen.profiler.kineto_results.events()  # type: ignore[union-attr]
    sizes = [
        event.nbytes()
        for event in sorted(events, key=lambda event: event.start_ns())
        if event.name() == "[memory]"
    ]
    total = peak = 0
    for size in sizes:
        total += size
        peak = max(peak, total)
    return peak


@pytest.mark.parametrize("has_entropy", [False, True])
def test_the_peak_is_a_few_chunks_beside_the_gradients(has_entropy: bool) -> None:
    # In a process of its own: torch 2.4's profiler leaves memory there that tests of memory would find.
    program = f"import test_engine_head; test_engine_head.check_peaks({has_entropy})"
    there = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", program], check=True, env=there, timeout=200)


def check_peaks(has_entropy: bool) -> None:
    tokens, vocabulary = 1024, 4096
    hidden = torch.randn(tokens, WIDTH, requires_grad=True)
    weight = torch.randn(vocabulary, WIDTH, requires_grad=True)
    labels = torch.randint(vocabulary, (tokens,))
    chunk = 16 * vocabulary

    def run() -> None:
        both = fused.log_probs_and_entropy(hidden, weight, labels, chunk=chunk, has_entropy=has_entropy)
        (both[0] + both[1]).sum().backward()

    def plain() -> None:
        logits = hidden @ weight.t()
        (engine.log_probs(logits, labels) + engine.entropy(logits)).sum().backward()

    run()
    # Gradients that are there already take none; a new one of each is there until it is added.
    own = 4 * (hidden.numel() + weight.numel())
    by_token = 4 * 16 * tokens
    assert peak_of(run) <= own + by_token + 4 * 4 * chunk
    whole = 4 * tokens * vocabulary
    assert peak_of(run) < whole / 4 < whole <= peak_of(plain)


def test_what_does_not_fit_is_an_error() -> None:
    parts = drawn()
    hidden, weight, labels = parts["hidden"], parts["weight"], parts["labels"]
    for asked, says in (
        ((hidden, weight[:, 1:], labels), r"hidden has the shape \(4, 10, 12\), weight \(29, 11\)"),
        ((hidden, weight, labels[1:]), r"labels has the shape \(3, 10\), hidden \(4, 10, 12\)"),
        ((hidden, weight.double(), labels), "weight is torch.float64, hidden is torch.float32"),
    ):
        with pytest.raises(ValueError, match=says):
            engine.linear_log_probs(*asked)
    with pytest.raises(ValueError, match=r"bias has \(28,\), weight \(29, 12\)"):
        engine.linear_log_probs(hidden, weight, labels, bias=parts["bias"][1:])
    # Only -100 stands for no label.
    labels = torch.full_like(labels, -5)
    with pytest.raises(RuntimeError, match="index -5 is out of bounds"):
        engine.linear_log_probs(hidden, weight, labels)


def sharded(api: Any) -> str:
    grid = engine.arrange("cpu")
    weight: Any = compat.replicated(torch.zeros(4, 3), grid.mesh)
    with pytest.raises(ValueError, match="DTensor") as caught:
        engine.linear_log_probs(torch.ones(2, 3), weight, torch.zeros(2, dtype=torch.long))
    return str(caught.value)


def test_a_dtensor_is_refused_by_name(ranks: Any) -> None:
    for text in ranks(sharded):
        assert "weight is a DTensor with (Replicate" in text
        assert "full_tensor()" in text


class Headed(small.Model):
    """As `small.Model`, with what transformers' models say of their heads."""

    scale = 1.0

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, *args: Any, **options: Any) -> Any:
        output = super().forward(*args, **options)
        return output if self.scale == 1.0 else small.Output(output.logits * self.scale)


class Scaled(Headed):
    scale = 2.0


class Fused(small.Engine):
    head_chunk = 4 * small.VOCABULARY

    @staticmethod
    def make_model(asked: Any, dtype: Any) -> nn.Module:
        return Headed(**{name: value for name, value in asked.override_config.items() if name != "is_frozen"})


class FusedScaled(Fused):
    @staticmethod
    def make_model(asked: Any, dtype: Any) -> nn.Module:
        return Scaled()


ASKED = {"use_fused_kernels": True}


def trained(api: Any, folder: Path, options: dict[str, Any], rows: Any) -> Any:
    built = small.made(folder, kind=Fused, model_config=ASKED, **options)
    found = small.trained(built, rows=rows)
    with built.eval_mode():
        data = rows(small.batch(7), built)
        data = {
            **data,
            "calculate_entropy": True,
            "temperature": torch.linspace(0.5, 2, len(data["input_ids"])),
        }
        mine = built.infer_batch(data)
        head, built.fused_head = built.fused_head, None
        whole = built.infer_batch(data)
        # Asked for nothing, the head gives logits.
        built.fused_head = head
        logits = built.module(**small.model_inputs(small.batch(7))).logits
    assert logits.shape[-1] == small.VOCABULARY
    return found, mine["model_output"], whole["model_output"]


def jagged_rows(data: Any, made: Any) -> Any:
    return small.jagged(small.own_rows(data, made))


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        ({}, small.own_rows),
        ({"fsdp_size": 2, "gradient_sync": "last"}, small.own_rows),
        ({"untied": True}, jagged_rows),
        ({"untied": True, "offload_policy": True}, small.own_rows),
    ],
    ids=["tied", "replicas", "untied, jagged", "untied, offloaded"],
)
def test_the_training_is_that_of_one_process(ranks: Any, tmp_path: Path, options: Any, rows: Any) -> None:
    small.write(tmp_path / "m", "untied" not in options)
    expected = small.alone(is_tied="untied" not in options)
    for found, mine, whole in ranks(trained, tmp_path / "m", options, rows):
        small.same(found, expected)
        assert set(mine) == set(whole) == {"log_probs", "entropy"}
        for name, value in mine.items():
            own, other = (part.values() if part.is_nested else part for part in (value, whole[name]))
            torch.testing.assert_close(own, other, atol=1e-5, rtol=1e-5)


def refused(api: Any, folder: Path) -> str:
    built = small.made(folder, kind=FusedScaled, model_config=ASKED)
    with pytest.raises(RuntimeError) as caught, built.eval_mode():
        built.infer_batch(small.own_rows(small.batch(0), built))
    return str(caught.value)


def test_a_model_that_changes_its_logits_is_refused_on_every_rank(ranks: Any, tmp_path: Path) -> None:
    small.write(tmp_path / "m")
    for text in ranks(refused, tmp_path / "m"):
        assert "changes the logits behind its head" in text
        assert "take use_fused_kernels=False" in text


def refused_by_one(api: Any, folder: Path) -> str:
    built = small.made(folder, kind=FusedScaled, model_config=ASKED)
    data = small.own_rows(small.batch(0), built)
    if torch.distributed.get_rank() == 1:
        # A row of a single token has no label.
        data["attention_mask"][:, 1:] = 0
    with pytest.raises(RuntimeError) as caught, built.eval_mode():
        built.infer_batch(data)
    return str(caught.value)


def test_a_rank_without_labels_hears_of_a_head_that_is_refused(ranks: Any, tmp_path: Path) -> None:
    small.write(tmp_path / "m")
    (text,) = set(ranks(refused_by_one, tmp_path / "m"))
    assert "ranks 0, 2-3: a FSDPScaled changes the logits behind its head" in text


def without_effect(api: Any, folder: Path) -> list[str]:
    with heard("engine") as texts:
        small.made(folder, model_config=ASKED)
    return texts


def test_a_pass_without_labels_proves_nothing_of_a_head() -> None:
    """Every log-probability is 0 there, under any factor."""
    model = torch.nn.Linear(3, 5, bias=False)
    head, hidden = fused.FusedHead(model, 64), torch.ones(2, 3)
    with head.asking(fused.Asked(torch.full((2,), -100), None, False)):
        head.results(2 * model(hidden), model)
    with head.asking(fused.Asked(torch.zeros(2, dtype=torch.long), None, False)):
        logits = 2 * model(hidden)
        with pytest.raises(RuntimeError, match="a Linear changes the logits behind its head"):
            head.results(logits, model)


def test_a_model_without_such_a_head_says_so(ranks: Any, tmp_path: Path) -> None:
    small.write(tmp_path / "m")
    first, *others = ranks(without_effect, tmp_path / "m")
    assert any(
        "use_fused_kernels=True has no effect here: the head of a Model is none" in text for text in first
    )
    assert not any(others)


class Config:
    def __init__(self, **values: Optional[float]) -> None:
        self.__dict__.update(values)


def test_a_configuration_that_changes_logits_is_known() -> None:
    model = Headed()
    assert fused.why_not(model) == ""
    for values in ({"final_logit_softcapping": None, "logit_scale": 1.0}, {"final_logit_softcapping": 30.0}):
        model.config = Config(**values)  # type: ignore[arg-type, assignment]
        assert fused.why_not(model) == (
            "a Headed changes logits behind its head, by final_logit_softcapping=30.0"
            if 30.0 in values.values()
            else ""
        )


def counted(api: Any, folder: Path, options: dict[str, Any]) -> Any:
    built = small.made(folder, **options)
    found = []
    for make in (dict, small.jagged):
        rows = make(small.own_rows(small.batch(3), built))
        with built.train_mode():
            output = built.train_batch(rows, engine.sft_loss)
        with built.eval_mode():
            inferred = built.infer_batch(rows)
        found.append(
            [part[name] for part in (output, inferred) for name in ("num_tokens", "batch_num_tokens")]
        )
    return found


@pytest.mark.parametrize("options", [{}, {"fsdp_size": 2}], ids=str)
def test_a_batch_says_the_tokens_of_all_ranks(ranks: Any, tmp_path: Path, options: dict[str, Any]) -> None:
    small.write(tmp_path / "m")
    data = small.batch(3)
    tokens, with_loss = int(data["attention_mask"].sum()), float(data["loss_mask"].sum())
    for found in ranks(counted, tmp_path / "m", options):
        assert found == [[tokens, with_loss, tokens, 0.0]] * 2
