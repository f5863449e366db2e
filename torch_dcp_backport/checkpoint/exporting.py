"""Export of a saved model as Hugging Face files: one process, no process group, bounded memory.

Must never build a model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Optional, Union

import torch

from torch_dcp_backport.checkpoint import manifest, store, verl
from torch_dcp_backport.checkpoint.layout import HUGGING_FACE, SHARDED, TIED
from torch_dcp_backport.dist_checkpointing import CheckpointingException
from torch_dcp_backport.dist_checkpointing.core import Folder
from torch_dcp_backport.dist_checkpointing.engine.cover import covered, fills
from torch_dcp_backport.dist_checkpointing.engine.files import Damaged
from torch_dcp_backport.dist_checkpointing.engine.load import Opened
from torch_dcp_backport.dist_checkpointing.engine.metadata import Stored
from torch_dcp_backport.dist_checkpointing.engine.reader import Read, Reader, wrong_files
from torch_dcp_backport.dist_checkpointing.inspection import opened_alone
from torch_dcp_backport.dist_checkpointing.training_state import MODEL
from torch_dcp_backport.hf.blocks import Window
from torch_dcp_backport.hf.export import Export, Saved, Target, exported, target_of, write_files
from torch_dcp_backport.hf.format import nbytes_of
from torch_dcp_backport.hf.moving import settle
from torch_dcp_backport.hf.source import CONFIG
from torch_dcp_backport.transfer import Call, Problem, TensorInfo, settings
from torch_dcp_backport.transfer.memories import Memory
from torch_dcp_backport.transfer.progress import Meter

CANNOT_EXPORT = "cannot export the checkpoint"
PREFIX = f"{MODEL}."


def export_checkpoint(
    folder: Folder,
    target: Folder,
    *,
    like: Optional[Union[Folder, Any]] = None,
    how: Optional[Export] = None,
    trust: bool = False,
) -> Saved:
    """Write the model of a checkpoint as a folder that `from_pretrained` opens. Not collective.

    Every byte is compared with its checksum on the way; until all is on the disk the target is as it was.

    Args:
        folder: a checkpoint of `FSDPCheckpointManager.save_checkpoint` or `save_training_state`; with `trust`
            also of verl's own manager.
        target: the folder for the model.
        like: a folder or a configuration of transformers: config.json, a tokenizer's files and the like. None
            takes those of the checkpoint.
        how: dtype, size of files, whether an older model is replaced; None is `Export()`.
        trust: read the files of verl's own manager, which runs code that is in them.

    Raises:
        CheckpointingException: the checkpoint is damaged or has no model, the target holds a model, ...
    """
    try:
        with Call(CANNOT_EXPORT, "collect", ()) as call:
            return _export(call, Path(folder), Path(target), Request(like, how, trust))
    except RuntimeError as error:
        raise CheckpointingException(str(error)) from error


class Request(NamedTuple):
    like: Any
    how: Optional[Export]
    trust: bool


def _export(call: Call, folder: Path, out: Path, request: Request) -> Saved:
    like, how, _ = request
    own_files = folder / HUGGING_FACE
    if like is None and not (own_files / CONFIG).is_file():
        raise CheckpointingException(f"{CANNOT_EXPORT}: {own_files} has no {CONFIG}: name a model's folder")
    target = target_of(call, out, own_files if like is None else like, how)
    if (folder / manifest.NAME).exists():
        call.problems += [Problem("not what was saved", str(folder), fault) for fault in faults_of(folder)]
    with call.guard("OUT"):
        real, within = Path(os.path.realpath(out)), Path(os.path.realpath(folder))
        if within in (real, *real.parents):
            raise ValueError(f"{out} is in the checkpoint, which would no longer be what was saved")
    settle(call)
    if not (folder / SHARDED).is_dir() and verl.saved_world(folder):
        return _export_of_verl(call, folder, target, request.trust)
    checkpoint = opened_alone(folder / SHARDED if (folder / SHARDED).is_dir() else folder)
    tied: Mapping[str, str] = {}
    # The bytes of the common state are as saved: reading fails only for objects, which do not matter here.
    with contextlib.suppress(CheckpointingException):
        tied = checkpoint.common_state().get(TIED, {})
    stored = {
        key[len(PREFIX) :]: value
        for key, value in checkpoint.holds.tensors.items()
        if key.startswith(PREFIX) and key[len(PREFIX) :] not in tied
    }
    call.problems += problems_of(checkpoint, stored)
    tensors: dict[str, TensorInfo] = {}
    with call.guard():
        infos = {key: (TensorInfo(tensor.shape, tensor.dtype),) for key, tensor in stored.items()}
        tensors = exported(infos, target.how)
    settle(call)
    meter = meter_of(tensors)
    reader = Reader(checkpoint.folder, checkpoint.holds.is_ours)

    def bring(window: Window, write: Memory) -> None:
        try:
            reader.read(reads_of(window, stored, write))
            meter.add(nbytes_of_window(window, tensors))
        except (Damaged, OSError) as error:
            raise CheckpointingException(f"{CANNOT_EXPORT}: {checkpoint.folder}: {error}") from error

    return write_files(call, tensors, bring, target)


def _export_of_verl(call: Call, folder: Path, target: Target, trust: bool) -> Saved:
    """Write the model that verl's own manager saved."""
    if not trust:
        raise CheckpointingException(f"{CANNOT_EXPORT}: {folder} {verl.UNTRUSTED}")
    model = verl.model_of(folder, verl.saved_world(folder))
    tensors: dict[str, TensorInfo] = {}
    with call.guard():
        model = verl.without_tied(model, target.companions[CONFIG])
        tensors = exported({key: (shards.info,) for key, shards in model.items()}, target.how)
    settle(call)
    meter = meter_of(tensors)

    def bring(window: Window, write: Memory) -> None:
        for key, pieces in window.items():
            for piece in pieces:
                model[key].copy(piece.box, write(key, piece.box))
        meter.add(nbytes_of_window(window, tensors))

    return write_files(call, tensors, bring, target)


