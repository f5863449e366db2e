"""Drafts beside their target, each of a hidden name of its own, with the mark of the process that writes it.

Several processes may write drafts of one target, on any machines: the first that is done takes its place.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from pathlib import Path

from torch_dcp_backport.publish import disk, owners
from torch_dcp_backport.publish.drafts import Draft
from torch_dcp_backport.publish.owners import OWNER

#: A hidden folder: being written (tmp), a draft that was given up (off), replaced by the same step (was),
#: being removed (old).
HIDDEN = re.compile(r"\.(?P<name>.+)\.(?P<kind>tmp|off|was|old)-[0-9a-f]{8}", re.DOTALL)
#: How often a draft is made, where other processes clean up at the same moment.
ATTEMPTS = 20


def hidden_name(path: Path, kind: str) -> Path:
    """Return a new hidden name beside a path."""
    return path.with_name(f".{path.name}.{kind}-{secrets.token_hex(4)}")


def as_kind(hidden: Path, kind: str) -> Path:
    """Return the name that a hidden folder has as another kind."""
    at = hidden.name.rindex("-")
    return hidden.with_name(f"{hidden.name[: at - 3]}{kind}{hidden.name[at:]}")


def make_hidden(target: Path) -> Path:
    """Make the hidden folder of a new draft, with the mark of this process.

    Raises:
        OSError: it cannot be made.
    """
    for attempt in range(ATTEMPTS):
        draft, nameless = hidden_name(target, "tmp"), hidden_name(target, "old")
        disk.step(f"make {draft.name[-12:]}")
        try:
            # Another process may have removed it, as it was empty.
            make_parents(target)
            # Until it has an owner, its name allows any process to remove it.
            nameless.mkdir()
            owners.mark(nameless / OWNER)
            disk.step(f"name {draft.name[-12:]}")
            os.rename(nameless, draft)
            owners.keep_young(draft / OWNER)
            break
        except OSError as error:
            if not isinstance(error, FileNotFoundError) or attempt == ATTEMPTS - 1:
                remove_if_empty(nameless)
                raise
            # Another process cleaned up meanwhile.
    return draft


def make_parents(path: Path) -> None:
    """Make the missing folders above a path, and put their names on disk."""
    absent = [folder for folder in path.parents if not os.path.exists(folder)]
    path.parent.mkdir(parents=True, exist_ok=True)
    for folder in absent:
        disk.sync_folder(folder.parent)


def remove_if_empty(hidden: Path) -> bool:
    """Remove a folder that holds empty folders and the mark of its owner alone; return whether it is gone."""
    if os.path.islink(hidden):
        return False
    for place, entries in reversed(list(disk.walk(hidden))):
        names = {entry.name for entry in entries if not entry.is_dir(follow_symlinks=False)}
        with contextlib.suppress(OSError):
            if place == hidden and not names - {OWNER, f"{OWNER}.new"}:
                disk.remove([hidden / name for name in names])
            os.rmdir(place)
    return not os.path.lexists(hidden)


class Hidden(Draft):
    """A draft that `make_hidden` made, in this process or another."""

    def discard(self) -> list[str]:
        """Give up the draft, and remove it with all that was written into it, as far as possible.

        Its name says first that it is not being written: else its owner's mark would have to say so until it
        is gone. The mark goes last, and stays while anything else does: it is the proof that the draft is
        ours.

        Returns:
            Why parts of it are still there.
        """
        if os.path.islink(self.folder):
            # What it leads to is nobody's draft.
            return [f"{self.folder} is a link"]
        hidden = as_kind(self.folder, "off")
        try:
            disk.step(f"give up {self.folder.name[-12:]}")
            if hidden != self.folder:
                os.rename(self.folder, hidden)
        except FileNotFoundError:
            return []
        except OSError:
            hidden = self.folder
        try:
            parts = [part for part in sorted(hidden.iterdir()) if part.name != OWNER]
        except FileNotFoundError:
            return []
        except OSError as error:
            return [str(error)]
        failures = [failure for part in parts for failure in disk.remove_whole(part)]
        return list(map(str, failures or disk.remove_whole(hidden / OWNER) or disk.remove_whole(hidden)))
