"""The step folders of a run: written under hidden names, published by a rename, listed, removed.

Runs on one rank. A folder with a step's own name is complete, or was damaged later; folders that are being
written or removed have hidden names. Must never import torch.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import logging
import operator
import os
import re
import secrets
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Optional, Union

from torch_dcp_backport.checkpoint._src import manifest
from torch_dcp_backport.checkpoint._src.manifest import BadManifest, Manifest
from torch_dcp_backport.publish import disk
from torch_dcp_backport.publish.drafts import (
    HIDDEN,
    OWNER,
    Hidden,
    Mark,
    as_kind,
    discarding,
    hidden_name,
    is_alive,
    make_hidden,
    remove_if_empty,
)

logger = logging.getLogger("torch_dcp_backport.checkpoint")

TRACKER = "latest_checkpointed_iteration.txt"
STEP = re.compile(r"global_step_(\d+)")
#: Files in a step: the URL that it was uploaded to; the process that uploads it now.
UPLOADED, UPLOADING = "uploaded.txt", "uploading.json"
#: File in a step that could not be loaded where an older step could: retention does not count it.
NOT_LOADED = "could-not-be-loaded.txt"
#: File in a step that stays, whatever the policy of retention.
PINNED = "pinned.txt"
#: Seconds: file systems with coarse times may give two files of such a time the same.
COARSE = 3.0
#: Files beside those that the manifest lists.
MARKS = (UPLOADED, UPLOADING, NOT_LOADED, PINNED, OWNER)
#: Of a step that is loaded, and left alone by retention.
LINK = "a link"
#: Held while a step is hidden, and while a step is marked as being uploaded.
_taking = threading.Lock()


class AnotherWriter(Exception):
    """Another process published the folder of a step while it was written here."""


@dataclass(frozen=True)
class Step:
    step: int
    path: Path
    #: None where it cannot be read.
    manifest: Optional[Manifest]
    #: Why it must not be loaded; "" where nothing speaks against it.
    fault: str
    #: Why retention leaves it alone: "not ours", "newer", "damaged", ...; "" for what this package published.
    foreign: str = ""

    @property
    def age(self) -> tuple[int, int]:
        """Key to sort steps as they were published: after a step back, a lower step may be newer."""
        if self.manifest is None or self.manifest.step != self.step:
            return 0, self.step
        return self.manifest.order, self.step


class Identity(NamedTuple):
    """The save whose folder has a name. File systems give a new folder the inode of a removed one."""

    inode: int
    #: Order and time in the manifest; None where it cannot be read.
    made: Optional[tuple[int, str]]


class ListedStep(NamedTuple):
    """A step folder, of which only the manifest was read."""

    step: int
    path: Path
    #: The manifest's; 0 where it cannot be read, or is of another step.
    order: int
    #: As of `Step`, and why in full.
    foreign: str
    reason: str
    identity: Optional[Identity]
    metric: Optional[float] = None

    @property
    def fault(self) -> str:
        """Why it must not be loaded, as far as its manifest tells; "" where nothing speaks against it."""
        return "" if self.foreign == LINK else self.reason


class Stamp(NamedTuple):
    """Numbers of which some change when another manifest is published in a root's folder."""

    #: Of the folder in the root; all others are the manifest's.
    folder: int
    device: int
    inode: int
    nbytes: int
    mtime_ns: int
    ctime_ns: int


class KnownStep(NamedTuple):
    """A step folder as it was listed, and what tells whether it is another one now."""

    #: Of the folder in the root.
    inode: int
    #: None where the manifest was written just now, and the next one might have the same.
    stamp: Optional[Stamp]
    entry: ListedStep


