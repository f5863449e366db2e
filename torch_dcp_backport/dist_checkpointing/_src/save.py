"""A sharded save: rows to the first rank, shares back, files, and the commit.

Collective; the caller's tensors are only read.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

import torch

from torch_dcp_backport.dist_checkpointing._src import (
    commit,
    common,
    plans,
    replicas,
    report,
    saver,
    values,
    writer,
)
from torch_dcp_backport.dist_checkpointing._src.body import Output
from torch_dcp_backport.dist_checkpointing._src.calls import begin
from torch_dcp_backport.dist_checkpointing._src.commit import Claim
from torch_dcp_backport.dist_checkpointing._src.plans import Item, Plan, WriteShare, plan_of
from torch_dcp_backport.dist_checkpointing._src.staged import Staged, give_back, staged
from torch_dcp_backport.dist_checkpointing._src.table import (
    Outline,
    RowTable,
    alike_of,
    cells_of,
    findings_of,
    spelled,
    table_of,
    unwritable,
)
from torch_dcp_backport.dist_checkpointing._src.writer import WriteWork
from torch_dcp_backport.dist_checkpointing.core import CheckpointingException
from torch_dcp_backport.publish import disk
from torch_dcp_backport.transfer import (
    Attempt,
    Box,
    Call,
    Findings,
    Group,
    Phase,
    Problem,
    Refusal,
    Topic,
    at_first,
    gc_context,
    meet,
    problem_of,
    warn_once,
)

# --- a save ---


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
    table: RowTable
    #: By row of the table; in the shape of its box.
    data: Sequence[torch.Tensor]
    objects: Sequence[Any]
    #: On the first rank alone.
    common: Any
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
    #: Of a save in the background: "process" or "thread", as of `saver.choice`.
    saved_by: str = saver.THREAD
    #: Whether `.metadata` has torch's index beside ours.
    torch_metadata: bool = True


def problems_of(saving: Saving) -> list[Problem]:
    """Return the problems that this rank knows before any rank has done anything."""
    problems = []
    if not saving.folder.is_dir():
        problems.append(Problem("no such folder (make it first)", str(saving.folder)))
    else:
        try:
            disk.check_writable(saving.folder)
        except OSError as error:
            problems.append(problem_of(error))
    for row, data in zip(saving.table.tensors, saving.data):
        why = writer.why_not_readable(data)
        if why:
            problems.append(Problem("a tensor without values in memory", row.key, why))
    return problems


class Ready(NamedTuple):
    """A rank's part of a save before the ranks meet: as far as the rank can tell, it can be saved."""

    saving: Saving
    claim: Claim
    #: Of its tensors.
    outline: Outline
    #: By number in the table, those of main replicas: as they are written.
    objects: dict[int, bytes]
    #: Of the first rank.
    common: bytes
    #: Of the table and the options; and of the common state, empty where it is not compared.
    digest: bytes
    compared: bytes
    #: Of an earlier save of the same table.
    kept: Optional[plans.KeptPlan]


class Planned(NamedTuple):
    """A save that can be written: the old marker is gone, and every rank knows its share."""

    folder: Path
    claim: Claim
    share: WriteShare
    #: This rank's boxes, and the memory that they are in.
    works: list[WriteWork]
    #: This rank's objects, as they are written.
    objects: list[bytes]
    #: Of the first rank, as is the next field.
    common: bytes
    plan: plans.KeptPlan
    path: Path
    written: Callable[[Output], None]
    is_hashed: bool
    saved_by: str
    torch_metadata: bool

    def nothing(self) -> Output:
        """Return the output of a rank that wrote nothing."""
        return Output(self.path.name, 0, [], [])

    @property
    def nbytes(self) -> int:
        """The bytes of this rank's tensors."""
        return sum(work.form.nbytes for work in self.works)

    def write(
        self,
        moved: Callable[[int], None],
        staged: Optional[Staged] = None,
        stop: Optional[saver.Stop] = None,
    ) -> Output:
        """Write this rank's share; no other rank takes part.

        Args:
            staged: the copies of `works`, where they are written.
            stop: as of `saver.write`.
        """
        self.claim.begin()
        if staged is not None:
            by_process = self.saved_by == saver.PROCESS
            output = saver.write(self.path, staged, self.objects, moved, self.is_hashed, by_process, stop)
        else:
            with torch.no_grad():
                output = writer.write(self.path, self.works, self.objects, moved, self.is_hashed)
        self.written(output)
        return output

    def discard(self) -> None:
        """Remove the file of `write`, where it will never be a part of a checkpoint."""
        with contextlib.suppress(OSError):
            if self.claim.is_held:
                disk.remove([self.path])


