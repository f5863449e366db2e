"""A sharded checkpoint to one whose optimizer loads in another grid.

Must never hold the tensors in memory: they are in a file of the draft.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Optional

import torch

from torch_dcp_backport.dist_checkpointing import (
    CheckpointingException,
    Damaged,
    Opened,
    Read,
    RecordReader,
    ShardedObject,
    ShardedTensor,
    load_object,
)
from torch_dcp_backport.dist_checkpointing.inspection import not_whole, opened_alone
from torch_dcp_backport.hf import CONFIG, Export, companions_of, nbytes_of
from torch_dcp_backport.megatron._src.conversion import Converted, found_in, model_folder, sharded_in
from torch_dcp_backport.megatron._src.conversion_target import check_target, write_checkpoint
from torch_dcp_backport.megatron._src.optimizer import carried, is_of_an_optimizer, slabs_of, weight_of
from torch_dcp_backport.publish import disk
from torch_dcp_backport.transfer import Call, TensorInfo, part_of, whole

#: A file in a draft, without a name as soon as it is open, and where tensors begin in it.
SCRATCH, ALIGNED = ".scratch", 64


def to_grid(
    call: Call,
    folder: Path,
    out: Path,
    how: Export,
    ep: int,
    dry_run: bool,
    report: Callable[[Converted], object],
) -> Converted:
    folder = sharded_in(folder)
    checkpoint = opened_alone(folder)
    everything = checkpoint.holds.tensors
    call.problems += not_whole(checkpoint, everything)
    call.agree_on_outcome()
    optimizer = carried(checkpoint, ep)
    if isinstance(optimizer, list):
        call.problems += optimizer
        call.agree_on_outcome()
        raise AssertionError("there are problems")
    with call.guard(str(out)):
        check_target(out, how)
    call.agree_on_outcome()
    copied = {key: stored for key, stored in everything.items() if not is_of_an_optimizer(key)}
    tensors = {key: TensorInfo(stored.shape, stored.dtype) for key, stored in copied.items()}
    tensors.update(optimizer.tensors)
    own = model_folder(folder)
    kind = call.attempt(kind_of, own)
    call.agree_on_outcome()
    found = found_in(checkpoint, kind.value)
    slabs = (next(slabs_of(weight_of(key), info.shape)).numel for key, info in optimizer.tensors.items())
    largest = max(slabs, default=0) * torch.float32.itemsize
    result = Converted("checkpoint", tensors, {}, {}, found, optimizer.held + largest)
    report(result)
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

    write_checkpoint(out, how, state_in, {} if own is None else companions_of(own))
    return result


def kind_of(folder: Optional[Path]) -> str:
    """Return the model_type in a folder's config.json; "GPT" without a folder, or where the file has none.

    Raises:
        CheckpointingException: the file is no JSON object.
        OSError: it cannot be read.
    """
    if folder is None:
        return "GPT"
    path = folder / CONFIG
    try:
        config = json.loads(path.read_bytes())
    except ValueError as error:
        raise CheckpointingException(f"{path} is no JSON: {error}") from None
    if not isinstance(config, dict):
        raise CheckpointingException(f"{path} has a {type(config).__name__}, and no JSON object")
    return str(config.get("model_type", "GPT"))


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
