"""A look at a pickle of `torch.save` before torch reads it. Nothing that the file names is made.

torch up to 2.6 does not compare a storage with its record, and reads the memory behind it; of a few bytes it
makes numbers and collections of any size; a tuple in a million others ends the process when it is hashed.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from typing import Any

import torch

from torch_dcp_backport.dist_checkpointing._src.unpickle import Refused, check_tuples


def screen(data: bytes) -> None:
    """Look at a file of `torch.save`.

    Raises:
        Refused: a storage is not as large as its record; a value takes more memory than the file has of it.
    """
    if not data.startswith(b"PK"):
        raise Refused("it is no zip file, as torch.save has written since torch 1.6")
    reader: Any = torch._C.PyTorchFileReader(io.BytesIO(data))
    pickled = bytes(reader.get_record("data.pkl"))
    check_tuples(pickled)
    try:
        Screen(pickled, reader).load()
    except Refused:
        raise
    except Exception as error:  # whatever damaged bytes lead to
        raise Refused(f"{type(error).__name__}: {error}") from error


class Stub:
    """An object that is not made; its parts are thrown away."""

    def __new__(cls, *_: Any, **__: Any) -> Any:
        return super().__new__(cls)

    def __setitem__(self, key: object, value: object) -> None:
        pass

    def append(self, value: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        # Of a pair the second part would be set as attributes, the class among them.
        if self.named and type(state) is not dict:
            raise Refused(f"attributes of {self.named} are set by a {type(state).__name__}")

    #: Its name in errors, where only its own attributes may be set.
    named = ""


class Namespace(Stub):
    """An `argparse.Namespace`."""

    named = "a Namespace"


class Collection(Stub):
    """A set, a `Counter` or bytes: of members and bytes that are in the file, never of a number of them."""

    named = "a collection"

    def __new__(cls, *parts: Any) -> Any:
        for part in parts:
            if not isinstance(part, (str, bytes, list, tuple, dict, set, Collection, Encoded)):
                raise Refused(f"a collection is made of a {type(part).__name__}")
        return super().__new__(cls)


class Encoded(Stub):
    """Bytes in a pickle of Python 2's form: text, and its encoding."""

    def __new__(cls, text: Any = "", *_: Any) -> Any:
        made = super().__new__(cls)
        made.__dict__["nbytes"] = len(text) if isinstance(text, str) else 0
        return made


class BytesBuffer(Stub):
    """An `io.BytesIO`: its bytes, a place in them, and no attributes."""

    def __new__(cls, *parts: Any) -> Any:
        if parts:
            raise Refused(f"a BytesIO is made of {parts!r:.80}")
        return super().__new__(cls)

    def __setstate__(self, state: object) -> None:
        if type(state) is not tuple or len(state) != 3 or state[2]:
            raise Refused(f"a BytesIO is set to {state!r:.80}")
        data, place, _ = state
        nbytes = len(data) if type(data) is bytes else getattr(data, "nbytes", 0)
        if not isinstance(data, (bytes, Encoded, Collection)) or type(place) is not int:
            raise Refused(f"a BytesIO is set to {state!r:.80}")
        # From a place beyond its end, a write would fill any memory with zeros.
        if not 0 <= place <= nbytes:
            raise Refused(f"a BytesIO of {nbytes} bytes is set to place {place}")


class Fraction(Stub):
    """A `Fraction`, which multiplies out its exponent."""

    named = "a Fraction"

    def __new__(cls, *parts: Any) -> Any:
        if not all(type(part) is int or (type(part) is str and "e" not in part.lower()) for part in parts):
            raise Refused(f"a Fraction is made of {parts!r:.80}")
        return super().__new__(cls)


BUILTINS = ("builtins", "__builtin__")
#: Classes that are looked at; a `Stub` stands for everything else that torch takes.
KINDS: dict[tuple[str, str], type[Any]] = {
    ("argparse", "Namespace"): Namespace,
    ("collections", "Counter"): Collection,
    ("fractions", "Fraction"): Fraction,
    ("_codecs", "encode"): Encoded,
    ("_io", "BytesIO"): BytesBuffer,
    **{
        (module, name): Collection
        for module in BUILTINS
        for name in ("set", "frozenset", "bytes", "bytearray")
    },
}


class Screen(pickle.Unpickler):
    """An unpickler that looks at what is named, and at storages."""

    def __init__(self, pickled: bytes, reader: Any) -> None:
        super().__init__(io.BytesIO(pickled), encoding="utf-8")
        self._reader = reader

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict  # its class is written in C: no file can change it
        if name == "UntypedStorage":
            return torch.uint8
        if module == "torch" and name.endswith("Storage"):
            return torch.storage._get_dtype_from_pickle_storage_type(name)  # a KeyError where it is none
        # A pickle can set attributes of what it names: each is another class, and ends with the reader.
        return type(name, (KINDS.get((module, name), Stub),), {})

    def persistent_load(self, pid: Any) -> Stub:
        kind, dtype, key, _, count = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype) or type(key) is not str:
            raise Refused(f"a storage of an unknown kind: {pid!r:.80}")
        nbytes = len(self._reader.get_record(f"data/{key}"))
        if type(count) is not int or count * dtype.itemsize != nbytes:
            raise Refused(f"storage {key} has {nbytes} bytes, and says {count!r:.40} elements of {dtype}")
        return Stub()
