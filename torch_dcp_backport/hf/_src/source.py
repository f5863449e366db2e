"""Sources of tensors, folders of safetensors files or dicts: described at once, read slice by slice.

One rank's view; must never talk to other ranks, nor read a full tensor.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Optional, Protocol, Union, runtime_checkable

import torch

from torch_dcp_backport import compat
from torch_dcp_backport.hf._src.format import FileEntry, FormatError, header_in, opened
from torch_dcp_backport.transfer import Box, Problem, TensorInfo, has_slices, is_freed, part_of, whole

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
#: The places of a file, and the bytes at each, that distinguish it from another revision of the same model.
SAMPLES, SAMPLE_BYTES = 16, 64


class Configuration(Protocol):
    """A configuration of transformers or of peft."""

    def to_dict(self) -> dict[str, Any]:
        """Return the settings by name."""


@runtime_checkable
class Source(Protocol):
    """HF tensors that a rank can read parts of.

    `Folder` and `Given` are such sources. Any object with these attributes and methods is one.
    """

    #: HF key -> shape and dtype, in the order in which they are best read.
    tensors: dict[str, TensorInfo]
    #: The model's config.json.
    config: dict[str, Any]
    #: Why this rank does not see the model; "" where it does.
    absent: str
    #: Problems of the model that this rank sees.
    problems: list[Problem]

    def part(self, key: str, box: Box) -> torch.Tensor:
        """Return the part of a tensor in a box, as a view where possible. Callers must not write to it.

        Args:
            key: an HF key of `tensors`.
            box: a box in the tensor's own coordinates, in elements.
        """

    def digest(self) -> str:
        """Return a text that is the same on every rank that sees the same model."""


class SeenFile(NamedTuple):
    """A file as it was when its header was read."""

    nbytes: int
    #: As of `stamp_of`.
    stamp: tuple[int, ...]
    #: Digest of some of its bytes: another revision of a model has the same header.
    samples: bytes


NOT_SEEN = SeenFile(0, (), b"")


class Description(NamedTuple):
    """A folder without problems as one rank has read it, for others that see the same files."""

    #: As of `marks_of`.
    marks: tuple[Optional[tuple[int, ...]], ...]
    config: dict[str, Any]
    files: dict[str, SeenFile]
    #: HF key -> its file, and its place in the file.
    entries: dict[str, tuple[str, FileEntry]]
    digest: str


class Folder:
    """A folder as `from_pretrained` reads it: config.json, and a safetensors file or several with an index.

    Files are mapped when they are first read. A file that another program cuts short after that ends the
    process (SIGBUS): write a new model into a new folder.
    """

    def __init__(self, path: Union[str, Path]) -> None:
        """Read the index and all headers. Errors in them go to `problems`.

        Args:
            path: the folder. If it has no model, `absent` says why.
        """
        self.path = Path(path)
        self.tensors: dict[str, TensorInfo] = {}
        self.config: dict[str, Any] = {}
        self.problems: list[Problem] = []
        self.absent = ""
        self._entries: dict[str, tuple[str, FileEntry]] = {}
        self._files: dict[str, SeenFile] = {}
        self._mapped: dict[str, torch.Tensor] = {}
        self._digest = ""
        # Before all that is read: a change in between is seen by a rank that compares them.
        self.marks = marks_of(self.path)
        if not self.path.is_dir():
            self.absent = f"{self.path} is no folder"
        elif not (self.path / CONFIG).is_file():
            self.absent = f"{self.path} has no {CONFIG}"
        else:
            self.config = self._json(CONFIG)
            self._read(self._index())

    @classmethod
    def described(cls, path: Union[str, Path], seen: Description) -> Folder:
        """Return the folder that another rank has read, without reading it again.

        Args:
            path: the folder, as this rank sees it.
            seen: the other rank's `description`.
        """
        folder = cls.__new__(cls)
        folder.path, folder.absent, folder.problems = Path(path), "", []
        folder.marks = seen.marks
        folder.config, folder._digest, folder._mapped = dict(seen.config), seen.digest, {}
        folder._files, folder._entries = dict(seen.files), dict(seen.entries)
        folder.tensors = {key: entry.info for key, (_, entry) in seen.entries.items()}
        return folder

    def description(self) -> Optional[Description]:
        """Return what other ranks need to know of the files; None where there are problems."""
        if self.absent or self.problems:
            return None
        return Description(self.marks, self.config, self._files, self._entries, self.digest())

    def part(self, key: str, box: Box) -> torch.Tensor:
        """Return the part of a tensor in a box: a view of the file, or a copy of rows not aligned in it.

        Args:
            key: an HF key of `tensors`.
            box: a box in the tensor's own coordinates, in elements.
        """
        name, entry = self._entries[key]
        shape, dtype = entry.info
        data = self._map(name)[entry.start : entry.stop]
        holds = whole(shape)
        if entry.start % dtype.itemsize:
            # torch has no tensors at such addresses, and some writers do not align: a copy of the box's rows.
            if shape and shape[0]:
                row = data.numel() // shape[0]
                data = data.narrow(0, box.offset[0] * row, box.size[0] * row)
                holds = Box((box.offset[0], *holds.offset[1:]), (box.size[0], *shape[1:]))
            data = data.clone()
        return part_of(data.view(dtype).view(holds.size), holds, box)

    @property
    def files(self) -> int:
        """The number of files with tensors."""
        return len(self._files)

    @property
    def copied(self) -> set[str]:
        """Keys of tensors that are read as copies: they begin at no multiple of their element's size."""
        return {key for key, (_, entry) in self._entries.items() if entry.start % entry.info.dtype.itemsize}

    def digest(self) -> str:
        """Return a digest of headers, config and bytes of each file: another revision has the same shapes."""
        if not self._digest:
            rows = [f"{key} {info} {self._entries[key][0]}" for key, info in self.tensors.items()]
            rows.append(json.dumps(self.config, sort_keys=True))
            rows += [f"{name} {file.nbytes} {file.samples.hex()}" for name, file in self._files.items()]
            self._digest = digest_of(rows)
        return self._digest

    def _json(self, name: str) -> dict[str, Any]:
        try:
            value = json.loads((self.path / name).read_bytes())
        except (OSError, ValueError) as error:
            self.problems.append(Problem("cannot be read", str(self.path / name), got=str(error)))
            return {}
        if not isinstance(value, dict):
            self.problems.append(Problem("no JSON object", str(self.path / name)))
            return {}
        return value

    def _index(self) -> dict[str, str]:
        """Return HF key -> its file in the index, empty without an index; note the files to be read."""
        has_index, has_single = (self.path / INDEX).is_file(), (self.path / SINGLE).is_file()
        if not has_index:
            if has_single:
                self._files[SINGLE] = NOT_SEEN
            else:
                self.absent = f"{self.path} has neither {SINGLE} nor {INDEX}"
            return {}
        index = self._json(INDEX).get("weight_map")
        if not isinstance(index, dict) or not all(isinstance(name, str) for name in index.values()):
            self.problems.append(Problem("no weight_map", str(self.path / INDEX)))
            return {}
        names = sorted(set(index.values()))
        outside = [name for name in names if os.path.isabs(name) or ".." in Path(name).parts]
        if outside:
            self.problems.append(
                Problem("a file outside of the folder", str(self.path / INDEX), got=outside[0])
            )
            return {}
        self._files.update(dict.fromkeys(names, NOT_SEEN))
        if has_single and SINGLE not in self._files:
            # transformers would take the single file, and others the index.
            what = f"two models in one folder: {SINGLE}, and the files of {INDEX}"
            self.problems.append(Problem(what, str(self.path)))
        return index

    def _read(self, index: Mapping[str, str]) -> None:
        for name in self._files:
            path = self.path / name
            try:
                entries, self._files[name] = looked_at(path)
            except (FormatError, OSError) as error:
                self.problems.append(Problem("no whole safetensors file", str(path), got=str(error)))
                continue
            for key, entry in entries.items():
                if key in self._entries:
                    files = f"{self._entries[key][0]} and {name}"
                    self.problems.append(Problem("in two files", key, got=files, expected="one"))
                self._entries[key] = name, entry
                self.tensors[key] = entry.info
        if self.problems:
            return
        for key, name in index.items():
            real = self._entries[key][0] if key in self._entries else "none"
            if real != name:
                self.problems.append(Problem("not in the file that the index says", key, real, name))

    def _map(self, name: str) -> torch.Tensor:
        """Return a file's bytes, in the system's page cache, which all processes of a machine share.

        Raises:
            RuntimeError: it is no longer the file whose header was read.
        """
        if name not in self._mapped:
            path, seen = self.path / name, self._files[name]
            mapped = torch.from_file(str(path), shared=False, size=seen.nbytes, dtype=torch.uint8)
            # Behind the open: what has the name now has been there since, or is refused.
            if stamp_of(os.stat(path)) != seen.stamp:
                self._compare(name)
            self._mapped[name] = mapped
        return self._mapped[name]

    def _compare(self, name: str) -> None:
        """Look at a file again that has other times than when its header was read, here or by another rank.

        Another machine may know older times of a file, and a program may touch it: neither is an error.

        Raises:
            RuntimeError: its header, size or samples are others.
        """
        entries, seen = looked_at(self.path / name)
        before = {key: entry for key, (file, entry) in self._entries.items() if file == name}
        known = self._files[name]
        if entries != before or (seen.nbytes, seen.samples) != (known.nbytes, known.samples):
            raise RuntimeError(f"{self.path / name} was changed while it was read")
        self._files[name] = seen


