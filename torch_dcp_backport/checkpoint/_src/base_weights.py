"""The frozen weights below adapters: what a checkpoint of adapters alone leaves out, and their checksums.

A weight is known by a checksum that does not depend on how ranks share it. Must never change a weight.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Optional

import torch
import torch.distributed as dist

from torch_dcp_backport import compat
from torch_dcp_backport.transfer import Box, layout_of, row_major, whole

#: Numbers that are whole numbers of 64 bits at once.
PIECE = 2**20
#: Odd, and below 2**63: places of numbers become factors that have nothing to do with each other.
MULTIPLIER = 0x1E3779B97F4A7C15
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
    local, counts, box = tensor, is_first, whole(tuple(tensor.shape))
    if isinstance(tensor, compat.DTensor):
        layout, rank = layout_of(tensor), dist.get_rank()
        counts, box = layout.is_first_holder(rank), layout.own_box(rank)
        local = compat.local_part(tensor)
    if not counts or not local.numel():
        return 0
    words = local.detach().contiguous().view(-1)
    words = words.view(WORDS.get(words.element_size(), torch.uint8))
    per_element = words.numel() // local.numel()
    total = 0
    for start in range(0, words.numel(), PIECE):
        numbers = words[start : start + PIECE].long()
        places = torch.arange(start, start + len(numbers), device=numbers.device)
        places = _place_in_whole(places, box, tuple(tensor.shape), per_element)
        # Whole numbers wrap, so the order of a sum does not count. The place of a number does: weights of
        # another layout (rows of a rotary projection in another order) have the same numbers.
        places *= MULTIPLIER
        places ^= places >> 29
        total += int((numbers * (places | 1)).sum())
    return total


def _place_in_whole(places: torch.Tensor, box: Box, shape: tuple[int, ...], per_element: int) -> torch.Tensor:
    """Return where words stand in a whole tensor, of where they stand in a dense tensor of a box."""
    strides = row_major(shape)
    if box.size[1:] == shape[1:]:
        first = box.offset[0] * strides[0] if shape else 0
        return places + first * per_element
    element, word = places // per_element, places % per_element
    in_whole = torch.zeros_like(places)
    for extent, offset, stride in zip(reversed(box.size), reversed(box.offset), reversed(strides)):
        in_whole += (element % extent + offset) * stride
        element //= extent
    return in_whole * per_element + word


def added(by_rank: Mapping[int, Optional[Sums]]) -> dict[str, str]:
    """Return name -> shape and checksum of the whole weight, of all ranks' sums."""
    totals: dict[str, tuple[tuple[int, ...], int]] = {}
    for sums in by_rank.values():
        for name, (shape, own) in (sums or {}).items():
            totals[name] = (shape, totals.get(name, (shape, 0))[1] + own)
    return {name: f"{shape} {total % 2**64:016x}" for name, (shape, total) in totals.items()}
