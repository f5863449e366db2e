"""numpy's scalars and arrays in files: made of their bytes, by nothing that the file can choose.

Stand-ins under numpy's names. numpy's own take a dtype's flags and fields from the file, and then the values
for pointers.
"""

from __future__ import annotations

import math
from typing import Any

import numpy

#: Booleans, numbers and text: dtypes without references in them.
KINDS = "?biufcSU"


class Dtype:
    """A dtype of the known kinds."""

    def __init__(self, name: object = "", align: object = False, copy: object = False) -> None:
        if type(name) is not str:
            raise ValueError(f"a numpy dtype of a {type(name).__name__}")
        self.real = numpy.dtype(name)
        if self.real.kind not in KINDS or self.real.hasobject:
            raise ValueError(f"a numpy dtype {name!r}, which is none of numbers or text")

    def __setstate__(self, state: Any) -> None:
        _, order, subdtype, names, fields, *_ = state
        if (subdtype, names, fields) != (None, None, None) or order not in ("<", ">", "|", "="):
            raise ValueError("a numpy dtype with parts")
        if order in ("<", ">"):
            self.real = self.real.newbyteorder(order)


class Array(numpy.ndarray):
    """An array that is made by its state alone."""

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, is_fortran, data = state
        real = checked(dtype)
        if type(shape) is not tuple or any(type(extent) is not int or extent < 0 for extent in shape):
            raise ValueError("a numpy array without a shape")
        if type(data) is not bytes or len(data) != math.prod(shape) * real.itemsize:
            raise ValueError("a numpy array with other bytes than its shape has")
        setting: Any = super().__setstate__
        setting((1, shape, real, bool(is_fortran), data))


def checked(dtype: Any) -> Any:
    if type(dtype) is not Dtype:
        raise ValueError(f"a numpy value of a {type(dtype).__name__}, and no dtype")
    return dtype.real


def scalar(dtype: Any, data: Any = b"") -> Any:
    real = checked(dtype)
    if type(data) is not bytes or len(data) != real.itemsize or not data:
        raise ValueError("a numpy scalar with other bytes than its dtype has")
    return numpy.frombuffer(data, dtype=real)[0]


def reconstruct(kind: Any, shape: Any, typecode: Any) -> Array:
    if kind is not Array:
        raise ValueError("a numpy array of another class")
    return Array((0,), numpy.uint8)


def plain(value: Any) -> Any:
    """What a stand-in stands for, without a copy; anything else as it is."""
    if type(value) is Array:
        return value.view(numpy.ndarray)
    return value.real if type(value) is Dtype else value


def named(kind: Any, module: str, name: str) -> Any:
    """A stand-in under the name that files have."""
    kind.__module__, kind.__name__, kind.__qualname__ = module, name, name
    return kind


def stand_ins() -> list[Any]:
    kinds = [named(Dtype, "numpy", "dtype"), named(Array, "numpy", "ndarray")]
    for module in ("numpy.core.multiarray", "numpy._core.multiarray"):

        def of_bytes(dtype: Any, data: Any = b"") -> Any:
            return scalar(dtype, data)

        def of_nothing(kind: Any, shape: Any, typecode: Any) -> Array:
            return reconstruct(kind, shape, typecode)

        kinds += [named(of_bytes, module, "scalar"), named(of_nothing, module, "_reconstruct")]
    return kinds
