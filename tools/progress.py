"""A pytest plugin: the counts of a run in a file, for who waits for it. Loaded by tools/lanes.py.

Each line of the file is `DONE TOTAL FAILED`, or `FAILED NAME` of a test as soon as it has failed.
"""

from __future__ import annotations

import os
import time

import pytest

#: The variable with the path of the file.
VARIABLE = "LANES_PROGRESS"
#: Seconds between two lines of counts.
BETWEEN = 2.0


class Progress:
    """Writes the counts of a run."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.done, self.total, self.failed = 0, 0, 0
        self.last = 0.0

    def write(self, line: str) -> None:
        with open(self.path, "a") as file:
            file.write(f"{line}\n")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.total = len(session.items)
        self.write(f"0 {self.total} 0")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed += 1
            self.write(f"FAILED {report.nodeid}")
        if report.when != "teardown":
            return
        self.done += 1
        now = time.monotonic()
        if now - self.last >= BETWEEN or self.done == self.total:
            self.last = now
            self.write(f"{self.done} {self.total} {self.failed}")


def pytest_configure(config: pytest.Config) -> None:
    path = os.environ.get(VARIABLE)
    if path:
        config.pluginmanager.register(Progress(path), "progress")
