"""Hugging Face files to a sharded checkpoint of Megatron's GPTModel, back, and from one grid to another.

One process, no model, no GPU. Must never hold more than a few buffers of the model, and never leave half a
target.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Optional

import torch

from torch_dcp_backport.dist_checkpointing import (
    CheckpointingException,
    Damaged,
    Opened,
    Read,
    RecordReader,
    SaveOptions,
    ShardedObject,
    ShardedTensor,
    Stored,
    load_object,
)
from torch_dcp_backport.dist_checkpointing.core import HUGGING_FACE, SHARDED, Folder
from torch_dcp_backport.dist_checkpointing.inspection import not_whole, opened_alone
from torch_dcp_backport.dist_checkpointing.serialization import saving
from torch_dcp_backport.hf import (
    BUFFER_BYTES,
    BUFFERS,
    CONFIG,
    Export,
    Source,
    Window,
    as_config,
    companions_of,
    copied_of,
    examined,
    nbytes_of,
    nbytes_of_window,
    planned,
    replaced,
    target_of,
    write_files,
)
from torch_dcp_backport.hf import Folder as Files
from torch_dcp_backport.megatron._src.agreed import of_a_tower, other_copies
from torch_dcp_backport.megatron._src.bridge import as_text
from torch_dcp_backport.megatron._src.cuts import Cut
from torch_dcp_backport.megatron._src.names import HEAD, VALUE_HEADS
from torch_dcp_backport.megatron._src.optimizer import carried, is_of_an_optimizer, slabs_of, weight_of
from torch_dcp_backport.megatron._src.plan import (
    Head,
    Spreading,
    behind,
    check_files,
    head_of,
    layer_number,
    left_alone,
)
from torch_dcp_backport.megatron._src.shape import Shape, shape_of
from torch_dcp_backport.megatron._src.stored import (
    EMBEDDING,
    OPTIMIZER,
    OUTPUT,
    Naming,
    Slot,
    Whole,
    misfits_of,
    model_in,
    naming_of,
    states_of,
)
from torch_dcp_backport.publish import disk
from torch_dcp_backport.publish.drafts import NEW, OLD, InRoom, discarding
from torch_dcp_backport.transfer import (
    Box,
    Call,
    Memory,
    Problem,
    TensorInfo,
    intersection,
    part_of,
    whole,
)

CANNOT_CONVERT = "cannot convert"
#: Of Megatron-LM: below 2.0 it takes the rows of linear_qkv for those of another order.
COMMON = {"checkpoint_version": 3.0, "iteration": 0}
#: Keys of Megatron's distributed optimizer in its own buckets: their layout is that of a TP x PP.
IN_BUCKETS = re.compile(r"(^|\.)optimizer\.distributed\.dp_group_idx_\d+\.")
#: What is at the top of a sharded checkpoint; hidden files of a file system do not count.
OF_A_CHECKPOINT = re.compile(rf"\..*|metadata\.json|integrity\.json|common\.pt|.*\.distcp|{HUGGING_FACE}")

#: A file in a draft, without a name as soon as it is open, and where tensors begin in it.
SCRATCH, ALIGNED = ".scratch", 64


class Found(NamedTuple):
    """A source, as it was found."""

    #: "huggingface" or "checkpoint".
    form: str
    #: The model_type of config.json.
    kind: str
    tensors: int
    nbytes: int
    files: int


@dataclass(frozen=True)
class Converted:
    """The result of a conversion, or of a dry run."""

    #: "checkpoint" or "huggingface".
    to: str
    #: Tensor -> shape and dtype, as the target names them.
    tensors: Mapping[str, TensorInfo]
    #: File of a target for from_pretrained -> bytes of its tensors.
    files: Mapping[str, int]
    #: Tensor of the source that is not converted -> why.
    left: Mapping[str, str]
    source: Found
    #: Bytes that the process holds beside mapped files: buffers, and weights that are dequantised or copied.
    memory: int

    @property
    def nbytes(self) -> int:
        return sum(map(nbytes_of, self.tensors.values()))


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
    tell: Callable[[Converted], object] = bool,
    ep: Optional[int] = None,
) -> Converted:
    """Convert as `convert` does.

    Args:
        tell: called with what will be done, when all is checked and before anything is written.
    """
    # Renames would replace a link itself, so the target is the folder that it leads to.
    folder, out = Path(source), Path(os.path.realpath(target))
    try:
        to_checkpoint = (folder / CONFIG).is_file()
        check_apart(folder, out)
        if ep is not None:
            with Call(CANNOT_CONVERT, "save", ()) as call:
                call.problems += of_files_alone(like, how or Export())
                if to_checkpoint:
                    call.problems.append(Problem("model files have no optimizer", "ep", f"{ep}"))
                elif isinstance(ep, bool) or not isinstance(ep, int) or ep < 1:
                    call.problems.append(Problem("no number of parts", "ep", f"{ep!r}", "1 or more"))
                call.settle()
                return _to_grid(call, folder, out, how or Export(), ep, dry_run, tell)
        if to_checkpoint:
            with Call(CANNOT_CONVERT, "save", ()) as call:
                call.problems += of_files_alone(like, how or Export())
                return _to_checkpoint(call, folder, out, how or Export(), dry_run, tell)
        with Call(CANNOT_CONVERT, "collect", ()) as call:
            return _to_files(call, folder, out, like, how, dry_run, tell)
    except (RuntimeError, OSError) as error:
        raise CheckpointingException(str(error)) from error


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


# --- Hugging Face files to a checkpoint ---


def of_files_alone(like: Any, how: Export) -> list[Problem]:
    """Return problems for options that mean nothing to a checkpoint."""
    problems = []
    if how.dtype is not None:
        problems.append(Problem("a checkpoint keeps the dtypes of the files", "dtype", f"{how.dtype}"))
    if like is not None:
        problems.append(
            Problem("a checkpoint keeps what is beside the files that it is made of", "like", f"{like}")
        )
    if how.file_bytes != Export.file_bytes:
        what = "the files of a checkpoint have the sizes of its tensors"
        problems.append(Problem(what, "file_bytes", f"{how.file_bytes}"))
    return problems


def _to_checkpoint(
    call: Call, folder: Path, out: Path, how: Export, dry_run: bool, tell: Callable[[Converted], object]
) -> Converted:
    original = Files(folder)
    files = as_text(original)
    call.problems += files.problems
    if files.absent:
        call.problems.append(Problem("no model here", got=files.absent))
    call.settle()
    with call.guard(CONFIG):
        shape = shape_of(files.config)
    call.settle()
    head = head_of(shape, files.tensors, _has_value_head(files.tensors, shape))
    rows = {EMBEDDING: shape.vocab}
    if head.is_value or not shape.tied:
        rows[OUTPUT] = 1 if head.is_value else shape.vocab
    has_predicted = any(layer_number(key) in behind(shape) for key in files.tensors)
    naming = Naming("", shape.is_mixed, has_predicted=has_predicted)
    model = Whole(shape, rows, naming)
    spreading = model.spreading(head)
    left: dict[str, str] = {}
    if not spreading.problems:
        check_files(files.tensors, spreading)
        left = left_alone(files.tensors, spreading)
        call.problems += other_copies(files, shape, left, head)
    call.problems += spreading.problems
    call.settle()
    cuts = list(model.cuts(spreading))
    tensors = _stored_infos(call, model, cuts, files.tensors)
    with call.guard(str(out)):
        _check_target(out, how)
    call.settle()
    infos = original.tensors.values()
    found = Found("huggingface", shape.towers or shape.kind, len(infos), _bytes(infos), original.files)
    # What is dequantised, or not aligned, is no view of a mapped file.
    copied = copied_of(files) & {cut.key for _, cut in cuts}
    held = _bytes(files.tensors[key] for key in copied)
    result = Converted("checkpoint", tensors, {}, left, found, held)
    tell(result)
    if dry_run:
        return result
    objects = _objects(shape, naming)

    def state_in(_: Path) -> dict[str, Any]:
        return {"tensors": _parts(files, cuts, tensors), "objects": objects, **COMMON}

    _write_checkpoint(out, how, state_in, companions_of(folder))
    return result


def _write_checkpoint(
    out: Path, how: Export, state_in: Callable[[Path], dict[str, Any]], companions: Mapping[str, bytes]
) -> None:
    """Write a checkpoint with the small files of a model, out of sight; then it takes its place.

    Args:
        state_in: returns what is saved; it may make files in the folder that it gets, and has to remove them.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    _check_target(out, how)
    draft = InRoom(room_of(out), out, lambda: _check_target(out, how))
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


