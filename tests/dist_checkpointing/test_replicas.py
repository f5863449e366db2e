"""Digests of replicas: the same for the same values however they lie in memory, and else different."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_dcp_backport.dist_checkpointing._src import replicas

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float16)
SHAPES = st.lists(st.integers(0, 40), min_size=0, max_size=4)


def digest(tensor: torch.Tensor) -> tuple[bytes, int]:
    """By the host, and by a device."""
    return replicas.row_digests([tensor], [0])[0], int(replicas.mixed(tensor))


def differ(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return all(one != two for one, two in zip(digest(tensor), digest(other)))


def made(shape: list[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2 if dtype is torch.bool else 100, shape, generator=generator).to(dtype)


def elsewhere(tensor: torch.Tensor, offset: int) -> torch.Tensor:
    """The same values from an odd place of another memory on."""
    memory = torch.zeros(tensor.numel() + offset, dtype=tensor.dtype)
    memory[offset:] = tensor.reshape(-1)
    return memory[offset:].view(tensor.shape)


@settings(deadline=None)
@given(SHAPES, st.sampled_from(DTYPES), st.integers(0, 9), st.integers(0, 9))
def test_the_same_values_have_the_same_digest(shape, dtype, seed: int, offset: int) -> None:
    tensor = made(shape, dtype, seed)
    assert digest(tensor) == digest(tensor.clone()) == digest(elsewhere(tensor, offset))
    axes = list(reversed(range(tensor.dim())))
    turned = tensor.permute(axes).contiguous()
    assert digest(turned.permute(axes)) == digest(tensor)


@settings(deadline=None)
@given(SHAPES, st.sampled_from(DTYPES), st.integers(0, 9), st.data())
def test_another_value_has_another_digest(shape, dtype, seed: int, data) -> None:
    tensor = made(shape, dtype, seed)
    if not tensor.numel():
        return
    other = tensor.clone()
    place = data.draw(st.integers(0, tensor.numel() - 1))
    flat = other.view(-1)
    flat[place] = ~flat[place] if dtype is torch.bool else flat[place] + 1
    assert differ(other, tensor)


@pytest.mark.parametrize("numel", [3, 512, 5_000, 70_000])
def test_values_in_another_order_have_another_digest(numel: int) -> None:
    tensor = torch.arange(numel, dtype=torch.float32)
    for first, second in ((0, 1), (1, numel - 1), (0, numel // 2)):
        other = tensor.clone()
        other[first], other[second] = tensor[second], tensor[first]
        assert differ(other, tensor)


def test_a_large_tensor_is_looked_at_in_pieces(monkeypatch) -> None:
    tensor = torch.randn(300, 1000)
    for nbytes in (1, 4000, 50_000, 2**30):
        monkeypatch.setattr(replicas, "PIECE", nbytes)
        expected = digest(tensor)
        assert digest(tensor.t().contiguous().t()) == expected
        other = tensor.clone()
        other[299, 999] = 0
        assert differ(other, tensor)


def test_what_differs_is_more_than_the_bits_of_a_dtype() -> None:
    zeros = [torch.zeros(4), torch.zeros(4, dtype=torch.int32), torch.zeros(2, 2), -torch.zeros(4)]
    assert len({replicas.row_digests([tensor], [0])[0] for tensor in zeros}) == 4
    nothing = [torch.zeros(0), torch.zeros(0, 3), torch.zeros(())]
    assert len({replicas.row_digests([tensor], [0])[0] for tensor in nothing}) == 3


def test_differences_that_sums_do_not_see() -> None:
    """Signs, values that change places, and small numbers whose weights could make up for them."""
    torch.manual_seed(0)
    large, eye = torch.randn(512, 512, dtype=torch.float64), torch.eye(64)
    flipped, odd = large.clone(), large.clone()
    flipped[0, 0] *= -1
    odd[:, 1::2] *= -1
    moved, other = torch.zeros(512, 512, dtype=torch.int64), torch.zeros(512, 512, dtype=torch.int64)
    moved[0, 1] = other[3, 0] = 7
    for one, two in (
        (large, -large),
        (large, flipped),
        (large, odd),
        (flipped, odd),
        (eye, eye.flip(0)),
        (eye, eye[torch.randperm(64)]),
        (moved, other),
        (torch.tensor([3, 0], dtype=torch.uint8), torch.tensor([0, 1], dtype=torch.uint8)),
    ):
        assert differ(one, two)
    pairs = {digest(pair) for pair in torch.randn(3000, 2)}
    assert len({host for host, _ in pairs}) == len({device for _, device in pairs}) == 3000
    counts = {digest(torch.tensor(number)) for number in range(3000)}
    assert len({host for host, _ in counts}) == len({device for _, device in counts}) == 3000
