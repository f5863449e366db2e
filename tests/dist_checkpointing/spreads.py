"""Sharded state dicts of random spreads, and the values that they must have; the same on every rank."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.distributed as dist
from values import value_of

from torch_dcp_backport.dist_checkpointing import ShardedObject, ShardedTensor

DTYPES = (
    torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float64, torch.complex64, torch.uint8,
    torch.float16,
)  # fmt: skip
Box = tuple[tuple[int, ...], tuple[int, ...]]


def whole_values(seed: int) -> dict[str, torch.Tensor]:
    """Global tensors of random shapes and dtypes, some larger than a block of checksums."""
    draw = random.Random(seed)
    values = {}
    for number in range(6):
        most = draw.choice([5, 9, 60])
        shape = tuple(draw.randint(0 if number == 5 else 1, most) for _ in range(draw.randint(0, 3)))
        key = f"layer.{number}/weight"
        values[key] = value_of(f"{seed} {key}", shape, torch.float32).to(draw.choice(DTYPES))
    return values


def boxes_of(shape: tuple[int, ...], draw: random.Random) -> list[Box]:
    """A random irregular grid of boxes, or a random tree of cuts, which is no grid."""
    boxes: list[Box] = [((0,) * len(shape), shape)]
    is_grid = draw.random() < 0.5
    for _ in range(draw.randint(0, 4)):
        if not shape:
            break
        dim, place = draw.randrange(len(shape)), draw.randint(0, max(shape))
        if not is_grid:
            number = draw.randrange(len(boxes))
            dim, place = draw.randrange(len(shape)), draw.randint(0, max(shape))
            boxes[number : number + 1] = cut(boxes[number], dim, place)
        else:
            boxes = [part for box in boxes for part in cut(box, dim, place)]
    return boxes


def cut(box: Box, dim: int, place: int) -> list[Box]:
    offset, size = box
    start, stop = offset[dim], offset[dim] + size[dim]
    if not start < place < stop:
        return [box]
    later = (*offset[:dim], place, *offset[dim + 1 :])
    first, second = ((*size[:dim], extent, *size[dim + 1 :]) for extent in (place - start, stop - place))
    return [(offset, first), (later, second)]


def state_of(seed: int, spread: int, filled: bool) -> dict[str, Any]:
    """This rank's part of a random spread of the values: with them, or with zeros, or without data.

    A state dict of lists and dicts; boxes have any number of replicas, and ranks any number of boxes.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    draw = random.Random(f"{seed} {spread}")
    state: dict[str, Any] = {"tensors": {}, "objects": [], "step": seed, 7: ["a", {"nested": (1, 2)}]}
    for key, value in whole_values(seed).items():
        parts = []
        for offset, size in boxes_of(tuple(value.shape), draw):
            holders = draw.sample(range(world), draw.randint(1, world))
            strided = draw.random() < 0.3
            if rank not in holders:
                continue
            piece = value[tuple(slice(start, start + extent) for start, extent in zip(offset, size))].clone()
            if strided and piece.dim() > 1:
                piece = piece.transpose(0, 1).contiguous().transpose(0, 1)
            data = piece if filled else torch.zeros_like(piece) if len(parts) % 2 else None
            parts.append(
                ShardedTensor(
                    key, data, value.dtype, size, tuple(value.shape), offset, None, holders.index(rank)
                )
            )
        state["tensors"][key] = parts
    for number in range(2):
        holders = draw.sample(range(world), draw.randint(1, world))
        if rank in holders:
            data = {"of": number, "tensor": torch.arange(number + 3)} if filled else None
            state["objects"].append(ShardedObject("random state", data, (2,), (number,), holders.index(rank)))
    return state


def differences(loaded: dict[str, Any], seed: int, spread: int) -> list[str]:
    """What a load did not bring back to the bit."""
    wrong = []
    expected = state_of(seed, spread, True)
    for key, parts in expected["tensors"].items():
        got = loaded["tensors"].get(key, [])
        if len(parts) != len(got) or not all(same(a, b.data) for a, b in zip(got, parts)):
            wrong.append(key)
    objects = loaded.get("objects", [])
    for got, part in zip(objects, expected["objects"]):
        if got["of"] != part.data["of"] or not torch.equal(got["tensor"], part.data["tensor"]):
            wrong.append(part.unique_key)
    if len(objects) != len(expected["objects"]):
        wrong.append("objects")
    if (loaded["step"], loaded[7]) != (seed, ["a", {"nested": (1, 2)}]):
        wrong.append("common state")
    return wrong


def same(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two tensors have the same dtype and the same bytes."""
    first, second = (value.contiguous().reshape(-1).view(torch.uint8) for value in (got, expected))
    return (got.dtype, got.shape) == (expected.dtype, expected.shape) and torch.equal(first, second)
