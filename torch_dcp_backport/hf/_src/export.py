"""Export of the tensors that ranks hold, to safetensors files or to a dict on the first rank.

Must never hold more than two buffers of the model at once (but for the dict).
"""

from __future__ import annotations

import functools
import json
import logging
import numbers
import os
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Optional, Union

import torch

from torch_dcp_backport.hf._src.apart import Cutout
from torch_dcp_backport.hf._src.blocks import Share, Window, windows, within
from torch_dcp_backport.hf._src.checking import ClassFacts, examine
from torch_dcp_backport.hf._src.companions import CHOSEN, OF_QUANTISED, companions_of, with_dtype
from torch_dcp_backport.hf._src.files import MODEL_FILES, ExportDraft, FileKind
from torch_dcp_backport.hf._src.format import NO_SHAPES, is_plain, nbytes_of
from torch_dcp_backport.hf._src.moving import bring_to_all, bring_window
from torch_dcp_backport.hf._src.sharing import WritePlan, sharing, write_own
from torch_dcp_backport.hf._src.source import CONFIG
from torch_dcp_backport.hf._src.writing import Files
from torch_dcp_backport.publish.drafts import discarding
from torch_dcp_backport.transfer import (
    Agreement,
    Box,
    Call,
    Memory,
    Piece,
    Problem,
    TensorInfo,
    part_of,
    whole,
)

logger = logging.getLogger("torch_dcp_backport.hf")
#: Bytes of a window, and of each of the buffers on the first rank.
BUFFER_BYTES = 32 * 2**20
BUFFERS = 2
#: Keys that a warning names.
SHOWN = 10
NOTHING_NEW = "the folder is as it was"
DONE = "the folder may have the new model already"
HALF = "the folder has the new weights, and may have no config.json"


@dataclass(frozen=True)
class Export:
    """Options of an export.

    Args:
        dtype: the dtype that floating-point parameters are cast to; None keeps theirs. Buffers, and tensors
            that the model's class keeps in fp32, are not cast.
        file_bytes: the most bytes of tensors in a file, unless a single tensor has more.
        overwrite: whether a model that the folder holds already is replaced.
        refuse_infinite: whether an export is refused if a value in the files is infinite or no number, as
            70000 is in float16. Else an export with a `dtype` warns of it, and names the tensors.

    Example:
        >>> import torch
        >>> from torch_dcp_backport import hf
        >>> hf.Export(dtype=torch.bfloat16, overwrite=True)
        Export(dtype=torch.bfloat16, file_bytes=5000000000, overwrite=True, refuse_infinite=False)
    """

    dtype: Optional[torch.dtype] = None
    file_bytes: int = 5 * 10**9
    overwrite: bool = False
    refuse_infinite: bool = False

    @property
    def is_watching(self) -> bool:
        """Whether the values that are written are looked at."""
        return self.dtype is not None or self.refuse_infinite


@dataclass(frozen=True)
class Saved:
    """The result of an export; the same on every rank but for `removed`.

    Args:
        keys: the HF keys that were written, in the order of the files.
        nbytes: bytes of tensors.
        removed: on the first rank, files of an older model that are gone; empty on every other rank.
    """

    keys: tuple[str, ...]
    nbytes: int
    removed: tuple[str, ...] = ()


#: Fills the memory of a window's boxes on the first rank; called on every rank.
Bring = Callable[[Window, Memory], None]


class ExportTarget(NamedTuple):
    """The folder of an export, and its options."""

    folder: Path
    how: Export
    #: Small files that go with it (config.json, a tokenizer's); the first rank's count.
    companions: Mapping[str, bytes]
    #: The folder that they are from; None where it is a configuration.
    origin: Optional[Path] = None
    kind: FileKind = MODEL_FILES
    #: Whether `examined` compared the tensors with the class in config.json.
    is_examined: bool = False
    #: HF key -> its shape in the files, where it moves in another view; the same on every rank.
    shapes: Mapping[str, tuple[int, ...]] = NO_SHAPES

    @property
    def is_own(self) -> bool:
        """Whether the small files are the folder's own."""
        return self.origin is not None and os.path.realpath(self.origin) == os.path.realpath(self.folder)


