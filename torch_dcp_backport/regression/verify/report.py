"""The verdict on the ranks' reports in `verify`, as a table and a JSON document.

Every figure comes from a rank's report; a missing measurement is named and never passes for good.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch_dcp_backport.regression.launch import RankReport
from torch_dcp_backport.regression.meter import MIB

# Above what a rank has to hold after the call, by size of the model: less than stock torch needs for it.
PEAK_MARGINS = {"full": 64 * MIB, "tiny": 8 * MIB}
KEPT_FACTOR = 1.02  # of the rank's own bytes
LEGEND = """\
Each line is one rank. peak: its highest {memory} during the call, above the state just before it.
kept: its {memory} after the call, likewise; what rank 0 handed in is let go and not counted.
x: the same in multiples of the whole model (of the whole optimizer state). storages: bytes that its
parameters (states) keep alive, counted exactly, in multiples of its shard; for get-model, bytes of the
dict that it got, which has a tied weight under both of its names. values: compared bit for bit with the
files (with the optimizer that was saved)."""
UNTIMED = "No seconds: those of a model this small say nothing about a real one."
CALL = "full_state_dict=True, broadcast_from_rank0=True"
GET = "full_state_dict=True, cpu_offload=True"


@dataclass(frozen=True)
class Case:
    """A call that is measured."""

    name: str
    title: str
    what: str  # the unit of the multiples
    target: str  # the function of work.py
    own: str = "shard"  # what a rank has to hold after it
    meta: bool | None = None  # the function's argument, for the load of a model


CASES = (
    Case(
        "load-meta",
        f"set_model_state_dict({CALL}), model on the meta device",
        "model",
        "load_model",
        meta=True,
    ),
    Case("load", f"set_model_state_dict({CALL}), model in memory", "model", "load_model", meta=False),
    Case("get-model", f"get_model_state_dict({GET})", "model", "get_model", "rank 0's dict"),
    Case("optimizer", f"set_optimizer_state_dict({CALL}), AdamW", "optimizer", "load_optimizer"),
)


@dataclass(frozen=True)
class Side:
    """A side of the comparison."""

    label: str
    cases: Mapping[str, Sequence[RankReport]]  # by case name

    @property
    def evidence(self) -> Mapping[str, str]:
        seen = (report.evidence for reports in self.cases.values() for report in reports)
        return next((evidence for evidence in seen if evidence), {})


#: Stock torch, and the fixed side.
Run = tuple[Side, Side]


def failures(side: Side) -> list[str]:
    """Return the faults of the fixed side, one line each."""
    return [
        f"{case.name}, rank {report.rank}: {text}"
        for case in CASES
        for report in side.cases[case.name]
        for text in _faults(report)
    ]


def _faults(report: RankReport) -> list[str]:
    if report.ending != "finished":
        return [_ending(report)]
    seen = report.result
    faults = []
    budget = seen["new"] + seen["margin"]
    if seen["peak"] is not None and seen["peak"] > budget:
        faults.append(f"peak {_mib(seen['peak'])} MiB, budget {_mib(budget)} MiB")
    if seen["storages"] > KEPT_FACTOR * seen["shard"]:
        faults.append(f"storages of {_mib(seen['storages'])} MiB for a shard of {_mib(seen['shard'])} MiB")
    if seen["wrong"]:
        faults.append(f"{len(seen['wrong'])} values differ: {', '.join(seen['wrong'][:3])}")
    return faults


def measured(sides: Sequence[Side]) -> bool:
    """Return whether every rank that finished knows its peak."""
    reports = [report for side in sides for reports in side.cases.values() for report in reports]
    return all(report.result["peak"] is not None for report in reports if report.ending == "finished")


def table(sides: Sequence[Side], *, is_timed: bool = True) -> str:
    """Return the table of all cases; without `is_timed` it has no column of seconds."""
    lines: list[str] = []
    for case in CASES:
        blocks = [_block(side.label, side.cases[case.name], is_timed) for side in sides]
        ranks = ["", "rank", *(f"{report.rank:4d}" for report in sides[0].cases[case.name])]
        lines += ["", f"{case.name}: {case.title}", *_sizes(case, sides)]
        lines += [" | ".join(parts).rstrip() for parts in zip(_padded(ranks), *map(_padded, blocks))]
        lines += [text for side in sides for text in _untied(case, side)]
    return "\n".join(lines)


def legend(device: str, *, is_timed: bool = True) -> str:
    text = LEGEND.format(memory="resident memory" if device == "cpu" else "allocated device memory")
    return text if is_timed else f"{text}\n{UNTIMED}"


COLUMNS = ("peak MiB", "x", "kept MiB", "x", "storages", "seconds", "values")
SECONDS = COLUMNS.index("seconds")


def _sizes(case: Case, sides: Sequence[Side]) -> list[str]:
    finished = [r for side in sides for r in side.cases[case.name] if r.ending == "finished"]
    if not finished:
        return []
    ranks_by_peak: dict[int, set[int]] = {}
    for report in finished:
        ranks_by_peak.setdefault(report.result["new"] + report.result["margin"], set()).add(report.rank)
    peaks = [f"peak {_mib(peak)} MiB{_of_ranks(ranks_by_peak, peak)}" for peak in ranks_by_peak]
    first = min(finished, key=lambda report: report.rank).result
    sizes = f"{case.what} {_mib(first['whole'])} MiB, {case.own} {_mib(first['shard'])} MiB"
    return [f"  {sizes}; budget of the fixed side: {', '.join(peaks)}, storages {KEPT_FACTOR}x"]


def _of_ranks(ranks_by_peak: Mapping[int, set[int]], peak: int) -> str:
    """Return which ranks have this budget, unless all have the same."""
    ranks = sorted(ranks_by_peak[peak])
    return "" if len(ranks_by_peak) == 1 else f" on rank {', '.join(map(str, ranks))}"


def _untied(case: Case, side: Side) -> list[str]:
    ranks = [str(r.rank) for r in side.cases[case.name] if r.result.get("tied") is False]
    line = f"  {side.label}: the tied embedding became two parameters (rank {', '.join(ranks)})"
    return [line] if ranks else []


def _block(label: str, reports: Sequence[RankReport], is_timed: bool) -> list[str]:
    """Return the lines of a case's side: its label, the heads of its columns, a line per rank."""
    rows = [COLUMNS, *(_cells(report) for report in reports)]
    if not is_timed:
        rows = [row[:SECONDS] + row[SECONDS + 1 :] for row in rows]
    widths = [max(len(row[i]) for row in rows if len(row) > 1) for i in range(len(rows[0]))]
    head, *lines = (" ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows)
    # A rank that failed has one cell, its error, cut to about the width of the columns.
    lines = [row[0][: max(len(head), 72)] if len(row) == 1 else line for row, line in zip(rows[1:], lines)]
    return [label, head, *lines]


def _padded(lines: Sequence[str]) -> list[str]:
    return [line.ljust(max(map(len, lines))) for line in lines]


def _cells(report: RankReport) -> tuple[str, ...]:
    if report.ending != "finished":
        return (_ending(report),)
    seen = report.result
    return (
        *_memory(seen["peak"], seen["whole"]),
        *_memory(seen["kept"], seen["whole"]),
        _storages(seen["storages"], seen["shard"]),
        f"{seen['seconds']:.1f}",
        f"{len(seen['wrong'])} differ" if seen["wrong"] else "equal",
    )


def _ending(report: RankReport) -> str:
    return f"{report.ending} {report.error}".strip().splitlines()[0]


def _memory(held: int | None, full: int) -> tuple[str, str]:
    return ("unknown", "") if held is None else (_mib(held), f"{held / full:+.2f}x")


def _storages(held: int, own: int) -> str:
    if own:
        return f"{held / own:.2f}x"
    return f"{_mib(held)} MiB" if held else "none"


def _mib(size: float) -> str:
    return f"{size / MIB:.1f}"


def document(runs: Sequence[Run], about: Mapping[str, Any], faults: Sequence[str]) -> dict[str, Any]:
    """Return what was measured: the first run's sides, and those of the runs after it."""
    first, *later = map(_sides, runs)
    return {
        **about,
        "budget": {"peak_margin_bytes": PEAK_MARGINS[about["size"]], "kept_factor": KEPT_FACTOR},
        "failures": list(faults),
        "sides": first,
        "again": later,
    }


def _sides(run: Run) -> dict[str, Any]:
    return {
        name: {
            "label": side.label,
            "evidence": dict(side.evidence),
            "cases": {case: [asdict(report) for report in reports] for case, reports in side.cases.items()},
        }
        for name, side in zip(("stock", "fixed"), run)
    }
