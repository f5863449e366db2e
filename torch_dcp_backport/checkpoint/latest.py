"""The newest step of a root, for trainers that ask for it themselves, as verl's do. One process.

A handler's step has a manifest. Where a trainer's managers make a step in parts (actor, critic), each part
has one, and the trainer alone knows when all are there: it writes the tracker then.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple, Optional

from torch_dcp_backport.checkpoint import manifest, store
from torch_dcp_backport.dist_checkpointing import CheckpointingException
from torch_dcp_backport.dist_checkpointing.core import Folder

logger = logging.getLogger("torch_dcp_backport.checkpoint")

#: What verl's own managers leave in a folder.
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


def find_latest_ckpt_path(path: Optional[Folder], directory_format: str = "global_step_{}") -> Optional[str]:
    """The newest good step of a root; None where there are none. Not collective.

    Of steps in parts the one that the tracker names, if all of its parts are good; else the newest with as
    many good parts as any has.

    Raises:
        CheckpointingException: there are steps, and none is good; verl's returns None, and all starts anew.
    """
    if path is None:
        return None
    if directory_format != "global_step_{}":
        raise ValueError(f"directory_format={directory_format!r}: only global_step_{{}} is known")
    root = Path(path)
    steps, tracked = store.steps_in(root), store.tracked(root)
    for number, step in enumerate(steps):
        if not step.fault:
            for other in steps[:number]:
                logger.error("%s: %s; going on from step %d", other.path, other.fault, step.step)
            return str(step.path)
    made = [made for step in steps for made in [made_of(step.path, step.step, tracked)] if made.parts]
    if not made:
        return None
    names = {name for one in made for name in one.parts}
    good = [one for one in made if not one.fault and (one.step == tracked or names == set(one.parts))]
    if not good:
        faults = [one.fault or f"{one.path}: no {', '.join(names - set(one.parts))}" for one in made]
        raise CheckpointingException(f"no step in {root} is good: {'; '.join(faults)}")
    chosen = next((one for one in good if one.step == tracked), good[0])
    if chosen.step != tracked:
        logger.warning("going on from step %d; %s says %s", chosen.step, store.TRACKER, tracked)
    return str(chosen.path)


def made_of(folder: Path, step: int, tracked: Optional[int]) -> Made:
    parts = {}
    for name, part in sorted({".": folder, **parts_in(folder)}.items()):
        if (part / manifest.NAME).exists():
            parts[name] = store.examined(part, step).fault
        elif any(next(part.glob(pattern), None) for pattern in FOREIGN):
            # Nothing else says that it is whole.
            parts[name] = "" if step == tracked else "it has no manifest, and the tracker does not name it"
    return Made(step, folder, parts)


def parts_in(folder: Path) -> dict[str, Path]:
    """The folders in a step by name; of a hidden one the name that a load gives back to it."""
    paths = {path: store.HIDDEN.fullmatch(path.name) for path in folder.iterdir() if path.is_dir()}
    lost = {match["name"]: path for path, match in paths.items() if match and match["kind"] == "was"}
    return {**lost, **{path.name: path for path, match in paths.items() if match is None}}
