#!/usr/bin/env python3
"""Makes results.md of the transfer benchmark's results.json: the goals and the tables.

    python3 benchmarks/transfer_report.py FOLDER

Every figure is computed from the measurements; what failed or was not measured is called so.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transfer_cases import CASES, MODELS, WAYS, Case

MIB = 1 << 20
OURS = "backport-2.6"
STOCK = "stock-2.6"
NATIVE = "native-current"
SHARE = 0.02  # of the model, allowed above the staging budget

# (case, model, ranks, the most of native-current's seconds)
SECONDS_GOALS = (
    ("load", "dense", 4, 0.22),
    ("load", "dense", 8, 0.15),
    ("load-meta", "dense", 4, 0.45),
    ("load", "embed", 4, 0.50),
    ("load", "small", 4, 0.10),
    ("save", "dense", 4, 0.25),
    ("save", "embed", 4, 0.30),
    ("save", "small", 4, 0.05),
    ("optim-load", "dense", 4, 0.25),
    ("optim-load", "small", 4, 0.12),
    ("load-each", "dense", 4, 1.0),
    ("load-each", "small-500", 4, 1.0),
)
RECEIVED_GOAL = ("load", "dense", 8, 1.05)  # of a rank's own shards


@dataclass(frozen=True)
class Compared:
    """One combination of case, model and ranks, with the measurements of each way."""

    case: Case
    model: str
    world: int
    unit: int  # bytes of the full model, or of the full optimizer state
    ways: dict[str, list[dict[str, Any]]]

    def good(self, way: str) -> list[list[dict[str, Any]]]:
        """The ranks' results of each measurement that did not fail."""
        return [m["ranks"] for m in self.ways.get(way, ()) if not m["error"]]

    def errors(self, way: str) -> list[str]:
        return [m["error"] for m in self.ways.get(way, ()) if m["error"]]

    def wrong(self, way: str) -> int:
        return max((sum(rank["wrong"] for rank in ranks) for ranks in self.good(way)), default=0)

    def slowest(self, way: str) -> list[float]:
        """Of each measurement the slowest rank's seconds."""
        return [max(rank["seconds"] for rank in ranks) for ranks in self.good(way)]

    def seconds(self, way: str) -> float | None:
        """Median over the measurements of the slowest rank's seconds."""
        slowest = self.slowest(way)
        return statistics.median(slowest) if slowest else None

    def ratio(self, way: str, other: str) -> float | None:
        mine, theirs = self.seconds(way), self.seconds(other)
        return None if mine is None or theirs is None else mine / theirs

    def highest(self, way: str, what: str, ranks: slice) -> int | None:
        """The highest peak or kept memory above what is due, of these ranks in all measurements."""
        found = [
            rank[what] - rank["due"]
            for measured in self.good(way)
            for rank in measured[ranks]
            if rank[what] is not None
        ]
        return max(found, default=None)

    def traffic(self, way: str) -> float | None:
        """Bytes that all ranks together received, as a multiple of the model."""
        totals = [
            sum(rank["received"] for rank in ranks)
            for ranks in self.good(way)
            if all(rank["received"] is not None for rank in ranks)
        ]
        return statistics.median(totals) / self.unit if totals else None


FIRST, OTHERS, EVERY = slice(0, 1), slice(1, None), slice(None)


@dataclass(frozen=True)
class Measured:
    """results.json."""

    about: dict[str, Any]
    compared: list[Compared]

    @property
    def ways(self) -> list[str]:
        seen = {way for one in self.compared for way in one.ways}
        return [way for way in WAYS if way in seen]

    @property
    def has_native(self) -> bool:
        return NATIVE in self.ways

    def find(self, case: str, model: str, world: int) -> Compared | None:
        wanted = (case, model, world)
        return next((c for c in self.compared if (c.case.name, c.model, c.world) == wanted), None)


def read(folder: Path) -> Measured:
    about = json.loads((folder / "results.json").read_text())
    compared = [
        Compared(CASES[c["case"]], c["model"], c["world"], c["unit"], c["ways"])
        for c in about.pop("combinations").values()
    ]
    cases, models = list(CASES), list(MODELS)
    compared.sort(key=lambda c: (cases.index(c.case.name), models.index(c.model), c.world))
    return Measured(about, compared)


