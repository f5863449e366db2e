"""docs/what-is-patched.md is what the records and the table say."""

from __future__ import annotations

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