def _bytes(infos: Iterable[TensorInfo]) -> int:
    return sum(map(nbytes_of, infos))


def _has_value_head(tensors: Mapping[str, TensorInfo], shape: Shape) -> bool:
    heads = [key for key in VALUE_HEADS if key in tensors]
    return bool(heads) and shape.vocab > 1 and all(tensors[key].shape[:1] == (1,) for key in heads)


def _stored_infos(
    call: Call, model: Whole, cuts: list[tuple[Slot, Cut]], tensors: Mapping[str, TensorInfo]
) -> dict[str, TensorInfo]:
    """Return key -> shape and dtype in the checkpoint; parts in two dtypes in the files are a problem."""
    sizes = {slot.key: param.shape for param in model.shard.params for slot in model.slots[param.name]}
    infos: dict[str, TensorInfo] = {}
    first: dict[str, str] = {}
    for slot, cut in cuts:
        dtype = tensors[cut.key].dtype
        info = infos.setdefault(slot.key, TensorInfo(slot.extents + sizes[slot.key], dtype))
        other = first.setdefault(slot.key, cut.key)
        if info.dtype != dtype:
            what = f"parts of {slot.key} in two dtypes"
            call.problems.append(Problem(what, cut.key, f"{dtype}", f"{info.dtype} as {other}"))
    return infos


