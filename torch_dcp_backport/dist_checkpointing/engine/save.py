"""A sharded save: rows to the first rank, shares back, files, and the commit.

Collective; the caller's tensors are only read.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import pickle
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

import torch

from torch_dcp_backport.dist_checkpointing.core import CheckpointingException
from torch_dcp_backport.dist_checkpointing.engine import (
    commit,
    common,
    files,
    plans,
    replicas,
    values,
    writer,
)
from torch_dcp_backport.dist_checkpointing.engine.assign import Item, Share, shares_of
from torch_dcp_backport.dist_checkpointing.engine.claims import Claim
from torch_dcp_backport.dist_checkpointing.engine.meeting import (
    Findings,
    Refusal,
    Topic,
    consult,
    guard,
    ranks_of,
)
from torch_dcp_backport.dist_checkpointing.engine.table import (
    Table,
    cells_of,
    findings_of,
    spelled,
    unwritable,
)
from torch_dcp_backport.dist_checkpointing.engine.writer import Output, Work
from torch_dcp_backport.transfer import Box, Call, Problem, problem_of
from torch_dcp_backport.transfer.once import warn_once

logger = logging.getLogger("torch_dcp_backport.dist_checkpointing")

COMPARING, PLANNING = Topic("comparing plans"), Topic("planning")
COMMON = Topic("comparing the common state")
CLEARING = Topic("removing the old marker", "an older checkpoint in the folder may be gone")
REPLICAS = CLEARING._replace(doing="comparing replicas")
COMMITTING = Topic(
    "committing", "the folder holds no checkpoint now", "whether the folder holds a checkpoint shows a load"
)


class Saving(NamedTuple):
    """A rank's part of a save."""

    folder: Path
    table: Table = Table([])
    #: By row of the table; in the shape of its box.
    data: Sequence[torch.Tensor] = ()
    objects: Sequence[Any] = ()
    #: On the first rank alone.
    common: Any = None
    #: Whether the tables of all ranks are checked together.
    is_checked: bool = True
    #: Whether any holder of a box may write it.
    is_balanced: bool = True
    #: Whether a common state or an object that a load without `trust` refuses is refused here.
    must_load: bool = False
    #: Whether the SHA-256 of every file is saved, too.
    is_hashed: bool = False
    #: Called with this rank's output, by the thread that wrote it.
    written: Callable[[Output], None] = lambda output: None
    #: The values of the common state that are compared; None where they are not.
    compared: Optional[common.Values] = None
    #: Whether ranks may not have another common state than the first rank.
    strict_common: bool = False


def problems_of(saving: Saving) -> list[Problem]:
    """Return the problems that this rank knows before any rank has done anything."""
    problems = []
    if not saving.folder.is_dir():
        problems.append(Problem("no such folder (make it first)", str(saving.folder)))
    else:
        try:
            files.check_writable(saving.folder)
        except OSError as error:
            problems.append(problem_of(error))
    for row, data in zip(saving.table.tensors, saving.data):
        why = writer.why_not_readable(data)
        if why:
            problems.append(Problem("a tensor without values in memory", row.key, why))
    return problems


class Planned(NamedTuple):
    """A save that can be written: the old marker is gone, and every rank knows its share."""

    folder: Path
    claim: Claim
    share: Share
    #: This rank's boxes, and the memory that they are in.
    works: list[Work]
    #: This rank's objects, as they are written.
    objects: list[bytes]
    #: Of the first rank, as is the next field.
    common: bytes
    plan: plans.Plan
    path: Path
    written: Callable[[Output], None]
    is_hashed: bool

    def nothing(self) -> Output:
        """Return the output of a rank that wrote nothing."""
        return Output(self.path.name, 0, [], [])

    @property
    def nbytes(self) -> int:
        """The bytes of this rank's tensors."""
        return sum(work.form.nbytes for work in self.works)

    def write(self, moved: Callable[[int], None]) -> Output:
        """Write this rank's share; no other rank takes part."""
        self.claim.begin()
        with torch.no_grad():
            output = writer.write(self.path, self.works, self.objects, moved, self.is_hashed)
        self.written(output)
        return output

    def discard(self) -> None:
        """Remove the file of `write`, where it will never be a part of a checkpoint."""
        with contextlib.suppress(OSError):
            if self.claim.is_held:
                files.remove([self.path])


def save(call: Call, saving: Saving) -> Output:
    """Save the parts of all ranks.

    Returns:
        This rank's output.

    Raises:
        CheckpointingException: the same on every rank. Until the first rank has removed the old marker
            nothing was touched; from then on the folder holds no checkpoint.
    """
    planned = plan_together(call, saving)
    call.tally.meter.expect(lambda: planned.nbytes)
    output = planned.nothing()
    if not call.problems:
        with call.tally.phase("writing"), guard(call, planned.path.name):
            output = planned.write(call.tally.meter.add)
    return commit_together(call, planned, output)


