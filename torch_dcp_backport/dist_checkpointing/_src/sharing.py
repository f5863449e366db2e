"""Reads that ranks share: one rank reads a part that several want, and sends it to the others.

Collective over these ranks. Holds a window of bytes, and the staging of its exchange, beside the tensors that
are loaded.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Optional

import torch

from torch_dcp_backport import compat
from torch_dcp_backport.dist_checkpointing._src.files import Damaged
from torch_dcp_backport.dist_checkpointing._src.load import WantedBox, reads_of
from torch_dcp_backport.dist_checkpointing._src.metadata import Chunk, Index
from torch_dcp_backport.dist_checkpointing._src.plans import cut
from torch_dcp_backport.dist_checkpointing._src.reader import Read, RecordReader, verify_object
from torch_dcp_backport.dist_checkpointing._src.table import swept
from torch_dcp_backport.dist_checkpointing._src.writer import bytes_of
from torch_dcp_backport.dist_checkpointing.core import CheckpointingException
from torch_dcp_backport.transfer import (
    DOUBTFUL,
    Agreement,
    Box,
    Call,
    Failure,
    Key,
    Memories,
    Route,
    Terms,
    intersection,
    move,
    part_of,
    problem_of,
    spread_of,
    whole,
)

#: Bytes that one rank reads between two exchanges.
WINDOW = 16 * 2**20
#: A portion has at most about so many bytes.
PORTION = 4 * 2**20
#: A tensor of which the ranks want more boxes than this is read by each rank alone: the plan grows with the
#: square of their number.
MOST_BOXES = 128
#: A portion begins in a window at a multiple of this, and so of every itemsize.
ALIGNED = 16
#: The boxes of each key that a rank wants; equal wants are the same object once they were exchanged.
Wants = tuple[tuple[str, tuple[Box, ...]], ...]


class SharedRead(NamedTuple):
    """The result of a shared read."""

    #: Key -> the bytes of its record, verified.
    objects: dict[str, bytes]
    #: The error of this rank's reads: other ranks have got all that was read by then.
    failure: Optional[Exception]


class Objects(NamedTuple):
    """The ranks that read and want the records of objects; the same on every rank."""

    #: Key -> global ranks, the reader first.
    ranks: dict[str, list[int]]
    #: Key -> memory for the record, of those that this rank wants; none after they were read.
    buffers: dict[str, torch.Tensor]


class Portion(NamedTuple):
    """A box of a stored chunk that one rank reads for several."""

    key: str
    chunk: Chunk
    box: Box
    reader: int
    #: The boxes that each rank wants of it.
    parts: tuple[tuple[int, Box], ...]


class Shares(NamedTuple):
    """The parts that each rank reads; the same on every rank."""

    portions: list[Portion]
    #: Rank -> the parts that it alone wants.
    alone: dict[int, list[tuple[str, Chunk, Box]]]


def read_shared(
    call: Call, reader: RecordReader, index: Index, wanted: Sequence[WantedBox], objects: Sequence[str]
) -> SharedRead:
    """Read the parts that this rank wants, sharing the reads with the other ranks.

    Args:
        wanted, objects: tensors and objects that are in the checkpoint; of this rank.

    Raises:
        CheckpointingException, RuntimeError: a rank is gone, or has no memory. Any other error leaves the
            ranks out of step, too.
    """
    held, doubles = disjoint(wanted)
    own = tuple((key, tuple(entry.row.box for entry in entries)) for key, entries in held.items())

    def together(
        own_by_rank: Mapping[int, tuple[Wants, tuple[str, ...]]],
    ) -> tuple[dict[int, Wants], dict[int, tuple[str, ...]]]:
        known: dict[Wants, Wants] = {}
        # Replicas want the same: it is sent once.
        wants = {rank: known.setdefault(boxes, boxes) for rank, (boxes, _) in own_by_rank.items()}
        return wants, {rank: keys for rank, (_, keys) in own_by_rank.items()}

    asked = own, tuple(dict.fromkeys(objects))
    wants, keys = call.gather_object("sharing out what is read", asked, together)
    shares, records = shared_out(index, wants), Objects(readers_of(index, keys), {})
    windows = list(windows_of(index, shares.portions))
    buffer = torch.empty(0, dtype=torch.uint8, device="cpu")
    with call.room_for("what is read for others"):
        most = max((extent_of(index, window, call.rank) for window in windows), default=0)
        buffer = compat.host_buffer(most)
        for key in keys[call.rank]:
            records.buffers[key] = torch.zeros(index.objects[key].length, dtype=torch.uint8, device="cpu")
    kinds = {entry.data.device.type for entry in wanted if entry.data is not None}
    agreement = call.agree_on_wants({}, Terms(device=kinds.pop() if len(kinds) == 1 else ""))
    failure: Optional[Exception] = None

    # The other ranks wait for what was read; they get the first of these errors when all was sent.

    def attempt(reads: Sequence[Read]) -> None:
        nonlocal failure
        try:
            reader.read(reads)
        except Exception as error:
            failure = failure or error

    def failed(copying: Failure) -> None:
        nonlocal failure
        if failure is None:
            failure = CheckpointingException(str(problem_of(*copying)))
            failure.__cause__ = copying.error

    attempt([*reads_of(index, doubles), *reads_alone(index, held, shares.alone[call.rank])])
    for window in windows:
        filled = views_of(index, window, call.rank, buffer)
        attempt([read for reads in filled.values() for read in reads])
        source, target = functools.partial(_filled, filled), functools.partial(_wanted, held)
        send(call, agreement, index, window, Memories(source, target, DOUBTFUL, failed))
        reader.moved(sum(nbytes_received(index, portion, call.rank) for portion in window))
    result = read_objects(call, agreement, reader, index, records)
    return SharedRead(result.objects, failure or result.failure)


def readers_of(index: Index, keys: Mapping[int, Sequence[str]]) -> dict[str, list[int]]:
    """Return key -> the ranks that want an object; the first reads it, each rank about as many bytes."""
    ranks: dict[str, list[int]] = {}
    for rank in sorted(keys):
        for key in keys[rank]:
            ranks.setdefault(key, []).append(rank)
    load = dict.fromkeys(keys, 0)
    for key, takers in ranks.items():
        takers.sort(key=lambda rank: (load[rank], rank))
        load[takers[0]] += index.objects[key].length
    return ranks


def read_objects(
    call: Call, agreement: Agreement, reader: RecordReader, index: Index, objects: Objects
) -> SharedRead:
    """Read each object's record once, and send it to all ranks that want it; each compares its checksum."""
    routes: dict[Key, Route] = {}
    failure: Optional[Exception] = None
    for key, (first, *others) in objects.ranks.items():
        place = index.objects[key]
        if first == call.rank:
            try:
                bytes_of(objects.buffers[key])[:] = reader.read_object(place)
            except Exception as error:
                # Zeros are sent in its place, whose checksum is wrong.
                failure = failure or error
        if others:
            shape = (place.length,)
            box = [whole(shape)]
            have, want = spread_of(shape, {first: box}), spread_of(shape, dict.fromkeys(others, box))
            routes[key] = Route(have, want, torch.uint8)

    def memory_of(key: str, box: Box) -> torch.Tensor:
        return part_of(objects.buffers[key], whole((index.objects[key].length,)), box)

    if routes:
        move(call, agreement, routes, Memories(memory_of, memory_of, DOUBTFUL))
    contents = {}
    for key in list(objects.buffers):
        # One record at a time is in memory twice.
        contents[key] = bytes(bytes_of(objects.buffers.pop(key)))
        try:
            verify_object(contents[key], index.objects[key])
        except Damaged as error:
            failure = failure or Damaged(f"{key}: {error}")
    return SharedRead(contents, failure)


