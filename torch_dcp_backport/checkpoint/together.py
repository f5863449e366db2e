"""Folders that ranks write or read together, with the same outcome on every rank.

Collective. Every rank hears of any rank's failure; ranks but the first must never name or remove a folder.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Optional

from torch_dcp_backport.checkpoint import manifest, store
from torch_dcp_backport.checkpoint.manifest import Entry, Manifest
from torch_dcp_backport.checkpoint.store import Shelf
from torch_dcp_backport.checkpoint.writing import Writing
from torch_dcp_backport.dist_checkpointing.core import SHARDED, CheckpointingException
from torch_dcp_backport.dist_checkpointing.engine.meeting import (
    Refusal,
    Topic,
    begin,
    consult,
    guard,
    problem_from,
    ranks_of,
    saying,
)
from torch_dcp_backport.dist_checkpointing.strategies.async_utils import AsyncRequest
from torch_dcp_backport.hf.moving import NOTHING, Common, differences
from torch_dcp_backport.publish import disk
from torch_dcp_backport.publish.drafts import discarding
from torch_dcp_backport.publish.owners import OWNER
from torch_dcp_backport.transfer import Call, Problem, settings
from torch_dcp_backport.transfer.errors import UNCHANGED
from torch_dcp_backport.transfer.groups import Group
from torch_dcp_backport.transfer.progress import Meter

logger = logging.getLogger("torch_dcp_backport.checkpoint")

#: The same texts at every depth: ranks hear of an early failure of another rank where they next agree.
CANNOT_SAVE, CANNOT_LOAD = "cannot save the checkpoint", "cannot load the checkpoint"
CANNOT_UPLOAD = "cannot upload the checkpoint"
#: Seconds between two meetings of ranks that wait for the first rank: less than any group's timeout.
PATIENCE = 2.0
#: Files that a rank writes, by its number: of dist_checkpointing and torch, data loaders, verl's own manager.
OF_RANK = re.compile(r"__(\d+)_\d+\.distcp|data_(\d+)\.pt|\w+_rank_(\d+)\.pt")


def run_on_first(
    call: Call, make: Callable[[], object], doing: str, common: Common = NOTHING, so_far: str = UNCHANGED
) -> Any:
    """Run `make` on the first rank, and return its result on every rank.

    Args:
        so_far: an error's words on the state of the files.

    Raises:
        CheckpointingException: `make` failed, a rank has a problem, or another value in `common`; the same
            on every rank.
    """

    def decide(common_by_rank: Mapping[int, Common]) -> Mapping[int, Any]:
        findings = differences(common_by_rank)
        if findings:
            raise Refusal(findings)
        answer = make()
        return dict.fromkeys(common_by_rank, answer)

    return consult(call, common, decide, Topic(doing, so_far))


def run_long_on_first(call: Call, make: Callable[[], object], doing: str, common: Common = NOTHING) -> Any:
    """As `run_on_first`, if `make` may take longer than the group's timeout: ranks meet until it returns.

    `make` runs in a thread of the first rank.
    """
    made: list[Future[object]] = []
    with contextlib.ExitStack() as stack:

        def look() -> Optional[tuple[object]]:
            if not made:
                pool = ThreadPoolExecutor(1)
                # If another rank is gone, this rank must not wait for a result that no rank needs.
                stack.callback(pool.shutdown, wait=False)
                made.append(pool.submit(make))
            is_made = made[0] in wait(made, PATIENCE).done
            return (made[0].result(),) if is_made else None

        while True:
            answer = run_on_first(call, look, doing, common)
            if answer is not None:
                return answer[0]


class Wanted(NamedTuple):
    """The arguments of a save."""

    #: Returns the folder's final path; an older folder of this name stays until it is replaced.
    locate: Callable[[], Path]
    step: int
    #: Other values that must be the same on every rank.
    common: Common = NOTHING


@dataclass(frozen=True)
class Begun:
    """A folder that is being written."""

    final: Path
    step: int
    #: On the first rank; others neither name nor remove it.
    draft: Optional[store.Draft]
    #: The requests are empty on every rank, or on none.
    writing: Writing

    @property
    def requests(self) -> Sequence[AsyncRequest]:
        return self.writing.requests


def begin_folder(
    wanted: Wanted,
    write: Callable[[Path], None],
    shelf_of: Callable[[Path], Optional[Shelf]],
    group: Group = None,
) -> Begun:
    """Make the draft of a folder, and begin to write it. Collective.

    Args:
        write: called on every rank with the draft, which is there. It gives parts that are to be written in
            the background to `Writing.requests`.
        shelf_of: returns the shelf that the folder is on; called on the first rank.

    Raises:
        CheckpointingException: the same on every rank; nothing is left.
    """
    with begin(CANNOT_SAVE, "save", group) as call:
        draft: Optional[store.Draft] = None
        failures: list[OSError] = []
        final, step, common = Path(), 0, dict[str, str]()
        with guard(call):
            # The working directory may change before the rest is written.
            final, step = wanted.locate().absolute(), store.checked_step(wanted.step)
            common = {"folder": str(final), "step": str(step), **wanted.common}

        def start() -> tuple[str, str]:
            nonlocal draft
            outlook = outlook_of(final, step, shelf_of(final))
            try:
                draft = store.Draft(final)
            except OSError as error:
                failures.append(error)
                return "", outlook
            return str(draft.folder), outlook

        name, outlook = run_on_first(call, start, "making a folder", common)
        if not name:
            with guard(call):
                for error in failures:
                    raise error
            consult(call, None, nothing, Topic("making the draft", outlook))
        writing = Writing(Path(name), outlook)
        with discarding(draft), saying(outlook):
            with guard(call), writing.is_open():
                write(writing.draft)
            common = {"saves in the background": str(len(writing.requests))}
            run_on_first(call, lambda: None, "writing", common)
    return Begun(final, step, draft, writing)


def outlook_of(final: Path, step: int, shelf: Optional[Shelf]) -> str:
    """Return what is on the disk if a save fails from here on: a failure at night must not read as a loss."""
    if shelf is None:
        return f"{final} was not saved, and is as it was"
    try:
        newest = shelf.newest_complete()
    except OSError as error:
        # Not that there are none: a disk elsewhere may be away for a moment.
        return f"step {step} was not saved, and the steps in {shelf.root} could not be listed ({error})"
    if newest is None:
        return f"step {step} was not saved, and {shelf.root} has no other complete step"
    return f"step {step} was not saved; the newest complete step is {newest.step}"


class Work(NamedTuple):
    """The first rank's answer to what each rank knows of the files in a draft."""

    is_published: bool
    #: The files of which a rank is to compute the checksums.
    names: Sequence[str] = ()