class WindowBuffer:
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
def export(call: Call, agreement: Agreement, share: Share, target: ExportTarget) -> Saved:
    """Write the tensors that ranks hold into a folder. Collective.

    `save_state_dict` does this for a state dict; call it directly where you know the blocks of each rank.
    Ranks on the first rank's machine that see its files write their own blocks themselves; blocks of other
    ranks travel to the first rank.

    Args:
        call: the call under which all ranks raise the same problems.
        agreement: the result of the ranks' agreement in this call.
        share: the tensors, the blocks of all ranks, and this rank's memory.
        target: the folder, its options and the small files that go with it; its names have been examined.

    Returns:
        The keys that were written, and the bytes of their tensors.

    Raises:
        RuntimeError: the folder holds a model, there is no room, a write failed, ...; on every rank. The
            folder is as it was.
        TransferError: a rank is gone, or the group's timeout is over; the error says whether the folder is as
            it was.
    """

    def bring(window: Window, write: Memory) -> None:
        bring_window(call, agreement, share, window, write)

    def fill(draft: Optional[ExportDraft]) -> set[str]:
        with sharing(call, draft, share.tensors, target.how.file_bytes, target.shapes) as (files, writers):
            if files is not None:
                files.is_watching = target.how.is_watching
            plan = WritePlan(share, writers)
            write_own(call, files, share, plan)
            _stream(call, share.tensors, bring, draft, plan.rest)
            if files is not None:
                place = writers.index(call.rank)
                with call.guard(str(target.folder)):
                    # Each writer waits for its share of the files, at the same time as the others.
                    files.sync(place, len(writers))
            return set() if files is None else files.not_finite

    saved = published(call, share.tensors, fill, target)
    call.tally.tensors = len(share.parts)
    call.tally.close()
    return saved


def write_files(call: Call, tensors: Mapping[str, TensorInfo], bring: Bring, target: ExportTarget) -> Saved:
    """Write tensors into a folder, from the first rank.

    Disk and network work at the same time: while a buffer is written, the next is filled.
    """

    def fill(draft: Optional[ExportDraft]) -> set[str]:
        if draft is not None:
            draft.files.is_watching = target.how.is_watching
        _stream(call, tensors, bring, draft)
        return set() if draft is None else draft.files.not_finite

    return published(call, tensors, fill, target)


def published(
    call: Call,
    tensors: Mapping[str, TensorInfo],
    fill: Callable[[Optional[ExportDraft]], Collection[str]],
    target: ExportTarget,
) -> Saved:
    """Make the files of an export, let all ranks fill them, and publish all of them or none.

    Args:
        fill: called on every rank, with the draft on the first rank; returns HF keys of tensors that this
            rank has written with values that are not finite.

    Raises:
        RuntimeError: the folder holds a model, there is no room, a write failed, ...; on every rank. The
            folder is as it was.
        TransferError: a rank is gone, or the group's timeout is over: the folder is as it was, or has the new
            model already. Or a rename failed after that of the weights. The error says which.
    """
    draft: Optional[ExportDraft] = None
    folder, how = target.folder, target.how
    if call.is_first and not call.problems:
        with call.guard(str(folder)):
            assert target.is_examined, "no export without a look at its names"
            config = target.companions.get(CONFIG, b"")
            draft = ExportDraft(folder, how.overwrite, config, kind=target.kind, keeps_others=target.is_own)
            draft.reserve(tensors, how.file_bytes, target.shapes)
            for name, content in target.companions.items():
                draft.add(name, content)
            draft.spare()
    removed: list[str] = []
    with discarding(draft):
        call.agree_on_outcome()
        not_finite = fill(draft)
        call.agree_on_outcome()
        if how.is_watching:
            _judge_values(call, not_finite, how)
        if draft is not None:
            with call.guard(str(folder)):
                draft.sync()
        call.agree_on_outcome()
        late: list[Problem] = []
        if draft is not None:
            with call.guard(str(folder)):
                draft.switch()
            if not call.problems:
                # Before the ranks meet: a rank that is gone must not leave an export half published.
                with call.guard(str(folder)):
                    removed = draft.finish()
                late, call.problems[:] = call.problems[:], []
        call.agree_on_outcome(lost=DONE)
        call.problems += late
        call.agree_on_outcome(HALF)
    return Saved(tuple(tensors), sum(map(nbytes_of, tensors.values())), tuple(removed))


def _judge_values(call: Call, not_finite: Collection[str], how: Export) -> None:
    """Refuse an export with values that are not finite on any rank, or warn of it. Collective."""
    by_rank = call.all_gather_object(
        "looking at what was written", sorted(not_finite) or None, so_far=NOTHING_NEW
    )
    keys = sorted({key for own in by_rank.values() for key in own or ()})
    if not keys:
        return
    what = f"{len(keys)} tensor(s) with values that are infinite or no numbers"
    if how.dtype is not None:
        what += f" in {how.dtype}"
    named = ", ".join(keys[:SHOWN]) + (", ..." if len(keys) > SHOWN else "")
    if how.refuse_infinite:
        if call.is_first:
            call.problems.append(Problem(what, named))
        call.agree_on_outcome()
    elif call.is_first:
        logger.warning("the export has %s: %s", what, named)


