"""The differences of two checkpoints: keys, shapes, dtypes, bits of values. One process; bounded memory.

Must never write, nor run code that a checkpoint names.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

import torch

from torch_dcp_backport.checkpoint._src import manifest
from torch_dcp_backport.checkpoint._src.exporting import reads_of
from torch_dcp_backport.checkpoint._src.user_state import USER_STATE
from torch_dcp_backport.dist_checkpointing import (
    CheckpointingException,
    Damaged,
    Opened,
    RecordReader,
    Stored,
    values,
)
from torch_dcp_backport.dist_checkpointing.core import SHARDED
from torch_dcp_backport.dist_checkpointing.inspection import not_whole, opened_alone
from torch_dcp_backport.hf import windows
from torch_dcp_backport.publish import disk
from torch_dcp_backport.transfer import Meter, TensorInfo, as_bytes

#: Bytes of each tensor that are compared at once.
WINDOW = 16 * 2**20
#: The most characters of a value in a text.
SHOWN = 30
#: The most bytes of a file that is compared by its values.
SMALL = 64 * 2**20


class Difference(NamedTuple):
    """A difference of two checkpoints."""

    #: "only in A", "only in B", "dtype", "shape", "values", "type", "file".
    kind: str
    key: str
    a: str = ""
    b: str = ""


class Sides(NamedTuple):
    """The same part of two checkpoints."""

    #: Before keys.
    prefix: str
    a: Opened
    b: Opened


def differences(first: Path, second: Path, meter: Meter) -> Iterator[Difference]:
    """Yield the differences of two steps, or of two sharded checkpoints.

    Args:
        first: the folder that texts call A.
        second: the folder that they call B.
        meter: told of the bytes of tensors that are compared.

    Raises:
        CheckpointingException: one of them is no checkpoint, or is damaged.
    """
    if not (has_parts(first) and has_parts(second)):
        folders = [folder / SHARDED if has_parts(folder) else folder for folder in (first, second)]
        yield from of_checkpoints(Sides("", *map(opened_alone, folders)), meter)
        return
    files = [files_of(folder) for folder in (first, second)]
    yield from of_names(*files)
    for name, prefix in ((SHARDED, ""), (USER_STATE, f"{USER_STATE}: ")):
        folders = [folder / name for folder in (first, second)]
        if all(map(os.path.isdir, folders)):
            yield from of_checkpoints(Sides(prefix, *map(opened_alone, folders)), meter)
    for name in sorted(set(files[0]) & set(files[1])):
        if files[0][name] != files[1][name]:
            yield from of_files(name, first / name, second / name)


def has_parts(folder: Path) -> bool:
    """Return whether a folder is a step, which has its sharded checkpoint in a folder."""
    return (folder / SHARDED).is_dir()


def files_of(folder: Path) -> dict[str, Any]:
    """Return the files of a step with sizes and checksums; of its sharded checkpoints the folders.

    Raises:
        CheckpointingException: it has no manifest, or a file is not what was saved.
    """
    try:
        content = manifest.read(folder)
    except manifest.BadManifest as error:
        raise CheckpointingException(f"{folder}: {error}") from error
    parts = (f"{SHARDED}/", f"{USER_STATE}/")
    found: dict[str, Any] = {
        name: entry for name, entry in content.files.items() if not name.startswith(parts)
    }
    for fault in manifest.wrong_checksums(folder, content, list(found)):
        raise CheckpointingException(f"{folder} is not what was saved: {fault}")
    found.update({part: None for part in parts if any(name.startswith(part) for name in content.files)})
    return found


def of_names(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Difference]:
    for name in sorted({*a} ^ {*b}):
        yield Difference("only in A" if name in a else "only in B", name)


def of_files(name: str, first: Path, second: Path) -> Iterator[Difference]:
    """Yield how two files of other checksums differ: states of data loaders by their values."""
    if name.endswith(".pt"):
        with contextlib.suppress(values.Unloadable, OSError):
            sides = [values.loads(disk.read_whole(path, SMALL)) for path in (first, second)]
            yield from of_values(name, *sides)
            return
    with contextlib.suppress(ValueError, OSError):
        if name.endswith(".json"):
            yield from of_values(name, *(json.loads(disk.read_whole(path)) for path in (first, second)))
            return
    yield Difference("file", name)


# --- Sharded checkpoints ---


def of_checkpoints(sides: Sides, meter: Meter) -> Iterator[Difference]:
    """Yield the differences of two sharded checkpoints.

    Raises:
        CheckpointingException: one of them is damaged.
    """
    prefix = sides.prefix
    tensors = sides.a.holds.tensors, sides.b.holds.tensors
    for checkpoint in sides[1:]:
        for problem in not_whole(checkpoint, checkpoint.holds.tensors):
            raise CheckpointingException(f"{checkpoint.folder}: {problem}")
    for key in sorted({*tensors[0], *tensors[1]}):
        a, b = (held.get(key) for held in tensors)
        if a is None or b is None:
            yield Difference(
                "only in B" if a is None else "only in A", f"{prefix}{key}", *map(described, (a, b))
            )
        elif a.dtype != b.dtype:
            yield Difference("dtype", f"{prefix}{key}", *(named(side.dtype) for side in (a, b)))
        elif (a.shape, a.original) != (b.shape, b.original):
            yield Difference("shape", f"{prefix}{key}", *map(shape_of, (a, b)))
    alike = {
        key: TensorInfo(held.shape, held.dtype)
        for key, held in tensors[0].items()
        if key in tensors[1] and is_alike(held, tensors[1][key])
    }
    for found in of_tensors(sides, alike, meter):
        yield found._replace(key=f"{prefix}{found.key}")
    yield from of_objects(sides, prefix)
    try:
        commons = [checkpoint.common_state() for checkpoint in (sides.a, sides.b)]
    except CheckpointingException as error:
        if sides.a.common != sides.b.common:
            yield Difference("values", f"{prefix}common state", str(error), "")
        return
    yield from of_values(f"{prefix}common state", *commons)


def is_alike(a: Stored, b: Stored) -> bool:
    return (a.dtype, a.shape, a.original) == (b.dtype, b.shape, b.original)


def of_tensors(sides: Sides, infos: Mapping[str, TensorInfo], meter: Meter) -> Iterator[Difference]:
    """Yield the tensors whose bits differ, by key."""
    readers = [RecordReader(checkpoint.folder, checkpoint.holds.is_ours) for checkpoint in sides[1:]]
    meter.expect(lambda: sum(info.dtype.itemsize * torch.Size(info.shape).numel() for info in infos.values()))
    counts: dict[str, tuple[int, float]] = {}
    for window in windows(infos, WINDOW):
        for key, pieces in window.items():
            for piece in pieces:
                pair = [torch.empty(piece.box.size, dtype=piece.dtype) for _ in readers]
                for checkpoint, reader, into in zip(sides[1:], readers, pair):
                    try:
                        reader.read(reads_of(checkpoint.holds.tensors, key, piece.box, into))
                    except (Damaged, OSError) as error:
                        raise CheckpointingException(f"{checkpoint.folder}: {error}") from error
                if not torch.equal(*map(as_bytes, pair)):
                    count, largest = counts.get(key, (0, 0.0))
                    more, distance = distance_of(*pair)
                    counts[key] = count + more, max(largest, distance)
                meter.add(piece.nbytes)
    for key, (count, largest) in sorted(counts.items()):
        numel = torch.Size(infos[key].shape).numel()
        yield Difference("values", key, f"{count:,} of {numel:,} elements", f"by up to {largest:.3g}")


def distance_of(a: torch.Tensor, b: torch.Tensor) -> tuple[int, float]:
    """Return the number of elements whose bits differ, and the largest distance, infinite from NaN."""
    size = a.dtype.itemsize
    bits = [as_bytes(side.contiguous()).view(-1, size) for side in (a, b)]
    differing = (bits[0] != bits[1]).any(1)
    kind = torch.complex128 if a.is_complex() else torch.float64
    left, right = (side.reshape(-1)[differing].to(kind) for side in (a, b))
    distances = (left - right).abs()
    # Infinity of the same sign is in both, or the bits were the same.
    distances = torch.where(left.isnan() & right.isnan(), torch.zeros_like(distances), distances)
    distances = torch.where(distances.isnan(), torch.full_like(distances, torch.inf), distances)
    return int(differing.sum()), float(distances.max())


def of_objects(sides: Sides, prefix: str) -> Iterator[Difference]:
    """Yield the objects that differ, such as the random states of ranks."""
    places = sides.a.holds.objects, sides.b.holds.objects
    for key in sorted({*places[0], *places[1]}):
        if not all(key in held for held in places):
            yield Difference("only in A" if key in places[0] else "only in B", f"{prefix}{key}")
            continue
        packed = []
        for checkpoint, held in zip(sides[1:], places):
            try:
                packed.append(
                    RecordReader(checkpoint.folder, checkpoint.holds.is_ours).read_object(held[key])
                )
            except (Damaged, OSError) as error:
                raise CheckpointingException(f"{checkpoint.folder}: {error}") from error
        yield from of_values(f"{prefix}{key}", *packed)


def described(stored: Optional[Stored]) -> str:
    return "" if stored is None else f"{named(stored.dtype)} {shape_of(stored)}"


def shape_of(stored: Stored) -> str:
    text = "x".join(map(str, stored.shape)) or "-"
    return (
        text if stored.original is None else f"{text}, flattened from {'x'.join(map(str, stored.original))}"
    )


def named(dtype: torch.dtype) -> str:
    return str(dtype).replace("torch.", "")


# --- Values that are no sharded tensors ---


def of_values(path: str, a: Any, b: Any) -> Iterator[Difference]:
    """Yield the differences of two values, in nested dicts, lists and tuples.

    The order of a dict's keys is none, that of a list is one. NaN is NaN, and no other number.
    """
    if type(a) is not type(b):
        yield Difference("type", path, *(f"{type(side).__name__} {shown(side)}" for side in (a, b)))
    elif isinstance(a, dict):
        # 1, 1.0 and True are the same key to Python.
        sides = [
            {(type(key).__name__, repr(key)): (key, value) for key, value in side.items()} for side in (a, b)
        ]
        for key in sorted({*sides[0], *sides[1]}):
            held = [side[key] for side in sides if key in side]
            name = f"{path}.{held[0][0] if isinstance(held[0][0], str) else f'({held[0][0]!r})'}"
            if len(held) == 2:
                yield from of_values(name, held[0][1], held[1][1])
            else:
                yield Difference("only in A" if key in sides[0] else "only in B", name)
        if isinstance(a, OrderedDict) and set(sides[0]) == set(sides[1]) and list(sides[0]) != list(sides[1]):
            yield Difference("values", path, "another order of keys", "")
    elif isinstance(a, (list, tuple)):
        if len(a) != len(b):
            yield Difference("values", path, f"{len(a)} entries", f"{len(b)} entries")
        for number, pair in enumerate(zip(a, b)):
            yield from of_values(f"{path}.{number}", *pair)
    elif isinstance(a, torch.Tensor):
        yield from of_plain_tensors(path, a, b)
    elif isinstance(a, bytes) and a != b:
        yield from of_packed(path, a, b)
    elif not is_same(a, b):
        yield Difference("values", path, shown(a), shown(b))


def of_plain_tensors(path: str, a: torch.Tensor, b: torch.Tensor) -> Iterator[Difference]:
    if a.dtype != b.dtype:
        yield Difference("dtype", path, named(a.dtype), named(b.dtype))
    elif a.shape != b.shape:
        yield Difference("shape", path, *("x".join(map(str, side.shape)) or "-" for side in (a, b)))
    elif a.layout is not torch.strided or a.is_quantized:
        if not is_same_pickle(a, b):
            yield Difference("values", path)
    elif not torch.equal(*(as_bytes(side.contiguous()) for side in (a, b))):
        count, largest = distance_of(a, b)
        yield Difference("values", path, f"{count:,} of {a.numel():,} elements", f"by up to {largest:.3g}")


def of_packed(path: str, a: bytes, b: bytes) -> Iterator[Difference]:
    """Yield the differences of values that were packed, as far as that runs none of their code."""
    try:
        unpacked = [values.loads(side) for side in (a, b)]
    except values.Unloadable:
        yield Difference("values", path, shown(a), shown(b))
        return
    yield from of_values(path, *unpacked)


def is_same(a: Any, b: Any) -> bool:
    if isinstance(a, (float, complex)):
        # NaN is not equal to itself, and -0.0 is to 0.0.
        return repr(a) == repr(b)
    if isinstance(a, (set, frozenset)):
        return {(type(part), part) for part in a} == {(type(part), part) for part in b}
    if hasattr(a, "tobytes") and hasattr(a, "dtype"):
        return (a.dtype, getattr(a, "shape", ()), a.tobytes()) == (
            b.dtype,
            getattr(b, "shape", ()),
            b.tobytes(),
        )
    try:
        return bool(a == b)
    except Exception:
        return is_same_pickle(a, b)


def is_same_pickle(a: Any, b: Any) -> bool:
    try:
        return pickle.dumps(a) == pickle.dumps(b)
    except Exception:
        return False


def shown(value: Any) -> str:
    """Return a value as a short text."""
    text = f"{len(value):,} bytes" if isinstance(value, bytes) else repr(value)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."


def counted(folders: Sequence[Path]) -> str:
    """Return what was compared, as a text."""
    folder = folders[0] / SHARDED if has_parts(folders[0]) else folders[0]
    holds = opened_alone(folder).holds
    return f"{len(holds.tensors)} tensors, {len(holds.objects)} objects"
