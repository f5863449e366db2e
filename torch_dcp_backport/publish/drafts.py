"""Folders that are made out of readers' sight: each takes the place of its target, or goes.

Runs on one process. Between any two steps the target is as it was, hidden as a whole, or new.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Optional

from torch_dcp_backport.publish import disk


class Move(NamedTuple):
    source: Path
    target: Path
    #: What it does, as `disk.step` names it.
    doing: str = "rename"


def rename_all(moves: Sequence[Move]) -> None:
    """Rename in order, all or none.

    Raises:
        OSError: a rename failed; those before are undone, as far as possible.
    """
    done: list[Move] = []
    try:
        for move in moves:
            disk.step(move.doing)
            os.rename(move.source, move.target)
            done.append(move)
    except BaseException:
        for move in reversed(done):
            with contextlib.suppress(OSError):
                os.rename(move.target, move.source)
        raise


class Draft:
    """A folder that no reader looks for, until it takes the place of its target."""

    def __init__(self, folder: Path, target: Path) -> None:
        self.folder = folder
        self.target = target

    def sync(self, synced: Collection[str] = ()) -> None:
        """Put everything in the folder on disk, but for files that are, by their paths in it.

        Raises:
            OSError: the disk failed.
        """
        disk.sync_tree(self.folder, synced)

    def take_place(self, aside: Optional[Path] = None) -> None:
        """Give the folder its target's name, from which on readers see it. The name is not synced yet.

        Args:
            aside: the name for what is at the target; None where there is nothing, or an empty folder.

        Raises:
            OSError: the target is as it was.
        """
        moves = [Move(self.folder, self.target, "rename the draft")]
        if aside is not None:
            moves.insert(0, Move(self.target, aside, "rename the folder that is replaced"))
        rename_all(moves)

    def discard(self) -> object:
        """Remove the folder with all that was written into it; do nothing where it took its place.

        Raises:
            OSError: something cannot be removed.
        """
        raise NotImplementedError


@contextlib.contextmanager
def discarding(draft: Optional[Draft]) -> Iterator[None]:
    """Discard a draft on an error, as far as possible.

    Args:
        draft: None on ranks that did not make it.
    """
    try:
        yield
    except BaseException:
        if draft is not None:
            with contextlib.suppress(OSError):
                draft.discard()
        raise
