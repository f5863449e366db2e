"""A sharded save on this rank, as four steps: describe, plan, write, commit.

`describe` looks at this rank alone. `plan` is collective: it says who writes what, and makes the folder no
checkpoint. `write` is this rank alone, and may run in a thread, on copies. `commit` is collective: the folder
is a checkpoint afterwards. The caller's tensors are only read.
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
from typing import Any, NamedTuple, Optional, Union

import torch

from torch_dcp_backport.dist_checkpointing import state_dict_utils
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
from torch_dcp_backport.dist_checkpointing._src.common import Values
from torch_dcp_backport.dist_checkpointing._src.options import SaveOptions
from torch_dcp_backport.dist_checkpointing._src.plans import Item, Plan, WriteShare, plan_of
from torch_dcp_backport.dist_checkpointing._src.sharded_tensor import boxed
from torch_dcp_backport.dist_checkpointing._src.staged import Staged, give_back, staged
from torch_dcp_backport.dist_checkpointing._src.table import (
    ObjectRow,
    Outline,
    RowTable,
    alike_of,
    box_text,
    cells_of,
    findings_of,
    table_of,
    unwritable,
)
from torch_dcp_backport.dist_checkpointing._src.values import naming_too_deep
from torch_dcp_backport.dist_checkpointing._src.writer import WriteWork
from torch_dcp_backport.dist_checkpointing.core import CheckpointingException, Folder
from torch_dcp_backport.dist_checkpointing.mapping import ShardedStateDict, StateDict
from torch_dcp_backport.dist_checkpointing.state_dict_utils import Split, split
from torch_dcp_backport.publish import disk
from torch_dcp_backport.transfer import (
    Attempt,
    Box,
    Call,
    Findings,
    Phase,
    Problem,
    Refusal,
    gc_context,
    problem_of,
    warn_once,
)

logger = logging.getLogger("torch_dcp_backport.dist_checkpointing")

#: Words of errors on the state of the folder: while the old marker is removed, and from then on.
MAY_BE_GONE, IS_GONE = (
    "an older checkpoint in the folder may be gone",
    "an older checkpoint in the folder is gone",
)


WRITING = "writing"
FORKED = "a request runs in the process that made it, and this one was forked from it: use AsyncCallsQueue"


def save_at_once(
    call: Call,
    state: Attempt[ShardedStateDict],
    checkpoint_dir: Folder,
    options: SaveOptions,
    clock: report.Clock,
) -> None:
    """Save the parts of all ranks. Collective.

    Args:
        state: this rank's state dict.
        clock: of the seconds of the caller.

    Raises:
        CheckpointingException: the same on every rank.
    """
    save = Save(options)
    save.describe(call, state, checkpoint_dir)
    save.plan(call)
    output = save.write(call)
    save.commit(call, output)
    report.close_save(call.tally, output, clock.stop())


def save_in_background(
    call: Call,
    state: Attempt[ShardedStateDict],
    checkpoint_dir: Folder,
    options: SaveOptions,
    clock: report.Clock,
) -> BackgroundSave:
    """Plan a save, and copy this rank's share; return the rest of the save. Collective.

    Args:
        state, clock: as of `save_at_once`.

    Raises:
        CheckpointingException: the same on every rank.
    """
    save = Save(options)
    save.describe(call, state, checkpoint_dir, in_background=True)
    save.plan(call)
    return BackgroundSave(call, save, save.stage(call), clock)


class Described(NamedTuple):
    """What a rank has to save, and what it says of it to the other ranks."""

    table: RowTable
    #: By row of the table; in the shape of its box.
    data: Sequence[torch.Tensor]
    #: By number in the table, those of main replicas: as they are written.
    objects: Mapping[int, bytes]
    #: As it is written; on the first rank alone.
    common: bytes
    #: The values of the common state that are compared; None where they are not.
    compared: Optional[Values]
    digests: Digests
    #: Of an earlier save of the same table.
    kept: Optional[plans.KeptPlan]


class Digests(NamedTuple):
    """The digests by which ranks know whether they have what they had, and whether they have the same."""

    #: Of the table and the options.
    table: bytes
    #: The number of the kept plan; empty where there is none.
    plan: bytes
    #: Of the common state; empty where it is not compared.
    common: bytes
    #: Of the keys and shapes of tensors.
    outline: bytes


class SentTable(NamedTuple):
    """A rank's table as it is sent."""

    #: Its digest alone, where another rank sends the same.
    outline: Union[Outline, bytes]
    forms: Any
    objects: Sequence[ObjectRow]
    digest: bytes


