"""Values that are no sharded tensors, as `torch.save` writes them. Reading runs no code from the file."""

from __future__ import annotations

import argparse
import codecs
import contextlib
import datetime
import functools
import importlib
import io
import pickle
import re
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any, Optional

import torch

from torch_dcp_backport import compat
from torch_dcp_backport.dist_checkpointing._src import unpickle
from torch_dcp_backport.dist_checkpointing._src.unpickle import Refused, check_tuples
from torch_dcp_backport.dist_checkpointing.core import CheckpointingException

# --- OmegaConf's settings ---
#
# Must never import OmegaConf: its values are there only where the program has it loaded.


def resolved(value: Any, name: str = "the configuration") -> Any:
    """Return a value with dicts and lists in the place of OmegaConf's, resolved; all else is as it was.

    Args:
        value: any value; dicts, lists and tuples are looked into.
        name: what the value is, for the error.

    Raises:
        ValueError: a setting is "???", or refers to one that is not there.

    Example:
        >>> from torch_dcp_backport.dist_checkpointing import resolved
        >>> resolved({"betas": (0.9, 0.95)})
        {'betas': (0.9, 0.95)}
    """
    omegaconf: Any = sys.modules.get("omegaconf")
    return value if omegaconf is None else _resolved(value, name, omegaconf)


def _resolved(value: Any, name: str, omegaconf: Any) -> Any:
    if omegaconf.OmegaConf.is_config(value):
        try:
            return omegaconf.OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
        except omegaconf.errors.OmegaConfBaseException as error:
            key = getattr(error, "full_key", None)
            text = str(error).splitlines()[0]
            raise ValueError(f"{name}{f'.{key}' if key else ''} has no value: {text}") from error
    if type(value) in (dict, OrderedDict):
        parts = {key: _resolved(part, f"{name}.{key}", omegaconf) for key, part in value.items()}
        return value if all(parts[key] is value[key] for key in parts) else type(value)(parts)
    if type(value) in (list, tuple):
        items = [_resolved(part, name, omegaconf) for part in value]
        return value if all(map(_is, items, value)) else type(value)(items)
    return value


def _is(value: object, other: object) -> bool:
    return value is other


# --- a look at a pickle before torch ---
#
# torch up to 2.6 does not compare a storage with its record, and reads the memory behind it; of a few
# bytes it makes numbers and collections of any size; a tuple in a million others ends the process when it
# is hashed.


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


class FractionStub(Stub):
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
    ("fractions", "Fraction"): FractionStub,
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


# --- where a value is ---
#
# In the structures of a state dict, for errors: looked for once something has failed.

#: Stands for a part that is not there.
NOTHING: Any = object()
#: The most keys that an error shows of the way to a value.
SHOWN_KEYS = 6


def parts_of(value: Any) -> Iterable[tuple[Any, Any]]:
    """Return the keys and the parts of a dict, a list, a tuple or a Namespace; nothing of another value."""
    value = vars(value) if isinstance(value, argparse.Namespace) else value
    if isinstance(value, Mapping):
        return value.items()
    return enumerate(value) if isinstance(value, (list, tuple)) else ()


def key_of(value: Any, fails: Callable[[Any], bool]) -> str:
    """Return the keys that lead to the innermost part of which a test is true, joined by dots; "" if none."""
    keys: list[str] = []
    while len(keys) < SHOWN_KEYS:
        found = next(((key, part) for key, part in parts_of(value) if fails(part)), None)
        if found is None:
            break
        keys.append(str(found[0]))
        value = found[1]
    return ".".join(keys)


@contextlib.contextmanager
def naming_too_deep(value: Any) -> Iterator[None]:
    """Name the part of a value that has itself in it, or is nested too deep, where Python's stack ends.

    Raises:
        CheckpointingException: in the place of a RecursionError.
    """
    try:
        yield
    except RecursionError:
        reason = why_too_deep(value)
    else:
        return
    # Behind the handler: the error would keep a thousand frames, and what they hold.
    raise CheckpointingException(reason)


