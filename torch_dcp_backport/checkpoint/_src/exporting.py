"""Export of a saved model as Hugging Face files: one process, no process group, bounded memory.

Must never build a model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional, Union

import torch

from torch_dcp_backport.checkpoint._src import manifest, store, verl
from torch_dcp_backport.checkpoint._src.manager import ADAPTER, LORA_ONLY, TIED, VERL_ADAPTER
from torch_dcp_backport.dist_checkpointing import (
    CheckpointingException,
    Damaged,
    Opened,
    Read,
    RecordReader,
    Stored,
)
from torch_dcp_backport.dist_checkpointing.core import HUGGING_FACE, SHARDED, Folder
from torch_dcp_backport.dist_checkpointing.inspection import not_whole, opened_alone
from torch_dcp_backport.dist_checkpointing.training_state import MODEL
from torch_dcp_backport.hf import (
    ADAPTER_CONFIG,
    ADAPTER_FILES,
    CONFIG,
    Configuration,
    Cutout,
    Export,
    ExportTarget,
    Saved,
    Window,
    adapters,
    checked,
    config_text,
    examined,
    exported,
    nbytes_of,
    nbytes_of_window,
    not_one,
    target_of,
    windows,
    write_files,
)
from torch_dcp_backport.transfer import (
    Box,
    Call,
    Memory,
    Meter,
    Problem,
    TensorInfo,
    as_bytes,
    settings,
    whole,
)

CANNOT_EXPORT = "cannot export the checkpoint"
PREFIX = f"{MODEL}."
MERGE, ALONE = "merge", "alone"
#: Bytes of two tensors that are compared at once.
STEP_BYTES = 4 * 2**20
#: Matrices of adapters that are in memory at once.
KEPT_MATRICES = 4


def export_checkpoint(
    folder: Folder,
    target: Folder,
    *,
    like: Optional[Union[Folder, Mapping[str, object], Configuration]] = None,
    how: Optional[Export] = None,
    trust: bool = False,
    adapter: str = MERGE,
    adapter_config: Optional[Union[Folder, Mapping[str, object], Configuration]] = None,
    adapter_name: Optional[str] = None,
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
        adapter: for a model with a LoRA of peft: "merge" writes the merged model, "alone" the adapter in
            peft's own format.
        adapter_config: a folder, or a mapping, with the adapter's configuration, where the checkpoint has
            none.
        adapter_name: the name of the adapter that is written, where there are several; None is the only one.

    Returns:
        The record of what was written.

    Raises:
        CheckpointingException: the checkpoint is damaged or has no model, the names are not those of the
            class in config.json, an adapter cannot be merged, the target holds a model, ...

    Example:
        >>> import json, os, pathlib, torch
        >>> from torch_dcp_backport.checkpoint import FSDPCheckpointManager, export_checkpoint
        >>> contents = {"save_contents": ["model"]}
        >>> manager = FSDPCheckpointManager(torch.nn.Linear(2, 3), checkpoint_config=contents)
        >>> manager.save_checkpoint("run/global_step_1", global_step=1)
        >>> os.mkdir("like")
        >>> _ = pathlib.Path("like/config.json").write_text(json.dumps({"model_type": "linear"}))
        >>> saved = export_checkpoint("run/global_step_1", "model", like="like")
        >>> sorted(os.listdir("model"))
        ['config.json', 'model.safetensors']
    """
    try:
        with Call(CANNOT_EXPORT, "collect", ()) as call:
            request = Request(like, how, trust, adapter, adapter_config, adapter_name)
            return _export(call, Path(folder), Path(target), request)
    except RuntimeError as error:
        raise CheckpointingException(str(error)) from error


class Request(NamedTuple):
    like: Any
    how: Optional[Export]
    trust: bool
    adapter: str
    adapter_config: Any
    adapter_name: Optional[str]


#: Fills memory of boxes of saved tensors: (key, box, memory).
Fill = Callable[[Sequence[tuple[str, Box, torch.Tensor]]], None]


class Model(NamedTuple):
    """The tensors of a saved model, by the keys that they were saved under."""

    infos: dict[str, TensorInfo]
    fill: Fill
    #: Key -> the key of the same tensor.
    tied: Mapping[str, str]

    def whole(self, key: str) -> torch.Tensor:
        """Return a full tensor; of small ones."""
        shape, dtype = self.infos[key]
        tensor = torch.empty(shape, dtype=dtype)
        self.fill([(key, whole(shape), tensor)])
        return tensor


