"""A tensor in a file, as `torch.load` reads it: the layout of its record follows from dtype and shape.

Everything but the values and their checksums does. The writer therefore knows every offset before it writes,
and the reader compares the bytes that it reads with those that have to be there. `body.py` makes the bytes.
"""

from __future__ import annotations

import functools
import io
import math
import pickle
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch._utils import _rebuild_tensor_v2, _rebuild_tensor_v3

from torch_dcp_backport.dist_checkpointing._src.body import Form
from torch_dcp_backport.transfer import Box, row_major

# --- descriptions of tensors ---


TYPED = {
    dtype: getattr(torch, f"{name}Storage")
    for dtype, name in {
        torch.float64: "Double", torch.float32: "Float", torch.float16: "Half", torch.bfloat16: "BFloat16",
        torch.int64: "Long", torch.int32: "Int", torch.int16: "Short", torch.int8: "Char",
        torch.uint8: "Byte", torch.bool: "Bool",
        torch.complex64: "ComplexFloat", torch.complex128: "ComplexDouble",
    }.items()
}  # fmt: skip


@functools.lru_cache(maxsize=4096)
def form_of(dtype: torch.dtype, size: tuple[int, ...]) -> Form:
    """Return the layout of the record of a contiguous tensor."""
    return Form(math.prod(size) * dtype.itemsize, description(dtype, size))


class _Tensor(NamedTuple):
    dtype: torch.dtype
    size: tuple[int, ...]


class _Storage(NamedTuple):
    kind: Any
    numel: int


class _Describer(pickle.Pickler):
    """Pickles a tensor that is not there."""

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, _Storage):
            return "storage", value.kind, "0", "cpu", value.numel
        return None

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, _Tensor):
            return NotImplemented
        numel, strides = math.prod(value.size), row_major(value.size)
        hooks: OrderedDict[str, Any] = OrderedDict()
        if value.dtype in TYPED:
            storage = _Storage(TYPED[value.dtype], numel)
            return _rebuild_tensor_v2, (storage, 0, value.size, strides, False, hooks)
        storage = _Storage(torch.UntypedStorage, numel * value.dtype.itemsize)
        return _rebuild_tensor_v3, (storage, 0, value.size, strides, False, hooks, value.dtype)


def description(dtype: torch.dtype, size: tuple[int, ...]) -> bytes:
    """Return the pickle of a contiguous tensor, as torch.load reads it."""
    file = io.BytesIO()
    _Describer(file, protocol=2).dump(_Tensor(dtype, size))
    return file.getvalue()


# --- runs of a box in a file ---
#
# Pure arithmetic.

#: Bytes of the largest piece that is read at once into a buffer.
LARGEST = 4 * 2**20
#: Up to so many bytes between two runs are read along: another request would cost more.
GAP = 16 * 1024


class RunPiece(NamedTuple):
    """A part of a box, and the range of its bytes in the stored tensor, with those that lie between."""

    box: Box
    start: int
    stop: int


def extent_of(stored: Box, part: Box, itemsize: int) -> tuple[int, int]:
    """Return a part's first byte and the byte behind its last, within the stored box that contains it."""
    if part is stored:
        return 0, part.numel * itemsize
    first = last = 0
    for stride, base, start, size in zip(row_major(stored.size), stored.offset, part.offset, part.size):
        first += (start - base) * stride
        last += (start - base + size - 1) * stride
    return first * itemsize, (last + 1) * itemsize


def pieces(
    stored: Box, part: Box, itemsize: int, largest: int = LARGEST, gap: int = GAP
) -> Iterator[RunPiece]:
    """Yield pieces of a part that are read with one request each.

    A piece spans at most `largest` bytes (or has one element), and its rows are at most `gap` bytes apart.
    Every byte of the part is in one piece.
    """
    if not part.numel:
        return
    strides = row_major(stored.size)
    left = [part]
    while left:
        box = left.pop()
        start, stop = extent_of(stored, box, itemsize)
        dim = next((dim for dim, size in enumerate(box.size) if size > 1), None)
        if dim is None:
            yield RunPiece(box, start, stop)
            continue
        pitch = strides[dim] * itemsize
        row = stop - start - (box.size[dim] - 1) * pitch
        is_near = pitch - row <= gap
        if is_near and stop - start <= largest:
            yield RunPiece(box, start, stop)
        elif is_near and row <= largest:
            rows = (largest - row) // pitch + 1
            left += [box.tail(dim, rows), box.head(dim, rows)]
        else:
            left += [box.tail(dim, 1), box.head(dim, 1)]
