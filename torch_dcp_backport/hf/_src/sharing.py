"""An export by all ranks that see its files: each writes its own blocks, straight out of its memory.

Must never write a block that another rank writes, nor hold more than a small copy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Optional

from torch_dcp_backport.hf._src.blocks import Share
from torch_dcp_backport.hf._src.files import ExportDraft
from torch_dcp_backport.hf._src.writing import Files, HostBytes, SharedFolder, run_of
from torch_dcp_backport.transfer import Box, Call, TensorInfo, Terms, chunks, holders_of, whole

#: Bytes of a tensor at once: the most that a copy takes, where the memory is not as the file has it.
STEP_BYTES = 4 * 2**20
#: Bytes that a rank writes between two agreements: the group's timeout is not for a full model.
TURN_BYTES = 512 * 2**20
#: Bytes: slices of shorter runs travel to the first rank instead, as a write for each run takes longer.
SHORTEST_RUN = 512


@contextlib.contextmanager
def sharing(
    call: Call,
    draft: Optional[ExportDraft],
    tensors: Mapping[str, TensorInfo],
    file_bytes: int,
    shapes: Mapping[str, tuple[int, ...]],
) -> Iterator[tuple[Optional[Files], tuple[int, ...]]]:
    """Yield (the first rank's files, None where this rank does not see them; all ranks that do). Collective.

    Raises:
        RuntimeError: some rank has problems; on every rank.
        TransferError: a rank is gone, or the group's timeout is over.
    """
    shared_folder: Optional[SharedFolder] = None
    if draft is not None:
        with call.guard():
            shared_folder = draft.files.shared_folder(draft.folder)
    shared_folder = call.broadcast_object("opening the files", shared_folder)
    files = draft.files if draft is not None else None
    joined: Optional[Files] = None
    if draft is None and shared_folder is not None:
        with call.guard():
            joined = Files(tensors, file_bytes, shared_folder.tag, shapes=shapes)
            files = joined if joined.join(shared_folder) else None
    try:
        tables = call.agree_on_wants(
            terms=Terms(condition=f"{files is not None}", note=files is not None)
        ).tables
        yield files, tuple(sorted(rank for table in tables if table.note for rank in table.ranks))
    finally:
        if joined is not None:
            # Some file systems write only now, and report only now that there was no room.
            with call.guard():
                joined.close()


class WritePlan:
    """The boxes that each writer writes; the same on every rank."""

    def __init__(self, share: Share, writers: tuple[int, ...]) -> None:
        #: Rank -> (HF key, box), in the order of the tensors.
        self.boxes: dict[int, list[tuple[str, Box]]] = {rank: [] for rank in writers}
        #: Boxes that no writer holds, or that are too narrow: they travel to the first rank.
        self.rest: dict[str, list[Box]] = {}
        self._nbytes = dict.fromkeys(writers, 0)
        for key, info in share.tensors.items():
            near = holders_of(share.spreads[key], writers)
            every = dict.fromkeys(
                box for _, boxes in share.spreads[key].by_rank for box in boxes if box.numel
            )
            count = len(every)
            for box, parts in joined(box for box in near if is_narrow(box, info)).items():
                # Several with which it is a longer run of the file: gate and up, in turns.
                if not is_narrow(box, info) and len({near[part] for part in parts}) == 1:
                    self._give(key, box, near[parts[0]], box.numel * info.dtype.itemsize)
                    for part in parts:
                        del every[part]
            far = {box: None for box in every if box not in near or is_narrow(box, info)}
            for box in every:
                if box not in far:
                    self._give(key, box, near[box], box.numel * info.dtype.itemsize)
            if far:
                # Full rows are fewer writes than boxes that were cut out of them.
                is_all = len(far) == len(every) == count
                self.rest[key] = [whole(info.shape)] if is_all else list(far)

    def _give(self, key: str, box: Box, holders: tuple[int, ...], nbytes: int) -> None:
        """Assign a box to the holder that has least to write."""
        rank = min(holders, key=self._nbytes.__getitem__)
        self.boxes[rank].append((key, box))
        self._nbytes[rank] += nbytes

    @property
    def turns(self) -> int:
        """The number of agreements of all ranks while they write."""
        return max(-(-nbytes // TURN_BYTES) for nbytes in self._nbytes.values())


def joined(boxes: Iterable[Box]) -> dict[Box, list[Box]]:
    """Return the boxes that boxes next to each other in the last dimension make up, with those of each."""
    rows: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Box]] = {}
    for box in boxes:
        rows.setdefault((box.offset[:-1], box.size[:-1]), []).append(box)
    found = {}
    for (offset, size), row in rows.items():
        row.sort(key=lambda box: box.offset[-1])
        first, length = row[0].offset[-1], sum(box.size[-1] for box in row)
        if row[-1].offset[-1] + row[-1].size[-1] == first + length:  # without a gap
            found[Box((*offset, first), (*size, length))] = row
    return found


def is_narrow(box: Box, info: TensorInfo) -> bool:
    run = run_of(box, info.shape)
    return run < box.numel and run * info.dtype.itemsize < SHORTEST_RUN


def write_own(call: Call, files: Optional[Files], share: Share, plan: WritePlan) -> None:
    """Write this rank's boxes out of its own memory, and agree with the other ranks now and then.

    Raises:
        RuntimeError: a write failed on some rank; on every rank.
        TransferError: a rank is gone, or the group's timeout is over.
    """
    own = plan.boxes.get(call.rank, [])
    tensors = share.tensors
    call.tally.meter.expect(lambda: sum(box.numel * tensors[key].dtype.itemsize for key, box in own))
    pieces = (
        piece
        for run in chunks(((key, box, tensors[key].dtype) for key, box in own), STEP_BYTES)
        for piece in run
    )
    host_bytes = HostBytes(STEP_BYTES)
    with call.tally.phase("move"):
        for _ in range(plan.turns):
            left = TURN_BYTES
            for piece in pieces:
                key = str(piece.key)
                with call.guard(key):
                    assert files is not None, "it is a writer"
                    parts = share.views(key, piece.box)
                    is_one = len(parts) == 1
                    data = (
                        host_bytes(parts[0].into, piece.dtype)
                        if is_one
                        else host_bytes.of_parts(piece, parts)
                    )
                    files.write_box(key, piece.box, data)
                call.tally.meter.add(piece.nbytes)
                left -= piece.nbytes
                if call.problems or left <= 0:
                    break
            call.agree_on_outcome()
