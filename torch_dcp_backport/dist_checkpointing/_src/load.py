"""A sharded load: the index from the first rank, the plan of every rank, agreement, and the reads.

Collective up to the reads and after them. No tensor is written before every rank knows that all can be read.
"""

from __future__ import annotations

import functools
import logging
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional, Union

import torch

from torch_dcp_backport.dist_checkpointing._src import commit, metadata, packed, values
from torch_dcp_backport.dist_checkpointing._src.files import Damaged
from torch_dcp_backport.dist_checkpointing._src.metadata import Chunk, Index
from torch_dcp_backport.dist_checkpointing._src.reader import Read, RecordReader
from torch_dcp_backport.dist_checkpointing._src.table import Row, box_text, covered
from torch_dcp_backport.dist_checkpointing._src.unpickle import Refused
from torch_dcp_backport.dist_checkpointing.core import (
    COMMON_BACKEND,
    CONFIG_FNAME,
    SHARDED_BACKEND,
    CheckpointingException,
    no_checkpoint,
    no_folder,
    parse_config,
)
from torch_dcp_backport.publish import disk
from torch_dcp_backport.transfer import NOTHING, Attempt, Box, Call, Common, Problem

logger = logging.getLogger("torch_dcp_backport.dist_checkpointing")

#: The object that Megatron from 0.19 on writes in place of common.pt.
COMMON_STATE = "common_state/shard_0_1"
MARKER_VERSION = 1
#: The most bytes of `.metadata` and of common.pt: some 50 million records.
MOST = 8 * 2**30


class Opened(NamedTuple):
    """A checkpoint that was opened: its folder, index and common state."""

    folder: Path
    holds: Index
    #: The bytes of its common state; None where it has none.
    common: Optional[bytes]

    def common_state(self, trust: bool = False, reader: Optional[RecordReader] = None) -> Any:
        """Return the common state; that of Megatron from 0.19 on, from its record.

        Args:
            trust: make objects of any class, which runs what the file says.
            reader: of this checkpoint, with files that may be open; None opens the record's file.

        Raises:
            CheckpointingException: it cannot be read.
        """
        data, is_listed = self.common, False
        place = self.holds.objects.get(COMMON_STATE)
        try:
            if data is None and place is not None:
                reader = reader or RecordReader(self.folder, self.holds.is_ours)
                data, is_listed = reader.read_object(place), True
            if data is None:
                return {}
            value = values.loads(data, trust)
        except (values.Unloadable, Damaged, OSError) as error:
            raise CheckpointingException(
                f"the common state of {self.folder} cannot be loaded: {error}"
            ) from error
        return value[0] if is_listed else value


#: Name -> content; of `.metadata` its packed index, where that is enough.
SmallFiles = Mapping[str, Union[bytes, packed.Packed]]


def small_files(folder: Path, is_whole: bool = True) -> SmallFiles:
    """Return the small files of a checkpoint that are there.

    Args:
        is_whole: return all of `.metadata`, also where it has a packed index.

    Raises:
        CheckpointingException: the folder holds none.
    """
    if not folder.is_dir():
        raise CheckpointingException(no_folder(folder))
    content: dict[str, Union[bytes, packed.Packed]] = {}
    for name in commit.SMALL:
        try:
            known = usable(folder / name) if name == metadata.NAME and not is_whole else None
            content[name] = known or disk.read_whole(folder / name, MOST)
        except FileNotFoundError:
            continue
        except (OSError, MemoryError) as error:
            reason = str(error) or "there is no memory for it"
            raise CheckpointingException(f"{folder / name} cannot be read: {reason}") from error
    if not content:
        raise CheckpointingException(no_checkpoint(folder))
    return content


def usable(path: Path) -> Optional[packed.Packed]:
    """Return the packed index of a `.metadata`; None where all of the file has to be read.

    Raises:
        OSError: it cannot be read.
    """
    known = packed.read(path)
    try:
        if known is not None:
            metadata.from_packed(known)
    except Refused:
        return None
    return known


