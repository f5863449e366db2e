"""Values that are no sharded tensors, as `torch.save` writes them. Reading runs no code from the file."""

from __future__ import annotations

import argparse
import codecs
import datetime
import functools
import importlib
import io
import re
from collections import Counter, OrderedDict
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any, Optional

import torch

from torch_dcp_backport import compat
from torch_dcp_backport.dist_checkpointing._src import screening, unpickle


class Unloadable(Exception):
    """A value cannot be made from its bytes."""


@functools.lru_cache(maxsize=1)
def safe_classes() -> tuple[Any, ...]:
    """Return harmless classes of the values in checkpoints, beyond tensors and Python's own."""
    kinds: list[Any] = [
        argparse.Namespace,
        OrderedDict,
        set,
        frozenset,
        complex,
        range,
        slice,
        Decimal,
        Fraction,
        # Extra state of Transformer Engine's modules: bytes, of which nothing runs.
        io.BytesIO,
    ]
    # Bytes in a pickle of Python 2's form; torch knows it from 2.5 on.
    kinds.append(codecs.encode)
    kinds += [datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone]
    # Empty bytes are made by their class.
    kinds += [Counter, bytes]
    numpys = _numpys()
    return tuple(kinds) if numpys is None else (*kinds, *numpys.stand_ins())


@functools.lru_cache(maxsize=1)
def _numpys() -> Any:
    """Return the stand-ins of numpy's values; None where there is no numpy."""
    try:
        return importlib.import_module("torch_dcp_backport.dist_checkpointing._src.numpys")
    except ImportError:
        return None


def without_stand_ins(value: Any) -> Any:
    """Return a loaded value with numpy's values for their stand-ins; containers are changed in place."""
    numpys = _numpys()
    return value if numpys is None else _in_place(value, numpys.value_of, {})


#: Classes of values with attributes of their own.
WITH_ATTRIBUTES = (argparse.Namespace, OrderedDict, Counter, torch.Tensor, torch.nn.Parameter)


def _in_place(value: Any, replace: Callable[[Any], Any], known: dict[int, tuple[Any, Any]]) -> Any:
    """Return the same structure with other leaves.

    Args:
        known: id of a value -> it, and its replacement; a value that is there twice gets the same one.
    """

    def of(part: Any) -> Any:
        return _in_place(part, replace, known)

    if id(value) in known:
        return known[id(value)][1]
    kind, made = type(value), value
    known[id(value)] = value, value
    if kind in (dict, OrderedDict, Counter):
        pairs = [(of(key), of(part)) for key, part in value.items()]
        value.clear()
        for key, part in pairs:
            value[key] = part
    elif kind is list:
        value[:] = list(map(of, value))
    elif kind is set:
        parts = list(map(of, value))
        value.clear()
        value.update(parts)
    elif kind in (tuple, frozenset):
        made = kind(list(map(of, value)))
    elif kind is slice:
        made = slice(of(value.start), of(value.stop), of(value.step))
    elif kind in (torch.Tensor, torch.nn.Parameter) and value._backward_hooks:
        raise ValueError("a tensor with hooks")
    else:
        made = replace(value)
    if kind in WITH_ATTRIBUTES:
        of(value.__dict__)
    known[id(value)] = value, made
    return made


def dumps(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(without_the_rest(value), file)
    return file.getvalue()


def without_the_rest(value: Any, known: Optional[dict[int, Any]] = None) -> Any:
    """Return a value with copies of tensors that are a part of their memory: all of that would be saved.

    A value without such tensors is the caller's own; other classes than those below are not looked into.

    Args:
        known: id of a value -> its replacement; a value that is there twice gets the same one.
    """
    known = {} if known is None else known
    if id(value) in known:
        return known[id(value)]
    known[id(value)] = value
    kind = type(value)
    if kind is torch.Tensor and value.layout is torch.strided and not value.is_meta:
        if value.untyped_storage().nbytes() > value.nbytes:
            known[id(value)] = value.detach().clone().requires_grad_(value.requires_grad)
    elif kind in (dict, OrderedDict):
        pairs = [(key, part, without_the_rest(part, known)) for key, part in value.items()]
        if any(part is not made for _, part, made in pairs):
            known[id(value)] = kind((key, made) for key, _, made in pairs)
    elif kind in (list, tuple):
        parts = [without_the_rest(part, known) for part in value]
        if any(part is not made for part, made in zip(value, parts)):
            known[id(value)] = kind(parts)
    return known[id(value)]


def is_torchscript(data: bytes) -> bool:
    """Return whether `torch.load` takes these bytes for a TorchScript program.

    Up to torch 2.5 it runs one, with `weights_only=True` too (CVE-2025-32434).
    """
    file = io.BytesIO(data)
    if not data.startswith(b"PK"):
        return False
    # As torch.load looks: another reader of zip files could find other names in a crafted file.
    reader: Any = torch._C.PyTorchFileReader(file)
    return "constants.pkl" in reader.get_all_records()


def why_not_loadable(data: bytes) -> str:
    """Return why a load without `trust` would refuse the bytes of a save; "" where it would not."""
    try:
        loads(data)
    except Unloadable as error:
        return str(error)
    return ""


def loads(data: bytes, trust: bool = False) -> Any:
    """Return the value in `data`; tensors on the CPU.

    Args:
        trust: make objects of any class, which runs what the file says.

    Raises:
        Unloadable: it is damaged, or has an object of a class that is not known to be harmless.
    """
    file, safe = io.BytesIO(data), safe_classes()
    try:
        if trust:
            return torch.load(file, map_location="cpu", weights_only=False)
        is_script = is_torchscript(data)
    except Exception as error:
        # A file that is trusted writes what it likes.
        text = (str(error) or type(error).__name__) if trust else _reason(error)
        raise Unloadable(f"it is damaged, or cannot be made here: {text}") from error
    if is_script:
        raise Unloadable("it is a TorchScript program, which torch up to 2.5 runs when it is loaded")
    try:
        screening.screen(data)
        return without_stand_ins(compat.load_values(file, safe))
    except unpickle.Refused as error:
        raise Unloadable(f"it is damaged, or cannot be made here: {error}") from error
    except Exception as error:
        name = re.search(r"(?:GLOBAL|class|global) (.+?) was not", str(error), re.DOTALL)
        if name is None:
            raise Unloadable(f"it is damaged, or cannot be made here: {_reason(error)}") from error
        raise Unloadable(
            f"it has {unpickle.shown(name[1])}, which is not known to be harmless; "
            "torch.serialization.add_safe_globals allows a class, and trust=True makes objects of any class, "
            "and runs what the file says"
        ) from error


def _reason(error: Exception) -> str:
    """Return the text of torch's error without its advice."""
    text = re.split(r"\s*(?:Please|Check the documentation)", str(error).strip())[0]
    return unpickle.shown(text) or type(error).__name__
