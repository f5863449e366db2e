"""The real out-of-memory: four ranks that may hold their shard and a margin, but by no means the model.

Stock torch must die here where it has the defect, or the other half would prove nothing.
"""

from __future__ import annotations

import pytest

from torch_dcp_backport.regression.checks import (
    LIMITED,
    Reports,
    Runs,
    assert_refused,
    assert_right,
    explain,
    stock_kind,
)

ALLOCATOR = "DefaultCPUAllocator: can't allocate memory"
PEER_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")

# What stock torch makes of each load.
STOCK = {
    "2.4": {"model": "fits", "model-meta": "refused", "optimizer": "dies"},
    "views": {"model": "dies", "model-meta": "dies", "optimizer": "dies"},
    "fixed": {"model": "fits", "model-meta": "fits", "optimizer": "fits"},
}


@pytest.mark.parametrize("scenario", LIMITED)
def test_stock_torch_dies_unless_it_has_the_fix(runs: Runs, scenario: str) -> None:
    reports = within_limit(runs, "stock", scenario)
    expected = STOCK[stock_kind(reports)][scenario]
    if expected == "fits":
        assert_right(reports)
    elif expected == "refused":
        assert_refused(reports)
    else:
        assert_died(reports)


@pytest.mark.parametrize("scenario", LIMITED)
@pytest.mark.parametrize("way", ["patched", "direct"])
def test_a_shard_and_a_margin_are_enough(runs: Runs, way: str, scenario: str) -> None:
    assert_right(within_limit(runs, way, scenario))


def within_limit(runs: Runs, way: str, scenario: str) -> Reports:
    reports = runs(way, f"limit-{scenario}")
    if any(r.result.get("enforced") is False for r in reports):
        pytest.skip("this kernel does not enforce RLIMIT_DATA")
    return reports


def assert_died(reports: Reports) -> None:
    """Assert a death by torch's allocator on some rank; on the others by that, or by the loss of a peer."""
    starved = [r for r in reports if ALLOCATOR in r.error]
    others = [r for r in reports if r not in starved]
    assert starved, explain(reports)
    assert all(r.rank != 0 for r in starved), explain(reports)
    lost = [r for r in others if r.ending.startswith("killed") or any(text in r.error for text in PEER_LOST)]
    assert lost == others, explain(reports)
