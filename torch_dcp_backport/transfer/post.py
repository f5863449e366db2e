"""Point-to-point messages, in the one form that every backend carries in the group's own communicator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from torch_dcp_backport.transfer.groups import Group

#: (`dist.isend` or `dist.irecv`, the buffer, the global rank of the peer)
Message = tuple[Callable[..., Any], torch.Tensor, int]


def post(messages: Sequence[Message], group: Group) -> Sequence[Any]:
    """Start the messages.

    Always as a batch: NCCL would make a communicator for each pair of ranks otherwise.
    """
    if not messages:
        return ()
    works: Sequence[Any] = dist.batch_isend_irecv(
        [dist.P2POp(operation, buffer, peer, group) for operation, buffer, peer in messages]
    )
    return works


def finish(works: Sequence[Any]) -> None:
    for work in works:
        work.wait()
