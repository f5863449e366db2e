"""Checksums of weights by which two tensors on different ranks are compared."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_dcp_backport.hf import Part, Share
from torch_dcp_backport.hf._src.comparing import STEP_BYTES, checksum, sum_of
from torch_dcp_backport.hf._src.writing import HostBytes
from torch_dcp_backport.transfer import TensorInfo
from torch_dcp_backport.transfer._src.layout import whole


def total(data: bytes, start: int = 0) -> bytes:
    """Of bytes that lie `start` bytes behind an address that every dtype can have."""
    room = bytearray(start + len(data))
    room[start:] = data
    return sum_of(memoryview(room)[start:], torch.empty(STEP_BYTES // 8, dtype=torch.int64))


@settings(max_examples=300, deadline=None)
@given(data=st.binary(min_size=1, max_size=200), place=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_a_flipped_bit_is_seen_at_any_length(data: bytes, place: int, bit: int) -> None:
    flipped = bytearray(data)
    flipped[place % len(data)] ^= 1 << bit
    assert total(bytes(flipped)) != total(data)


@settings(max_examples=100, deadline=None)
@given(data=st.binary(min_size=1, max_size=100), start=st.integers(0, 15))
def test_where_it_lies_in_memory_does_not_matter(data: bytes, start: int) -> None:
    assert total(data, start) == total(data)


def test_values_that_change_places_are_seen() -> None:
    values = torch.arange(STEP_BYTES // 8, dtype=torch.int64)
    swapped = values.flip(0).contiguous()
    assert total(values.numpy().tobytes()) != total(swapped.numpy().tobytes())


def test_signs_that_change_in_pairs_are_seen() -> None:
    values = torch.randn(1024).to(torch.bfloat16)
    changed = values.clone()
    changed[3::4] *= -1
    before, after = (total(bytes(some.view(torch.uint8).tolist())) for some in (values, changed))
    assert before != after


@pytest.mark.parametrize("numel", [8, 11, 2 * STEP_BYTES + 3])
def test_neither_default_device_nor_inference_mode_makes_a_difference(numel: int) -> None:
    value, box = torch.zeros(numel, dtype=torch.uint8) + 7, whole((numel,))
    share = Share({"x": TensorInfo((numel,), torch.uint8)}, {}, {"x": [Part(box, value)]})
    host_bytes = HostBytes(STEP_BYTES)
    with torch.inference_mode():
        expected = checksum(share, "x", box, host_bytes)
    with torch.device("meta"):
        assert checksum(share, "x", box, host_bytes) == expected
    assert checksum(share, "x", box, host_bytes) == expected