@dataclass
class Shelf:
    """The places of a run's folders: root/global_step_N, or a path below it."""

    root: Path
    below: Path = Path()
    #: Name in the root -> the folder as it was listed: a run of 10,000 steps reads each manifest once.
    known: dict[str, KnownStep] = field(default_factory=dict, compare=False, repr=False)
    #: Whether a save of this process has removed what others left.
    is_cleaned: bool = field(default=False, compare=False, repr=False)

    def steps(self) -> list[Step]:
        """Return every folder, newest first, with its faults: looks at every file of every step."""
        steps = [examined(entry.path, entry.step) for entry in self.readable()]
        return sorted(steps, key=lambda step: step.age, reverse=True)

    def listed(self) -> list[ListedStep]:
        """Return every folder, newest first; reads the manifests that are not those of the last call."""
        return self._listed(self._inodes())

    def readable(self) -> list[ListedStep]:
        """Return every folder, newest first, and those that a save has hidden and nothing has replaced yet.

        The save was killed between two renames, or is between them now. Only a save or a clean-up gives
        such a step its name back; readers find it under the hidden one.
        """
        inodes = self._inodes()
        entries = [*self._listed(inodes), *self._lost(inodes)]
        return sorted(entries, key=lambda entry: (entry.order, entry.step), reverse=True)

    def _inodes(self) -> dict[str, int]:
        try:
            with os.scandir(self.root) as entries:
                return {entry.name: entry.inode() for entry in entries}
        except (FileNotFoundError, NotADirectoryError):
            return {}

    def _lost(self, names: Collection[str]) -> Iterator[ListedStep]:
        for name in names if not self.below.name else ():
            match = HIDDEN.fullmatch(name) if name.startswith(".") else None
            step = step_named(match["name"]) if match is not None and match["kind"] == "was" else None
            if step is not None and name_of(step) not in names and os.path.isdir(self.root / name):
                yield listed_of(self.root / name, step)

    def _listed(self, inodes: Mapping[str, int]) -> list[ListedStep]:
        listed: list[ListedStep] = []
        known: dict[str, KnownStep] = {}
        looked_at = self._doubtful(inodes)
        for name, inode in inodes.items():
            step = step_named(name)
            if step is None:
                continue
            path, former = self.root / name / self.below, self.known.get(name)
            if former is None or former.inode != inode or name in looked_at:
                former = self._read(former, path, step, inode)
            if former is None:
                continue
            listed.append(former.entry)
            if not former.entry.foreign:
                # What could not be read may be read the next time.
                known[name] = former
        self.known.clear()
        self.known.update(known)
        return sorted(listed, key=lambda entry: (entry.order, entry.step), reverse=True)

    def _read(self, former: Optional[KnownStep], path: Path, step: int, inode: int) -> Optional[KnownStep]:
        """Return a step folder as it is now; None where there is none. Reads another manifest than before."""
        # Before the manifest is read: a change in between is seen by the next look.
        stamp = stamp_of(path, inode)
        if former is not None and stamp is not None and stamp == former.stamp:
            return former
        entry = listed_of(path, step)
        if entry.foreign and not os.path.isdir(path):
            return None
        return KnownStep(inode, stamp, entry)

    def _doubtful(self, inodes: Mapping[str, int]) -> set[str]:
        """Return the names of steps that may be other saves than they were, with the same folder's inode.

        A save in a step's place is made beside it, so that its folder has another inode, which the listing of
        the root tells. It may have the same only if that one was removed before: then the step was published
        by a handler after all others, and the tracker names it. To look at these alone keeps the calls of a
        save from growing with the run. Before a step is removed, `hide` looks at it again in any case.
        """
        names = {name for name in inodes if step_named(name) is not None}
        last = tracked(self.root) if not self.below.name and self.known else None
        if last is None:
            # A folder below a step's is in no listing; and no handler saves here.
            return names
        newest = max(self.known.values(), key=lambda known: (known.entry.order, known.entry.step))
        counts = Counter(inodes[name] for name in names)
        # Some file systems list every folder with the same number.
        unknown = {name for name in names if counts[inodes[name]] > 1 or not inodes[name]}
        young = {name for name, known in self.known.items() if known.stamp is None}
        return {*unknown, *young, name_of(last), newest.entry.path.name}

    def forget(self, entry: ListedStep) -> None:
        """Read a step anew when it is listed the next time: it is no longer what it was."""
        self.known.pop(entry.path.relative_to(self.root).parts[0], None)

    def next_order(self) -> int:
        """Return the order of the step that is published next.

        Raises:
            ValueError: a step has the last order that there is.
        """
        newest = next(iter(self.readable()), None)
        order = 1 if newest is None else newest.order + 1
        if newest is not None and order >= manifest.LARGEST:
            raise ValueError(
                f"{newest.path} has order {newest.order}, after which there is none: no step of a training "
                "has it, move the folder away"
            )
        return order

    def newest_complete(self) -> Optional[ListedStep]:
        """Return the newest step that nothing speaks against, as far as sizes tell."""
        return next((entry for entry in self.readable() if not examined(entry.path, entry.step).fault), None)

    def clean_once(self) -> None:
        """Remove what others left, before the first save of this process."""
        if not self.is_cleaned:
            self.is_cleaned = True
            self.clean()

    def clean(self) -> list[str]:
        """Remove what dead writers and removals left, in the folders of all steps; as `clean`."""
        if not self.below.name:
            return clean(self.root)
        steps = [path for path in paths_in(self.root) if step_named(path.name) is not None]
        names = re.compile(re.escape(self.below.name))
        return [text for path in steps for text in clean((path / self.below).parent, names)]