def _parts(
    files: Source, cuts: list[tuple[Slot, Cut]], tensors: Mapping[str, TensorInfo]
) -> list[ShardedTensor]:
    """The boxes of the stored tensors: views of the mapped files, which hold no memory of this process."""
    parts = []
    for slot, cut in cuts:
        box, info = slot.box(cut.at), tensors[slot.key]
        data = cut.in_parameter(files.part(cut.key, cut.box))
        axes = len(slot.lead)
        parts.append(
            ShardedTensor(
                slot.key, data, info.dtype, cut.at.size, info.shape, box.offset, None, prepend_axis_num=axes
            )
        )
    return parts


def _objects(shape: Shape, naming: Naming) -> list[ShardedObject]:
    return [ShardedObject(slot.key, None, slot.extents, slot.lead) for slot in states_of(shape, naming)]


def _check_target(out: Path, how: Export) -> None:
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
        # A conversion replaces nothing but a checkpoint, and what stands beside it would go as well.
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


# --- a checkpoint to one for another grid ---


def _to_grid(
    call: Call,
    folder: Path,
    out: Path,
    how: Export,
    ep: int,
    dry_run: bool,
    tell: Callable[[Converted], object],
) -> Converted:
    folder = sharded_in(folder)
    checkpoint = opened_alone(folder)
    everything = checkpoint.holds.tensors
    call.problems += not_whole(checkpoint, everything)
    call.settle()
    optimizer = carried(checkpoint, ep)
    if isinstance(optimizer, list):
        call.problems += optimizer
        call.settle()
        raise AssertionError("there are problems")
    with call.guard(str(out)):
        _check_target(out, how)
    call.settle()
    copied = {key: stored for key, stored in everything.items() if not is_of_an_optimizer(key)}
    tensors = {key: TensorInfo(stored.shape, stored.dtype) for key, stored in copied.items()}
    tensors.update(optimizer.tensors)
    number = sum(path.suffix == ".distcp" for path in folder.iterdir())
    everything_in = [TensorInfo(stored.shape, stored.dtype) for stored in everything.values()]
    places = (folder / HUGGING_FACE, folder.parent / HUGGING_FACE)
    own = next((place for place in places if (place / CONFIG).is_file()), None)
    kind = json.loads((own / CONFIG).read_text()).get("model_type", "GPT") if own is not None else "GPT"
    found = Found("checkpoint", kind, len(everything_in), _bytes(everything_in), number)
    slabs = (next(slabs_of(weight_of(key), info.shape)).numel for key, info in optimizer.tensors.items())
    largest = max(slabs, default=0) * torch.float32.itemsize
    result = Converted("checkpoint", tensors, {}, {}, found, optimizer.held + largest)
    tell(result)
    if dry_run:
        return result
    call.tally.meter.expect(lambda: result.nbytes)
    reader = RecordReader(folder, checkpoint.holds.is_ours)

    def state_in(room: Path) -> dict[str, Any]:
        memory = in_a_file(room / SCRATCH, tensors)
        parts = []
        for key, stored in copied.items():
            for chunk in stored.chunks:
                target = part_of(memory[key], whole(stored.shape), chunk.box)
                reader.read([Read(key, chunk, chunk.box, stored.dtype, target, chunk.box)])
                call.tally.meter.add(target.nbytes)
                parts.append(
                    ShardedTensor(
                        key, target, stored.dtype, chunk.box.size, stored.shape, chunk.box.offset, None
                    )
                )
        optimizer.fill(memory, call.tally.meter.add)
        parts += optimizer.parts(memory)
        return {**optimizer.common, "parts of a conversion": [*parts, *objects_of(checkpoint, reader)]}

    _write_checkpoint(out, how, state_in, {} if own is None else companions_of(own))
    return result


