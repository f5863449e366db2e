#!/usr/bin/env python3
"""Draws results.png of the transfer benchmark's results.json.

    python3 tools/lanes.py run current -- python benchmarks/transfer_plot.py FOLDER

Draws medians as they were measured; what failed or was not measured is left out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from transfer_cases import MODELS, SCALING
from transfer_report import MIB, OTHERS, Compared, Measured, read

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


def draw(measured: Measured, path: Path) -> None:
    figure, grid = plt.subplot_mosaic(
        [["ranks", "tensors"], ["seconds", "seconds"], ["peak", "peak"]], figsize=(15, 15)
    )
    worlds = [one for one in measured.compared if (one.case.name, one.model) == ("load", "dense")]
    _curves(grid["ranks"], measured, worlds, lambda one: one.world, "linear")
    grid["ranks"].set(title="load dense (256 MiB)", xlabel="ranks", ylabel="seconds")
    scaling = [one for name in SCALING if (one := measured.find("load", name, BARS))]
    _curves(grid["tensors"], measured, scaling, lambda one: MODELS[one.model].tensors, "log")
    grid["tensors"].set(title=f"load small, {BARS} ranks", xlabel="tensors of 64x64", ylabel="seconds")
    world = BARS if any(one.world == BARS for one in measured.compared) else measured.compared[0].world
    bars = [one for one in measured.compared if one.world == world and one.model not in SCALING[1:-1]]
    _bars(grid["seconds"], measured, bars, Compared.seconds)
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
    figure.suptitle(f"{machine['cpu']}, {machine['cores']} cores, gloo; seconds are medians", fontsize=11)
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
        axes.plot([x for x, _ in points], [y for _, y in points], marker="o", color=COLORS[way], label=way)
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
            label=way,
        )
    axes.set_xticks(range(len(compared)), [f"{one.case.name}\n{one.model}" for one in compared], fontsize=8)
    axes.grid(axis="y", alpha=0.25)


def _peak(one: Compared, way: str) -> float | None:
    held = one.highest(way, "peak", OTHERS)
    return None if held is None else held / MIB


if __name__ == "__main__":
    draw(read(Path(sys.argv[1])), Path(sys.argv[1]) / "results.png")
