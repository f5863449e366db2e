"""Rows in one sequence: the values, gradients and training of padded rows, or an error."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import small
import tiny
import torch
import torch.distributed as dist
from torch import nn

from torch_dcp_backport import compat, engine
from torch_dcp_backport.engine._src import attention, packing

transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")

OFFERED = sorted(family for family in packing.FAMILIES if family in transformers.CONFIG_MAPPING)
LENGTHS = (7, 1, 11, 9)
WINDOW = {"sliding_window": 5}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads wait for each other longer than such small models compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def rows(lengths: Any = LENGTHS) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(3, small.VOCABULARY, (length,), generator=draw) for length in lengths]


def jagged(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(tensors, layout=torch.jagged)


def alone(model: nn.Module, ids: list[torch.Tensor]) -> torch.Tensor:
    """The logits of each row by itself."""
    return torch.cat([model(row[None], position_ids=torch.arange(len(row))[None]).logits[0] for row in ids])


def in_one(model: nn.Module, ids: list[torch.Tensor]) -> torch.Tensor:
    attention.install(model)
    found = packing.packed({"input_ids": jagged(ids)}, torch.device("cpu"))
    with attention.within(found.rows) as kept:
        logits: torch.Tensor = model(**found.inputs, use_cache=False).logits[0]
    packing.check_asked(kept, model, False)
    return logits


def compared(family: str, implementation: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest distances of logits and of gradients, in parts of the largest of each."""
    model = tiny.model(family, scale=0.2, attn_implementation=implementation, **WINDOW).eval()
    packing.check(model)
    found = []
    for way in (alone, in_one):
        model.zero_grad()
        logits = way(model, rows())
        (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum().backward()
        grads = [param.grad.flatten() for param in model.parameters() if param.grad is not None]
        found.append((logits.detach(), torch.cat(grads)))
    return tuple((one - other).abs().max() / one.abs().max() for one, other in zip(*found))  # type: ignore


@pytest.mark.parametrize("part", range(4))
def test_each_family_has_the_values_of_rows_alone(part: int) -> None:
    """With windows shorter than a row, norms of heads, experts."""
    for family in OFFERED[part::4]:
        # transformers 5 has no sdpa for those that cap their scores.
        is_capped = family in ("gemma2", "vaultgemma")
        implementation = "eager" if family == "gpt_oss" or is_capped else "sdpa"
        logits, gradients = compared(family, implementation)
        # exaone4 has 1.3e-6; a row that reads another has 0.1 and more.
        assert logits < 2e-6, (family, logits)
        assert gradients < 5e-6, (family, gradients)


def test_without_our_mask_rows_would_read_each_other() -> None:
    model = tiny.model("qwen3").eval()
    found = packing.packed({"input_ids": jagged(rows())}, torch.device("cpu"))
    together = model(**found.inputs, use_cache=False).logits[0]
    expected = alone(model, rows())
    assert torch.allclose(together[: LENGTHS[0]], expected[: LENGTHS[0]], atol=1e-5)
    assert (together - expected).abs().max() > 0.1


@pytest.mark.parametrize("name", ["eager", "flex_attention"])
def test_other_implementations(name: str, monkeypatch: Any) -> None:
    # Without a compiler flex attention computes all the same.
    monkeypatch.setattr(torch, "compile", lambda function=None, **_: function or (lambda inner: inner))
    sizes = {"hidden_size": 64, "head_dim": 16, **WINDOW}
    model = tiny.model("qwen2", scale=0.1, attn_implementation=name, **sizes).eval()
    with torch.no_grad():
        model.config._attn_implementation = "eager"
        expected = alone(model, rows())
        model.config._attn_implementation = name
        torch.testing.assert_close(in_one(model, rows()), expected, atol=1e-5, rtol=1e-5)


def test_flex_attention_never_takes_the_kernel_for_decoding(monkeypatch: Any) -> None:
    """By a stand-in for its function: on the CPU there is one kernel."""
    seen = []

    def flex(module: Any, q: Any, k: Any, v: Any, mask: Any, **options: Any) -> Any:
        seen.append(options["kernel_options"])
        return q.transpose(1, 2), None

    # Masks are compiled, too.
    monkeypatch.setattr(torch, "compile", lambda function=None, **_: function or (lambda inner: inner))
    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, "flex_attention", flex)
    model = tiny.model("qwen2", attn_implementation="flex_attention").eval()
    with torch.no_grad():
        in_one(model, rows())
    assert len(seen) == model.config.num_hidden_layers
    assert all(options["FORCE_USE_FLEX_ATTENTION"] for options in seen)


