"""The frozen weights below adapters: what a checkpoint of adapters alone leaves out, and their checksums.

A weight is known by a checksum that does not depend on how ranks share it. Must never change a weight.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, Optional

import torch
import torch.distributed as dist

from torch_dcp_backport import compat
from torch_dcp_backport.transfer import Box, layout_of, row_major, whole

#: Numbers that are whole numbers of 64 bits at once.
PIECE = 2**20
#: Odd, and below 2**63: places of numbers become factors that have nothing to do with each other.
MULTIPLIER = 0x1E3779B97F4A7C15
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Sum(NamedTuple):
    """The sum of the elements that a rank has of a weight."""

    shape: tuple[int, ...]
    #: The lowest of the ranks that have the weight together: those of its mesh, or one that has it whole.
    holder: int
    total: int


#: By name.
Sums = Mapping[str, Sum]


def parted(model: Mapping[str, Any], frozen: Collection[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what a checkpoint of adapters alone has of a model's state dict, and what it leaves out.

    Adapters are saved whether they are trained or not, and so is all else that is trained, and buffers.
    """
    left_out = {name for name in frozen if ".lora_" not in name}
    kept = {name: value for name, value in model.items() if name not in left_out}
    return kept, {name: value for name, value in model.items() if name in left_out}


def sums_of(weights: Mapping[str, Any]) -> dict[str, Sum]:
    """Return the sums of this rank's elements; of ranks of a mesh with the same elements one counts them.

    Args:
        weights: name -> tensor, plain or a DTensor.
    """
    return {name: _sum_of(tensor) for name, tensor in weights.items()}


def _sum_of(tensor: torch.Tensor) -> Sum:
    shape, rank = tuple(tensor.shape), dist.get_rank() if dist.is_initialized() else 0
    local, counts, box, holder = tensor, True, whole(shape), rank
    if isinstance(tensor, compat.DTensor):
        layout = layout_of(tensor)
        counts, box = layout.is_first_holder(rank), layout.own_box(rank)
        local, holder = compat.local_part(tensor), min(layout.mesh.ranks if layout.mesh else [rank])
    if not counts or not local.numel():
        return Sum(shape, holder, 0)
    words = local.detach().contiguous().view(-1)
    words = words.view(WORDS.get(words.element_size(), torch.uint8))
    per_element = words.numel() // local.numel()
    total = 0
    for start in range(0, words.numel(), PIECE):
        numbers = words[start : start + PIECE].long()
        places = torch.arange(start, start + len(numbers), device=numbers.device)
        places = _place_in_whole(places, box, shape, per_element)
        # Whole numbers wrap, so the order of a sum does not count. The place of a number does: weights of
        # another layout (rows of a rotary projection in another order) have the same numbers.
        places *= MULTIPLIER
        places ^= places >> 29
        total += int((numbers * (places | 1)).sum())
    return Sum(shape, holder, total)


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
    """Return name -> shape and checksum of the whole weight, of all ranks' sums.

    Of a weight that several meshes or ranks have whole, such as a tied one of two stages, the first counts.
    """
    every: dict[str, dict[int, Sum]] = {}
    for sums in by_rank.values():
        for name, own in (sums or {}).items():
            known = every.setdefault(name, {})
            before = known[own.holder].total if own.holder in known else 0
            known[own.holder] = own._replace(total=before + own.total)
    firsts = {name: known[min(known)] for name, known in every.items()}
    return {name: f"{first.shape} {first.total % 2**64:016x}" for name, first in firsts.items()}
