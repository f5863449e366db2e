"""The ranks that see the files of a model, and the check that they see the same files.

Decides how a load goes; must never read a tensor.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple, Optional, Union

from torch_dcp_backport.hf._src.source import Description, Folder, Given, Source, marks_of, source_of
from torch_dcp_backport.transfer import Attempt, Call, Problem, TensorInfo, Terms, spell

WAYS = ("auto", "shared", "rank0")
CONFIG = ("config.json",)


def opened_together(
    call: Call, asked: Union[str, Path, Source, Attempt[Any]], files: str = "auto"
) -> Attempt[Source]:
    """Return this rank's source of what a caller passes. Collective.

    The first rank alone reads the headers of a folder's files, of which there may be thousands on a disk that
    all ranks share. Ranks that see the same folder get them from it; a rank that sees another, such as a copy
    on its own machine, reads that. `look` comes next: it finds whether all see the same files.

    Args:
        call: the call under which all ranks raise the same problems.
        asked: a folder or a source, as `hf.load_state_dict` takes it; or the attempt to get it.
        files: as of `look`.

    Raises:
        TransferError: a rank is gone, or the group's timeout is over.
    """
    if not call.groups:
        return call.attempt(source_of, asked)
    own: Attempt[Source] = Attempt()
    seen: dict[str, Any] = {}
    if call.is_first:
        own = call.attempt(source_of, asked)
        if own.error is None and isinstance(own.value, Folder):
            with call.guard():
                seen = {"folder": own.value.description()}
    # The problems of all ranks are raised together, when all have looked.
    problems, call.problems = call.problems, []
    try:
        seen = call.broadcast_object("looking at the files", seen)
    finally:
        call.problems = problems
    if call.is_first:
        return own
    return call.attempt(source_like, asked, seen.get("folder"), files == "rank0")


def source_like(asked: Any, described: Optional[Description], is_apart: bool) -> Source:
    """Return a rank's source, from what the first rank has read where both see the same folder.

    Args:
        asked: of this rank.
        described: what the first rank has read; None where that is no folder, or has problems.
        is_apart: whether the first rank reads for all.
    """
    if isinstance(asked, (str, os.PathLike)):
        path = Path(os.fspath(asked))
        if is_apart:
            return Given({}, {}, "not asked")
        if described is not None and marks_of(path) == described.marks:
            return Folder.described(path, described)
    return source_of(asked)


class Visibility(NamedTuple):
    """The model to load; `tensors` and `config` are the same on every rank.

    Args:
        source: the source that this rank reads; None where the first rank reads for it.
        is_shared: whether every rank reads for itself.
        tensors: HF key -> shape and dtype.
        config: the model's config.json.
    """

    source: Optional[Source]
    is_shared: bool
    tensors: dict[str, TensorInfo]
    config: dict[str, Any]


def look(call: Call, source: Attempt[Source], files: str = "auto") -> Visibility:
    """Find out which ranks see the source, and send to the others what the first rank sees. Collective.

    Args:
        call: the call under which all ranks raise the same problems.
        source: the attempt to open this rank's source.
        files: "shared": every rank must see it; "rank0": only the first rank looks; "auto": every rank must
            see it, unless the first is alone with it.

    Returns:
        The tensors and the configuration, the same on every rank, and whether this rank reads for itself.

    Raises:
        RuntimeError: a file is torn, ranks see different files or ask for different ways, ...; on every rank.
    """
    with call.guard():
        if files not in WAYS:
            raise ValueError(f"files={files!r}: expected one of {', '.join(map(repr, WAYS))}")
    is_first, only_first = call.is_first, files == "rank0"
    digest = absent = ""
    if source.error is None and (is_first or not only_first):
        mine = source.value
        call.problems += mine.problems
        absent = mine.absent
        with call.guard():
            digest = "" if absent or mine.problems else mine.digest()
    elif not call.problems:
        absent = "not asked"
    note = digest, absent
    agreement = call.agree_on_wants(
        terms=Terms(condition=" ".join(note), note=note, common={"files": repr(files)})
    )
    seen = [(table.ranks, *table.note) for table in agreement.tables]
    digests = {digest for _, digest, _ in seen}
    is_shared = len(digests) == 1 and "" not in digests and not only_first
    by_first = next(digest for ranks, digest, _ in seen if call.ranks[0] in ranks)
    alone = all(not digest or call.ranks[0] in ranks for ranks, digest, _ in seen)
    if not is_shared and not (by_first and files != "shared" and (alone or only_first)):
        got = "; ".join(f"{spell(ranks)}: {digest[:8] or absent}" for ranks, digest, absent in seen)
        expected = "the same files on every rank" + (
            "" if files == "shared" else ", or on the first rank alone"
        )
        what = "no model here" if digests == {""} else "the ranks see different files"
        expected = "a folder with config.json and safetensors files" if digests == {""} else expected
        call.problems.append(Problem(what, got=got, expected=expected))
    call.agree_on_outcome()
    if is_shared:
        return Visibility(source.value, True, source.value.tensors, source.value.config)
    mine = source.value
    inventory = call.publish({**mine.tensors, CONFIG: mine.config} if is_first else None)
    config = inventory.pop(CONFIG)
    return Visibility(mine if is_first else None, False, inventory, config)