def sharded_in(folder: Path) -> Path:
    """Return the folder of the sharded checkpoint in a folder: itself, or the one that managers make in it.

    Raises:
        CheckpointingException: there is no such folder.
    """
    if not folder.is_dir():
        raise CheckpointingException(f"{CANNOT_CONVERT}: {folder} is no folder")
    return folder / SHARDED if (folder / SHARDED).is_dir() else folder


def in_a_file(path: Path, infos: Mapping[str, TensorInfo]) -> dict[str, torch.Tensor]:
    """Return tensors in a file that nothing names any more: their pages are the disk's, not the process's.

    Raises:
        OSError: no room.
    """
    starts, length = {}, 0
    for key, info in infos.items():
        starts[key] = length
        length += -(-nbytes_of(info) // ALIGNED) * ALIGNED
    fd = disk.create(path)
    try:
        disk.reserve(fd, length)
        os.ftruncate(fd, length)
        memory = torch.from_file(str(path), shared=True, size=length, dtype=torch.uint8)
    finally:
        disk.close_own(fd)
        os.unlink(path)
    return {
        key: memory[starts[key] : starts[key] + nbytes_of(info)].view(info.dtype).view(info.shape)
        for key, info in infos.items()
    }


def objects_of(checkpoint: Opened, reader: RecordReader) -> Iterator[ShardedObject]:
    """Yield the objects of a checkpoint that are not of its optimizer.

    Raises:
        CheckpointingException: an object of a class that is not known to be harmless.
    """
    for key, place in checkpoint.holds.objects.items():
        # The last is the common state of newer releases, which has been read.
        if is_of_an_optimizer(key) or key.startswith("common_state/"):
            continue
        part = ShardedObject.empty_from_unique_key(key)
        try:
            part.data = load_object(reader.read_object(place), key, trust=False)
        except (Damaged, OSError) as error:
            raise CheckpointingException(f"{checkpoint.folder}: {error}") from error
        yield part


# --- a checkpoint to Hugging Face files ---


def _to_files(
    call: Call,
    folder: Path,
    out: Path,
    like: Any,
    how: Optional[Export],
    dry_run: bool,
    tell: Callable[[Converted], object],
) -> Converted:
    folder = sharded_in(folder)
    checkpoint = opened_alone(folder)
    places = (folder / HUGGING_FACE, folder.parent / HUGGING_FACE)
    own = next((place for place in places if (place / CONFIG).is_file()), None)
    if like is None and own is None:
        raise CheckpointingException(f"{CANNOT_CONVERT}: {folder} has no {CONFIG}: name the model's folder")
    target = target_of(call, out, own if like is None else like, how)
    call.settle()
    with call.guard(CONFIG):
        shape = shape_of(as_config(json.loads(target.companions[CONFIG])))
    call.settle()
    if shape.towers:
        call.problems.append(of_a_tower(shape))
    call.settle()
    naming = naming_of(checkpoint.holds.tensors)
    everything = checkpoint.holds.tensors
    stored = {key: everything[key] for key in model_in(everything, naming, shape)}
    # An object is stored under its key and its place among those of the key.
    beside = {key.partition("/shard_")[0] for key in checkpoint.holds.objects if IN_BUCKETS.search(key)}
    left = {key: why_left(key, shape) for key in sorted({*everything, *beside} - set(stored))}
    infos = {key: TensorInfo(entry.shape, entry.dtype) for key, entry in stored.items()}
    sources, held = _sources(call, shape, naming, infos)
    call.problems += not_whole(checkpoint, stored)
    with call.guard(str(out)):
        # An export replaces nothing but a model, and checks that again before it writes.
        replaced(out, target.how.overwrite, target.companions[CONFIG])
    call.settle()
    target = target._replace(shapes=shape.folded(held))
    export = examined(call, target, held, is_named=True)
    target, tensors = export.target, export.tensors
    call.settle()
    files = {
        name: sum(nbytes_of(tensors[key]) for key in keys)
        for name, keys in planned(tensors, target.how.file_bytes).items()
    }
    everything_in = [TensorInfo(entry.shape, entry.dtype) for entry in everything.values()]
    number = sum(path.suffix == ".distcp" for path in folder.iterdir())
    found = Found("checkpoint", shape.kind, len(everything_in), _bytes(everything_in), number)
    result = Converted("huggingface", tensors, files, left, found, BUFFERS * BUFFER_BYTES)
    tell(result)
    if not dry_run:
        call.tally.meter.expect(lambda: result.nbytes)
        write_files(call, tensors, _reading(call, checkpoint, stored, sources, tensors), target)
    return result


def why_left(key: str, shape: Shape) -> str:
    """Return why a thing of a checkpoint of a model has no place in Hugging Face files."""
    if IN_BUCKETS.search(key):
        return (
            "the distributed optimizer's buckets, which files have no place for; a conversion with ep= "
            "(--ep) makes a checkpoint that has it for any TP, PP and EP"
        )
    found = OPTIMIZER.search(key)
    if found:
        # Above EP 1 Megatron splits a sparse model's in two, which no load puts together.
        sizes = "TP, PP and EP"
        if found[2].startswith("chained_"):
            sizes = "TP and PP, and any EP above 1; for EP 1 convert it with ep= (--ep)"
        elif shape.experts:
            sizes = "TP and PP at EP 1; for another EP convert it with ep= (--ep)"
        return f"the optimizer's, which files have no place for; the checkpoint has it for any {sizes}"
    return "not the model's, or a second name"


def _sources(
    call: Call, shape: Shape, naming: Naming, infos: Mapping[str, TensorInfo]
) -> tuple[dict[str, list[tuple[Slot, Cut]]], dict[str, list[TensorInfo]]]:
    """Return (HF key -> its slots and cuts, HF key -> its shape with the dtype of each of its slots)."""
    output = infos.get(naming.prefix + OUTPUT)
    head = Head(HEAD if output is not None and not shape.tied else None)
    if output is not None and output.shape[:1] == (1,) and shape.vocab > 1:
        head = Head(VALUE_HEADS[0], True)
    rows = {EMBEDDING: _rows(infos, naming.prefix + EMBEDDING, shape.vocab)}
    if head.key is not None or not shape.tied:
        rows[OUTPUT] = 1 if head.is_value else _rows(infos, naming.prefix + OUTPUT, shape.vocab)
        head = head if head.key is not None else Head(HEAD)
    model = Whole(shape, rows, naming)
    spreading: Spreading = model.spreading(head)
    call.problems += spreading.problems or spreading.faults()
    call.problems += misfits_of(model, infos)
    sources: dict[str, list[tuple[Slot, Cut]]] = {}
    if call.problems:
        return sources, {}
    for slot, cut in model.cuts(spreading):
        sources.setdefault(cut.key, []).append((slot, cut))
    held = {
        key: [TensorInfo(spreading.size_of(key), infos[slot.key].dtype) for slot, _ in sources[key]]
        for key in spreading.spreads
    }
    return sources, held


def _rows(infos: Mapping[str, TensorInfo], key: str, otherwise: int) -> int:
    return infos[key].shape[0] if key in infos and infos[key].shape else otherwise


def _reading(
    call: Call,
    checkpoint: Opened,
    stored: Mapping[str, Stored],
    sources: Mapping[str, list[tuple[Slot, Cut]]],
    tensors: Mapping[str, TensorInfo],
) -> Any:
    """Return a function that fills a window of HF tensors from the checkpoint."""
    reader = RecordReader(checkpoint.folder, checkpoint.holds.is_ours)

    def bring(window: Window, write: Memory) -> None:
        reads: list[Read] = []
        for key, pieces in window.items():
            for piece in pieces:
                for slot, cut in sources[key]:
                    part = intersection(cut.box, piece.box)
                    if part is not None:
                        reads += _reads(stored[slot.key], slot, cut, part, write(key, part))
        try:
            reader.read(reads)
        except (Damaged, OSError) as error:
            raise CheckpointingException(f"{CANNOT_CONVERT}: {checkpoint.folder}: {error}") from error
        # What is read is more, or less, where it is cast.
        call.tally.meter.add(nbytes_of_window(window, tensors))

    return bring


def _reads(stored: Stored, slot: Slot, cut: Cut, part: Box, into: Any) -> Iterator[Read]:
    """Yield the reads for a part of an HF tensor; the part lies within a single cut."""
    box = slot.box(cut.place(part))
    target = cut.in_parameter(into)[(None,) * len(slot.lead)]
    for chunk, common in stored.parts_of(box):
        yield Read(slot.key, chunk, common, stored.dtype, target, box)
