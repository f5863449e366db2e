"""Cuts: the rectangles of HF tensors that make up a parameter on a TP rank. Arithmetic alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from torch_dcp_backport.megatron._src.names import Role
from torch_dcp_backport.megatron._src.shape import Shape
from torch_dcp_backport.transfer import Box, whole


class Cut(NamedTuple):
    """A block of an HF tensor, and its place in the parameter."""

    key: str
    #: In the HF tensor.
    box: Box
    #: In the parameter; of the same size, but for axes.
    at: Box
    #: Of each axis of the parameter its axis in the HF tensor, whose others are 1 long; empty: all the same.
    axes: tuple[int, ...] = ()

    def in_tensor(self, memory: torch.Tensor) -> torch.Tensor:
        """Return a view of the parameter's memory with the axes of the HF tensor."""
        if not self.axes:
            return memory
        others = [axis for axis in range(len(self.box.size)) if axis not in self.axes]
        order = (*self.axes, *others)
        for _ in others:
            memory = memory.unsqueeze(-1)
        return memory.permute([order.index(axis) for axis in range(len(order))])

    def in_parameter(self, data: torch.Tensor) -> torch.Tensor:
        """Return a view of a part of the HF tensor with the axes of the parameter."""
        if not self.axes:
            return data
        others = [axis for axis in range(len(self.box.size)) if axis not in self.axes]
        data = data.permute(*self.axes, *others)
        for _ in others:
            data = data.squeeze(-1)
        return data

    def place(self, part: Box) -> Box:
        """Return the place in the parameter of a part of `box`."""
        axes = self.axes or range(len(part.size))
        start = (at + part.offset[axis] - self.box.offset[axis] for at, axis in zip(self.at.offset, axes))
        return Box(tuple(start), tuple(part.size[axis] for axis in axes))


class Holding(NamedTuple):
    """A parameter: its cuts and the padding tile it."""

    shape: tuple[int, ...]
    cuts: tuple[Cut, ...]
    padding: tuple[Box, ...] = ()


class Rows(NamedTuple):
    """Some rows of an HF tensor."""

    key: str
    start: int
    height: int


class Place(NamedTuple):
    """A parameter's place in the TP group."""

    #: "verl" or "mcore".
    style: str
    tp_rank: int
    tp_size: int
    #: Of experts.
    etp_rank: int = 0
    etp_size: int = 1


def holding_of(
    role: Role, keys: Sequence[str], shape: Shape, place: Place, local: tuple[int, ...]
) -> Holding:
    """Return the cuts and the padding that tile a parameter.

    Args:
        keys: the HF keys of the role, in its order.
        local: the parameter's own shape; the padding of a vocabulary follows from it alone, and whether a
            parameter is cut that releases of Megatron cut or not.

    Raises:
        ValueError: the rows of all TP ranks are fewer than the vocabulary has.
    """
    full = shape.hf_shape(keys[0])
    if role.expert is not None:
        place = Place(place.style, place.etp_rank, place.etp_size)
    if role.expert is not None and shape.tensor(keys[0]).is_packed:
        return _of_all_experts(role, keys[0], shape, place)
    if role.cut == "vocab":
        return _vocab(keys[0], full, place, local)
    if role.cut == "columns":
        width = full[1] // place.tp_size
        size = (full[0], width)
        return Holding(size, (Cut(keys[0], Box((0, place.tp_rank * width), size), whole(size)),))
    if role.cut == "qkv":
        return _stacked(_qkv(keys, shape, place), full[1:])
    if role.cut == "gate_up":
        # Two tensors, or two halves of one.
        height = full[0] * len(keys) // 2
        count = height // place.tp_size
        first = place.tp_rank * count
        starts = (first, first) if len(keys) == 2 else (first, height + first)
        return _stacked(
            (Rows(key, start, count) for key, start in zip((keys[0], keys[-1]), starts)), full[1:]
        )
    if role.cut == "rows" or (role.cut == "rows or whole" and local != full):
        count = full[0] // place.tp_size
        return _stacked([Rows(keys[0], place.tp_rank * count, count)], full[1:])
    return Holding(full, (Cut(keys[0], whole(full), whole(full)),))


