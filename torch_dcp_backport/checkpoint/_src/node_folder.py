"""The folder of a node: parts of saved steps. A part is what one rank saved of one step, or a copy of it.

    FOLDER/rank_3/step_20.1f6a09c2/    the rank's place in its group; the step, and the name of the save
        manifest.json                  step, ranks, order, size and CRC32 of every file
        part.json                      which part of which save of which run this is; written first
        dist_ckpt/                     the rank's values, as `dist_checkpointing` writes them

A part appears whole or not at all, and no save replaces another's. Runs on one rank; removes only parts of
its own run, under the names that they were saved under. That is proved by the manifest, which has a checksum
of its own, and size and CRC32 of part.json when it was saved; or, without a manifest, by part.json itself.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import zlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Optional

from torch_dcp_backport.checkpoint._src import manifest, retention, store
from torch_dcp_backport.checkpoint._src.manifest import BadManifest, Manifest, ManifestEntry
from torch_dcp_backport.checkpoint._src.store import ListedStep
from torch_dcp_backport.publish import disk
from torch_dcp_backport.transfer import warn_once

logger = logging.getLogger("torch_dcp_backport.checkpoint")

PART = "part.json"
#: Of part.json. Format 1, of release 0.1.0, does not name the run.
FORMAT = 2
RANK = re.compile(r"rank_(0|[1-9][0-9]*)")
SAVE = re.compile(r"step_(0|[1-9][0-9]*)\.[0-9a-f]{8}")


class Part(NamedTuple):
    """A part that is in the folder, whole by the sizes of its files."""

    #: The rank that saved it, by its place in the group.
    owner: int
    #: The save, of which every rank's part has this name.
    save: str
    step: int
    #: Saves sort by it as they were made: after a step back, a lower step may be newer.
    order: int
    #: The number of ranks that saved.
    world: int


class Contents(NamedTuple):
    """What a folder has."""

    parts: list[Part]
    #: Why others are no parts, a text for each.
    faults: list[str]
    #: The order of the next save, as far as this folder tells.
    next_order: int


class AnotherRun(Exception):
    """The folder has parts of another run."""


class OldFormat(Exception):
    """The folder has parts of an older release, which do not tell their run."""


def described(owner: int, save: str, world: int, run: str) -> bytes:
    """Return the content of part.json."""
    said = {"format": FORMAT, "rank": owner, "save": save, "world": world, "run": run}
    return json.dumps(said).encode()


class NodeFolder:
    """A folder that all ranks of one node see."""

    def __init__(self, root: Path, run: str) -> None:
        self.root = root
        self.run = run

    def place_of(self, owner: int, save: str) -> Path:
        return self.root / f"rank_{owner}" / save

    def sign(self, node: str, token: str) -> None:
        """Write the node's name into the folder.

        Args:
            token: what tells this process from all others.

        Raises:
            OSError: the folder cannot be made, or cannot be written into.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        disk.publish(self.root / f".node-{zlib.crc32(node.encode()):08x}", token.encode(), is_synced=False)

    def signed_by(self, tokens: Collection[str]) -> list[str]:
        """Return which of some tokens the folder has: it is the folder of their nodes, too."""
        found = set()
        for path in self.root.glob(".node-*"):
            # Another program's file may have such a name.
            with contextlib.suppress(OSError, ValueError):
                found.add(disk.read_whole(path, 64).decode())
        return [token for token in tokens if token in found]

    def contents(self) -> Contents:
        """Return all parts. Reads their small files.

        Raises:
            AnotherRun: a part is that of another run.
            OldFormat: a part is that of release 0.1.0.
        """
        parts, faults, order = list[Part](), list[str](), 0
        for owner, entry in self._listed():
            order = max(order, entry.order)
            fault = entry.reason
            if not fault:
                try:
                    parts.append(part_in(entry, owner, self.run))
                except BadManifest as error:
                    fault = str(error)
            if fault:
                self._refuse(entry.path, owner)
                faults.append(f"{entry.path}: {fault}")
        return Contents(parts, faults, order + 1)

    def _refuse(self, part: Path, owner: int) -> None:
        """Refuse a part that another run or release has saved; a damaged one of this run is none.

        Raises:
            AnotherRun, OldFormat: it is one.
        """
        with contextlib.suppress(BadManifest):
            check_saved(manifest.read(part), owner, part.name, self.run)
            return
        said = said_in(part)
        run = said.get("run", self.run)
        if run != self.run:
            text = f"parts of the run {run!r}, such as {part}, and this is the run {self.run!r}"
            raise AnotherRun(f"{self.root} has {text}: each run has a folder of its own")
        if said.get("format") == 1:
            text = f"parts of release 0.1.0, such as {part}: its {PART} is of format 1, and not {FORMAT}"
            raise OldFormat(
                f"{self.root} has {text}; remove {self.root}/rank_*/step_*, or take another folder"
            )

    def saves_of(self, owner: int) -> list[tuple[int, str]]:
        """Return (order, save) of the parts of one rank that are whole."""
        saves = []
        for _, entry in self._listed(owner):
            with contextlib.suppress(BadManifest):
                if not entry.foreign:
                    saves.append((part_in(entry, owner, self.run).order, entry.path.name))
        return saves

    def clean(self) -> None:
        """Remove what dead writers and removals of this run left."""
        for folder in self._ranks():
            owner = owner_of(folder)

            def is_ours(hidden: Path, save: str, owner: int = owner) -> bool:
                return self._is_ours(hidden, owner, save)

            store.clean(folder, SAVE, is_ours)

    def _is_ours(self, hidden: Path, owner: int, save: str) -> bool:
        """Return whether a hidden folder proves to be this run's, or holds nothing; if not, log it once."""
        try:
            check_saved(manifest.read(hidden), owner, save, self.run)
            return True
        except BadManifest as error:
            # A draft has none yet.
            reason, said = str(error), said_in(hidden)
        if "run" in said:
            is_ours, reason = bool(said["run"] == self.run), f"it is of the run {said['run']!r}"
        else:
            # A process was killed before it had written part.json.
            is_ours = set(store.held(hidden)) <= {PART, f"{PART}.new"}
        if not is_ours:
            self._tell_left(hidden, reason)
        return is_ours

    def _tell_left(self, path: Path, reason: str) -> None:
        text = f"{path}: left alone, as nothing proves that the run {self.run!r} saved it: {reason}"
        warn_once(logger, f"{text}; it takes its room until it is removed by hand", path)

    def retire(self, before: int) -> list[str]:
        """Remove the parts of an older order; return why some could not be removed."""
        return self._remove(entry for entry in self._own() if entry.order < before)

    def give_up(self, save: str) -> list[str]:
        """Remove the parts of a save; return why some could not be removed."""
        return self._remove(entry for entry in self._own() if entry.path.name == save)

    def _remove(self, entries: Iterator[ListedStep]) -> list[str]:
        failures = list[str]()
        # Runs on the first rank of a node alone: an error would leave the others waiting.
        try:
            listed = [entry for entry in entries if not entry.foreign]
        except OSError as error:
            return [f"{self.root}: {error!r}"]
        for entry in listed:
            try:
                failures.append(retention.remove(entry))
            except OSError as error:
                failures.append(f"{entry.path}: {error!r}")
        return [failure for failure in failures if failure]

    def _own(self) -> Iterator[ListedStep]:
        """Yield what was saved by this run, and has the names that it was saved under."""
        for owner, entry in self._listed():
            try:
                check_saved(manifest.read(entry.path), owner, entry.path.name, self.run)
            except BadManifest as error:
                self._tell_left(entry.path, str(error))
            else:
                yield entry

    def _ranks(self) -> list[Path]:
        folders = [path for path in store.paths_in(self.root) if RANK.fullmatch(path.name)]
        return sorted(path for path in folders if path.is_dir() and not path.is_symlink())

    def _listed(self, owner: Optional[int] = None) -> Iterator[tuple[int, ListedStep]]:
        """Yield (owner, part) of all ranks or of one, as the manifest alone tells."""
        for folder in self._ranks() if owner is None else [self.root / f"rank_{owner}"]:
            for path in sorted(store.paths_in(folder)):
                match = SAVE.fullmatch(path.name)
                if match is not None and os.path.isdir(path):
                    yield owner_of(folder), store.listed_of(path, int(match[1]))


