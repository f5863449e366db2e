"""Folders that ranks write or read together, with the same outcome on every rank.

Collective. Every rank hears of any rank's failure; ranks but the first must never name or remove a folder.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import re
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Optional, TypeVar

import torch.distributed as dist

from torch_dcp_backport.checkpoint._src import manifest, store
from torch_dcp_backport.checkpoint._src.manifest import Manifest, ManifestEntry
from torch_dcp_backport.checkpoint._src.store import Shelf
from torch_dcp_backport.dist_checkpointing import Output, begin
from torch_dcp_backport.dist_checkpointing.core import SHARDED, CheckpointingException
from torch_dcp_backport.dist_checkpointing.strategies.async_utils import AsyncRequest
from torch_dcp_backport.publish import disk
from torch_dcp_backport.publish.drafts import OWNER, discarding
from torch_dcp_backport.transfer import (
    NOTHING,
    Attempt,
    Call,
    Common,
    Group,
    Meter,
    Problem,
    describing_files,
    settings,
)

logger = logging.getLogger("torch_dcp_backport.checkpoint")

# --- what this rank writes ---
#
# Knows no other rank; must never publish or remove anything.


class Writing:
    """A rank's share of a draft: its files, and the parts that it will write in the background."""

    def __init__(self, draft: Path, outlook: str, torch_metadata: bool = True) -> None:
        self.draft = draft
        #: Whether sharded checkpoints in the draft have torch's index.
        self.torch_metadata = torch_metadata
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

    def note(self, folder: Path, output: Output) -> None:
        """Note the checksum of a file of records that was written into a folder."""
        if output.nbytes:
            self._note(folder / output.file, ManifestEntry(output.nbytes, output.crc))

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


# --- folders of all ranks ---

#: The same texts at every depth: ranks hear of an early failure of another rank where they next agree.
CANNOT_SAVE, CANNOT_LOAD = "cannot save the checkpoint", "cannot load the checkpoint"
CANNOT_UPLOAD = "cannot upload the checkpoint"
#: Seconds between two agreements of ranks that wait for the first rank: less than any group's timeout.
PATIENCE = 2.0
#: Files that a rank writes, by its number: of dist_checkpointing and torch, data loaders, verl's own manager.
OF_RANK = re.compile(r"__(\d+)_\d+\.distcp|data_(\d+)\.pt|\w+_rank_(\d+)\.pt")


T = TypeVar("T")


def place_in(group: Group) -> tuple[int, int]:
    """Return this rank in a process group, and the number of ranks."""
    return (dist.get_rank(group), dist.get_world_size(group)) if dist.is_initialized() else (0, 1)


class Waiting:
    """The time that ranks wait for work of the first rank, in turns that no group's timeout ends."""

    def __init__(self, timeout: Optional[float]) -> None:
        """`timeout`: the most seconds; None waits without end."""
        self._end = None if timeout is None else time.monotonic() + timeout

    def seconds(self) -> float:
        """Return the seconds of the next turn."""
        return PATIENCE if self._end is None else min(max(self._end - time.monotonic(), 0.0), PATIENCE)

    @property
    def is_over(self) -> bool:
        return self._end is not None and time.monotonic() >= self._end


def waited_for(call: Call, doing: str, make: Callable[[], T], common: Common = NOTHING) -> T:
    """Return what the first rank makes, which may take longer than the group's timeout: till then ranks meet.

    Args:
        call: the ranks that wait.
        doing: the step under way, for errors.
        make: runs in a thread of the first rank.
        common: what must be the same on every rank.

    Raises:
        CheckpointingException: it failed, a rank has a problem or is gone, or another value in `common`; the
            same on every rank.
    """
    made: Optional[Future[T]] = None
    with contextlib.ExitStack() as stack:

        def result_by_now(_: Mapping[int, None]) -> Optional[tuple[T]]:
            nonlocal made
            if made is None:
                pool = ThreadPoolExecutor(1)
                # If another rank is gone, this rank must not wait for a result that no rank needs.
                stack.callback(pool.shutdown, wait=False)
                made = pool.submit(make)
            return (made.result(),) if made in wait([made], PATIENCE).done else None

        while True:
            result = call.gather_object(doing, None, result_by_now, must_agree=common)
            if result is not None:
                return result[0]


