"""numpy's scalars, arrays and dtypes in files: made of their bytes, by nothing that the file can choose.

Stand-ins under numpy's names, which `torch.load` calls in place of numpy's own: those take flags, fields,
buffers and strides from the file, and then its values for pointers. Plain objects until they are replaced.
A file of its own, and imported by name when it is needed: torch works without numpy, and so does this room.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Optional

import numpy

#: Booleans, numbers and text: dtypes without references in them.
KINDS = "biufcSU"
HOW = "trust=True makes any, and runs what the file says"


class Dtype:
    """Stands for a dtype of the known kinds."""

    value: Any = None

    def __init__(self, name: object = "", align: object = False, copy: object = False) -> None:
        if type(name) is not str or name[:1] in ("<", ">", "=", "|"):
            raise ValueError(f"a numpy dtype of {name!r:.40} ({HOW})")
        self.value = numpy.dtype(name)
        if self.value.kind not in KINDS or self.value.hasobject:
            raise ValueError(f"a numpy dtype {name!r}, which is none of numbers or text ({HOW})")

    def __setstate__(self, state: Any) -> None:
        _, order, *parts = state
        if parts[:3] != [None] * 3 or len(parts) != 6 or order not in ("<", ">", "|"):
            raise ValueError(f"a numpy dtype with parts or metadata ({HOW})")
        if (
            self.value is None
            or parts[3] not in (-1, self.value.itemsize)
            or (order == "|") != (self.value.byteorder == "|")
        ):
            raise ValueError(f"a numpy dtype {self.value} of {parts[3]!r} bytes in order {order!r}")
        if order in ("<", ">"):
            self.value = self.value.newbyteorder(order)


class Array:
    """Stands for an array of such a dtype."""

    value: Optional[Any] = None

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, is_fortran, data = state
        kind = dtype_of(dtype)
        if type(is_fortran) not in (bool, int):
            raise ValueError("a numpy array in no order")
        if self.value is not None or type(shape) is not tuple or len(shape) > 32:
            raise ValueError("a numpy array that is none")
        if any(type(extent) is not int or extent < 0 for extent in shape):
            raise ValueError("a numpy array without a shape")
        nbytes = math.prod(shape) * kind.itemsize
        if type(data) is not bytes or len(data) != nbytes or (math.prod(shape) and not nbytes):
            raise ValueError("a numpy array with other bytes than its shape has")
        native = kind.newbyteorder("=")
        if not data:
            self.value = numpy.zeros(shape, native)
            return
        order: Any = "F" if is_fortran else "C"
        made = numpy.frombuffer(data, dtype=kind).reshape(shape, order=order)
        # As numpy's own: with memory of its own, in this machine's byte order.
        self.value = made.astype(native, order="K", copy=True)


class Name:
    """Stands for numpy's class where a file names it."""

    def __init__(self, *arguments: object) -> None:
        raise ValueError(f"a numpy array that is made by its class ({HOW})")


def dtype_of(placeholder: Any) -> Any:
    if type(placeholder) is not Dtype or placeholder.value is None:
        raise ValueError(f"a numpy value of a {type(placeholder).__name__}, and no dtype")
    return placeholder.value


def scalar(dtype: Any, data: Any = b"") -> Any:
    kind = dtype_of(dtype)
    if type(data) is not bytes or len(data) != kind.itemsize:
        raise ValueError("a numpy scalar with other bytes than its dtype has")
    if not data:
        return kind.type()
    return numpy.frombuffer(data, dtype=kind)[0]


def reconstruct(kind: Any, shape: Any, typecode: Any) -> Array:
    if kind is not Name:
        raise ValueError("a numpy array of another class")
    return Array()


def value_of(part: Any) -> Any:
    """Return the value that a stand-in stands for; anything else as it is."""
    if type(part) is Name or (type(part) in (Array, Dtype) and part.value is None):
        raise ValueError("a numpy array or dtype without values")
    if any(part is placeholder for placeholder in placeholders()):
        raise ValueError(f"{part.__module__}.{part.__name__} itself, and no value of it ({HOW})")
    return part.value if type(part) in (Array, Dtype) else part


def named(kind: Any, module: str, name: str) -> Any:
    """Give a stand-in the name that files have, and return it."""
    kind.__module__, kind.__name__, kind.__qualname__ = module, name, name
    return kind


@functools.lru_cache(maxsize=1)
def placeholders() -> list[Any]:
    kinds = [named(Dtype, "numpy", "dtype"), named(Name, "numpy", "ndarray"), Array]
    for module in ("numpy.core.multiarray", "numpy._core.multiarray"):

        def of_bytes(dtype: Any, data: Any = b"") -> Any:
            return scalar(dtype, data)

        def of_nothing(kind: Any, shape: Any, typecode: Any) -> Array:
            return reconstruct(kind, shape, typecode)

        kinds += [named(of_bytes, module, "scalar"), named(of_nothing, module, "_reconstruct")]
    return kinds
