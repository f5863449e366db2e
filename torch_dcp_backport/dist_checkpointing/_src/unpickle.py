"""Reads pickles of other programs and runs none of their code: named classes become plain stand-ins.

`pickle.load`, with which torch and Megatron read `.metadata`, calls whatever the file names.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch.distributed.checkpoint import filesystem, metadata

from torch_dcp_backport.dist_checkpointing._src.records import TYPED

T = TypeVar("T")
#: Tuples in each other; hashing the outermost takes as many frames of C, which nothing counts.
DEEPEST = 10_000
TUPLES = (pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3)
#: Bytes of stack for each of them, twice what they take.
FRAME = 128
MARKED = (pickletools.markobject, pickletools.stackslice)


#: Letters of an error that are shown of its beginning and of its end, where it is longer.
SHOWN = 250, 100


class Refused(Exception):
    """A pickle names something that is not allowed, or is no pickle."""

    def __init__(self, text: str) -> None:
        super().__init__(shown(text))


def shown(text: str) -> str:
    """Return a text that a file has had a hand in, escaped; of a long one the beginning and the end."""
    first, last = SHOWN
    return escaped(text if len(text) <= first + last else f"{text[:first]} ... {text[-last:]}")


def escaped(text: str, keep: str = "") -> str:
    """Return a text with escape sequences for what a terminal would not show, but for the letters to keep."""
    return "".join(
        letter if letter.isprintable() or letter in keep else ascii(letter)[1:-1] for letter in text
    )


def tuples_in(pickled: bytes) -> int:
    """Return the number of a pickle's tuples, or more: a byte is not always an opcode."""
    return sum(map(pickled.count, TUPLES))


def check_tuples(pickled: bytes) -> None:
    """Refuse tuples that are too deep in each other. Slow where there are many: each opcode is looked at.

    Raises:
        Refused: they are.
    """
    try:
        is_deep = tuples_in(pickled) > DEEPEST and depth_of_tuples(pickled) > DEEPEST
    except Exception as error:  # a stack without what an opcode takes from it
        raise Refused(f"it is no pickle: {type(error).__name__}: {error}") from error
    if is_deep:
        raise Refused(f"more than {DEEPEST} tuples are in each other")


def depth_of_tuples(pickled: bytes) -> int:
    """Return the depth of tuples in each other, or more: of other values' parts the deepest counts."""
    stack: list[Any] = []
    memo: dict[Any, int] = {}
    deepest = 0
    for opcode, argument, _ in pickletools.genops(pickled):
        name = opcode.name
        if name == "MARK":
            stack.append(None)
            continue
        if name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            memo[len(memo) if name == "MEMOIZE" else argument] = stack[-1]
            continue
        parts: list[int] = []
        if pickletools.markobject in opcode.stack_before:
            while stack[-1] is not None:
                parts.append(stack.pop())
            stack.pop()
        for _ in [kind for kind in opcode.stack_before if kind not in MARKED]:
            parts.append(stack.pop())
        depth = memo[argument] if name in ("GET", "BINGET", "LONG_BINGET") else max(parts, default=0)
        depth += "TUPLE" in name
        deepest = max(deepest, depth)
        stack += [depth] * len(opcode.stack_after)
    return deepest


