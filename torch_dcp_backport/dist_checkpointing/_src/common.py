"""The comparison of the ranks' common states: that of the first rank is saved.

Equal states cost each rank a digest; else every value goes to the first rank, which lists the differences.
"""

from __future__ import annotations

import contextlib
import hashlib
import pickle
from argparse import Namespace
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from torch_dcp_backport.transfer import Findings, Problem

#: Of a value with more bytes only a digest is sent.
LARGE = 64 * 1024
#: So many differences are listed of each rank.
MOST = 8
#: Path -> the value as bytes; empty where it cannot be pickled.
Values = dict[tuple[str, ...], bytes]


class Numbers(NamedTuple):
    """A tensor as bytes: torch's own pickle of equal ones differs."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    data: bytes

    def __repr__(self) -> str:
        if not self.data:
            return f"{self.dtype} of shape {self.shape}"
        return repr(
            torch.frombuffer(bytearray(self.data), dtype=torch.uint8).view(self.dtype).view(self.shape)
        )


class Elements(NamedTuple):
    """A set, with its elements packed and in order."""

    kind: str
    packed: tuple[bytes, ...]

    def __repr__(self) -> str:
        return f"{self.kind}({', '.join(repr(pickle.loads(data)) for data in self.packed)})"


def values_of(common: object) -> Values:
    """Return the values of nested dicts, lists and namespaces, by path."""
    return {path: _packed(value) for path, value in _leaves(common, ())}


def digest_of(values: Values) -> bytes:
    return hashlib.blake2b(pickle.dumps(sorted(values.items())), digest_size=16).digest()


def findings_of(values_by_rank: Mapping[int, Values]) -> Findings:
    """Return findings of the values that differ from the first rank's."""
    first, expected = next(iter(values_by_rank.items()))
    findings: Findings = []
    for rank, values in values_by_rank.items():
        paths = [path for path in sorted({*expected, *values}) if not _is_same(path, expected, values)]
        for path in paths[:MOST]:
            texts = f"{_text(values, path)}", f"{_text(expected, path)} as rank {first}"
            findings.append((rank, Problem("another common value", ".".join(path), *texts)))
        if len(paths) > MOST:
            findings.append((rank, Problem(f"{len(paths) - MOST} more common values differ")))
    return findings


def mismatch_line(rank: int, own: Values, first: int, expected: Values) -> str:
    """Return Megatron's sentence on a rank whose common values are others than the first rank's; "" if none.

    Programs look for it in the rank's own log.
    """
    missing = [path for path in expected if path not in own]
    more = [path for path in own if path not in expected]
    other = [
        (path, _kind(expected[path]), _kind(own[path]))
        for path in own
        if path in expected and not _is_same(path, expected, own)
    ]
    if not (missing or more or other):
        return ""
    hidden = sum(max(0, len(paths) - MOST) for paths in (missing, more, other))
    return (
        f"Rank {rank} common state dict differs from rank {first} common state dict. "
        f"Keys only on rank {first}: {missing[:MOST]}, Keys only on {rank}: {more[:MOST]}, "
        f"Mismatched keys: {other[:MOST]}{f', and {hidden} more' if hidden else ''}"
    )


def _kind(packed: bytes) -> type:
    """Return the type of a value; `object` where only a digest of it is known."""
    with contextlib.suppress(Exception):
        kind = type(pickle.loads(packed))
        return {Numbers: torch.Tensor, Elements: set}.get(kind, kind)
    return object


def _leaves(
    value: Any, path: tuple[str, ...], above: tuple[int, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    if id(value) in above:
        return  # it is a part of itself
    inner = vars(value) if isinstance(value, Namespace) else value
    if isinstance(inner, (dict, list, tuple)) and inner:
        for key, part in inner.items() if isinstance(inner, dict) else enumerate(inner):
            yield from _leaves(part, (*path, str(key)), (*above, id(value)))
    else:
        yield path, value


def _packed(value: Any) -> bytes:
    try:
        if isinstance(value, torch.Tensor):
            flat = value.detach().cpu().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
            value = Numbers(value.dtype, tuple(value.shape), bytes(flat.numpy()))
        if isinstance(value, (set, frozenset)):
            # Equal sets are in an order of their own.
            value = Elements(type(value).__name__, tuple(sorted(map(_packed, value))))
        data = pickle.dumps(value)
    except Exception:  # the first rank, which has to save it, reports it
        return b""
    return data if len(data) <= LARGE else hashlib.blake2b(data, digest_size=16).digest()


def _is_same(path: tuple[str, ...], expected: Values, values: Values) -> bool:
    if path not in expected or path not in values:
        return False
    first, other = expected[path], values[path]
    if first == other:
        return True
    # Equal values need not have equal bytes.
    with contextlib.suppress(Exception):
        left, right = pickle.loads(first), pickle.loads(other)
        return type(left) is type(right) and bool(left == right)
    return False


def _text(values: Values, path: tuple[str, ...]) -> str:
    if path not in values:
        return "nothing"
    with contextlib.suppress(Exception):
        return f"{pickle.loads(values[path])!r:.80}"
    return "another value"