class OwnPlan(NamedTuple):
    """A plan as one rank has it."""

    share: WriteShare
    kept: plans.KeptPlan
    #: The rows that other ranks have, too.
    shared: replicas.Shared


class Save:
    """A rank's part of a save; the methods are called in their order."""

    #: Of this rank; from the first step on.
    claim: Claim
    path: Path
    #: From the second step on: this rank's boxes and the memory that they are in, and objects as they are
    #: written; of the first rank the common state, and the plan.
    works: list[WriteWork]
    objects: list[bytes]
    common: bytes
    kept: plans.KeptPlan

    def __init__(self, options: SaveOptions) -> None:
        self.options = options
        #: Of a save in the background: "process" or "thread", as of `saver.choice`.
        self.saved_by = saver.THREAD
        #: Dropped by `plan`: it has the caller's tensors.
        self._described: Attempt[Described] = Attempt()

    def describe(
        self,
        call: Call,
        state: Attempt[ShardedStateDict],
        checkpoint_dir: Folder,
        in_background: bool = False,
    ) -> None:
        """Look at what this rank has; a problem of it is in the call, for `plan`."""
        with call.guard() as parts, naming_too_deep(state.value):
            # The working directory may be another when a save in the background ends.
            folder = Path(checkpoint_dir).absolute()
            self.path = folder / commit.file_of(call.rank)
            parts.set(self._parts_of(split(state.value)))
        with call.guard() as described:
            own = parts.value
            if in_background:
                # Once: the environment may change until the file is written.
                self.saved_by = saver.choice()
            described.set(self._described_of(call, *own))
        self._described = described

    def _parts_of(self, parts: Split) -> tuple[Split, StateDict, Optional[Values]]:
        """Return the parts, the common state as it is saved, and its values that are compared.

        Raises:
            CheckpointingException: a tensor has no data; an option has no value that it may have.
        """
        options = self.options.checked()
        absent = [part.key for part in parts.tensors if part.data is None]
        if absent:
            raise CheckpointingException(f"tensors without data: {', '.join(absent)}")
        # Once, as the whole structure is walked for it; a function of the caller's may change what it gets.
        state = compared = parts.common
        if options.preprocess_common_before_consistancy_check is not None:
            compared = parts.common
        return parts, {**state, **options.beside()}, options.compared(compared)

    def _described_of(
        self, call: Call, parts: Split, common_state: StateDict, compared: Optional[Values]
    ) -> Described:
        """Take the folder, and return what this rank has.

        Raises:
            CheckpointingException: another save to the folder is under way.
        """
        table = state_dict_utils.table_of(parts.tensors, parts.objects)
        data = [boxed(part, part.data) for part in parts.tensors if part.data is not None]
        call.problems += problems_of(self.path.parent, table, data)
        must_load = self.options.must_load
        objects: dict[int, bytes] = {}
        for number, part in enumerate(parts.objects):
            entry = table.objects[number]
            if entry.is_main:
                with call.guard(entry.unique_key):
                    # A list, as Megatron has it: of the values that a rank has under this key.
                    objects[number] = bytes_of([part.data], must_load, entry.unique_key)
        common_bytes = b""
        if call.is_first:
            with call.guard("common state"):
                common_bytes = bytes_of(common_state, must_load, "the common state")
        common_digest = b"" if compared is None else common.digest_of(compared)
        rows = table.rows()
        table = RowTable(rows, table.objects)
        options = self.options.validate_access_integrity, self.options.balanced
        digest = plans.digest_of(table, call.rank, *options)
        # Last: a claim that is taken is returned where the ranks do not go on.
        self.claim = Claim(self.path.parent)
        self.claim.take()
        kept = plans.find(call.ranks, digest)
        digests = Digests(digest, kept.number if kept else b"", common_digest, rows.outline.digest)
        return Described(table, data, objects, common_bytes, compared, digests, kept)

    def plan(self, call: Call) -> None:
        """Agree on each rank's share, and make the folder no checkpoint. Collective.

        A problem of this rank that comes up after that is in the call, for the next agreement.

        Raises:
            CheckpointingException: the same on every rank. Until the first rank has removed the old marker
                nothing was touched; from then on the folder holds no checkpoint.
        """
        described, self._described = self._described, Attempt()
        try:
            own = self._own_plan(call, described)
        except Exception:
            if described.error is None:
                self.claim.return_it()
            raise
        self.claim.keep()
        own = self._cleared(call, described.value, own)
        table, data, objects, self.common, *_ = described.value
        self.kept, self.works = own.kept, []
        self.objects = [objects[number] for number in own.share.objects]
        with call.guard(self.path.name):
            self.works = [work_of(data[item.number], table, item) for item in own.share.tensors]

    def _own_plan(self, call: Call, described: Attempt[Described]) -> OwnPlan:
        """Return the plan of an earlier save where every rank has what it had, or a new one.

        Raises:
            CheckpointingException: the ranks together have problems; the same on every rank.
        """
        kept: Optional[plans.KeptPlan] = None
        with call.guard() as digests:
            kept = described.value.kept
            digests.set(described.value.digests)
        same = call.attempt(self.options.same)

        def compared(digests_by_rank: Mapping[int, Digests]) -> tuple[bool, bool, set[int]]:
            own, entries = digests_by_rank[call.rank], digests_by_rank.values()
            tables = {rank: entry.table for rank, entry in digests_by_rank.items()}
            numbers = {entry.plan for entry in entries}
            is_known = kept is not None and kept.digests == tables and numbers == {kept.number}
            is_alike = not own.common or {entry.common for entry in entries} == {own.common}
            # Of the ranks with the same keys the first one sends them.
            senders = {digests_by_rank[rank].outline: rank for rank in sorted(tables, reverse=True)}
            return is_known, is_alike, set(senders.values())

        is_known, is_alike, senders = call.gather_object(
            "comparing plans", digests, compared, must_agree=same
        )
        if not is_alike:
            self._compare_common(call, described.value)
        if not is_known or kept is None:
            return self._new_plan(call, described.value, call.rank in senders)
        share, shared = pickle.loads(kept.share)
        outline = described.value.table.rows().outline
        return OwnPlan(share.share_of(outline), kept, replicas.unpacked(shared, outline))

    def _compare_common(self, call: Call, described: Described) -> None:
        """Warn of common values that differ between ranks.

        Raises:
            CheckpointingException: they may not; the same on every rank.
        """

        def differences(values_by_rank: Mapping[int, Values]) -> Mapping[int, str]:
            findings = common.findings_of(values_by_rank)
            if findings and self.options.strict_common:
                raise Refusal(findings)
            for rank, problem in findings:
                logger.warning(
                    "%s: only the first rank's common state is saved; rank %d: %s",
                    self.path.parent,
                    rank,
                    problem,
                )
            first = call.rank
            return {
                rank: common.mismatch_line(rank, values, first, values_by_rank[first])
                for rank, values in values_by_rank.items()
            }

        text = call.scatter_object("comparing the common state", described.compared or {}, differences)
        if text:
            logger.warning("%s", text)

    def _new_plan(self, call: Call, described: Described, sends_keys: bool) -> OwnPlan:
        """Plan with the tables of all ranks, and keep the plan.

        Args:
            sends_keys: send the outline of this rank's table, which other ranks may have, too.

        Raises:
            CheckpointingException: as `_own_plan`.
        """
        table, digest = described.table, described.digests.table
        rows, digests = table.rows(), dict[int, bytes]()
        # The first rank keeps it.
        description: Optional[plans.Description] = None

        def planned(sent_by_rank: Mapping[int, SentTable]) -> Mapping[int, Any]:
            nonlocal description, digests
            digests = {rank: sent.digest for rank, sent in sent_by_rank.items()}
            with gc_context():
                plan, held = self._plan_of(tables_of(sent_by_rank), len(described.common))
                shares = plan.shares()
            description = plans.Description(plan)
            number = plans.number_of(digests)
            return {rank: (share, number, held[rank]) for rank, share in shares.items()}

        outline = rows.outline if sends_keys else rows.outline.digest
        sent = SentTable(outline, rows.forms, table.objects, digest)
        share, number, shared = call.scatter_object("planning", sent, planned)
        kept = plans.KeptPlan(number, pickle.dumps((share, shared)), digests, description)
        plans.keep(call.ranks, digest, kept)
        return OwnPlan(share.share_of(rows.outline), kept, replicas.unpacked(shared, rows.outline))

    def _plan_of(
        self, tables: Mapping[int, RowTable], common_bytes: int
    ) -> tuple[Plan, Mapping[int, replicas.PackedShared]]:
        """Return the plan of a save, and what each rank shares with others.

        Raises:
            Refusal: it cannot be saved.
        """
        is_checked = self.options.validate_access_integrity
        findings = findings_of(tables) if is_checked else unwritable(tables)
        if findings:
            raise Refusal(findings)
        alike = alike_of(tables)
        plan = plan_of(alike, self.options.balanced)
        findings = clashes(plan)
        if findings:
            raise Refusal(findings)
        # Four bytes are the checksum of a record.
        commit.refuse_too_large(tables, 4 * plan.records() + common_bytes, "the least size")
        return plan, replicas.shared_by(alike) if is_checked else {rank: {} for rank in tables}

    def _cleared(self, call: Call, described: Described, own: OwnPlan) -> OwnPlan:
        """Make the folder no checkpoint; return the plan, a new one where replicas differ.

        Raises:
            CheckpointingException: as `plan`.
        """
        folder = self.path.parent
        with call.tally.phase("comparing replicas"), call.guard() as digests:
            digests.set(replicas.digests_of(described.data, own.shared))

        def cleared(digests_by_rank: Mapping[int, replicas.Digests]) -> Any:
            unlike = replicas.unlike(digests_by_rank)
            if not unlike:
                commit.clear(folder)
            return unlike

        unlike = call.gather_object("removing the old marker", digests, cleared, so_far=MAY_BE_GONE)
        if not unlike:
            return own
        # Each tensor that differs is its main replica's.
        table = described.table
        with call.guard() as rows:
            numbers = [row for group in unlike for row in own.shared.get(group, ())]
            rows.set((table, replicas.row_digests(described.data, numbers)))
        description: Optional[plans.Description] = None

        def planned(own_by_rank: Mapping[int, Any]) -> Mapping[int, plans.PackedShare]:
            nonlocal description
            tables = {rank: table for rank, (table, _) in own_by_rank.items()}
            rows_by_rank = {rank: digests for rank, (_, digests) in own_by_rank.items()}
            problems = replicas.problems_of(replicas.replicas_in(cells_of(tables)), rows_by_rank)
            warn_of_replicas(folder, problems)
            plan = plan_of(alike_of(tables), self.options.balanced, fixed=problems)
            commit.clear(folder)
            description = plans.Description(plan)
            return plan.shares()

        packed = call.scatter_object("comparing replicas", rows, planned, so_far=MAY_BE_GONE)
        share = packed.share_of(described.table.rows().outline)
        # Such a plan is not kept.
        return OwnPlan(share, plans.KeptPlan(b"", b"", {}, description), {})

    @property
    def nbytes(self) -> int:
        """The bytes of this rank's tensors."""
        return sum(work.form.nbytes for work in self.works)

    def write(self, call: Call) -> Output:
        """Write this rank's share, unless there is a problem; one that comes up is in the call."""
        call.tally.meter.expect(lambda: self.nbytes)
        output = self.nothing()
        if not call.problems:
            with call.tally.phase(WRITING), call.guard(self.path.name):
                output = self.write_file(call.tally.meter.add)
        return output

    def write_file(
        self,
        moved: Callable[[int], None],
        copies: Optional[Staged] = None,
        stop: Optional[saver.Stop] = None,
    ) -> Output:
        """Write this rank's share; no other rank takes part.

        Args:
            moved: called with the bytes of values that were written since the last time.
            copies: of the share, where they are written.
            stop: as of `saver.write`.

        Raises:
            CheckpointingException: a later save has taken the folder.
            OSError: the file cannot be written.
        """
        self.claim.begin()
        verify_integrity = self.options.verify_integrity
        if copies is not None:
            by_process = self.saved_by == saver.PROCESS
            output = saver.write(self.path, copies, self.objects, moved, verify_integrity, by_process, stop)
        else:
            with torch.no_grad():
                output = writer.write(self.path, self.works, self.objects, moved, verify_integrity)
        self.options.written(output)
        return output

    def nothing(self) -> Output:
        """Return the output of a rank that wrote nothing."""
        return Output(self.path.name, 0, [], [])

    def stage(self, call: Call) -> Staged:
        """Copy this rank's share: later changes of the caller's tensors are not saved. Collective.

        Raises:
            CheckpointingException: some rank has problems; the same on every rank.
        """
        with call.tally.phase("copying"), call.guard() as copies:
            copies.set(staged(self.works))
            # The share is in the copies.
            self.works.clear()
        call.barrier("copying", so_far=IS_GONE)
        return copies.value  # type: ignore[no-any-return]

    def commit(self, call: Call, output: Output) -> None:
        """Make a checkpoint of every rank's records. Collective.

        Args:
            output: of this rank's `write`.

        Raises:
            CheckpointingException: some rank has problems; the same on every rank. There is no checkpoint
                then.
        """

        def published(outputs: Mapping[int, Output]) -> None:
            description, options = self.kept.description, self.options
            assert description is not None, "the first rank has it"
            facts = len(self.common), zlib.crc32(self.common)
            content = description.content(outputs, facts, options.torch_metadata)
            folder, is_hashed = self.path.parent, options.verify_integrity
            commit.publish_described(folder, content, self.common, outputs, is_hashed)

        try:
            call.gather_object(
                "committing",
                output,
                published,
                so_far="the folder holds no checkpoint now",
                unheard="whether the folder holds a checkpoint shows a load",
            )
        except CheckpointingException as error:
            # Where the first rank is gone, its last step may have made this file a part of a checkpoint.
            if error.is_agreed:
                self.discard()
            raise
        finally:
            self.claim.end()

    def discard(self) -> None:
        """Remove the file of `write`, where it will never be a part of a checkpoint."""
        with contextlib.suppress(OSError):
            if self.claim.is_held:
                disk.remove([self.path])


