"""A picture of memory over time, both sides in a row, with a line per rank and run.

It needs matplotlib, which is imported where a picture is drawn; draws every sample and smooths nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch_dcp_backport.regression.meter import MIB
from torch_dcp_backport.regression.verify.report import CASES, Case, Run, Side

#: Told apart by all eyes (Okabe and Ito), and by dashes where lines lie on each other; then they begin again.
COLORS = ("#000000", "#E69F00", "#0072B2", "#009E73", "#CC79A7", "#D55E00", "#56B4E9")
DASHES = ("-", "-", (0, (4, 2)), (0, (1, 1.5)))
#: What a case is, in words.
TITLES = {
    "load-meta": "model, from the meta device",
    "load": "model, already in memory",
    "optimizer": "AdamW state",
    "get-model": "model, to rank 0",
}


def draw(runs: Sequence[Run], headline: str, path: str) -> None:
    """Draw the first run in strong lines, the others behind it in thin ones."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    sides = runs[0]
    figure, grid = plt.subplots(
        len(CASES),
        len(sides),
        figsize=(6.2 * len(sides), 3.4 * len(CASES)),
        sharex="row",
        sharey="row",
        squeeze=False,
    )
    for case, row in zip(CASES, grid):
        for side, axes in zip(sides, row):
            _panel(axes, case, side)
        row[0].set_ylabel("MiB above the state\njust before the call")
    for run in runs[1:]:
        for case, row in zip(CASES, grid):
            for side, axes in zip(run, row):
                _lines(axes, case, side, is_first=False)
    for axes in grid[-1]:
        axes.set_xlabel("seconds since the call began")
    handles, labels = _legend(grid)
    figure.legend(handles, labels, loc="lower center", ncol=len(labels), frameon=False, fontsize=9)
    figure.suptitle(headline, fontsize=11)
    figure.tight_layout(rect=(0, 0.035, 1, 0.985))
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _panel(axes: Any, case: Case, side: Side) -> None:
    axes.set_title(f"{TITLES.get(case.name, case.name)}: {side.label}", fontsize=10)
    axes.grid(alpha=0.25)
    _lines(axes, case, side)
    finished = [report for report in side.cases[case.name] if report.ending == "finished"]
    if not finished:
        error = side.cases[case.name][0]
        axes.text(
            0.5,
            0.5,
            f"{error.ending}\n{error.error[:60]}",
            ha="center",
            va="center",
            transform=axes.transAxes,
        )
        return
    seen = finished[-1].result
    axes.axhline(
        seen["whole"] / MIB, color="black", linewidth=1, linestyle=":", label=f"the whole {case.what}"
    )
    # Of a get, rank 0 has another budget than the other ranks.
    for budget in {report.result["new"] + report.result["margin"] for report in finished}:
        axes.axhline(
            budget / MIB, color="tab:gray", linewidth=1, linestyle="--", label="budget of the fixed side"
        )


def _lines(axes: Any, case: Case, side: Side, is_first: bool = True) -> None:
    """Draw a line for each rank that finished; those of later runs are thin, and have no label."""
    for report in side.cases[case.name]:
        if report.ending != "finished":
            continue
        history = report.result["history"]
        line = {
            "color": COLORS[report.rank % len(COLORS)],
            "linestyle": DASHES[report.rank % len(DASHES)],
            "linewidth": (1.6 if report.rank else 1.2) if is_first else 0.7,
            "alpha": 1.0 if is_first else 0.5,
            "zorder": 2 if is_first else 1,
            **({"label": f"rank {report.rank}"} if is_first else {}),
        }
        axes.plot([at for at, _ in history], [held / MIB for _, held in history], **line)


def _legend(grid: Any) -> tuple[list[Any], list[str]]:
    """Return handles and labels: each label once, the models' first."""
    entries: dict[str, Any] = {}
    for axes in grid.flat:
        for handle, label in zip(*axes.get_legend_handles_labels()):
            entries.setdefault(
                "the whole model / optimizer" if label.startswith("the whole") else label, handle
            )
    return list(entries.values()), list(entries)
