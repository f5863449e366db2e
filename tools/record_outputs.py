#!/usr/bin/env python3
"""Writes what the programs of examples/ print into examples/outputs/, for their pages of the site.

    make outputs

It runs each as its first lines say, on the CPU: below torch 2.7 the programs that show the backport, else the
others.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
OUTPUTS = ROOT / "examples" / "outputs"
#: Lines of a long output that are kept: of its beginning, and of its end.
BEGINNING, END = 8, 4


def shows_the_backport(program: str) -> bool:
    """Whether the backport is what a program shows: stock torch has nothing of it from 2.7 on."""
    return "StateDictOptions" in program


def shortened(lines: list[str]) -> list[str]:
    if len(lines) <= BEGINNING + END + 1:
        return lines
    return [*lines[:BEGINNING], "...", *lines[-END:]]


def main() -> int:
    OUTPUTS.mkdir(exist_ok=True)
    is_patched = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 7)
    for path in sorted((ROOT / "examples").glob("*.py")):
        if shows_the_backport(path.read_text()) != is_patched:
            continue
        (command,) = re.findall(r"^    ((?:torchrun|python) .*)$", path.read_text(), re.MULTILINE)
        first, *arguments = shlex.split(command)
        start = ["-m", "torch.distributed.run", "--standalone"] if first == "torchrun" else []
        done = subprocess.run(
            [sys.executable, *start, *arguments],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        if done.returncode:
            return done.returncode
        lines = [line.rstrip() for line in done.stdout.splitlines() if line.strip()]
        found = re.search(r"--nproc-per-node (\d)", command)
        count = found[1] if found else "1" if path.stem == "one_tensor" else "4"
        ranks = {"1": "one process", "2": "two ranks", "4": "four ranks"}[count]
        head = f"On torch {torch.__version__.partition('+')[0]}, {ranks} on the CPU:"
        (OUTPUTS / f"{path.stem}.txt").write_text("\n".join([head, *shortened(lines)]) + "\n")
        print(f"{path.name}: {len(lines)} lines")
    return 0


if __name__ == "__main__":
    sys.exit(main())
