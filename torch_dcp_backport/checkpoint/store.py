"""The step folders of a run: written under hidden names, published by a rename, listed, removed.

Runs on one rank. A folder with a step's own name is complete, or was damaged later; folders that are being
written or removed have hidden names. Must never import torch.
"""

from __future__ import annotations

import contextlib
import json
import logging
import operator
import os
import re
import secrets
import shutil
import threading
import zlib
from collections import deque
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from torch_dcp_backport.checkpoint import manifest, owners
from torch_dcp_backport.checkpoint.manifest import Damaged, Manifest
from torch_dcp_backport.checkpoint.owners import OWNER, is_alive
from torch_dcp_backport.dist_checkpointing.engine import files

logger = logging.getLogger("torch_dcp_backport.checkpoint")

TRACKER = "latest_checkpointed_iteration.txt"
STEP = re.compile(r"global_step_(\d+)")
#: A hidden folder: being written (tmp), replaced by the same step (was), being removed (old).
HIDDEN = re.compile(r"\.(?P<name>.+)\.(?P<kind>tmp|was|old)-[0-9a-f]{8}")
#: How often a draft is made, where other processes clean up at the same moment.
ATTEMPTS = 20
#: Files in a step: the URL that it was uploaded to; the process that uploads it now.
UPLOADED, UPLOADING = "uploaded.txt", "uploading.json"
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

    @property
    def age(self) -> tuple[int, int]:
        """Key to sort steps as they were published: after a step back, a lower step may be newer."""
        return (self.manifest.order if self.manifest is not None else 0), self.step


@dataclass(frozen=True)
class Shelf:
    """The places of a run's folders: root/global_step_N, or a path below it."""

    root: Path
    below: Path = Path()

    def steps(self) -> list[Step]:
        """Return every folder, newest first, by what is on disk alone."""
        steps = []
        for path in self.root.iterdir() if self.root.is_dir() else ():
            match = STEP.fullmatch(path.name)
            if match is not None and (path / self.below).is_dir():
                steps.append(examined(path / self.below, int(match[1])))
        return sorted(steps, key=lambda step: step.age, reverse=True)

    def next_order(self) -> int:
        return 1 + max((step.age[0] for step in self.steps()), default=0)

    def clean(self) -> None:
        """Remove what dead writers and removals left, in the folders of all steps."""
        if not self.below.name:
            clean(self.root)
            return
        for path in self.root.iterdir() if self.root.is_dir() else ():
            if STEP.fullmatch(path.name) is not None:
                clean((path / self.below).parent, re.compile(re.escape(self.below.name)))


def shelf_of(path: Path) -> Optional[Shelf]:
    """Return the shelf that holds a trainer's path and those of other steps; None without a step in it."""
    for folder in (path, *path.parents):
        if STEP.fullmatch(folder.name):
            return Shelf(folder.parent, path.relative_to(folder))
    return None


def name_of(step: int) -> str:
    return f"global_step_{step}"


def steps_in(root: Path) -> list[Step]:
    """Return every step folder of a root, newest first."""
    return Shelf(root).steps()


def examined(path: Path, step: int) -> Step:
    """Return a step folder with its faults: no manifest, another step's, files missing or cut off."""
    try:
        content = manifest.read(path)
    except Damaged as error:
        return Step(step, path, None, str(error))
    if content.step != step:
        return Step(step, path, content, f"its manifest is of step {content.step}")
    wrong = list(manifest.faults(path, content))
    return Step(step, path, content, "; ".join(wrong[:3]) + (", ..." if len(wrong) > 3 else ""))


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


def draft_of(final: Path) -> Path:
    """Make and return the draft of a folder, a hidden folder; drafts of dead writers are removed before."""
    make_parents(final)
    clean(final.parent, re.compile(re.escape(final.name)))
    for attempt in range(ATTEMPTS):
        draft, nameless = hidden_name(final, "tmp"), hidden_name(final, "old")
        files.step(f"make {draft.name[-12:]}")
        try:
            # Until it has an owner, its name allows any process to remove it.
            nameless.mkdir()
            owners.mark(nameless / OWNER)
            files.step(f"name {draft.name[-12:]}")
            os.rename(nameless, draft)
            owners.keep_young(draft / OWNER)
            break
        except FileNotFoundError:
            # Another process cleaned up meanwhile.
            if attempt == ATTEMPTS - 1:
                raise
    return draft


