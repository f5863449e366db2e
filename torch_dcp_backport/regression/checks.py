"""The shared parts of the suite's tests: a run per way, its evidence, and the assertions on its reports.

Must not import torch: the ranks do, each with its own first import.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Union

from torch_dcp_backport.regression import launch

WORLD = 4
SCENARIOS = "torch_dcp_backport.regression.scenarios:"
LIMITED = ("model", "model-meta", "optimizer")
LOOKED_AT = (*LIMITED, "optimizer-meta")
WAYS = {way.name: way for way in (launch.STOCK, launch.PATCHED, launch.DIRECT)}
CPU_JOBS = (
    *(launch.Job(f"limit-{s}", SCENARIOS + "load_within_limit", WORLD, {"scenario": s}) for s in LIMITED),
    *(launch.Job(f"look-{s}", SCENARIOS + "load_and_look", WORLD, {"scenario": s}) for s in LOOKED_AT),
)

Reports = list[launch.RankReport]


class Runs:
    """The runs of the ways, each made at most once; a test asks for the reports of a job."""

    def __init__(self) -> None:
        self.tested: dict[str, dict[str, str]] = {}  # way -> evidence, for the summary
        self._results: dict[tuple[str, str], Union[dict[str, Reports], launch.LaunchError]] = {}

    def __call__(self, way: str, job: str, jobs: Sequence[launch.Job] = CPU_JOBS) -> Reports:
        key = (way, jobs[0].backend)
        if key not in self._results:
            try:
                self._results[key] = launch.run(WAYS[way], jobs)
            except launch.LaunchError as error:
                self._results[key] = error
        result = self._results[key]
        if isinstance(result, launch.LaunchError):
            raise result
        reports = result[job]
        assert all(report.evidence for report in reports), explain(reports)
        self.tested[way] = reports[0].evidence
        assert_way(way, reports)
        return reports


def explain(reports: Reports) -> str:
    return "\n\n".join(map(str, reports))


def assert_way(way: str, reports: Reports) -> None:
    """Assert that the code that ran is the code that the way promises: no way may pass for another."""
    for report in reports:
        seen = report.evidence
        if way == "stock":
            assert seen["code"] == "torch", seen
            assert seen["outcome"] != "applied", seen
        elif way == "direct":
            assert seen["code"] == "torch_dcp_backport", seen
            assert seen["outcome"] != "applied", seen
        elif seen["code"] == "torch":
            assert seen["fixed"] == "yes", (
                f"torch's own code ran: the backport is {seen['outcome']}, {seen['reason']}"
            )
        else:
            assert (seen["code"], seen["outcome"]) == ("torch_dcp_backport", "applied"), seen


def assert_right(reports: Reports) -> None:
    """Assert that every rank finished and holds exactly its slices of the source."""
    assert [r.ending for r in reports] == ["finished"] * len(reports), explain(reports)
    assert [r.result["wrong"] for r in reports] == [[]] * len(reports), explain(reports)


def assert_refused(reports: Reports) -> None:
    """Assert that torch 2.4 refused to load into a model on the meta device."""
    assert all("attempted to run this operator with Meta tensors" in r.error for r in reports), explain(
        reports
    )


def stock_kind(reports: Reports) -> str:
    """Return the kind of stock torch: "fixed", "2.4", or "views": shards are views (2.5 until the fix)."""
    seen = reports[0].evidence
    if seen["fixed"] == "yes":
        return "fixed"
    return "2.4" if seen["torch"].startswith("2.4.") else "views"
