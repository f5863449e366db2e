"""Writes one rank's share of a checkpoint into its file: every record at its place, checksummed, on disk.

Runs in one thread without a collective. Holds at most one block beside the caller's tensors.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

import torch

from torch_dcp_backport import compat
from torch_dcp_backport.dist_checkpointing._src import integrity
from torch_dcp_backport.dist_checkpointing._src.body import (
    BLOCK,
    Form,
    Output,
    RecordInfo,
    Sink,
    blocks_in,
)
from torch_dcp_backport.dist_checkpointing._src.records import form_of, pieces
from torch_dcp_backport.publish import disk
from torch_dcp_backport.transfer import (
    Box,
    as_bytes,
    has_slices,
    is_dense,
    is_freed,
    layout_text,
    part_of,
    whole,
)

#: Dtypes that numpy and memoryview have, too.
SHARED = frozenset(
    (
        *(torch.float64, torch.float32, torch.float16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
)
#: The most axes of an array up to numpy 1.26.
MOST_AXES = 32


class WriteWork(NamedTuple):
    """A box to be written, and the tensor that holds it."""

    data: torch.Tensor
    #: The box that `data` holds.
    holds: Box
    box: Box

    @property
    def form(self) -> Form:
        return form_of(self.data.dtype, self.box.size)

    @property
    def part(self) -> torch.Tensor:
        return part_of(self.data, self.holds, self.box)


def write(
    path: Path,
    tensors: Sequence[WriteWork],
    objects: Sequence[bytes],
    moved: Callable[[int], None],
    verify_integrity: bool = False,
) -> Output:
    """Write records in sequence into a new file, and have it on disk.

    Args:
        moved: called with the bytes of values that were written since the last time.
        verify_integrity: return the file's SHA-256, too; the file is read again for that.

    Raises:
        OSError: no room, known before the first byte where the file system can tell, or a failed write.
    """
    forms = [work.form for work in tensors]
    output = Output(path.name, sum(form.length for form in forms) + sum(map(len, objects)), [], [])
    if not output.nbytes:
        return output
    # At most one block is held beside the tensors.
    block: Optional[torch.Tensor] = None
    with new_file(path, output.nbytes) as fd:
        sink, written = Sink(fd), list[RecordInfo]()
        for work, form in zip(tensors, forms):
            part = work.part
            if is_flat(part):
                blocks = blocks_in(bytes_of(part))
            else:
                block = compat.host_buffer(BLOCK) if block is None else block
                blocks = blocks_of(work, block)
            written.append(sink.put_record(form, blocks, moved))
        output = sink.ended(objects, output._replace(tensors=written))
        return hashed(output, path) if verify_integrity else output


@contextlib.contextmanager
def new_file(path: Path, nbytes: int) -> Iterator[int]:
    """Make a file of `nbytes` bytes that the context writes; it is on disk when the context has ended."""
    disk.step(f"create {path.name}")
    with disk.created(path) as fd:
        disk.reserve(fd, nbytes)
        yield fd
        disk.step(f"sync {path.name}")
        os.fsync(fd)


def hashed(output: Output, path: Path) -> Output:
    """Return the output with the file's SHA-256, in order: a record's head is written after its values."""
    return output._replace(sha256=integrity.digest_of(path))


def why_not_readable(tensor: torch.Tensor) -> str:
    """Return why a tensor has no values that could be saved; "" where it has them."""
    if tensor.is_meta:
        return "on the meta device"
    if not has_slices(tensor):
        return layout_text(tensor)
    return "its memory was freed" if is_freed(tensor) else ""


def is_flat(part: torch.Tensor) -> bool:
    """Return whether a tensor lies in host memory as it lies in a file."""
    return part.is_cpu and is_dense(part)


def blocks_of(work: WriteWork, block: torch.Tensor) -> Iterator[memoryview]:
    """Yield the values in row-major order, in blocks that are multiples of every grain, but for the last."""
    full_box, grain = whole(work.box.size), work.form.grain or 1
    filled = 0
    for piece in pieces(full_box, full_box, work.data.dtype.itemsize, BLOCK // 2, 0):
        size = piece.stop - piece.start
        if filled + size > BLOCK:
            # The bytes behind the last full grain go to the front of the next block.
            left = filled % grain
            yield bytes_of(block[: filled - left])
            block[:left].copy_(block[filled - left : filled].clone())
            filled = left
        target = block[filled : filled + size].view(work.data.dtype).view(piece.box.size)
        target.copy_(part_of(work.data, work.holds, shifted(piece.box, work.box)))
        filled += size
    if filled:
        yield bytes_of(block[:filled])


def shifted(box: Box, by: Box) -> Box:
    return Box(tuple(start + base for start, base in zip(box.offset, by.offset)), box.size)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the host that requires no gradient.

    Raises:
        RuntimeError: it was freed.
    """
    if tensor.dtype in SHARED and tensor.numel() and tensor.dim() <= MOST_AXES and not is_freed(tensor):
        # Views of a tensor cost twice as much as its array, which does not ask whether its memory is there.
        return memoryview(tensor.numpy()).cast("B")  # type: ignore[arg-type]
    array: Any = as_bytes(tensor).numpy()
    return memoryview(array)
