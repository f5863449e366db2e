"""What ranks do together with a folder: write it as a whole, or read it; one outcome for all.

Collective. Every rank hears of any rank's failure, and the first rank alone names and removes folders.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Optional

from torch_dcp_backport.checkpoint import manifest, store
from torch_dcp_backport.checkpoint.manifest import Entry, Manifest
from torch_dcp_backport.dist_checkpointing.core import CheckpointingException
from torch_dcp_backport.dist_checkpointing.engine.meeting import (
    Topic,
    begin,
    consult,
    guard,
    problem_from,
    ranks_of,
    record,
)
from torch_dcp_backport.transfer import Call, Problem
from torch_dcp_backport.transfer.groups import Group

logger = logging.getLogger("torch_dcp_backport.checkpoint")

CANNOT_SAVE, CANNOT_LOAD = "cannot save the step", "cannot load the step"
OLDER = "steps saved before are as they were"
#: Files that a rank writes, by its number: it has their bytes at hand for the checksum.
OF_RANK = re.compile(r"(?:__(?P<shard>\d+)_\d+\.distcp|data_(?P<data>\d+)\.pt)")

#: What `write_folder` is writing in this thread.
_draft: ContextVar[Optional[Path]] = ContextVar("draft", default=None)


def tell_all(call: Call, make: Callable[[], object], doing: str) -> Any:
    """What the first rank makes, on every rank.

    Raises:
        CheckpointingException: it could not, or a rank has a problem; the same on every rank.
    """

    def decide(ranks: Mapping[int, Any]) -> Mapping[int, Any]:
        answer = make()
        return dict.fromkeys(ranks, answer)

    return consult(call, None, decide, Topic(doing))


def write_folder(
    final: Path,
    step: int,
    write: Callable[[Path], None],
    *,
    then: Callable[[], None] = lambda: None,
    group: Group = None,
) -> Manifest:
    """Write a folder beside its place and give it its name once it is whole. Collective.

    Args:
        final: what it is to be called; an older folder of this name stays until then.
        write: called on every rank with the draft, which is there.
        then: called on the first rank when the folder has its name; what it raises is only logged.

    Raises:
        CheckpointingException: the same on every rank; what was there before is as it was.
    """
    with begin(CANNOT_SAVE, "save", group) as call:
        before: Optional[int] = None

        def start() -> str:
            nonlocal before
            draft = store.draft_of(final)
            before = store.identity_of(final)
            return str(draft)

        draft = Path(tell_all(call, start, "making a folder"))
        token = _draft.set(draft)
        try:
            attempt(call, write, draft)

            def finish(entries: Mapping[int, Mapping[str, Entry]]) -> Mapping[int, Any]:
                content = Manifest(step, len(entries), time.time(), all_entries(draft, entries.values()))
                manifest.write(draft, content)
                store.publish(draft, final, before)
                try:
                    then()
                except Exception:
                    logger.exception("%s is saved; what was to follow failed", final)
                return dict.fromkeys(entries, content)

            entries: Mapping[str, Entry] = {}
            with guard(call):
                entries = {} if call.problems else entries_of(draft, call.rank)
            result: Manifest = consult(
                call,
                entries,
                finish,
                Topic("publishing", OLDER, f"list the steps to see whether {final.name} is one"),
            )
            return result
        except BaseException:
            if call.rank == ranks_of(call)[0]:
                store.discard(draft)
            raise
        finally:
            _draft.reset(token)


def is_in_draft(path: Path) -> bool:
    """Whether `write_folder` is writing here: what is written into its draft is published with it."""
    draft = _draft.get()
    return draft is not None and (draft == path or draft in path.parents)


def attempt(call: Call, work: Callable[[Path], None], folder: Path) -> None:
    """Let the caller's code work on a folder; what it raises is a problem of this rank.

    Raises:
        CheckpointingException: one that every rank has already.
    """
    try:
        work(folder)
    except Exception as error:
        if isinstance(error, CheckpointingException) and error.is_agreed:
            raise
        record(call, problem_from(error), error)


def entries_of(draft: Path, rank: int) -> dict[str, Entry]:
    """Sizes and checksums of the files that a rank wrote, of those that have its number."""
    own = {}
    for name in manifest.paths_in(draft):
        match = OF_RANK.fullmatch(name.rpartition("/")[2])
        if match is not None and int(match["shard"] or match["data"]) == rank:
            own[name] = manifest.entry_of(draft / name)
    return own


def all_entries(draft: Path, known: Iterable[Mapping[str, Entry]]) -> dict[str, Entry]:
    """Sizes and checksums of all files, once every rank has said its own: until then some are written."""
    listed = {name: Entry(*entry) for entries in known for name, entry in entries.items()}
    for name in manifest.paths_in(draft):
        if name not in listed and name != store.OWNER:
            listed[name] = manifest.entry_of(draft / name)
    return listed


def read_folder(
    folder: Path, read: Callable[[Path], None], *, is_verified: bool, group: Group = None
) -> None:
    """Read a folder, after its checksums. Collective.

    Raises:
        CheckpointingException: a rank could not, or a file is not what was saved; the same on every rank.
    """
    with begin(CANNOT_LOAD, "load", group) as call:
        if is_verified:
            with guard(call):
                ranks = ranks_of(call)
                content = manifest.read(folder)
                wrong = manifest.wrong_checksums(folder, content, ranks.index(call.rank), len(ranks))
                call.problems += [Problem("not what was saved", str(folder), text) for text in wrong]
            consult(call, None, nothing, Topic("verifying"))
        attempt(call, read, folder)
        consult(call, None, nothing, Topic("loading", "values may have been loaded in part"))


def nothing(ranks: Mapping[int, Any]) -> Mapping[int, Any]:
    return {}