def finish_folder(
    begun: Begun,
    shelf_of: Callable[[Path], Optional[Shelf]],
    then: Iterable[Callable[[Path], None]] = (),
    group: Group = None,
) -> None:
    """Give a folder its name, once every rank has written its part. Collective.

    Args:
        shelf_of: as of `begin_folder`.
        then: called on the first rank, in order, when the folder has its name; errors are only logged.

    Raises:
        CheckpointingException: the same on every rank; older folders are as they were.
    """
    folder, final, so_far = begun.writing.draft, begun.final, begun.writing.outlook
    unheard = f"list the steps to see whether {final.name} is one"
    with begin(CANNOT_SAVE, "save", group) as call, discarding(begun.draft):
        if begun.requests:
            call.problems += map(problem_from, begun.writing.failures)
            # Once all have written: a file may be written by another rank than its name says.
            consult(call, None, nothing, Topic("writing in the background", so_far))
            with guard(call), saying(so_far):
                complete(begun.requests)

        def publish(own_by_rank: Mapping[int, Mapping[str, Entry]], more: Mapping[str, Entry] = {}) -> None:
            shelf = shelf_of(final)
            order = 1 if shelf is None else shelf.next_order()
            listed = {name: Entry(*entry) for own in own_by_rank.values() for name, entry in own.items()}
            content = Manifest(begun.step, len(own_by_rank), time.time(), order, {**listed, **more})
            manifest.write(folder, content)
            assert begun.draft is not None, "runs on the first rank"
            store.publish(begun.draft, set(listed))
            for follow in then:
                try:
                    follow(final)
                except Exception:
                    # On a full disk the tracker fails, and retention, which follows, makes room.
                    logger.exception("%s is saved; what was to follow failed", final)

        def look(noted_by_rank: Mapping[int, Mapping[str, Entry]]) -> Mapping[int, Work]:
            """List the draft, which only the first rank does, and share what nobody knows the checksum of."""
            names: dict[int, list[str]] = {rank: [] for rank in noted_by_rank}
            known = {name for noted in noted_by_rank.values() for name in noted}
            for name in manifest.paths_in(folder):
                if name not in known and name != OWNER:
                    match = OF_RANK.fullmatch(name.rpartition("/")[2])
                    rank = call.rank if match is None else int(match[match.lastindex or 0])
                    names.get(rank, names[call.rank]).append(name)
            if any(names[rank] for rank in names if rank != call.rank):
                return {rank: Work(False, names[rank]) for rank in names}
            publish(noted_by_rank, {name: manifest.entry_of(folder / name) for name in names[call.rank]})
            return dict.fromkeys(names, Work(True))

        own: dict[str, Entry] = {}
        with guard(call):
            own = {} if call.problems else begun.writing.noted()
        work: Work = consult(call, own, look, Topic("publishing", so_far, unheard))
        if work.is_published:
            return
        with guard(call):
            for name in work.names:
                own[name] = manifest.entry_of(folder / name)
                disk.sync_file(folder / name)

        def settle(own_by_rank: Mapping[int, Mapping[str, Entry]]) -> Mapping[int, Any]:
            publish(own_by_rank)
            return {}

        consult(call, own, settle, Topic("publishing what was read", so_far, unheard))