def part_in(entry: ListedStep, owner: int, run: str) -> Part:
    """Return the part in a folder.

    Raises:
        Damaged: it is not whole, or was not saved under this name.
    """
    content = manifest.read(entry.path)
    for fault in manifest.faults(entry.path, content):
        raise BadManifest(fault)
    check_name(entry.path, content, owner, entry.path.name, run)
    return Part(owner, entry.path.name, content.step, content.order, content.world)


def owner_of(folder: Path) -> int:
    """Return the rank that a folder of parts is of."""
    return int(folder.name[len("rank_") :])


def in_order(content: Manifest) -> list[tuple[str, ManifestEntry]]:
    """Return the files of a part, as they are written: first the one that tells whose it is."""
    return sorted(content.files.items(), key=lambda item: (item[0] != PART, item[0]))


def said_in(folder: Path) -> Mapping[str, Any]:
    """Return what a part.json tells; nothing where it cannot be read."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        said = json.loads(disk.read_whole(folder / PART))
        return said if isinstance(said, dict) else {}
    return {}


def check_saved(content: Manifest, owner: int, save: str, run: str) -> None:
    """Compare the names of a part with its manifest, whatever became of its files since.

    Raises:
        Damaged: it was saved as another rank's, another save's, or another run's.
    """
    said = described(owner, save, content.world, run)
    if content.files.get(PART) != ManifestEntry(len(said), zlib.crc32(said)):
        raise BadManifest(f"{PART} was not saved as that of rank {owner}, {save} and the run {run!r}")


def check_name(folder: Path, content: Manifest, owner: int, save: str, run: str) -> None:
    """Compare the name of a part with what the folder holds.

    Raises:
        Damaged: it is another rank's, another save's, or another run's.
    """
    match = SAVE.fullmatch(save)
    if match is None or int(match[1]) != content.step:
        raise BadManifest(f"{save} is of step {content.step}")
    try:
        said = disk.read_whole(folder / PART)
    except OSError as error:
        raise BadManifest(f"{PART} cannot be read: {error.strerror}") from error
    if said != described(owner, save, content.world, run):
        raise BadManifest(f"{PART} is not that of rank {owner}, {save} and the run {run!r}: {said[:200]!r}")
