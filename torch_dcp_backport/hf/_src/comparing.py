"""Comparison of two HF tensors that ranks or a source hold, bit by bit.

Must never hold more than a piece of each.
"""

from __future__ import annotations

import functools
import hashlib
import zlib

import torch

from torch_dcp_backport.hf._src.blocks import Share, windows
from torch_dcp_backport.hf._src.source import Source
from torch_dcp_backport.hf._src.writing import HostBytes
from torch_dcp_backport.transfer import Box, Call, Terms, as_bytes, chunks, holders_of, intersection

#: Bytes of a tensor that are compared at once.
STEP_BYTES = 2**20


@torch.no_grad()
def differ(call: Call, share: Share, first_key: str, second_key: str) -> bool:
    """Return whether two tensors of the same shape and dtype differ in a bit; the same on every rank.

    Checksums travel, not values: ranks that hold parts of the first may hold nothing of the second.

    Raises:
        RuntimeError: values could not be read on some rank; on every rank.
        TransferError: a rank is gone, or the group's timeout is over.
    """
    ranks = call.ranks
    firsts, seconds = (holders_of(share.spreads[key], ranks) for key in (first_key, second_key))
    regions = [common for first in firsts for second in seconds if (common := intersection(first, second))]
    own: dict[tuple[str, Box], bytes] = {}
    host_bytes = HostBytes(STEP_BYTES)
    for key, holders in ((first_key, firsts), (second_key, seconds)):
        mine = [box for box, having in holders.items() if having[0] == call.rank]
        for region in regions:
            if any(intersection(box, region) == region for box in mine):
                with call.guard(key):
                    own[key, region] = checksum(share, key, region, host_bytes)
    by_region: dict[tuple[str, Box], bytes] = {}
    for table in call.agree_on_wants(terms=Terms(condition=f"{own}", note=own)).tables:
        by_region.update(table.note)
    return any(by_region[first_key, region] != by_region[second_key, region] for region in regions)


def checksum(share: Share, key: str, region: Box, host_bytes: HostBytes) -> bytes:
    """Return a checksum of the bytes of a box that this rank holds, in the dtype of the files."""
    sums, products = [], torch.empty(STEP_BYTES // 8, dtype=torch.int64, device="cpu")
    for pieces in chunks([(key, region, share.tensors[key].dtype)], STEP_BYTES):
        sums += [sum_of(host_bytes(share.view(key, piece.box), piece.dtype), products) for piece in pieces]
    return b"".join(sums)


def sum_of(data: memoryview, products: torch.Tensor) -> bytes:
    """Return CRC32 and the sum of words times odd random factors, modulo 2**64, of `STEP_BYTES` at most.

    Faster than a digest, but not safe against forgery. A few flipped bits may leave one of the two as it was
    (the second: the highest bits of two words), and change the other.

    Args:
        products: memory for the products, which is slow to allocate.
    """
    words = torch.frombuffer(data, dtype=torch.uint8)
    if len(data) % 8 or words.data_ptr() % 8:
        padded = torch.zeros(-(-len(data) // 8) * 8, dtype=torch.uint8, device="cpu")
        padded[: len(data)] = words
        words = padded
    count = words.numel() // 8
    total = int(torch.mul(words.view(torch.int64), factors()[:count], out=products[:count]).sum())
    return zlib.crc32(data).to_bytes(4, "big") + total.to_bytes(8, "big", signed=True)


@functools.lru_cache(maxsize=1)
def factors() -> torch.Tensor:
    """Return random odd numbers, the same on every rank."""
    noise = bytearray(hashlib.shake_128(b"torch_dcp_backport").digest(STEP_BYTES))
    return torch.frombuffer(noise, dtype=torch.int64).bitwise_or_(1)


def equal_in(source: Source, first_key: str, second_key: str) -> bool:
    """Return whether two tensors of a source have the same shape, dtype and bits."""
    if source.tensors[first_key] != source.tensors[second_key]:
        return False
    pairs = (
        (source.part(first_key, piece.box), source.part(second_key, piece.box))
        for window in windows({first_key: source.tensors[first_key]}, STEP_BYTES)
        for piece in window[first_key]
    )
    # As bytes: NaN is not equal to itself.
    return all(
        torch.equal(as_bytes(first.contiguous()), as_bytes(second.contiguous())) for first, second in pairs
    )
