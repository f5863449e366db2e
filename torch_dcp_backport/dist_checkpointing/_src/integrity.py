"""`integrity.json`: the SHA-256 of every file of a checkpoint, in Megatron's form (from its release 0.17 on).

A checksum shows damage; these show a file that was replaced, too. Reads and hashes; knows no ranks.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Union

from torch_dcp_backport.dist_checkpointing._src import metadata
from torch_dcp_backport.dist_checkpointing._src.unpickle import Refused
from torch_dcp_backport.dist_checkpointing.core import CONFIG_FNAME
from torch_dcp_backport.publish import disk
from torch_dcp_backport.transfer import Problem

NAME = "integrity.json"
ALGORITHM = "sha256"
#: Bytes that are read and hashed at once.
BLOCK = 2**20
#: File -> the SHA-256 of its bytes, as hexadecimal digits.
Digests = dict[str, str]


class Unknown(Exception):
    """There is no list of digests, or it cannot be read here."""


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file.

    Raises:
        OSError: it cannot be read.
    """
    total, block = hashlib.sha256(), memoryview(bytearray(BLOCK))
    with open(disk.opened(path), "rb", buffering=0) as file:
        while count := file.readinto(block):
            total.update(block[:count])
    return total.hexdigest()


def digest(data: Union[bytes, disk.Pieces]) -> str:
    total = hashlib.sha256()
    for piece in (data,) if isinstance(data, bytes) else data:
        total.update(piece)
    return total.hexdigest()


def to_bytes(digests: Mapping[str, str]) -> bytes:
    return json.dumps({"algorithm": ALGORITHM, "files": dict(sorted(digests.items()))}, indent=2).encode()


def read(folder: Path) -> Digests:
    """Return the digests of a checkpoint's files.

    Raises:
        Unknown: there are none, or not in a form that is known here.
    """
    try:
        data = disk.read_whole(folder / NAME)
    except FileNotFoundError:
        raise Unknown(f"{folder} has no {NAME}: it was saved without verify_integrity=True") from None
    except OSError as error:
        raise Unknown(f"{folder / NAME} cannot be read: {error.strerror}") from None
    try:
        known: Any = json.loads(data)
        algorithm, listed = known["algorithm"], dict(known["files"])
        names = {metadata.file_name(name): str(value) for name, value in listed.items()}
        os.fsencode("".join(names))  # half a character is no name
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError, Refused) as error:
        raise Unknown(f"{folder / NAME} is damaged: {error!r}") from None
    if algorithm != ALGORITHM:
        raise Unknown(f"{folder / NAME} has another algorithm: {algorithm} (known is {ALGORITHM})")
    return names


def problem_of(folder: Path, name: str, expected: str) -> list[Problem]:
    """Return the problem of a listed file, if it has one."""
    try:
        actual = digest_of(folder / name)
    except OSError as error:
        return [Problem("a file cannot be read", name, str(error.strerror))]
    what = "a file is not the one that was saved (wrong SHA-256)"
    return [] if actual == expected else [Problem(what, name, actual, expected)]


def unlisted(digests: Mapping[str, str], needed: Iterable[str]) -> list[Problem]:
    """Return the problems of files that are not in the list."""
    names = sorted({*needed} - {*digests})
    return [Problem(f"{NAME} does not list a file", name) for name in names]


def named_in(folder: Path) -> list[str]:
    """Return the small files that a list of a checkpoint must have, where they are there."""
    return [name for name in (metadata.NAME, CONFIG_FNAME) if os.path.lexists(folder / name)]


def write_all(folder: Path) -> None:
    """Save the digests of all files that are in a folder, but for those of its folders."""
    names = sorted(path.name for path in folder.iterdir() if path.is_file() and path.name != NAME)
    disk.publish(folder / NAME, to_bytes({name: digest_of(folder / name) for name in names}))
    disk.sync_folder(folder)


def is_there(folder: Path) -> bool:
    return os.path.lexists(folder / NAME)
