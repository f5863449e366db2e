"""The steps that make a checkpoint, in order: the old marker is removed first, the new marker is last.

Runs on the first rank alone. Between any two steps the folder is no checkpoint, or a complete one.
"""

from __future__ import annotations

import os
import re
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Optional, Union

from torch_dcp_backport.dist_checkpointing._src import integrity, metadata
from torch_dcp_backport.dist_checkpointing._src.body import Output
from torch_dcp_backport.dist_checkpointing._src.columns import Content
from torch_dcp_backport.dist_checkpointing._src.metadata import Index
from torch_dcp_backport.dist_checkpointing.core import (
    CONFIG_FNAME,
    SHARDED_BACKEND,
    CheckpointingConfig,
    CheckpointingException,
    config_bytes,
)
from torch_dcp_backport.publish import disk, drafts
from torch_dcp_backport.transfer import Problem, Refusal, largest_answer

# --- claims to a folder's files ---
#
# Knows no ranks: a refusal here is a problem of this rank, which all ranks get.


_LOCK = threading.Lock()
#: Folder -> the last save that was planned for it, unless it can no longer be committed.
_holders: weakref.WeakValueDictionary[str, Claim] = weakref.WeakValueDictionary()


class Claim:
    """The right of one save to the files of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = os.path.realpath(folder)
        #: From the first byte on until the save is committed, or has failed.
        self.is_writing = False
        self._before: Optional[Claim] = None

    def take(self) -> None:
        """Take the folder from a save that has written nothing yet, such as a request that never runs.

        Raises:
            CheckpointingException: the save before has written.
        """
        with _LOCK:
            before = _holders.get(self.folder)
            if before is not None and before.is_writing:
                raise CheckpointingException(
                    f"another save to {self.folder} is under way: finalize its request first"
                )
            self._before = before
            _holders[self.folder] = self

    def return_it(self) -> None:
        """Leave the folder to the save before: nothing in it was touched."""
        with _LOCK:
            if _holders.get(self.folder) is self:
                del _holders[self.folder]
                if self._before is not None:
                    _holders[self.folder] = self._before

    def keep(self) -> None:
        """Have the folder for good: the files of the save before are gone."""
        self._before = None

    @property
    def is_held(self) -> bool:
        """Return whether no other save has taken the folder since."""
        return _holders.get(self.folder) is self

    def begin(self) -> None:
        """Begin to write.

        Raises:
            CheckpointingException: the folder is another save's by now.
        """
        with _LOCK:
            if not self.is_held:
                raise CheckpointingException(
                    f"a later save has taken {self.folder}: this one has no files there"
                )
            self.is_writing = True

    def end(self) -> None:
        """Be done with the folder, well or not."""
        with _LOCK:
            self.is_writing = False
            if self.is_held:
                del _holders[self.folder]


# --- the commit ---

COMMON = "common.pt"
#: The names that this room and torch give to files of records.
RECORDS = re.compile(r"__\d+_\d+\.distcp")
#: Files without records.
SMALL = (CONFIG_FNAME, metadata.NAME, COMMON)
#: The files by which readers know a checkpoint, ours and torch's.
MARKERS = (CONFIG_FNAME, metadata.NAME)
MARKER = config_bytes(CheckpointingConfig(SHARDED_BACKEND))
#: Seconds for which other ranks' files may stay unseen: network file systems cache that a name was not there.
PATIENCE = 5.0


def file_of(rank: int) -> str:
    return f"__{rank}_0.distcp"


def clear(folder: Path) -> None:
    """Make a folder no checkpoint: a save that fails must not leave a mixture of two that loads."""
    drafts.unmark(folder, MARKERS)
    disk.step("remove old records")
    disk.remove(
        [path for path in folder.iterdir() if RECORDS.fullmatch(path.name) or path.name == integrity.NAME]
    )


def publish(
    folder: Path, index: Index, common: bytes, outputs: Mapping[int, Output], verify_integrity: bool = False
) -> None:
    """Write the small files as `publish_described` does, with the `.metadata` of an index."""
    index.is_ours, index.common = True, (len(common), zlib.crc32(common))
    publish_described(folder, metadata.to_bytes(index), common, outputs, verify_integrity)


def publish_described(
    folder: Path,
    described: Union[bytes, Content],
    common: bytes,
    outputs: Mapping[int, Output],
    verify_integrity: bool = False,
) -> None:
    """Write the small files; from the last on the folder is a checkpoint.

    Args:
        described: the content of `.metadata`.
        verify_integrity: list the SHA-256 of every file, too; `outputs` has those of the ranks' files.

    Raises:
        Refusal: a rank's file is not in this folder; no load could take the small files.
    """
    nbytes = len(described) if isinstance(described, bytes) else described.sent_bytes
    refuse_too_large(outputs, nbytes + len(common), "their size")
    end = time.monotonic() + PATIENCE
    findings = [
        (rank, Problem("a rank's file is not seen by the first rank", output.file, got, "a shared folder"))
        for rank, output in outputs.items()
        for got in [unseen(folder / output.file, output.nbytes, end)]
        if got
    ]
    if findings:
        raise Refusal(findings)
    small: dict[str, Union[bytes, disk.Pieces]] = {
        COMMON: common,
        metadata.NAME: described,
        CONFIG_FNAME: MARKER,
    }
    if verify_integrity:
        digests = {name: integrity.digest(data) for name, data in small.items()}
        digests.update((output.file, output.sha256) for output in outputs.values() if output.nbytes)
        listed = small[integrity.NAME] = integrity.to_bytes(digests)
        if len(listed) > disk.MOST_SMALL:
            got, expected = f"{len(listed)} bytes", f"at most {disk.MOST_SMALL}"
            problem = Problem("more files than verify_integrity can list", integrity.NAME, got, expected)
            raise Refusal([(min(outputs), problem)])
    drafts.publish(folder, small, CONFIG_FNAME, MARKERS)


def refuse_too_large(ranks: Iterable[int], nbytes: int, what: str) -> None:
    """Refuse a save whose small files are more than a load can hand to all ranks in one message.

    Args:
        ranks: those that save.
        nbytes: of the index, with its checksums, and the common state; before the save is written, a lower
            bound.
        what: what `nbytes` is, for the error.

    Raises:
        Refusal: it could be saved, and never be loaded here.
    """
    most = largest_answer() - len(MARKER)
    if nbytes > most:
        got, expected = f"{what} is {nbytes} bytes", f"at most {most}, which a load can send to other ranks"
        raise Refusal(
            [(min(ranks), Problem("an index too large to be loaded", metadata.NAME, got, expected))]
        )


def forget(folder: Path, index: Index, is_forgotten: Callable[[str], bool]) -> None:
    """Rewrite the index without some keys, and then remove the files that only they had records in."""
    before = set(index.ends)
    kept = Index()
    kept.common = index.common
    kept.tensors = {key: stored for key, stored in index.tensors.items() if not is_forgotten(key)}
    kept.objects = {key: place for key, place in index.objects.items() if not is_forgotten(key)}
    # torch's functions make a nested state dict of it, in this order.
    kept.order = [key for key in index.order if not is_forgotten(key)]
    kept.planner_data = {key: path for key, path in paths_of(index).items() if not is_forgotten(key)}
    is_hashed = integrity.is_there(folder)
    # A checkpoint without a list of digests is valid; with an old list it is not.
    disk.remove([folder / integrity.NAME])
    disk.publish(folder / metadata.NAME, metadata.to_bytes(kept, index.torch_metadata))
    disk.sync_folder(folder)
    disk.remove([folder / name for name in before - set(kept.ends)])
    if is_hashed:
        integrity.write_all(folder)


def paths_of(index: Index) -> Mapping[str, Any]:
    """Return key -> its path in the state dict that torch saved; empty where torch did not."""
    return index.planner_data if isinstance(index.planner_data, dict) else {}


def unseen(path: Path, nbytes: int, end: float) -> str:
    """Return the problem that a file of a rank still has at `end`; "" once it has all its bytes."""
    while nbytes:
        try:
            size = path.stat().st_size
            if size == nbytes:
                break
            text = f"{size} of {nbytes} bytes"
        except OSError as error:
            text = str(error.strerror)
        if time.monotonic() > end:
            return text
        time.sleep(0.05)
    return ""