def shelf_of(path: Path) -> Optional[Shelf]:
    """Return the shelf that holds a trainer's path and those of other steps; None without a step in it."""
    for folder in (path, *path.parents):
        if STEP.fullmatch(folder.name):
            return Shelf(folder.parent, path.relative_to(folder))
    return None


def name_of(step: int) -> str:
    return f"global_step_{step}"


def step_named(name: str) -> Optional[int]:
    """Return the step whose folder has a name; None for any other name, such as a copy's, global_step_003."""
    match = STEP.fullmatch(name)
    return int(match[1]) if match is not None and name == name_of(int(match[1])) else None


def located(path: Path) -> Path:
    """Return where the folder of a path is: there, or under the hidden name that a killed save left it with.

    A load reads it where it is: only the next save or `prune` gives it its name back.
    """
    if os.path.lexists(path):
        return path
    shelf = shelf_of(path)
    if shelf is not None and shelf.below.name:
        step = path.parents[len(shelf.below.parts) - 1]
        path = (_lost(step) or step) / shelf.below
    return path if os.path.lexists(path) else _lost(path) or path


def _lost(path: Path) -> Optional[Path]:
    """Return the folder that had a name before a save hid it to replace it; None where the name is taken."""
    if os.path.lexists(path):
        return None
    hidden = []
    with contextlib.suppress(OSError):
        for other in paths_in(path.parent):
            match = HIDDEN.fullmatch(other.name)
            if match and match["name"] == path.name and match["kind"] == "was":
                hidden.append(other)
    return max(hidden, key=_order_in, default=None)


def _order_in(folder: Path) -> int:
    with contextlib.suppress(BadManifest):
        return manifest.read(folder).order
    return 0


def name_given(path: Path) -> Path:
    """Return the name that a hidden folder had; that of any other path is its own."""
    match = HIDDEN.fullmatch(path.name)
    return path if match is None else path.with_name(match["name"])


def is_step_or_root(path: Path, root: Path) -> bool:
    """Return whether a folder is the root of steps, or in a step; links are followed."""
    path, root = (Path(os.path.realpath(folder)) for folder in (path, root))
    parts = path.relative_to(root).parts if root in path.parents else ()
    return path == root or any(STEP.fullmatch(part) for part in parts)


def steps_in(root: Path) -> list[Step]:
    """Return every step folder of a root, newest first."""
    return Shelf(root).steps()


def stamp_of(path: Path, folder: int) -> Optional[Stamp]:
    """Return the stamp of a step's manifest; None where the next manifest might have the same.

    Args:
        path: of the step.
        folder: inode of its folder in the root.
    """
    try:
        seen = os.stat(path / manifest.NAME)
    except OSError:
        return None
    if time.time() - seen.st_mtime < COARSE:
        return None
    return Stamp(folder, seen.st_dev, seen.st_ino, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns)


def listed_of(path: Path, step: int) -> ListedStep:
    """Return a step folder by its manifest alone."""
    try:
        content = manifest.read(path)
    except BadManifest as error:
        return ListedStep(step, path, 0, error.kind, str(error), None)
    foreign = foreign_of(path, step, content)
    order = content.order if content.step == step else 0
    return ListedStep(step, path, order, foreign, foreign, identity_of(path, content), content.metric)


def foreign_of(path: Path, step: int, content: Manifest) -> str:
    """Return why a folder with a manifest of ours is not what was published; "" where it is."""
    if content.step != step:
        return f"its manifest is of step {content.step}"
    return LINK if os.path.islink(path) else ""


