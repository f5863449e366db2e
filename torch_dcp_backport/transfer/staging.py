"""Chunks as bytes: copy pieces of tensors into flat buffers and out of them again, and wait for the buffers.

Knows nothing of ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple, Optional

import torch

from torch_dcp_backport import compat
from torch_dcp_backport.transfer.chunks import Piece
from torch_dcp_backport.transfer.layout import Box
from torch_dcp_backport.transfer.memory import is_same_view


class Move(NamedTuple):
    """One piece of a chunk, and the part of a tensor that it is copied from or to."""

    piece: Piece
    #: What travels; a copy between two dtypes casts.
    dtype: torch.dtype
    part: torch.Tensor


class Views:
    """The parts of a byte buffer that carry pieces, shaped as their boxes."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffer = buffer
        self.typed: dict[torch.dtype, torch.Tensor] = {}

    def __call__(self, piece: Piece, dtype: torch.dtype) -> torch.Tensor:
        typed = self.typed.get(dtype)
        if typed is None:
            # A buffer is as long as its last piece, rounded up: a multiple of every element's size.
            typed = self.typed[dtype] = self.buffer.view(dtype)
        start, numel = piece.start // dtype.itemsize, piece.nbytes // dtype.itemsize
        return typed.narrow(0, start, numel).view(piece.box.size)


def part_of(tensor: torch.Tensor, holds: Box, box: Box) -> torch.Tensor:
    """The part of `tensor` (which holds the box `holds`) that belongs to `box`.

    Cut with narrow(): an index of slices costs as much as the copy of a small piece.
    """
    for dim, extent in enumerate(box.size):
        if extent != holds.size[dim]:
            tensor = tensor.narrow(dim, box.offset[dim] - holds.offset[dim], extent)
    return tensor


def copy_to(target: torch.Tensor, part: torch.Tensor) -> None:
    """Copy, unless the target is the source's own tensor, whose memory may be read-only."""
    if part.data_ptr() == target.data_ptr() and part.device == target.device:
        if is_same_view(part, target):
            return
        # A view of the target itself: transposed, conjugated.
        part = part.clone()
    target.copy_(part)


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

    @property
    def device(self) -> torch.device:
        return self.store.device

    def pack(self, buffer: torch.Tensor, moves: Iterable[Move]) -> None:
        """Fill a chunk. What comes from the host to an accelerator goes there in one copy."""
        views = Views(buffer)
        if not self.may_cross:
            for piece, dtype, part in moves:
                views(piece, dtype).copy_(part)
            return
        direct, crossing = self.sorted(moves)
        if crossing:
            mirror = self.mirror(buffer)
            in_mirror = Views(mirror)
            for piece, dtype, part in crossing:
                in_mirror(piece, dtype).copy_(part)
            # Blocking, so that the mirror is free for the next chunk.
            buffer.copy_(mirror)
        for piece, dtype, part in direct:
            views(piece, dtype).copy_(part)

    def unpack(self, buffer: torch.Tensor, moves: Iterable[Move]) -> None:
        """Empty a chunk. What goes to the host from an accelerator goes there in one copy."""
        views = Views(buffer)
        if not self.may_cross:
            for piece, dtype, part in moves:
                part.copy_(views(piece, dtype))
            return
        direct, crossing = self.sorted(moves)
        if crossing:
            in_mirror = Views(self.mirror(buffer).copy_(buffer))
            for piece, dtype, part in crossing:
                part.copy_(in_mirror(piece, dtype))
        for piece, dtype, part in direct:
            part.copy_(views(piece, dtype))

    @property
    def may_cross(self) -> bool:
        return self.store.device.type != "cpu"

    def sorted(self, moves: Iterable[Move]) -> tuple[list[Move], list[Move]]:
        """(those on the buffers' side, those between host and accelerator)."""
        sides: tuple[list[Move], list[Move]] = ([], [])
        for move in moves:
            sides[self.crosses(move.part)].append(move)
        return sides

    def crosses(self, part: torch.Tensor) -> bool:
        """Whether a part lies on the host and the buffers do not."""
        return part.device.type == "cpu" != self.store.device.type

    def mirror(self, buffer: torch.Tensor) -> torch.Tensor:
        """Host memory of a chunk's size, pinned where that is possible."""
        if self._mirror is None or self._mirror.numel() < buffer.numel():
            self._mirror = compat.host_buffer(buffer.numel())
        return self._mirror[: buffer.numel()]

    def ring(self, count: int, size: int) -> Ring:
        """`count` buffers of `size` bytes each; they alias those of the phase before."""
        return Ring(self.store[index * size : (index + 1) * size] for index in range(count))


class Ring:
    """Buffers that are used in turn, each again only when its last use is done.

    What is copied into one buffer or out of it overlaps with what travels in the others.
    """

    def __init__(self, buffers: Iterable[torch.Tensor]) -> None:
        self.fresh = iter(buffers)
        self.free: deque[torch.Tensor] = deque()
        self.used: deque[tuple[torch.Tensor, Callable[[], object]]] = deque()

    def take(self) -> torch.Tensor:
        """A free buffer; where there is none, finishes the oldest use first."""
        if self.free:
            return self.free.popleft()
        buffer = next(self.fresh, None)
        if buffer is None:
            self.finish_oldest()
            return self.free.popleft()
        return buffer

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
