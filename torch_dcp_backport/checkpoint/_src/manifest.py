"""The manifest of a step folder: its step, and the size and checksum of every file. Written last.

Reads and writes files of one folder; must never import torch.
"""

from __future__ import annotations

import json
import os
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple, Optional

from torch_dcp_backport.publish import disk

NAME = "manifest.json"
FORMAT = 1
#: Bytes that are read at once for a checksum.
BLOCK = 4 * 2**20
ABSENT = f"no {NAME}"
#: Orders and sizes of files are below it: no training comes near it, so a larger number is damage. Its
#: successor would have to be written, and read again.
LARGEST = 2**53


class ManifestEntry(NamedTuple):
    nbytes: int
    crc32: int


@dataclass(frozen=True)
class Manifest:
    step: int
    #: Number of ranks that saved.
    world: int
    #: Seconds since 1970, by the clock of the first rank. Only shown, never compared.
    made_at: float
    #: The highest order among the steps beside it, plus 1: steps sort by it as they were published.
    order: int
    #: Path below the folder, with "/" -> size and checksum of the file when it was saved.
    files: Mapping[str, ManifestEntry]
    #: The number that the program gave the step; None without.
    metric: Optional[float] = None

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.files.values())


class BadManifest(Exception):
    """A folder has no manifest that can be followed."""

    #: In two words, for lists of folders.
    kind = "damaged"


class NotOurs(BadManifest):
    """A folder without a manifest, or with that of another program."""

    kind = "not ours"


class Newer(BadManifest):
    """A folder of a later release of this package, in a format that is not known here."""

    kind = "newer"


def entry_of(path: Path, read: Callable[[int], None] = lambda nbytes: None) -> ManifestEntry:
    """Return size and CRC32 of a regular file, in bounded memory.

    Args:
        path: the file.
        read: called with the number of bytes of each block that was read.

    Raises:
        OSError: it cannot be read, or is no regular file.
    """
    nbytes = crc = 0
    buffer = memoryview(bytearray(BLOCK))
    with open(disk.opened(path), "rb", buffering=0) as file:
        while size := file.readinto(buffer):
            nbytes, crc = nbytes + size, zlib.crc32(buffer[:size], crc)
            read(size)
    return ManifestEntry(nbytes, crc)


def crc_of(blocks: Iterable[bytes]) -> int:
    crc = 0
    for block in blocks:
        crc = zlib.crc32(block, crc)
    return crc


def paths_in(folder: Path) -> Iterator[str]:
    """Yield the path of every file below a folder but its manifest, with "/" between names.

    Raises:
        OSError: a folder in it cannot be listed.
    """

    def fail(error: OSError) -> None:
        raise error

    for place, entries in disk.walk(folder, fail):
        for entry in entries:
            name = (place / entry.name).relative_to(folder).as_posix()
            if not entry.is_dir(follow_symlinks=False) and os.path.isfile(entry.path) and name != NAME:
                yield name


