#!/usr/bin/env python3
"""Draws results.png of the transfer benchmark's results.json.

    python3 tools/lanes.py run current -- python benchmarks/transfer_plot.py FOLDER

Draws medians as they were measured, with lines from the least to the most of all runs; what failed or was not
measured is left out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

import matplotlib
from transfer_cases import MODELS, SCALING
from transfer_report import MIB, OTHERS, Compared, Measured, read, torchs_of

matplotlib.use("Agg")

import matplotlib.pyplot as plt

COLORS = {
    # Told apart by all eyes (Okabe and Ito).
    "stock-2.6": "#D55E00",
    "backport-2.6": "#009E73",
    "native-2.7": "#56B4E9",
    "native-current": "#0072B2",
    "direct-current": "#E69F00",
}
BARS = 4  # ranks
#: What is called, and with which tensors, in words.
CALLS = {
    "load": "load, sent by rank 0",
    "load-meta": "load from meta",
    "load-all": "load, dict on each rank",
    "load-all-meta": "load from meta, dict on each rank",
    "load-each": "a load for each tensor",
    "save": "get the full dict",
    "optim-load": "load AdamW state",
    "optim-save": "get AdamW state",
}
TENSORS = {
    "dense": "16 of 16 MiB",
    "embed": "large embedding",
    "small-500": "500 small",
    "small-1000": "1,000 small",
    "small-2000": "2,000 small",
    "small": "4,000 small",
    "moe": "64 experts",
    "qwen2": "Qwen2.5's shapes",
    "tiny": "tiny",
}
WHOSE = {"stock-2.6": " as it is", "backport-2.6": " with the backport", "direct-current": ", our functions"}
LINE = 13  # letters below a group of bars


def draw(measured: Measured, path: Path) -> None:
    figure, grid = plt.subplot_mosaic(
        [["ranks", "tensors"], ["seconds", "seconds"], ["peak", "peak"]], figsize=(15, 15)
    )
    worlds = [one for one in measured.compared if (one.case.name, one.model) == ("load", "dense")]
    _curves(grid["ranks"], measured, worlds, lambda one: one.world, "linear")
    grid["ranks"].set(title="load, sent by rank 0: 16 tensors of 16 MiB", xlabel="ranks", ylabel="seconds")
    scaling = [one for name in SCALING if (one := measured.find("load", name, BARS))]
    _curves(grid["tensors"], measured, scaling, lambda one: MODELS[one.model].tensors, "log")
    grid["tensors"].set(
        title=f"load, sent by rank 0, on {BARS} ranks", xlabel="tensors of 64x64", ylabel="seconds"
    )
    world = BARS if any(one.world == BARS for one in measured.compared) else measured.compared[0].world
    bars = [one for one in measured.compared if one.world == world and one.model not in SCALING[1:-1]]
    _bars(grid["seconds"], measured, bars, Compared.seconds, _spread)
    grid["seconds"].set(title=f"{world} ranks", ylabel="seconds")
    shown = [seconds for one in bars for way in measured.ways if (seconds := one.seconds(way))]
    if shown:
        grid["seconds"].set(yscale="log", ylim=(min(shown) / 2, None))
        grid["seconds"].yaxis.set_major_formatter("{x:g}")
    _bars(grid["peak"], measured, bars, _peak)
    grid["peak"].set(
        title=f"{world} ranks: peak memory of a rank other than 0, above what the call has to leave",
        ylabel="MiB",
    )
    handles, labels = grid["seconds"].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncol=len(labels), frameon=False)
    machine = measured.about["machine"]
    runs = max(len(one.good(way)) for one in measured.compared for way in measured.ways)
    figure.suptitle(
        f"{machine['cpu']}, {machine['cores']} cores, gloo; seconds are medians of {runs} runs, "
        "with lines from the least to the most",
        fontsize=11,
    )
    figure.tight_layout(rect=(0, 0.025, 1, 0.99))
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _curves(
    axes: Any, measured: Measured, compared: Sequence[Compared], at: Callable[[Compared], int], scale: str
) -> None:
    if not any(one.good(way) for one in compared for way in measured.ways):
        axes.text(0.5, 0.5, "not measured", ha="center", va="center", transform=axes.transAxes)
        return
    for way in measured.ways:
        points = [(at(one), seconds) for one in compared if (seconds := one.seconds(way)) is not None]
        spread = [_spread(one, way) for one in compared if one.seconds(way) is not None]
        axes.errorbar(
            [x for x, _ in points],
            [y for _, y in points],
            [[low for low, _ in spread], [high for _, high in spread]],
            marker="o",
            capsize=4,
            color=COLORS[way],
        )
    axes.set(xscale=scale, yscale=scale)
    if scale == "log":
        axes.yaxis.set_major_formatter("{x:g}")
    else:
        axes.set_ylim(bottom=0)
    ticks = [at(one) for one in compared]
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.xaxis.minorticks_off()
    axes.grid(alpha=0.25)


def _bars(
    axes: Any,
    measured: Measured,
    compared: Sequence[Compared],
    height: Callable[[Compared, str], float | None],
    spread: Callable[[Compared, str], tuple[float, float]] | None = None,
) -> None:
    width = 0.8 / len(measured.ways)
    for number, way in enumerate(measured.ways):
        heights = [height(one, way) for one in compared]
        places = [x - 0.4 + (number + 0.5) * width for x in range(len(compared))]
        axes.bar(
            places,
            [float("nan") if value is None else value for value in heights],
            width,
            color=COLORS[way],
            label=_words(measured, way),
            yerr=None if spread is None else list(zip(*(spread(one, way) for one in compared))),
            error_kw={"elinewidth": 1, "capsize": 2},
        )
    names = [
        "\n".join(line for text in (CALLS[one.case.name], TENSORS[one.model]) for line in wrap(text, LINE))
        for one in compared
    ]
    axes.set_xticks(range(len(compared)), names, fontsize=8)
    axes.set_xlim(-0.6, len(compared) - 0.4)
    axes.grid(axis="y", alpha=0.25)


def _words(measured: Measured, way: str) -> str:
    """A way's release of torch, and whose code runs."""
    torchs = " and ".join(sorted({each.partition("+")[0] for each in torchs_of(measured, way)}))
    return f"torch {torchs}{WHOSE.get(way, '')}"


def _spread(one: Compared, way: str) -> tuple[float, float]:
    """How far the least and the most of all runs are from the median."""
    slowest, median = one.slowest(way), one.seconds(way)
    return (0.0, 0.0) if median is None else (median - min(slowest), max(slowest) - median)


def _peak(one: Compared, way: str) -> float | None:
    held = one.highest(way, "peak", OTHERS)
    return None if held is None else held / MIB


if __name__ == "__main__":
    draw(read(Path(sys.argv[1])), Path(sys.argv[1]) / "results.png")
