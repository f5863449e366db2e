"""Optimizer states as Megatron's distributed optimizer has them: boxes, flattened and cut into ranges."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple, Optional

import torch
import torch.distributed as dist
from values import value_of

from torch_dcp_backport.dist_checkpointing import ShardedTensor

#: key -> global shape with prepended axes, how many axes are prepended, dtype.
TENSORS = {
    "vector": ((24,), 0, torch.float32),
    "matrix": ((12, 10), 0, torch.float32),
    "wide": ((4, 5000), 0, torch.bfloat16),
    "stack": ((2, 8, 4), 1, torch.float64),
}


class Grid(NamedTuple):
    """Tensor parallel ranks, each box flattened over the rest of them."""

    #: Along the first axis that is not prepended.
    tensor_parallel: int
    #: Whether ranks have ranges of a box, or replicas of all of it as a box.
    is_flat: bool = True


def parts(kind: Any, grid: Grid, filled: bool, name: str = "exp_avg") -> dict[str, Any]:
    """This rank's part of each tensor; `kind` is ShardedTensor, ours or Megatron's."""
    world, rank = dist.get_world_size(), dist.get_rank()
    cuts, sharers = grid.tensor_parallel, world // grid.tensor_parallel
    state: dict[str, Any] = {}
    for key, (shape, prepended, dtype) in TENSORS.items():
        whole = value_of(key, shape, torch.float32).to(dtype)
        for layer in range(shape[0] if prepended else 1):
            part = whole[layer] if prepended else whole
            offsets = [(0, layer, shape[0])] * prepended + [(prepended, rank % cuts, cuts)]
            box = part.chunk(cuts)[rank % cuts].contiguous()
            made = kind.from_rank_offsets(
                f"{name}.{key}", box, *offsets, replica_id=rank // cuts, prepend_axis_num=prepended
            )
            if grid.is_flat:
                run = range_of(box.numel(), rank // cuts, sharers)
                data = box.reshape(-1)[run].clone()
                made = replace(made, data=None, replica_id=0)
                made = replace(made, flattened_range=run, data=data)
            if not filled:
                made.data = torch.zeros_like(made.data) if len(state) % 2 else None
            state[f"{key}.{layer}"] = made
    return state


def range_of(numel: int, place: int, sharers: int) -> slice:
    """Uneven ranges that end within rows; with many sharers one is empty."""
    ends = [numel * each * each // (sharers * sharers) for each in range(sharers + 1)]
    return slice(ends[place], ends[place + 1])


def expected(grid: Grid) -> dict[str, torch.Tensor]:
    return {name: part.data for name, part in parts(ShardedTensor, grid, True).items()}


def wrong(loaded: dict[str, Any], grid: Grid) -> list[str]:
    """The names whose values are not the saved ones, to the bit."""
    values = expected(grid)
    return [name for name in values if not alike(loaded.get(name), values[name])]


def alike(got: Optional[torch.Tensor], value: torch.Tensor) -> bool:
    if got is None:
        # Megatron leaves out what has no elements.
        return value.numel() == 0
    return (got.dtype, got.shape) == (value.dtype, value.shape) and torch.equal(got, value)