def examined(path: Path, step: int) -> Step:
    """Return a step folder with its faults: no manifest, another step's, files missing or cut off."""
    try:
        content = manifest.read(path)
    except BadManifest as error:
        return Step(step, path, None, str(error), error.kind)
    foreign = foreign_of(path, step, content)
    if content.step != step:
        return Step(step, path, content, foreign, foreign)
    wrong = list(itertools.islice(manifest.faults(path, content), 4))
    return Step(step, path, content, "; ".join(wrong[:3]) + (", ..." if len(wrong) > 3 else ""), foreign)


def fault_by_sizes(folder: Path) -> str:
    """Return why a folder is not what its manifest lists, as far as sizes tell; "" where it is."""
    try:
        return next(manifest.faults(folder, manifest.read(folder)), "")
    except BadManifest as error:
        return str(error)


def fault_by_checksums(step: Step, read: Callable[[int], None] = lambda nbytes: None) -> str:
    """Return the files of a step that hold other bytes than when they were saved; reads all of them.

    Args:
        step: the step.
        read: called with the number of bytes of each block that was read.
    """
    if step.manifest is None:
        return ""
    return "; ".join(manifest.wrong_checksums(step.path, step.manifest, read=read))


def checked_step(step: object) -> int:
    """Return the number of a step.

    Raises:
        ValueError: it is no number that a folder's name could have.
    """
    try:
        number = -1 if isinstance(step, bool) else operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if number < 0:
        raise ValueError(f"step={step!r}: expected a whole number from 0 on")
    return number


def identity_of(path: Path, content: Optional[Manifest] = None) -> Optional[Identity]:
    """Return the save whose folder has a name; None where there is none.

    Args:
        content: the folder's manifest, if it was read.
    """
    try:
        # Of a link, the link itself: that is renamed.
        inode = path.lstat().st_ino
    except FileNotFoundError:
        return None
    if content is None:
        with contextlib.suppress(BadManifest):
            content = manifest.read(path)
    return Identity(inode, None if content is None else (content.order, str(content.made_at)))


def is_replaced(before: Optional[Identity], now: Optional[Identity]) -> bool:
    """Return whether a name has another save's folder than before; a damaged manifest tells nothing."""
    if now is None or before is None:
        return now is not None
    is_known = now.made is not None and before.made is not None
    return now.inode != before.inode or (is_known and now.made != before.made)


class StepDraft(Hidden):
    """The draft of a step folder that this process writes."""

    def __init__(self, final: Path, cleans: bool = True) -> None:
        """Make the draft.

        Args:
            final: the name that it gets.
            cleans: remove the drafts of dead writers before: a save does, a load does not.

        Raises:
            OSError: it cannot be made.
        """
        if cleans:
            clean(final.parent, re.compile(re.escape(final.name)))
        folder, mark = make_hidden(final)
        super().__init__(folder, final, mark)
        with discarding(self):
            #: What has the name now: no other folder is replaced.
            self.before = identity_of(final)


def publish(draft: StepDraft, synced: Collection[str] = ()) -> None:
    """Give a complete draft the folder's name; from then on readers see it.

    Args:
        synced: files that are on disk, by their paths below the draft; the others are put there.

    Raises:
        AnotherWriter: another folder has got the name since the draft was made.
        DraftGone: another process removed the draft.
    """
    final, now = draft.target, identity_of(draft.target)
    draft.check()
    if is_replaced(draft.before, now):
        raise AnotherWriter(f"another writer published {final.name} in {final.parent}")
    # Retention may have removed it.
    replaced = None if now is None else hidden_name(final, "was")
    draft.sync(synced)
    try:
        draft.take_place(replaced)
    except OSError as error:
        if is_replaced(now, identity_of(final)):
            raise AnotherWriter(f"another writer published {final.name} in {final.parent}") from error
        draft.check()
        raise
    # From here on readers see it: an error must not say that the save failed.
    try:
        disk.step("sync the root")
        disk.sync_folder(final.parent)
        disk.remove([final / OWNER])
    except OSError:
        logger.exception("%s is published; a loss of power may take it back", final)
    draft.release()
    if replaced is not None:
        disk.step("remove the folder that was replaced")
        for reason in replaced_away(replaced, final)[:1]:
            logger.error("%s was replaced, and still takes its room on the disk: %s", final, reason)


