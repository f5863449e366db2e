#!/usr/bin/env python3
"""Say which runs of code lines a folder shares with other files: every line of the package is its own.

    shared_lines.py FOLDER FILE.py...

Counts a run of at least five lines in the same order, whatever their spaces, comments and blank lines.
Docstrings, lines of imports, decorators and lone brackets do not count. Exits 1 if there is such a run.
Needs Python >= 3.9, nothing else.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

RUN = 5
SHORTEST = 7  # characters; what is shorter is a bracket or an `else:`


def lines_of(path: Path) -> list[tuple[int, str]]:
    """Return the lines that count, each with its number."""
    text = path.read_text(encoding="utf-8")
    skipped: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text or isinstance(node, (ast.Import, ast.ImportFrom)):
            skipped.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        for decorator in getattr(node, "decorator_list", ()):
            skipped.update(range(decorator.lineno, decorator.end_lineno + 1))
    numbered = (
        (number, "".join(line.partition(" #")[0].split())) for number, line in enumerate(text.splitlines(), 1)
    )
    return [(number, line) for number, line in numbered if len(line) >= SHORTEST and number not in skipped]


def runs(path: Path) -> dict[tuple[str, ...], int]:
    """Return each run of lines, and where it begins."""
    lines = [one for one in lines_of(path) if not one[1].startswith("#")]
    windows = zip(*(lines[start:] for start in range(RUN)))
    return {tuple(line for _, line in window): window[0][0] for window in windows}


def main(folder: str, *files: str) -> int:
    known = {run: f"{file}:{line}" for file in files for run, line in runs(Path(file)).items()}
    shared = [
        f"{path}:{line} stands in {known[run]}, too"
        for path in sorted(Path(folder).rglob("*.py"))
        for run, line in runs(path).items()
        if run in known
    ]
    print("\n".join([*shared, f"{len(shared)} shared runs of {RUN} lines, in {len(files)} files"]))
    return 1 if shared or not known else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
