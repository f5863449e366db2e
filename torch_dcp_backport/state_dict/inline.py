"""The values of a small state dict, which travel with its inventory: no message is needed for them alone.

A loader that makes a call for each parameter spends its time on messages, not on bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Optional

import torch

from torch_dcp_backport import compat
from torch_dcp_backport.state_dict.source import StateSource
from torch_dcp_backport.transfer import (
    Box,
    Key,
    Piece,
    Staging,
    TensorInfo,
    Views,
    chunk_bytes,
    chunks,
    is_freed,
    moved,
    part_of,
    whole,
)

#: Bytes of tensors that travel with an inventory: together they fit into the message that is sent anyway.
MOST = 24 * 1024
#: The dtypes that every release copies on every device.
DTYPES = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128, torch.complex64}
DTYPES |= {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool}


def pack(source: StateSource, inventory: Mapping[Key, object]) -> Optional[bytes]:
    """The values of all tensors of an inventory; None where they are too many, or not all plain ones.

    The inventory has keys that no rank wants: a value that could fail there is left to the messages, which
    carry wanted values alone. So is a value that the source makes on access, which may be read only so often.
    """
    pieces = pieces_of(inventory) if source.is_dict else None
    if not pieces:
        return None
    values = {piece.key: source.value(piece.key) for piece in pieces}
    if not all(map(can_travel, values.values())):
        return None
    staging = Staging(torch.device("cpu"), chunk_bytes(pieces))
    staging.pack(staging.store, ((piece, values[piece.key].detach()) for piece in pieces))
    return staging.store.numpy().tobytes()


def can_travel(value: torch.Tensor) -> bool:
    return type(value) in compat.PLAIN_TENSORS and value.dtype in DTYPES and not is_freed(value)


def pieces_of(inventory: Mapping[Key, object]) -> Optional[list[Piece]]:
    """The pieces of one chunk with all tensors; None where one chunk cannot hold them."""
    boxes, room = [], MOST
    for key, info in inventory.items():
        if isinstance(info, TensorInfo):
            box = whole(info.shape)
            room -= box.numel * info.dtype.itemsize
            if room < 0:
                return None
            boxes.append((key, box, info.dtype))
    # Empty where no tensor has an element.
    pieces = list(chunks(boxes, MOST)) or [[]]
    return pieces[0] if len(pieces) == 1 else None


class InlineReader:
    """A `Reader` of what `pack` made, on the ranks that received it."""

    def __init__(self, data: bytes, inventory: Mapping[Key, object]) -> None:
        pieces = pieces_of(inventory) or ()
        self.inventory = inventory
        self.pieces = {piece.key: piece for piece in pieces}
        self.views = Views(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        #: Bytes of tensors, without padding.
        self.nbytes = moved(pieces)

    def piece(self, key: Key, box: Box, shape: tuple[int, ...]) -> torch.Tensor:
        info: Any = self.inventory[key]
        assert info.shape == shape, "the plan is of this inventory"
        return part_of(self.views(self.pieces[key]), whole(shape), box)

    def release(self) -> None:
        """Nothing is read on access."""
