"""Replicas of a tensor on several ranks: compared by digests before one rank, or several, write it.

A balanced save takes parts of a tensor from any rank that holds it. Where the ranks hold different values
(running statistics of a BatchNorm under DDP) these parts would be a mixture that no rank ever had.
"""

from __future__ import annotations

import hashlib
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Union

import torch

from torch_dcp_backport.dist_checkpointing._src.body import Words
from torch_dcp_backport.dist_checkpointing._src.table import Alike, Cells, Outline, box_text, packed_rows
from torch_dcp_backport.transfer import Problem, as_bytes, spell

#: Bytes of a tensor that are looked at together.
PIECE = 4 * 2**20
#: Odd numbers without a pattern.
FACTORS = (0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB)
#: Number of a group of ranks -> the rows of this rank's table that exactly these ranks hold.
Shared = dict[int, Words]
#: The same as it is sent: of each kind of tensors the rows, or the form of which they are all rows.
PackedShared = dict[int, list[Union[Words, int]]]
#: Number of a group -> the digest of its rows.
Digests = dict[int, bytes]
#: Row of a rank's table -> its digest.
RowDigests = dict[int, bytes]


class Replica(NamedTuple):
    """A box that several ranks hold: rank -> the row of its table."""

    key: str
    box: str
    rows: Mapping[int, int]


def replicas_in(cells: Cells) -> list[tuple[int, Replica]]:
    """Return every box that several ranks hold, with the number of their group; in the same order always."""
    numbers: dict[frozenset[int], int] = {}
    replicas = []
    for key, boxes in cells.items():
        for box, holders in boxes.items():
            # The main row first, where a rank has several.
            rows = {held.rank: held.number for held in reversed(holders)}
            if len(rows) > 1 and box.numel:
                number = numbers.setdefault(frozenset(rows), len(numbers))
                replicas.append((number, Replica(key, box_text(box), rows)))
    return replicas


def shared_by(alike: Alike) -> dict[int, PackedShared]:
    """Return what each rank shares with others; in each group of ranks in the same order."""
    shared: dict[int, PackedShared] = {rank: {} for rank in alike.tables}
    numbers: dict[frozenset[int], int] = {}
    outlines = {rank: table.rows().outline for rank, table in alike.tables.items()}
    for kind, cells in zip(alike.kinds, alike.cells):
        packed: dict[tuple[Outline, int], Union[Words, int]] = {}
        for box, holders in cells.items():
            # The main row first, where a rank has several.
            places = {held.rank: alike.which(held) for held in reversed(holders)}
            if len(places) < 2 or not box.numel:
                continue
            number = numbers.setdefault(frozenset(places), len(numbers))
            for rank, which in places.items():
                key = outlines[rank], which
                if key not in packed:
                    packed[key] = packed_rows(outlines[rank], kind.rows[outlines[rank]][which])
                shared[rank].setdefault(number, []).append(packed[key])
    return shared


def unpacked(shared: PackedShared, outline: Outline) -> Shared:
    """Return the rows that a rank with an outline shares."""
    return {
        number: array("I", (row for rows in parts for row in outline.rows_of(rows)))
        for number, parts in shared.items()
    }


def digests_of(data: Sequence[torch.Tensor], shared: Shared) -> Digests:
    """Return the digest of each group's rows of this rank."""
    rows = row_digests(data, sorted({row for own in shared.values() for row in own}))
    return {
        number: hashlib.blake2b(b"".join(rows[row] for row in own), digest_size=16).digest()
        for number, own in shared.items()
    }


def unlike(digests_by_rank: Mapping[int, Digests]) -> set[int]:
    """Return the groups whose ranks do not all hold the same values."""
    known: dict[int, bytes] = {}
    return {
        number
        for digests in digests_by_rank.values()
        for number, digest in digests.items()
        if known.setdefault(number, digest) != digest
    }


