"""Claims of this process's saves to the files of a folder: two saves write the same names.

Knows no ranks: a refusal here is a problem of this rank, which all ranks get.
"""

from __future__ import annotations

import os
import threading
import weakref
from pathlib import Path
from typing import Optional

from torch_dcp_backport.dist_checkpointing.core import CheckpointingException

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