def make_parents(path: Path) -> None:
    """Make the missing folders above a path, and put their names on disk."""
    absent = [folder for folder in path.parents if not folder.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    for folder in absent:
        files.sync_folder(folder.parent)


def hidden_name(path: Path, kind: str) -> Path:
    return path.with_name(f".{path.name}.{kind}-{secrets.token_hex(4)}")


def identity_of(path: Path) -> Optional[int]:
    """Return a number that differs for another folder under the same name; None where there is none."""
    try:
        # Of a link, the link itself: that is renamed.
        return path.lstat().st_ino
    except FileNotFoundError:
        return None


def publish(draft: Path, final: Path, before: Optional[int], synced: Collection[str] = ()) -> None:
    """Give a complete draft the folder's name; from then on readers see it.

    Args:
        before: `identity_of(final)` when the draft was begun.
        synced: files that are on disk, by their paths below the draft; the others are put there.

    Raises:
        AnotherWriter: another folder has got the name since then.
    """
    now = identity_of(final)
    if now is not None and now != before:
        raise AnotherWriter(f"another writer published {final.name} in {final.parent}")
    # Retention may have removed it.
    before = now
    replaced = None
    sync_tree(draft, synced)
    if before is not None:
        replaced = hidden_name(final, "was")
        files.step("rename the folder that is replaced")
        os.rename(final, replaced)
    files.step("rename the draft")
    try:
        os.rename(draft, final)
    except OSError:
        if replaced is not None:
            os.rename(replaced, final)
        raise
    # From here on readers see it: an error must not say that the save failed.
    try:
        files.step("sync the root")
        files.sync_folder(final.parent)
        files.remove([final / OWNER])
    except OSError:
        logger.exception("%s is published; a loss of power may take it back", final)
    if replaced is not None:
        files.step("remove the folder that was replaced")
        for reason in discard(given_up(replaced))[:1]:
            logger.error("%s was replaced, and still takes its room on the disk: %s", final, reason)


def sync_tree(folder: Path, synced: Collection[str] = ()) -> None:
    """Put the files below a folder on disk, but for those that are, and then the names of all."""
    paths, folders = list[Path](), [folder]
    for path in folder.rglob("*"):
        if path.is_dir():
            folders.append(path)
        elif path.relative_to(folder).as_posix() not in synced:
            paths.append(path)
    # Disks sync several files at once in the time of a single file.
    with ThreadPoolExecutor(8) as pool:
        deque(pool.map(sync_file, paths), 0)
        deque(pool.map(files.sync_folder, folders), 0)


def sync_file(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_tracker(root: Path, step: int) -> None:
    """Write the tracker, as verl and Megatron do: a hint for other programs, which is never believed here.

    They do believe it: it is on disk before it has its name, and a loss of power leaves no empty file.
    """
    files.publish(root / TRACKER, str(step).encode())


def tracked(root: Path) -> Optional[int]:
    """Return the step that the tracker names; None where there is no tracker, or no number in it."""
    try:
        return int((root / TRACKER).read_text())
    except (OSError, ValueError):
        return None


@contextlib.contextmanager
def uploading(folder: Path) -> Iterator[None]:
    """Mark a step as being uploaded: retention keeps it, in any process."""
    mark = folder / UPLOADING
    with _taking:
        owners.mark(mark)
    owners.keep_young(mark)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            mark.unlink()


def is_uploading(folder: Path) -> bool:
    return (folder / UPLOADING).exists() and is_alive(folder, UPLOADING)


def mark_uploaded(folder: Path, url: str, mark: bytes) -> None:
    """Record the URL that a step was uploaded to, and its manifest then: a step may be saved again."""
    (folder / UPLOADED).write_text(json.dumps({"url": url, "manifest": zlib.crc32(mark)}))


def uploaded_to(folder: Path) -> str:
    """Return the URL that a step was uploaded to; "" where it was not."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        record = json.loads((folder / UPLOADED).read_text())
        if record["manifest"] == zlib.crc32((folder / manifest.NAME).read_bytes()):
            return str(record["url"])
    return ""


def taken(folder: Path) -> Optional[Path]:
    """Hide a folder, and return its hidden name; None where it is being uploaded and stays."""
    hidden = hidden_name(folder, "old")
    with _taking:
        if is_uploading(folder):
            return None
        os.rename(folder, hidden)
    return hidden


def given_up(replaced: Path) -> Path:
    """Rename a replaced folder so that it is never put back, as half of it may be left; return the name."""
    hidden = replaced.with_name(replaced.name.replace(".was-", ".old-"))
    try:
        os.rename(replaced, hidden)
    except OSError:
        # Another process cleans up, too; or the folder cannot be removed either.
        return replaced
    return hidden


def discard(folder: Path) -> list[str]:
    """Remove a folder that no process will look for, as far as possible; of a link, only the link.

    Returns:
        Why parts of it are still there.
    """
    reasons: list[str] = []
    try:
        parts = [] if folder.is_symlink() else sorted(folder.iterdir())
    except OSError:
        parts = []
    for part in [*parts, folder]:
        files.step(f"remove {part.name}")
        try:
            if part.is_symlink() or not part.is_dir():
                part.unlink(missing_ok=True)
            else:
                shutil.rmtree(part)
        except FileNotFoundError:
            # Another process cleans up, too.
            shutil.rmtree(part, ignore_errors=True)
        except OSError as error:
            reasons.append(str(error))
            shutil.rmtree(part, ignore_errors=True)
    return reasons


def clean(root: Path, names: re.Pattern[str] = STEP) -> None:
    """Remove what dead writers of folders of some names left, and put back a folder that lost its name.

    Folders that cannot be removed stay; those that cannot be put back are logged.
    """
    hidden = {path: HIDDEN.fullmatch(path.name) for path in root.iterdir()} if root.is_dir() else {}
    left = {path: match for path, match in hidden.items() if match and names.fullmatch(match["name"])}
    alive = {match["name"] for path, match in left.items() if match["kind"] == "tmp" and is_alive(path)}
    for path, match in left.items():
        if match["name"] in alive and match["kind"] != "old":
            # Being written, or between the two renames of its writer.
            continue
        final = path.with_name(match["name"])
        try:
            if match["kind"] == "was" and not os.path.lexists(final):
                logger.warning("%s: put back, as what was to replace it was never published", final)
                os.rename(path, final)
                continue
        except OSError as error:
            logger.error("%s: cannot be put back: %s", final, error)
            continue
        logger.info("%s: left behind by a writer that is gone; removed", path)
        discard(given_up(path) if match["kind"] == "was" else path)
