"""Whether two HF tensors that ranks hold have the same values.

Must never hold more than a piece of each.
"""

from __future__ import annotations

import functools
from typing import Optional

import torch

from torch_dcp_backport.hf.blocks import Share, windows
from torch_dcp_backport.hf.export import Buffer, nowhere
from torch_dcp_backport.hf.filling import STEP_BYTES
from torch_dcp_backport.hf.moving import bring_window, first_rank, settle
from torch_dcp_backport.hf.source import Source
from torch_dcp_backport.transfer import Call
from torch_dcp_backport.transfer.plan import Agreement


@torch.no_grad()
def differ(call: Call, agreement: Agreement, share: Share, one: str, other: str) -> bool:
    """Whether two tensors of the same shape and dtype differ in a bit; on ranks but the first never.

    Raises:
        RuntimeError: the first rank has no room for pieces of them; on every rank.
        TransferError: a rank is gone, or the group's timeout is over.
    """
    buffer: Optional[Buffer] = None
    if call.rank == first_rank(call):
        with call.room_for("values to compare"):
            buffer = Buffer(2 * STEP_BYTES)
    settle(call)
    are_equal = True
    for window in windows({one: share.tensors[one]}, STEP_BYTES):
        pieces = window[one]
        seconds = [piece._replace(key=other, start=piece.start + STEP_BYTES) for piece in pieces]
        both = {one: pieces, other: seconds}
        write = nowhere if buffer is None else functools.partial(buffer.view, both, share.tensors)
        bring_window(call, agreement, share, both, write)
        if buffer is not None:
            # As bytes: NaN is not equal to itself.
            for first, second in zip(pieces, seconds):
                are_equal = are_equal and torch.equal(buffer.bytes_of(first), buffer.bytes_of(second))
    return not are_equal


def equal_in(source: Source, one: str, other: str) -> bool:
    """Whether two tensors of a source have the same shape, dtype and bits."""
    if source.tensors[one] != source.tensors[other]:
        return False
    pairs = (
        (source.part(one, piece.box), source.part(other, piece.box))
        for window in windows({one: source.tensors[one]}, STEP_BYTES)
        for piece in window[one]
    )
    # As bytes: NaN is not equal to itself.
    return all(torch.equal(as_bytes(first), as_bytes(second)) for first, second in pairs)


def as_bytes(part: torch.Tensor) -> torch.Tensor:
    return part.contiguous().reshape(-1).view(torch.uint8)
