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
    peak     rank 0: its most memory above that before the plan
    load     another rank: from the index that it gets to the reads of its own boxes; its memory; its files
"""

from __future__ import annotations

import argparse
import os
import pickle
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT)] if str(ROOT) not in sys.path else []

from torch_dcp_backport.dist_checkpointing._src import load, metadata, plans, replicas  # noqa: E402
from torch_dcp_backport.dist_checkpointing._src.body import Output, Written  # noqa: E402
from torch_dcp_backport.dist_checkpointing._src.commit import file_of  # noqa: E402
from torch_dcp_backport.dist_checkpointing._src.records import form_of  # noqa: E402
from torch_dcp_backport.dist_checkpointing._src.table import (  # noqa: E402
    Row,
    RowTable,
    cells_of,
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
COLUMNS = ("up", "plan", "down", "index", "peak", "size", "again", "load", "memory", "files")


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


def fsdp(rank: int, ranks: int, keys: int) -> Iterator[Row]:
    cuts = {shape: cut_rows(shape, rank, ranks) for shape in SHAPES}
    for key, shape in keys_of(keys):
        yield Row(key, DTYPE, shape, *cuts[shape], True, 0)


def hsdp(rank: int, ranks: int, keys: int) -> Iterator[Row]:
    shards = min(64, ranks // 2)
    cuts = {shape: cut_rows(shape, rank % shards, shards) for shape in SHAPES}
    for key, shape in keys_of(keys):
        yield Row(key, DTYPE, shape, *cuts[shape], rank < shards, 0)


def ddp(rank: int, ranks: int, keys: int) -> Iterator[Row]:
    for key, shape in keys_of(keys):
        yield Row(key, DTYPE, shape, (0,) * len(shape), shape, rank == 0, 0)


def moe(rank: int, ranks: int, keys: int) -> Iterator[Row]:
    """Experts on groups of ranks that share none, each cut over the ranks of its group."""
    groups = min(8, ranks)
    cut = cut_rows(EXPERT, rank // groups, ranks // groups)
    for state in STATES:
        for number in range(rank % groups, keys // len(STATES), groups):
            yield Row(f"{state}.experts.{number}.weight", DTYPE, EXPERT, *cut, True, rank % groups)


LAYOUTS: dict[str, Callable[[int, int, int], Iterator[Row]]] = {
    "fsdp": fsdp,
    "hsdp": hsdp,
    "ddp": ddp,
    "moe": moe,
}


# --- the parts that are measured ---


class Case(NamedTuple):
    layout: str
    keys: int
    ranks: int

    def table(self, rank: int) -> RowTable:
        return RowTable(list(LAYOUTS[self.layout](rank, self.ranks, self.keys)))


def planned(tables: dict[int, RowTable]) -> tuple[plans.Description, dict[int, Any]]:
    """Plan as the first rank does in a save; return the description and every rank's answer."""
    assert not findings_of(tables)
    cells = cells_of(tables)
    shares = plans.shares_of(tables, cells)
    description = plans.Description(tables, shares)
    shared = replicas.shared_by(replicas.replicas_in(cells), tables)
    return description, {rank: (share, b"", shared[rank]) for rank, share in shares.items()}


def output_of(case: Case, rank: int, table: RowTable, answer: Any) -> Output:
    """Return what a rank says that has written its share."""
    records, at = [], 0
    for item in answer[0].tensors:
        length = form_of(table.tensors[item.number].dtype, item.box.size).length
        records.append(Written(at, length, (rank * 7919 + at) & 0xFFFFFFFF))
        at += length
    return Output(file_of(rank), at, records, [])


def seconds() -> float:
    return time.process_time()


def peak() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def reset_peak() -> int:
    """Begin to measure anew; return the memory of now."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak()


def measure(case: Case, tell: Callable[[str, float], None]) -> None:
    """Tell each column's figure once it is known."""
    spent, sent, answers_bytes = 0.0, 0, 0
    messages: dict[int, bytes] = {}
    for rank in range(case.ranks):
        messages[rank] = pickle.dumps(case.table(rank))
        sent += len(messages[rank])
    tell("up", sent)
    before = reset_peak()
    began = seconds()
    # One by one, as they arrive.
    tables = {rank: pickle.loads(messages.pop(rank)) for rank in range(case.ranks)}
    description, answers = planned(tables)
    packed = {rank: pickle.dumps(answer) for rank, answer in answers.items()}
    spent = seconds() - began
    tell("plan", spent)
    tell("down", sum(map(len, packed.values())))
    answers.clear()
    outputs_packed = {}
    for rank in range(case.ranks):
        output = output_of(case, rank, case.table(rank), pickle.loads(packed.pop(rank)))
        outputs_packed[rank] = pickle.dumps(output)
    del tables
    began = seconds()
    outputs = {rank: pickle.loads(data) for rank, data in outputs_packed.items()}
    data = description.to_bytes(outputs, (0, 0))
    tell("index", seconds() - began)
    tell("peak", peak() - before)
    tell("size", len(data))
    del outputs
    began = seconds()
    outputs = {rank: pickle.loads(data) for rank, data in outputs_packed.items()}
    data = description.to_bytes(outputs, (0, 0))
    tell("again", seconds() - began)
    del outputs, outputs_packed, description
    rank = case.ranks // 2
    rows = case.table(rank).tensors
    before = reset_peak()
    began = seconds()
    index = metadata.from_bytes(data)
    wanted = [load.wanted_of(index, row, None, False) for row in rows]
    files = {place.file for _, place in load.places_of(index, wanted, ())}
    tell("load", seconds() - began)
    tell("memory", peak() - before)
    tell("files", len(files))


# --- lines ---


def line_of(case: Case, limit: float, memory: int) -> dict[str, str]:
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
                    measure(case, lambda name, value: print(name, value, file=pipe))
                    code = 0
                except MemoryError:
                    print("end memory", file=pipe)
        finally:
            os._exit(code)
    os.close(writer)
    signal.signal(signal.SIGALRM, lambda *_: os.kill(child, signal.SIGKILL))
    signal.alarm(int(limit))
    with os.fdopen(reader) as pipe:
        told = dict(line.split() for line in pipe)
    signal.alarm(0)
    _, status = os.waitpid(child, 0)
    end = told.pop("end", f"> {limit:.0f} s" if os.WIFSIGNALED(status) else "failed" if status else "")
    return {name: spelled(name, float(told[name])) if name in told else end for name in COLUMNS}


def spelled(name: str, value: float) -> str:
    if name in ("plan", "index", "again", "load"):
        return f"{value:.2f} s"
    return f"{value:.0f}" if name == "files" else f"{value / MIB:.1f} MiB"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--keys", nargs="+", type=int, default=[1000, 9000], help="tensors")
    parser.add_argument("--ranks", nargs="+", type=int, default=[8, 128, 1024])
    parser.add_argument("--limit", type=float, default=60, help="seconds of a line")
    parser.add_argument("--memory", type=float, default=6, help="GiB of address space of a line")
    options = parser.parse_args()
    torch.set_num_threads(1)
    form = "{:<5} {:>6} {:>6}" + " {:>11}" * len(COLUMNS)
    print(form.format("", "keys", "ranks", *COLUMNS), flush=True)
    for layout in options.layouts:
        for keys in options.keys:
            for ranks in options.ranks:
                case = Case(layout, keys, ranks)
                line = line_of(case, options.limit, int(options.memory * 2**30))
                print(form.format(*case, *line.values()), flush=True)


if __name__ == "__main__":
    main()
