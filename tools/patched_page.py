#!/usr/bin/env python3
"""docs/what-is-patched.md, from the records in patches/ and the table of replaced names.

    make patched-page

Needs Python >= 3.9, nothing else; must never import torch or our package.
"""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch_dcp_backport.activation.table import Target

ROOT = Path(__file__).resolve().parent.parent
PATH = ROOT / "docs" / "what-is-patched.md"
PATCHES = ROOT / "patches"
# By its file: importing it would import the package, which activates and warns where there is no torch.
TABLE = SimpleNamespace(**runpy.run_path(str(ROOT / "torch_dcp_backport" / "activation" / "table.py")))
FIRST, FIXED_IN = (".".join(map(str, release)) for release in (TABLE.FIRST, TABLE.FIXED_IN))

HEAD = f"""# What is patched, and why

Made by `make patched-page` from [`patches/`](../patches/), which has one record for each defect of torch that
this package corrects, and from the list of what is replaced (`torch_dcp_backport/activation/table.py`).

On torch >= {FIRST}, < {FIXED_IN} the functions below are replaced in the running process, all of them or
none; torch's files stay as they are. On torch >= {FIXED_IN} nothing is replaced, even where a defect is still
there. Each replacement is our own implementation of what the function promises (name, arguments, results,
errors); nothing of torch's code is copied. To see what is replaced on your machine, and for which records:

```bash
python -m torch_dcp_backport status --load
```

Without `--load` torch is not imported, and only the decision is shown.

## Summary

"""

WORDS = """
Releases are in short here; the sections below have the exceptions. Names with an underscore are private to
torch; torch's public functions, and other packages, call them. A name in two modules is one function, which
one module imports from the other.

Words that the records use:

- **rank**: one process of a distributed job; **rank 0** usually reads and writes the checkpoint;
- **full tensors**: a state dict of whole tensors, as one process alone would save it
  (`full_state_dict=True`). With `broadcast_from_rank0=True` only rank 0 has it when it is loaded;
- **shard**: the slice of a tensor that a rank keeps; **DTensor**: a tensor that is cut into shards;
- **a load** is a call of a `set_*` function, **a get** of a `get_*` function;
- **meta device**: parameters there have a shape, but no memory yet;
- **tied weight**: one parameter under two names;
- **FQN**: the full name of a parameter, such as `layers.0.weight`; **flat**: an optimizer's state dict with
  one key for each value (`flatten_optimizer_state_dict=True`);
- **stock**: torch as it is, without this package;
- **goes when**: what has to come true before this package drops the correction;
- **shown by**: tests that fail on stock torch and pass with this package.
"""

TAIL = """
## Replaced along with them

No defect: torch's own would do, but they work only with other parts of torch's own, and the set is
replaced whole.

"""

# A record as CONTRIBUTING.md describes it.
FORM = re.compile(
    r"# (?P<title>\d{4}: [^\n]+)\n\n"
    r"\| \| \|\n\|---\|---\|\n(?P<facts>(?:\| [^\n]+ \|\n)+)\n"
    r"(?P<wrong>\*\*What is wrong\b.+?)\n\n"
    r"(?P<ours>\*\*What we do\b.+?)\n\n"
    r"\*\*Shown by\*\* (?P<shown>.+)\.\n",
    re.DOTALL,
)


class Record(NamedTuple):
    """One file in patches/."""

    name: str  # of the file, without .md
    title: str
    facts: dict[str, str]  # the rows of its table
    text: str  # what is wrong and what we do
    shown: str  # the tests, in one line


def page() -> str:
    records = [read(path.stem, path.read_text()) for path in sorted(PATCHES.glob("[0-9]*.md"))]
    head = ("record", "what is wrong", "torch releases that have it", "upstream", "functions replaced")
    others = [target for target in TABLE.TABLE.targets if not target.records]
    parts = [HEAD, table(head, *map(summary, records)), WORDS, *map(section, records)]
    return "".join((*parts, TAIL, places(others, "\n", start="- "), "\n"))


def read(name: str, text: str) -> Record:
    form = FORM.fullmatch(text)
    if form is None:
        raise ValueError(f"patches/{name}.md has not the form that CONTRIBUTING.md describes")
    facts = dict(row.strip("| ").split(" | ", 1) for row in form["facts"].splitlines())
    return Record(name, form["title"], facts, f"{form['wrong']}\n\n{form['ours']}", one_line(form["shown"]))


def summary(record: Record) -> tuple[str, ...]:
    # As GitHub makes it of a heading.
    anchor = re.sub(r"[^\w -]", "", record.title.lower()).replace(" ", "-")
    about, _ = TABLE.RECORDS[record.name]
    upstream = record.facts["Upstream"]
    links = ", ".join(re.findall(r"\[[^]]+\]\([^)]+\)", upstream))
    # Up to what a record says of single releases or parts; its section has all of it.
    releases = re.split("[;,]", record.facts["Affected"])[0]
    return f"[{record.title[:4]}](#{anchor})", about, releases, links or upstream, replaced(record)


def replaced(record: Record) -> str:
    """The public names and how many others, or all where none is public."""
    names = dict.fromkeys(target.name for target in targets(record))
    public = [name for name in names if name[0] != "_"]
    more = f" and {len(names) - len(public)} private" if 0 < len(public) < len(names) else ""
    return ", ".join(f"`{name}`" for name in public or names) + more


def section(record: Record) -> str:
    rows = [
        *record.facts.items(),
        ("Shown by", record.shown),
        ("Replaced", places(targets(record), "; ", start="in ")),
        ("Record", f"[patches/{record.name}.md](../patches/{record.name}.md)"),
    ]
    return f"\n## {record.title}\n\n{record.text}\n\n{table(('', ''), *rows)}"


def targets(record: Record) -> list[Target]:
    return [target for target in TABLE.TABLE.targets if record.name in target.records]


def places(found: list[Target], between: str, start: str) -> str:
    """The names by the module where they are replaced; public ones first."""
    modules: dict[str, list[str]] = {TABLE.STATE_DICT: [], TABLE.STATE_DICT_UTILS: []}
    for target in sorted(found, key=lambda target: target.name[0] == "_"):
        since = f" (from torch {'.'.join(map(str, target.since))})" if target.since > TABLE.FIRST else ""
        modules[target.module].append(f"`{target.name}`{since}")
    lists = ((module, ", ".join(names)) for module, names in modules.items() if names)
    return between.join(f"{start}`{module}`: {names}" for module, names in lists)


def one_line(text: str) -> str:
    return " ".join(text.split())


def table(*rows: Iterable[str]) -> str:
    head, *body = map(tuple, rows)
    return "".join(f"| {' | '.join(one)} |\n" for one in (head, ["---"] * len(head), *body))


if __name__ == "__main__":
    PATH.write_text(page())
