"""The manifest of a step folder: its step, and the size and checksum of every file. Written last.

Reads and writes files of one folder; must never import torch.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Optional

from torch_dcp_backport.dist_checkpointing.engine import files

NAME = "manifest.json"
FORMAT = 1
#: Bytes that are read at once for a checksum.
BLOCK = 4 * 2**20
ABSENT = f"no {NAME}: the save did not come to its end"


class Entry(NamedTuple):
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
    files: Mapping[str, Entry]

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.files.values())


class Damaged(Exception):
    """A folder does not hold what its manifest says, or has none."""


def entry_of(path: Path) -> Entry:
    """Return size and CRC32 of a file, in bounded memory."""
    nbytes = crc = 0
    buffer = memoryview(bytearray(BLOCK))
    with open(path, "rb", buffering=0) as file:
        while size := file.readinto(buffer):
            nbytes, crc = nbytes + size, zlib.crc32(buffer[:size], crc)
    return Entry(nbytes, crc)


def crc_of(blocks: Iterable[bytes]) -> int:
    crc = 0
    for block in blocks:
        crc = zlib.crc32(block, crc)
    return crc


def paths_in(folder: Path) -> Iterator[str]:
    """Yield the path of every file below a folder but its manifests, with "/" between names."""
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name != NAME:
            yield name


def write(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, with which the folder counts as complete. It is not on disk yet."""
    content = {
        "format": FORMAT,
        "step": manifest.step,
        "world": manifest.world,
        "made_at": manifest.made_at,
        "order": manifest.order,
        "files": {name: list(manifest.files[name]) for name in sorted(manifest.files)},
    }
    text = json.dumps(content, indent=1)
    files.step(f"write {NAME}")
    (folder / NAME).write_text(json.dumps({"crc32": zlib.crc32(text.encode()), "content": text}))


def read(folder: Path) -> Manifest:
    """Return the manifest of a folder.

    Raises:
        Damaged: there is none, or it is not what was written.
    """
    try:
        return parsed((folder / NAME).read_bytes())
    except FileNotFoundError:
        raise Damaged(ABSENT) from None
    except OSError as error:
        raise Damaged(f"{NAME} cannot be read: {error!r}") from error


def parsed(data: Optional[bytes]) -> Manifest:
    """Return the manifest in a file's content; None stands for an absent file.

    Raises:
        Damaged: it is not what was written.
    """
    if data is None:
        raise Damaged(ABSENT)
    try:
        outer = json.loads(data)
        text = outer["content"]
        if zlib.crc32(text.encode()) != outer["crc32"]:
            raise Damaged(f"{NAME} has another checksum than when it was written")
        content = json.loads(text)
        if content["format"] != FORMAT:
            raise Damaged(f"{NAME} is of format {content['format']!r}; this release reads {FORMAT}")
        entries = {name: Entry(*map(int, entry)) for name, entry in content["files"].items()}
        made_at, order = float(content["made_at"]), int(content["order"])
        return Manifest(int(content["step"]), int(content["world"]), made_at, order, entries)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"{NAME} cannot be read: {error!r}") from error


def share_of(manifest: Manifest, share: int, shares: int) -> list[str]:
    """Return the names of the files in a share; all shares are of about the same size."""
    by_size = sorted(manifest.files, key=lambda name: (-manifest.files[name].nbytes, name))
    return by_size[share::shares]


def faults(folder: Path, manifest: Manifest) -> Iterator[str]:
    """Yield the files that are missing or of another size, and why. Reads no content."""
    for name, entry in manifest.files.items():
        try:
            nbytes = (folder / name).stat().st_size
        except OSError as error:
            yield f"{name}: {error.strerror}"
            continue
        if nbytes != entry.nbytes:
            yield f"{name} has {nbytes} bytes, and had {entry.nbytes}"


def wrong_checksums(folder: Path, manifest: Manifest, names: Optional[Sequence[str]] = None) -> Iterator[str]:
    """Yield the files that hold other bytes than when they were saved, and why; None checks all."""
    for name in manifest.files if names is None else names:
        try:
            entry = entry_of(folder / name)
        except OSError as error:
            yield f"{name}: {error.strerror}"
            continue
        if entry != manifest.files[name]:
            yield f"{name} has CRC32 {entry.crc32:08x}, and had {manifest.files[name].crc32:08x}"