def save(call: Call, saving: Attempt[Saving]) -> Output:
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
        with call.tally.phase("writing"), call.guard(planned.path.name):
            output = planned.write(call.tally.meter.add)
    return commit_together(call, planned, output)


def plan_together(call: Call, saving: Attempt[Saving]) -> Planned:
    """Agree on each rank's share, and make the folder no checkpoint.

    A problem of this rank that came up after that is in the call, for the next meeting.

    Raises:
        CheckpointingException: the same on every rank.
    """
    with call.guard() as made:
        made.set(ready_of(call, saving.value))
    try:
        share, plan, shared = planned_share(call, made)
    except Exception:
        if made.error is None:
            made.value.claim.return_it()
        raise
    ready: Ready = made.value
    ready.claim.keep()
    with call.tally.phase("comparing replicas"), call.guard() as digests:
        digests.set(replicas.digests_of(ready.saving.data, shared))
    with at_first(call, CLEARING, digests) as meeting:
        if meeting.decides:
            unlike = replicas.unlike(meeting.heard)
            if unlike:
                meeting.answer(unlike)
            else:
                commit.clear(ready.saving.folder)
    if meeting.result:
        rows = [row for group in meeting.result for row in shared.get(group, ())]
        share, plan = from_first_holders(call, ready.saving, rows)
    path = ready.saving.folder / commit.file_of(call.rank)
    works: list[WriteWork] = []
    with call.guard(path.name):
        works = [work_of(ready.saving, item) for item in share.tensors]
    return Planned(
        ready.saving.folder,
        ready.claim,
        share,
        works,
        [ready.objects[number] for number in share.objects],
        ready.common,
        plan,
        path,
        ready.saving.written,
        ready.saving.is_hashed,
        ready.saving.saved_by,
        ready.saving.torch_metadata,
    )


def ready_of(call: Call, saving: Saving) -> Ready:
    """Return this rank's part, with the folder claimed; what cannot be saved is among the call's problems.

    Raises:
        CheckpointingException: another save to the folder is under way.
    """
    call.problems += problems_of(saving)
    objects: dict[int, bytes] = {}
    for number, value in enumerate(saving.objects):
        entry = saving.table.objects[number]
        if entry.is_main:
            with call.guard(entry.unique_key):
                # A list, as Megatron has it: of the values that a rank has under this key.
                objects[number] = bytes_of([value], saving.must_load, entry.unique_key)
    state = b""
    if call.is_first:
        with call.guard("common state"):
            state = bytes_of(saving.common, saving.must_load, "the common state")
    compared = b"" if saving.compared is None else common.digest_of(saving.compared)
    rows = saving.table.rows()
    saving = saving._replace(table=RowTable(rows, saving.table.objects))
    digest = plans.digest_of(saving.table, call.rank, saving.is_checked, saving.is_balanced)
    # Last: a claim that is taken is returned where the ranks do not go on.
    claim = Claim(saving.folder)
    claim.take()
    return Ready(
        saving, claim, rows.outline, objects, state, digest, compared, plans.find(call.ranks, digest)
    )


def from_first_holders(call: Call, saving: Saving, rows: Sequence[int]) -> tuple[WriteShare, plans.KeptPlan]:
    """Plan a save of replicas that differ, clear the folder, and warn: each tensor is its main replica's.

    Args:
        rows: this rank's rows among which some differ from another rank's.

    Returns:
        This rank's share, and a plan that is not kept.

    Raises:
        CheckpointingException: as `planned_share`.
    """
    with call.guard() as own:
        own.set((saving.table, replicas.row_digests(saving.data, rows)))
    description: Optional[plans.Description] = None
    with at_first(call, REPLICAS, own) as meeting:
        if meeting.decides:
            tables = {rank: table for rank, (table, _) in meeting.heard.items()}
            rows_by_rank = {rank: digests for rank, (_, digests) in meeting.heard.items()}
            problems = replicas.problems_of(replicas.replicas_in(cells_of(tables)), rows_by_rank)
            warn_of_replicas(saving.folder, problems)
            plan = plan_of(alike_of(tables), saving.is_balanced, fixed=problems)
            commit.clear(saving.folder)
            description = plans.Description(plan)
            meeting.answer_each(plan.shares())
    share = meeting.result.share_of(saving.table.rows().outline)
    return share, plans.KeptPlan(b"", b"", {}, description)


