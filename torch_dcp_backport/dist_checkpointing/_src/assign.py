"""The assignment of boxes to ranks that write them: each box once, each rank about as many bytes.

Pure functions of what all ranks have. Must never see a value.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from torch_dcp_backport.dist_checkpointing._src.table import Cells, HeldRow, RowTable
from torch_dcp_backport.transfer import Box

#: Smaller pieces of a replica are not worth a record of their own.
SMALLEST = 256 * 1024
#: A replica is cut until a piece is at most this part of a rank's mean share.
FINE = 20


class Item(NamedTuple):
    """A box that a rank writes of one of its rows."""

    number: int
    box: Box


class WriteShare(NamedTuple):
    """The boxes and objects that a rank writes."""

    tensors: list[Item]
    #: Numbers of rows of its table.
    objects: list[int]

    def __reduce__(self) -> tuple[Any, ...]:
        rows = [(item.number, item.box.offset, item.box.size) for item in self.tensors]
        return _share_of, (rows, self.objects)


def _share_of(rows: list[Any], objects: list[int]) -> WriteShare:
    # Layers have the same boxes.
    box_of = functools.lru_cache(maxsize=None)(Box)
    return WriteShare([Item(number, box_of(offset, size)) for number, offset, size in rows], objects)


def shares_of(
    tables: Mapping[int, RowTable], cells: Cells, balanced: bool = True, fixed: Collection[str] = ()
) -> dict[int, WriteShare]:
    """Return the share of each rank.

    Args:
        balanced: let any rank that holds a box write it, or a part of it; else its main replica.
        fixed: keys whose boxes their main replicas write in any case.
    """
    shares = {rank: WriteShare([], []) for rank in tables}
    load = dict.fromkeys(tables, 0)
    shared: list[tuple[int, Box, list[HeldRow]]] = []
    total = 0
    for key, boxes in cells.items():
        for box, holders in boxes.items():
            nbytes = box.numel * holders[0].row.dtype.itemsize
            total += nbytes
            by_rank = {held.rank: held for held in reversed(holders)}
            if len(by_rank) == 1 or not balanced or not nbytes or key in fixed:
                shares[holders[0].rank].tensors.append(Item(holders[0].number, box))
                load[holders[0].rank] += nbytes
            else:
                shared.append((nbytes, box, list(by_rank.values())))
    grain = max(total // (len(tables) * FINE), SMALLEST)
    pieces = [
        (part.numel * holders[0].row.dtype.itemsize, part, holders)
        for nbytes, box, holders in shared
        for part in cut(box, min(-(-nbytes // grain), 4 * len(holders)))
    ]
    # The largest first, each to the holder with the least so far; its own order among equals keeps it stable.
    pieces.sort(key=lambda piece: -piece[0])
    for nbytes, box, holders in pieces:
        held = min(holders, key=lambda held: (load[held.rank], held.rank))
        load[held.rank] += nbytes
        shares[held.rank].tensors.append(Item(held.number, box))
    assigned: set[str] = set()
    for rank, table in tables.items():
        for number, row in enumerate(table.objects):
            if row.is_main and row.unique_key not in assigned:
                assigned.add(row.unique_key)
                shares[rank].objects.append(number)
    for share in shares.values():
        # As the state dict has them: neighbours there are read together.
        share.tensors.sort(key=lambda item: (item.number, item.box.offset))
    return shares


def cut(box: Box, parts: int) -> list[Box]:
    """Cut a box into about so many pieces along its outermost axis, where a cut costs no shorter runs."""
    dim = next((dim for dim, extent in enumerate(box.size) if extent > 1), None)
    if parts <= 1 or dim is None:
        return [box]
    rows = -(-box.size[dim] // parts)
    pieces = []
    while box.size[dim] > rows:
        pieces.append(box.head(dim, rows))
        box = box.tail(dim, rows)
    return [*pieces, box]
