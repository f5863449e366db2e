"""Chunks as bytes: copy pieces of tensors into a flat buffer and out of it again."""

from __future__ import annotations

import torch

from torch_dcp_backport.transfer.layout import Box
from torch_dcp_backport.transfer.plan import Piece


def view_of(buffer: torch.Tensor, piece: Piece, dtype: torch.dtype) -> torch.Tensor:
    """The part of a byte buffer that carries `piece`, shaped as its box."""
    return buffer[piece.start : piece.start + piece.nbytes].view(dtype).view(piece.box.size)


def part_of(tensor: torch.Tensor, holds: Box, piece: Piece) -> torch.Tensor:
    """The part of `tensor` (which holds the box `holds`) that belongs to `piece`."""
    return tensor[piece.box.within(holds)] if piece.box != holds else tensor


class Staging:
    """Byte buffers on one device, allocated once and reused by every round.

    Never allocated anew: a backend may hold the old buffers for a moment, and both would count.
    """

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self.store = torch.empty(nbytes, dtype=torch.uint8, device=device)

    @property
    def nbytes(self) -> int:
        return self.store.numel()

    def buffers(self, count: int, size: int) -> list[torch.Tensor]:
        """`count` buffers of `size` bytes each; they alias those of the round before."""
        return [self.store[index * size : (index + 1) * size] for index in range(count)]