def warn_of_replicas(folder: Path, problems: Mapping[str, Problem]) -> None:
    """Warn of replicas that differ, once of the same keys."""
    # Buffers of a model differ at every save.
    keys = tuple(sorted(problems))
    texts, more = "; ".join(str(problems[key]) for key in keys[:5]), ", ..." if len(keys) > 5 else ""
    what = f"{len(keys)} tensors differ between the ranks that hold them; the first of these ranks is saved"
    warn_once(logger, f"{folder}: {what}: {texts}{more}", about=keys)


def planned_share(call: Call, made: Attempt[Ready]) -> tuple[WriteShare, plans.KeptPlan, replicas.Shared]:
    """Return this rank's share, the plan, and what this rank shares with others: the last ones where every
    rank has what it had.

    Raises:
        CheckpointingException: the ranks together have problems; the same on every rank.
    """
    with call.guard() as own:
        kept, compared = made.value.kept, made.value.compared
        outline = made.value.outline.digest
        own.set((made.value.digest, kept.number if kept else b"", compared, outline))
    with call.guard() as same:
        saving = made.value.saving
        same.set(
            {"verify_integrity": str(bool(saving.is_hashed)), "torch_metadata": str(saving.torch_metadata)}
        )
    with at_first(call, COMPARING, own, same) as meeting:
        if meeting.decides:
            # Of the table, of the kept plan, of the common state, and of the outline.
            digests = {rank: digest for rank, (digest, _, _, _) in meeting.heard.items()}
            numbers = {number for _, number, _, _ in meeting.heard.values()}
            is_known = kept is not None and kept.digests == digests and numbers == {kept.number}
            is_alike = not compared or {state for _, _, state, _ in meeting.heard.values()} == {compared}
            # Of the ranks with the same keys the first one sends them.
            senders = {meeting.heard[rank][-1]: rank for rank in sorted(meeting.heard, reverse=True)}
            meeting.answer((is_known, is_alike, set(senders.values())))
    is_known, is_alike, senders = meeting.result
    ready = made.value
    if not is_alike:
        compare_common(call, ready.saving)
    if is_known and ready.kept is not None:
        share, shared = pickle.loads(ready.kept.share)
        return share.share_of(ready.outline), ready.kept, replicas.unpacked(shared, ready.outline)
    return new_share(call, ready, call.rank in senders)


def new_share(
    call: Call, ready: Ready, sends_keys: bool
) -> tuple[WriteShare, plans.KeptPlan, replicas.Shared]:
    """Plan with the tables of all ranks, and keep the plan; return as `planned_share`.

    Args:
        sends_keys: send the outline of this rank's table, which other ranks may have, too.

    Raises:
        CheckpointingException: as `planned_share`.
    """
    digests: dict[int, bytes] = {}
    description: Optional[plans.Description] = None
    table = ready.saving.table
    sent = ready.outline if sends_keys else ready.outline.digest
    with at_first(call, PLANNING, (sent, table.rows().forms, table.objects, ready.digest)) as meeting:
        if meeting.decides:
            digests = {rank: own for rank, (*_, own) in meeting.heard.items()}
            with gc_context():
                plan, held = plan_at_first(ready, tables_of(meeting.heard))
                shares = plan.shares()
            description = plans.Description(plan)
            number = plans.number_of(digests)
            meeting.answer_each({rank: (share, number, held[rank]) for rank, share in shares.items()})
    share, number, shared = meeting.result
    kept = plans.KeptPlan(number, pickle.dumps((share, shared)), digests, description)
    plans.keep(call.ranks, ready.digest, kept)
    return share.share_of(ready.outline), kept, replicas.unpacked(shared, ready.outline)


