"""The target of a conversion: may it be replaced, and how a checkpoint takes its place.

Must never leave half a target, and never remove what is not a checkpoint.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch_dcp_backport.dist_checkpointing import CheckpointingException, SaveOptions
from torch_dcp_backport.dist_checkpointing.core import HUGGING_FACE
from torch_dcp_backport.dist_checkpointing.inspection import opened_alone
from torch_dcp_backport.dist_checkpointing.serialization import saving
from torch_dcp_backport.hf import Export
from torch_dcp_backport.megatron._src.conversion import CANNOT_CONVERT
from torch_dcp_backport.publish import disk
from torch_dcp_backport.publish.drafts import NEW, OLD, InRoom, discarding

#: What is at the top of a sharded checkpoint, and hidden files that a file system itself makes.
OF_A_CHECKPOINT = re.compile(
    rf"\.metadata|\.nfs\w+|\.snapshot|metadata\.json|integrity\.json|common\.pt|.*\.distcp|{HUGGING_FACE}"
)


def check_apart(folder: Path, out: Path) -> None:
    """Refuse a target that would remove the source, or change it.

    Raises:
        CheckpointingException: the target is the source, is in it, or has it inside.
    """
    real = Path(os.path.realpath(folder))
    if real in (out, *out.parents):
        raise CheckpointingException(f"{CANNOT_CONVERT}: {out} is in the source, which is to stay as it is")
    if out in real.parents:
        raise CheckpointingException(f"{CANNOT_CONVERT}: the source {real} is in the target")


def check_target(out: Path, how: Export) -> None:
    """Refuse a target that must not be replaced.

    Raises:
        FileExistsError: the target holds something that is to stay, or an older checkpoint is where a
            conversion that was killed had put it.
    """
    if out.is_dir() and os.listdir(out) and not how.overwrite:
        raise FileExistsError("it is not empty; Export(overwrite=True), --overwrite replaces it")
    if os.path.lexists(out) and not out.is_dir():
        raise FileExistsError("it is there, and no folder")
    if out.is_dir() and os.listdir(out):
        # A conversion replaces nothing but a checkpoint, and what is beside it would go as well.
        opened_alone(out)
        others = [name for name in sorted(os.listdir(out)) if OF_A_CHECKPOINT.fullmatch(name) is None]
        if others:
            raise FileExistsError(f"beside the checkpoint it has {', '.join(others[:5])}: move that away")
    old = room_of(out) / OLD
    # Both exist only between two renames: the old checkpoint has made room, the new is not in its place.
    if old.exists() and (old.parent / NEW).exists():
        raise FileExistsError(f"{old} is what was here before a conversion that was killed: move it away")


def room_of(out: Path) -> Path:
    """Return a hidden folder for conversions alone: an export into the target clears its own away."""
    return out.parent / f".{out.name}.converting"


def write_checkpoint(
    out: Path, how: Export, state_in: Callable[[Path], dict[str, Any]], companions: Mapping[str, bytes]
) -> None:
    """Write a checkpoint with the small files of a model, out of sight; then it takes its place.

    Args:
        state_in: returns what is saved; it may make files in the folder that it gets, and has to remove them.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    check_target(out, how)
    draft = InRoom(room_of(out), out, lambda: check_target(out, how))
    with discarding(draft):
        try:
            with saving(draft.folder, SaveOptions(must_load=True, is_alone=True)) as saved:
                saved.set(state_in(draft.folder))
        except CheckpointingException as error:
            raise CheckpointingException(
                f"{CANNOT_CONVERT}: {out} is as it was; in {draft.folder}: {error}"
            ) from error
        if companions:
            (draft.folder / HUGGING_FACE).mkdir()
        for name, content in companions.items():
            path = draft.folder / HUGGING_FACE / name
            path.parent.mkdir(parents=True, exist_ok=True)
            disk.write(path, content)
        draft.sync()
        # An empty folder makes room by itself; a folder that is filled meanwhile does not, and is an error.
        draft.take_place(draft.aside if how.overwrite and out.exists() else None)
        disk.sync_folder(out.parent)
    draft.leave()