def why_too_deep(value: Any) -> str:
    """Return what of a value is nested too deep, without recursion."""
    deepest, way = 0, list[str]()
    keys: list[str] = []
    above = [(id(value), iter(parts_of(value)))]
    within, known = {id(value)}, {id(value)}
    while above:
        key, part = next(above[-1][1], (None, NOTHING))
        if part is NOTHING:
            within.discard(above.pop()[0])
            del keys[-1:]
            continue
        if id(part) in within:
            return f"{_way([*keys[: SHOWN_KEYS + 1], str(key)])} has itself in it"
        if id(part) not in known and parts_of(part):
            known.add(id(part))
            within.add(id(part))
            above.append((id(part), iter(parts_of(part))))
            keys.append(str(key))
            if len(keys) > deepest:
                deepest, way = len(keys), keys[: SHOWN_KEYS + 1]
    return f"{_way(way)} is nested {deepest} deep, which Python's stack does not hold"


def _way(keys: Sequence[str]) -> str:
    return ".".join(keys[:SHOWN_KEYS]) + (" ..." if len(keys) > SHOWN_KEYS else "")


# --- values to bytes and back ---


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
    return tuple(kinds) if numpys is None else (*kinds, *numpys.placeholders())


@functools.lru_cache(maxsize=1)
def _numpys() -> Any:
    """Return the stand-ins of numpy's values; None where there is no numpy."""
    try:
        return importlib.import_module("torch_dcp_backport.dist_checkpointing._src.numpys")
    except ImportError:
        return None


def without_placeholders(value: Any) -> Any:
    """Return a loaded value with numpy's values for their stand-ins; containers are changed in place."""
    numpys = _numpys()
    return value if numpys is None else _in_place(value, numpys.value_of, {})


#: Classes of values without parts, which are no stand-ins: a random state has 600 numbers.
PLAIN = frozenset((bool, int, float, str, bytes, type(None)))
#: Classes of values with attributes of their own.
WITH_ATTRIBUTES = (argparse.Namespace, OrderedDict, Counter, torch.Tensor, torch.nn.Parameter)


def _in_place(value: Any, replace: Callable[[Any], Any], known: dict[int, tuple[Any, Any]]) -> Any:
    """Return the same structure with other leaves.

    Args:
        known: id of a value -> it, and its replacement; a value that is there twice gets the same one.
    """

    def of(parts: Iterable[Any]) -> list[Any]:
        made = []
        # A comprehension has a frame of its own up to Python 3.11, and of frames there are a thousand.
        for part in parts:
            made.append(part if type(part) in PLAIN else _in_place(part, replace, known))
        return made

    if id(value) in known:
        return known[id(value)][1]
    kind, made = type(value), value
    known[id(value)] = value, value
    if kind in (dict, OrderedDict, Counter):
        pairs = list(zip(of(value), of(value.values())))
        value.clear()
        for key, part in pairs:
            value[key] = part
    elif kind is list:
        value[:] = of(value)
    elif kind is set:
        parts = of(value)
        value.clear()
        value.update(parts)
    elif kind in (tuple, frozenset):
        made = kind(of(value))
    elif kind is slice:
        made = slice(*of((value.start, value.stop, value.step)))
    elif kind in (torch.Tensor, torch.nn.Parameter) and value._backward_hooks:
        raise ValueError("a tensor with hooks")
    else:
        made = replace(value)
    if kind in WITH_ATTRIBUTES:
        of([value.__dict__])
    known[id(value)] = value, made
    return made


def dumps(value: object) -> bytes:
    """Return a value as bytes.

    Raises:
        CheckpointingException: it cannot be pickled, or is nested too deep; naming the keys that lead there.
    """
    file = io.BytesIO()
    with naming_too_deep(value):
        try:
            torch.save(without_the_rest(value), file)
            return file.getvalue()
        except RecursionError:
            raise
        except Exception as error:
            key = key_of(value, cannot_be_saved)
            raise CheckpointingException(
                f"{key}{': ' if key else ''}{type(error).__name__}: {error}"
            ) from error


def cannot_be_saved(value: object) -> bool:
    try:
        torch.save(value, io.BytesIO())
    except Exception:
        return True
    return False


def cannot_be_loaded(value: object) -> bool:
    """Return whether a load without `trust` would refuse a value, which can be saved."""
    return bool(why_not_loadable(dumps(value)))


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
        pairs = [
            (key, part, part if type(part) in PLAIN else without_the_rest(part, known))
            for key, part in value.items()
        ]
        if any(part is not made for _, part, made in pairs):
            known[id(value)] = kind((key, made) for key, _, made in pairs)
    elif kind in (list, tuple):
        parts = [part if type(part) in PLAIN else without_the_rest(part, known) for part in value]
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
        screen(data)
        return without_placeholders(compat.load_values(file, safe))
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
