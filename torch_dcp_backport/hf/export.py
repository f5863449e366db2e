"""Export of the tensors that ranks hold, to safetensors files or to a dict on the first rank.

Must never hold more than two buffers of the model at once (but for the dict).
"""

from __future__ import annotations

import functools
import numbers
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Optional, Union

import torch

from torch_dcp_backport.hf.blocks import Share, Window, windows, within
from torch_dcp_backport.hf.companions import companions_of, with_dtype
from torch_dcp_backport.hf.files import Draft, discarding
from torch_dcp_backport.hf.format import is_plain, nbytes_of
from torch_dcp_backport.hf.moving import bring_window, first_rank, settle
from torch_dcp_backport.hf.sharing import Deal, sharing, write_own
from torch_dcp_backport.hf.source import CONFIG
from torch_dcp_backport.hf.writing import Files
from torch_dcp_backport.transfer import Box, Call, Problem, TensorInfo
from torch_dcp_backport.transfer.chunks import Piece
from torch_dcp_backport.transfer.layout import whole
from torch_dcp_backport.transfer.memories import Memory
from torch_dcp_backport.transfer.plan import Agreement
from torch_dcp_backport.transfer.staging import part_of

#: Bytes of a window, and of each of the buffers on the first rank.
BUFFER_BYTES = 32 * 2**20
BUFFERS = 2
DONE = "the folder may have the new model already"
HALF = "the folder has the new weights, and may have no config.json"


@dataclass(frozen=True)
class Export:
    """Options of an export."""

    #: The dtype that floating-point parameters are cast to; None keeps theirs.
    dtype: Optional[torch.dtype] = None
    #: The most bytes of tensors in a file, unless a single tensor has more.
    file_bytes: int = 5 * 10**9
    #: Whether a model that the folder holds already is replaced.
    overwrite: bool = False


@dataclass(frozen=True)
class Saved:
    """The result of an export; the same on every rank but for `removed`."""

    keys: tuple[str, ...]
    #: Bytes of tensors.
    nbytes: int
    #: On the first rank: files of an older model that are gone.
    removed: tuple[str, ...] = ()


#: Fills the memory of a window's boxes on the first rank; called on every rank.
Bring = Callable[[Window, Memory], None]


class Target(NamedTuple):
    """The folder of an export, and its options."""

    folder: Path
    how: Export
    #: Small files that go with it (config.json, a tokenizer's); the first rank's count.
    companions: Mapping[str, bytes]


class Buffer:
    """Bytes on the host that hold a window, and their way to the files."""

    def __init__(self, nbytes: int) -> None:
        self.store = torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def view(self, window: Window, tensors: Mapping[str, TensorInfo], key: str, box: Box) -> torch.Tensor:
        piece = within(window[key], box)
        data = self.bytes_of(piece)
        return part_of(data.view(tensors[key].dtype).view(piece.box.size), piece.box, box)

    def bytes_of(self, piece: Piece) -> torch.Tensor:
        return self.store[piece.start : piece.start + piece.nbytes]

    def write(self, window: Window, files: Files) -> None:
        data = memoryview(self.store.numpy().data)
        for key, pieces in window.items():
            for piece in pieces:
                files.write_box(key, piece.box, data[piece.start : piece.start + piece.nbytes])


@torch.no_grad()
def export(call: Call, agreement: Agreement, share: Share, target: Target) -> Saved:
    """Write the tensors that ranks hold into a folder; as `write_files`.

    Ranks on the first rank's machine that see its files write their own blocks themselves; blocks of other
    ranks travel to the first rank.
    """

    def bring(window: Window, write: Memory) -> None:
        bring_window(call, agreement, share, window, write)

    def fill(draft: Optional[Draft]) -> None:
        with sharing(call, draft, share.tensors, target.how.file_bytes) as (files, writers):
            deal = Deal(share, writers)
            write_own(call, files, share, deal)
            _stream(call, share.tensors, bring, draft, deal.rest)
            if files is not None:
                place = writers.index(call.rank)
                with call.guard(str(target.folder)):
                    # Each writer waits for its share of the files, at the same time as the others.
                    files.sync(place, len(writers))

    saved = published(call, share.tensors, fill, target)
    call.tally.tensors = len(share.parts)
    call.tally.close()
    return saved


def write_files(call: Call, tensors: Mapping[str, TensorInfo], bring: Bring, target: Target) -> Saved:
    """Write tensors into a folder, from the first rank.

    Disk and network work at the same time: while a buffer is written, the next is filled.
    """
    return published(call, tensors, lambda draft: _stream(call, tensors, bring, draft), target)


def published(
    call: Call, tensors: Mapping[str, TensorInfo], fill: Callable[[Optional[Draft]], None], target: Target
) -> Saved:
    """Make the files of an export, let all ranks fill them, and publish all of them or none.

    config.json gets the dtype of the weights that are written.

    Args:
        fill: called on every rank, with the draft on the first rank.

    Raises:
        RuntimeError: the folder holds a model, there is no room, a write failed, ...; on every rank. The
            folder is as it was.
        TransferError: a rank is gone, or the group's timeout is over: the folder is as it was, or has the new
            model already. Or a rename failed after that of the weights. The error says which.
    """
    draft: Optional[Draft] = None
    folder, how, companions = target
    if call.rank == first_rank(call) and not call.problems:
        with call.guard(CONFIG):
            config = with_dtype(companions[CONFIG], (info.dtype for info in tensors.values()))
            with call.guard(str(folder)):
                draft = Draft(folder, how.overwrite, config)
                draft.reserve(tensors, how.file_bytes)
                for name, content in {**companions, CONFIG: config}.items():
                    draft.add(name, content)
    removed: list[str] = []
    with discarding(draft):
        settle(call)
        fill(draft)
        settle(call)
        if draft is not None:
            with call.guard(str(folder)):
                draft.sync()
        settle(call)
        late: list[Problem] = []
        if draft is not None:
            with call.guard(str(folder)):
                draft.switch()
            if not call.problems:
                # Before the ranks meet: a rank that is gone must not leave an export half published.
                with call.guard(str(folder)):
                    removed = draft.finish()
                late, call.problems[:] = call.problems[:], []
        settle(call, lost=DONE)
        call.problems += late
        settle(call, HALF)
    return Saved(tuple(tensors), sum(map(nbytes_of, tensors.values())), tuple(removed))