def write_tracker(root: Path, step: int) -> None:
    """Write the tracker, as verl and Megatron do: a hint for other programs, which is never believed here.

    They do believe it: it is on disk before it has its name, and a loss of power leaves no empty file.
    """
    disk.publish(root / TRACKER, str(step).encode())


def tracked(root: Path) -> Optional[int]:
    """Return the step that the tracker names; None where there is no tracker, or no number in it."""
    try:
        return int(disk.read_whole(root / TRACKER))
    except (OSError, ValueError):
        return None


@contextlib.contextmanager
def uploading(folder: Path) -> Iterator[None]:
    """Mark a step as being uploaded: retention keeps it, in any process."""
    with _taking:
        mark = Mark(folder / UPLOADING)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            (folder / UPLOADING).unlink()
        mark.release()


def is_uploading(folder: Path) -> bool:
    return is_alive(folder, UPLOADING)


def mark_uploaded(folder: Path, url: str, mark: bytes) -> None:
    """Record the URL that a step was uploaded to, and its manifest then: a step may be saved again."""
    record = json.dumps({"url": url, "manifest": zlib.crc32(mark)})
    disk.publish(folder / UPLOADED, record.encode(), is_synced=False)


def uploaded_to(folder: Path) -> str:
    """Return the URL that a step was uploaded to; "" where it was not."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        record = json.loads(disk.read_whole(folder / UPLOADED))
        if record["manifest"] == zlib.crc32(disk.read_whole(folder / manifest.NAME)):
            return str(record["url"])
    return ""


def is_pinned(folder: Path) -> bool:
    return os.path.lexists(folder / PINNED)


def pin(folder: Path) -> None:
    """Pin a step: no policy removes it, and a save in its place keeps it beside the new one.

    Raises:
        ValueError: it is no step that this package published.
        OSError: the mark cannot be written.
    """
    content = published(folder)
    if isinstance(content, str):
        raise ValueError(f"{folder}: {content}")
    disk.publish(folder / PINNED, b"no policy removes this step: `checkpoint unpin` takes this back\n")


def unpin(folder: Path) -> None:
    """Take a pin back, also of a step that was damaged since.

    Raises:
        ValueError: the folder is not pinned, or no step.
        OSError: the mark cannot be removed.
    """
    if is_pinned(folder) and not os.path.lexists(folder / manifest.NAME):
        raise ValueError(f"{folder}: {manifest.ABSENT}, so that {PINNED} is no mark of this package")
    try:
        (folder / PINNED).unlink()
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{folder} is not pinned") from None


def replaced_away(hidden: Path, final: Path) -> list[str]:
    """Remove a folder that another one has replaced, unless it is pinned; return why it is still there."""
    if is_pinned(hidden):
        return set_aside(hidden, final, "it is pinned, and the step was saved again")
    return removed(given_up(hidden), final)


def taken(folder: Path, trash: Optional[Path] = None) -> Optional[Path]:
    """Hide a folder, and return its new name; None where it is being uploaded and stays.

    Args:
        trash: the folder that it is moved into, on the same disk; None hides it where it is.
    """
    hidden = hidden_name(folder, "old")
    if trash is not None:
        trash.mkdir(parents=True, exist_ok=True)
        # By no name that a step has, or that is cleaned up: the trash may be in the root of another run.
        run = os.path.basename(os.path.abspath(folder.parent))
        hidden = trash / f"{run}.{folder.name}.{secrets.token_hex(4)}"
    with _taking:
        if is_uploading(folder):
            return None
        os.rename(folder, hidden)
    return hidden


class Hiding(NamedTuple):
    """The outcome of hiding a folder."""

    #: The folder's new name; None where it stays, or is gone.
    hidden: Optional[Path]
    #: Why it stays, in words that follow its name; "" where it does not.
    why: str = ""


def hide(folder: Path, is_same: Callable[[Path], bool], trash: Optional[Path] = None) -> Hiding:
    """Hide a folder that is to be removed, unless it is pinned, being uploaded, or no longer the same.

    What another process did between the look and the rename is seen after it: the folder gets its name back,
    or one beside it where the name is taken.

    Args:
        is_same: whether a path has what is to be removed.
        trash: as of `taken`.

    Raises:
        OSError: it cannot be renamed.
    """
    if not os.path.lexists(folder):
        return Hiding(None)
    why = _why_kept(folder, is_same)
    if why:
        return Hiding(None, why)
    disk.step(f"rename {folder.name} away")
    try:
        hidden = taken(folder, trash)
    except FileNotFoundError:
        # Another process removes, too.
        return Hiding(None)
    if hidden is None:
        return Hiding(None, "is being uploaded")
    why = _why_kept(hidden, is_same)
    if not why:
        return Hiding(hidden)
    if not os.path.lexists(folder):
        os.rename(hidden, folder)
    else:
        for reason in set_aside(hidden, folder, f"it {why}, and the step was saved again"):
            logger.error("%s is hidden, and cannot get its name back: %s", hidden, reason)
    return Hiding(None, why)


def _why_kept(folder: Path, is_same: Callable[[Path], bool]) -> str:
    if is_pinned(folder):
        return "is pinned"
    return "" if is_same(folder) else "is no longer what was to be removed"


def given_up(replaced: Path) -> Path:
    """Rename a replaced folder so that it is never put back, as half of it may be left; return the name.

    What this package did not publish keeps its name: it is not removed.
    """
    hidden = as_kind(replaced, "old")
    if isinstance(published(replaced), str):
        return replaced
    try:
        os.rename(replaced, hidden)
    except OSError:
        # Another process cleans up, too; or the folder cannot be removed either.
        return replaced
    return hidden


def published(folder: Path) -> Union[Manifest, str]:
    """Return the manifest by which this package published a folder; or why that cannot be proved."""
    if os.path.islink(folder):
        return "it is a link"
    try:
        return manifest.read(folder)
    except BadManifest as error:
        return str(error)


def removed(hidden: Path, final: Path) -> list[str]:
    """Remove a hidden folder that was published before, as far as possible: what its manifest lists, and our
    marks. The manifest goes last, so that another process can go on where this one is killed.

    A folder that this package did not publish, and files that it did not write, are given a name that is seen
    again, and named in the log.

    Args:
        final: the name that the folder had.

    Returns:
        Why parts of it are still there.
    """
    content = published(hidden)
    if isinstance(content, Manifest):
        marks = (*MARKS, *(f"{mark}.new" for mark in MARKS))
        # With the manifest goes the proof that the rest is ours: it stays while anything of it does.
        reasons = [reason for name in content.files for reason in _removed_file(hidden, name)]
        folders = [] if reasons else folders_of(hidden, content)
        reasons += [reason for folder in folders for reason in _removed_folder(folder)]
        for name in (*marks, manifest.NAME):
            reasons = reasons or _removed_file(hidden, name)
        if reasons:
            return reasons
    # Without a manifest, another process may have removed all that it lists.
    if remove_if_empty(hidden):
        return []
    others = list(itertools.islice(held(hidden), 4))
    if isinstance(content, str) and not others and not os.path.islink(hidden):
        # The draft of another process, which has no name yet: the next clean-up comes to it if that is dead.
        return []
    reasons = _removed_folder(hidden)
    if reasons:
        return reasons
    text = ", ".join(others[:3]) + (", ..." if len(others) > 3 else "")
    unknown = f"this package did not write {text or 'what it holds'}"
    return set_aside(hidden, final, unknown if isinstance(content, Manifest) else content)


def held(folder: Path) -> Iterator[str]:
    """Yield the paths below a folder of what is no folder, but for the mark of an owner."""
    for _, entries in disk.walk(folder):
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False) and entry.name not in (OWNER, f"{OWNER}.new"):
                yield Path(entry.path).relative_to(folder).as_posix()


def _removed_file(folder: Path, name: str) -> list[str]:
    """Remove a file, if no link leads out of the folder to it; return why it is still there."""
    path = folder / name
    if any(map(os.path.islink, between(folder, path))):
        return []
    try:
        disk.step(f"remove {name}")
        path.unlink(missing_ok=True)
    except NotADirectoryError:
        pass
    except OSError as error:
        if not os.path.isdir(path):
            return [str(error)]
    return []


def folders_of(folder: Path, content: Manifest) -> list[Path]:
    """Return the folders that a step was saved with, those within others first; none that a link leads to."""
    parents = {parent for name in content.files for parent in between(folder, folder / name)}
    within = [parent for parent in parents if not any(map(os.path.islink, between(folder, parent)))]
    return sorted(within, key=lambda parent: len(parent.parts), reverse=True)


def between(folder: Path, path: Path) -> list[Path]:
    """Return the folders in a folder that a path in it leads through."""
    return [parent for parent in path.parents if folder in parent.parents]


def _removed_folder(folder: Path) -> list[str]:
    """Remove a folder if it is empty, and return why it is still there; what is in it is no reason."""
    try:
        os.rmdir(folder)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ENOTEMPTY, errno.EEXIST):
            return [str(error)]
    return []


def remove_empty_parents(final: Path, root: Path) -> None:
    """Remove the folders between a root and a folder that was in it, where nothing is left in them."""
    with contextlib.suppress(OSError):
        for parent in final.parents:
            if root not in parent.parents:
                return
            os.rmdir(parent)


def set_aside(folder: Path, final: Path, reason: str) -> list[str]:
    """Give a folder that is not ours to remove the name that it had, or a new name beside that.

    Returns:
        Why it cannot be given a name.
    """
    name = final
    if os.path.lexists(final):
        name = final.with_name(f"{final.name}.kept-{secrets.token_hex(4)}")
    try:
        os.rename(folder, name)
    except FileNotFoundError:
        return []
    except OSError as error:
        return [str(error)]
    logger.warning("%s is kept, and no longer a step: %s", name, reason)
    return []


def paths_in(folder: Path) -> list[Path]:
    """Return what is in a folder; nothing where it is none, or gone."""
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def clean(
    root: Path,
    names: re.Pattern[str] = STEP,
    is_ours: Callable[[Path, str], bool] = lambda hidden, name: True,
) -> list[str]:
    """Remove what dead writers of folders of some names left, and put back a folder that lost its name.

    Folders that cannot be removed stay; those that cannot be put back are logged, and so are hidden folders
    of which nothing proves that this package made them.

    Args:
        root: the folder that they are in.
        names: those that the folders have, or had.
        is_ours: whether a hidden folder of a name may be touched; not asked of a draft that is being written.

    Returns:
        What stays, and why it could not be removed; it is in the log, too.
    """
    hidden = {path: HIDDEN.fullmatch(path.name) for path in paths_in(root)}
    left = {path: match for path, match in hidden.items() if match and names.fullmatch(match["name"])}
    drafts = [path for path, match in left.items() if match["kind"] == "tmp" and not os.path.islink(path)]
    alive = {left[path]["name"]: path for path in drafts if is_alive(path)}
    failures: list[str] = []
    # What lost its name gets it back before anything is removed: this process may be killed, too.
    for path, match in sorted(left.items(), key=lambda item: item[1]["kind"] != "was"):
        final = path.with_name(match["name"])
        if path not in alive.values() and not is_ours(path, final.name):
            continue
        is_lost = match["kind"] == "was" and not os.path.lexists(final)
        if match["name"] in alive and match["kind"] in ("tmp", "was"):
            # Being written, or between the two renames of its writer.
            if is_lost:
                draft = alive[match["name"]].name
                logger.warning("%s is no step, and is %s, until the writer of %s is done", final, path, draft)
            continue
        if is_lost:
            _put_back(path, final)
            continue
        for reason in _cleaned(path, match["kind"], final)[:1]:
            logger.error("%s still takes its room on the disk: %s", path, reason)
            failures.append(f"{path}: {reason}")
    return failures


def _put_back(hidden: Path, final: Path) -> None:
    try:
        os.rename(hidden, final)
    except OSError as error:
        logger.error("%s: cannot be put back: %s", final, error)
    else:
        logger.warning("%s: put back, as what was to replace it was never published", final)


def _cleaned(path: Path, kind: str, final: Path) -> list[str]:
    """Remove a hidden folder that no process writes, if it is ours; return why it is still there."""
    if kind in ("was", "old") and is_pinned(path) and not os.path.lexists(final):
        # A process was killed that had seen the pin too late.
        _put_back(path, final)
        return []
    if kind == "was":
        return replaced_away(path, final)
    if kind == "old":
        return removed(path, final)
    if os.path.islink(path):
        logger.warning("%s: left alone, as it is a link, which this package never makes", path)
    elif os.path.lexists(path / OWNER):
        logger.info("%s: left behind by a writer that is gone; removed", path)
        return Hidden(path, final).discard()
    elif not remove_if_empty(path):
        logger.warning("%s: left alone, as it has no %s: nothing says who made it", path, OWNER)
    return []
