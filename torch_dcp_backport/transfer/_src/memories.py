"""An exchange of boxes in memory that callables give: windows of files, slices of fused parameters.

Knows routes and the call. For the rooms beside the shim; nothing in the shim imports it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Optional

import torch

from torch_dcp_backport.transfer._src.call import Call
from torch_dcp_backport.transfer._src.chunks import ALIGNMENT, Key, Piece
from torch_dcp_backport.transfer._src.errors import DOUBTFUL, Failure, spell_doing
from torch_dcp_backport.transfer._src.exchange import Exchange, ExchangePlan, Route
from torch_dcp_backport.transfer._src.layout import Box
from torch_dcp_backport.transfer._src.memory import as_bytes, is_dense
from torch_dcp_backport.transfer._src.plan import Agreement
from torch_dcp_backport.transfer._src.staging import copy_to

#: Gives the memory of a box of a tensor, by its key.
Memory = Callable[[str, Box], torch.Tensor]


class Memories(NamedTuple):
    """The memory that boxes are read from, and that they are written to."""

    source: Memory
    target: Memory
    #: The state after an exchange that broke off, for its error; by default it names the written keys.
    left: str = ""
    #: Called when all messages are over, with the first error of this rank's copies; the caller agrees on it
    #: later. By default such an error ends this rank's exchange, and others wait for its messages; after a
    #: broadcast of an accelerator all ranks agree on it.
    failed: Optional[Callable[[Failure], object]] = None


class Blocks(Exchange):
    """An exchange between memories."""

    def __init__(self, call: Call, agreement: Agreement, plan: ExchangePlan, memories: Memories) -> None:
        super().__init__(call, agreement, plan, {}, {})
        self.source, self.target, self.left, self.failed = memories
        self.after_failure = self.left or DOUBTFUL

    def failure_text(self) -> str:
        if not self.left:
            return super().failure_text()
        verb, pieces = self.doing
        doing = spell_doing(verb, (piece.key for piece in pieces))
        return f"{self.call.title}: broken off while {doing}; {self.left}"

    def source_part(self, key: Key, box: Box) -> torch.Tensor:
        return self.source(str(key), box)

    def target_part(self, key: Key, box: Box) -> torch.Tensor:
        return self.target(str(key), box)

    def filled(self, pieces: Sequence[Piece]) -> torch.Tensor:
        in_place = self.attempt(functools.partial(self.in_place, pieces))
        return super().filled(pieces) if in_place is None else in_place

    def in_place(self, pieces: Sequence[Piece]) -> Optional[torch.Tensor]:
        """One dense piece, as long as its chunk, is sent as it lies in memory; None for others.

        Not in every exchange: a rank with an error may change what others still receive. After this one all
        ranks agree, and the others get that error.
        """
        piece = pieces[0]
        if len(pieces) == 1 and not piece.nbytes % ALIGNMENT:
            part = self.read(piece.key, piece.box)
            is_there = part.dtype == piece.dtype and part.device == self.staging.device
            if is_there and is_dense(part):
                return as_bytes(part)
        return None


@torch.no_grad()
def move(call: Call, agreement: Agreement, routes: Mapping[Key, Route], memories: Memories) -> None:
    """Move boxes between ranks, and within each; in one process alone, too.

    Raises:
        RuntimeError: a rank has no room for its buffers; before anything is written.
        TransferError: a rank is gone, the group's timeout is over, or a copy failed and there is no
            `memories.failed`; in one process alone, the error of that copy.
    """
    if call.groups:
        plan = ExchangePlan(routes, call.ranks, call.rank)
        Blocks(call, agreement, plan, memories).run(plan.nbytes)
        return
    key: Key = ""
    try:
        for key, box, _ in ExchangePlan(routes, (call.rank,), call.rank).own():
            copy_to(memories.target(str(key), box), memories.source(str(key), box))
    except Exception as error:
        if memories.failed is None:
            raise
        memories.failed(Failure(error, key))