def plan_together(call: Call, saving: Saving) -> Planned:
    """Agree on each rank's share, and make the folder no checkpoint.

    A problem of this rank that came up after that is in the call, for the next consultation.

    Raises:
        CheckpointingException: the same on every rank.
    """
    claim = Claim(saving.folder)
    with guard(call):
        call.problems += problems_of(saving)
        claim.take()
    objects: dict[int, bytes] = {}
    for number, value in enumerate(saving.objects):
        entry = saving.table.objects[number]
        if entry.is_main:
            with guard(call, entry.unique_key):
                # A list, as Megatron has it: of the values that a rank has under this key.
                objects[number] = values.dumps([value])
                check_trust(objects[number], saving.must_load, entry.unique_key)
    state = b""
    if call.rank == ranks_of(call)[0]:
        with guard(call, "common state"):
            state = values.dumps(saving.common)
            check_trust(state, saving.must_load, "the common state")
    try:
        share, plan, shared = planned_share(call, saving)
    except Exception:
        claim.return_it()
        raise
    claim.keep()

    def clear(digests_by_rank: Mapping[int, replicas.Digests]) -> Mapping[int, Any]:
        unlike = replicas.unlike(digests_by_rank)
        if unlike:
            return dict.fromkeys(digests_by_rank, unlike)
        commit.clear(saving.folder)
        return {}

    digests: replicas.Digests = {}
    with guard(call), call.tally.phase("comparing replicas"):
        digests = replicas.digests_of(saving.data, shared)
    unlike = consult(call, digests, clear, CLEARING)
    if unlike:
        share, plan = from_first_holders(
            call, saving, [row for group in unlike for row in shared.get(group, ())]
        )
    path = saving.folder / commit.file_of(call.rank)
    works: list[Work] = []
    with guard(call, path.name):
        works = [work_of(saving, item) for item in share.tensors]
    written = [objects[number] for number in share.objects]
    return Planned(
        saving.folder,
        claim,
        share,
        works,
        written,
        state,
        plan,
        path,
        saving.written,
        saving.is_hashed,
    )


def from_first_holders(call: Call, saving: Saving, rows: Sequence[int]) -> tuple[Share, plans.Plan]:
    """Plan a save of replicas that differ, clear the folder, and warn: each tensor is its main replica's.

    Args:
        rows: this rank's rows among which some differ from another rank's.

    Returns:
        This rank's share, and a plan that is not kept.

    Raises:
        CheckpointingException: as `planned_share`.
    """
    own: replicas.RowDigests = {}
    with guard(call):
        own = replicas.row_digests(saving.data, rows)
    decided: list[plans.Description] = []

    def plan(own_by_rank: Mapping[int, tuple[Table, replicas.RowDigests]]) -> Mapping[int, Share]:
        tables = {rank: table for rank, (table, _) in own_by_rank.items()}
        cells = cells_of(tables)
        rows_by_rank = {rank: digests for rank, (_, digests) in own_by_rank.items()}
        problems = replicas.problems_of(replicas.replicas_in(cells), rows_by_rank)
        warn_of_replicas(saving.folder, problems)
        shares = shares_of(tables, cells, saving.is_balanced, fixed=problems)
        commit.clear(saving.folder)
        decided.append(plans.Description(tables, shares))
        return shares

    share = consult(call, (saving.table, own), plan, REPLICAS)
    return share, plans.Plan(b"", b"", {}, decided[0] if decided else None)


def warn_of_replicas(folder: Path, problems: Mapping[str, Problem]) -> None:
    """Warn of replicas that differ, once of the same keys."""
    # Buffers of a model differ at every save.
    keys = tuple(sorted(problems))
    texts, more = "; ".join(str(problems[key]) for key in keys[:5]), ", ..." if len(keys) > 5 else ""
    what = f"{len(keys)} tensors differ between the ranks that hold them; the first of these ranks is saved"
    warn_once(logger, f"{folder}: {what}: {texts}{more}", about=keys)