class BackgroundSave:
    """The write and the commit of a save whose share was copied.

    No collective runs in the background: `write` does in a thread, `commit` where the caller calls it.
    """

    def __init__(self, call: Call, save: Save, copies: Staged, clock: report.Clock) -> None:
        """Remember the call in which the save was planned, and the clock of the caller's seconds."""
        self.save = save
        #: None once they are written, or never will be.
        self._copies: Optional[Staged] = copies
        self.title = call.title
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
                self._output = self.save.write_file(self.meter.add, self._copies, self._stop)
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
        return f"{self.save.path} by {process or 'a thread'}"

    def abandon(self) -> None:
        """Leave the folder to later saves, and remove this rank's file, unless a commit was tried."""
        self._give_back()
        self.save.discard()
        self.save.claim.end()

    def commit(self) -> None:
        """Make a checkpoint of the ranks' records. Collective.

        Raises:
            CheckpointingException: a rank could not write, or is gone; the same on every rank.
        """
        self.clock.go_on()
        with begin(self.title, "save", self.save.options.process_group) as call:
            call.tally.seconds.update(self.seconds)
            with call.guard(self.save.path.name):
                if self._error is not None:
                    raise self._error
                if self._output is None:
                    raise CheckpointingException("nothing was written: its async_fn did not run to its end")
            output = self._output or self.save.nothing()
            self.save.commit(call, output)
            blocked, writing = self.clock.stop(), self.seconds[WRITING]
            if self._writer == threading.get_ident():
                # Nothing was hidden from a caller that wrote by itself.
                report.close_save(call.tally, output, blocked + writing)
            else:
                report.close_save(call.tally, output, blocked, writing)


