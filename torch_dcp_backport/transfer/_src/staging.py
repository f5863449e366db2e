"""Chunks as bytes: copy pieces of tensors into flat buffers and out of them again, and wait for the buffers.

Knows nothing of ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Union

import torch

from torch_dcp_backport import compat
from torch_dcp_backport.transfer._src.chunks import Key, Piece, StridedPart
from torch_dcp_backport.transfer._src.memory import is_same_view

#: Elements of a chunk, and the part of a tensor that they are copied from or to; two dtypes are cast.
Move = tuple[Union[Piece, StridedPart], torch.Tensor]


class Views:
    """The parts of a byte buffer that carry pieces, shaped as their boxes."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffer = buffer
        self.nbytes = buffer.numel()
        self.typed: dict[torch.dtype, torch.Tensor] = {}

    def __call__(self, piece: Union[Piece, StridedPart]) -> torch.Tensor:
        dtype = piece.dtype
        typed = self.typed.get(dtype)
        if typed is None:
            # A buffer is as long as its last piece, rounded up: a multiple of every element's size.
            typed = self.typed[dtype] = self.buffer.view(dtype)
        if piece.start + piece.nbytes > self.nbytes:
            # The bytes behind this buffer are another one's.
            raise RuntimeError(f"{piece.nbytes} bytes at {piece.start} in a buffer of {self.nbytes}")
        start = typed.storage_offset() + piece.start // dtype.itemsize
        # In one step: narrow() and view() cost as much as the copy of a small piece.
        return typed.as_strided(piece.size, piece.stride, start)


def copy_to(target: torch.Tensor, part: torch.Tensor) -> None:
    """Copy, unless the target is the source's own tensor: its memory may be read-only."""
    if is_same_view(part, target):
        return
    if part.data_ptr() == target.data_ptr() and part.device == target.device:
        # A view of the target itself: transposed, conjugated.
        part = part.clone()
    target.copy_(part)


class Staging:
    """Bytes on one device, allocated once and cut anew for every phase of a transfer.

    Never allocated anew: a backend may hold the old buffers for a moment, and both would count.
    """

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self.store = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._mirror = self.store[:0]
        #: The key of the tensor that an engine last asked for, or whose part was last copied, for an error.
        self.at: Key = ""

    @property
    def nbytes(self) -> int:
        return self.store.numel()

    @property
    def device(self) -> torch.device:
        return self.store.device

    def pack(self, buffer: torch.Tensor, moves: Iterable[Move]) -> None:
        """Fill a chunk. Parts on the host go to an accelerator in one copy if they are most of it."""
        views = Views(buffer)
        direct, crossing = self.by_side(moves, buffer.numel())
        if crossing:
            self.at = ""
            mirror = self.mirror(buffer)
            mirror_views = Views(mirror)
            for piece, part in crossing:
                self.at = piece.key
                mirror_views(piece).copy_(part)
            self.at = ""
            # Blocking, so that the mirror is free for the next chunk.
            buffer.copy_(mirror)
        for piece, part in direct:
            self.at = piece.key
            views(piece).copy_(part)

    def unpack(self, buffer: torch.Tensor, moves: Iterable[Move]) -> None:
        """Empty a chunk. Parts on the host come from an accelerator in one copy if they are most of it."""
        views = Views(buffer)
        direct, crossing = self.by_side(moves, buffer.numel())
        if crossing:
            self.at = ""
            mirror_views = Views(self.mirror(buffer).copy_(buffer))
            for piece, part in crossing:
                self.at = piece.key
                part.copy_(mirror_views(piece))
        for piece, part in direct:
            self.at = piece.key
            part.copy_(views(piece))

    @property
    def may_cross(self) -> bool:
        return self.store.device.type != "cpu"

    def by_side(self, moves: Iterable[Move], nbytes: int) -> tuple[Iterable[Move], Sequence[Move]]:
        """(moves that are made one by one, moves that cross together with the whole chunk of so many bytes).

        A few host counters among an accelerator's states must not take all of these to the host and back.
        """
        if not self.may_cross:
            return moves, ()
        sides: tuple[list[Move], list[Move]] = ([], [])
        for move in moves:
            sides[self.crosses(move[1])].append(move)
        direct, crossing = sides
        crossed = sum(part.numel() * piece.dtype.itemsize for piece, part in crossing)
        return sides if 2 * crossed >= nbytes else ([*direct, *crossing], ())

    def crosses(self, part: torch.Tensor) -> bool:
        """Whether a part lies on the host and the buffers do not."""
        return part.device.type == "cpu" != self.store.device.type

    def mirror(self, buffer: torch.Tensor) -> torch.Tensor:
        """Host memory of a chunk's size, pinned where that is possible."""
        if self._mirror.numel() < buffer.numel():
            self._mirror = compat.host_buffer(buffer.numel(), self.device.type)
        return self._mirror[: buffer.numel()]

    def ring(self, count: int, size: int) -> Ring:
        """`count` buffers of `size` bytes each; they alias those of the phase before."""
        return Ring(self.store[index * size : (index + 1) * size] for index in range(count))


#: A ring has at most so many uses under way, with a buffer or without.
MOST_USES = 8


class Ring:
    """Buffers that are used in turn, each again only when its last use is done.

    Copying into or out of one buffer overlaps with what travels in the others.
    """

    def __init__(self, buffers: Iterable[torch.Tensor] = ()) -> None:
        self.fresh = iter(buffers)
        self.free: deque[torch.Tensor] = deque()
        self.taken: list[torch.Tensor] = []
        self.used: deque[tuple[list[torch.Tensor], Callable[[], object]]] = deque()

    def take(self, nbytes: int) -> torch.Tensor:
        """Bytes of a free buffer; where there is none, finishes the oldest use first."""
        buffer = self.free.popleft() if self.free else next(self.fresh, None)
        if buffer is None:
            while not self.free:
                self.finish_oldest()
            buffer = self.free.popleft()
        self.taken.append(buffer)
        return buffer[:nbytes]

    def use(self, finish: Callable[[], object]) -> None:
        """The buffers taken since the last `use` are in use until `finish()` returns."""
        while len(self.used) >= MOST_USES:
            self.finish_oldest()
        self.used.append((self.taken, finish))
        self.taken = []

    def drain(self) -> None:
        while self.used:
            self.finish_oldest()

    def finish_oldest(self) -> None:
        buffers, finish = self.used.popleft()
        finish()
        self.free += buffers