def complete(requests: Iterable[AsyncRequest]) -> None:
    for request in requests:
        for finalize in request.finalize_fns:
            finalize()


def put_back(
    locate: Callable[[], Optional[Path]], common: Common = NOTHING, group: Group = None
) -> Optional[Path]:
    """Put back a folder that lost its name to a dead writer, and return its path. Collective.

    Args:
        locate: returns the path, or None for no folder. Its errors are raised on all ranks.
        common: other values that must be the same on every rank.

    Raises:
        CheckpointingException: the same on every rank.
    """
    folder: Optional[Path] = None

    def look() -> None:
        if folder is None:
            return
        shelf = store.shelf_of(folder)
        if shelf is None:
            store.clean(folder.parent, re.compile(re.escape(folder.name)))
        else:
            shelf.clean()

    with begin(CANNOT_LOAD, "load", group) as call:
        with guard(call):
            folder = locate()
        run_on_first(call, look, "looking", {"folder": str(folder), **common})
    return folder


def read_folder(
    folder: Path, read: Callable[[Path], None], *, is_verified: bool, group: Group = None
) -> None:
    """Read a folder; with `is_verified` compare its checksums before. Collective.

    Raises:
        CheckpointingException: a rank failed, or a file is not as it was saved; the same on every rank.
    """
    with begin(CANNOT_LOAD, "load", group) as call:
        if is_verified:
            with guard(call):
                ranks = ranks_of(call)
                content = manifest.read(folder)
                names = manifest.share_of(content, ranks.index(call.rank), len(ranks))
                meter = Meter("verify", settings.progress())
                meter.expect(lambda: sum(content.files[name].nbytes for name in names))
                for name in names:
                    wrong = manifest.wrong_checksums(folder, content, [name])
                    call.problems += [Problem("not what was saved", str(folder), text) for text in wrong]
                    meter.add(content.files[name].nbytes)
            consult(call, None, nothing, Topic("verifying the files"))
        else:
            run_on_first(call, lambda: check_sizes(folder), "looking at the files")
        with guard(call):
            read(folder)
        consult(call, None, nothing, Topic("loading", "values may have been loaded in part"))


def check_sizes(folder: Path) -> None:
    """Compare the files of a sharded checkpoint with the manifest by their sizes, if the folder has one.

    A file that grew may be without end: it is not read. What is not there, the load misses by itself.

    Raises:
        CheckpointingException: naming files that are not as they were saved.
    """
    with contextlib.suppress(manifest.Damaged):
        content = manifest.read(folder)
        listed = ((name, folder / name, entry) for name, entry in content.files.items())
        faults = (
            f"{name}{manifest.fault_of(path, entry)}"
            for name, path, entry in listed
            if name.startswith(f"{SHARDED}/") and os.path.exists(path) and manifest.fault_of(path, entry)
        )
        wrong = list(itertools.islice(faults, 3))
        if wrong:
            raise CheckpointingException(f"{folder} is not what was saved: {'; '.join(wrong)}")


def nothing(ranks: Mapping[int, Any]) -> Mapping[int, Any]:
    return {}
