"""The step folders of one run: begun beside their place, published by a rename, found again, removed.

Runs on one rank. A folder with a step's own name is whole, or was damaged later; what is being written or
removed has a hidden name. Must never import torch.
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
import socket
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from torch_dcp_backport.checkpoint import manifest
from torch_dcp_backport.checkpoint.manifest import Damaged, Manifest
from torch_dcp_backport.dist_checkpointing.engine import files

logger = logging.getLogger("torch_dcp_backport.checkpoint")

TRACKER = "latest_checkpointed_iteration.txt"
STEP = re.compile(r"global_step_(\d+)")
#: A hidden folder: being written (tmp), replaced by the same step (was), being removed (old).
HIDDEN = re.compile(r"\.(?P<name>.+)\.(?P<kind>tmp|was|old)-[0-9a-f]{8}")
OWNER = "owner.json"
#: Seconds without a change after which a hidden folder of another machine is taken for abandoned.
ABANDONED = 3600.0
#: A draft is made again where others clear up at the same moment.
ATTEMPTS = 20
#: In a step that could not be loaded where an older one could: retention does not count it.
NOT_LOADED = "could-not-be-loaded.txt"
#: In a step: where it was uploaded to; whose process uploads it now.
UPLOADED, UPLOADING = "uploaded.txt", "uploading.json"
#: Held while a step is taken away, and while one is marked as being uploaded.
_taking = threading.Lock()


class AnotherWriter(Exception):
    """The folder of this step came into being while it was written here."""


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
        """Sorts steps as they were published: after a step back, a lower one may be newer."""
        return (self.manifest.order if self.manifest is not None else 0), self.step


@dataclass(frozen=True)
class Shelf:
    """The places of one run's folders: root/global_step_N, or something below it."""

    root: Path
    below: Path = Path()

    def steps(self) -> list[Step]:
        """Every folder, newest first, by what is on disk alone."""
        found = []
        for path in self.root.iterdir() if self.root.is_dir() else ():
            match = STEP.fullmatch(path.name)
            if match is not None and (path / self.below).is_dir():
                found.append(examined(path / self.below, int(match[1])))
        return sorted(found, key=lambda step: step.age, reverse=True)

    def next_order(self) -> int:
        return 1 + max((step.age[0] for step in self.steps()), default=0)

    def retire(self, keep: Optional[int], distrusted: Collection[Path] = ()) -> None:
        """Remove what retention does not keep."""
        for step in retired(self.steps(), keep, distrusted):
            remove(step.path)


def name_of(step: int) -> str:
    return f"global_step_{step}"


def steps_in(root: Path) -> list[Step]:
    """Every step folder of a root, newest first."""
    return Shelf(root).steps()


def examined(path: Path, step: int) -> Step:
    """A step folder, and what speaks against it: no manifest, another step's, files missing or cut off."""
    try:
        content = manifest.read(path)
    except Damaged as error:
        return Step(step, path, None, str(error))
    if content.step != step:
        return Step(step, path, content, f"its manifest is of step {content.step}")
    wrong = list(manifest.faults(path, content))
    return Step(step, path, content, "; ".join(wrong[:3]) + (", ..." if len(wrong) > 3 else ""))


def checked_step(step: object) -> int:
    """The number of a step.

    Raises:
        ValueError: it is none that a folder's name could have.
    """
    try:
        number = -1 if isinstance(step, bool) else operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if number < 0:
        raise ValueError(f"step={step!r}: expected a whole number from 0 on")
    return number


def draft_of(final: Path) -> Path:
    """Make the hidden folder in which a folder is written, once those of dead writers of it are gone."""
    final.parent.mkdir(parents=True, exist_ok=True)
    clean(final.parent, re.compile(re.escape(final.name)))
    for attempt in range(ATTEMPTS):
        draft, nameless = hidden_name(final, "tmp"), hidden_name(final, "old")
        files.step(f"make {draft.name[-12:]}")
        try:
            # Until it says whose it is, it is one that anybody may remove.
            nameless.mkdir()
            (nameless / OWNER).write_text(own_process())
            files.step(f"name {draft.name[-12:]}")
            os.rename(nameless, draft)
            break
        except FileNotFoundError:
            # Another process cleared up meanwhile.
            if attempt == ATTEMPTS - 1:
                raise
    return draft


def own_process() -> str:
    """This process, as `is_alive` reads it."""
    return json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "started": started_at(os.getpid())})


def hidden_name(path: Path, kind: str) -> Path:
    return path.with_name(f".{path.name}.{kind}-{secrets.token_hex(4)}")


def identity_of(path: Path) -> Optional[int]:
    """What tells a folder from another one that takes its name."""
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None


def publish(draft: Path, final: Path, before: Optional[int]) -> None:
    """Give a whole folder its name; from then on it is found.

    Args:
        before: `identity_of(final)` when the draft was begun.

    Raises:
        AnotherWriter: the folder that has the name is not the one that had it then.
    """
    now = identity_of(final)
    if now is not None and now != before:
        raise AnotherWriter(f"another writer published {final.name} in {final.parent}")
    # Retention may have taken it.
    before = now
    replaced = None
    sync_tree(draft)
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
    # From here on it is found: what fails must not tell that it is not.
    try:
        files.step("sync the root")
        files.sync_folder(final.parent)
    except OSError:
        logger.exception("%s is published; a loss of power may take it back", final)
    files.remove([final / OWNER])
    if replaced is not None:
        files.step("remove the folder that was replaced")
        discard(replaced)


