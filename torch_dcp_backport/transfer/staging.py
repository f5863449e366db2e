"""Chunks as bytes: copy pieces of tensors into flat buffers and out of them again, and wait for the buffers.

Knows nothing of ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Optional

import torch

from torch_dcp_backport import compat
from torch_dcp_backport.transfer.layout import Box
from torch_dcp_backport.transfer.plan import Piece


class Move(NamedTuple):
    """One piece of a chunk, and the part of a tensor that it is copied from or to."""

    piece: Piece
    #: What travels; a copy between two dtypes casts.
    dtype: torch.dtype
    part: torch.Tensor


def view_of(buffer: torch.Tensor, piece: Piece, dtype: torch.dtype) -> torch.Tensor:
    """The part of a byte buffer that carries `piece`, shaped as its box."""
    return buffer[piece.start : piece.start + piece.nbytes].view(dtype).view(piece.box.size)


def part_of(tensor: torch.Tensor, holds: Box, piece: Piece) -> torch.Tensor:
    """The part of `tensor` (which holds the box `holds`) that belongs to `piece`."""
    return tensor[piece.box.within(holds)] if piece.box != holds else tensor


class Staging:
    """Bytes on one device, allocated once and cut anew for every phase of a transfer.

    Never allocated anew: a backend may hold the old buffers for a moment, and both would count.
    """

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self.store = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._mirror: Optional[torch.Tensor] = None

    @property
    def nbytes(self) -> int:
        return self.store.numel()

    def pack(self, buffer: torch.Tensor, moves: Iterable[Move]) -> None:
        """Fill a chunk. What comes from the host to an accelerator goes there in one copy."""
        mirror, direct = None, []
        for move in moves:
            if self.crosses(move.part):
                mirror = self.mirror(buffer)
                view_of(mirror, move.piece, move.dtype).copy_(move.part)
            else:
                direct.append(move)
        if mirror is not None:
            # Blocking, so that the mirror is free for the next chunk.
            buffer.copy_(mirror)
        for piece, dtype, part in direct:
            view_of(buffer, piece, dtype).copy_(part)

    def unpack(self, buffer: torch.Tensor, moves: Iterable[Move]) -> None:
        """Empty a chunk. What goes to the host from an accelerator goes there in one copy."""
        mirror = None
        for piece, dtype, part in moves:
            if self.crosses(part) and mirror is None:
                mirror = self.mirror(buffer)
                mirror.copy_(buffer)
            part.copy_(view_of(mirror if mirror is not None and self.crosses(part) else buffer, piece, dtype))

    def crosses(self, part: torch.Tensor) -> bool:
        """Whether a part lies on the host and the buffers do not."""
        return part.device.type == "cpu" != self.store.device.type

    def mirror(self, buffer: torch.Tensor) -> torch.Tensor:
        """Host memory of a chunk's size, pinned where that is possible."""
        if self._mirror is None or self._mirror.numel() < buffer.numel():
            self._mirror = compat.host_buffer(buffer.numel())
        return self._mirror[: buffer.numel()]

    def buffers(self, count: int, size: int) -> list[torch.Tensor]:
        """`count` buffers of `size` bytes each; they alias those of the phase before."""
        return [self.store[index * size : (index + 1) * size] for index in range(count)]

    def ring(self, count: int, size: int) -> Ring:
        return Ring(self.buffers(count, size))


class Ring:
    """Buffers that are used in turn, each again only when its last use is done.

    What is copied into one buffer or out of it overlaps with what travels in the others.
    """

    def __init__(self, buffers: Sequence[torch.Tensor]) -> None:
        self.free = deque(buffers)
        self.used: deque[tuple[torch.Tensor, Callable[[], object]]] = deque()

    def take(self) -> torch.Tensor:
        """A free buffer; where there is none, finishes the oldest use first."""
        if not self.free:
            self.finish_oldest()
        return self.free.popleft()

    def use(self, buffer: torch.Tensor, finish: Callable[[], object]) -> None:
        """`buffer`, which was taken, is in use until `finish()` returns."""
        self.used.append((buffer, finish))

    def drain(self) -> None:
        while self.used:
            self.finish_oldest()

    def finish_oldest(self) -> None:
        buffer, finish = self.used.popleft()
        finish()
        self.free.append(buffer)
