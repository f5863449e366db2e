"""What this rank writes into a draft that ranks make together. Everything in the draft knows it by its path.

Knows no other rank; must never publish or remove anything.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Optional

from torch_dcp_backport.checkpoint._src.manifest import ManifestEntry
from torch_dcp_backport.dist_checkpointing import Output
from torch_dcp_backport.dist_checkpointing.strategies.async_utils import AsyncRequest
from torch_dcp_backport.publish import disk


class Writing:
    """A rank's share of a draft: its files, and the parts that it will write in the background."""

    def __init__(self, draft: Path, outlook: str) -> None:
        self.draft = draft
        #: What an error says of the state on the disk: that this was not saved, and what is there.
        self.outlook = outlook
        #: Parts that are still to be written. Errors of an `async_fn` are raised on every rank in the end.
        self.requests: list[AsyncRequest] = []
        #: Errors in the background.
        self.failures: list[Exception] = []
        #: Files of this rank -> checksums computed while they were written, and `state_of` the files then.
        self._entries: dict[Path, tuple[ManifestEntry, tuple[int, ...]]] = {}

    @contextlib.contextmanager
    def is_open(self) -> Iterator[None]:
        """Have `writing_at` find this meanwhile, also for callers that are handed a path alone."""
        _open[self.draft] = self
        try:
            yield
        finally:
            del _open[self.draft]

    def make_folder(self, path: Path) -> None:
        """Make a folder in the draft.

        Raises:
            FileNotFoundError: the draft is not there.
        """
        if not self.draft.is_dir():
            raise FileNotFoundError(
                f"{self.draft} is not there: another rank gave up the save, or made it on a disk of its own"
            )
        path.mkdir(parents=True, exist_ok=True)

    def write(self, path: Path, data: bytes) -> None:
        """Write a small file of this rank, and note its checksum."""
        disk.publish(path, data)
        self._note(path, ManifestEntry(len(data), zlib.crc32(data)))

    def notes_in(self, folder: Path) -> Callable[[Output], None]:
        """Return a callback that notes the checksums of files as they are written into a folder."""

        def note(output: Output) -> None:
            if output.nbytes:
                self._note(folder / output.file, ManifestEntry(output.nbytes, output.crc))

        return note

    def _note(self, path: Path, entry: ManifestEntry) -> None:
        self._entries[path] = entry, state_of(path)

    def noted(self) -> dict[str, ManifestEntry]:
        """Return sizes and checksums of the files that this rank wrote, and that are as they were then."""
        noted = {}
        for path, (entry, state) in self._entries.items():
            with contextlib.suppress(FileNotFoundError):
                if state == state_of(path):
                    noted[path.relative_to(self.draft).as_posix()] = entry
        return noted


#: Draft that is being written now -> what this rank writes into it.
_open: dict[Path, Writing] = {}


def writing_at(path: object) -> Optional[Writing]:
    """Return the writing of the draft that a path is in, in any thread; None where it is in none.

    A trainer's own classes stand between a handler and a manager, and hand on the path alone.
    """
    if not isinstance(path, (str, os.PathLike)):
        return None
    places = (Path(path), *Path(path).parents)
    return next((_open[place] for place in places if place in _open), None)


def writing_in(path: Path) -> Writing:
    """Return the writing of a draft, which a path is in."""
    writing = writing_at(path)
    assert writing is not None, f"{path} is in a draft that is being written"
    return writing


def state_of(path: Path) -> tuple[int, ...]:
    """Return numbers that change when a file is written again."""
    stat = path.stat()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns
