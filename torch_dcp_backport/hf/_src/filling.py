"""Parameters from HF tensors: each rank copies its own slices, or the first rank reads for all.

Must never allocate a full tensor, nor anything that grows with the model.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Optional

import torch

from torch_dcp_backport.hf._src.blocks import Share, Window, windows, within
from torch_dcp_backport.hf._src.moving import send_window
from torch_dcp_backport.hf._src.source import Source
from torch_dcp_backport.transfer import DOUBTFUL, UNCHANGED, Agreement, Box, Call, chunks, copy_to, part_of

#: Bytes of a file that a copy reads: on their way to another device or dtype all may be in memory.
STEP_BYTES = 16 * 2**20
#: Bytes that move from the first rank between two agreements. Those of files are mapped, not in memory.
WINDOW_BYTES = 64 * 2**20
#: Bytes of buffers for that move on any rank: where a single rank reads, more make no load faster.
STAGING_BYTES = 8 * 2**20


@torch.no_grad()
def fill_here(call: Call, source: Source, share: Share) -> int:
    """Copy this rank's own slices out of a source that every rank sees. Collective.

    Ranks exchange nothing but their failures at the end.

    Args:
        call: the call under which all ranks raise the same problems.
        source: the source, of which only this rank's slices are read.
        share: the tensors, and this rank's memory for them, which is written.

    Returns:
        The bytes that this rank read of the source.

    Raises:
        TransferError: a rank could not read, or copy; on every rank, after others have written.
    """
    wrote = 0
    call.tally.meter.expect(lambda: sum(nbytes for *_, nbytes in _own(share)))
    with call.tally.phase("move"):
        for key, box, into, nbytes in _own(share):
            with call.guard(key):
                for pieces in chunks([(key, box, share.tensors[key].dtype)], STEP_BYTES):
                    for piece in pieces:
                        copy_to(part_of(into, box, piece.box), source.part(key, piece.box))
                wrote += nbytes
                call.tally.meter.add(nbytes)
                call.tally.tensors += 1
            if call.problems:
                break
        _copy_doubles(call, share)
    call.agree_on_outcome(DOUBTFUL)
    call.tally.close()
    return wrote


def _own(share: Share) -> list[tuple[str, Box, torch.Tensor, int]]:
    """Return (key, box, memory, bytes in the source) of this rank's blocks, each once, in source order."""
    blocks = []
    for key, info in share.tensors.items():
        parts = {part.box: part.into for part in reversed(share.parts.get(key, ()))}
        for box, into in reversed(parts.items()):
            blocks.append((key, box, into, box.numel * info.dtype.itemsize))
    return blocks


def _copy_doubles(call: Call, share: Share) -> None:
    for key, into, first in share.copies():
        with call.guard(key):
            into.copy_(first)


@torch.no_grad()
def fill_from_first(call: Call, agreement: Agreement, source: Optional[Source], share: Share) -> int:
    """Fill every rank's parts from the first rank, which alone reads the source. Collective.

    Args:
        call: the call under which all ranks raise the same problems.
        agreement: the result of the ranks' agreement in this call.
        source: the source on the first rank; None on every other rank.
        share: the tensors, the blocks of all ranks, and this rank's memory, which is written.

    Returns:
        The bytes that this rank read of the source; 0 on every rank but the first.

    Raises:
        TransferError: a read or a copy failed, a rank is gone, or the group's timeout is over.
    """
    read_bytes, so_far = 0, UNCHANGED
    agreement = agreement._replace(staging_bytes=min(agreement.staging_bytes, STAGING_BYTES))
    for window in windows(share.tensors, WINDOW_BYTES):
        opened: dict[str, list[torch.Tensor]] = {}
        if source is not None:
            with call.guard(next(iter(window))):
                # Here, where a failure still reaches the other ranks: in the exchange they would wait for it.
                for key, pieces in window.items():
                    opened[key] = [source.part(key, piece.box) for piece in pieces]
        call.agree_on_outcome(so_far)
        send_window(call, agreement, share, window, functools.partial(_opened, window, opened))
        so_far = DOUBTFUL
        if source is not None:
            read_bytes += sum(piece.nbytes for pieces in window.values() for piece in pieces)
    _copy_doubles(call, share)
    # Another rank may have failed in the last window.
    call.agree_on_outcome(so_far)
    call.tally.tensors = len(share.parts)
    call.tally.close()
    return read_bytes


def _opened(window: Window, opened: Mapping[str, Sequence[torch.Tensor]], key: str, box: Box) -> torch.Tensor:
    """Return a box of a tensor out of its opened pieces."""
    piece = within(window[key], box)
    return part_of(opened[key][window[key].index(piece)], piece.box, box)
