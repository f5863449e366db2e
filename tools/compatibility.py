#!/usr/bin/env python3
"""The table of docs/compatibility.md, from what the lanes' last good runs have passed.

    make compatibility

Takes over what is in build/ran (tools/ran.py writes it at each run without a failure) into tools/ran.json,
which is committed, and writes the table from there. Needs Python >= 3.9, nothing else.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import lanes

PAGE = lanes.ROOT / "docs" / "compatibility.md"
RECORD = lanes.ROOT / "tools" / "ran.json"
BEGIN, END = "<!-- made by `make compatibility` -->\n", "<!-- end -->\n"
SUITE = ("tests/", "torch_dcp_backport/")
#: What a lane has for the tests' sake, and not to be tested with.
UNTOLD = ("torch", "matplotlib", "pandas", "pyarrow", "numpy", "psutil", "einops", "codetiming", "pydantic")


def recorded() -> dict[str, Any]:
    """Lane -> its Python, packages and tests passed by file."""
    return dict(json.loads(RECORD.read_text())) if RECORD.exists() else {}


def taken(record: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A record with the runs in a folder: the last one of each file holds, of the lane as it is now."""
    record = {name: facts for name, facts in record.items() if not stale(name, facts)}
    for path in sorted(folder.glob("*@*.json"), key=lambda path: path.stat().st_mtime):
        name, facts = path.name.partition("@")[0], json.loads(path.read_text())
        passed = {file: count for file, count in facts["passed"].items() if file.startswith(SUITE)}
        if not passed or stale(name, facts):
            continue
        before = record.get(name, facts)
        same = (before["python"], before["packages"]) == (facts["python"], facts["packages"])
        facts["passed"] = {**(before["passed"] if same else {}), **passed}
        record[name] = facts
    return {name: record[name] for name in lanes.LANES if name in record}


def stale(name: str, facts: dict[str, Any]) -> list[str]:
    """What a lane pins to another release than the one that ran."""
    if name not in lanes.LANES:
        return [f"there is no lane {name}"]
    pins: dict[str, set[str]] = {}
    for requirement in (*lanes.LANES[name], *lanes.BARE.get(name, ())):
        match = re.match(r"([\w.-]+)(?:\[\w+\])?==([\w.]+)", requirement)
        if match:
            pins.setdefault(match[1], set()).add(match[2])  # one for each Python
    ran = {package: version.partition("+")[0] for package, version in facts["packages"].items()}
    return [
        f"lane {name} has {package} {', '.join(sorted(versions))}, and {ran[package]} ran"
        for package, versions in pins.items()
        if package in ran and ran[package] not in versions
    ]


def table(record: dict[str, Any]) -> str:
    lines = ["| lane | torch | Python | with | tests passed |\n", "|---|---|---|---|---|\n"]
    for name, facts in record.items():
        torch = facts["packages"].get("torch", "")
        beside = [
            f"{package} {version}" for package, version in facts["packages"].items() if package not in UNTOLD
        ]
        passed: Counter[str] = Counter()
        for file, count in facts["passed"].items():
            parts = file.split("/")
            passed[parts[1]] += count
        counts = ", ".join(f"{folder} {count}" for folder, count in sorted(passed.items()))
        lines.append(f"| `{name}` | {torch} | {facts['python']} | {', '.join(beside)} | {counts} |\n")
    return "".join(lines)


def written(text: str, record: dict[str, Any]) -> str:
    """The page with the table of a record."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE.name} lacks the lines between which the table stands")
    return "".join((before, begin, "\n", table(record), "\n", end, after))


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    record = taken(recorded(), lanes.RAN_FOLDER)
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    PAGE.write_text(written(PAGE.read_text(), record))


if __name__ == "__main__":
    main()