def meter_of(tensors: Mapping[str, TensorInfo]) -> Meter:
    """Return the progress meter of an export, in bytes written."""
    meter = Meter("export", settings.progress())
    meter.expect(lambda: sum(map(nbytes_of, tensors.values())))
    return meter


def nbytes_of_window(window: Window, tensors: Mapping[str, TensorInfo]) -> int:
    return sum(
        piece.box.numel * tensors[key].dtype.itemsize for key, pieces in window.items() for piece in pieces
    )


def faults_of(folder: Path) -> list[str]:
    try:
        content = manifest.read(folder)
    except manifest.Damaged as error:
        return [str(error)]
    fault = store.examined(folder, content.step).fault
    if fault:
        return [fault]
    # The files of the sharded checkpoint are verified record by record when they are read.
    small = {name: entry for name, entry in content.files.items() if not name.endswith(".distcp")}
    return list(manifest.wrong_checksums(folder, dataclasses.replace(content, files=small)))


def problems_of(checkpoint: Opened, stored: Mapping[str, Stored]) -> list[Problem]:
    """Return the problems that keep tensors from being read in full."""
    if not stored:
        return [Problem(f"no model: no tensor's key begins with {PREFIX}", str(checkpoint.folder))]
    places = [(key, chunk.place) for key, tensor in stored.items() for chunk in tensor.chunks]
    problems = list(wrong_files(checkpoint.folder, places, checkpoint.holds))
    for key, tensor in stored.items():
        boxes = [chunk.box for chunk in tensor.chunks]
        if not fills(boxes, tensor.shape):
            have, numel = covered(boxes), math.prod(tensor.shape)
            if have != numel:
                problems.append(Problem("not all of it was saved", key, f"{have} elements", f"{numel}"))
    return problems


def reads_of(window: Window, stored: Mapping[str, Stored], write: Memory) -> list[Read]:
    """Return the reads that fill a window of tensors."""
    reads = []
    for key, pieces in window.items():
        for piece in pieces:
            into: torch.Tensor = write(key, piece.box)
            for chunk, part in stored[key].parts_of(piece.box):
                reads.append(Read(key, chunk, part, stored[key].dtype, into, piece.box))
    return reads