def _stream(
    call: Call,
    tensors: Mapping[str, TensorInfo],
    bring: Bring,
    draft: Optional[Draft],
    boxes: Optional[Mapping[str, Sequence[Box]]] = None,
) -> None:
    """Bring tensors to the first rank, and write them there; all of them, or only `boxes`."""
    if boxes is not None and not boxes:
        return
    free: deque[Buffer] = deque()
    writing: deque[tuple[Buffer, Future[None]]] = deque()
    if draft is not None:
        with call.room_for("buffers of the files"):
            free.extend(Buffer(BUFFER_BYTES) for _ in range(BUFFERS))
    with ThreadPoolExecutor(1) as disk:
        for window in windows(tensors, BUFFER_BYTES, boxes):
            if draft is not None and not call.problems:
                with call.guard("the files"):
                    if not free:
                        _take_back(free, writing)
            settle(call)
            # The buffer that is filled next, on the first rank: other ranks have none.
            buffer = free.popleft() if draft is not None else None
            write = functools.partial(buffer.view, window, tensors) if buffer is not None else nowhere
            bring(window, write)
            if buffer is not None and draft is not None:
                writing.append((buffer, disk.submit(buffer.write, window, draft.files)))
        with call.guard("the files"):
            while writing:
                _take_back(free, writing)


def _take_back(free: deque[Buffer], writing: deque[tuple[Buffer, Future[None]]]) -> None:
    buffer, written = writing.popleft()
    free.append(buffer)
    written.result()


def nowhere(key: str, box: Box) -> torch.Tensor:
    raise AssertionError(f"{key}: no rank but the first receives")


@torch.no_grad()
def collect(call: Call, agreement: Agreement, share: Share) -> dict[str, torch.Tensor]:
    """Return full tensors on the host of the first rank; an empty dict on every other rank.

    Raises:
        RuntimeError: the first rank has no room for them; on every rank.
        TransferError: a rank is gone, or the group's timeout is over.
    """
    tensors: dict[str, torch.Tensor] = {}
    if call.rank == first_rank(call):
        with call.room_for("whole tensors"):
            tensors = {
                key: torch.empty(info.shape, dtype=info.dtype, device="cpu")
                for key, info in share.tensors.items()
            }
    settle(call)

    def write(key: str, box: Box) -> torch.Tensor:
        return part_of(tensors[key], whole(share.tensors[key].shape), box)

    for window in windows(share.tensors, BUFFER_BYTES * BUFFERS):
        bring_window(call, agreement, share, window, write)
    call.tally.tensors = len(share.parts)
    call.tally.close()
    return tensors


def target_of(call: Call, folder: Union[str, Path], like: Any, how: Optional[Export]) -> Target:
    """Return the target of a save; small files on the first rank alone. Faults are problems of the call."""
    path, options, companions = Path(), Export(), dict[str, bytes]()
    with call.guard("folder"):
        path = Path(folder)
    with call.guard("how"):
        options = checked(how)
    if call.rank == first_rank(call):
        with call.guard(f"like={like}" if isinstance(like, (str, Path)) else "like"):
            companions = companions_of(like)
    return Target(path, options, companions)


def checked(how: Optional[Export]) -> Export:
    """Return the caller's options, or the default ones for None.

    Raises:
        TypeError: it is no `Export`, its dtype is none of torch, or the size of files no number.
        ValueError: weights cannot be cast to its dtype.
    """
    how = Export() if how is None else how
    if not isinstance(how, Export):
        raise TypeError(f"a {type(how).__name__}, where an Export is needed")
    if not isinstance(how.file_bytes, numbers.Real) or how.file_bytes < 0:
        raise TypeError(f"file_bytes={how.file_bytes!r} is no number of bytes")
    if how.dtype is None:
        return how
    if not isinstance(how.dtype, torch.dtype):
        raise TypeError(f"dtype={how.dtype!r} is no torch.dtype")
    if not is_plain(how.dtype):
        raise ValueError(f"dtype={how.dtype}: weights are cast to floating-point numbers of 2 bytes or more")
    return how


def exported(tensors: Mapping[str, Sequence[TensorInfo]], how: Export) -> dict[str, TensorInfo]:
    """Return the shapes and dtypes that an export writes, from those that the holders of tensors have.

    Raises:
        ValueError: the holders of a tensor have different dtypes, and the caller asked for none.
    """
    written = {}
    for key, infos in tensors.items():
        dtypes = sorted({str(info.dtype) for info in infos})
        if len(dtypes) > 1 and how.dtype is None:
            raise ValueError(f"{key} is held as {' and '.join(dtypes)}: pass a dtype")
        shape, dtype = infos[0]
        written[key] = TensorInfo(shape, how.dtype if how.dtype is not None and is_plain(dtype) else dtype)
    return written
