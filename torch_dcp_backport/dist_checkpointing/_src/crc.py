"""The CRC32 of bytes whose parts' CRC32 are known: nothing is read again.

CRC32 is the rest of a division of polynomials over bits; behind a part, others multiply it by a power of x.
"""

from __future__ import annotations

import functools

#: CRC-32/ISO-HDLC, as zlib's: bit 31 stands for x**0.
POLYNOMIAL = 0xEDB88320
ONE = 1 << 31


def combined(first: int, second: int, nbytes: int) -> int:
    """Return the CRC32 of two runs of bytes in sequence, of which the second has `nbytes`."""
    return _product(_shift(nbytes), first) ^ second


@functools.lru_cache(maxsize=1024)
def _shift(nbytes: int) -> int:
    """Return x to the power of the bits in so many bytes."""
    result, square = ONE, ONE >> 8
    while nbytes:
        if nbytes & 1:
            result = _product(square, result)
        square = _product(square, square)
        nbytes >>= 1
    return result


def _product(a: int, b: int) -> int:
    result = 0
    while a:
        if a & ONE:
            result ^= b
        a = a << 1 & 0xFFFFFFFF
        b = b >> 1 ^ (POLYNOMIAL if b & 1 else 0)
    return result
