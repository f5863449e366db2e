#!/usr/bin/env python3
"""What the plan and the index of a sharded checkpoint cost, up to 16,384 ranks, in one process.

    python3 tools/lanes.py run current -- python benchmarks/scale.py --keys 1000 9000 --ranks 8 128 1024

Tables of all ranks are made up, and go through the package's own functions as messages would. Each line is a
process of its own, with a limit of seconds (`--limit`) and of memory (`--memory`): where one ends it, the
columns that were not reached say so. Seconds are a processor's, of rank 0 or of one other rank alone; no file
but the index is written.

    up       bytes of tables that rank 0 gets, and bytes of shares that it sends (`down`)
    plan     rank 0: from the tables to every rank's share
    index    rank 0: from every rank's records to the content of `.metadata`; `again` with the plan kept
    peak     rank 0: its most memory above that before the plan; `size` of `.metadata`
    read     rank 0: from `.metadata` to the index that every rank gets, of `sent` bytes
    load     another rank: from the index that it gets to the reads of its own boxes; its memory; its files

With `--by ours dcp` torch's DCP is measured on the same boxes, in the columns that it has: its planner on the
first rank, its index, and what each rank spends to read that. The mixture of experts of 36,096 tensors with
their two states is `--layouts moe --keys 108288`.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import pickle
import resource
import signal
import sys
import tempfile
import time
import traceback
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT)] if str(ROOT) not in sys.path else []

from torch_dcp_backport.dist_checkpointing._src import load, metadata, packed, plans, replicas  # noqa: E402
from torch_dcp_backport.dist_checkpointing._src.body import Output, RecordInfo, Records  # noqa: E402
from torch_dcp_backport.dist_checkpointing._src.commit import file_of  # noqa: E402
from torch_dcp_backport.dist_checkpointing._src.records import form_of  # noqa: E402
from torch_dcp_backport.dist_checkpointing._src.save import SentTable, tables_of  # noqa: E402
from torch_dcp_backport.dist_checkpointing._src.table import (  # noqa: E402
    Outline,
    Rows,
    RowTable,
    alike_of,
    findings_of,
)

MIB = 2**20
#: A transformer's layer with 4,096 features; an AdamW state has two more tensors of each.
SHAPES = (
    (4096, 4096),
    (1024, 4096),
    (1024, 4096),
    (4096, 4096),
    (14336, 4096),
    (4096, 14336),
    (4096,),
    (4096,),
)
EXPERT = (1536, 4096)
STATES = ("model", "optimizer.state.exp_avg", "optimizer.state.exp_avg_sq")
DTYPE = torch.float32
COLUMNS = ("up", "plan", "down", "index", "peak", "size", "again", "read", "sent", "load", "memory", "files")


# --- tables ---


def keys_of(count: int) -> list[tuple[str, tuple[int, ...]]]:
    """Return (key, global shape) of so many tensors, a third of them a model's."""
    each = -(-count // len(STATES))
    return [
        (
            f"{state}.layers.{number // len(SHAPES)}.weight_{number % len(SHAPES)}",
            SHAPES[number % len(SHAPES)],
        )
        for state in STATES
        for number in range(each)
    ][:count]


def cut_rows(shape: tuple[int, ...], part: int, parts: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (offset, size) of a part along the first axis, as FSDP2 cuts it: the last ones may be empty."""
    each = -(-shape[0] // parts)
    start = min(part * each, shape[0])
    zeros = (0,) * (len(shape) - 1)
    return (start, *zeros), (min(each, shape[0] - start), *shape[1:])


class Place(NamedTuple):
    """A rank's part of a layout."""

    #: Ranks of one group have the same keys.
    group: int
    #: Its part along the first axis, of so many.
    part: int
    parts: int
    is_main: bool = True


def fsdp(rank: int, ranks: int) -> Place:
    return Place(0, rank, ranks)


def hsdp(rank: int, ranks: int) -> Place:
    shards = min(64, ranks // 2)
    return Place(0, rank % shards, shards, rank < shards)


def ddp(rank: int, ranks: int) -> Place:
    return Place(0, 0, 1, rank == 0)


def moe(rank: int, ranks: int) -> Place:
    """Experts on groups of ranks that share none, each cut over the ranks of its group."""
    groups = min(8, ranks)
    return Place(rank % groups, rank // groups, ranks // groups)


LAYOUTS: dict[str, Callable[[int, int], Place]] = {"fsdp": fsdp, "hsdp": hsdp, "ddp": ddp, "moe": moe}


@functools.cache
def outline_of(layout: str, group: int, groups: int, keys: int) -> tuple[Outline, list[tuple[int, ...]]]:
    """Return the keys of a group's ranks, and the shapes by the numbers of their forms."""
    tensors = keys_of(keys)
    if layout == "moe":
        numbers = range(group, keys // len(STATES), groups)
        tensors = [(f"{state}.experts.{number}.weight", EXPERT) for state in STATES for number in numbers]
    shapes = list(dict.fromkeys(shape for _, shape in tensors))
    forms = array("I", (shapes.index(shape) for _, shape in tensors))
    return Outline([key for key, _ in tensors], forms), shapes


# --- the parts that are measured ---


class Case(NamedTuple):
    layout: str
    keys: int
    ranks: int

    def table(self, rank: int) -> RowTable:
        """Return the table of a rank; no row is made."""
        place = LAYOUTS[self.layout](rank, self.ranks)
        outline, shapes = outline_of(self.layout, place.group, min(8, self.ranks), self.keys)
        cuts = [cut_rows(shape, place.part, place.parts) for shape in shapes]
        forms = [(DTYPE, shape, *cut, place.is_main, place.group, None) for shape, cut in zip(shapes, cuts)]
        return RowTable(Rows(outline, forms))


def planned(tables: dict[int, RowTable]) -> tuple[plans.Description, dict[int, Any]]:
    """Plan as the first rank does in a save; return the description and every rank's answer."""
    assert not findings_of(tables)
    alike = alike_of(tables)
    plan = plans.plan_of(alike)
    shared = replicas.shared_by(alike)
    answers = {rank: (share, b"", shared[rank]) for rank, share in plan.shares().items()}
    return plans.Description(plan), answers


class Outputs:
    """What ranks say that have written their shares."""

    def __init__(self, case: Case) -> None:
        self.case = case
        #: Shares of boxes of the same sizes have records at the same places.
        self._known: dict[Any, Records] = {}

    def of(self, rank: int, share: plans.PackedShare) -> Output:
        outline = self.case.table(rank).rows().outline
        key: Any = outline.digest, tuple((box.size, repr(rows)) for box, rows in share.runs)
        if key not in self._known:
            records, at = [], 0
            for item in share.share_of(outline).tensors:
                length = form_of(DTYPE, item.box.size).length
                records.append(RecordInfo(at, length, 0))
                at += length
            self._known[key] = Records.of(records)
        known = self._known[key]
        crcs = array("I", os.urandom(4 * len(known)))
        records = Records(known.start, known.lengths, known.numbers, crcs, known.gaps)
        return Output(file_of(rank), 1, records, [])


def seconds() -> float:
    return time.process_time()


def peak() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def reset_peak() -> int:
    """Begin to measure anew; return the memory of now."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak()


def write(path: Path, description: plans.Description, outputs: dict[int, Output]) -> None:
    with open(path, "wb") as file:
        for piece in description.content(outputs, (0, 0)):
            file.write(piece)


def measure(case: Case, path: Path, tell: Callable[[str, float], None]) -> None:
    """Tell each column's figure once it is known."""
    spent, sent = 0.0, 0
    messages: dict[int, bytes] = {}
    outlines: set[bytes] = set()
    for rank in range(case.ranks):
        rows = case.table(rank).rows()
        # Of the ranks with the same keys, the first one sends them.
        sent_keys = rows.outline if rows.outline.digest not in outlines else rows.outline.digest
        outlines.add(rows.outline.digest)
        messages[rank] = pickle.dumps(SentTable(sent_keys, rows.forms, (), b""))
        sent += len(messages[rank])
    tell("up", sent)
    before = reset_peak()
    began = seconds()
    # One by one, as they arrive.
    tables = tables_of({rank: pickle.loads(messages.pop(rank)) for rank in range(case.ranks)})
    description, answers = planned(tables)
    shares = {rank: pickle.dumps(answer) for rank, answer in answers.items()}
    spent = seconds() - began
    tell("plan", spent)
    tell("down", sum(map(len, shares.values())))
    answers.clear()
    written = Outputs(case)
    outputs_packed = {
        rank: pickle.dumps(written.of(rank, pickle.loads(shares.pop(rank))[0])) for rank in range(case.ranks)
    }
    del written
    del tables
    began = seconds()
    outputs = {rank: pickle.loads(data) for rank, data in outputs_packed.items()}
    write(path, description, outputs)
    tell("index", seconds() - began)
    tell("peak", peak() - before)
    tell("size", path.stat().st_size)
    del outputs
    began = seconds()
    outputs = {rank: pickle.loads(data) for rank, data in outputs_packed.items()}
    write(path, description, outputs)
    tell("again", seconds() - began)
    del outputs, outputs_packed, description
    began = seconds()
    data = pickle.dumps(packed.read(path) or path.read_bytes())
    tell("read", seconds() - began)
    tell("sent", len(data))
    rank = case.ranks // 2
    rows = list(case.table(rank).tensors)
    before = reset_peak()
    began = seconds()
    described = pickle.loads(data)
    is_packed = isinstance(described, packed.Packed)
    index = metadata.from_packed(described) if is_packed else metadata.from_bytes(described)
    wanted = [load.wanted_of(index, row, None, False) for row in rows]
    files = {file for _, file in load.needed_files(index, wanted, ())}
    tell("load", seconds() - began)
    tell("memory", peak() - before)
    tell("files", len(files))


# --- torch's DCP, beside it ---


def dcp_plan_of(case: Case, rank: int) -> Any:
    """Return a rank's plan of a save as torch's DCP makes it, of boxes that are given."""
    from torch.distributed.checkpoint import metadata as dcp_metadata
    from torch.distributed.checkpoint import planner

    items = []
    for row in case.table(rank).tensors:
        if not row.is_main and case.layout != "ddp":
            # A DTensor's replica writes nothing there.
            continue
        chunk = dcp_metadata.ChunkStorageMetadata(torch.Size(row.box.offset), torch.Size(row.box.size))
        properties = dcp_metadata.TensorProperties(dtype=DTYPE)
        data = planner.TensorWriteData(chunk=chunk, properties=properties, size=torch.Size(row.shape))
        index = dcp_metadata.MetadataIndex(row.key, torch.Size(row.box.offset))
        items.append(planner.WriteItem(index=index, type=planner.WriteItemType.SHARD, tensor_data=data))
    return planner.SavePlan(items, planner_data={})


def measure_dcp(case: Case, path: Path, tell: Callable[[str, float], None]) -> None:
    """Tell what torch's own planner and index cost; it has no columns for what it does not do."""
    from torch.distributed.checkpoint import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    messages = {rank: pickle.dumps(dcp_plan_of(case, rank)) for rank in range(case.ranks)}
    tell("up", sum(map(len, messages.values())))
    before = reset_peak()
    began = seconds()
    plans_of_ranks = [pickle.loads(messages.pop(rank)) for rank in range(case.ranks)]
    first = DefaultSavePlanner()
    first.set_up_planner({}, is_coordinator=True)
    shares, index = first.create_global_plan(plans_of_ranks)
    packed_shares = [pickle.dumps(share) for share in shares]
    tell("plan", seconds() - began)
    tell("down", sum(map(len, packed_shares)))
    results = [
        [(item.index, _StorageInfo(f"__{rank}_0.distcp", 0, 1)) for item in share.items]
        for rank, share in enumerate(shares)
    ]
    began = seconds()
    index.storage_data = {key: info for own in results for key, info in own}
    path.write_bytes(pickle.dumps(index))
    tell("index", seconds() - began)
    tell("peak", peak() - before)
    tell("size", path.stat().st_size)
    began = seconds()
    pickle.loads(path.read_bytes())
    # Every rank reads it for itself.
    tell("read", seconds() - began)


MEASURES = {"ours": measure, "dcp": measure_dcp}

# --- lines ---


def line_of(by: str, case: Case, path: Path, limit: float, memory: int) -> dict[str, str]:
    """Measure a case in a process of its own, up to the limits."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        code = 1
        try:
            os.close(reader)
            resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
            with os.fdopen(writer, "w", buffering=1) as pipe:
                try:
                    MEASURES[by](case, path, lambda name, value: print(name, value, file=pipe))
                    code = 0
                except MemoryError:
                    print("end memory", file=pipe)
                except Exception:
                    traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writer)
    signal.signal(signal.SIGALRM, lambda *_: os.kill(child, signal.SIGKILL))
    signal.alarm(int(limit))
    with os.fdopen(reader) as pipe:
        told = dict(line.split() for line in pipe)
    signal.alarm(0)
    _, status = os.waitpid(child, 0)
    end = told.pop("end", f"> {limit:.0f} s" if os.WIFSIGNALED(status) else "failed" if status else "-")
    return {name: spelled(name, float(told[name])) if name in told else end for name in COLUMNS}


def spelled(name: str, value: float) -> str:
    if name in ("plan", "index", "again", "read", "load"):
        return f"{value:.2f} s"
    return f"{value:.0f}" if name == "files" else f"{value / MIB:.1f} MiB"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--by", nargs="+", choices=MEASURES, default=["ours"], help="whose save and load")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--keys", nargs="+", type=int, default=[1000, 9000], help="tensors")
    parser.add_argument("--ranks", nargs="+", type=int, default=[8, 128, 1024])
    parser.add_argument("--limit", type=float, default=60, help="seconds of a line")
    parser.add_argument("--memory", type=float, default=6, help="GiB of address space of a line")
    options = parser.parse_args()
    torch.set_num_threads(1)
    form = "{:<5} {:<5} {:>6} {:>6}" + " {:>11}" * len(COLUMNS)
    print(form.format("", "by", "keys", "ranks", *COLUMNS), flush=True)
    cases = itertools.product(options.layouts, options.keys, options.ranks)
    with tempfile.TemporaryDirectory() as folder:
        for case, by in itertools.product(itertools.starmap(Case, cases), options.by):
            place = Path(folder) / metadata.NAME
            line = line_of(by, case, place, options.limit, int(options.memory * 2**30))
            print(form.format(case.layout, by, *case[1:], *line.values()), flush=True)


if __name__ == "__main__":
    main()
