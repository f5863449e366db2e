"""For tools/docs.py: programs as pages of the site."""

from __future__ import annotations

import ast
import re
from pathlib import Path

#: Begins a cell of text, and a cell of code, of a program in jupytext's form "percent".
CELL = re.compile(r"^# %%(.*)\n", re.MULTILINE)
OUTPUTS = "outputs"


def listing(file: Path, name: str) -> str:
    """Return the page of a file: its lines, which the site's search leaves out."""
    return f"---\nsearch:\n  exclude: true\n---\n# {name}\n\n{fenced(file.read_text())}"


def page_of(file: Path) -> str:
    """Return the page of an example: its docstring, its cells, and what a recorded run of it printed."""
    text = file.read_text()
    docstring = ast.get_docstring(ast.parse(text)) or ""
    first, _, about = docstring.partition("\n")
    title, _, rest = first.rstrip(".").partition(": ")
    _, _, code = text.partition('"""')[2].partition('"""')
    parts = [f"# {title}\n", f"{rest[:1].upper()}{rest[1:]}. This is `examples/{file.name}`.\n"]
    parts.append(with_commands(about.strip("\n")))
    kinds = ["", *CELL.findall(code)]
    for kind, cell in zip(kinds, CELL.split(code)[::2]):
        if "[markdown]" in kind:
            parts.append(re.sub(r"^# ?", "", cell.strip(), flags=re.MULTILINE) + "\n")
        elif cell.strip():
            parts.append(fenced(cell))
    recorded = file.parent / OUTPUTS / f"{file.stem}.txt"
    if recorded.exists():
        first, _, printed = recorded.read_text().partition("\n")
        parts += ["## What it prints\n", f"{first}\n", fenced(printed, "text")]
    return "\n".join(parts)


def with_commands(text: str) -> str:
    """Return a text whose indented lines are commands of a shell."""
    return re.sub(
        r"^(?: {4}.*\n?)+",
        lambda found: fenced(re.sub(r"^ {4}", "", found[0], flags=re.MULTILINE), "bash"),
        text,
        flags=re.MULTILINE,
    )


def fenced(text: str, language: str = "python") -> str:
    inside = text.strip("\n")
    return f"````{language}\n{inside}\n````\n"