def _export(call: Call, folder: Path, out: Path, request: Request) -> Saved:
    if request.adapter not in (MERGE, ALONE):
        raise CheckpointingException(
            f"{CANNOT_EXPORT}: adapter={request.adapter!r} is neither {MERGE!r} nor {ALONE!r}"
        )
    target = _target(call, folder, out, request)
    if os.path.lexists(folder / manifest.NAME):
        call.problems += [Problem("not what was saved", str(folder), fault) for fault in faults_of(folder)]
    with call.guard("OUT"):
        real, within = Path(os.path.realpath(out)), Path(os.path.realpath(folder))
        if within in (real, *real.parents):
            raise ValueError(f"{out} is in the checkpoint, which would no longer be what was saved")
    call.barrier("looking at the checkpoint")
    model = _opened(call, folder, request.trust)
    plan: Optional[adapters.Merged] = None
    names, ties = {key: key for key in model.infos}, dict(model.tied)
    cuts: Mapping[str, Cutout] = {}
    if adapters.is_wrapped(model.infos) or request.adapter == ALONE:
        adapter = adapter_in(model, request)
        config = adapter_config_in(folder, request, adapter)
        with call.guard("adapter"):
            if request.adapter == ALONE:
                names = adapters.saved_names(model.infos, config, adapter, adapters.vocabulary_of(config))
                target = target._replace(companions={ADAPTER_CONFIG: config_text(config, 2).encode()})
            else:
                plan = adapters.merged(model.infos, config, adapter)
                names = plan.names
                ties = _renamed(model.tied, names)
                adapters.check_ties(plan, ties)
        call.barrier("reading the adapter")
    held = {name: (model.infos[key],) for name, key in names.items() if name not in ties}
    if target.is_examined:
        tensors = exported(held, target.how)
    else:
        done = examined(call, target, held, ties)
        target, tensors, cuts = done.target, done.tensors, done.cuts
        names = {done.renamed.get(name, name): key for name, key in names.items() if name not in ties}
        plan = None if plan is None else plan.renamed(done.renamed)
        for first, *others in done.tied:
            for other in others:
                if not _equal(model, names[first], names[other]):
                    call.problems.append(not_one(first, other))
                del tensors[other]
    call.barrier("comparing tied tensors")
    bring = _bringing(model, names, plan, meter_of(tensors), tensors, cuts)
    return write_files(call, tensors, bring, target)


def _target(call: Call, folder: Path, out: Path, request: Request) -> ExportTarget:
    """Return the target of an export."""
    if request.adapter == ALONE:
        how = Export()
        with call.guard("how"):
            # peft knows no index.
            how = dataclasses.replace(checked(request.how), file_bytes=2**62)
        return ExportTarget(out, how, {}, None, ADAPTER_FILES, True)
    own_files = folder / HUGGING_FACE
    if request.like is None and not (own_files / CONFIG).is_file():
        where = f"{folder.absolute()} has no {HUGGING_FACE}/{CONFIG}"
        raise CheckpointingException(
            f"{CANNOT_EXPORT}: {where}: is it a checkpoint? If so, name a model's folder with like= or --like"
        )
    return target_of(call, out, own_files if request.like is None else request.like, request.how)


def _renamed(tied: Mapping[str, str], names: Mapping[str, str]) -> dict[str, str]:
    """Return the ties of tensors by their new names; not with a tensor that has none."""
    new = {saved: name for name, saved in names.items()}
    return {new[key]: new[same] for key, same in tied.items() if key in new and same in new}


def adapter_in(model: Model, request: Request) -> str:
    """Return the name of the adapter that is written.

    Raises:
        CheckpointingException: several, or none of the caller's name.
    """
    known = adapters.adapters_in(model.infos) or ["default"]
    name = request.adapter_name if request.adapter_name is not None or len(known) > 1 else known[0]
    if name not in known:
        asked = "which of them is not known" if name is None else f"and none is {name}"
        raise CheckpointingException(
            f"{CANNOT_EXPORT}: the adapters {', '.join(known)}, {asked} (adapter_name=, --adapter-name)"
        )
    return name


def adapter_config_in(folder: Path, request: Request, adapter: str) -> dict[str, Any]:
    """Return the configuration of a checkpoint's adapter.

    Raises:
        CheckpointingException: there is none.
    """
    like = request.like if isinstance(request.like, (str, Path)) else None
    places = [folder / ADAPTER / adapter, folder / ADAPTER, folder / VERL_ADAPTER]
    places += [Path(like)] if like is not None else []
    place: Any = next((place for place in places if (place / ADAPTER_CONFIG).is_file()), None)
    if request.adapter_config is not None:
        place = request.adapter_config
    if place is None:
        raise CheckpointingException(
            f"{CANNOT_EXPORT}: {folder} has an adapter of peft, or should have, and no {ADAPTER}/"
            f"{ADAPTER_CONFIG}: name a folder that has it (adapter_config=, --adapter-config)"
        )
    try:
        return adapters.as_settings(place)
    except (OSError, TypeError, ValueError) as error:
        raise CheckpointingException(f"{CANNOT_EXPORT}: the adapter's configuration: {error}") from error


def _opened(call: Call, folder: Path, trust: bool) -> Model:
    """Return the model in a checkpoint, of ours or of verl's own manager."""
    if (folder / SHARDED).is_dir() or not verl.saved_world(folder):
        return _opened_ours(call, opened_alone(folder / SHARDED if (folder / SHARDED).is_dir() else folder))
    if not trust:
        raise CheckpointingException(f"{CANNOT_EXPORT}: {folder} {verl.UNTRUSTED}")
    model = verl.model_of(folder, verl.saved_world(folder))

    def fill(parts: Sequence[tuple[str, Box, torch.Tensor]]) -> None:
        for key, box, into in parts:
            model[key].copy(box, into)

    return Model({key: shards.info for key, shards in model.items()}, fill, {})


