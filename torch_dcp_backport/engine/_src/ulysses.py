"""Ranks that share a sequence: each has a part of the tokens, and in attention a part of the heads (Ulysses).

Knows tensors and groups; must never know a model.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from torch_dcp_backport import compat
from torch_dcp_backport.transfer import Group


def exchange(tensor: torch.Tensor, group: Group, cut: int, joined: int) -> torch.Tensor:
    """Cut a dimension between the ranks, and join what they have along another. Collective.

    Args:
        tensor: of the same shape on every rank.
        group: the ranks.
        cut: a dimension that the number of ranks divides, of which this rank keeps a part.
        joined: the dimension of which each rank has a part, in the order of the ranks.

    Example:
        Within a process group:

        >>> import torch
        >>> from torch_dcp_backport.engine._src import ulysses
        >>> ulysses.exchange(torch.zeros(1, 4, 3), None, 1, 2).shape  # as this is the only rank
        torch.Size([1, 4, 3])
    """
    function: Any = Exchange.apply
    found: torch.Tensor = function(tensor, group, cut, joined)
    return found


def gathered(tensor: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    """Return what all ranks have, joined along a dimension. Collective.

    Each rank gets the gradient of its own part: all compute the same of the result.

    Args:
        tensor: of the same shape on every rank.
        group: the ranks.
        dim: the dimension of which each rank has a part, in the order of the ranks.
    """
    function: Any = Gather.apply
    found: torch.Tensor = function(tensor, group, dim)
    return found


def part_of(tensor: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    """Return this rank's part of what every rank has, along a dimension that the number of ranks divides."""
    return tensor.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)]


def repeated(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """Return keys or values, (rows, heads, ...), whose heads each rank gets some of: repeated if too few."""
    heads = tensor.shape[1]
    return tensor if heads % size == 0 else tensor.repeat_interleave(size // heads, 1)


def swapped(tensor: torch.Tensor, group: Group, cut: int, joined: int) -> torch.Tensor:
    """Do as `exchange`, without a gradient."""
    parts = torch.stack(tensor.chunk(dist.get_world_size(group), cut))
    received = torch.empty_like(parts)
    # As bytes: gloo does not exchange each dtype.
    dist.all_to_all_single(received.view(torch.uint8), parts.view(torch.uint8), group=group)
    return torch.cat(received.unbind(), joined)


class Exchange(torch.autograd.Function):
    """`exchange`, whose gradients travel the same way back."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Group, cut: int, joined: int) -> torch.Tensor:
        ctx.way = group, joined, cut
        return swapped(tensor, group, cut, joined)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return swapped(gradient, *ctx.way), None, None, None


class Gather(torch.autograd.Function):
    """`gathered`, whose gradient is that of the rank's own part."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
        ctx.way = group, dim
        size = dist.get_world_size(group)
        rows = tensor.new_empty(size, *tensor.shape)
        own = tensor.contiguous().view(-1).view(torch.uint8)
        compat.all_gather_rows(rows.view(-1).view(torch.uint8), own, group)
        return torch.cat(rows.unbind(), dim)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return part_of(gradient, *ctx.way), None, None