def _stream(
    call: Call,
    tensors: Mapping[str, TensorInfo],
    bring: Bring,
    draft: Optional[ExportDraft],
    boxes: Optional[Mapping[str, Sequence[Box]]] = None,
) -> None:
    """Bring tensors to the first rank, and write them there; all of them, or only `boxes`."""
    if boxes is not None and not boxes:
        return
    free: deque[WindowBuffer] = deque()
    writing: deque[tuple[WindowBuffer, Future[None]]] = deque()
    if draft is not None:
        with call.room_for("buffers of the files"):
            free.extend(WindowBuffer(BUFFER_BYTES) for _ in range(BUFFERS))
    with ThreadPoolExecutor(1) as disk:
        for window in windows(tensors, BUFFER_BYTES, boxes):
            if draft is not None and not call.problems:
                with call.guard("the files"):
                    if not free:
                        _take_back(free, writing)
            call.agree_on_outcome()
            # The buffer that is filled next, on the first rank: other ranks have none.
            buffer = free.popleft() if draft is not None else None
            write = functools.partial(buffer.view, window, tensors) if buffer is not None else nowhere
            bring(window, write)
            if buffer is not None and draft is not None:
                writing.append((buffer, disk.submit(buffer.write, window, draft.files)))
        with call.guard("the files"):
            while writing:
                _take_back(free, writing)


def _take_back(free: deque[WindowBuffer], writing: deque[tuple[WindowBuffer, Future[None]]]) -> None:
    buffer, written = writing.popleft()
    free.append(buffer)
    written.result()


def nowhere(key: str, box: Box) -> torch.Tensor:
    raise AssertionError(f"{key}: no rank but the first receives")


@torch.no_grad()
def collect(call: Call, agreement: Agreement, share: Share) -> dict[str, torch.Tensor]:
    """Return full tensors on the host of the first rank; an empty dict on every other rank. Collective.

    Args:
        call: the call under which all ranks raise the same problems.
        agreement: the result of the ranks' agreement in this call.
        share: the tensors, the blocks of all ranks, and this rank's memory.

    Returns:
        HF key -> full tensor on the CPU, of the dtype in `share.tensors`.

    Raises:
        RuntimeError: the first rank has no room for them; on every rank.
        TransferError: a rank is gone, or the group's timeout is over.
    """
    tensors = _gathered(call, agreement, share, bring_window, call.is_first)
    call.tally.tensors = len(share.parts)
    call.tally.close()
    return tensors


@torch.no_grad()
def collect_everywhere(call: Call, agreement: Agreement, share: Share) -> dict[str, torch.Tensor]:
    """Return full tensors on the host of every rank.

    Raises:
        RuntimeError: a rank has no room for them; on every rank.
        TransferError: a rank is gone, or the group's timeout is over.
    """
    return _gathered(call, agreement, share, bring_to_all, True)


def _gathered(
    call: Call, agreement: Agreement, share: Share, bring: Callable[..., None], receives: bool
) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    if receives:
        with call.room_for("whole tensors"):
            tensors = {
                key: torch.empty(info.shape, dtype=info.dtype, device="cpu")
                for key, info in share.tensors.items()
            }
    call.agree_on_outcome()

    def write(key: str, box: Box) -> torch.Tensor:
        return part_of(tensors[key], whole(share.tensors[key].shape), box)

    for window in windows(share.tensors, BUFFER_BYTES * BUFFERS):
        bring(call, agreement, share, window, write)
    return tensors


def target_of(call: Call, folder: Union[str, Path], like: Any, how: Optional[Export]) -> ExportTarget:
    """Return the target of a save; small files on the first rank alone. Faults are problems of the call."""
    path, options, companions = Path(), Export(), dict[str, bytes]()
    origin = Path(like) if isinstance(like, (str, Path)) else None
    with call.guard("folder"):
        path = Path(folder)
    with call.guard("how"):
        options = checked(how)
    if call.is_first:
        with call.guard(f"like={like}" if origin is not None else "like"):
            companions = companions_of(like)
    return ExportTarget(path, options, companions, origin)


def not_one(first: str, second: str) -> Problem:
    """Return the problem of two different tensors, of which a reader would take one for both."""
    what = (
        "two tensors, where config.json, or its class by default, says that they are one (if not, "
        "config.json has to have tie_word_embeddings false)"
    )
    return Problem(what, f"{first} and {second}", "other values", "the same")


