"""Hugging Face files to a sharded checkpoint of Megatron's GPTModel.

Must never hold more than views of the mapped files, and what is dequantised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch_dcp_backport.dist_checkpointing import ShardedObject, ShardedTensor
from torch_dcp_backport.hf import CONFIG, Export, Source, companions_of, copied_of
from torch_dcp_backport.hf import Folder as Files
from torch_dcp_backport.megatron._src.agreed import other_copies
from torch_dcp_backport.megatron._src.bridge import as_text
from torch_dcp_backport.megatron._src.conversion import Converted, Found, bytes_of
from torch_dcp_backport.megatron._src.conversion_target import check_target, write_checkpoint
from torch_dcp_backport.megatron._src.cuts import Cut
from torch_dcp_backport.megatron._src.names import VALUE_HEADS
from torch_dcp_backport.megatron._src.plan import behind, check_files, head_of, layer_number, left_alone
from torch_dcp_backport.megatron._src.shape import Shape, shape_of
from torch_dcp_backport.megatron._src.stored import EMBEDDING, OUTPUT, Naming, Slot, Whole, states_of
from torch_dcp_backport.transfer import Call, Problem, TensorInfo

#: Of Megatron-LM: below 2.0 it takes the rows of linear_qkv for those of another order.
COMMON = {"checkpoint_version": 3.0, "iteration": 0}


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


def to_checkpoint(
    call: Call, folder: Path, out: Path, how: Export, dry_run: bool, report: Callable[[Converted], object]
) -> Converted:
    original = Files(folder)
    files = as_text(original)
    call.problems += files.problems
    if files.absent:
        call.problems.append(Problem("no model here", got=files.absent))
    call.agree_on_outcome()
    with call.guard(CONFIG):
        shape = shape_of(files.config)
    call.agree_on_outcome()
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
    call.agree_on_outcome()
    cuts = list(model.cuts(spreading))
    tensors = _stored_infos(call, model, cuts, files.tensors)
    with call.guard(str(out)):
        check_target(out, how)
    call.agree_on_outcome()
    infos = original.tensors.values()
    found = Found("huggingface", shape.towers or shape.kind, len(infos), bytes_of(infos), original.files)
    # What is dequantised, or not aligned, is no view of a mapped file.
    copied = copied_of(files) & {cut.key for _, cut in cuts}
    held = bytes_of(files.tensors[key] for key in copied)
    result = Converted("checkpoint", tensors, {}, left, found, held)
    report(result)
    if dry_run:
        return result
    objects = _objects(shape, naming)

    def state_in(_: Path) -> dict[str, Any]:
        return {"tensors": _parts(files, cuts, tensors), "objects": objects, **COMMON}

    write_checkpoint(out, how, state_in, companions_of(folder))
    return result


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