def problems_of(
    replicas: Iterable[tuple[int, Replica]], rows_by_rank: Mapping[int, RowDigests]
) -> dict[str, Problem]:
    """Return the keys of boxes that ranks hold with different values, each with the first such box."""
    problems: dict[str, Problem] = {}
    for _, replica in replicas:
        ranks: dict[bytes, list[int]] = {}
        for rank, row in sorted(replica.rows.items()):
            if row in rows_by_rank[rank]:
                ranks.setdefault(rows_by_rank[rank][row], []).append(rank)
        if len(ranks) > 1 and replica.key not in problems:
            first, *others = ranks.values()
            unlike = sorted(rank for others_alike in others for rank in others_alike)
            got, expected = f"other values on {spell(unlike)}", f"those of rank {first[0]}"
            problems[replica.key] = Problem(f"replicas of {replica.box} differ", replica.key, got, expected)
    return problems


@torch.no_grad()
def row_digests(data: Sequence[torch.Tensor], rows: Iterable[int]) -> RowDigests:
    """Return digests of some tensors: equal for equal values, and else different but by a rare chance.

    Tensors on the host are read here; others by their own device, which is asked once for all of its results.
    """
    facts: dict[int, bytes] = {}
    sums: dict[torch.device, list[torch.Tensor]] = {}
    numbers: dict[torch.device, list[int]] = {}
    for row in rows:
        tensor = data[row]
        facts[row] = f"{tensor.dtype} {tuple(tensor.shape)} ".encode()
        if tensor.is_quantized:
            facts[row] += quantization_of(tensor).encode()
            tensor = tensor.int_repr()
        if tensor.device.type == "cpu":
            crc = 0
            for piece in pieces_of(tensor):
                values: Any = piece.numpy()
                crc = zlib.crc32(values, crc)
            facts[row] += b"%08x" % crc
        else:
            sums.setdefault(tensor.device, []).append(mixed(tensor))
            numbers.setdefault(tensor.device, []).append(row)
    for device, words in sums.items():
        for row, word in zip(numbers[device], torch.stack(words).tolist()):
            facts[row] += repr(word).encode()
    return {row: hashlib.blake2b(text, digest_size=16).digest() for row, text in facts.items()}


def quantization_of(tensor: torch.Tensor) -> str:
    """Return the scales and zero points of a quantized tensor."""
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return f"{tensor.q_scale()!r} {tensor.q_zero_point()} "
    scales, points = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
    return f"{tensor.q_per_channel_axis()} {scales.tolist()} {points.tolist()} "


def pieces_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the bytes of a tensor's values in order; of what is not dense, a copy of one piece at a time.

    Cut by the shape alone: replicas may lie in memory in different ways.
    """
    tensor = tensor.detach().resolve_conj().resolve_neg()
    tensor = tensor if tensor.dim() else tensor.reshape(1)
    if tensor.numel():
        for piece in torch.split(tensor, max(1, PIECE // tensor[:1].nbytes)):
            yield as_bytes(piece.contiguous())


def mixed(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor's mixed words, on its device.

    Each word of 8 bytes is mixed with its place before it is added: a sum of the words themselves, weighted
    or not, does not see that two signs have changed.
    """
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    begin = 0
    for piece in pieces_of(tensor):
        if piece.numel() % 8 or piece.storage_offset() % 8:
            # No view as words begins there, or ends.
            piece = torch.nn.functional.pad(piece, (0, -piece.numel() % 8))
        words = piece.view(torch.int64)
        places = torch.arange(begin, begin + words.numel(), dtype=torch.int64, device=tensor.device)
        words = words + places.mul_(FACTORS[0])
        for factor in FACTORS[1:]:
            # The upper half goes into the lower half, where a product carries it up again.
            words.bitwise_xor_((words >> 32) & 0xFFFFFFFF).mul_(factor)
        total += words.bitwise_xor_((words >> 29) & 0x7FFFFFFFF).sum()
        begin += words.numel()
    return total
