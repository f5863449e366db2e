"""The test suite's own files: a module of helpers is found by its name alone, in one folder."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
#: Programs of tests/conformance and tests/emulated, which `make` runs apart.
APART = {"record.py", "runner.py"}


def test_no_two_modules_have_one_name() -> None:
    names = Counter(path.name for path in TESTS.rglob("*.py"))
    twice = {name for name, count in names.items() if count > 1}
    assert twice - {"conftest.py", *APART} == set()