def opened(folder: Path, content: SmallFiles) -> Opened:
    """Open a checkpoint from the bytes of its small files.

    Raises:
        CheckpointingException: it is damaged, incomplete, or of a format that is not read here.
    """
    described = content.get(metadata.NAME)
    others = {name: data for name, data in content.items() if not isinstance(data, packed.Packed)}
    marker, common = (others.get(name) for name in (CONFIG_FNAME, commit.COMMON))
    if marker is not None:
        config = parse_config(marker, str(folder / CONFIG_FNAME))
        backend, version = config.sharded_backend, config.sharded_backend_version
        if (backend, config.common_backend) != (SHARDED_BACKEND, COMMON_BACKEND) or version != MARKER_VERSION:
            got = f"{backend} {version} with {config.common_backend} {config.common_backend_version}"
            raise CheckpointingException(
                f"{folder} has another format: {got}; read is {SHARDED_BACKEND} {MARKER_VERSION} "
                f"with {COMMON_BACKEND} 1"
            )
    if described is None:
        raise CheckpointingException(f"{folder} holds no whole checkpoint: it has no {metadata.NAME}")
    try:
        if isinstance(described, packed.Packed):
            index = metadata.from_packed(described)
        else:
            index = metadata.from_bytes(described)
    except Refused as error:
        raise CheckpointingException(f"{folder / metadata.NAME} cannot be read: {error}") from error
    if marker is None and (index.is_ours or index.planner_data is None):
        # Plain torch has no marker, and its planner's data.
        raise CheckpointingException(
            f"{folder} holds no whole distributed checkpoint: it has no {CONFIG_FNAME}, which is written last"
        )
    if index.is_ours:
        if marker != commit.MARKER:
            raise CheckpointingException(f"{folder / CONFIG_FNAME} is damaged")
        seen = None if common is None else (len(common), zlib.crc32(common))
        if seen != index.common:
            what = "is missing" if common is None else "is damaged, or of another save (wrong checksum)"
            raise CheckpointingException(f"{folder / commit.COMMON} {what}")
    return Opened(folder, index, common)


class Opening:
    """A checkpoint that the first rank reads and opens in an agreement, and the other ranks after it."""

    def __init__(self, folder: Attempt[Path]) -> None:
        self._folder = folder
        #: Of the first rank.
        self._checkpoint: Optional[Opened] = None

    def read(self) -> SmallFiles:
        """Return what every rank opens. Runs on the first rank, so that only one rank reports problems.

        Raises:
            CheckpointingException: there is no checkpoint, or it cannot be opened.
        """
        content = small_files(self._folder.value, is_whole=False)
        self._checkpoint = opened(self._folder.value, content)
        return content

    def opened_from(self, content: SmallFiles) -> Opened:
        """Return the checkpoint, of the files that the first rank has read."""
        return self._checkpoint or opened(self._folder.value, content)


def open_together(
    call: Call, folder: Attempt[Path], common: Union[Common, Attempt[Common]] = NOTHING
) -> Attempt[Opened]:
    """Open the same checkpoint on every rank; only the first rank reads the small files.

    Args:
        common: what must be the same on every rank, or the attempt to make it.

    Raises:
        CheckpointingException: there is none, or it is incomplete, or ranks differ; the same on every rank.
    """
    opening = Opening(folder)
    content = call.gather_object("opening", None, lambda _: opening.read(), must_agree=common)
    return call.attempt(opening.opened_from, content)


class WantedBox(NamedTuple):
    """A box of a tensor, and the tensor that it is loaded into."""

    row: Row
    box: Box
    #: In the shape of the box; None where it is still to be made.
    data: Optional[torch.Tensor]
    allow_shape_mismatch: bool
    #: The stored chunks that have elements of the box, each with the part that it has.
    parts: list[tuple[Chunk, Box]]


def wanted_of(index: Index, row: Row, data: Optional[torch.Tensor], allow_shape_mismatch: bool) -> WantedBox:
    """Return a wanted box of a tensor in the checkpoint; it has no parts where the axes differ."""
    stored, box = index.tensors[row.key], row.box
    parts = list(stored.parts_of(box)) if len(stored.shape) == len(row.shape) else []
    return WantedBox(row, box, data, allow_shape_mismatch, parts)


