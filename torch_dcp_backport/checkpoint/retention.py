"""Retention of steps: those older than the newest good steps are hidden, then removed in a thread.

Runs on one rank but for `settle`. Must never remove the only good step, nor a step that is being uploaded.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Optional

from torch_dcp_backport.checkpoint import manifest, store, together
from torch_dcp_backport.checkpoint.background import Background
from torch_dcp_backport.checkpoint.store import Shelf, Step
from torch_dcp_backport.dist_checkpointing.engine import files
from torch_dcp_backport.dist_checkpointing.engine.meeting import begin
from torch_dcp_backport.transfer.groups import Group

logger = logging.getLogger("torch_dcp_backport.checkpoint")

#: File in a step that could not be loaded where an older step could: retention does not count it.
NOT_LOADED = "could-not-be-loaded.txt"


#: Seconds that a save waits for the removals of the save before.
PATIENCE = 10.0


class Retention:
    """Removes steps while training goes on."""

    def __init__(self) -> None:
        self._background = Background("removal of checkpoints")

    def retire(self, shelf: Shelf, keep: Optional[int], distrusted: Collection[Path] = ()) -> None:
        """Hide the steps that are not kept, once those hidden before are removed; then remove them."""
        if not self.finish(PATIENCE):
            # The other ranks wait for this rank, and for no longer than their group's timeout.
            logger.warning("steps that are not kept are removed more slowly than others are saved")
        if not keep:
            return
        for step in retired(shelf.steps(), keep, distrusted):
            try:
                hidden = hide(step.path)
            except OSError as error:
                # A step that cannot be hidden is no reason to keep the others.
                logger.error("%s", still_there(step.path, error))
                continue
            if hidden is not None:
                self._background.add(functools.partial(removed_or_logged, hidden))

    def finish(self, seconds: float) -> bool:
        """Wait until all hidden steps are removed, for so many seconds at most; return whether all are."""
        return self._background.wait(seconds)

    def settle(self, group: Group) -> None:
        """Wait until all is removed. Collective: ranks with nothing to remove must not time out meanwhile."""
        with begin(together.CANNOT_SAVE, "save", group) as call:
            while not together.run_on_first(call, lambda: self.finish(together.PATIENCE), "removing steps"):
                pass


def retired(steps: list[Step], keep: Optional[int], distrusted: Collection[Path] = ()) -> list[Step]:
    """Return the steps that retention removes: all older than the newest `keep` good steps, damaged or not,
    that are not being uploaded.

    Args:
        steps: newest first.
        distrusted: folders that could not be loaded: they do not count as good.
    """
    if not keep or keep < 1:
        return []
    good = [step for step in steps if not (step.fault or step.path in distrusted or is_distrusted(step))]
    if len(good) < keep:
        return []
    last = good[keep - 1]
    older = [step for step in steps if step.age < last.age and (step.age[0] or step.step < last.step)]
    return [step for step in older if not store.is_uploading(step.path)]


def is_distrusted(step: Step) -> bool:
    return (step.path / NOT_LOADED).exists()


def distrust(folder: Path, reason: str) -> None:
    """Record, for later processes too, that a step could not be loaded."""
    try:
        (folder / NOT_LOADED).write_text(reason)
    except FileNotFoundError:
        # Retention has removed the step meanwhile.
        return
    except OSError:
        logger.exception("%s: it will be taken for good after a restart", folder)


def believe(folder: Path) -> None:
    """Remove the record that a step could not be loaded, once it was."""
    with contextlib.suppress(OSError):
        (folder / NOT_LOADED).unlink()


def hide(folder: Path) -> Optional[Path]:
    """Hide a folder, and return its hidden name; None where it is being uploaded and stays, or is gone."""
    files.step(f"rename {folder.name} away")
    try:
        hidden = store.taken(folder)
    except FileNotFoundError:
        # Another process removes, too.
        return None
    if hidden is None:
        logger.warning("%s stays until it is uploaded", folder)
    return hidden


def removed(hidden: Path) -> str:
    """Remove a hidden folder; return why it could not be removed, or ""."""
    files.step(f"remove {hidden.name}")
    return next(iter(store.discard(hidden)), "")


def removed_or_logged(hidden: Path) -> str:
    """Remove a hidden folder, and log why it could not be removed."""
    failure = removed(hidden)
    if failure:
        # No reason to fail the save: the next start tries again, and a full disk is an error by itself.
        logger.error("%s", still_there(hidden, failure))
    return ""


def still_there(folder: Path, reason: object) -> str:
    return f"a step that is not kept still takes its room on the disk: {folder}: {reason}"


def remove(folder: Path) -> str:
    """Hide a folder, and remove it; return why it could not be removed, or ""."""
    try:
        hidden = hide(folder)
    except OSError as error:
        return f"{folder}: {error}"
    failure = "" if hidden is None else removed(hidden)
    return failure and f"{hidden}: {failure}"


def prune(root: Path, keep: int, report: Callable[[Step], None], is_dry: bool = False) -> list[str]:
    """Remove and report the steps that retention would; return why some could not be removed. A step counts
    as good once all its bytes were read.
    """
    steps, distrusted, good = store.steps_in(root), set[Path](), 0
    for step in steps:
        if step.manifest is None or step.fault or is_distrusted(step) or good == keep:
            continue
        if any(manifest.wrong_checksums(step.path, step.manifest)):
            distrusted.add(step.path)
        else:
            good += 1
    failures = []
    for step in retired(steps, keep, distrusted):
        report(step)
        failures.append("" if is_dry else remove(step.path))
    return [failure for failure in failures if failure]
