"""Pieces of tensors in buffers: each is where it belongs, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torch_dcp_backport.transfer import Box
from torch_dcp_backport.transfer._src.chunks import Piece
from torch_dcp_backport.transfer._src.layout import whole
from torch_dcp_backport.transfer._src.memory import part_of
from torch_dcp_backport.transfer._src.staging import Staging, Views


class FromOne(torch.Tensor):
    """Rows are counted from 1 by those who index it."""

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)[index.start - 1 : index.stop - 1]


def test_a_part_is_that_of_the_tensor_whatever_its_index_does() -> None:
    tensor = torch.arange(16.0).view(8, 2)
    part = part_of(tensor.as_subclass(FromOne), whole((8, 2)), Box((4, 0), (4, 2)))
    assert torch.equal(part.as_subclass(torch.Tensor), tensor[4:8])


@pytest.mark.parametrize("box", [Box((5, 0), (3, 2)), Box((4, 1), (2, 2))], ids=str)
def test_a_part_beyond_the_tensor_is_refused(box: Box) -> None:
    with pytest.raises((RuntimeError, IndexError)):
        part_of(torch.zeros(6, 2), whole((8, 3)), box)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.complex128], ids=str)
@pytest.mark.parametrize("number", [0, 1])
def test_views_are_the_bytes_of_their_buffer(dtype: torch.dtype, number: int) -> None:
    staging = Staging(torch.device("cpu"), 512)
    staging.store.copy_(torch.arange(512) % 251)
    buffers = staging.ring(2, 256)
    buffer = [buffers.take(256), buffers.take(256)][number]
    size = (3, 2)
    piece = Piece("key", whole(size), dtype, 32, 6 * dtype.itemsize)
    expected = buffer[32 : 32 + piece.nbytes].clone().view(dtype).view(size)
    view = Views(buffer)(piece)
    assert view.is_contiguous()
    assert view.clone().view(torch.uint8).tolist() == expected.view(torch.uint8).tolist()


def test_a_piece_beyond_its_buffer_is_refused() -> None:
    """The next buffer of the ring lies behind it."""
    ring = Staging(torch.device("cpu"), 32).ring(2, 16)
    with pytest.raises(RuntimeError, match="24 bytes at 0 in a buffer of 16"):
        Views(ring.take(16))(Piece("key", whole((6,)), torch.float32, 0, 24))