def sync_tree(folder: Path) -> None:
    """Have every file below a folder on disk, and the names of all."""
    for path in [*folder.rglob("*"), folder]:
        if path.is_dir():
            files.sync_folder(path)
        else:
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)


def write_tracker(root: Path, step: int) -> None:
    """As verl's and Megatron's: a hint for other programs, which is never believed here."""
    files.publish(root / TRACKER, str(step).encode())


def tracked(root: Path) -> Optional[int]:
    """The step that the tracker names; None where there is none, or no number in it."""
    try:
        return int((root / TRACKER).read_text())
    except (OSError, ValueError):
        return None


def retired(steps: list[Step], keep: Optional[int], distrusted: Collection[Path] = ()) -> list[Step]:
    """What retention removes: all that is older than the newest `keep` good steps, damaged or not, and
    not being uploaded.

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
    return [step for step in older if not is_uploading(step.path)]


def is_distrusted(step: Step) -> bool:
    return (step.path / NOT_LOADED).exists()


def distrust(folder: Path, reason: str) -> None:
    """Remember beyond this process that a step could not be loaded."""
    try:
        (folder / NOT_LOADED).write_text(reason)
    except FileNotFoundError:
        # Retention has taken it meanwhile.
        return
    except OSError:
        logger.exception("%s: it will be taken for good after a restart", folder)


def believe(folder: Path) -> None:
    """A step was loaded: forget that it could not be."""
    with contextlib.suppress(OSError):
        (folder / NOT_LOADED).unlink()


@contextlib.contextmanager
def uploading(folder: Path) -> Iterator[None]:
    """Mark a step as being uploaded: retention leaves it, in any process."""
    mark = folder / UPLOADING
    with _taking:
        mark.write_text(own_process())
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            mark.unlink()


def is_uploading(folder: Path) -> bool:
    return (folder / UPLOADING).exists() and is_alive(folder, UPLOADING)


def mark_uploaded(folder: Path, url: str, mark: bytes) -> None:
    """Say where a step was uploaded to, with the manifest that it had then: a step may be saved again."""
    (folder / UPLOADED).write_text(json.dumps({"url": url, "manifest": zlib.crc32(mark)}))


def uploaded_to(folder: Path) -> str:
    """Where a step was uploaded to; "" where it was not."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        said = json.loads((folder / UPLOADED).read_text())
        if said["manifest"] == zlib.crc32((folder / manifest.NAME).read_bytes()):
            return str(said["url"])
    return ""


def remove(folder: Path) -> None:
    """Take a folder out of sight, and then away; not one that is being uploaded."""
    hidden = hidden_name(folder, "old")
    files.step(f"rename {folder.name} away")
    with _taking:
        if is_uploading(folder):
            logger.warning("%s stays until it is uploaded", folder)
            return
        os.rename(folder, hidden)
    files.step(f"remove {folder.name}")
    discard(hidden)


def discard(folder: Path) -> None:
    """Remove a folder that nobody will look for; of a link to one, the link."""
    if folder.is_symlink():
        with contextlib.suppress(OSError):
            folder.unlink()
    else:
        shutil.rmtree(folder, ignore_errors=True)


def clean(root: Path, names: re.Pattern[str] = STEP) -> None:
    """Remove what writers of folders of some names left that are gone; one that lost its name comes back.

    What cannot be removed stays, and is logged.
    """
    hidden = {path: HIDDEN.fullmatch(path.name) for path in root.iterdir()} if root.is_dir() else {}
    left = {path: match for path, match in hidden.items() if match and names.fullmatch(match["name"])}
    alive = {match["name"] for path, match in left.items() if match["kind"] == "tmp" and is_alive(path)}
    for path, match in left.items():
        if match["name"] in alive and match["kind"] != "old":
            # Being written, or between the two renames of the one that writes.
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
        discard(path)


def is_alive(draft: Path, name: str = OWNER) -> bool:
    """Whether a draft may still be written: its process of this machine runs, or it changed a while ago."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        owner = json.loads((draft / name).read_text())
        if owner["host"] == socket.gethostname():
            return bool(owner["started"] == started_at(owner["pid"]))
    return time.time() - last_change(draft) < ABANDONED


def last_change(folder: Path) -> float:
    return max(walk_times(folder), default=0.0)


def walk_times(folder: Path) -> Iterator[float]:
    for path in [folder, *folder.rglob("*")]:
        with contextlib.suppress(OSError):
            yield path.stat().st_mtime


def started_at(pid: int) -> Optional[str]:
    """When a process of this machine began, in the kernel's ticks: numbers of processes are used again."""
    with contextlib.suppress(OSError, IndexError):
        state, *facts = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        # Dead, and its parent has not asked.
        return None if state in "ZX" else facts[18]
    with contextlib.suppress(OSError):
        os.kill(pid, 0)
        return ""
    return None


def prune(root: Path, keep: int, told: Callable[[Step], None], is_dry: bool = False) -> None:
    """Remove what retention would, and say each. What is to stay counts once all its bytes were read."""
    steps, distrusted, good = steps_in(root), set[Path](), 0
    for step in steps:
        if step.manifest is None or step.fault or good == keep:
            continue
        if any(manifest.wrong_checksums(step.path, step.manifest)):
            distrusted.add(step.path)
        else:
            good += 1
    for step in retired(steps, keep, distrusted):
        told(step)
        if not is_dry:
            remove(step.path)
