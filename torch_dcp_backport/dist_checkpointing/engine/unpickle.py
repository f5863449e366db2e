"""Reads pickles of others and runs none of their code: only named classes of torch are made.

`pickle.load`, with which torch and Megatron read `.metadata`, calls whatever the file names.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.serialization
from torch.distributed.checkpoint import filesystem, metadata

from torch_dcp_backport.dist_checkpointing.engine.records import TYPED


class Refused(Exception):
    """A pickle names what is not allowed, or is none."""


class Stub:
    """Stands for an object of a class that is not made: Megatron's plans, paths. Keeps its attributes."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __hash__(self) -> int:
        return id(self)


METADATA: Mapping[tuple[str, str], Any] = {
    **{
        (metadata.__name__, name): getattr(metadata, name)
        for name in (
            "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
            "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
        )
    },
    (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("torch", "Size"): torch.Size,
    ("collections", "OrderedDict"): OrderedDict,
    **{("builtins", kind.__name__): kind for kind in (set, frozenset, list, dict, tuple, slice, bytearray)},
}  # fmt: skip
#: Modules whose classes become stubs.
STUBBED = ("megatron", "pathlib", "torch.distributed.checkpoint.planner")


def _described(storage: Any, offset: Any, size: Any, strides: Any, dtype: Any, flags: Any) -> Described:
    known = Described(dtype or storage[0], tuple(size), tuple(strides), offset, storage[1], flags)
    if not isinstance(known.dtype, torch.dtype) or len(known.size) != len(known.strides):
        raise Refused(f"it describes no tensor: {known.dtype} of strides {known.strides}")
    return known


def _rebuilt_v2(storage: Any, offset: Any, size: Any, strides: Any, *rest: Any) -> Described:
    # What follows: whether it requires a gradient, hooks, and the flags.
    return _described(storage, offset, size, strides, None, rest[2] if len(rest) > 2 else None)


def _rebuilt_v3(storage: Any, offset: Any, size: Any, strides: Any, *rest: Any) -> Described:
    # As above, with the dtype before the flags.
    return _described(storage, offset, size, strides, rest[2], rest[3] if len(rest) > 3 else None)


def _rebuilt_parameter(value: Described, *_: Any) -> Described:
    return value


#: What the pickle of a tensor's record names.
TENSORS: Mapping[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor_v2"): _rebuilt_v2,
    ("torch._utils", "_rebuild_tensor_v3"): _rebuilt_v3,
    ("torch._utils", "_rebuild_parameter"): _rebuilt_parameter,
    ("collections", "OrderedDict"): OrderedDict,
    ("torch", "Size"): torch.Size,
}
#: The name of a storage's class -> the dtype of its elements.
STORAGES = {kind.__name__: dtype for dtype, kind in TYPED.items()}
STORAGES["UntypedStorage"] = torch.uint8


class Reader(pickle.Unpickler):
    """An unpickler that makes what `allowed` lists, dtypes and stubs, and refuses everything else."""

    def __init__(
        self, data: bytes, allowed: Mapping[tuple[str, str], Any], stubbed: tuple[str, ...] = ()
    ) -> None:
        self._file = io.BytesIO(data)
        super().__init__(self._file)
        self._allowed = allowed
        self._stubbed = stubbed

    def find_class(self, module: str, name: str) -> Any:
        allowed = self._allowed.get((module, name))
        if allowed is not None:
            return allowed
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if any(module == prefix or module.startswith(f"{prefix}.") for prefix in self._stubbed):
            return Stub
        raise Refused(f"it names {module}.{name}, which a checkpoint's metadata has no use for")

    def read(self) -> tuple[Any, int]:
        """(the object, bytes that its pickle takes).

        Raises:
            Refused: not a pickle, or one that names what is not allowed.
        """
        try:
            return self.load(), self._file.tell()
        except Refused:
            raise
        except Exception as error:  # whatever damaged bytes lead to
            raise Refused(f"it is no pickle: {type(error).__name__}: {error}") from error


class Described(NamedTuple):
    """A tensor without its values."""

    dtype: torch.dtype
    size: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    #: The name of its storage.
    storage: str
    #: What else makes its values of those in the storage: that it is conjugated, or negated.
    flags: object


class TensorReader(Reader):
    """Reads a `Described`."""

    def __init__(self, data: bytes) -> None:
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
