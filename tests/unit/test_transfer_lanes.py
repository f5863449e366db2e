"""The lane of a transfer, by what carries it."""

from __future__ import annotations

import logging

import pytest

from torch_dcp_backport.transfer._src import lanes
from torch_dcp_backport.transfer._src.lanes import Lane, is_collective, lane_of

#: (senders, ranks that want everything): the lane on gloo, the lane on NCCL.
TABLE = {
    # A load: each rank wants parts of what one has.
    (1, 0): (Lane.MESSAGES, Lane.BROADCAST),
    # A get to one rank, and to all of eight.
    (8, 1): (Lane.MESSAGES, Lane.ALL_GATHER),
    (8, 8): (Lane.ALL_GATHER, Lane.ALL_GATHER),
    # A reshard.
    (8, 0): (Lane.MESSAGES, Lane.MESSAGES),
}


@pytest.mark.parametrize(("senders", "wanted_by"), TABLE)
def test_the_lane_is_that_of_the_backend(senders: int, wanted_by: int) -> None:
    on_gloo, on_nccl = TABLE[senders, wanted_by]
    for backend in lanes.MESSENGERS:
        assert lane_of(backend, senders=senders, wanted_by=wanted_by) is on_gloo
    for backend in (*lanes.COLLECTIVE, "a backend of tomorrow"):
        assert lane_of(backend, senders=senders, wanted_by=wanted_by) is on_nccl


def test_a_backend_that_is_not_known_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "torch_dcp_backport.transfer"):
        assert all(is_collective("fictional") for _ in range(3))
        assert is_collective("nccl")
        assert not is_collective("gloo")
    assert [record.getMessage() for record in caplog.records] == [
        "the backend 'fictional' is not known: transfers in its groups use collectives alone"
    ]
