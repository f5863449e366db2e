"""Reads pickles of others and runs none of their code: only named classes of torch are made.

`pickle.load`, with which torch and Megatron read `.metadata`, calls whatever the file names.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Optional

import torch
import torch._utils
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

#: What the pickle of a tensor's record names.
TENSORS: Mapping[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
    ("torch._utils", "_rebuild_tensor_v3"): torch._utils._rebuild_tensor_v3,
    ("torch._utils", "_rebuild_parameter"): torch._utils._rebuild_parameter,
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


class TensorReader(Reader):
    """Reads the description of a tensor without its values: (dtype, size, strides, offset, storage)."""

    def __init__(self, data: bytes) -> None:
        allowed = dict(TENSORS)
        for name in ("_rebuild_tensor_v2", "_rebuild_tensor_v3"):
            allowed["torch._utils", name] = rebuilt
        super().__init__(data, allowed)

    def find_class(self, module: str, name: str) -> Any:
        if module in ("torch", "torch.storage") and name.endswith("Storage"):
            return STORAGES.get(name)
        return super().find_class(module, name)

    def persistent_load(self, pid: Any) -> Any:
        kind, dtype, name, _, _ = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype):
            raise Refused(f"it has a storage of an unknown kind: {kind}")
        return dtype, str(name)


def rebuilt(
    storage: tuple[torch.dtype, str],
    offset: int,
    size: tuple[int, ...],
    strides: tuple[int, ...],
    *rest: Any,
) -> tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int, str]:
    dtype: Optional[torch.dtype] = rest[2] if len(rest) > 2 else None
    return dtype or storage[0], tuple(size), tuple(strides), offset, storage[1]