def write(folder: Path) -> bool:
    """Whether there is anything for the picture, which compares with the native torches."""
    measured = read(folder)
    sections = (
        _head(measured),
        _goals(measured),
        _seconds(measured),
        _memory(measured, "Peak, ranks other than 0", "peak", OTHERS),
        _memory(measured, "Peak, rank 0", "peak", FIRST),
        _memory(measured, "Kept, all ranks", "kept", EVERY),
        _traffic(measured),
        _failures(measured),
        _legend(measured),
    )
    (folder / "results.md").write_text("\n\n".join(filter(None, sections)) + "\n")
    return measured.has_native


def _head(measured: Measured) -> str:
    machine, runs = measured.about["machine"], measured.about["runs"]
    lines = [
        "# What a state-dict call costs",
        "",
        "Written by `benchmarks/transfer.py`; do not edit.",
        "",
        f"- {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, {machine['system']}",
        f"- Python {machine['python']}; gloo over the loopback device, one thread per rank",
        *(f"- {way}: torch {', '.join(torchs_of(measured, way))}; {WAYS[way].text}" for way in measured.ways),
        f"- staging budget of the backport: {measured.about['staging_mib']:g} MiB",
        *(
            f"- {run['date']}, commit {run['commit']}, {run['repeats']} repeats, load average before "
            f"{run['load_average']:.1f}: `{run['command']}`"
            for run in runs
        ),
        *(["", "![curves and bars](results.png)"] if measured.has_native else []),
    ]
    return "\n".join(lines)


def torchs_of(measured: Measured, way: str) -> list[str]:
    found = {m["torch"] for one in measured.compared for m in one.ways.get(way, ())}
    return sorted(found - {""}) or ["unknown"]


def _goals(measured: Measured) -> str:
    if not measured.has_native:
        return ""
    rows = [*_seconds_goals(measured), *_memory_goals(measured), *_received_goals(measured)]
    title = f"## Targets\n\n{OURS} on torch 2.6; seconds against {NATIVE}.\n\n"
    return title + _table(("what", "goal", "measured", "reached"), rows)


Row = tuple[str, ...]


def _seconds_goals(measured: Measured) -> Iterator[Row]:
    for case, model, world, most in SECONDS_GOALS:
        one = measured.find(case, model, world)
        ratio = one.ratio(OURS, NATIVE) if one else None
        got = "not measured" if ratio is None else f"{ratio:.2f}"
        yield (f"seconds, {case} {model}, {world} ranks", f"<= {most:.2f}", got, _verdict(one, ratio, most))


def _memory_goals(measured: Measured) -> Iterator[Row]:
    """Every load on every rank, every save on the ranks that get nothing."""
    for one in measured.compared:
        if OURS not in one.ways:
            continue
        most = measured.about["staging_mib"] * MIB + SHARE * one.unit
        peak = one.highest(OURS, "peak", OTHERS if one.case.save else EVERY)
        who = "ranks other than 0" if one.case.save else "every rank"
        got = "not measured" if peak is None else f"{peak / MIB:.1f} MiB"
        what = f"peak above S, {one.case.name} {one.model}, {one.world} ranks, {who}"
        yield (what, f"<= {most / MIB:.1f} MiB", got, _verdict(one, peak, most))


def _received_goals(measured: Measured) -> Iterator[Row]:
    case, model, world, most = RECEIVED_GOAL
    one = measured.find(case, model, world)
    ways: tuple[tuple[str, Callable[[dict[str, Any]], int | None]], ...] = (
        ("by the kernel's count", lambda rank: rank["received"]),
        ("by `last_report()`", lambda rank: (rank["report"] or {}).get("bytes_received")),
    )
    for how, get in ways:
        found = [
            received / rank["shard"]
            for ranks in (one.good(OURS) if one else ())
            for rank in ranks
            if (received := get(rank)) is not None
        ]
        worst = max(found, default=None)
        got = "not measured" if worst is None else f"{worst:.3f}x"
        what = f"received by a rank / its shards, {case} {model}, {world} ranks, {how}"
        yield (what, f"<= {most:.2f}x", got, _verdict(one, worst, most))


