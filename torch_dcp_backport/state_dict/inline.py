"""The values of a small state dict, which travel with its inventory: no message is needed for them alone.

A loader that makes a call for each parameter spends its time on messages, not on bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Optional

import torch

from torch_dcp_backport.transfer import TensorInfo
from torch_dcp_backport.transfer.chunks import Key, Piece, chunk_bytes, chunks
from torch_dcp_backport.transfer.layout import Box, whole
from torch_dcp_backport.transfer.scatter import Reader
from torch_dcp_backport.transfer.staging import Move, Staging, Views, part_of

#: Bytes of tensors that travel with an inventory: together they fit into the message that is sent anyway.
MOST = 24 * 1024


def pack(reader: Reader, inventory: Mapping[Key, object]) -> Optional[bytes]:
    """The values of all tensors of an inventory; None where they are too many.

    Raises:
        RuntimeError: a tensor has another shape by now.
    """
    pieces = pieces_of(inventory)
    if pieces is None:
        return None
    staging = Staging(torch.device("cpu"), chunk_bytes(pieces))
    moves = []
    for piece in pieces:
        info: Any = inventory[piece.key]
        moves.append(Move(piece, info.dtype, reader.piece(piece.key, piece.box, info.shape)))
    staging.pack(staging.store, moves)
    return staging.store.numpy().tobytes()


def pieces_of(inventory: Mapping[Key, object]) -> Optional[list[Piece]]:
    """The pieces of one chunk with all tensors; None where one chunk cannot hold them."""
    boxes, room = [], MOST
    for key, info in inventory.items():
        if isinstance(info, TensorInfo):
            box = whole(info.shape)
            room -= box.numel * info.dtype.itemsize
            if room < 0:
                return None
            boxes.append((key, box, info.dtype.itemsize))
    # Empty where no tensor has an element.
    pieces = list(chunks(boxes, MOST)) or [[]]
    return pieces[0] if len(pieces) == 1 else None


class Values:
    """A `Reader` of what `pack` made, on the ranks that received it."""

    def __init__(self, data: bytes, inventory: Mapping[Key, object]) -> None:
        self.inventory = inventory
        self.pieces = {piece.key: piece for piece in pieces_of(inventory) or ()}
        self.views = Views(torch.frombuffer(bytearray(data), dtype=torch.uint8)) if data else None

    def piece(self, key: Key, box: Box, shape: tuple[int, ...]) -> torch.Tensor:
        info: Any = self.inventory[key]
        assert info.shape == shape, "the plan is of this inventory"
        assert self.views is not None, "a box with elements has values"
        return part_of(self.views(self.pieces[key], info.dtype), whole(shape), box)

    def release(self) -> None:
        """Nothing is read on access."""