class SaveArguments(NamedTuple):
    """The arguments of a save."""

    #: The folder's final path; an older folder of this name stays until it is replaced.
    final: Path
    step: int
    #: The shelf that the folder is on; None without a step in its path.
    shelf: Optional[Shelf]
    #: Other values that must be the same on every rank.
    common: Common = NOTHING
    #: The number that the program gives the step.
    metric: Optional[float] = None
    #: Whether sharded checkpoints in the folder have torch's index.
    torch_metadata: bool = True


@dataclass(frozen=True)
class Begun:
    """A folder that is being written."""

    asked: SaveArguments
    #: On the first rank; others neither name nor remove it.
    draft: Optional[store.StepDraft]
    #: Its requests are empty on every rank, or on none.
    writing: Writing


@contextlib.contextmanager
def draft_of(
    call: Call, wanted: Attempt[SaveArguments], then: Sequence[Callable[[Path], None]] = ()
) -> Iterator[Begun]:
    """Make the draft of a folder, have it written, or begun, in the context, and publish it. Collective.

    What fails in the context is raised on every rank. Parts that are to be written in the background go to
    `Writing.requests`; `finish_folder` publishes the folder then.

    Args:
        call: with the problems of ranks that could not make their arguments.
        wanted: the arguments of this rank.
        then: called on the first rank, in order, when the folder has its name; errors are only logged.

    Raises:
        CheckpointingException: the same on every rank; nothing is left.
    """
    with call.guard() as same:
        asked = wanted.value
        same.set({"folder": str(asked.final), "step": str(asked.step), **asked.common})
    draft: Optional[store.StepDraft] = None

    def begin_draft(_: Mapping[int, None]) -> tuple[str, str]:
        nonlocal draft
        outlook = outlook_of(asked.final, asked.step, asked.shelf)
        try:
            if asked.shelf is not None:
                asked.shelf.clean_once()
            draft = store.StepDraft(asked.final)
        except OSError as error:
            # Raised in the next agreement, which knows the outlook on every rank.
            call.record(call.problem_of(error), error)
            return "", outlook
        return str(draft.folder), outlook

    name, outlook = call.gather_object("making a folder", None, begin_draft, must_agree=same)
    if not name:
        call.barrier("making the draft", so_far=outlook)
    begun = Begun(asked, draft, Writing(Path(name), outlook, asked.torch_metadata))
    group = call.group if call.groups else None
    with discarding(draft), describing_files(outlook), naming_loss(draft, group):
        with call.guard(), begun.writing.is_open():
            yield begun
        publish_together(call, "writing", begun, then)


@contextlib.contextmanager
def naming_loss(draft: Optional[store.StepDraft], group: Group) -> Iterator[None]:
    """Have the error of a save say that another process removed its draft, where it did. Collective.

    Any step fails then, on any rank, over a file that is not there.

    Args:
        draft: of the first rank.

    Raises:
        CheckpointingException: the same on every rank.
    """
    try:
        yield
    except CheckpointingException as error:
        if not error.is_agreed:
            # A rank is gone: there is nothing more to agree on.
            raise
        with begin(CANNOT_SAVE, "save", group) as call:
            with call.guard():
                if draft is not None:
                    draft.check()
            call.barrier("looking for the draft")
        raise


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


class FolderWork(NamedTuple):
    """The first rank's answer to what each rank knows of the files in a draft."""

    is_published: bool
    #: The files of which a rank is to compute the checksums.
    names: Sequence[str] = ()


