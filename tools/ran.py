"""A pytest plugin: what a run of a lane has passed, for docs/compatibility.md. Loaded by tools/lanes.py.

A run that chose tests by name says nothing of a file, and one that failed nothing at all.
"""

from __future__ import annotations

import json
import os
import platform
from collections import Counter
from importlib import metadata
from pathlib import Path

import pytest

#: The variable with the path of the record, and that with the names of the lane's packages.
VARIABLE, PACKAGES = "LANES_RAN", "LANES_PACKAGES"


class Ran:
    """Counts the tests of each file that pass."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.passed: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.passed[report.nodeid.partition("::")[0]] += 1

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        self.path.unlink(missing_ok=True)
        chosen = session.config.option.keyword or any("::" in argument for argument in session.config.args)
        if exitstatus or chosen:
            return
        versions = {}
        for name in os.environ.get(PACKAGES, "").split():
            try:
                versions[name] = metadata.version(name)
            except metadata.PackageNotFoundError:  # of another Python
                continue
        found = {"python": platform.python_version(), "packages": versions, "passed": dict(self.passed)}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(found))


def pytest_configure(config: pytest.Config) -> None:
    path = os.environ.get(VARIABLE)
    if path:
        config.pluginmanager.register(Ran(Path(path)), "ran")
