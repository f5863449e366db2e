"""The exact cause: a shard that is a view keeps the full tensor alive. Weighed storage by storage.

Stock torch must show it where it has the defect, or the other half would prove nothing.
"""

from __future__ import annotations

import pytest

from torch_dcp_backport.regression.checks import (
    LOOKED_AT,
    Reports,
    Runs,
    assert_refused,
    assert_right,
    explain,
    stock_kind,
)

# What stock torch leaves behind. A materialised model is filled in place: its views go when the load ends.
STOCK = {
    "2.4": {"model": "clean", "model-meta": "refused", "optimizer": "pins", "optimizer-meta": "refused"},
    "views": {"model": "clean", "model-meta": "pins", "optimizer": "pins", "optimizer-meta": "pins"},
    "fixed": {"model": "clean", "model-meta": "clean", "optimizer": "clean", "optimizer-meta": "clean"},
}


@pytest.mark.parametrize("scenario", LOOKED_AT)
def test_stock_shards_pin_more_than_themselves_unless_torch_has_the_fix(runs: Runs, scenario: str) -> None:
    reports = runs("stock", f"look-{scenario}")
    expected = STOCK[stock_kind(reports)][scenario]
    if expected == "refused":
        assert_refused(reports)
        return
    assert_right(reports)
    if expected == "clean":
        assert_clean(reports)
    else:
        assert any(r.result["oversized"] and r.result["held"] > r.result["limit"] for r in reports), explain(
            reports
        )


@pytest.mark.parametrize("scenario", LOOKED_AT)
@pytest.mark.parametrize("way", ["patched", "direct"])
def test_no_shard_keeps_the_full_tensor_alive(runs: Runs, way: str, scenario: str) -> None:
    reports = runs(way, f"look-{scenario}")
    assert_right(reports)
    assert_clean(reports)


def assert_clean(reports: Reports) -> None:
    for report in reports:
        assert report.result["parts"] > 0
        assert report.result["oversized"] == {}, f"rank {report.rank}: name -> [bytes held, bytes allowed]"
        assert report.result["held"] <= report.result["limit"], f"rank {report.rank}"
