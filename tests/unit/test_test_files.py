"""The test suite's own files: a module of helpers is found by its name alone, in one folder."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
#: Programs of tests/conformance and tests/emulated, which `make` runs apart.
APART = {"record.py", "runner.py"}


def test_no_two_modules_have_one_name() -> None:
    names = Counter(path.name for path in TESTS.rglob("*.py"))
    twice = {name for name, count in names.items() if count > 1}
    assert twice - {"conftest.py", *APART} == set()


def test_no_file_that_needs_megatron_core_is_left_out_of_its_lane() -> None:
    """Elsewhere such a file is skipped, which reads as green."""
    skipped = re.compile(r"^\S.*importorskip\(\"megatron", re.MULTILINE)
    files = [path for path in TESTS.rglob("test_*.py") if skipped.search(path.read_text())]
    commands = (TESTS.parent / "Makefile").read_text()
    assert len(files) > 3
    assert [path.name for path in files if f"/{path.name}" not in commands] == []
