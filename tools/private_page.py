#!/usr/bin/env python3
"""docs/private-members.md, from `torch_dcp_backport/private_members.py`.

    make private-page

Needs Python >= 3.9, nothing else; must never import torch or our package.
"""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
PATH = ROOT / "docs" / "private-members.md"
# By its file: importing it would import the package.
TABLE = SimpleNamespace(**runpy.run_path(str(ROOT / "torch_dcp_backport" / "private_members.py")))

HEAD = """# Private members of torch

`make private-page` writes this page from `torch_dcp_backport/private_members.py`. It lists all that the
[libraries](README.md) use of torch and that torch does not call public. `tests/unit/test_private_members.py`
reads their syntax trees. It fails where a library uses a private name that is not listed, and where a listed
name is no longer used.

A library asks for its members when it is imported. The engine asks FSDP2's objects for theirs when it builds
a model. If a release lacks some, one `ImportError` names them and the release, before anything is trained or
saved. Members with a * are not asked for: the code looks whether they are there, or only an object has them.

The functions that the backport replaces on torch 2.4 to 2.6 are in
[what is patched](what-is-patched.md#what-is-replaced). These releases change no more.

"""


def page() -> str:
    rows = [
        (
            f"`{member.name}`" + " *" * member.is_not_asked,
            member.rooms.replace(" ", ", ") if member.rooms != TABLE.EVERYWHERE else "all",
            member.use,
            member.until,
            member.public,
        )
        for member in TABLE.MEMBERS
    ]
    head = (
        "member",
        "library",
        "for",
        "used up to torch",
        "the public way, and the first release of our lanes with it",
    )
    lines = [f"| {' | '.join(cells)} |\n" for cells in (head, *rows)]
    return "".join((HEAD, lines[0], "|" + "---|" * len(head) + "\n", *lines[1:]))


if __name__ == "__main__":
    PATH.write_text(page())
