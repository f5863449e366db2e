"""The newest step of a root, for trainers that look for it themselves, as verl's do. One process.

A handler's step has a manifest. If a trainer's managers make a step in parts (actor, critic), each part has
a manifest, and only the trainer knows when all are there: it writes the tracker then.
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from typing import NamedTuple, Optional

from torch_dcp_backport.checkpoint import manifest, store
from torch_dcp_backport.dist_checkpointing import CheckpointingException
from torch_dcp_backport.dist_checkpointing.core import Folder

logger = logging.getLogger("torch_dcp_backport.checkpoint")

#: Names that verl's own managers write into a folder.
FOREIGN = ("*_world_size_*_rank_*.pt", "dist_ckpt")


class Made(NamedTuple):
    """A step that managers made in parts."""

    step: int
    path: Path
    #: Name of a part -> why it must not be loaded, or "".
    parts: dict[str, str]

    @property
    def fault(self) -> str:
        return "; ".join(f"{self.path / name}: {fault}" for name, fault in self.parts.items() if fault)


def find_latest_ckpt_path(
    path: Optional[Folder], directory_format: str = "global_step_{}", *, verify: bool = False
) -> Optional[str]:
    """Return the newest good step of a root; None where there are no steps. Not collective.

    Of steps in parts it is the step that the tracker names, if all of its parts are good; else the newest
    that has every part that any step has, all of them good.

    Args:
        path: the root of the steps; None is no root.
        verify: read every file of a step, and compare its checksum; else files are compared by size alone.

    Raises:
        CheckpointingException: there are steps, and none is good; verl's returns None, and training restarts.
    """
    if path is None:
        return None
    if directory_format != "global_step_{}":
        raise ValueError(f"directory_format={directory_format!r}: only global_step_{{}} is known")
    root = Path(path)
    steps, tracked = store.steps_in(root), store.tracked(root)
    skipped: list[str] = []
    for step in steps:
        fault = step.fault or (verify and store.fault_by_checksums(step)) or ""
        if not fault:
            for text in skipped:
                logger.error("%s; going on from step %d", text, step.step)
            return str(step.path)
        skipped.append(f"{step.path}: {fault}")
    made = [made for step in steps for made in [made_of(step.path, step.step, tracked, verify)] if made.parts]
    if not made:
        return None
    names = {name for entry in made for name in entry.parts}
    good = [
        entry for entry in made if not entry.fault and (entry.step == tracked or names == set(entry.parts))
    ]
    if not good:
        faults = [entry.fault or f"{entry.path}: no {', '.join(names - set(entry.parts))}" for entry in made]
        raise CheckpointingException(f"no step in {root} is good: {'; '.join(faults)}")
    chosen = next((entry for entry in good if entry.step == tracked), good[0])
    if chosen.step != tracked:
        logger.warning("going on from step %d; %s says %s", chosen.step, store.TRACKER, tracked)
    return str(chosen.path)


def made_of(folder: Path, step: int, tracked: Optional[int], verify: bool) -> Made:
    parts = {}
    for name, part in sorted({".": folder, **parts_in(folder)}.items()):
        if os.path.lexists(part / manifest.NAME):
            found = store.examined(part, step)
            parts[name] = found.fault or (store.fault_by_checksums(found) if verify else "")
        elif holds_foreign(part):
            # Only the tracker says that it is complete.
            parts[name] = "" if step == tracked else "it has no manifest, and the tracker does not name it"
    return Made(step, folder, parts)


def holds_foreign(part: Path) -> bool:
    """Return whether a folder holds what verl's own managers write."""
    return any(path.match(pattern) for path in listed(part) for pattern in FOREIGN)


def listed(folder: Path) -> list[Path]:
    """Return what is in a folder; nothing where it cannot be listed."""
    with contextlib.suppress(OSError):
        return sorted(folder.iterdir())
    return []


def parts_in(folder: Path) -> dict[str, Path]:
    """Return the folders in a step by name; hidden folders by the name that a load gives back to them."""
    paths = {path: store.HIDDEN.fullmatch(path.name) for path in listed(folder) if os.path.isdir(path)}
    lost = {match["name"]: path for path, match in paths.items() if match and match["kind"] == "was"}
    return {**lost, **{path.name: path for path, match in paths.items() if match is None}}