def test_flash_attention_gets_the_lengths_of_rows(monkeypatch: Any) -> None:
    """By a stand-in for its function, which attends to each row by itself: there is none for the CPU."""
    seen = []

    def flash(module: Any, q: Any, k: Any, v: Any, mask: Any, **options: Any) -> Any:
        assert mask is None
        ends = options["cu_seq_lens_q"].tolist()
        seen.append((ends, options["max_length_q"], options.get("sliding_window")))
        sdpa = transformers.AttentionInterface._global_mapping["sdpa"]
        parts = [slice(*pair) for pair in zip(ends, ends[1:])]
        found = [
            sdpa(module, q[:, :, p], k[:, :, p], v[:, :, p], None, scaling=options["scaling"]) for p in parts
        ]
        return torch.cat([output for output, _ in found], 1), None

    model = tiny.model("mistral", sliding_window=None).eval()
    expected = alone(model, rows())
    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, "flash_attention_2", flash)
    model.config._attn_implementation = "flash_attention_2"
    packing.check(model)
    torch.testing.assert_close(in_one(model, rows()), expected, atol=1e-5, rtol=1e-5)
    assert seen == [([0, 7, 8, 19, 28], 11, None)] * 2


PLAIN = {"mixed_precision": {"param_dtype": None, "reduce_dtype": None}}
PACKED = {"use_remove_padding": True}


def made(folder: Path, model: Any = None, kind: str = "language_model", **options: Any) -> Any:
    small.cpu_fsdp.install()
    asked = {"optimizer": "SGD", "lr": 0.5, "clip_grad": 0.3}
    config = {**PLAIN, **PACKED, "max_token_len_per_gpu": 16, **options}
    named = {"path": str(folder), **(model or {})}
    built = engine.EngineRegistry.new(kind, "fsdp2", named, config, asked, device="cpu")
    built.initialize()  # type: ignore[attr-defined]
    return built


def jagged_rows(data: Any, built: Any) -> Any:
    return small.jagged(small.own_rows(data, built))


def trained(api: Any, folder: Path, model: Any, options: Any, is_jagged: bool) -> Any:
    built = made(folder, model, **options)
    found = small.trained(built, rows=jagged_rows if is_jagged else small.own_rows)
    assert attention.implementation(built.module) == "sdpa"
    assert built.module.config._attn_implementation.startswith(attention.PREFIX)
    return found


def in_one_process(model: Any, steps: int = small.STEPS) -> dict[str, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, weight_decay=0.01)
    losses, norms = [], []
    for step in range(steps):
        optimizer.zero_grad()
        loss = small.loss_of(model, small.batch(step))
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.3)))
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "norms": norms, "weights": dict(model.named_parameters())}


