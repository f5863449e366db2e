"""Hugging Face files to a sharded checkpoint of Megatron's GPTModel, back, and from one grid to another.

One process, no model, no GPU. Must never hold more than a few buffers of the model, and never leave half a
target. Each conversion is a file of its own in `_src`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

from torch_dcp_backport.dist_checkpointing import CheckpointingException
from torch_dcp_backport.dist_checkpointing.core import Folder
from torch_dcp_backport.hf import CONFIG, Export
from torch_dcp_backport.megatron._src.conversion import CANNOT_CONVERT, Converted, Found
from torch_dcp_backport.megatron._src.conversion_target import check_apart
from torch_dcp_backport.megatron._src.to_checkpoint import of_files_alone, to_checkpoint
from torch_dcp_backport.megatron._src.to_files import to_files
from torch_dcp_backport.megatron._src.to_grid import to_grid
from torch_dcp_backport.transfer import Call, Problem

__all__ = ["Converted", "Found", "convert"]


def convert(
    source: Folder,
    target: Folder,
    *,
    like: Any = None,
    how: Optional[Export] = None,
    dry_run: bool = False,
    ep: Optional[int] = None,
) -> Converted:
    """Convert Hugging Face files to a sharded checkpoint, or a checkpoint to such files. Not collective.

    The checkpoint is what `GPTModel.sharded_state_dict()` of megatron-core loads, at any TP, PP and EP. With
    `ep` a checkpoint becomes one whose optimizer loads in another grid.

    Args:
        source: a folder with config.json and safetensors, or a sharded checkpoint of a GPTModel, as this
            package or Megatron ("torch_dist") saved it; other things in it (an optimizer) are left alone.
        target: the folder for the result, which appears there all at once.
        like: for a checkpoint: the model's folder or configuration; None takes what a conversion left in it.
        how: whether the target's content is replaced; for from_pretrained also dtype and size of files.
            None is `Export()`.
        dry_run: only check, and say what would be written.
        ep: for a checkpoint with the state of Megatron's distributed optimizer: the expert parallel size of
            the grid that is to load it (1 of a dense model). The target is a checkpoint with the same model,
            and with the optimizer in the form that loads at any TP, PP and DP
            ("fully_sharded_model_space"). It has all that the source has.

    Raises:
        CheckpointingException: source and config.json do not fit, something is damaged, no room, ...; the
            target is as it was.
    """
    return converted(source, target, like, how, dry_run, ep=ep)


def converted(
    source: Folder,
    target: Folder,
    like: Any = None,
    how: Optional[Export] = None,
    dry_run: bool = False,
    report: Callable[[Converted], object] = bool,
    ep: Optional[int] = None,
) -> Converted:
    """Convert as `convert` does.

    Args:
        report: called with what will be done, when all is checked and before anything is written.
    """
    # Renames would replace a link itself, so the target is the folder that it leads to.
    folder, out = Path(source), Path(os.path.realpath(target))
    try:
        has_files = (folder / CONFIG).is_file()
        check_apart(folder, out)
        if ep is not None:
            with Call(CANNOT_CONVERT, "save", ()) as call:
                call.problems += of_files_alone(like, how or Export())
                if has_files:
                    call.problems.append(Problem("model files have no optimizer", "ep", f"{ep}"))
                elif isinstance(ep, bool) or not isinstance(ep, int) or ep < 1:
                    call.problems.append(Problem("no number of parts", "ep", f"{ep!r}", "1 or more"))
                call.agree_on_outcome()
                return to_grid(call, folder, out, how or Export(), ep, dry_run, report)
        if has_files:
            with Call(CANNOT_CONVERT, "save", ()) as call:
                call.problems += of_files_alone(like, how or Export())
                return to_checkpoint(call, folder, out, how or Export(), dry_run, report)
        with Call(CANNOT_CONVERT, "collect", ()) as call:
            return to_files(call, folder, out, like, how, dry_run, report)
    except (RuntimeError, OSError) as error:
        raise CheckpointingException(str(error)) from error