class Examined(NamedTuple):
    """An export whose tensors are those of the class in its config.json."""

    target: ExportTarget
    #: HF key -> the shape and dtype that are written; the same on every rank.
    tensors: dict[str, TensorInfo]
    #: Names that are one tensor in the class: the same on every rank.
    tied: tuple[tuple[str, ...], ...]
    #: HF key of a tensor -> its key in the files, where these differ: as `save_pretrained` names it.
    renamed: Mapping[str, str]
    #: HF key in the files -> its place in a tensor that is held, for tensors that are written in parts.
    cuts: Mapping[str, Cutout]

    #: As `tensors`, with what is held in the place of its parts.
    held: dict[str, TensorInfo]


def examined(
    call: Call,
    target: ExportTarget,
    held: Mapping[str, Sequence[TensorInfo]],
    aliases: Optional[Mapping[str, str]] = None,
    is_named: bool = False,
) -> Examined:
    """Compare the tensors of an export with the class in its config.json. Collective.

    config.json gets the class and the dtype of the weights, and is without what the weights are not.

    Args:
        held: HF key -> shape and dtypes of its holders; the same on every rank.
        aliases: another name of a tensor -> its HF key.
        is_named: whether the keys are those of files. Else keys of the class become those of files.

    Raises:
        RuntimeError: they are not the tensors of the class, or the first rank has another problem; on every
            rank. Problems of other ranks are left to the next agreement.
    """
    facts = ClassFacts({}, [])
    dtype = target.how.dtype
    if call.is_first:
        with call.guard(CONFIG):
            if target.companions:
                config = json.loads(target.companions[CONFIG])
                infos = {key: rows[0] for key, rows in held.items()}
                infos.update((key, infos[key]._replace(shape=size)) for key, size in target.shapes.items())
                verdict = examine(config, infos, dtype, target.origin, aliases or {}, is_named)
                call.problems += verdict.problems
                # The first rank alone writes config.json, and its problems travel on their own.
                facts = verdict._replace(config={}, problems=[])
                shown = exported({key: rows[:1] for key, rows in held.items()}, target.how, verdict.kept)
                dtypes = [info.dtype for key, info in shown.items() if key not in verdict.kept]
                changed = {name: value for name, value in verdict.config.items() if name != CHOSEN}
                target = with_config(target, config, with_dtype(changed, dtypes))
                if not verdict.is_quantised:
                    target = without_quantisation(target)
    facts = call.broadcast_object("comparing with the class", facts)
    tensors: dict[str, TensorInfo] = {}
    renamed, apart = facts.renamed, facts.apart
    with call.guard():
        tensors = exported(held, target.how, facts.kept)
        tensors = {renamed.get(key, key): info for key, info in tensors.items()}
    written: dict[str, TensorInfo] = {}
    for key, info in tensors.items():
        if key in apart:
            written.update((name, TensorInfo(cut.shape, info.dtype)) for name, cut in apart[key].items())
        else:
            written[key] = info
    cuts = {name: cut for parts in apart.values() for name, cut in parts.items()}
    tied = tuple(tuple(renamed.get(key, key) for key in keys) for keys in facts.tied)
    return Examined(target._replace(is_examined=True), written, tied, renamed, cuts, tensors)


def with_config(target: ExportTarget, before: Mapping[str, Any], config: Mapping[str, Any]) -> ExportTarget:
    """Return a target with another config.json; where nothing changes, its bytes stay as they are."""
    companions = dict(target.companions)
    if config != before:
        companions[CONFIG] = json.dumps(config, indent=2).encode()
    return target._replace(companions=companions)


def without_quantisation(target: ExportTarget) -> ExportTarget:
    """Return a target without the small files that say how weights are quantised."""
    names = [name for name in target.companions if not OF_QUANTISED.fullmatch(name)]
    return target._replace(companions={name: target.companions[name] for name in names})


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


def exported(
    tensors: Mapping[str, Sequence[TensorInfo]], how: Export, kept: Collection[str] = ()
) -> dict[str, TensorInfo]:
    """Return the shapes and dtypes that an export writes, from those that the holders of tensors have.

    Args:
        kept: the tensors that are not cast.

    Raises:
        ValueError: the holders of a tensor have different dtypes, and the caller asked for none.
    """
    written = {}
    for key, infos in tensors.items():
        dtypes = sorted({str(info.dtype) for info in infos})
        wanted = None if key in kept else how.dtype
        if len(dtypes) > 1 and wanted is None:
            raise ValueError(f"{key} is held as {' and '.join(dtypes)}: pass a dtype")
        shape, dtype = infos[0]
        written[key] = TensorInfo(shape, wanted if wanted is not None and is_plain(dtype) else dtype)
    return written