WAYS: list[tuple[dict[str, Any], bool]] = [
    ({}, False),
    ({"fsdp_size": 2, "gradient_sync": "last"}, True),
    ({"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 3, "tp_size": 2}, False),
]


@pytest.mark.parametrize(("options", "is_jagged"), WAYS, ids=str)
def test_the_training_of_one_process(ranks, tmp_path: Path, options: Any, is_jagged: bool) -> None:
    expected = in_one_process(tiny.write(tmp_path, "qwen3", scale=0.1).train())
    model = {"enable_gradient_checkpointing": is_jagged}
    for found in ranks(trained, tmp_path, model, options, is_jagged):
        small.same(found, expected)


def inferred(api: Any, folder: Path, kind: str, options: Any) -> Any:
    """Outputs of padded and of jagged rows, and of the same rows as the batch asks for padding."""
    built = made(folder, kind=kind, forward_only=True, **options)
    data = small.own_rows(small.batch(3), built)
    count = len(data["input_ids"])
    data = {**data, "temperature": torch.linspace(0.5, 2, count), "calculate_entropy": [True] * count}
    is_there = data["attention_mask"].bool()
    found = []
    listed = {"temperature": data["temperature"].tolist()}
    for more in ({}, {"use_remove_padding": False}, listed, {**listed, "use_remove_padding": False}):
        outputs = built.infer_batch({**data, **more})["model_output"]
        found.append({name: value.where(is_there, 0.0) for name, value in outputs.items()})
    both = {**small.jagged({name: data[name] for name in ("input_ids", "attention_mask", "loss_mask")})}
    both.update(temperature=data["temperature"], calculate_entropy=True)
    last = built.infer_batch(both)["model_output"]
    rows = {name: [row[keep] for row, keep in zip(value, is_there)] for name, value in found[0].items()}
    for name, value in last.items():
        torch.testing.assert_close(value.values(), torch.cat(rows[name]), atol=1e-6, rtol=1e-6)
    assert all(torch.equal(found[0][name], value) for name, value in found[2].items())
    assert all(torch.equal(found[1][name], value) for name, value in found[3].items())
    return found[:2]


@pytest.mark.parametrize("kind", ["language_model", "value_model"])
def test_outputs_are_where_padded_ones_are(ranks, tmp_path: Path, kind: str) -> None:
    tiny.write(tmp_path, "qwen2", scale=0.1)
    for packed, padded in ranks(inferred, tmp_path, kind, {}):
        assert (
            set(packed) == set(padded) == ({"values"} if kind == "value_model" else {"log_probs", "entropy"})
        )
        for name, value in padded.items():
            torch.testing.assert_close(packed[name], value, atol=1e-6, rtol=1e-6)


FIVE = {"max_position_embeddings": 32, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}


def refused(api: Any, folder: Path, model: Any, options: Any, fault: str) -> str:
    rank = dist.get_rank()
    options = dict(options)
    if fault == "text":
        options["use_remove_padding"] = "False"
    try:
        built = made(folder, model, forward_only=True, **options)
        data: Any = small.own_rows(small.batch(0), built)
        count, width = data["input_ids"].shape
        if fault == "text in a batch":
            data["use_remove_padding"] = "False"
        if fault == "text for entropies":
            data["calculate_entropy"] = "False"
        if fault == "unlike flags":
            data["use_remove_padding"] = [True, False, True, True][:count] + [True] * (count - 4)
        if fault == "padding" and rank == 1:
            data["attention_mask"][0, 3] = 0
        if fault == "positions" and rank == 2:
            data["position_ids"] = (torch.arange(width) * 2).expand(count, -1)
        if fault == "jagged positions":
            data = small.jagged(data)
            lengths = data["input_ids"].offsets().diff().tolist()
            data["position_ids"] = jagged([torch.arange(length) + (rank == 3) for length in lengths])
        built.infer_batch(data)
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("family", "settings", "options", "fault", "says"),
    [
        ("qwen3_next", {}, {}, "", "not offered for 'qwen3_next'.*carry a state.*=False would do"),
        ("qwen2_moe", {}, {}, "", "not offered for 'qwen2_moe'.*not been compared.*=False would do"),
        ("gemma3_text", {"use_bidirectional_attention": True}, {}, "", "with use_bidirectional_attention"),
        ("qwen2", {}, {}, "text", "use_remove_padding='False': expected True or False"),
        ("qwen2", {}, {}, "text in a batch", "use_remove_padding='False': expected True or False"),
        ("qwen2", {}, {}, "text for entropies", "calculate_entropy='False': expected True or False"),
        ("qwen2", {}, {}, "padding", "rank 1: row 0 has padding between its tokens.*=False would do"),
        ("qwen2", {}, {}, "positions", "rank 2: position_ids of row . do not count.*=False would do"),
        ("qwen2", {}, {}, "jagged positions", "rank 3: position_ids of row 0 do not count.*=False would do"),
        ("qwen2", FIVE, {}, "", "ranks 0-3: .*use_dynamic_bsz=True with .*'dynamic'.*use_dynamic_bsz=False"),
        ("qwen2", {}, {"ulysses_sequence_parallel_size": 3}, "", "size=3 does not divide 4 ranks"),
        ("qwen2", {}, {"ulysses_sequence_parallel_size": 2, "tp_size": 2}, "", "not offered with tp_size=2"),
    ],
    ids=str,
)
def test_what_cannot_be_packed_is_one_error_on_every_rank(
    ranks, tmp_path: Path, family: str, settings: Any, options: Any, fault: str, says: str
) -> None:
    tiny.write(tmp_path, family, **settings)
    texts = ranks(refused, tmp_path, {}, options, fault)
    assert all(isinstance(text, str) for text in texts)
    assert len(set(texts)) == 1, texts
    assert re.search(says, texts[0], re.DOTALL), texts[0]


@pytest.mark.parametrize("name", ["sdpa_paged", "kernels-community/flash"])
def test_an_implementation_that_cannot_pack(name: str) -> None:
    model = tiny.model("llama")
    model.config._attn_implementation = name
    with pytest.raises(
        ValueError, match=f"attn_implementation='{name}' cannot keep rows apart; take one of eager"
    ):
        packing.check(model)


class Borrowed(nn.Linear):
    """A module of the user's own in a model that calls itself Llama."""


def test_code_that_calls_itself_by_a_familys_name() -> None:
    model = tiny.model("llama")
    model.model.layers[0].mlp.up_proj = Borrowed(16, 24, bias=False)
    with pytest.raises(
        ValueError, match=r"test_packing.Borrowed is none of transformers' own.*=False would do"
    ):
        packing.check(model)


def test_a_sharded_module_is_of_the_package_that_its_own_class_is_of() -> None:
    """FSDP2 makes a class for each module that it shards; of peft's layers this class is of `abc`."""
    model = tiny.model("llama")

    def shard(module: nn.Module, package: str) -> None:
        module.__class__ = type("Sharded", (compat.FSDPModule, type(module)), {"__module__": package})

    shard(model.lm_head, "abc")
    packing.check(model)
    model.model.layers[0].mlp.up_proj = Borrowed(16, 24, bias=False)
    shard(model.model.layers[0].mlp.up_proj, "torch.distributed.fsdp")
    with pytest.raises(ValueError, match=r"test_packing.Borrowed is none of transformers' own"):
        packing.check(model)


def test_frequencies_by_the_longest_row_go_with_rows_as_they_are_grouped(ranks, tmp_path: Path) -> None:
    tiny.write(tmp_path, "qwen2", **FIVE)
    assert (
        ranks(refused, tmp_path, {}, {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 3}, "")
        == [""] * 4
    )


def test_a_model_that_makes_its_own_mask_is_found_out() -> None:
    model = tiny.model("llama").eval()
    attention.install(model)
    found = packing.packed({"input_ids": jagged(rows())}, torch.device("cpu"))
    with attention.within(found.rows) as kept:
        pass
    with pytest.raises(RuntimeError, match="LlamaForCausalLM takes its mask from elsewhere"):
        packing.check_asked(kept, model, False)


def test_positions_of_jagged_rows_are_served(ranks, tmp_path: Path) -> None:
    """Without packing they may be any."""
    data = small.jagged({name: value[:3] for name, value in small.batch(0).items()})
    lengths = data["input_ids"].offsets().diff().tolist()
    data["position_ids"] = jagged([2 * torch.arange(length) for length in lengths])
    inputs = engine.model_inputs(data, torch.device("cpu"))
    for row, length in enumerate(lengths):
        assert inputs["position_ids"][row, :length].tolist() == list(range(0, 2 * length, 2))


def test_the_families_are_in_the_documentation() -> None:
    page = " ".join((Path(__file__).parents[2] / "docs" / "engine.md").read_text().split())
    assert ", ".join(sorted(packing.FAMILIES)) in page
    assert not set(packing.REASONS) & packing.FAMILIES
