#!/usr/bin/env python3
"""docs/what-is-patched.md, from the records in patches/, its list of upstream's fixes and the replaced names.

    make patched-page

Needs Python >= 3.9, nothing else; must never import torch or our package.
"""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch_dcp_backport.activation.table import Target

ROOT = Path(__file__).resolve().parent.parent
PATH = ROOT / "docs" / "what-is-patched.md"
PATCHES = ROOT / "patches"
UPSTREAM = PATCHES / "upstream.md"  # written by hand; [0008] becomes a link to the record
# By its file: importing it would import the package, which activates and warns where there is no torch.
TABLE = SimpleNamespace(**runpy.run_path(str(ROOT / "torch_dcp_backport" / "activation" / "table.py")))
FIRST, FIXED_IN = (".".join(map(str, release)) for release in (TABLE.FIRST, TABLE.FIXED_IN))

HEAD = f"""# What is patched, and why

`make patched-page` writes this page from [`patches/`](../patches/README.md) and
`torch_dcp_backport/activation/table.py`.

On torch >= {FIRST}, < {FIXED_IN} the functions [below](#what-is-replaced) are replaced in the running
process, all or none. Torch's files stay as they are. On torch >= {FIXED_IN} nothing is replaced, even if a
defect is still there. This command lists what is replaced on your machine. Without `--load` it says only the
decision, and does not import torch:

```bash
python -m torch_dcp_backport status --load --verbose
```

## Summary

Each record says what is wrong, what we do, after which torch release the correction goes, and which tests
show it.

"""

NONE = "no record"
TAIL = """
## What is replaced

These are the names, with the records that they serve. Private names are replaced because torch's public
functions and other packages call them. Names without a record are replaced because the set works only as a
whole.
"""

# A record as CONTRIBUTING.md describes it.
FORM = re.compile(
    r"# (?P<title>\d{4}: [^\n]+)\n\n"
    r"\| \| \|\n\|---\|---\|\n(?P<facts>(?:\| [^\n]+ \|\n)+)\n"
    r"\*\*What is wrong\b.+?\n\n"
    r"\*\*What we do\b.+?\n\n"
    r"\*\*Shown by\*\* .+\.\n",
    re.DOTALL,
)


class Record(NamedTuple):
    """One file in patches/."""

    name: str  # of the file, without .md
    title: str
    facts: dict[str, str]  # the rows of its table


def page() -> str:
    records = [read(path.stem, path.read_text()) for path in sorted(PATCHES.glob("[0-9]*.md"))]
    summary = table(("record", "torch releases that have it", "upstream"), *map(row, records))
    return "".join((HEAD, summary, "\n", linked(UPSTREAM.read_text(), records), TAIL, *replaced()))


def linked(text: str, records: list[Record]) -> str:
    names = {record.name[:4]: record.name for record in records}

    def link(match: re.Match[str]) -> str:
        if match[1] not in names:
            raise ValueError(f"patches/{UPSTREAM.name} names record {match[1]}, which does not exist")
        return f"[{match[1]}](../patches/{names[match[1]]}.md)"

    return re.sub(r"\[(\d{4})\](?!\()", link, text)


def read(name: str, text: str) -> Record:
    form = FORM.fullmatch(text)
    if form is None:
        raise ValueError(f"patches/{name}.md has not the form that CONTRIBUTING.md describes")
    facts = dict(line.strip("| ").split(" | ", 1) for line in form["facts"].splitlines())
    return Record(name, form["title"], facts)


def row(record: Record) -> tuple[str, ...]:
    number, about = record.title.split(": ", 1)
    upstream = [record.facts["Upstream"]]
    if "In the wild" in record.facts:
        upstream.append(f"seen as {record.facts['In the wild']}")
    name = f"[{number}](../patches/{record.name}.md) {about}"
    return name, record.facts["Affected"], "; ".join(upstream)


def replaced() -> Iterator[str]:
    """The names by the modules where they are replaced and the records that they serve; public ones first."""
    found: dict[str, list[Target]] = {}
    for target in sorted(TABLE.TABLE.targets, key=lambda target: target.name[0] == "_"):
        found.setdefault(target.name, []).append(target)
    lists: dict[str, dict[str, list[str]]] = {}
    for name, targets in found.items():
        modules = " and ".join(sorted(f"`{target.module}`" for target in targets))
        records = ", ".join(sorted({record[:4] for target in targets for record in target.records}))
        since, until = (".".join(map(str, release)) for release in (targets[0].since, targets[0].until))
        limits = [f"from torch {since}"] * (since != FIRST) + [f"below torch {until}"] * (until != FIXED_IN)
        names = lists.setdefault(modules, {}).setdefault(records or NONE, [])
        names.append(f"`{name}`" + f" ({', '.join(limits)})" * bool(limits))
    for modules, rows in sorted(lists.items(), key=lambda item: -len(item[1])):
        yield f"\nIn {modules}{', one function in both' * (' and ' in modules)}:\n\n"
        for records, names in sorted(rows.items(), key=lambda item: item[0] == NONE):
            yield f"- {', '.join(names)}: {records}\n"


def table(*rows: tuple[str, ...]) -> str:
    head, *body = (f"| {' | '.join(cells)} |\n" for cells in rows)
    return f"{head}|{'---|' * len(rows[0])}\n{''.join(body)}"


if __name__ == "__main__":
    PATH.write_text(page())
