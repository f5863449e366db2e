"""Uploads of published folders, one after the other, in a thread of the first rank.

The thread must never run a collective: failures are kept until the ranks meet again.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Optional

from torch_dcp_backport.checkpoint._src import remote, store, together
from torch_dcp_backport.checkpoint._src.remote import Failed, RemoteFolder
from torch_dcp_backport.checkpoint._src.saves import Background
from torch_dcp_backport.checkpoint._src.store import Identity
from torch_dcp_backport.dist_checkpointing import CheckpointingException
from torch_dcp_backport.transfer import Call

logger = logging.getLogger("torch_dcp_backport.checkpoint")

ON_UPLOAD = ("raise", "warn")


class Uploads:
    """A queue of uploads, and the reasons of those that failed."""

    def __init__(self, is_verified: bool = True, on_upload: str = "raise") -> None:
        if on_upload not in ON_UPLOAD:
            raise ValueError(f"on_upload={on_upload!r}: expected raise or warn")
        self.is_verified = is_verified
        self.on_upload = on_upload
        self._background = Background("upload of checkpoints")
        #: The upload under way, in words.
        self._doing = ""

    def add(self, folder: Path, url: str) -> None:
        """Queue the upload of a folder behind those added before."""
        if self._background.add(functools.partial(self._upload, folder.absolute(), url)):
            logger.warning("%s waits for the upload before", folder)

    def wait(self, seconds: float) -> bool:
        """Wait until no upload is left, for so many seconds at most; return whether none is left."""
        return self._background.wait(seconds)

    def give_up(self, seconds: float) -> None:
        """Wait no longer for uploads that were not done within so many seconds.

        Raises:
            CheckpointingException: naming the upload, unless failures are to be warnings.
        """
        dropped = self._background.give_up()
        more = f"; {dropped} more that waited for it were not begun" if dropped else ""
        text = f"an upload is not done within {seconds:g} s: {self._doing}"
        text = f"{text}; its thread is abandoned, and may end it later or never{more}"
        if self.on_upload == "raise":
            raise CheckpointingException(text)
        logger.error("%s", text)

    def raise_failed(self) -> None:
        """Raise the failures since the last call, unless they are to be warnings.

        Raises:
            CheckpointingException: naming them.
        """
        failures = self._background.failures()
        if failures and self.on_upload == "raise":
            raise CheckpointingException(f"an upload failed: {'; '.join(failures)}")

    def _upload(self, folder: Path, url: str) -> str:
        """Upload a folder; return why it failed, or ""."""
        identity, began = store.identity_of(folder), time.monotonic()
        self._doing = f"{folder} to {url}"
        try:
            with store.uploading(folder):
                mark = remote.upload(folder, remote.place_of(url), self.is_verified)
                store.mark_uploaded(folder, url, mark)
        except Exception as error:
            now = store.identity_of(folder)
            if identity is None or now is None or store.is_replaced(identity, now):
                logger.warning("%s was not uploaded: it was removed, or saved again, before", folder)
                return ""
            text = str(error) if isinstance(error, Failed) else f"{type(error).__name__}: {error}"
            failure = f"{folder} to {url}: {text}"
            logger.error("an upload failed: %s", failure)
            return failure
        logger.info("%s is in %s, after %.1f s", folder, url, time.monotonic() - began)
        return ""


class Brought(NamedTuple):
    """The outcome of bringing a step from a store."""

    #: None where no step could be brought.
    step: Optional[int]
    #: Why other steps could not be brought.
    faults: list[str]


def bring_newest(root: RemoteFolder, local: Path, tried: set[int]) -> Brought:
    """Bring the newest good step of a store that was not tried yet. Runs on the first rank.

    Raises:
        Failed: the store cannot be listed or read.
    """
    steps = remote.steps_at(root)
    faults = [f"{root.below(str(step.path)).url}: {step.fault}" for step in steps if step.fault]
    for step in steps:
        if step.step in tried or step.fault:
            continue
        place = root.below(str(step.path))
        try:
            remote.download(place, local / step.path)
        except Failed as error:
            faults.append(str(error))
            continue
        logger.warning("%s has no good step; %s was brought from the store", local, place.url)
        return Brought(step.step, faults)
    return Brought(None, faults)


def bring_if_needed(url: str, folder: Path) -> Optional[Identity]:
    """Bring a folder from a store if it is absent here, or incomplete by its sizes. Runs on the first rank.

    Returns:
        What was brought; None where the folder was good.

    Raises:
        Failed: the store does not have the folder, or does not give it; or the folder here is another step.
    """
    fault = store.fault_by_sizes(folder)
    if not fault:
        return None
    logger.warning("%s: %s; it is brought from %s", folder, fault, url)
    remote.download(remote.place_of(url), folder)
    return store.identity_of(folder)


def remove_brought(folder: Path, brought: Identity) -> None:
    """Remove a folder that a load has brought; another that took its place stays. Runs on the first rank.

    Files that this package did not write stay, too, and so does a folder that was pinned. A folder that
    cannot be removed is an error in the log: the load is done.
    """
    try:
        hiding = store.hide(folder, functools.partial(is_brought, brought))
        if hiding.why:
            logger.warning("%s %s, and is not removed", folder, hiding.why)
        reasons = [] if hiding.hidden is None else store.removed(hiding.hidden, folder)
        for reason in reasons[:1]:
            text = "%s was brought, and still takes its room on the disk: %s"
            logger.error(text, hiding.hidden, reason)
    except OSError as error:
        logger.error("%s was brought, and cannot be removed: %s", folder, error)


def is_brought(brought: Identity, folder: Path) -> bool:
    """Return whether a path has the folder that was brought, as far as its manifest tells."""
    now = store.identity_of(folder)
    return now is not None and now.made is not None and not store.is_replaced(brought, now)


def settle(call: Call, uploads: Uploads, is_blocking: bool, timeout: Optional[float] = None) -> bool:
    """Wait until no upload is left, if `is_blocking`; return whether none is left. Collective.

    Args:
        timeout: the most seconds of the wait, by the first rank's clock; None waits without end.

    Raises:
        CheckpointingException: an upload failed, or is not done by then; the same on every rank.
    """
    waiting = together.Waiting(timeout)

    def is_done(_: Mapping[int, None]) -> bool:
        is_settled = uploads.wait(waiting.seconds() if is_blocking else 0.0)
        if is_blocking and not is_settled and waiting.is_over:
            uploads.give_up(timeout or 0.0)
            is_settled = True
        uploads.raise_failed()
        return is_settled

    while True:
        is_settled = call.gather_object("waiting for uploads", None, is_done)
        if is_settled or not is_blocking:
            return is_settled