def tables_of(heard: Mapping[int, tuple[Any, ...]]) -> dict[int, RowTable]:
    """Return the tables of all ranks, of which some have sent their outlines, and the others the digests."""
    outlines = {sent.digest: sent for sent, *_ in heard.values() if isinstance(sent, Outline)}
    return {
        rank: table_of(outlines[getattr(sent, "digest", sent)], forms, objects)
        for rank, (sent, forms, objects, _) in heard.items()
    }


def plan_at_first(
    ready: Ready, tables: Mapping[int, RowTable]
) -> tuple[Plan, Mapping[int, replicas.PackedShared]]:
    """Return the plan of a save, and what each rank shares with others.

    Raises:
        Refusal: it cannot be saved.
    """
    saving = ready.saving
    findings = findings_of(tables) if saving.is_checked else unwritable(tables)
    if findings:
        raise Refusal(findings)
    alike = alike_of(tables)
    plan = plan_of(alike, saving.is_balanced)
    findings = clashes(plan)
    if findings:
        raise Refusal(findings)
    # Four bytes are the checksum of a record.
    commit.refuse_too_large(tables, 4 * plan.records() + len(ready.common), "the least size")
    return plan, replicas.shared_by(alike) if saving.is_checked else {rank: {} for rank in tables}


def compare_common(call: Call, saving: Saving) -> None:
    """Warn of common values that differ between ranks.

    Raises:
        CheckpointingException: they may not; the same on every rank.
    """
    with at_first(call, COMMON, saving.compared or {}) as meeting:
        if meeting.decides:
            findings = common.findings_of(meeting.heard)
            if findings and saving.strict_common:
                raise Refusal(findings)
            for rank, problem in findings:
                logger.warning(
                    "%s: only the first rank's common state is saved; rank %d: %s",
                    saving.folder,
                    rank,
                    problem,
                )
            first = call.rank
            meeting.answer_each(
                {
                    rank: common.told(rank, values, first, meeting.heard[first])
                    for rank, values in meeting.heard.items()
                }
            )
    if meeting.result:
        logger.warning("%s", meeting.result)


def commit_together(call: Call, planned: Planned, output: Output) -> Output:
    """Make a checkpoint of every rank's records; return this rank's output.

    Raises:
        CheckpointingException: some rank has problems; the same on every rank. There is no checkpoint then.
    """
    try:
        with at_first(call, COMMITTING, output) as meeting:
            if meeting.decides:
                description = planned.plan.description
                assert description is not None, "the first rank has it"
                outputs = meeting.heard
                facts = len(planned.common), zlib.crc32(planned.common)
                content = description.content(outputs, facts, planned.torch_metadata)
                commit.publish_described(planned.folder, content, planned.common, outputs, planned.is_hashed)
    except CheckpointingException as error:
        # Where the first rank is gone, its last step may have made this file a part of a checkpoint.
        if error.is_agreed:
            planned.discard()
        raise
    finally:
        planned.claim.end()
    return output


def bytes_of(value: Any, must_load: bool, name: str) -> bytes:
    """Return a value as it is saved; report that a load would refuse it.

    Raises:
        CheckpointingException: it cannot be saved; it has to load, and would not.
    """
    data = values.dumps(value)
    reason = values.why_not_loadable(data)
    if reason:
        key = values.key_of(value, values.cannot_be_loaded)
        reason = f"{key}: {reason}" if key else reason
    if reason and must_load:
        raise CheckpointingException(f"would not load again: {reason}")
    if reason:
        logger.warning("%s will not load as it is: %s", name, reason)
    return data


def work_of(saving: Saving, item: Item) -> WriteWork:
    data, row = saving.data[item.number], saving.table.tensors[item.number]
    # A piece of the size of this rank's data is all of the data.
    holds = item.box if item.box.size == row.size else row.box
    if 0 in item.box.size:
        # A tensor without elements is written in full, whatever part this rank has.
        data, holds = data.new_empty(item.box.size), item.box
    return WriteWork(data, holds, item.box)


def clashes(plan: Plan) -> Findings:
    """Return findings of records that the index could not tell apart: it knows them by their offset."""
    findings: Findings = []
    for kind, stripes in zip(plan.kinds, plan.stripes):
        known: dict[tuple[int, ...], tuple[int, Box]] = {}
        for stripe in stripes:
            for own, holders in zip(stripe.boxes, stripe.holders):
                rank = holders[next(iter(stripe.chosen))][0]
                first, box = known.setdefault(own.offset, (rank, own))
                if box != own:
                    what = "different boxes that begin at one place"
                    got, expected = spelled(own), f"{spelled(box)} as rank {first}"
                    findings += [(rank, Problem(what, key, got, expected)) for key in kind.keys]
    return findings


