"""The rectangles ("blocks") of HF tensors that each rank holds, and this rank's views of its own.

Two blocks of a tensor are equal (then they are replicas) or have nothing in common. Knows neither files nor
models; must never move data.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Optional

import torch

from torch_dcp_backport.transfer import (
    Along,
    Box,
    Boxes,
    Piece,
    Problem,
    TensorInfo,
    chunks,
    intersection,
    overlaps,
    part_of,
    whole,
)


class Part(NamedTuple):
    """A block that this rank holds, and its memory.

    Args:
        box: the block in the HF tensor's own coordinates, in elements.
        into: a view of a parameter, of the block's shape; any strides, any dtype.
    """

    box: Box
    into: torch.Tensor


PART_BOX: Callable[[Part], Box] = operator.attrgetter("box")


def firsts_of(parts: Iterable[Part]) -> Iterable[Part]:
    """Return the first of the parts of each block."""
    firsts: dict[Box, Part] = {}
    for part in parts:
        firsts.setdefault(part.box, part)
    return firsts.values()


@dataclass(frozen=True)
class Share:
    """HF tensors that are spread over ranks, as this rank sees them.

    All fields but `parts` are the same on every rank.

    Args:
        tensors: HF key -> shape and dtype (of the files, or of an export), in the order in which they move.
        spreads: HF key -> the blocks of every rank.
        parts: HF key -> this rank's parts. Two of them may be the same block.
        relayed: HF key -> the dtype that all ranks hold it in; replicas may pass on these tensors.
    """

    tensors: Mapping[str, TensorInfo]
    spreads: Mapping[str, Boxes]
    parts: Mapping[str, Sequence[Part]]
    relayed: Mapping[str, torch.dtype] = field(default_factory=dict)

    def view(self, key: str, box: Box) -> torch.Tensor:
        """Return this rank's memory of a box that lies in a single block of the rank.

        Args:
            key: the HF key of a tensor that this rank has parts of.
            box: a box in the tensor's own coordinates, in elements.
        """
        part = next(part for part, common in self.near[key].common(box) if common == box)
        return part_of(part.into, part.box, box)

    def views(self, key: str, box: Box) -> list[Part]:
        """Return this rank's memory of a box that one of its blocks holds, or several together.

        Args:
            key: the tensor's key.
            box: the box, in elements of the tensor.

        Returns:
            the parts of the box, each once: its box, and a view of the memory.
        """
        # By `view`: a share may compute what it gives, as that of merged adapters does.
        return [Part(common, self.view(key, common)) for _, common in self.near[key].common(box)]

    @functools.cached_property
    def near(self) -> dict[str, Along[Part]]:
        """HF key -> this rank's parts of the tensor, each block once, to look among."""
        return {key: Along(firsts_of(parts), PART_BOX) for key, parts in self.parts.items()}

    def copies(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Yield (key, to, from) for each block that is here again: its memory, and that of the first."""
        for key, parts in self.parts.items():
            first: dict[Box, torch.Tensor] = {}
            for box, into in parts:
                if box in first:
                    yield key, into, first[box]
                first.setdefault(box, into)


def gaps(key: str, spread: Boxes) -> list[Problem]:
    """Return the problems of a tensor's blocks: some overlap, or no rank holds an element.

    Args:
        key: the HF key of the tensor, for the text of a problem.
        spread: the blocks of all ranks.
    """
    distinct = list(dict.fromkeys(box for _, boxes in spread.by_rank for box in boxes if box.numel))
    for box, other in overlaps(distinct):
        ranks = [[rank for rank, boxes in spread.by_rank if block in boxes] for block in (box, other)]
        what = f"ranks {ranks[0]} and {ranks[1]} hold different blocks with elements in common"
        return [Problem(what, key, f"{box} and {other}", "equal blocks, or nothing in common")]
    held, numel = sum(box.numel for box in distinct), math.prod(spread.shape)
    if held < numel:
        return [Problem("no rank holds all of it", key, f"{held} elements", f"{numel} of {spread.shape}")]
    return []


#: HF key -> the pieces that move between two agreements.
Window = dict[str, list[Piece]]


def windows(
    tensors: Mapping[str, TensorInfo], nbytes: int, only: Optional[Mapping[str, Sequence[Box]]] = None
) -> Iterator[Window]:
    """Yield all tensors, or only some boxes, in windows of `nbytes`: large ones are cut, first along dim 0.

    The pieces of a window do not overlap in a buffer of `nbytes`.
    """
    boxes = {key: (whole(info.shape),) for key, info in tensors.items()} if only is None else only
    keyed = ((key, box, tensors[key].dtype) for key in boxes for box in boxes[key])
    for pieces in chunks(keyed, nbytes):
        window: Window = {}
        for piece in pieces:
            window.setdefault(str(piece.key), []).append(piece)
        yield window


def nbytes_of_window(window: Window, tensors: Mapping[str, TensorInfo]) -> int:
    return sum(
        piece.box.numel * tensors[key].dtype.itemsize for key, pieces in window.items() for piece in pieces
    )


def clipped(spread: Boxes, pieces: Sequence[Piece]) -> Boxes:
    """Return the part of a spread that lies in some pieces of the tensor."""
    rows = []
    for rank, boxes in spread.by_rank:
        parts = (intersection(box, piece.box) for box in boxes for piece in pieces)
        kept = tuple(part for part in parts if part is not None)
        if kept:
            rows.append((rank, kept))
    return Boxes(spread.shape, tuple(rows))


def within(pieces: Sequence[Piece], box: Box) -> Piece:
    """Return the piece that a box lies in."""
    return next(piece for piece in pieces if intersection(piece.box, box) == box)
