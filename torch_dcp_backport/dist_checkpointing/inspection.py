"""The contents of a checkpoint, and a check of its every byte. One process; no process group.

Must never write.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Optional

import torch

from torch_dcp_backport.dist_checkpointing._src import foreign, integrity
from torch_dcp_backport.dist_checkpointing._src.files import Damaged, OpenFiles, ReadSource
from torch_dcp_backport.dist_checkpointing._src.load import Opened, opened, small_files
from torch_dcp_backport.dist_checkpointing._src.metadata import Chunk, RecordPlace, Stored
from torch_dcp_backport.dist_checkpointing._src.reader import BLOCK, Read, RecordReader
from torch_dcp_backport.dist_checkpointing._src.table import covered, fills
from torch_dcp_backport.dist_checkpointing._src.unpickle import escaped
from torch_dcp_backport.dist_checkpointing.core import CheckpointingException, Folder
from torch_dcp_backport.transfer import Problem, whole


@dataclass(frozen=True)
class Entry:
    """A tensor or an object in a checkpoint."""

    key: str
    #: "tensor" or "object".
    kind: str
    dtype: str
    shape: Sequence[int]
    #: The number of its boxes, and the files that they are in.
    records: int
    files: Sequence[str]
    #: On disk.
    nbytes: int


def contents(checkpoint_dir: Folder) -> list[Entry]:
    """Return the entries of a checkpoint, by key.

    Raises:
        CheckpointingException: no checkpoint.
    """
    checkpoint = opened_alone(checkpoint_dir)
    entries = [
        Entry(
            key,
            "tensor",
            str(stored.dtype).replace("torch.", ""),
            stored.shape,
            len(stored.chunks),
            sorted({chunk.place.file for chunk in stored.chunks}),
            sum(chunk.place.length for chunk in stored.chunks),
        )
        for key, stored in checkpoint.holds.tensors.items()
    ]
    entries += [
        Entry(key, "object", "", (), 1, [place.file], place.length)
        for key, place in checkpoint.holds.objects.items()
    ]
    return sorted(entries, key=lambda entry: entry.key)


def opened_alone(checkpoint_dir: Folder) -> Opened:
    folder = Path(checkpoint_dir)
    return opened(folder, small_files(folder))


def verify(checkpoint_dir: Folder) -> list[str]:
    """Return the problems of every file, record and byte of a checkpoint; none where it is what was saved.

    Reads all of it, in blocks. Not collective.

    Args:
        checkpoint_dir: the folder of a checkpoint.

    Returns:
        A text for each problem.

    Example:
        >>> import os, torch
        >>> from torch_dcp_backport import dist_checkpointing
        >>> os.mkdir("step_1")
        >>> weight = dist_checkpointing.ShardedTensor.from_rank_offsets("w", torch.arange(4))
        >>> dist_checkpointing.save({"w": weight, "step": 1}, "step_1")
        >>> dist_checkpointing.verify("step_1")
        []
    """
    try:
        checkpoint = opened_alone(checkpoint_dir)
    except CheckpointingException as error:
        return [str(error)]
    with OpenFiles(checkpoint.folder) as files:
        return list(problems_of(checkpoint, files))


def problems_of(checkpoint: Opened, files: OpenFiles) -> Iterator[str]:
    index = checkpoint.holds
    gone = list(files.problems(((key, place.file) for key, place in index.places()), index.ends))
    yield from map(str, gone)
    missing = {problem.what.split(" ")[0] for problem in gone}
    for key, stored in index.tensors.items():
        boxes = [chunk.box for chunk in stored.chunks]
        total = sum(box.numel for box in boxes)
        if not fills(boxes, stored.shape) and not covered(boxes) == total == math.prod(stored.shape):
            yield f"{key}: its boxes do not cover shape {tuple(stored.shape)} once"
    reader = RecordReader(files, index.is_ours)
    for name, chunks in sorted(chunks_by_file(checkpoint).items()):
        if name in missing:
            continue
        try:
            with reader.open(name) as source:
                for key, stored, chunk in chunks:
                    yield from problem_of_record(reader, source, key, stored, chunk)
        except OSError as error:
            yield f"{name}: {error.strerror}"
    for key, place in index.objects.items():
        if place.file not in missing:
            try:
                reader.read_object(place)
            except (Damaged, OSError) as error:
                yield f"{key}: {error}"
    yield from problems_of_digests(checkpoint)
    try:
        checkpoint.common_state(trust=False, reader=reader)
    except CheckpointingException as error:
        if "known to be harmless" not in str(error):
            yield str(error)


def not_whole(checkpoint: Opened, stored: Mapping[str, Stored]) -> list[Problem]:
    """Return the problems that keep tensors from being read in full."""
    needed = ((key, chunk.place.file) for key, tensor in stored.items() for chunk in tensor.chunks)
    problems = list(OpenFiles(checkpoint.folder, most=0).problems(needed, checkpoint.holds.ends))
    for key, tensor in stored.items():
        boxes = [chunk.box for chunk in tensor.chunks]
        if not fills(boxes, tensor.shape):
            have, numel = covered(boxes), math.prod(tensor.shape)
            if have != numel:
                problems.append(Problem("not all of it was saved", key, f"{have} elements", f"{numel}"))
    return problems


def problems_of_digests(checkpoint: Opened) -> Iterator[str]:
    """Yield the problems that the SHA-256 of the files shows, where a checkpoint has them."""
    folder = checkpoint.folder
    if not integrity.is_there(folder):
        return
    try:
        digests = integrity.read(folder)
    except integrity.Unknown as error:
        yield str(error)
        return
    yield from map(
        str, integrity.unlisted(digests, {*checkpoint.holds.ends, *integrity.named_in(checkpoint.folder)})
    )
    for name, expected in digests.items():
        yield from map(str, integrity.problem_of(folder, name, expected))


def chunks_by_file(checkpoint: Opened) -> dict[str, list[tuple[str, Stored, Chunk]]]:
    """Return the stored boxes of each file, with their keys."""
    chunks: dict[str, list[tuple[str, Stored, Chunk]]] = {}
    for key, stored in checkpoint.holds.tensors.items():
        for chunk in stored.chunks:
            chunks.setdefault(chunk.place.file, []).append((key, stored, chunk))
    return chunks


def problem_of_record(
    reader: RecordReader, source: ReadSource, key: str, stored: Stored, chunk: Chunk
) -> Iterator[str]:
    """Read all of a tensor's record, and yield its problem if it has one."""
    read = Read(key, chunk, chunk.box, stored.dtype, torch.empty(0), whole(chunk.box.size))
    try:
        if reader.is_ours:
            values = reader.own_values(source, read)
        else:
            located = reader.foreign_values(source, read)
            if located is None:
                verify_in_blocks(source, chunk.place)
                return
            values = located
        block = memoryview(bytearray(BLOCK))
        for start in range(0, values.nbytes, BLOCK):
            values.read(start, block[: min(BLOCK, values.nbytes - start)])
    except Damaged as error:
        yield f"{key}: {error}"