def _verdict(one: Compared | None, got: float | None, most: float) -> str:
    """Fast and wrong is not reached."""
    if one is not None and (one.errors(OURS) or one.wrong(OURS)):
        return "**no**: it failed" if one.errors(OURS) else "**no**: wrong values"
    if got is None:
        return "not measured"
    return "yes" if got <= most else "**no**"


def _seconds(measured: Measured) -> str:
    others = [NATIVE, STOCK] if measured.has_native else [way for way in measured.ways if way != OURS]

    def cells(one: Compared) -> Row:
        ratios = [one.ratio(OURS, other) for other in others]
        return (
            *(_seconds_cell(one, way) for way in measured.ways),
            *("" if ratio is None else f"{ratio:.2f}" for ratio in ratios),
        )

    heads = (*measured.ways, *(f"{OURS} / {other}" for other in others))
    return "## Seconds\n\nMedians; in brackets how many measurements.\n\n" + _compared(measured, heads, cells)


def _seconds_cell(one: Compared, way: str) -> str:
    if way not in one.ways:
        return ""
    seconds = one.seconds(way)
    parts = [] if seconds is None else [f"{seconds:.3f} ({len(one.good(way))})"]
    if one.wrong(way):
        parts.append(f"**{one.wrong(way)} wrong**")
    if one.errors(way):
        parts.append("**error**")
    return ", ".join(parts)


def _memory(measured: Measured, title: str, what: str, ranks: slice) -> str:
    def cell(one: Compared, way: str) -> str:
        held = one.highest(way, what, ranks)
        return "" if held is None else f"{held / MIB:.1f} ({held / one.unit:+.2f}x)"

    text = f"## {title}\n\nMiB above S (multiple of the model); the highest seen.\n\n"
    return text + _compared(measured, measured.ways, lambda one: tuple(cell(one, w) for w in measured.ways))


def _traffic(measured: Measured) -> str:
    def cell(one: Compared, way: str) -> str:
        traffic = one.traffic(way)
        return "" if traffic is None else f"{traffic:.2f}x"

    text = "## Traffic\n\nBytes that all ranks together received, as a multiple of the model.\n\n"
    return text + _compared(measured, measured.ways, lambda one: tuple(cell(one, w) for w in measured.ways))


def _compared(measured: Measured, heads: Sequence[str], cells: Callable[[Compared], Row]) -> str:
    rows = [
        (one.case.name, one.model, str(one.world), f"{one.unit / MIB:.1f}", *cells(one))
        for one in measured.compared
    ]
    return _table(("case", "model", "ranks", "MiB", *heads), rows)


def _table(heads: Sequence[str], rows: Sequence[Row]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _failures(measured: Measured) -> str:
    lines = [
        f"- {one.case.name} {one.model}, {one.world} ranks, {way}: `{error.splitlines()[0][:300]}`"
        for one in measured.compared
        for way in measured.ways
        for error in one.errors(way)
    ]
    return "\n".join(("## Errors\n", *lines)) if lines else ""


def _legend(measured: Measured) -> str:
    cases = {one.case.name for one in measured.compared}
    models = {one.model for one in measured.compared}
    return "\n".join(
        (
            "## What was measured\n",
            *(f"- {case.name}: {case.text}" for case in CASES.values() if case.name in cases),
            *(
                f"- {model.name}: {model.text}; {model.tensors:,} tensors, {model.bytes / MIB:.1f} MiB"
                for model in MODELS.values()
                if model.name in models
            ),
            "",
            _METHOD,
        )
    )


_METHOD = """\
Every measurement is made in fresh processes, forked from one that has imported torch, after the same call
on a tiny model; the ways take turns, one at a time. A way that needs more than 10 seconds is measured 3
times only; one that failed is not tried again. Seconds are the slowest rank's, from a barrier to a barrier.
Peak: the highest resident memory during the call above that before it. Kept: resident memory after it
above that before, with what was handed in let go and what a save returned still held. Both are given above
S, what the call has to leave: the shards (load-meta), the states (optim-load), the full state on rank 0
(save, optim-save), nothing otherwise. Multiples are of the full model, for optim-* of the full optimizer
state. Traffic is the kernel's count of every TCP connection of the ranks, barriers included. Values are
compared bit for bit with a formula, after the measurement."""


if __name__ == "__main__":
    write(Path(sys.argv[1]))