def disjoint(wanted: Sequence[WantedBox]) -> tuple[dict[str, list[WantedBox]], list[WantedBox]]:
    """Return the wanted boxes by key, and those that this rank reads alone.

    These overlap others of their key (a tensor under two names), have no elements, or are too many.
    """
    held: dict[str, list[WantedBox]] = {}
    doubles: list[WantedBox] = []
    counts = Counter(entry.row.key for entry in wanted)
    for entry in wanted:
        if counts[entry.row.key] > MOST_BOXES or not entry.row.box.numel:
            doubles.append(entry)
            continue
        others = held.setdefault(entry.row.key, [])
        has_some = any(intersection(other.row.box, entry.row.box) for other in others)
        (doubles if has_some else others).append(entry)
    return held, doubles


def shared_out(index: Index, wants: Mapping[int, Wants]) -> Shares:
    """Return the parts for each rank: one rank reads what several want, and each about as many bytes."""
    alone: dict[int, list[tuple[str, Chunk, Box]]] = {rank: [] for rank in wants}
    load = dict.fromkeys(wants, 0)
    shared: list[tuple[str, Chunk, Box, list[tuple[int, Box]]]] = []
    crowded = crowded_keys(wants)
    for key, chunk, parts in parts_by_chunk(index, wants):
        itemsize = index.tensors[key].dtype.itemsize
        if key in crowded:
            for rank, part in parts:
                alone[rank].append((key, chunk, part))
                load[rank] += part.numel * itemsize
            continue
        for slab in slabs(chunk.box, parts):
            around = bounds(part for _, part in slab)
            is_dense = 2 * sum(part.numel for part in {part for _, part in slab}) >= around.numel
            count = -(-around.numel * itemsize // PORTION) if is_dense else 1
            for box in cut(around, count):
                inside = parts_in(box, slab)
                if is_dense and len({rank for rank, _ in inside}) > 1:
                    shared.append((key, chunk, box, inside))
                    continue
                for rank, part in inside:
                    alone[rank].append((key, chunk, part))
                    load[rank] += part.numel * itemsize
    portions = []
    for key, chunk, box, inside in shared:
        reader = min((rank for rank, _ in inside), key=lambda rank: (load[rank], rank))
        load[reader] += box.numel * index.tensors[key].dtype.itemsize
        portions.append(Portion(key, chunk, box, reader, tuple(inside)))
    return Shares(portions, alone)


def crowded_keys(wants: Mapping[int, Wants]) -> set[str]:
    """Return the keys of which the ranks want too many different boxes for a common plan."""
    boxes: dict[str, set[Box]] = {}
    # Replicas have the same wants.
    for rows in {id(rows): rows for rows in wants.values()}.values():
        for key, listed in rows:
            boxes.setdefault(key, set()).update(listed)
    return {key for key, distinct in boxes.items() if len(distinct) > MOST_BOXES}


def parts_in(box: Box, parts: Sequence[tuple[int, Box]]) -> list[tuple[int, Box]]:
    """Return the parts of a box that ranks want."""
    inside = ((rank, intersection(part, box)) for rank, part in parts)
    return [(rank, part) for rank, part in inside if part is not None]


def parts_by_chunk(
    index: Index, wants: Mapping[int, Wants]
) -> Iterator[tuple[str, Chunk, list[tuple[int, Box]]]]:
    """Yield (key, chunk, the parts that ranks want of it), in an order that is the same on every rank."""
    boxes: dict[str, dict[Box, list[int]]] = {}
    for rank, rows in wants.items():
        for key, listed in rows:
            for box in listed:
                boxes.setdefault(key, {}).setdefault(box, []).append(rank)
    for key, by_box in boxes.items():
        parts_by_box: dict[Box, tuple[Chunk, list[tuple[int, Box]]]] = {}
        for box, ranks in by_box.items():
            for chunk, part in index.tensors[key].parts_of(box):
                parts_by_box.setdefault(chunk.box, (chunk, []))[1].extend((rank, part) for rank in ranks)
        for chunk, parts in parts_by_box.values():
            yield key, chunk, parts


def slabs(chunk: Box, parts: Sequence[tuple[int, Box]]) -> Iterator[list[tuple[int, Box]]]:
    """Yield parts of a chunk, cut along its outermost axis: those of a slab begin and end together there."""
    dim = next((dim for dim, extent in enumerate(chunk.size) if extent > 1), None)
    if dim is None or len({part for _, part in parts}) == 1:
        yield list(parts)
        return
    for start, stop, numbers in swept([part for _, part in parts], dim):
        there = (parts[number] for number in numbers)
        yield [
            (rank, part.tail(dim, start - part.offset[dim]).head(dim, stop - start)) for rank, part in there
        ]


def ends_of(box: Box) -> tuple[int, ...]:
    return tuple(map(sum, zip(box.offset, box.size)))


def bounds(boxes: Iterator[Box]) -> Box:
    """Return the smallest box around some."""
    listed = list(boxes)
    offset = tuple(map(min, zip(*(box.offset for box in listed))))
    ends = tuple(map(max, zip(*map(ends_of, listed))))
    return Box(offset, tuple(end - start for start, end in zip(offset, ends)))


def nbytes_of(index: Index, portion: Portion) -> int:
    """Return the bytes that a portion takes of a window."""
    nbytes = portion.box.numel * index.tensors[portion.key].dtype.itemsize
    return -(-nbytes // ALIGNED) * ALIGNED


def nbytes_received(index: Index, portion: Portion, rank: int) -> int:
    if portion.reader == rank:
        return 0
    itemsize = index.tensors[portion.key].dtype.itemsize
    return sum(part.numel for taker, part in portion.parts if taker == rank) * itemsize


def windows_of(index: Index, portions: Sequence[Portion]) -> Iterator[list[Portion]]:
    """Yield portions that are read and sent together: no rank reads more than a window, or one portion."""
    window: list[Portion] = []
    used: dict[int, int] = {}
    for portion in portions:
        nbytes = nbytes_of(index, portion)
        if window and used.get(portion.reader, 0) + nbytes > WINDOW:
            yield window
            window, used = [], {}
        window.append(portion)
        used[portion.reader] = used.get(portion.reader, 0) + nbytes
    if window:
        yield window


def extent_of(index: Index, window: Sequence[Portion], rank: int) -> int:
    return sum(nbytes_of(index, portion) for portion in window if portion.reader == rank)


#: key -> reads into parts of the buffer.
Filled = dict[str, list[Read]]


def views_of(index: Index, window: Sequence[Portion], rank: int, buffer: torch.Tensor) -> Filled:
    """Return this rank's reads of a window, by key, into parts of its buffer."""
    filled: Filled = {}
    start = 0
    for portion in window:
        if portion.reader == rank:
            dtype, box = index.tensors[portion.key].dtype, portion.box
            view = buffer[start : start + box.numel * dtype.itemsize].view(dtype).view(box.size)
            read = Read(portion.key, portion.chunk, box, dtype, view, box)
            filled.setdefault(portion.key, []).append(read)
            start += nbytes_of(index, portion)
    return filled


def send(
    call: Call, agreement: Agreement, index: Index, window: Sequence[Portion], memories: Memories
) -> None:
    """Bring the portions of a window from their readers to all that want parts of them."""
    have: dict[str, dict[int, list[Box]]] = {}
    want: dict[str, dict[int, list[Box]]] = {}
    for portion in window:
        have.setdefault(portion.key, {}).setdefault(portion.reader, []).append(portion.box)
        for rank, part in portion.parts:
            want.setdefault(portion.key, {}).setdefault(rank, []).append(part)
    routes: dict[Key, Route] = {}
    for key, holders in have.items():
        shape, dtype = index.tensors[key].shape, index.tensors[key].dtype
        routes[key] = Route(spread_of(shape, holders), spread_of(shape, want[key]), dtype)
    move(call, agreement, routes, memories)


def reads_alone(
    index: Index, held: Mapping[str, Sequence[WantedBox]], alone: Sequence[tuple[str, Chunk, Box]]
) -> Iterator[Read]:
    for key, chunk, part in alone:
        yield Read(key, chunk, part, index.tensors[key].dtype, *_memory_around(held, key, part))


def _memory_around(held: Mapping[str, Sequence[WantedBox]], key: str, box: Box) -> tuple[torch.Tensor, Box]:
    """Return the memory of the wanted box that a box lies in, and that wanted box."""
    entry = next(entry for entry in held[key] if intersection(entry.row.box, box) == box)
    assert entry.data is not None, "it was made"
    return entry.data, entry.row.box


def _wanted(held: Mapping[str, Sequence[WantedBox]], key: str, box: Box) -> torch.Tensor:
    """Return the memory into which a box is loaded."""
    return part_of(*_memory_around(held, key, box), box)


def _filled(filled: Filled, key: str, box: Box) -> torch.Tensor:
    """Return the memory of a box that this rank has read for others."""
    read = next(read for read in filled[key] if intersection(read.part, box) == box)
    return part_of(read.target, read.part, box)
