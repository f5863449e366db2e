"""Cuts of every parameter, for any numbers: they tile it, blocks tile the files, and torch.cat agrees."""

from __future__ import annotations

import torch
from decoders import Decoder, Spot, expected
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_dcp_backport.megatron.cuts import Holding, Place, holding_of
from torch_dcp_backport.megatron.names import EMBED, STYLES, hf_keys, hf_order, role_of
from torch_dcp_backport.megatron.shape import misfits, shape_of
from torch_dcp_backport.transfer.layout import whole
from torch_dcp_backport.transfer.spread import overlaps
from torch_dcp_backport.transfer.staging import part_of


@st.composite
def cases(draw: st.DrawFn) -> tuple[Decoder, str, int, int, bool]:
    """(model, style, TP size, rows of the vocabulary on each rank, names of TransformerEngine)."""
    tp = draw(st.sampled_from([1, 2, 3, 4]))
    style = draw(st.sampled_from(["verl", "mcore"]))
    kv_heads = draw(st.sampled_from([size for size in (1, 2, 3, 4, 6, 8) if not (size % tp and tp % size)]))
    heads = kv_heads * draw(st.integers(1, 3))
    while heads % tp:
        heads += kv_heads
    decoder = Decoder(
        draw(st.sampled_from(["qwen2", "qwen3", "llama"])),
        layers=1,
        hidden=draw(st.integers(1, 5)),
        heads=heads,
        kv_heads=kv_heads,
        # megatron-core wants a multiple of TP from all rows together.
        head_dim=draw(st.integers(1, 3)) * (tp if style == "mcore" and (heads + 2 * kv_heads) % tp else 1),
        intermediate=tp * draw(st.integers(1, 3)),
        vocab=draw(st.integers(1, 13)),
        tied=draw(st.booleans()),
    )
    rows = -(-decoder.vocab // tp) + draw(st.integers(0, 3))
    return decoder, style, tp, rows, draw(st.booleans())


def holdings(
    decoder: Decoder, style: str, tp: int, rows: int, te: bool
) -> list[tuple[str, Holding, torch.Tensor]]:
    """(parameter name, what ours says of it, what it must be) of all TP ranks."""
    shape, found = shape_of(decoder.config), []
    hf = decoder.tensors(torch.float32)
    for rank in range(tp):
        spot = Spot(style, rank, tp, [[0]], True, True, rows, te=te)
        for name, value in expected(decoder, spot, hf)[0].items():
            known = role_of(STYLES[style], name)
            assert known is not None, name
            role, layer = known
            role = role._replace(cut="vocab") if role.cut == "head" else role
            place = Place(style, rank, tp)
            found.append(
                (name, holding_of(role, hf_keys(role, layer), shape, place, tuple(value.shape)), value)
            )
    return found


@settings(max_examples=60, deadline=None)
@given(cases())
def test_parts_and_padding_tile_each_parameter(case):
    for name, holding, value in holdings(*case):
        assert holding.shape == tuple(value.shape), name
        times = torch.zeros(holding.shape)
        for box in (*(cut.at for cut in holding.cuts), *holding.padding):
            part_of(times, whole(holding.shape), box).add_(1)
        assert torch.equal(times, torch.ones(holding.shape)), name


@settings(max_examples=60, deadline=None)
@given(cases())
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
    outside = [EMBED, "model.norm.weight", "lm_head.weight"]
    ordered = sorted(set(keys), key=hf_order)
    assert [key for key in ordered if key in outside] == outside
    assert [key.split(".")[2] for key in ordered if "layers" in key] == [
        key.split(".")[2] for key in keys if "layers" in key
    ]


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