def verify_in_blocks(source: ReadSource, place: RecordPlace) -> None:
    """Verify the entries of a record of torch's that is not row-major."""
    for entry in foreign.directory(source, place).values():
        foreign.content(source, place, entry)


def look(folder: Folder, is_verified: bool, is_json: bool, say: Callable[[str], None]) -> int:
    """Print what a sharded checkpoint holds, or whether all of it is what was saved; return the exit code.

    Args:
        folder: the checkpoint's.
        is_verified: read all of it.
        is_json: print one JSON object; also where there is no checkpoint.
        say: prints an error.
    """
    try:
        entries = contents(folder)
    except CheckpointingException as error:
        say(printable(str(error)))
        if is_json:
            print(json.dumps({"folder": str(folder), "problems": [str(error)]}))
        return 1
    problems = verify(folder) if is_verified else None
    if is_json:
        print(json.dumps(as_dict(str(folder), entries, problems), indent=2))
    else:
        print(printable(as_table(entries) if problems is None else verdict(entries, problems)))
    return 1 if problems else 0


def printable(text: str) -> str:
    """Return a text that any terminal can show: keys are from a file, and may have other characters."""
    encoding = sys.stdout.encoding or "ascii"
    known = text.encode(encoding, "backslashreplace").decode(encoding)
    return escaped(known, keep="\n")


def as_dict(folder: str, entries: Sequence[Entry], problems: Optional[Sequence[str]]) -> dict[str, Any]:
    facts: dict[str, Any] = {"folder": folder}
    if problems is None:
        facts["entries"] = [asdict(entry) for entry in entries]
    else:
        facts["problems"] = list(problems)
    facts["bytes"] = sum(entry.nbytes for entry in entries)
    return facts


#: The most columns of a table, and the number of entries that are listed as the largest.
COLUMNS, LARGEST = 80, 5


def table(rows: Sequence[Sequence[str]], columns: int = COLUMNS) -> list[str]:
    """Return rows as lines of aligned cells; the first row is the heading.

    A first cell that leaves no room for the others has a line of its own: keys are never cut.
    """
    widths = [max(map(len, column)) for column in zip(*rows)]
    rest = sum(widths[1:]) + 2 * len(widths[1:])
    widths[0] = min(widths[0], max(columns - rest, len(rows[0][0])))
    lines: list[str] = []
    for first, *others in rows:
        if len(first) > widths[0]:
            lines.append(first)
            first = ""
        cells = [cell.ljust(width) for cell, width in zip((first, *others), widths)]
        lines.append("  ".join(cells).rstrip())
    return lines


def amount(nbytes: float) -> str:
    """Return a number of bytes in the unit that suits it."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def largest_of(entries: Sequence[Entry]) -> list[str]:
    """Return lines of the largest tensors, with their shares; none where there is nothing to choose from."""
    tensors = [entry for entry in entries if entry.kind == "tensor"]
    total = sum(entry.nbytes for entry in tensors)
    if len(tensors) < 2 or not total:
        return []
    by_size = sorted(tensors, key=lambda entry: (-entry.nbytes, entry.key))[:LARGEST]
    rows = [("largest", "bytes", "share")]
    rows += [(entry.key, f"{entry.nbytes:,}", f"{entry.nbytes / total:.1%}") for entry in by_size]
    return table(rows)


def as_table(entries: Sequence[Entry]) -> str:
    rows = [("key", "dtype", "shape", "records", "files", "bytes")]
    rows += [
        (
            entry.key,
            entry.dtype or entry.kind,
            "x".join(map(str, entry.shape)) or "-",
            str(entry.records),
            str(len(entry.files)),
            f"{entry.nbytes:,}",
        )
        for entry in entries
    ]
    return "\n".join([*table(rows), *largest_of(entries), summary(entries)])


def summary(entries: Sequence[Entry]) -> str:
    files = {name for entry in entries for name in entry.files}
    nbytes = sum(entry.nbytes for entry in entries)
    tensors = sum(entry.kind == "tensor" for entry in entries)
    return f"{tensors} tensors, {len(entries) - tensors} objects, {nbytes:,} bytes in {len(files)} files"


def verdict(entries: Sequence[Entry], problems: Sequence[str]) -> str:
    if not problems:
        return f"whole: {summary(entries)}"
    return "\n".join([f"damaged: {len(problems)} problem(s)", *(f"  {problem}" for problem in problems)])