# --- a save in the background ---
#
# No collective runs in the background.

WRITING = "writing"
FORKED = "a request runs in the process that made it, and this one was forked from it: use AsyncCallsQueue"
COPYING = Topic("copying", "an older checkpoint in the folder is gone")


class SaveUnderWay:
    """A rank's part of a save under way."""

    def __init__(
        self, planned: Planned, copies: Staged, call: Call, group: Group, clock: report.Clock
    ) -> None:
        """`copies`: of the share. `call`: in which it was planned. `clock`: of the caller's seconds."""
        self.planned = planned
        #: None once they are written, or never will be.
        self._copies: Optional[Staged] = copies
        self.title = call.title
        self.group = group
        self.clock = clock
        #: Its callback is called by the thread that writes.
        self.meter = call.tally.meter
        self.meter.expect(lambda: copies.nbytes)
        #: Phase -> seconds.
        self.seconds = dict(call.tally.seconds)
        self._process, self._writer = os.getpid(), 0
        clock.stop()
        self._stop = saver.Stop()
        self._output: Optional[Output] = None
        self._error: Optional[Exception] = None

    def write(self) -> None:
        """Write this rank's files; `commit` raises its error.

        Raises:
            RuntimeError: this process was forked from the one that began the save. Nothing was touched.
        """
        if self._process != os.getpid():
            # The memory of the copies may not be there, and `commit` would not hear of the output.
            raise RuntimeError(FORKED)
        self._writer = threading.get_ident()
        try:
            with Phase(self.seconds, WRITING):
                self._output = self.planned.write(self.meter.add, self._copies, self._stop)
        except Exception as error:
            self._error = error
        finally:
            self._give_back()

    def _give_back(self) -> None:
        """Leave the memory of the copies to the next save."""
        copies, self._copies = self._copies, None
        if copies is not None:
            give_back(copies.memory)

    def stop(self) -> str:
        """Wait no longer for `write`; return the file that is not written, "" where it is.

        The claim to the folder is held until `write` has ended: a thread that hangs may make its file yet.
        """
        if self._output is not None or self._error is not None:
            return ""
        process = self._stop.set()
        return f"{self.planned.path} by {process or 'a thread'}"

    def abandon(self) -> None:
        """Leave the folder to later saves, and remove this rank's file, unless a commit was tried."""
        self._give_back()
        self.planned.discard()
        self.planned.claim.end()

    def commit(self) -> None:
        """Make a checkpoint of the ranks' records. Collective.

        Raises:
            CheckpointingException: a rank could not write, or is gone; the same on every rank.
        """
        self.clock.go_on()
        with begin(self.title, "save", self.group) as call:
            call.tally.seconds.update(self.seconds)
            with call.guard(self.planned.path.name):
                if self._error is not None:
                    raise self._error
                if self._output is None:
                    raise CheckpointingException("nothing was written: its async_fn did not run to its end")
            output = self._output or self.planned.nothing()
            output = commit_together(call, self.planned, output)
            blocked, writing = self.clock.stop(), self.seconds[WRITING]
            if self._writer == threading.get_ident():
                # Nothing was hidden from a caller that wrote by itself.
                report.close_save(call.tally, output, blocked + writing)
            else:
                report.close_save(call.tally, output, blocked, writing)


def begin_save(call: Call, saving: Attempt[Saving], group: Group, clock: report.Clock) -> SaveUnderWay:
    """Plan, and copy this rank's own share; the caller's later changes of its tensors are not saved.

    Raises:
        CheckpointingException: some rank has problems; the same on every rank.
    """
    # Before anything is removed, and once: the environment may change until the files are written.
    with call.guard() as chosen:
        chosen.set(saving.value._replace(saved_by=saver.choice()))
    planned = plan_together(call, chosen)
    with call.tally.phase("copying"), call.guard() as copies:
        copies.set(staged(planned.works))
        # The share is in the copies.
        planned.works.clear()
    meet(call, COPYING)
    return SaveUnderWay(planned, copies.value, call, group, clock)