def problems_of(index: Index, wanted: Sequence[WantedBox]) -> Iterator[Problem]:
    """Yield the problems of boxes that cannot be loaded as they are asked for."""
    for row, box, data, allow_shape_mismatch, parts in wanted:
        stored = index.tensors[row.key]
        if stored.shape != row.shape and not (allow_shape_mismatch and len(stored.shape) == len(row.shape)):
            yield Problem("wrong global shape", row.key, f"{row.shape}", f"{stored.shape} as saved")
            continue
        if not keeps_values(stored.dtype, row.dtype):
            what = "a dtype that would lose values"
            yield Problem(what, row.key, f"{row.dtype}", f"{stored.dtype} as saved")
        have = expected = box.numel
        if len(parts) != 1 or parts[0][1] != box:
            have = covered(part for _, part in parts)
            expected = overlap(box, stored.shape) if allow_shape_mismatch else expected
        if have != expected:
            what = f"the checkpoint does not have all of {box_text(box)}"
            yield Problem(what, row.key, f"{have} elements", f"{expected} elements")
        if data is not None and data.is_meta:
            yield Problem("a tensor on the meta device cannot be loaded into", row.key)


@functools.cache
def keeps_values(stored: torch.dtype, asked: torch.dtype) -> bool:
    """Return whether a dtype has the values of another, but for the rounding to a floating point number."""
    if stored == asked:
        return True
    try:
        return torch.can_cast(stored, asked) and (stored == torch.bool or _has_range(stored, asked))
    except (TypeError, NotImplementedError):  # torch has no range of some dtypes, such as int4
        return False


def _has_range(stored: torch.dtype, asked: torch.dtype) -> bool:
    if asked.is_floating_point or asked.is_complex:
        # Dtypes of one byte differ in what they have of infinity and zero.
        return asked.itemsize > 1
    first, second = torch.iinfo(stored), torch.iinfo(asked)
    return second.min <= first.min and first.max <= second.max


def overlap(box: Box, shape: tuple[int, ...]) -> int:
    """Return the number of a box's elements within a shape."""
    count = 1
    for start, extent, limit in zip(box.offset, box.size, shape):
        count *= max(min(start + extent, limit) - start, 0)
    return count


def reads_of(index: Index, wanted: Iterable[WantedBox]) -> Iterator[Read]:
    """Yield the reads of the checkpoint's records into the wanted tensors."""
    for row, box, data, _, parts in wanted:
        dtype = index.tensors[row.key].dtype
        for chunk, part in parts:
            assert data is not None, "it was made"
            yield Read(row.key, chunk, part, dtype, data, box)


def needed_files(
    index: Index, wanted: Iterable[WantedBox], objects: Iterable[str]
) -> Iterator[tuple[str, str]]:
    """Yield (key, file) of the records that are read."""
    for entry in wanted:
        for chunk, _ in entry.parts:
            yield entry.row.key, chunk.place.file
    for key in objects:
        yield key, index.objects[key].file


def stored_object(index: Index, unique_key: str) -> Optional[str]:
    """Return the checkpoint's key for an object; plain torch saves it without a place in a grid."""
    if unique_key in index.objects:
        return unique_key
    key, _, place = unique_key.partition("/")
    # Old releases of Megatron leave out the last extent of the grid.
    shorter, dot, _ = place.rpartition(".")
    for name in (f"{key}/{shorter}" if dot else "", "" if index.is_ours else key):
        if name in index.objects:
            return name
    return None


def load_object(data: bytes, key: str, trust: bool) -> Any:
    """Return an object's value, from the bytes of its record.

    Raises:
        Damaged: they are not what was saved.
    """
    try:
        value = values.loads(data, trust)
    except values.Unloadable as error:
        raise Damaged(f"{key} cannot be loaded: {error}") from error
    is_listed = "/shard_" in key and isinstance(value, list) and len(value) == 1
    return value[0] if is_listed else value
