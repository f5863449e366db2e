"""A pytest plugin: where the time of a run went, by folder and by file. Loaded by tools/lanes.py."""

from __future__ import annotations

from collections import Counter

import pytest

SHOWN = 12

_seconds: Counter[str] = Counter()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _seconds[report.nodeid.partition("::")[0]] += report.duration  # type: ignore[assignment]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    folders: Counter[str] = Counter()
    for path, seconds in _seconds.items():
        folders[path.rpartition("/")[0]] += seconds  # type: ignore[assignment]
    terminalreporter.section("seconds by folder, and by file")
    for path, seconds in folders.most_common():
        terminalreporter.write_line(f"{seconds:8.1f}  {path}/")
    for path, seconds in _seconds.most_common(SHOWN):
        terminalreporter.write_line(f"{seconds:8.1f}  {path}")