def _opened_ours(call: Call, checkpoint: Opened) -> Model:
    tied: Mapping[str, str] = {}
    # The bytes of the common state are as saved: reading fails only for objects, which do not matter here.
    with contextlib.suppress(CheckpointingException):
        common = checkpoint.common_state()
        tied = common.get(TIED, {})
        if LORA_ONLY in common:
            what = f"adapters alone ({LORA_ONLY}), and no weights below them"
            call.problems.append(Problem(what, str(checkpoint.folder)))
    every = checkpoint.holds.tensors.items()
    stored = {key[len(PREFIX) :]: value for key, value in every if key.startswith(PREFIX)}
    if not stored:
        what = f"no model: no tensor's key begins with {PREFIX}"
        call.problems.append(Problem(what, str(checkpoint.folder)))
    call.problems += not_whole(checkpoint, stored)
    call.barrier("opening the checkpoint")
    reader = RecordReader(checkpoint.folder, checkpoint.holds.is_ours)

    def fill(parts: Sequence[tuple[str, Box, torch.Tensor]]) -> None:
        try:
            reader.read([read for part in parts for read in reads_of(stored, *part)])
        except (Damaged, OSError) as error:
            raise CheckpointingException(f"{CANNOT_EXPORT}: {checkpoint.folder}: {error}") from error

    infos = {key: TensorInfo(tensor.shape, tensor.dtype) for key, tensor in stored.items()}
    return Model(infos, fill, tied)


def _equal(model: Model, first: str, second: str) -> bool:
    """Return whether two saved tensors have the same dtype and bits."""
    if model.infos[first] != model.infos[second]:
        return False
    shape, dtype = model.infos[first]
    for window in windows({first: TensorInfo(shape, dtype)}, STEP_BYTES):
        for piece in window[first]:
            pair = [torch.empty(piece.box.size, dtype=dtype) for _ in range(2)]
            model.fill([(key, piece.box, part) for key, part in zip((first, second), pair)])
            if not torch.equal(*map(as_bytes, pair)):
                return False
    return True


def _bringing(
    model: Model,
    names: Mapping[str, str],
    plan: Optional[adapters.Merged],
    meter: Meter,
    tensors: Mapping[str, TensorInfo],
    cuts: Mapping[str, Cutout],
) -> Callable[[Window, Memory], None]:
    """Return a function that fills a window of HF tensors, with the adapter's part of those that have one.

    Args:
        names: HF key of a tensor of the model -> the key that it was saved under.
        cuts: HF key in the files -> its place in a tensor of the model; other keys are in `names`.
    """
    small = functools.lru_cache(maxsize=KEPT_MATRICES)(model.whole)
    changed = set() if plan is None else plan.changed

    def bring(window: Window, write: Memory) -> None:
        parts: list[tuple[str, Box, torch.Tensor]] = []
        sums: list[tuple[str, Box, torch.Tensor, torch.Tensor]] = []
        for key, pieces in window.items():
            cut = cuts.get(key)
            for piece in pieces:
                name, box, target = key, piece.box, write(key, piece.box)
                if cut is not None:
                    name, box, target = cut.key, cut.outer(box), cut.put_back(target)
                part = target
                if name in changed:
                    # In the dtype that it was saved in: cast before the sum it would be another.
                    part = torch.empty(box.size, dtype=model.infos[names[name]].dtype)
                    sums.append((name, box, part, target))
                parts.append((names[name], box, part))
        model.fill(parts)
        for name, box, part, target in sums:
            assert plan is not None, "it changes them"
            adapters.merge_into(part, plan, name, box, small)
            target.copy_(part)
        meter.add(nbytes_of_window(window, tensors))

    return bring


def meter_of(tensors: Mapping[str, TensorInfo]) -> Meter:
    """Return the progress meter of an export, in bytes written."""
    meter = Meter("export", settings.progress())
    meter.expect(lambda: sum(map(nbytes_of, tensors.values())))
    return meter


def faults_of(folder: Path) -> list[str]:
    try:
        content = manifest.read(folder)
    except manifest.BadManifest as error:
        return [str(error)]
    fault = store.examined(folder, content.step).fault
    if fault:
        return [fault]
    # The files of the sharded checkpoint are verified record by record when they are read.
    small = {name: entry for name, entry in content.files.items() if not name.endswith(".distcp")}
    return list(manifest.wrong_checksums(folder, dataclasses.replace(content, files=small)))


def reads_of(stored: Mapping[str, Stored], key: str, box: Box, into: torch.Tensor) -> list[Read]:
    """Return the reads that fill a box of a tensor."""
    dtype = stored[key].dtype
    return [Read(key, chunk, part, dtype, into, box) for chunk, part in stored[key].parts_of(box)]
