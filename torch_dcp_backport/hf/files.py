"""The files of an export: written beside what is there, and published as a whole or not at all.

One process's work; must never talk to other ranks, and never touch what it did not write or replace.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Optional

from torch_dcp_backport.hf.format import Entry, make_header, nbytes_of
from torch_dcp_backport.hf.source import INDEX, SINGLE
from torch_dcp_backport.transfer import TensorInfo

#: Weight files of an older export of ours or of transformers, beside those that its index names.
NUMBERED = re.compile(r"model(-[0-9a-f]{8})?-\d{5}-of-\d{5}\.safetensors")
LOCK = ".lock"
#: What a file system says that cannot reserve room.
CANNOT_RESERVE = (errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS)


def planned(tensors: Mapping[str, TensorInfo], file_bytes: int, tag: str = "") -> dict[str, list[str]]:
    """File name -> HF keys, in their order: as many as `file_bytes` hold, or one that is larger."""
    files: list[list[str]] = []
    room = 0
    for key, info in tensors.items():
        if not files or nbytes_of(info) > room:
            files.append([])
            room = file_bytes
        files[-1].append(key)
        room -= nbytes_of(info)
    if len(files) == 1:
        return {SINGLE: files[0]}
    stem, count = f"model-{tag}" if tag else "model", len(files)
    return {f"{stem}-{number:05d}-of-{count:05d}.safetensors": keys for number, keys in enumerate(files, 1)}


def weights_in(folder: Path) -> list[str]:
    """The weight files of the model in a folder: what `from_pretrained` would read, or has read before."""
    named: set[str] = set()
    with contextlib.suppress(OSError, ValueError, AttributeError):
        named.update(map(str, json.loads((folder / INDEX).read_bytes()).get("weight_map", {}).values()))
    names = os.listdir(folder) if folder.is_dir() else ()
    named |= {SINGLE, INDEX}
    return sorted(name for name in names if name in named or NUMBERED.fullmatch(name))


class Draft:
    """An export under way: a hidden folder, in the target if that is there, else beside it.

    Until `publish` the target is as it was; a process that dies leaves the hidden folder alone, and the next
    export into the same target clears it away.
    """

    def __init__(self, target: Path, overwrite: bool) -> None:
        """Make the hidden folder.

        Raises:
            FileExistsError: the target holds a model, and is not to be overwritten.
            BlockingIOError: another export into the same target is under way.
            OSError: the folder cannot be made.
        """
        self.target = target = Path(os.path.abspath(target))
        self.stale = weights_in(target)
        if self.stale and not overwrite:
            raise FileExistsError(f"{target} holds {self.stale[0]}; Export(overwrite=True) replaces a model")
        self.is_new = not target.exists()
        target.parent.mkdir(parents=True, exist_ok=True)
        self.folder = target.parent / f".{target.name}.partial" if self.is_new else target / ".partial"
        self.folder.mkdir(exist_ok=True)
        self._lock: Optional[int] = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            # The lock goes with its process: a folder without one was left behind by a process that died.
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(self._lock), os.stat(self.folder / LOCK)):
                raise BlockingIOError("the lock is that of an export that ended just now")
        except OSError:
            os.close(self._lock)
            self._lock = None
            raise BlockingIOError(f"another export into {target} is under way ({self.folder})") from None
        self._clear()
        #: HF key -> its file, and where in it.
        self.places: dict[str, tuple[int, Entry]] = {}
        self._open: dict[str, int] = {}

    def reserve(self, tensors: Mapping[str, TensorInfo], file_bytes: int) -> None:
        """Write all headers, and reserve room for all tensors.

        Raises:
            OSError: there is no room, the disk failed.
            ValueError: a dtype that safetensors does not have.
        """
        names = planned(tensors, file_bytes)
        if any(name in self.stale for name in names) and len(names) > 1:
            # Names of its own: the old model stays whole until the new index takes its place.
            names = planned(tensors, file_bytes, os.urandom(4).hex())
        index: dict[str, str] = {}
        for name, keys in names.items():
            header, entries = make_header({key: tensors[key] for key in keys})
            file = os.open(self.folder / name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
            self._open[name] = file
            size = max((entry.stop for entry in entries.values()), default=len(header))
            reserve(file, size)
            write_at(file, header, 0)
            self.places.update((key, (file, entry)) for key, entry in entries.items())
            index.update(dict.fromkeys(keys, name))
        if len(names) > 1:
            total = sum(map(nbytes_of, tensors.values()))
            value = {"metadata": {"total_size": total}, "weight_map": index}
            self.add(INDEX, json.dumps(value, indent=2).encode())

    def add(self, name: str, content: bytes) -> None:
        """Write a small file."""
        path = self.folder / name
        path.write_bytes(content)
        with open(path, "rb") as file:
            os.fsync(file.fileno())

    def write(self, key: str, offset: int, data: memoryview) -> None:
        """Write bytes of a tensor, from the one at `offset` on.

        Raises:
            OSError: the disk failed.
        """
        file, entry = self.places[key]
        write_at(file, data, entry.start + offset)

    def sync(self) -> None:
        """Wait until everything is on the disk.

        Raises:
            OSError: the disk failed.
        """
        for file in self._open.values():
            os.fsync(file)
        sync_folder(self.folder)

    def publish(self) -> list[str]:
        """Put the export in its place; the names of older weight files that were removed.

        A new folder appears at once. In one that is there already the last rename is that of the file by
        which readers find the others: the index, or `model.safetensors`.

        Raises:
            OSError: the folder was changed meanwhile.
        """
        self._close_files()
        self._unlock()
        if self.is_new:
            os.rename(self.folder, self.target)
            sync_folder(self.target.parent)
            return []
        written = sorted(os.listdir(self.folder), key=lambda name: (name == INDEX, name == SINGLE, name))
        for name in written:
            os.rename(self.folder / name, self.target / name)
        removed = [name for name in self.stale if name not in written]
        # Of two models in one folder transformers takes the single file.
        for name in sorted(removed, key=lambda name: name != SINGLE):
            os.unlink(self.target / name)
        os.rmdir(self.folder)
        sync_folder(self.target)
        return removed

    def discard(self) -> None:
        """Remove what was written. Does nothing after `publish`."""
        self._close_files()
        if self._lock is not None:
            self._clear()
            self._unlock()
            os.rmdir(self.folder)

    def _clear(self) -> None:
        for path in self.folder.iterdir():
            if path.name == LOCK:
                continue
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()

    def _close_files(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def _unlock(self) -> None:
        if self._lock is not None:
            (self.folder / LOCK).unlink()
            os.close(self._lock)
            self._lock = None


@contextlib.contextmanager
def discarding(draft: Optional[Draft]) -> Iterator[None]:
    """Leave nothing of a draft that was not published."""
    try:
        yield
    finally:
        if draft is not None:
            with contextlib.suppress(OSError):
                draft.discard()


def reserve(file: int, size: int) -> None:
    """Take the room of a whole file now: later a full disk would be an error in the middle.

    Raises:
        OSError: there is not so much room.
    """
    try:
        if size:
            os.posix_fallocate(file, 0, size)
    except OSError as error:
        if error.errno not in CANNOT_RESERVE:
            raise
        os.ftruncate(file, size)


def write_at(file: int, data: memoryview | bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(file, view, offset)
        view, offset = view[written:], offset + written


def sync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
