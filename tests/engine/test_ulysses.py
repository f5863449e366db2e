"""Ranks that share sequences: losses, gradients and norms are those of one process."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import small
import tiny
import torch
import torch.distributed as dist

from torch_dcp_backport import engine
from torch_dcp_backport.engine._src import attention, packing, ulysses

transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")
test_packing = pytest.importorskip("test_packing")

one_thread = test_packing.one_thread
OFFERED = [family for family in test_packing.OFFERED if family not in packing.NOT_SHARED]
#: Of 28 tokens: more than the ranks divide, and rows that two ranks share.
SHARED = "ulysses_sequence_parallel_size"


def exchanged(api: Any) -> Any:
    """There and back again, forwards and backwards, in double precision."""
    rank, group = dist.get_rank(), dist.group.WORLD
    whole = torch.arange(2 * 8 * 12 * 3, dtype=torch.float64).view(2, 8, 12, 3)
    own = whole[:, :, 3 * rank : 3 * rank + 3].clone().requires_grad_()
    heads = ulysses.exchange(own, group, 1, 2)
    assert torch.equal(heads, whole[:, 2 * rank : 2 * rank + 2])
    again = ulysses.exchange(heads, group, 2, 1)
    assert torch.equal(again, own)
    (again * whole[:, :, 3 * rank : 3 * rank + 3]).sum().backward()
    assert torch.equal(own.grad, own)
    own.grad = None
    joined = ulysses.gathered(own, group, 2)
    assert torch.equal(joined, whole)
    (joined * whole).sum().backward()
    assert torch.equal(own.grad, own)


def test_heads_for_tokens_and_back(ranks) -> None:
    ranks(exchanged)


def trained(api: Any, folder: Path, options: Any, is_jagged: bool) -> Any:
    built = test_packing.made(folder, {"enable_gradient_checkpointing": is_jagged}, **options)
    found = small.trained(built, rows=test_packing.jagged_rows if is_jagged else small.own_rows)
    grid = built.grid
    place = (
        built.get_data_parallel_rank(),
        built.get_data_parallel_size(),
        built.is_mp_src_rank_with_outputs(),
    )
    return (
        place,
        [dist.get_global_rank(grid.sp_group, 0), dist.get_world_size(built.get_data_parallel_group())],
        found,
    )


@pytest.mark.parametrize(
    ("options", "is_jagged", "heads"),
    [
        ({SHARED: 2}, False, {}),
        ({SHARED: 2, "fsdp_size": 2, "gradient_sync": "last"}, True, {}),
        ({SHARED: 4, "use_dynamic_bsz": False, "micro_batch_size_per_gpu": 4}, True, {}),
        ({SHARED: 4, "max_token_len_per_gpu": 6}, False, {"num_key_value_heads": 1}),
    ],
    ids=str,
)
def test_the_training_of_one_process(
    ranks, tmp_path: Path, options: Any, is_jagged: bool, heads: Any
) -> None:
    model = tiny.write(tmp_path, "qwen3", scale=0.1, **heads).train()
    expected = test_packing.in_one_process(model)
    size = options[SHARED]
    for rank, (place, groups, found) in enumerate(ranks(trained, tmp_path, options, is_jagged)):
        small.same(found, expected)
        assert place == (rank // size, 4 // size, rank % size == 0)
        assert groups == [rank - rank % size, 4 // size]


def long_row(api: Any, folder: Path) -> Any:
    """Log-probabilities of 11 tokens by 4 ranks, with and without a mask for what fills up the last rank."""
    built = test_packing.made(folder, forward_only=True, **{SHARED: 4})
    ids = torch.arange(11)[None]
    found = []
    for small_enough in (packing.SMALL, 4):
        packing.SMALL, before = small_enough, packing.SMALL
        rows = packing.packed({"input_ids": ids}, torch.device("cpu"), dist.group.WORLD, 4).rows
        assert rows.is_single == (small_enough == 4)
        found.append(built.infer_batch({"input_ids": ids})["model_output"]["log_probs"])
        packing.SMALL = before
    return found


def test_a_long_row_needs_no_mask(ranks, tmp_path: Path) -> None:
    model = tiny.write(tmp_path, "qwen2", scale=0.1).eval()
    ids = torch.arange(11)[None]
    with torch.no_grad():
        expected = engine.next_log_probs(model(ids).logits, ids)
    for masked, unmasked in ranks(long_row, tmp_path):
        torch.testing.assert_close(masked, expected, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(unmasked, expected, atol=1e-6, rtol=1e-6)


def stepped(api: Any, folders: dict[str, Path]) -> dict[str, Any]:
    found = {}
    for family, folder in folders.items():
        name = {"attn_implementation": "eager"} if family == "gpt_oss" else {}
        built = test_packing.made(folder, {"override_config": name}, **{SHARED: 2})
        found[family] = small.trained(built, range(1))
    return found


@pytest.mark.parametrize("part", range(4))
def test_each_family_has_the_step_of_one_process(pools, tmp_path: Path, part: int) -> None:
    expected = {}
    for family in OFFERED[part::4]:
        model = tiny.write(tmp_path / family, family, scale=0.1, **test_packing.WINDOW).train()
        expected[family] = test_packing.in_one_process(model, 1)
    for found in pools.run(stepped, {family: tmp_path / family for family in expected}, world=2):
        wrong = {}
        for family, reference in expected.items():
            try:
                small.same(found[family], reference, 2e-5)
            except AssertionError as error:
                wrong[family] = str(error)
        assert not wrong


def differing(api: Any, folder: Path, options: Any, fault: str) -> str:
    """The error where rank 1 has something else than rank 0."""
    try:
        built = test_packing.made(folder, **options)
        data: Any = small.own_rows(small.batch(0), built)
        if dist.get_rank() == 1:
            if fault == "length":
                data["attention_mask"][0] = 1
            if fault == "ids":
                data["input_ids"] = data["input_ids"] + 1
            if fault == "loss":
                data["loss_mask"] = data["attention_mask"]
            if fault == "entropy":
                data["calculate_entropy"] = True
            if fault == "limit":
                data["max_token_len_per_gpu"] = 6
        if fault == "padded":
            data["use_remove_padding"] = False
        built.train_batch(data, engine.sft_loss)
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("length", "rank 1: .*other masks or positions .attention_mask.* than rank 0, with which"),
        ("ids", r"rank 1: .*other rows .input_ids. than rank 0"),
        ("loss", "rank 1: .*another sum of loss_mask than rank 0"),
        ("entropy", "rank 1: .*another use_remove_padding, calculate_entropy .* than rank 0"),
        ("limit", "rank 1: another cut into micro-batches.* than rank 0"),
        ("padded", "ranks 0-3: .*size=2 needs use_remove_padding=True; the batch says False"),
    ],
)
def test_ranks_that_share_a_sequence_have_the_same_rows(ranks, tmp_path: Path, fault: str, says: str) -> None:
    tiny.write(tmp_path, "qwen2")
    texts = ranks(differing, tmp_path, {SHARED: 2}, fault)
    assert len(set(texts)) == 1, texts
    assert re.search(says, texts[0], re.DOTALL), texts[0]


@pytest.mark.parametrize(
    ("family", "settings", "options", "says"),
    [
        ("qwen2", {"num_attention_heads": 6}, {SHARED: 4}, "size=4 does not divide num_attention_heads=6"),
        (
            "qwen2",
            {"num_attention_heads": 12, "num_key_value_heads": 6},
            {SHARED: 4},
            "size=4 neither divides num_key_value_heads=6 nor",
        ),
        ("diffllama", {}, {SHARED: 2}, "size=2 is not offered for 'diffllama'.*size=1 would do"),
        (
            "qwen2",
            test_packing.FIVE,
            {SHARED: 2},
            "size=2 is not offered with rope_scaling of type 'dynamic'",
        ),
        ("qwen2", {}, {SHARED: 2, "use_remove_padding": None}, "size=2 needs use_remove_padding=True"),
        ("qwen2", {}, {SHARED: 2, "use_remove_padding": False}, "size=2 needs use_remove_padding=True"),
        ("qwen2", {}, {SHARED: "2.5"}, "size='2.5': expected a whole number"),
    ],
    ids=str,
)
def test_what_ranks_cannot_share(
    ranks, tmp_path: Path, family: str, settings: Any, options: Any, says: str
) -> None:
    tiny.configured(family, **settings).save_pretrained(tmp_path)
    texts = ranks(differing, tmp_path, options, "")
    assert len(set(texts)) == 1, texts
    assert re.search(says, texts[0], re.DOTALL), texts[0]


def test_a_call_outside_of_the_engine_is_refused() -> None:
    """It would exchange heads for tokens between ranks that have whole rows each: other values, silently."""
    model = tiny.model("qwen2", scale=0.1).eval()
    attention.install(model, None, 2)
    with pytest.raises(RuntimeError, match="outside of the engine"):
        model(torch.arange(1, 9)[None])
