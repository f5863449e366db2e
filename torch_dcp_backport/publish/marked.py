"""Folders that are published in place: readers believe a folder by one small file, the marker, written last.

For folders whose name readers and writers share from the start. Between any two steps the folder is nothing
to readers, or complete.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch_dcp_backport.publish import disk


def unmark(folder: Path, markers: Sequence[str]) -> None:
    """Take away the files by which readers know the folder, one after the other.

    Raises:
        OSError: one of them cannot be removed.
    """
    for name in markers:
        disk.step(f"remove {name}")
        disk.remove([folder / name])
        disk.sync_folder(folder)


def publish(folder: Path, small: Mapping[str, bytes], marker: str, markers: Sequence[str]) -> None:
    """Write the small files of a folder whose other files are on disk; the marker once all of them are, too.

    Args:
        small: name -> content, in order; `marker` is one of them.
        markers: as of `unmark`.

    Raises:
        OSError: the folder is unmarked, if the disk allows that.
    """
    try:
        for name, content in small.items():
            if name != marker:
                disk.publish(folder / name, content)
        disk.step("sync folder")
        disk.sync_folder(folder)
        disk.publish(folder / marker, small[marker])
        disk.step("sync marker")
        disk.sync_folder(folder)
        disk.step("done")
    except Exception:
        # Other writers remove their files when they hear of it: no marker may be left by then.
        with contextlib.suppress(OSError):
            unmark(folder, markers)
        raise
