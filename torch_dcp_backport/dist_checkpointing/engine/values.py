"""Values that are no sharded tensors, as `torch.save` writes them. Reading runs no code from the file."""

from __future__ import annotations

import argparse
import io
from collections import OrderedDict
from typing import Any

import torch

from torch_dcp_backport import compat


def safe_classes() -> list[Any]:
    """Harmless classes of the values in checkpoints, beyond tensors and Python's own."""
    kinds: list[Any] = [argparse.Namespace, OrderedDict]
    try:
        import numpy
    except ImportError:
        return kinds
    multiarray = getattr(numpy, "_core", None) or numpy.core
    dtypes = getattr(numpy, "dtypes", None)
    kinds += [numpy.ndarray, numpy.dtype, multiarray.multiarray._reconstruct, multiarray.multiarray.scalar]
    if dtypes is not None:
        kinds += [value for value in vars(dtypes).values() if isinstance(value, type)]
    return kinds


def dumps(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def loads(data: bytes, trust: bool = False) -> Any:
    """The value in `data`; tensors on the CPU.

    Args:
        trust: make objects of any class, which runs what the file says.

    Raises:
        pickle.UnpicklingError: it has an object of a class that is not known to be harmless.
    """
    file = io.BytesIO(data)
    if trust:
        return torch.load(file, map_location="cpu", weights_only=False)
    with compat.allowed_globals(safe_classes()):
        return torch.load(file, map_location="cpu", weights_only=True)