def looked_at(path: Path) -> tuple[dict[str, FileEntry], SeenFile]:
    """Return the tensors of a file, and its identity, with a single open.

    Raises:
        FormatError, OSError: as `read_header`.
    """
    samples = hashlib.blake2b(digest_size=16)
    with opened(path) as file:
        entries = header_in(file)
        seen = os.fstat(file.fileno())
        for number in range(SAMPLES):
            # The last sample ends with the file: headers of equal length have the same first bytes.
            start = max(0, seen.st_size * (number + 1) // SAMPLES - SAMPLE_BYTES)
            samples.update(os.pread(file.fileno(), SAMPLE_BYTES, start))
    return entries, SeenFile(seen.st_size, stamp_of(seen), samples.digest())


def stamp_of(seen: os.stat_result) -> tuple[int, ...]:
    """Return numbers of a file of which some change with the file; the same on all machines that see it."""
    return seen.st_ino, seen.st_size, seen.st_mtime_ns


def marks_of(path: Path) -> tuple[Optional[tuple[int, ...]], ...]:
    """Return the identity of a model's folder, with a few calls; it is the same where the folder is shared.

    A copy on another machine's disk has other inodes or times. Links may lead elsewhere on each machine.
    """
    marks: list[Optional[tuple[int, ...]]] = []
    names = ["", CONFIG, INDEX, SINGLE]
    with contextlib.suppress(OSError), os.scandir(path) as entries:
        names += sorted(entry.name for entry in entries if entry.is_symlink())
    for name in names:
        try:
            marks.append(stamp_of(os.stat(path / name)))
        except OSError:
            marks.append(None)
    return tuple(marks)


def copied_of(source: Source) -> set[str]:
    """Return the keys whose parts are copies, as a source says: of other tensors parts are views."""
    return set(getattr(source, "copied", ()))


def source_of(source: object) -> Source:
    """Return the source that a caller passes, or that of the folder that it names.

    Raises:
        TypeError: neither a folder nor a source.
    """
    if isinstance(source, (str, os.PathLike)):
        return Folder(os.fspath(source))
    if not isinstance(source, Source):
        raise TypeError(f"a {type(source).__name__} is neither a folder nor an hf.Source")
    return source


class Given:
    """A dict of full tensors, or of slices of files as safetensors' `get_slice` gives them."""

    def __init__(self, tensors: Mapping[str, Any], config: Mapping[str, Any], absent: str = "") -> None:
        """Describe the tensors. A value that is not a tensor goes to `problems`.

        Args:
            tensors: HF key -> full tensor, or slice of a file.
            config: the model's configuration, as config.json has it.
            absent: why this rank has no tensors; "" where it has them.
        """
        self.tensors: dict[str, TensorInfo] = {}
        self.config = dict(config)
        self.problems: list[Problem] = []
        self.absent = absent
        self._values: dict[str, Any] = {}
        for key, value in tensors.items():
            if hasattr(value, "get_shape"):
                dtype = compat.STORED_DTYPES.get(str(value.get_dtype()))
                usable, shape = dtype is not None, tuple(value.get_shape())
            else:
                usable = torch.is_tensor(value) and not isinstance(value, compat.DTensor)
                usable = usable and not value.is_meta and has_slices(value) and not is_freed(value)
                shape, dtype = tuple(getattr(value, "shape", ())), getattr(value, "dtype", None)
            if not usable or dtype is None:
                self.problems.append(Problem("not a tensor with values", key, f"{type(value).__name__}"))
                continue
            self.tensors[key] = TensorInfo(shape, dtype)
            self._values[key] = value

    def part(self, key: str, box: Box) -> torch.Tensor:
        """Return the part of a tensor in a box: a view of a tensor, or the part of a file's slice.

        Args:
            key: an HF key of `tensors`.
            box: a box in the tensor's own coordinates, in elements.

        Raises:
            RuntimeError: the tensor has another shape now.
        """
        value, shape = self._values[key], self.tensors[key].shape
        limits, shape_now = whole(shape), tuple(value.shape if torch.is_tensor(value) else value.get_shape())
        if shape_now != shape:
            raise RuntimeError(f"{key} was changed while it was read: it was {shape} and is {shape_now}")
        if torch.is_tensor(value):
            return part_of(value.detach(), limits, box)
        part: torch.Tensor = value[box.within(limits)]
        return part

    def digest(self) -> str:
        """Return a digest of keys, shapes and dtypes: the values are the caller's."""
        return digest_of(f"{key} {info}" for key, info in sorted(self.tensors.items()))


def digest_of(rows: Iterable[str]) -> str:
    return hashlib.blake2b("\n".join(rows).encode(), digest_size=16).hexdigest()
