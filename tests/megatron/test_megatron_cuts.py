"""Cuts of every parameter, for any numbers: they tile it, blocks tile the files, and torch.cat agrees."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from decoders import Decoder, Spot, expected, inner, module_of
from hypothesis import example, given, settings
from hypothesis import strategies as st

from torch_dcp_backport.megatron import Parallel
from torch_dcp_backport.megatron._src.cuts import Holding, Place, holding_of
from torch_dcp_backport.megatron._src.model import roles_of
from torch_dcp_backport.megatron._src.names import EMBED, STYLES, hf_keys
from torch_dcp_backport.megatron._src.shape import misfits, shape_of
from torch_dcp_backport.megatron.families import family_of
from torch_dcp_backport.transfer._src.layout import whole
from torch_dcp_backport.transfer._src.memory import part_of
from torch_dcp_backport.transfer._src.spread import overlaps


@st.composite
def cases(draw: st.DrawFn) -> tuple[Decoder, str, int, int, bool, int, int]:
    """(model, style, TP, rows of the vocabulary on a rank, TransformerEngine, EP, TP of experts)."""
    tp = draw(st.sampled_from([1, 2, 3, 4, 6]))
    style = draw(st.sampled_from(["verl", "mcore"]))
    sizes = ["qwen2", "qwen3", "llama", *(["qwen2_moe", "qwen3_moe"] if style == "mcore" else [])]
    kind = draw(st.sampled_from(sizes))
    ep, etp = (draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2]))) if "moe" in kind else (1, 1)
    sizes_of = [size for size in (1, 2, 3, 4, 6, 8) if not (size % tp and tp % size)]
    # Several of them that are fewer than the ranks: only then it matters which rank has which.
    few = [size for size in sizes_of if 1 < size < tp]
    kv_heads = draw(st.sampled_from(few if few and draw(st.booleans()) else sizes_of))
    heads = kv_heads * draw(st.integers(1, 3))
    while heads % tp:
        heads += kv_heads
    decoder = Decoder(
        kind,
        layers=1,
        hidden=draw(st.integers(1, 5)),
        heads=heads,
        kv_heads=kv_heads,
        # megatron-core wants a multiple of TP from all rows together.
        head_dim=draw(st.integers(1, 3)) * (tp if style == "mcore" and (heads + 2 * kv_heads) % tp else 1),
        intermediate=tp * draw(st.integers(1, 3)),
        vocab=draw(st.integers(1, 13)),
        tied=draw(st.booleans()),
        experts=ep * draw(st.integers(1, 3)) if "moe" in kind else 0,
        expert_rows=etp * draw(st.integers(1, 3)),
        shared_rows=tp * draw(st.integers(1, 2)) if kind == "qwen2_moe" else 0,
    )
    rows = -(-decoder.vocab // tp) + draw(st.integers(0, 3))
    return decoder, style, tp, rows, draw(st.booleans()), ep, etp


def with_few_kv_heads(test: Callable[..., None]) -> Callable[..., None]:
    """Whatever is drawn: two KV heads on four ranks, and on six."""
    for style, tp in itertools.product(("verl", "mcore"), (4, 6)):
        decoder = Decoder(
            "qwen2", layers=1, hidden=3, heads=12, kv_heads=2, head_dim=3, intermediate=tp, vocab=7
        )
        test = example((decoder, style, tp, 2, False, 1, 1))(test)
    return test


def holdings(
    decoder: Decoder, style: str, tp: int, rows: int, te: bool, ep: int = 1, etp: int = 1
) -> list[tuple[str, Holding, torch.Tensor]]:
    """(parameter name, what ours says of it, what it must be) of all ranks."""
    shape, found = shape_of(decoder.config), []
    hf = decoder.tensors(torch.float32)
    ranks = itertools.product(range(tp), range(ep), range(etp))
    for rank, ep_rank, etp_rank in ranks:
        spot = Spot(style, rank, tp, [[0]], True, True, rows, False, te, ep_rank, ep, etp_rank, etp)
        where = Parallel(rank, tp, ep_rank, ep, etp_rank, etp)
        params = expected(decoder, spot, hf)[0]
        roles = roles_of(
            inner(module_of(params, spot, [0])), STYLES[style], family_of(decoder.model_type), where
        )
        for name, value in params.items():
            known = roles[name]
            assert known is not None, name
            role, layer = known
            role = role._replace(cut="vocab") if role.cut == "head" else role
            place = Place(style, rank, tp, etp_rank, etp)
            found.append(
                (name, holding_of(role, hf_keys(role, layer), shape, place, tuple(value.shape)), value)
            )
    return found


@settings(max_examples=60, deadline=None)
@given(cases())
@with_few_kv_heads
def test_parts_and_padding_tile_each_parameter(case):
    for name, holding, value in holdings(*case):
        assert holding.shape == tuple(value.shape), name
        times = torch.zeros(holding.shape)
        for box in (*(cut.at for cut in holding.cuts), *holding.padding):
            part_of(times, whole(holding.shape), box).add_(1)
        assert torch.equal(times, torch.ones(holding.shape)), name


@settings(max_examples=60, deadline=None)
@given(cases())
@with_few_kv_heads
def test_blocks_tile_each_hf_tensor(case):
    decoder = case[0]
    boxes: dict[str, set] = {}
    for _, holding, _ in holdings(*case):
        for cut in holding.cuts:
            assert cut.box.size == cut.at.size
            boxes.setdefault(cut.key, set()).add(cut.box)
    shapes = decoder.shapes()
    assert set(boxes) == set(shapes)
    for key, blocks in boxes.items():
        assert not overlaps(blocks), key
        times = torch.zeros(shapes[key])
        for box in blocks:
            part_of(times, whole(shapes[key]), box).add_(1)
        assert torch.equal(times, torch.ones(shapes[key])), key


@settings(max_examples=60, deadline=None)
@given(cases())
@with_few_kv_heads
def test_parameters_are_what_cat_and_chunk_make(case):
    hf = case[0].tensors(torch.float32)
    for name, holding, value in holdings(*case):
        mine = torch.full(holding.shape, torch.nan)
        for cut in holding.cuts:
            source = part_of(hf[cut.key], whole(tuple(hf[cut.key].shape)), cut.box)
            part_of(mine, whole(holding.shape), cut.at).copy_(source)
        for box in holding.padding:
            part_of(mine, whole(holding.shape), box).zero_()
        assert torch.equal(mine, value), name


def test_keys_are_in_transformers_order():
    keys = list(Decoder("llama").shapes())
    order = shape_of(Decoder("llama").config).order
    outside = [EMBED, "model.norm.weight", "lm_head.weight"]
    ordered = sorted(set(keys), key=order)
    assert [key for key in ordered if key in outside] == outside
    assert [key.split(".")[2] for key in ordered if "layers" in key] == [
        key.split(".")[2] for key in keys if "layers" in key
    ]


def test_experts_are_exported_one_after_the_other():
    decoder = Decoder("qwen3_moe", layers=1, experts=11, expert_rows=2)
    keys = sorted(decoder.shapes(), key=shape_of(decoder.config).order)
    experts = [key.split(".")[5:7] for key in keys if ".experts." in key]
    assert experts == [[f"{n}", f"{name}_proj"] for n in range(11) for name in ("gate", "up", "down")]


def test_layers_without_experts_have_the_names_of_dense_ones():
    shape = shape_of(Decoder("qwen2_moe", experts=4, expert_rows=2, shared_rows=6, dense=(1,)).config)
    assert shape.is_mixed
    assert "mlp.gate_proj.weight" in shape.names_in(1)
    assert "mlp.experts.{}.gate_proj.weight" not in shape.names_in(1)
    assert "mlp.gate_proj.weight" not in shape.names_in(0)
    assert shape.hf_shape("model.layers.0.mlp.experts.3.down_proj.weight") == (16, 2)
    assert shape.hf_shape("model.layers.0.mlp.shared_expert.up_proj.weight") == (6, 16)
    assert shape.hf_shape("model.layers.1.mlp.up_proj.weight") == (24, 16)


def test_sizes_that_tp_does_not_divide_are_problems_with_their_numbers():
    shape = shape_of(
        {
            "model_type": "qwen2",
            "num_hidden_layers": 2,
            "hidden_size": 16,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "head_dim": 4,
            "intermediate_size": 10,
            "vocab_size": 8,
        }
    )
    assert [str(problem) for problem in misfits(shape, 4, "verl")] == [
        "num_attention_heads cannot be cut (expected a multiple of TP 4, got 6)",
        "intermediate_size cannot be cut (expected a multiple of TP 4, got 10)",
        "num_key_value_heads cannot be cut (expected a multiple or a divisor of TP 4, got 3)",
    ]
    assert misfits(shape, 1, "mcore") == []
    assert "linear_qkv cannot be cut (expected a multiple of TP 5, got 48 rows)" in map(
        str, misfits(shape, 5, "mcore")
    )
