"""The newest step of a root, for trainers that look for it themselves, as verl's do. One process.

A handler's step has a manifest. If a trainer's managers make a step in parts (actor, critic), each part has
a manifest, and only the trainer knows when all are there: it writes the tracker then.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple, Optional

from torch_dcp_backport.checkpoint._src import manifest, store
from torch_dcp_backport.dist_checkpointing import CheckpointingException
from torch_dcp_backport.dist_checkpointing.core import Folder
from torch_dcp_backport.publish.drafts import HIDDEN

logger = logging.getLogger("torch_dcp_backport.checkpoint")

#: Names that verl's own managers write into a folder.
FOREIGN = ("*_world_size_*_rank_*.pt", "dist_ckpt")


class Made(NamedTuple):
    """A step that managers made in parts."""

    step: int
    path: Path
    #: Name of a part -> why it must not be loaded, or "".
    parts: dict[str, str]
    #: Name of a folder that cannot be listed, "." for the step's own -> why: it may be a part.
    unlisted: dict[str, str]

    def fault(self, known: Collection[str]) -> str:
        """Return why it must not be loaded, or "".

        Args:
            known: the names of parts that any step has.
        """
        unlisted = {name: why for name, why in self.unlisted.items() if name in (".", *known)}
        faults = {**self.parts, **unlisted}
        return "; ".join(f"{self.path / name}: {fault}" for name, fault in faults.items() if fault)


def find_latest_ckpt_path(
    path: Optional[Folder], directory_format: str = "global_step_{}", *, verify: bool = False
) -> Optional[str]:
    """Return the newest good step of a root; None where there are no steps. Not collective.

    Of steps in parts it is the step that the tracker names, if all of its parts are good; else the newest
    that has every part that any step has, all of them good.

    Args:
        path: the root of the steps; None is no root.
        directory_format: the names of the steps' folders; only the default is known.
        verify: read every file of a step, and compare its checksum; else files are compared by size alone.

    Returns:
        The path of the step's folder. If a save that was to replace it was killed, it has another name for
        now, by which a manager's `load_checkpoint` finds it.

    Raises:
        ValueError: another `directory_format`.
        CheckpointingException: there are steps, and none is good; verl's returns None, and training restarts.

    Example:
        >>> import torch
        >>> from torch_dcp_backport.checkpoint import CheckpointHandler, FSDPCheckpointManager
        >>> from torch_dcp_backport.checkpoint import find_latest_ckpt_path
        >>> contents = {"save_contents": ["model"]}
        >>> manager = FSDPCheckpointManager(torch.nn.Linear(2, 3), checkpoint_config=contents)
        >>> step = CheckpointHandler(manager, default_local_dir="run").save_checkpoint(5)
        >>> find_latest_ckpt_path("run")
        'run/global_step_5'
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
            return str(store.name_given(step.path))
        skipped.append(f"{step.path}: {fault}")
    made = [made_of(step.path, step.step, tracked, verify) for step in steps]
    made = [entry for entry in made if entry.parts or "." in entry.unlisted]
    if not made:
        return None
    names = {name for entry in made for name in entry.parts}
    faults_by_step = {entry.step: entry.fault(names) for entry in made}
    good = [
        entry
        for entry in made
        if not faults_by_step[entry.step] and (entry.step == tracked or names == set(entry.parts))
    ]
    if not good:
        faults = [
            faults_by_step[entry.step] or f"{entry.path}: no {', '.join(names - set(entry.parts))}"
            for entry in made
        ]
        raise CheckpointingException(f"no step in {root} is good: {'; '.join(faults)}")
    chosen = next((entry for entry in good if entry.step == tracked), good[0])
    if chosen.step != tracked:
        logger.warning("going on from step %d; %s says %s", chosen.step, store.TRACKER, tracked)
    return str(store.name_given(chosen.path))


def made_of(folder: Path, step: int, tracked: Optional[int], verify: bool) -> Made:
    parts, unlisted = dict[str, str](), dict[str, str]()
    try:
        found_in = {".": folder, **parts_in(folder)}
    except OSError as error:
        return Made(step, folder, {}, {".": f"cannot be listed: {error.strerror}"})
    for name, part in sorted(found_in.items()):
        if os.path.lexists(part / manifest.NAME):
            found = store.examined(part, step)
            parts[name] = found.fault or (store.fault_by_checksums(found) if verify else "")
            continue
        try:
            if holds_foreign(part):
                # Only the tracker says that it is complete.
                is_whole = step == tracked
                parts[name] = "" if is_whole else "it has no manifest, and the tracker does not name it"
        except OSError as error:
            unlisted[name] = f"cannot be listed: {error.strerror}"
    return Made(step, folder, parts, unlisted)


def holds_foreign(part: Path) -> bool:
    """Return whether a folder holds what verl's own managers write.

    Raises:
        OSError: it cannot be listed.
    """
    return any(path.match(pattern) for path in store.paths_in(part) for pattern in FOREIGN)


def parts_in(folder: Path) -> dict[str, Path]:
    """Return the folders in a step by name; hidden folders by the name that a load knows them by.

    Raises:
        OSError: the step cannot be listed.
    """
    folders = [path for path in sorted(store.paths_in(folder)) if os.path.isdir(path)]
    paths = {path: HIDDEN.fullmatch(path.name) for path in folders}
    lost = {match["name"]: path for path, match in paths.items() if match and match["kind"] == "was"}
    return {**lost, **{path.name: path for path, match in paths.items() if match is None}}
