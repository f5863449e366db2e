"""A pytest plugin: the processor time of a run, by folder and by file. Loaded by tools/lanes.py.

The time of all processes that a test started counts, living or not; that of processes which went on without
their parent does not. Where there is no /proc nothing is shown.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Optional

import pytest

SHOWN = 40


def spent() -> float:
    """Seconds of this process, its living descendants, and those that these have waited for."""
    ticks: dict[int, int] = {}
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        process = int(stat.parent.name)
        ticks[process] = sum(map(int, fields[11:15]))
        children.setdefault(int(fields[1]), []).append(process)
    total, processes = 0, [os.getpid()]
    while processes:
        process = processes.pop()
        total += ticks.get(process, 0)
        processes += children.get(process, [])
    return total / os.sysconf("SC_CLK_TCK")


class Seconds:
    def __init__(self) -> None:
        self.files: Counter[str] = Counter()
        self.now = "start"
        self.before = spent()

    def until_here(self) -> None:
        after = spent()
        # Less than before where a process ended that nothing has waited for.
        self.files[self.now] += max(0.0, after - self.before)  # type: ignore[assignment]
        self.before = after

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: Optional[pytest.Item]) -> Iterator[None]:
        path = item.nodeid.partition("::")[0]
        if path != self.now:
            self.until_here()
            self.now = path
        return (yield)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        self.until_here()
        folders: Counter[str] = Counter()
        for path, seconds in self.files.items():
            folders[path.rpartition("/")[0]] += seconds  # type: ignore[assignment]
        terminalreporter.section("processor seconds by folder, and by file")
        for path, seconds in folders.most_common():
            terminalreporter.write_line(f"{seconds:8.1f}  {path}/")
        for path, seconds in self.files.most_common(SHOWN):
            terminalreporter.write_line(f"{seconds:8.1f}  {path}")


def pytest_configure(config: pytest.Config) -> None:
    if os.path.exists("/proc/self/stat"):
        config.pluginmanager.register(Seconds(), "seconds")
