from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from differences import DIFFERENCES
from expected import Expectations, Verdict
from runner import RELEASE, run_all

#: way -> scenario -> verdict, of this session.
VERDICTS: dict[str, dict[str, Verdict]] = {}


class Results:
    """Each way's scenarios, all run when the first of them is asked for."""

    def __init__(self, items: list[pytest.Item]) -> None:
        chosen = [item.callspec.params for item in items if hasattr(item, "callspec")]
        self.wanted = [(one["way"], one["key"]) for one in chosen if "way" in one and "key" in one]
        self.found: dict[str, dict[str, dict[str, Any]]] = {}
        self.expectations = Expectations(RELEASE)

    def of(self, way: str, key: str) -> dict[str, Any]:
        if way not in self.found:
            self.found[way] = run_all(way, [one for asked, one in self.wanted if asked == way])
        return self.found[way][key]

    def verdict(self, way: str, key: str) -> Verdict:
        verdict = self.expectations.verdict(key, self.of(way, key))
        VERDICTS.setdefault(way, {})[key] = verdict
        return verdict


@pytest.fixture(scope="session")
def results(request: pytest.FixtureRequest) -> Results:
    return Results(request.session.items)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for way, verdicts in VERDICTS.items():
        kinds = Counter(verdict.kind for verdict in verdicts.values())
        terminalreporter.write_line(
            f"conformance, {way} on torch {RELEASE}: {len(verdicts)} scenarios, "
            f"{kinds['equal']} equal to native torch, {kinds['deliberate']} deliberately different, "
            f"{kinds['core']} decided by this torch's core, {kinds['wrong']} wrong; "
            f"{len(DIFFERENCES)} reasons in tests/conformance/differences.py"
        )
