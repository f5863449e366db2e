"""docs/what-is-patched.md is what the records and the table say."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "patched_page.py"
tool = SimpleNamespace(**runpy.run_path(str(SCRIPT)))


def test_the_page_is_what_the_records_say() -> None:
    assert tool.PATH.read_text() == tool.page(), "make patched-page writes it anew"


@pytest.mark.parametrize("part", ["# 0004", "| Affected", "**What is wrong", "**What we do", "**Shown by"])
def test_a_record_that_lacks_a_part_is_refused(part: str) -> None:
    name = "0004-callers-dict-overwritten"
    text = (tool.PATCHES / f"{name}.md").read_text()
    assert tool.read(name, text).facts["Upstream"] == "open"
    with pytest.raises(ValueError, match=f"patches/{name}.md"):
        tool.read(name, text.replace(part, part.strip("#*|").lower()))


def test_upstreams_fixes_link_to_records() -> None:
    records = [tool.read(path.stem, path.read_text()) for path in sorted(tool.PATCHES.glob("[0-9]*.md"))]
    link = "[0004](../patches/0004-callers-dict-overwritten.md)"
    assert tool.linked("replaced: [0004], [#12](https://x)", records) == f"replaced: {link}, [#12](https://x)"
    with pytest.raises(ValueError, match="record 4711"):
        tool.linked("replaced: [4711]", records)
    # A pull request that a record names is in the list, too.
    listed = set(re.findall(r"https://github.com/pytorch/pytorch/pull/\d+", tool.UPSTREAM.read_text()))
    assert {link for _, links in tool.TABLE.RECORDS.values() for link in links if "/pull/" in link} <= listed
