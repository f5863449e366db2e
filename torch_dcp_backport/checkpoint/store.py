"""The step folders of one run: begun beside their place, published by a rename, found again, removed.

Runs on one rank. A folder with a step's own name is whole, or was damaged later; what is being written or
removed has a hidden name. Must never import torch.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterator
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


def name_of(step: int) -> str:
    return f"global_step_{step}"


def steps_in(root: Path) -> list[Step]:
    """Every step folder below a root, newest first, by what is on disk alone."""
    found = []
    for path in root.iterdir() if root.is_dir() else ():
        match = STEP.fullmatch(path.name)
        if match is not None and path.is_dir():
            found.append(examined(path, int(match[1])))
    return sorted(found, key=lambda step: step.step, reverse=True)


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


def draft_of(final: Path) -> Path:
    """Make the hidden folder in which a folder is written, once those of dead writers of it are gone."""
    final.parent.mkdir(parents=True, exist_ok=True)
    clean(final.parent, re.compile(re.escape(final.name)))
    draft = hidden_name(final, "tmp")
    files.step(f"make {draft.name[-12:]}")
    draft.mkdir()
    owner = {"host": socket.gethostname(), "pid": os.getpid(), "started": started_at(os.getpid())}
    (draft / OWNER).write_text(json.dumps(owner))
    return draft


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
    if identity_of(final) != before:
        raise AnotherWriter(f"another writer published {final.name} in {final.parent}")
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
    files.step("sync the root")
    files.sync_folder(final.parent)
    files.remove([final / OWNER])
    if replaced is not None:
        files.step("remove the folder that was replaced")
        shutil.rmtree(replaced, ignore_errors=True)


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


def retired(steps: list[Step], keep: Optional[int]) -> list[Step]:
    """What retention removes: all that is older than the newest `keep` good steps, damaged or not."""
    if not keep or keep < 1:
        return []
    good = [step for step in steps if not step.fault]
    if len(good) < keep:
        return []
    last = good[keep - 1].step
    return [step for step in steps if step.step < last]


def remove(folder: Path) -> None:
    """Take a folder out of sight, and then away."""
    hidden = hidden_name(folder, "old")
    files.step(f"rename {folder.name} away")
    os.rename(folder, hidden)
    files.step(f"remove {folder.name}")
    shutil.rmtree(hidden, ignore_errors=True)


def discard(draft: Path) -> None:
    """Remove a draft that will not be published."""
    shutil.rmtree(draft, ignore_errors=True)


def clean(root: Path, names: re.Pattern[str] = STEP) -> None:
    """Remove what writers of folders of some names left that are gone; one that lost its name comes back."""
    for path in list(root.iterdir()) if root.is_dir() else []:
        match = HIDDEN.fullmatch(path.name)
        if match is None or names.fullmatch(match["name"]) is None or not path.is_dir():
            continue
        if match["kind"] == "tmp" and is_alive(path):
            continue
        final = path.with_name(match["name"])
        if match["kind"] == "was" and not final.exists():
            logger.warning("%s: put back, as what was to replace it was never published", final)
            os.rename(path, final)
            continue
        logger.info("%s: left behind by a writer that is gone; removed", path)
        shutil.rmtree(path, ignore_errors=True)


def is_alive(draft: Path) -> bool:
    """Whether a draft may still be written: its process of this machine runs, or it changed a while ago."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        owner = json.loads((draft / OWNER).read_text())
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
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    with contextlib.suppress(OSError):
        os.kill(pid, 0)
        return ""
    return None


def prune(root: Path, keep: int, told: Callable[[Step], None], is_dry: bool = False) -> None:
    """Remove what retention would, and say each."""
    for step in retired(steps_in(root), keep):
        told(step)
        if not is_dry:
            remove(step.path)