def finish_folder(begun: Begun, then: Iterable[Callable[[Path], None]] = (), group: Group = None) -> None:
    """Give a folder its name, once every rank has written its part in the background. Collective.

    Args:
        then: called on the first rank, in order, when the folder has its name; errors are only logged.

    Raises:
        CheckpointingException: the same on every rank; older folders are as they were.
    """
    so_far = begun.writing.outlook
    save = begin(CANNOT_SAVE, "save", group)
    with discarding(begun.draft), describing_files(so_far), naming_loss(begun.draft, group), save as call:
        call.problems += map(call.problem_of, begun.writing.failures)
        # Once all have written: a file may be written by another rank than its name says.
        call.barrier("writing in the background", so_far=so_far)
        with call.guard():
            for request in begun.writing.requests:
                for finalize in request.finalize_fns:
                    finalize()
        begun.writing.requests.clear()
        publish_together(call, "publishing", begun, then)


def publish_together(
    call: Call, doing: str, begun: Begun, then: Iterable[Callable[[Path], None]] = ()
) -> None:
    """Give a folder its name, once every rank has written; not where parts are left for the background.

    Args:
        call: with the problems of ranks that could not write.
        doing: the step that ends here, for errors.
        begun: the folder.
        then: as of `draft_of`.

    Raises:
        CheckpointingException: the same on every rank; older folders are as they were.
    """
    folder, so_far = begun.writing.draft, begun.writing.outlook
    unheard = f"list the steps to see whether {begun.asked.final.name} is one"
    with call.guard() as noted:
        noted.set(begun.writing.noted())

    def publish_or_share(
        noted_by_rank: Mapping[int, Mapping[str, ManifestEntry]],
    ) -> dict[int, FolderWork]:
        if begun.writing.requests:
            return {}
        # Only the first rank lists the draft; what no rank knows the checksum of is shared out.
        names = unknown_in(folder, noted_by_rank, call.rank)
        if any(names[rank] for rank in names if rank != call.rank):
            return {rank: FolderWork(False, names[rank]) for rank in names}
        read = {name: manifest.entry_of(folder / name) for name in names[call.rank]}
        publish(begun, then, noted_by_rank, read)
        return dict.fromkeys(noted_by_rank, FolderWork(True))

    work: Optional[FolderWork] = call.scatter_object(
        doing,
        noted,
        publish_or_share,
        must_agree={"saves in the background": str(len(begun.writing.requests))},
        so_far=so_far,
        unheard=unheard,
    )
    if work is None or work.is_published:
        return
    own = noted.value
    with call.guard():
        for name in work.names:
            own[name] = manifest.entry_of(folder / name)
            disk.sync_file(folder / name)
    call.gather_object(
        "publishing what was read",
        own,
        functools.partial(publish, begun, then),
        so_far=so_far,
        unheard=unheard,
    )


def unknown_in(
    draft: Path, noted_by_rank: Mapping[int, Mapping[str, ManifestEntry]], first: int
) -> dict[int, list[str]]:
    """Return the files of a draft without a known checksum, by the rank that is to compute it."""
    names: dict[int, list[str]] = {rank: [] for rank in noted_by_rank}
    known = {name for noted in noted_by_rank.values() for name in noted}
    for name in manifest.paths_in(draft):
        if name not in known and name != OWNER:
            match = OF_RANK.fullmatch(name.rpartition("/")[2])
            rank = first if match is None else int(match[match.lastindex or 0])
            names.get(rank, names[first]).append(name)
    return names


def publish(
    begun: Begun,
    then: Iterable[Callable[[Path], None]],
    own_by_rank: Mapping[int, Mapping[str, ManifestEntry]],
    more: Mapping[str, ManifestEntry] = {},
) -> None:
    """Write the manifest of all ranks' files, and give the folder its name. Runs on the first rank."""
    assert begun.draft is not None, "runs on the first rank"
    asked = begun.asked
    order = 1 if asked.shelf is None else asked.shelf.next_order()
    listed = {name: ManifestEntry(*entry) for own in own_by_rank.values() for name, entry in own.items()}
    content = Manifest(asked.step, len(own_by_rank), time.time(), order, {**listed, **more}, asked.metric)
    manifest.write(begun.draft.folder, content)
    store.publish(begun.draft, set(listed))
    for follow in then:
        try:
            follow(asked.final)
        except Exception:
            # On a full disk the tracker fails, and retention, which follows, makes room.
            logger.exception("%s is saved; what was to follow failed", asked.final)


