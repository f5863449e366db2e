"""A sharded checkpoint of Megatron's GPTModel to Hugging Face files.

Must never hold more than a few buffers of the model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Optional

from torch_dcp_backport.dist_checkpointing import (
    CheckpointingException,
    Damaged,
    Opened,
    Read,
    RecordReader,
    Stored,
)
from torch_dcp_backport.dist_checkpointing.inspection import not_whole, opened_alone
from torch_dcp_backport.hf import (
    BUFFER_BYTES,
    BUFFERS,
    CONFIG,
    Export,
    Window,
    as_config,
    examined,
    nbytes_of,
    nbytes_of_window,
    planned,
    replaced,
    target_of,
    write_files,
)
from torch_dcp_backport.megatron._src.agreed import of_a_tower
from torch_dcp_backport.megatron._src.conversion import (
    CANNOT_CONVERT,
    Converted,
    found_in,
    model_folder,
    sharded_in,
)
from torch_dcp_backport.megatron._src.cuts import Cut
from torch_dcp_backport.megatron._src.names import HEAD, VALUE_HEADS
from torch_dcp_backport.megatron._src.plan import Head, Spreading
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
)
from torch_dcp_backport.transfer import Box, Call, Memory, TensorInfo, intersection

#: Keys of Megatron's distributed optimizer in its own buckets: their layout is that of a TP x PP.
IN_BUCKETS = re.compile(r"(^|\.)optimizer\.distributed\.dp_group_idx_\d+\.")


def to_files(
    call: Call,
    folder: Path,
    out: Path,
    like: Any,
    how: Optional[Export],
    dry_run: bool,
    report: Callable[[Converted], object],
) -> Converted:
    folder = sharded_in(folder)
    checkpoint = opened_alone(folder)
    own = model_folder(folder)
    if like is None and own is None:
        raise CheckpointingException(f"{CANNOT_CONVERT}: {folder} has no {CONFIG}: name the model's folder")
    target = target_of(call, out, own if like is None else like, how)
    call.agree_on_outcome()
    with call.guard(CONFIG):
        shape = shape_of(as_config(json.loads(target.companions[CONFIG])))
    call.agree_on_outcome()
    if shape.towers:
        call.problems.append(of_a_tower(shape))
    call.agree_on_outcome()
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
    call.agree_on_outcome()
    target = target._replace(shapes=shape.folded(held))
    export = examined(call, target, held, is_named=True)
    target, tensors = export.target, export.tensors
    call.agree_on_outcome()
    files = {
        name: sum(nbytes_of(tensors[key]) for key in keys)
        for name, keys in planned(tensors, target.how.file_bytes).items()
    }
    found = found_in(checkpoint, shape.kind)
    result = Converted("huggingface", tensors, files, left, found, BUFFERS * BUFFER_BYTES)
    report(result)
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
