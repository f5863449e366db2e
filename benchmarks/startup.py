#!/usr/bin/env python3
"""What `import torch_dcp_backport` adds to the start of a Python process, in milliseconds.

    python3 tools/lanes.py run current -- python benchmarks/startup.py

Interleaves a bare interpreter and the import; prints medians. Write byte code first (as pip does),
or the figure is that of compiling the package.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time


def milliseconds(code: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return (time.perf_counter() - start) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=25)
    runs = parser.parse_args().runs
    bare, ours = [], []
    for _ in range(runs):
        bare.append(milliseconds("pass"))
        ours.append(milliseconds("import torch_dcp_backport"))
    a, b = statistics.median(bare), statistics.median(ours)
    print(f"bare interpreter {a:.1f} ms, with the import {b:.1f} ms: {b - a:.1f} ms more ({runs} runs)")


if __name__ == "__main__":
    main()
