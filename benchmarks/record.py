#!/usr/bin/env python3
"""Appends the figures of a run of benchmarks/transfer.py to benchmarks/figures.jsonl: a line for a release.

    python3 benchmarks/record.py                                # of benchmarks/results, for this release
    python3 benchmarks/record.py FOLDER --release 0.2.0
    python3 tools/lanes.py run current -- python benchmarks/record.py --plot figures.png

The last draws what is recorded, and appends nothing. Seconds of one machine say little about those of others,
so a line has ratios: our seconds over those that stock torch 2.6 and a current torch took in the same run,
taking turns. Peaks are in MiB.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from transfer_report import EVERY, MIB, NATIVE, OURS, STOCK, Compared, Measured, read

FOLDER = Path(__file__).resolve().parent
FIGURES = FOLDER / "figures.jsonl"
VERSION = FOLDER.parent / "torch_dcp_backport" / "_version.py"


def line_of(measured: Measured, release: str) -> dict[str, Any]:
    """Return what a line holds of a run."""
    run = measured.about["runs"][-1]
    return {
        "release": release,
        "commit": run["commit"],
        "date": run["date"],
        "machine": measured.about["machine"],
        "calls": {f"{of.case.name} {of.model} x{of.world}": figures_of(of) for of in measured.compared},
    }


def figures_of(of: Compared) -> dict[str, float]:
    peak = of.highest(OURS, "peak", EVERY)
    figures = {
        "over_stock": of.ratio(OURS, STOCK),
        "over_native": of.ratio(OURS, NATIVE),
        "peak_mib": None if peak is None else peak / MIB,
    }
    return {name: round(value, 3) for name, value in figures.items() if value is not None}


def recorded() -> list[dict[str, Any]]:
    return [json.loads(line) for line in FIGURES.read_text().splitlines()] if FIGURES.exists() else []


def append(line: dict[str, Any]) -> None:
    """Write a line at the end.

    Raises:
        SystemExit: this run is there already.
    """
    for other in recorded():
        if (other["release"], other["date"]) == (line["release"], line["date"]):
            raise SystemExit(f"{FIGURES.name} has this run already: {line['release']}, {line['date']}")
    with open(FIGURES, "a") as file:
        file.write(json.dumps(line) + "\n")


def draw(lines: list[dict[str, Any]], path: str) -> None:
    """Draw our seconds over a current torch's, by release, a curve for each call on four ranks."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    calls = sorted({call for line in lines for call in line["calls"] if call.endswith(" x4")})
    figure, axes = plt.subplots(figsize=(10, 6))
    for number, call in enumerate(calls):
        ratios = [line["calls"].get(call, {}).get("over_native") for line in lines]
        style = "-" if number < 10 else "--"
        axes.plot(range(len(lines)), [ratio or float("nan") for ratio in ratios], f"o{style}", label=call)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(lines)), [f"{line['release']}\n{line['date'][:10]}" for line in lines])
    axes.set(xlabel="release", ylabel="our seconds / those of a current torch", ylim=(0, None))
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    (version,) = re.findall(r'"(.+)"', VERSION.read_text())
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER / "results", help="with results.json")
    parser.add_argument("--release", default=version, help=f"whose figures these are (default {version})")
    parser.add_argument("--plot", help="draw what is recorded into this file, and append nothing")
    options = parser.parse_args()
    if options.plot:
        draw(recorded(), options.plot)
        return 0
    line = line_of(read(options.folder), options.release)
    append(line)
    print(f"{FIGURES.name}: release {line['release']}, {len(line['calls'])} calls")
    return 0


if __name__ == "__main__":
    sys.exit(main())
