"""A load on one rank: the parts that it wants of a checkpoint, their problems, and the loaded values.

Between the state dict and the engine: knows parts and keys, and leaves bytes to the reader.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Union

import torch
from torch.distributed.checkpoint.api import CheckpointException

from torch_dcp_backport.dist_checkpointing._src import load as engine
from torch_dcp_backport.dist_checkpointing._src import sharded_tensor
from torch_dcp_backport.dist_checkpointing._src.calls import begin
from torch_dcp_backport.dist_checkpointing._src.files import Damaged, OpenFiles
from torch_dcp_backport.dist_checkpointing._src.load import Opened, WantedBox
from torch_dcp_backport.dist_checkpointing._src.metadata import Index
from torch_dcp_backport.dist_checkpointing._src.options import LoadOptions
from torch_dcp_backport.dist_checkpointing._src.reader import Read, RecordReader
from torch_dcp_backport.dist_checkpointing._src.sharing import read_shared
from torch_dcp_backport.dist_checkpointing._src.table import Row, RowTable, examples, findings_of, keys_of
from torch_dcp_backport.dist_checkpointing.core import CheckpointingException
from torch_dcp_backport.dist_checkpointing.mapping import ShardedObject, ShardedTensor, StateDict
from torch_dcp_backport.dist_checkpointing.state_dict_utils import Split, assembled, merged, row_of, table_of
from torch_dcp_backport.dist_checkpointing.validation import (
    MISSING,
    StrictHandling,
    logger,
    mismatch_text,
    unexpected_problems,
)
from torch_dcp_backport.transfer import (
    DOUBTFUL,
    Attempt,
    Call,
    Common,
    Findings,
    Problem,
    Refusal,
    group_ranks,
    has_slices,
    layout_text,
    members,
    warn_once,
    why_not_writable,
)


class PlanRefused(CheckpointingException, CheckpointException):
    """A load that cannot be planned, with `StrictHandling.ASSUME_OK_UNEXPECTED`.

    Megatron leaves this case to torch, whose class programs catch; it is no `Exception`, as ours has to be.
    """

    def __init__(self, text: str) -> None:
        Exception.__init__(self, text)
        self._failures = {}

    def __str__(self) -> str:
        return str(self.args[0])


class Loading:
    """A load on this rank: the parts that it wants of a checkpoint, and the loaded values."""

    def __init__(
        self,
        call: Call,
        checkpoint: Opened,
        files: OpenFiles,
        parts: Split,
        mode: StrictHandling,
        options: LoadOptions,
    ) -> None:
        """Compare the parts with the checkpoint; `files` are its own, and are opened as they are needed."""
        self.call = call
        self.checkpoint = checkpoint
        self.index = checkpoint.holds
        self.parts = parts
        self.mode = mode
        self.options = options
        self.reader = RecordReader(files, self.index.is_ours, call.tally.meter.add)
        self.tensors = [part for part in parts.tensors if part.key in self.index.tensors]
        #: The tensor that each is loaded into; None where it is still to be made.
        self.data = [part.data for part in self.tensors]
        #: The part -> the key under which the checkpoint has it.
        self.objects: dict[str, str] = {}
        for part in parts.objects:
            key = engine.stored_object(self.index, part.unique_key)
            if key is not None:
                self.objects[part.unique_key] = key
        #: Objects that ask for the common state, by the key that Megatron from 0.19 on gives it.
        self.commons = [
            part
            for part in parts.objects
            if part.unique_key == engine.COMMON_STATE not in self.objects and checkpoint.common is not None
        ]
        #: Keys whose flattened ranges are not those of the checkpoint: they are loaded box by box.
        self.unfolded: set[str] = set()
        flattened = [
            part
            for part in self.tensors
            if part.flattened_range is not None or self.index.tensors[part.key].original is not None
        ]
        self.unfold({part.key for part in flattened if is_other(self.index, row_of(part))})
        self.unexpected = {part.key for part in parts.tensors if part.key not in self.index.tensors}
        known = {*self.objects, *(part.unique_key for part in self.commons)}
        self.unexpected |= {part.key for part in parts.objects if part.unique_key not in known}
        #: id of a part -> its value.
        self.loaded: dict[int, Any] = {}
        self.common: Any = {}
        #: The number of records of which a part is read.
        self.records = 0

    def unfold(self, keys: set[str]) -> None:
        """Load these keys box by box: where one rank does so, all that read together have to."""
        if keys - self.unfolded:
            self.unfolded |= keys
            self.index = self.checkpoint.holds.unfolded(self.unfolded)
            self.__dict__.pop("wanted", None)

    @functools.cached_property
    def table(self) -> RowTable:
        return table_of(self.parts.tensors, self.parts.objects)

    @functools.cached_property
    def wanted(self) -> list[WantedBox]:
        """The boxes that this rank loads; made anew where data was made, or keys were unfolded."""
        wanted = []
        rows = (row for row in self.table.tensors if row.key in self.index.tensors)
        for part, data, plain in zip(self.tensors, self.data, rows):
            if part.flattened_range is None or part.key not in self.unfolded:
                value = None if data is None else sharded_tensor.boxed(part, data)
                wanted.append(engine.wanted_of(self.index, plain, value, part.allow_shape_mismatch))
                continue
            row, begin = row_of(part, is_folded=False), part.flattened_range.start
            for box, start in sharded_tensor.runs(row.box, begin, part.flattened_range.stop, -begin):
                value = data
                if data is not None and has_slices(data):
                    value = data.detach()[start : start + box.numel].view(box.size)
                piece = row._replace(offset=box.offset, size=box.size)
                wanted.append(engine.wanted_of(self.index, piece, value, part.allow_shape_mismatch))
        return wanted

    def described(self) -> tuple[RowTable, tuple[int, ...]]:
        """Return this rank's rows, and the ranks that it reads with; what cannot be loaded is among the
        call's problems.
        """
        call, together = self.call, tuple[int, ...]()
        with call.guard():
            if self.mode.raises:
                call.problems += self.unexpected_problems()
            call.problems += unwritable(self.tensors)
            call.problems += engine.problems_of(self.index, self.wanted)
            needed = engine.needed_files(self.index, self.wanted, self.objects.values())
            call.problems += self.reader.files.problems(needed, self.index.ends)
            if self.options.has_common:
                self.common = self.checkpoint.common_state(self.options.trust, self.reader)
                call.problems += self.plain_problems()
        for group in self.options.read_together_in:
            with call.guard("the group that reads together"):
                together = group_ranks(group)
        return self.table, together

    def decided(
        self, own_by_rank: Mapping[int, tuple[RowTable, tuple[int, ...]]]
    ) -> tuple[set[str], set[str]]:
        """Return the missing keys, and those that are loaded box by box. On the first rank.

        Raises:
            Refusal: what the ranks ask for together cannot be loaded.
        """
        tables = {rank: table for rank, (table, _) in own_by_rank.items()}
        findings: Findings = list(apart({rank: ranks for rank, (_, ranks) in own_by_rank.items()}))
        unfolded = others(self.checkpoint.holds, tables)
        findings += both_ways(self.checkpoint.holds, tables, unfolded)
        findings += findings_of(tables) if self.options.validate_access_integrity else []
        missing: set[str] = set()
        if StrictHandling.requires_global_app_metadata(self.mode):
            missing = self.missing_of(tables)
            if self.mode is StrictHandling.RAISE_ALL:
                first = self.call.ranks[0]
                # Once, and on the first line: an error with many keys shows the first of them.
                notes = itertools.chain([self.options.advice], itertools.repeat(""))
                findings += [
                    (first, Problem(MISSING, key, note)) for key, note in zip(sorted(missing), notes)
                ]
        if findings:
            raise Refusal(findings)
        return missing, unfolded

    def unexpected_problems(self) -> list[Problem]:
        """Return the problems of keys that the checkpoint does not have, or has in another grid."""
        grids = {
            part.key: (part, ShardedObject.empty_from_unique_key(other))
            for part in self.parts.objects
            if part.unique_key not in self.objects and part.key in self.unexpected
            for other in self.index.objects
            if other.startswith(f"{part.key}/shard_")
        }
        problems = unexpected_problems(self.unexpected - set(grids))
        for part, other in grids.values():
            what = "an object of another grid than in the checkpoint"
            got, expected = f"{tuple(part.global_shape)}", f"{tuple(other.global_shape)} as saved"
            problems.append(Problem(what, part.unique_key, got, expected))
        return problems

    def plain_problems(self) -> list[Problem]:
        """Return the problems of plain tensors that would get nothing: they are not filled, as parts are.

        One that stands where the common state has a value gets that; one that the checkpoint does not know is
        named in the log, as programs hand on the whole state dict of a save.
        """
        problems, unknown = list[Problem](), list[str]()
        asked = {part.key for part in self.parts.tensors} if self.parts.plain else ()
        for path, tensor in self.parts.plain:
            if is_in(self.common, path):
                continue
            name = ".".join(map(str, path))
            key = next((key for key in (name, str(path[-1])) if key in self.index.tensors), None)
            if key is None or key in asked:
                unknown += [name] if key is None else []
                continue
            got = f"a plain tensor of shape {tuple(tensor.shape)}"
            shape = f"{tuple(self.index.tensors[key].shape)}"
            problems.append(Problem("not a ShardedTensor", name, got, f"one of {shape} for the key {key}"))
        if unknown and self.call.is_first:
            names = ", ".join(unknown[:5]) + (", ..." if len(unknown) > 5 else "")
            warn_once(logger, f"not in the checkpoint, and left out of what is loaded: {names}")
        return problems

    def missing_of(self, tables: Mapping[int, RowTable]) -> set[str]:
        """Return the keys of the checkpoint that no rank asks for; those of objects without their places."""
        known = set(self.index.tensors) | {key.partition("/shard_")[0] for key in self.index.objects}
        known.discard(engine.COMMON_STATE.partition("/")[0])
        return known - {key.partition("/shard_")[0] for key in keys_of(tables)}

    def read(self) -> StateDict:
        """Read the wanted parts, and agree on every rank's problems; return all values as one state dict.

        Raises:
            CheckpointingException: a record is damaged, a disk or a merge fails, or memory runs out.
        """
        call = self.call
        with call.room_for("the tensors that are loaded"):
            for number, part in enumerate(self.tensors):
                if part.data is None:
                    # A copy: the caller's part stays without data.
                    made = replace(part)
                    made.init_data("cpu")
                    self.data[number] = made.data
                    self.__dict__.pop("wanted", None)
                self.loaded[id(part)] = self.data[number]
        wanted: list[WantedBox] = []
        if not call.problems:
            with call.guard():
                for data, part in zip(self.data, self.tensors):
                    if data is not None and part.allow_shape_mismatch:
                        data.detach().zero_()
                wanted = self.wanted
        reads = list(engine.reads_of(self.index, wanted))
        self.records = len({read.chunk.place for read in reads}) + len(self.objects)
        call.tally.meter.expect(lambda: sum(read.part.numel * read.dtype.itemsize for read in reads))
        with call.tally.phase("reading"), call.guard(), torch.no_grad():
            try:
                records = self.read_parts(wanted, reads)
                for entry in self.parts.objects:
                    key = self.objects.get(entry.unique_key)
                    if key is not None:
                        place, record_read = self.index.objects[key], records.get(key)
                        if record_read is None:
                            record_read = self.reader.read_object(place)
                        self.loaded[id(entry)] = engine.load_object(record_read, key, self.options.trust)
                for entry in self.commons:
                    self.loaded[id(entry)] = self.checkpoint.common_state(self.options.trust, self.reader)
            except Damaged as error:
                call.record(Problem("damaged", got=str(error)), error)
        result: StateDict = {}
        if not call.problems:
            with call.guard():
                result = self.result()
        call.barrier("settling", so_far=DOUBTFUL)
        return result

    def read_parts(self, wanted: Sequence[WantedBox], reads: Sequence[Read]) -> dict[str, bytes]:
        """Read the tensors, and where ranks read together the records of objects, too."""
        for group in self.options.read_together_in:
            try:
                with begin(self.call.title, self.call.tally.operation, group) as call:
                    shared = read_shared(call, self.reader, self.index, wanted, list(self.objects.values()))
            except Exception as error:
                if members(group) is not members(self.call.group):
                    # The other ranks get this problem when all settle, in the group of the load.
                    raise RuntimeError(str(error)) from error
                # Every rank has it, or ranks are out of step with messages under way: no other may follow.
                agreed = CheckpointingException(str(error))
                agreed.raised_on = self.call.ranks
                raise agreed from error
            if shared.failure is not None:
                raise shared.failure
            return shared.objects
        self.reader.read(reads)
        return {}

    def result(self) -> StateDict:
        """Return the common state, the loaded values and those that are not saved, as one state dict."""
        return merged(assembled(self.parts.built, self.common, self.loaded), self.parts.original)


def is_in(common: Any, path: Sequence[Any]) -> bool:
    """Return whether nested dicts and lists have a value at a path."""
    for step in path:
        if isinstance(common, list) and isinstance(step, int):
            common = dict(enumerate(common))
        if not isinstance(common, dict) or step not in common:
            return False
        common = common[step]
    return True


def agree_on_load(call: Call, made: Attempt[Loading], common: Union[Common, Attempt[Common]]) -> set[str]:
    """Raise every rank's problems on every rank; return the missing keys.

    Args:
        common: what must be the same on every rank, where no agreement before has compared it.

    Raises:
        CheckpointingException: something cannot be loaded as it is asked for.
    """
    with call.guard() as own:
        own.set(made.value.described())
    missing, unfolded = call.gather_object(
        "planning", own, lambda gathered: made.value.decided(gathered), must_agree=common
    )
    loading = made.value
    loading.unfold(unfolded)
    if loading.mode.logs and (missing or loading.unexpected):
        logger.warning("%s: %s", loading.checkpoint.folder, mismatch_text(missing, loading.unexpected))
    return set(missing)


def apart(groups: Mapping[int, tuple[int, ...]]) -> Iterator[tuple[int, Problem]]:
    """Yield a finding of each rank whose group reads together, and has a rank that names another group."""
    for rank, ranks in groups.items():
        for other in ranks:
            if groups.get(other) != ranks or rank not in ranks:
                got, expected = f"ranks {groups.get(other, 'none')} on rank {other}", f"ranks {ranks}"
                what = "the ranks that read together do not have the same group"
                yield rank, Problem(what, "", got, expected)
                break


def is_other(index: Index, row: Row) -> bool:
    """Return whether a row has a tensor in another form than the checkpoint: folded, or other folds."""
    stored = index.tensors.get(row.key)
    if stored is None or stored.original is row.original is None:
        return False
    is_plain = row.original is None and row.shape == stored.shape
    return not is_plain and (stored.shape, stored.original) != (row.shape, row.original)


def others(index: Index, tables: Mapping[int, RowTable]) -> set[str]:
    """Return the keys that any rank wants in another form."""
    few = examples(tables)
    is_folded = any(row.original for table in few.values() for row in table.tensors)
    if not is_folded and not any(stored.original for stored in index.tensors.values()):
        return set()
    return {row.key for table in tables.values() for row in table.tensors if is_other(index, row)}


def both_ways(
    index: Index, tables: Mapping[int, RowTable], unfolded: set[str]
) -> Iterator[tuple[int, Problem]]:
    """Yield findings of ranks that want a tensor folded, as it is stored, where others want it unfolded."""
    for rank, table in tables.items() if unfolded else ():
        for row in table.tensors:
            if row.key in unfolded and row.original is None and row.shape == index.tensors[row.key].shape:
                what = "asked for as it is stored, and by another rank as it was before"
                yield rank, Problem(what, row.key, f"{row.shape}", f"{index.tensors[row.key].original}")


def unwritable(parts: list[ShardedTensor]) -> list[Problem]:
    """Return the problems of tensors into which nothing can be loaded."""
    problems = []
    for part in parts:
        if part.data is None:
            continue
        why = "" if has_slices(part.data) else layout_text(part.data)
        why = why or why_not_writable(part.data)
        if why:
            problems.append(Problem("a tensor cannot be written", part.key, why))
    return problems
