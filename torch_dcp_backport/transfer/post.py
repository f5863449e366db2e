"""Point-to-point messages, in the one form that every backend carries in the group's own communicator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from torch_dcp_backport.transfer.plan import Group


def post(operation: Callable[..., Any], buffer: torch.Tensor, peer: int, group: Group) -> Sequence[Any]:
    """Start `dist.isend` or `dist.irecv` of one buffer; `peer` is a global rank.

    As a batch of one: NCCL would make a communicator for each pair of ranks otherwise.
    """
    works: Sequence[Any] = dist.batch_isend_irecv([dist.P2POp(operation, buffer, peer, group)])
    return works


def finish(works: Sequence[Any]) -> None:
    for work in works:
        work.wait()
