"""The frozen weights below adapters: what a checkpoint of adapters alone leaves out, and their checksums.

A weight is known by a checksum that does not depend on how ranks share it. Must never change a weight.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Optional

import torch

from torch_dcp_backport import compat
from torch_dcp_backport.transfer import layout_of

#: Elements that are whole numbers of 64 bits at once.
PIECE = 4 * 2**20
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

#: Name -> shape, and the sum of this rank's elements.
Sums = Mapping[str, tuple[tuple[int, ...], int]]


def parted(model: Mapping[str, Any], frozen: Collection[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what a checkpoint of adapters alone has of a model's state dict, and what it leaves out.

    Adapters are saved whether they are trained or not, and so is all else that is trained, and buffers.
    """
    left_out = {name for name in frozen if ".lora_" not in name}
    kept = {name: value for name, value in model.items() if name not in left_out}
    return kept, {name: value for name, value in model.items() if name in left_out}


def sums_of(weights: Mapping[str, Any], *, is_first: bool) -> Sums:
    """Return the sums of this rank's elements; each element counts on one rank.

    Args:
        weights: name -> tensor, plain or a DTensor.
        is_first: whether plain tensors, which every rank has, count here.
    """
    return {name: (tuple(tensor.shape), _sum_of(tensor, is_first)) for name, tensor in weights.items()}


def _sum_of(tensor: torch.Tensor, is_first: bool) -> int:
    local, counts = tensor, is_first
    if isinstance(tensor, compat.DTensor):
        place = tensor.device_mesh.get_coordinate()
        counts = place is not None and not any(place[dim] for dim in layout_of(tensor).replica_dims)
        local = compat.local_part(tensor)
    if not counts:
        return 0
    words = local.detach().contiguous().view(-1)
    words = words.view(WORDS.get(words.element_size(), torch.uint8))
    total = 0
    for piece in torch.split(words, PIECE):
        numbers = piece.long()
        # Whole numbers wrap: the sum does not depend on the order. The square tells apart what has one sum.
        total += int(numbers.sum()) + 0x9E3779B1 * int((numbers * numbers).sum())
    return total


def added(by_rank: Mapping[int, Optional[Sums]]) -> dict[str, str]:
    """Return name -> shape and checksum of the whole weight, of all ranks' sums."""
    totals: dict[str, tuple[tuple[int, ...], int]] = {}
    for sums in by_rank.values():
        for name, (shape, own) in (sums or {}).items():
            totals[name] = (shape, totals.get(name, (shape, 0))[1] + own)
    return {name: f"{shape} {total % 2**64:016x}" for name, (shape, total) in totals.items()}