def _of_all_experts(role: Role, key: str, shape: Shape, place: Place) -> Holding:
    """Return the cuts of an expert's parameter in a tensor that has all experts of the layer."""
    full, sizes = shape.hf_shape(key), shape.tensor(key).sizes
    assert role.expert is not None, "it is of an expert"
    own = shape.number("expert_rows") // place.tp_size
    names = ("expert_rows", "hidden") if role.cut == "gate_up" else ("hidden", "expert_rows")
    axes = tuple(sizes.index(name) for name in names if name in sizes)
    offset, size = [role.expert] + [0] * (len(full) - 1), [1, *full[1:]]
    if "expert_rows" in sizes:
        rows = sizes.index("expert_rows")
        offset[rows], size[rows] = place.tp_rank * own, own
    if role.cut != "gate_up":
        shown = tuple(size[axis] for axis in axes)
        return Holding(shown, (Cut(key, Box(tuple(offset), tuple(size)), whole(shown), axes),))
    half, cuts = sizes.index("2"), []
    size[half] = 1
    shown = tuple(size[axis] for axis in axes)
    for number in (0, 1):
        offset[half] = number
        at = Box((number * own, *(0 for _ in shown[1:])), shown)
        cuts.append(Cut(key, Box(tuple(offset), tuple(size)), at, axes))
    return Holding((2 * own, *shown[1:]), tuple(cuts))


def value_head(key: str, shape: Shape) -> Holding:
    """Return the cut of a value head: a single row, which every TP rank holds in full."""
    size = (1, shape.hidden)
    return Holding(size, (Cut(key, whole(size), whole(size)),))


def _vocab(key: str, full: tuple[int, ...], place: Place, local: tuple[int, ...]) -> Holding:
    vocab, hidden = full
    rows = local[0] if local else 0
    if rows * place.tp_size < vocab:
        raise ValueError(f"{rows} rows on each of {place.tp_size} TP ranks, where the vocabulary has {vocab}")
    start = min(place.tp_rank * rows, vocab)
    count = min(rows, vocab - start)
    cuts = (Cut(key, Box((start, 0), (count, hidden)), Box((0, 0), (count, hidden))),) if count else ()
    padding = (Box((count, 0), (rows - count, hidden)),) if count < rows else ()
    return Holding((rows, hidden), cuts, padding)


def _qkv(keys: Sequence[str], shape: Shape, place: Place) -> list[Rows]:
    """The rows of a rank's fused projection, from top to bottom."""
    dim, heads, groups = (shape.number(name) for name in ("head_dim", "heads", "kv_heads"))
    if len(keys) == 3:
        q, k, v = keys
        at_k = at_v = 0
    else:
        # One tensor has them all, each from a row of its own on.
        q = k = v = keys[0]
        at_k, at_v = heads * dim, (heads + groups) * dim
    rank, size = place.tp_rank, place.tp_size
    if place.style == "verl":
        # Fewer KV heads than ranks: neighbours hold the same head.
        first, count = rank * groups // size, max(1, groups // size)
        own = heads // size * dim
        return [
            Rows(q, rank * own, own),
            Rows(k, at_k + first * dim, count * dim),
            Rows(v, at_v + first * dim, count * dim),
        ]
    # megatron-core: all groups in a row, each with its query heads, its key and its value, and of
    # these rows an equal share for each rank, wherever in a group that ends.
    per_group = heads // groups * dim
    every: list[Rows] = []
    for group in range(groups):
        every += [
            Rows(q, group * per_group, per_group),
            Rows(k, at_k + group * dim, dim),
            Rows(v, at_v + group * dim, dim),
        ]
    share = (heads + 2 * groups) * dim // size
    return list(_window(every, rank * share, share))


def _window(every: Iterable[Rows], start: int, count: int) -> Iterable[Rows]:
    """Yield `count` rows of a stack, from its row `start` on."""
    position = 0
    for key, first, rows in every:
        low, high = max(start, position), min(start + count, position + rows)
        if low < high:
            yield Rows(key, first + low - position, high - low)
        position += rows


def _stacked(rows: Iterable[Rows], rest: tuple[int, ...]) -> Holding:
    """Stack rows into a parameter; `rest` is the shape of a row."""
    cuts, height = [], 0
    zeros = (0,) * len(rest)
    for key, start, count in rows:
        size = (count, *rest)
        cuts.append(Cut(key, Box((start, *zeros), size), Box((height, *zeros), size)))
        height += count
    return Holding((height, *rest), tuple(cuts))