def write(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, with which the folder counts as complete. It is not on disk yet.

    Raises:
        ValueError: `read` would refuse it; nothing is written.
    """
    content = {
        "format": FORMAT,
        "step": manifest.step,
        "world": manifest.world,
        "made_at": manifest.made_at,
        "order": manifest.order,
        **({} if manifest.metric is None else {"metric": manifest.metric}),
        "files": {name: list(manifest.files[name]) for name in sorted(manifest.files)},
    }
    text = json.dumps(content, indent=1)
    data = json.dumps({"crc32": zlib.crc32(text.encode()), "content": text}).encode()
    try:
        parsed(data)
    except BadManifest as error:
        raise ValueError(f"it could not be loaded again: {error}") from error
    disk.publish(folder / NAME, data, is_synced=False)


def read(folder: Path) -> Manifest:
    """Return the manifest of a folder.

    Raises:
        Damaged: there is none, or it is not what was written; its class tells which.
    """
    try:
        return parsed(disk.read_whole(folder / NAME))
    except (FileNotFoundError, NotADirectoryError):
        raise NotOurs(ABSENT) from None
    except OSError as error:
        raise BadManifest(f"{NAME} cannot be read: {error!r}") from error


def parsed(data: Optional[bytes]) -> Manifest:
    """Return the manifest in a file's content; None stands for an absent file.

    Raises:
        Damaged: it is not what was written.
    """
    if data is None:
        raise NotOurs(ABSENT)
    if len(data) > disk.MOST_SMALL:
        raise BadManifest(f"{NAME} has {len(data)} bytes, where {disk.MOST_SMALL} are the most")
    try:
        outer = json.loads(data)
        if not isinstance(outer, dict) or not {"crc32", "content"} <= set(outer):
            raise NotOurs(f"{NAME} is of another program")
        text = outer["content"]
        if zlib.crc32(text.encode()) != outer["crc32"]:
            raise BadManifest(f"{NAME} has another checksum than when it was written")
        content = json.loads(text)
        if content["format"] != FORMAT:
            raise Newer(f"{NAME} is of format {content['format']!r}; this release reads {FORMAT}")
        entries = {
            checked_name(name): ManifestEntry(*map(int, entry)) for name, entry in content["files"].items()
        }
        made_at, order = float(content["made_at"]), int(content["order"])
        metric = content.get("metric")
        largest = max([order, *(entry.nbytes for entry in entries.values())])
        if largest >= LARGEST:
            raise ValueError("a number that no step has")
        return Manifest(
            int(content["step"]),
            int(content["world"]),
            made_at,
            order,
            entries,
            None if metric is None else float(metric),
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise BadManifest(f"{NAME} cannot be read: {error!r}") from error


def checked_name(name: str) -> str:
    """Return the path of a file within the folder.

    Raises:
        ValueError: it leads out of the folder, or no file can have it.
    """
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or b"\0" in os.fsencode(name):
        raise ValueError(f"a file outside the folder: {name!r}")
    return name


def share_of(manifest: Manifest, share: int, shares: int) -> list[str]:
    """Return the names of the files in a share; all shares are of about the same size."""
    by_size = sorted(manifest.files, key=lambda name: (-manifest.files[name].nbytes, name))
    return by_size[share::shares]


def faults(
    folder: Path,
    manifest: Manifest,
    names: Optional[Iterable[str]] = None,
    is_absent_fine: bool = False,
) -> Iterator[str]:
    """Yield the files that are missing, no regular files or of another size, and why. Reads no content.

    Args:
        folder: the step's.
        manifest: of the step.
        names: the files to look at; None looks at all.
        is_absent_fine: leave out those that cannot be looked at.
    """
    for name in manifest.files if names is None else names:
        fault = fault_of(folder / name, manifest.files[name], is_absent_fine)
        if fault:
            yield f"{name}{fault}"


def fault_of(path: Path, entry: ManifestEntry, is_absent_fine: bool = False) -> str:
    """Return what is wrong with a file, by its size and kind; "" where nothing is."""
    try:
        seen = os.stat(path)
    except OSError as error:
        if is_absent_fine:
            return ""
        return f": {error.strerror}"
    if not stat.S_ISREG(seen.st_mode):
        return " is no regular file"
    return "" if seen.st_size == entry.nbytes else f" has {seen.st_size} bytes, and had {entry.nbytes}"


def wrong_checksums(
    folder: Path,
    manifest: Manifest,
    names: Optional[Sequence[str]] = None,
    read: Callable[[int], None] = lambda nbytes: None,
) -> Iterator[str]:
    """Yield the files that hold other bytes than when they were saved, and why.

    Args:
        folder: the step's.
        manifest: of the step.
        names: the files to check; None checks all.
        read: as of `entry_of`.
    """
    for name in manifest.files if names is None else names:
        expected = manifest.files[name]
        # A file of another size may be without end, and is not read.
        fault = fault_of(folder / name, expected)
        if not fault:
            try:
                crc = entry_of(folder / name, read).crc32
            except OSError as error:
                fault = f": {error.strerror}"
            else:
                fault = "" if crc == expected.crc32 else f" has CRC32 {crc:08x}, and had {expected.crc32:08x}"
        if fault:
            yield f"{name}{fault}"