class Located(NamedTuple):
    """A folder that is to be loaded, as the first rank found it."""

    #: Where it is; None for no folder.
    path: Optional[Path]
    #: What the first rank saw in it; None of a folder that may yet be brought.
    seen: Any


def located(
    call: Call,
    folder: Attempt[Optional[Path]],
    common: Common,
    is_brought: bool,
    look: Callable[[Path], object],
) -> Located:
    """Return where a folder is that a killed save may have hidden. Collective; changes nothing.

    The sizes of its files are compared with its manifest, unless it is brought.

    Args:
        call: with the problems of ranks that could not tell the folder.
        folder: its path; None for no folder.
        common: other values that must be the same on every rank.
        is_brought: whether the folder is brought from a store, under its own name, if it is not whole here.
        look: called on the first rank with the folder, once its files are compared; not of a folder that is
            brought, of which `reading` asks.

    Raises:
        CheckpointingException: the same on every rank.
    """
    with call.guard() as same:
        same.set({"folder": str(folder.value), **common})

    def place_of(_: Mapping[int, None]) -> tuple[Optional[str], object]:
        path = folder.value
        if path is None:
            return None, None
        place = store.located(path)
        if is_brought:
            return str(path if store.fault_by_sizes(place) else place), None
        check_sizes(place)
        return str(place), look(place)

    place, seen = call.gather_object("looking", None, place_of, must_agree=same)
    return Located(None if place is None else Path(place), seen)


@contextlib.contextmanager
def reading(
    folder: Path, *, is_verified: Optional[bool], group: Group = None, look: Optional[Callable[[], T]] = None
) -> Iterator[Optional[T]]:
    """Have a folder read in the context, which gets what the first rank sees in it. Collective.

    Args:
        folder: the folder.
        is_verified: compare checksums before, of which each rank takes a share; False compares sizes, and
            None nothing: `located` has.
        group: the ranks that read together.
        look: called on the first rank, once the files are compared; not with None.

    Raises:
        CheckpointingException: a rank failed, or a file is not as it was saved; the same on every rank.
    """
    with begin(CANNOT_LOAD, "load", group) as call:
        found: Optional[T] = None

        def looked_at(_: Mapping[int, None]) -> Optional[T]:
            if not is_verified:
                check_sizes(folder)
            return None if look is None else look()

        if is_verified:
            with call.guard():
                content = manifest.read(folder)
                names = manifest.share_of(content, call.ranks.index(call.rank), len(call.ranks))
                meter = Meter("verify", settings.progress())
                meter.expect(lambda: sum(content.files[name].nbytes for name in names))
                for name in names:
                    wrong = manifest.wrong_checksums(folder, content, [name])
                    call.problems += [Problem("not what was saved", str(folder), text) for text in wrong]
                    meter.add(content.files[name].nbytes)
        if is_verified is not None:
            doing = "verifying the files" if is_verified else "looking at the files"
            found = call.gather_object(doing, None, looked_at)
        with call.guard():
            yield found
        call.barrier("loading", so_far="values may have been loaded in part")


def check_sizes(folder: Path) -> None:
    """Compare the files of a sharded checkpoint with the manifest by their sizes, if the folder has one.

    A file that grew may be without end: it is not read. What is not there, the load misses by itself.

    Raises:
        CheckpointingException: naming files that are not as they were saved.
    """
    with contextlib.suppress(manifest.BadManifest):
        content = manifest.read(folder)
        names = [name for name in content.files if name.startswith(f"{SHARDED}/")]
        wrong = list(itertools.islice(manifest.faults(folder, content, names, is_absent_fine=True), 3))
        if wrong:
            raise CheckpointingException(f"{folder} is not what was saved: {'; '.join(wrong)}")