def problems_of(folder: Path, table: RowTable, data: Sequence[torch.Tensor]) -> list[Problem]:
    """Return the problems that this rank knows before any rank has done anything."""
    problems = []
    if not folder.is_dir():
        problems.append(Problem("no such folder (make it first)", str(folder)))
    else:
        try:
            disk.check_writable(folder)
        except OSError as error:
            problems.append(problem_of(error))
    for row, tensor in zip(table.tensors, data):
        why = writer.why_not_readable(tensor)
        if why:
            problems.append(Problem("a tensor without values in memory", row.key, why))
    return problems


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


def tables_of(tables_by_rank: Mapping[int, SentTable]) -> dict[int, RowTable]:
    """Return the tables of all ranks, of which some have sent their outlines, and the others the digests."""
    outlines = {
        outline.digest: outline for outline, *_ in tables_by_rank.values() if isinstance(outline, Outline)
    }
    return {
        rank: table_of(outline if isinstance(outline, Outline) else outlines[outline], forms, objects)
        for rank, (outline, forms, objects, _) in tables_by_rank.items()
    }


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
                    got, expected = box_text(own), f"{box_text(box)} as rank {first}"
                    findings += [(rank, Problem(what, key, got, expected)) for key in kind.keys]
    return findings


def warn_of_replicas(folder: Path, problems: Mapping[str, Problem]) -> None:
    """Warn of replicas that differ, once of the same keys."""
    # Buffers of a model differ at every save.
    keys = tuple(sorted(problems))
    texts, more = "; ".join(str(problems[key]) for key in keys[:5]), ", ..." if len(keys) > 5 else ""
    what = f"{len(keys)} tensors differ between the ranks that hold them; the first of these ranks is saved"
    warn_once(logger, f"{folder}: {what}: {texts}{more}", about=keys)


def work_of(data: torch.Tensor, table: RowTable, item: Item) -> WriteWork:
    """Return a box that this rank writes, with the tensor that has it."""
    row = table.tensors[item.number]
    # A piece of the size of this rank's data is all of the data.
    holds = item.box if item.box.size == row.size else row.box
    if 0 in item.box.size:
        # A tensor without elements is written in full, whatever part this rank has.
        data, holds = data.new_empty(item.box.size), item.box
    return WriteWork(data, holds, item.box)