def planned_share(call: Call, saving: Saving) -> tuple[Share, plans.Plan, replicas.Shared]:
    """Return this rank's share, the plan, and what this rank shares with others: the last ones where every
    rank has what it had.

    Raises:
        CheckpointingException: the ranks together have problems; the same on every rank.
    """
    ranks, digest, known, compared = ranks_of(call), b"", None, b""
    with guard(call):
        compared = b"" if saving.compared is None else common.digest_of(saving.compared)
        digest = plans.digest_of(saving.table, call.rank, saving.is_checked, saving.is_balanced)
        known = plans.find(ranks, digest)

    def compare(own_by_rank: Mapping[int, tuple[bytes, bytes, bytes]]) -> Mapping[int, tuple[bool, bool]]:
        digests = {rank: own for rank, (own, _, _) in own_by_rank.items()}
        numbers = {number for _, number, _ in own_by_rank.values()}
        is_known = known is not None and known.digests == digests and numbers == {known.number}
        is_alike = not compared or {state for _, _, state in own_by_rank.values()} == {compared}
        return dict.fromkeys(own_by_rank, (is_known, is_alike))

    own = digest, known.number if known else b"", compared
    is_known, is_alike = consult(call, own, compare, COMPARING)
    if not is_alike:
        consult(call, saving.compared or {}, functools.partial(warn_of_differences, saving), COMMON)
    if is_known:
        assert known is not None, "every rank has it"
        share, shared = pickle.loads(known.share)
        return share, known, shared
    decided: list[plans.Description] = []
    digests: dict[int, bytes] = {}

    def plan(own_by_rank: Mapping[int, tuple[Table, bytes]]) -> Mapping[int, Any]:
        tables = {rank: table for rank, (table, _) in own_by_rank.items()}
        digests.update((rank, own) for rank, (_, own) in own_by_rank.items())
        findings = findings_of(tables) if saving.is_checked else unwritable(tables)
        cells = {} if findings else cells_of(tables)
        shares = shares_of(tables, cells, saving.is_balanced)
        findings = findings or clashes(tables, shares)
        if findings:
            raise Refusal(findings)
        decided.append(plans.Description(tables, shares))
        number = plans.number_of(digests)
        held = replicas.replicas_in(cells) if saving.is_checked else []
        shared = replicas.shared_by(held, tables)
        return {rank: (share, number, shared[rank]) for rank, share in shares.items()}

    share, number, shared = consult(call, (saving.table, digest), plan, PLANNING)
    made = plans.Plan(number, pickle.dumps((share, shared)), digests, decided[0] if decided else None)
    plans.keep(ranks, digest, made)
    return share, made, shared


def warn_of_differences(saving: Saving, values_by_rank: Mapping[int, common.Values]) -> Mapping[int, Any]:
    """Warn of common values that differ between ranks.

    Raises:
        Refusal: they differ, and may not.
    """
    findings = common.findings_of(values_by_rank)
    if findings and saving.strict_common:
        raise Refusal(findings)
    for rank, problem in findings:
        logger.warning(
            "%s: only the first rank's common state is saved; rank %d: %s", saving.folder, rank, problem
        )
    return {}


def commit_together(call: Call, planned: Planned, output: Output) -> Output:
    """Make a checkpoint of every rank's records; return this rank's output.

    Raises:
        CheckpointingException: some rank has problems; the same on every rank. There is no checkpoint then.
    """

    def publish(outputs: Mapping[int, Output]) -> Mapping[int, Any]:
        description = planned.plan.description
        assert description is not None, "the first rank has it"
        described = description.to_bytes(outputs, (len(planned.common), zlib.crc32(planned.common)))
        commit.publish_described(planned.folder, described, planned.common, outputs, planned.is_hashed)
        return {}

    try:
        consult(call, output, publish, COMMITTING)
    except CheckpointingException as error:
        # Where the first rank is gone, its last step may have made this file a part of a checkpoint.
        if error.is_agreed:
            planned.discard()
        raise
    finally:
        planned.claim.end()
    return output


def check_trust(state: bytes, must_load: bool, name: str) -> None:
    """Report at the save that a load would refuse a value.

    Raises:
        CheckpointingException: it has to load.
    """
    reason = values.why_not_loadable(state)
    if reason and must_load:
        raise CheckpointingException(f"would not load again: {reason}")
    if reason:
        logger.warning("%s will not load as it is: %s", name, reason)


def work_of(saving: Saving, item: Item) -> Work:
    data, row = saving.data[item.number], saving.table.tensors[item.number]
    # A piece of the size of this rank's data is all of the data.
    holds = item.box if item.box.size == row.size else row.box
    if 0 in item.box.size:
        # A tensor without elements is written in full, whatever part this rank has.
        data, holds = data.new_empty(item.box.size), item.box
    return Work(data, holds, item.box)


def clashes(tables: Mapping[int, Table], shares: Mapping[int, Share]) -> Findings:
    """Return findings of records that the index could not tell apart: it knows them by their offset."""
    findings: Findings = []
    known: dict[tuple[str, tuple[int, ...]], tuple[int, Box]] = {}
    for rank, share in shares.items():
        for item in share.tensors:
            key = tables[rank].tensors[item.number].key
            first, box = known.setdefault((key, item.box.offset), (rank, item.box))
            if box != item.box:
                what = "different boxes that begin at one place"
                got, expected = spelled(item.box), f"{spelled(box)} as rank {first}"
                findings.append((rank, Problem(what, key, got, expected)))
    return findings
