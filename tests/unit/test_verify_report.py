"""The verdict of `verify`: what is over budget, wrong or not measured never passes for good."""

from __future__ import annotations

from typing import Any

import pytest

from torch_dcp_backport.regression.launch import RankReport
from torch_dcp_backport.regression.meter import MIB
from torch_dcp_backport.regression.verify import report

SHARD, WHOLE, MARGIN = 100 * MIB, 400 * MIB, report.PEAK_MARGINS["full"]
GOOD: dict[str, Any] = {
    "new": SHARD,
    "peak": SHARD + MARGIN,
    "margin": MARGIN,
    "kept": SHARD,
    "whole": WHOLE,
    "shard": SHARD,
    "storages": SHARD,
    "seconds": 1.5,
    "wrong": [],
    "history": [(0.0, 0), (1.5, SHARD)],
}
EVIDENCE = {"torch": "2.6.0", "code": "torch_dcp_backport", "outcome": "applied", "fixed": "no", "reason": ""}


def rank(number: int, ending: str = "finished", error: str = "", **changes: Any) -> RankReport:
    result = {**GOOD, **changes} if ending == "finished" else {}
    return RankReport("job", number, ending, result, EVIDENCE, error, "its output")


def side(**changes: Any) -> report.Side:
    """Good on both ranks and in each case, but for rank 1 of the optimizer."""
    cases = {case.name: [rank(0), rank(1)] for case in report.CASES}
    cases["optimizer"][1] = rank(1, **changes)
    return report.Side("with the fix", cases)


def test_exactly_on_budget_passes() -> None:
    assert report.failures(side()) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"peak": SHARD + MARGIN + 1}, "peak 164.0 MiB, budget 164.0 MiB"),
        ({"storages": WHOLE}, "storages of 400.0 MiB for a shard of 100.0 MiB"),
        ({"storages": int(SHARD * 1.03)}, "storages of 103.0 MiB"),
        ({"wrong": ["a.weight", "b.weight"]}, "2 values differ: a.weight, b.weight"),
        ({"ending": "raised", "error": "KeyError: 'x'"}, "raised KeyError: 'x'"),
        ({"ending": "killed: over 600 s"}, "killed: over 600 s"),
    ],
)
def test_each_fault_is_told_with_its_case_and_rank(changes: dict[str, Any], said: str) -> None:
    (told,) = report.failures(side(**changes))
    assert told.startswith("optimizer, rank 1: ")
    assert said in told


def test_a_peak_that_was_not_measured_is_no_fault_but_is_told() -> None:
    blind = side(peak=None, kept=None)
    assert report.failures(blind) == []
    assert not report.measured([side(), blind])
    assert report.measured([side()])
    assert "unknown" in report.table([side(), blind])


def test_a_peak_without_proc_does_not_hide_what_is_known() -> None:
    assert len(report.failures(side(peak=None, storages=WHOLE))) == 1


def test_the_table_has_a_line_per_rank_with_both_sides() -> None:
    stock = side(storages=WHOLE, kept=WHOLE)
    lines = report.table([stock, side()]).splitlines()
    last = lines[-1]
    assert last.split("|")[0].strip() == "1"
    assert "+1.00x" in last.split("|")[1]
    assert "4.00x" in last.split("|")[1]
    assert "+0.25x" in last.split("|")[2]
    assert len([line for line in lines if line.startswith("   1 |")]) == len(report.CASES)


def test_the_get_to_rank_0_has_a_budget_for_rank_0_and_another_for_the_rest() -> None:
    """A dict of the whole model is rank 0's to hold; another rank that holds one is at fault."""
    cases = {case.name: [rank(0), rank(1)] for case in report.CASES}
    nothing: dict[str, Any] = {"new": 0, "peak": MIB, "kept": 0, "shard": 0, "storages": 0}
    cases["get-model"] = [rank(0, new=WHOLE, peak=WHOLE, shard=WHOLE, storages=WHOLE), rank(1, **nothing)]
    good = report.Side("with the fix", cases)
    assert report.failures(good) == []
    table = report.table([good, good])
    assert "get_model_state_dict(full_state_dict=True, cpu_offload=True)" in table
    assert "peak 464.0 MiB on rank 0, peak 64.0 MiB on rank 1, storages 1.02x" in table
    assert table.count("none") == 2  # the storages of rank 1 on both sides
    cases["get-model"][1] = rank(1, **{**nothing, "peak": WHOLE, "storages": WHOLE})
    assert report.failures(good) == [
        "get-model, rank 1: peak 400.0 MiB, budget 64.0 MiB",
        "get-model, rank 1: storages of 400.0 MiB for a shard of 0.0 MiB",
    ]


def test_a_tiny_model_shows_no_seconds() -> None:
    sides = [side(), side()]
    assert "seconds" in report.table(sides)
    assert "1.5" in report.table(sides)
    untimed = report.table(sides, is_timed=False)
    assert "seconds" not in untimed
    assert "1.5" not in untimed.split("MiB x")[-1]
    assert untimed.count("equal") == report.table(sides).count("equal")
    assert report.UNTIMED in report.legend("cpu", is_timed=False)


def test_a_rank_that_failed_shows_its_error_in_the_table() -> None:
    stock = side(ending="raised", error="RuntimeError: can't allocate memory")
    last = report.table([stock, side()]).splitlines()[-1]
    assert "raised RuntimeError: can't allocate" in last
    assert "equal" in last.split("|")[2]


def test_a_tie_that_was_lost_is_told() -> None:
    assert "became two parameters (rank 1)" in report.table([side(tied=False), side()])
    assert "became two parameters" not in report.table([side(tied=True), side()])


def test_every_run_is_in_the_document() -> None:
    runs = [(side(seconds=number), side(seconds=10 + number)) for number in range(3)]
    made = report.document(runs, {"size": "full"}, ["a fault"])
    found = [
        [sides[name]["cases"]["optimizer"][1]["result"]["seconds"] for name in ("stock", "fixed")]
        for sides in (made["sides"], *made["again"])
    ]
    assert found == [[0, 10], [1, 11], [2, 12]]
    assert made["failures"] == ["a fault"]
