"""A tensor in a file, as `torch.load` reads it: the layout of its record follows from dtype and shape.

Everything but the values and their checksums does. The writer therefore knows every offset before it writes,
and the reader compares the bytes that it reads with those that have to be there. `zipped.py` makes the bytes.
"""

from __future__ import annotations

import functools
import io
import math
import pickle
from collections import OrderedDict
from typing import Any, NamedTuple

import torch
from torch._utils import _rebuild_tensor_v2, _rebuild_tensor_v3

from torch_dcp_backport.dist_checkpointing._src.zipped import Form

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
        numel, strides = math.prod(value.size), strides_of(value.size)
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


def strides_of(size: tuple[int, ...]) -> tuple[int, ...]:
    """Return row-major strides, in elements."""
    strides, step = [], 1
    for extent in reversed(size):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))