def with_stack_for(pickled: bytes, work: Callable[[], T]) -> T:
    """Run `work` with stack enough for a pickle with all its tuples in each other, and return its result.

    To measure their depth costs more than to read the pickle of a large checkpoint, and is only done where
    so much address space cannot be had.

    Raises:
        Refused: they are too deep in each other.
    """
    count = tuples_in(pickled)
    if count <= DEEPEST:
        return work()
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    before = threading.stack_size((count * FRAME + 2**23) // 4096 * 4096)
    try:
        thread.start()
    except RuntimeError:
        check_tuples(pickled)
        return work()
    finally:
        threading.stack_size(before)
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


class StandIn:
    """An object of a class that is not made (of torch, Megatron, pathlib), with its attributes.

    A pickle can set attributes of all that it can name (BUILD), classes too: every reader has classes of its
    own, and their attributes end with it.
    """

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __hash__(self) -> int:
        return id(self)


class TensorEntry(StandIn):
    """The stand-in of torch's `TensorStorageMetadata`."""


class Properties(StandIn):
    """The stand-in of torch's `TensorProperties`; its state is a tuple that begins with the dtype."""

    dtype: Any

    def __setstate__(self, state: Any) -> None:
        self.dtype = state[0]


class Maker:
    """A function that a pickle may call: it has no attributes, and is made anew each time it is named."""

    __slots__ = ()


class Bytes(Maker):
    """The stand-in of `bytearray`, which would make any number of zeros."""

    __slots__ = ()

    def __call__(self, data: Any = b"", encoding: str = "latin-1") -> bytes:
        if not isinstance(data, (bytes, str)):
            raise Refused(f"it makes bytes of a {type(data).__name__}")
        return data.encode(encoding) if isinstance(data, str) else data


METADATA: Mapping[tuple[str, str], Any] = {
    **{
        (metadata.__name__, name): StandIn
        for name in (
            "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        )
    },
    (metadata.__name__, "TensorStorageMetadata"): TensorEntry,
    (metadata.__name__, "TensorProperties"): Properties,
    (filesystem.__name__, "_StorageInfo"): StandIn,
    ("torch.serialization", "_get_layout"): StandIn,
    ("torch", "Size"): torch.Size,
    ("collections", "OrderedDict"): OrderedDict,
    ("builtins", "bytearray"): Bytes,
    # No file can change these: they are not written in Python.
    **{("builtins", kind.__name__): kind for kind in (set, frozenset, list, dict, tuple, slice)},
}  # fmt: skip
#: Modules of which no class is made.
FOREIGN = ("megatron", "pathlib", "torch.distributed.checkpoint.planner")


class SafeUnpickler(pickle.Unpickler):
    """An unpickler that makes what `allowed` lists, dtypes and stand-ins, and refuses everything else."""

    def __init__(
        self, data: bytes, allowed: Mapping[tuple[str, str], Any], foreign: tuple[str, ...] = ()
    ) -> None:
        self._file = io.BytesIO(data)
        super().__init__(self._file)
        self._allowed = allowed
        self._foreign = foreign
        self._own: dict[tuple[str, str], type[StandIn]] = {}

    def find_class(self, module: str, name: str) -> Any:
        known = self._allowed.get((module, name))
        if known is None and module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if known is None and any(
            module == prefix or module.startswith(f"{prefix}.") for prefix in self._foreign
        ):
            known = StandIn
        if known is None:
            raise Refused(f"it names {module}.{name}, which a checkpoint's metadata has no use for")
        if issubclass(known, Maker):
            return known()
        if not issubclass(known, StandIn):
            return known
        if (module, name) not in self._own:
            self._own[module, name] = type(known.__name__, (known,), {})
        return self._own[module, name]

    def read(self) -> tuple[Any, int]:
        """Return (the object, bytes that its pickle takes).

        Raises:
            Refused: it is no pickle, or names something that is not allowed.
        """
        try:
            return self.load(), self._file.tell()
        except Refused:
            raise
        except Exception as error:  # whatever damaged bytes lead to
            raise Refused(f"it is no pickle: {type(error).__name__}: {error}") from error


class TensorMetadata(NamedTuple):
    """A tensor without its values."""

    dtype: torch.dtype
    size: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    #: The name of its storage.
    storage: str
    #: Its further differences from the values in the storage: that it is conjugated, or negated.
    flags: object


def _tensor_metadata(
    storage: Any, offset: Any, size: Any, strides: Any, dtype: Any, flags: Any
) -> TensorMetadata:
    known = TensorMetadata(dtype or storage[0], tuple(size), tuple(strides), offset, storage[1], flags)
    if not isinstance(known.dtype, torch.dtype) or len(known.size) != len(known.strides):
        raise Refused(f"it describes no tensor: {known.dtype} of strides {known.strides}")
    return known


class RebuiltV2(Maker):
    """`_rebuild_tensor_v2`; `rest`: whether it requires a gradient, hooks, and the flags."""

    __slots__ = ()

    def __call__(self, storage: Any, offset: Any, size: Any, strides: Any, *rest: Any) -> TensorMetadata:
        return _tensor_metadata(storage, offset, size, strides, None, rest[2] if len(rest) > 2 else None)


class RebuiltV3(Maker):
    """`_rebuild_tensor_v3`, which has the dtype before the flags."""

    __slots__ = ()

    def __call__(self, storage: Any, offset: Any, size: Any, strides: Any, *rest: Any) -> TensorMetadata:
        return _tensor_metadata(storage, offset, size, strides, rest[2], rest[3] if len(rest) > 3 else None)


class RebuiltParameter(Maker):
    """`_rebuild_parameter`."""

    __slots__ = ()

    def __call__(self, value: Any, *_: Any) -> Any:
        return value


#: The names in the pickle of a tensor's record.
TENSORS: Mapping[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor_v2"): RebuiltV2,
    ("torch._utils", "_rebuild_tensor_v3"): RebuiltV3,
    ("torch._utils", "_rebuild_parameter"): RebuiltParameter,
    ("collections", "OrderedDict"): OrderedDict,
    ("torch", "Size"): torch.Size,
}
#: The name of a storage's class -> the dtype of its elements.
STORAGES = {kind.__name__: dtype for dtype, kind in TYPED.items()}
STORAGES["UntypedStorage"] = torch.uint8


class TensorReader(SafeUnpickler):
    """An unpickler that returns a tensor as `TensorMetadata`."""

    def __init__(self, data: bytes) -> None:
        if tuples_in(data) > DEEPEST:
            raise Refused(f"more than {DEEPEST} tuples describe one tensor")
        super().__init__(data, TENSORS)

    def find_class(self, module: str, name: str) -> Any:
        if module in ("torch", "torch.storage") and name.endswith("Storage"):
            return STORAGES.get(name)
        return super().find_class(module, name)

    def persistent_load(self, pid: Any) -> Any:
        kind, dtype, name, _, _ = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype):
            raise Refused(f"it has a storage of an unknown kind: {kind}")
        return dtype, str(name)
