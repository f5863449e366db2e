"""Moves of windows of HF tensors between the first rank and the ranks that hold their blocks.

Knows shares and the call; must never allocate a full tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch_dcp_backport.hf._src.blocks import Share, Window, clipped
from torch_dcp_backport.transfer import (
    DOUBTFUL,
    UNCHANGED,
    Agreement,
    Box,
    Boxes,
    Call,
    Failure,
    Key,
    Lane,
    Memories,
    Memory,
    Route,
    backend_of,
    lane_of,
    move,
    spread_of,
)


def send_window(call: Call, agreement: Agreement, share: Share, window: Window, read: Memory) -> None:
    """Bring a window from the first rank, which reads it, to every rank's parts.

    A replicated block goes to a single holder: after every turn twice as many have it, from a neighbour. If
    the window is broadcast, all have it at once.

    A copy that fails is a problem of the call when all messages are over: an agreement has to follow.
    """
    failures: list[Failure] = []
    want = {key: clipped(share.spreads[key], pieces) for key, pieces in window.items()}
    relayed = () if goes_to_all(call, agreement) else share.relayed
    turns = {key: turns_of(want[key], call.ranks[0]) for key in window if key in relayed}
    have = {key: pieces_at(call.ranks[:1], share, window, key) for key in window}
    direct = {key: turns[key][0][1] if key in turns else want[key] for key in window}
    move(call, agreement, _routes(share, have, direct), Memories(read, share.view, DOUBTFUL, failures.append))
    for number in range(1, max(map(len, turns.values()), default=0)):
        routes: dict[Key, Route] = {
            key: Route(*turns[key][number], share.relayed[key]) for key in turns if number < len(turns[key])
        }
        move(call, agreement, routes, Memories(share.view, share.view, DOUBTFUL, failures.append))
    # Not before: a rank with problems takes no part in another turn.
    for error, key in failures[:1]:
        call.record(call.problem_of(error, key), error)


def goes_to_all(call: Call, agreement: Agreement) -> bool:
    """Return whether the first rank broadcasts the tensors that it sends."""
    return (
        len(call.ranks) > 1 and lane_of(backend_of(call.group, agreement.device), senders=1) is Lane.BROADCAST
    )


def turns_of(want: Boxes, first: int) -> list[tuple[Boxes, Boxes]]:
    """Return (senders' boxes, receivers' boxes) of every turn; in the first all comes from the first rank."""
    holders: dict[Box, list[int]] = {}
    for rank, boxes in want.by_rank:
        for box in boxes:
            holders.setdefault(box, []).append(rank)
    turns: list[tuple[dict[int, list[Box]], dict[int, list[Box]]]] = [({}, {})]
    for box, ranks in holders.items():
        others = [rank for rank in ranks if rank != first]
        for rank in others[:1] + [rank for rank in ranks if rank == first]:
            turns[0][1].setdefault(rank, []).append(box)
        step, number = 1 << (len(others) - 1).bit_length() if others else 0, 1
        while step > 1:
            # The ranks halfway between two that have the block.
            step //= 2
            if number == len(turns):
                turns.append(({}, {}))
            for part, start in zip(turns[number], (0, step)):
                for rank in others[start :: 2 * step]:
                    part.setdefault(rank, []).append(box)
            number += 1
    return [
        (spread_of(want.shape, senders), spread_of(want.shape, receivers)) for senders, receivers in turns
    ]


def bring_window(call: Call, agreement: Agreement, share: Share, window: Window, write: Memory) -> None:
    """Bring a window to the first rank, into the memory of `write`; it is cast before it travels.

    Every element comes from the nearest of its holders.
    """
    have = {key: clipped(share.spreads[key], pieces) for key, pieces in window.items()}
    want = {key: pieces_at(call.ranks[:1], share, window, key) for key in window}
    move(call, agreement, _routes(share, have, want), Memories(share.view, write, UNCHANGED))


def bring_to_all(call: Call, agreement: Agreement, share: Share, window: Window, write: Memory) -> None:
    """Bring a window to every rank, into the memory of its `write`."""
    have = {key: clipped(share.spreads[key], pieces) for key, pieces in window.items()}
    want = {key: pieces_at(call.ranks, share, window, key) for key in window}
    move(call, agreement, _routes(share, have, want), Memories(share.view, write, UNCHANGED))


def pieces_at(ranks: Sequence[int], share: Share, window: Window, key: str) -> Boxes:
    """Return the window's pieces of a tensor as boxes of some ranks, each of which has all of them."""
    boxes = [piece.box for piece in window[key]]
    return spread_of(share.tensors[key].shape, dict.fromkeys(ranks, boxes))


def _routes(share: Share, have: Mapping[str, Boxes], want: Mapping[str, Boxes]) -> dict[Key, Route]:
    return {key: Route(have[key], want[key], share.tensors[key].dtype) for key in have}
