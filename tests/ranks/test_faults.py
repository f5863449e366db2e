"""Ranks that fail, die, hang or have no memory: everyone hears of it, and nothing is worse than before."""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import faults
import pytest
import reliability
import torch.distributed as dist
from cpu_fsdp import RELEASE
from faults import BROKEN, FAULTS, LOADED, REFUSED, TIMEOUT, TOLD, WORLD, Seen
from pool import OURS, Pool, RankError

from torch_dcp_backport import transfer

#: Bytes. The backend may still hold the last small messages; a shard has a MiB.
SLACK = 64 * 1024

CASES = [
    pytest.param(number, call, rank, id=f"{fault.what}-{call}-{rank}".replace(" ", "_"))
    for number, fault in enumerate(FAULTS)
    for call, rank in fault.where
]
WHOLE = [one for one in CASES if FAULTS[one.values[0]].ends != BROKEN]
BREAKING = [one for one in CASES if FAULTS[one.values[0]].ends == BROKEN]
if not os.environ.get("TESTS_WHOLE"):
    # Each has four processes of its own: every other one on old releases, the rest on new ones.
    BREAKING = BREAKING[RELEASE >= (2, 7) :: 2]


@pytest.mark.parametrize(("number", "call", "rank"), WHOLE)
def test_every_rank_hears_of_it_and_goes_on(ranks, number, call, rank):
    fault = FAULTS[number]
    seen = ranks(faults.case, call, number, rank)
    assert all(ranks(faults.group_is_usable))
    for one in seen:
        assert one.untouched
        assert one.kept < SLACK
    if fault.ends == LOADED:
        assert all(one.complete for one in seen), seen
        return
    assert all(fault.says in one.error[1] for one in seen if one is not seen[rank]), seen
    if fault.ends == REFUSED:
        assert len({one.error for one in seen}) == 1, seen
        assert "nothing was changed" in seen[0].error[1]
        assert not any(one.changed for one in seen), seen
    if fault.ends == TOLD:
        assert seen[rank].error == ("KeyError", "'a fault'")
        assert all(
            f"rank {rank}: KeyError: 'a fault'" in one.error[1] for one in seen if one is not seen[rank]
        )


def into_file(api: Any, call: str, number: int, rank: int, folder: str) -> None:
    seen = faults.case(api, call, number, rank)
    Path(folder, str(dist.get_rank())).write_text(json.dumps(seen))


def broken_off(number: int, call: str, rank: int) -> dict[int, Seen]:
    """By rank; without the rank that died. In processes of its own: no group is whole afterwards."""
    pool = Pool(WORLD, OURS, timeout=TIMEOUT, limit=120.0)
    try:
        with tempfile.TemporaryDirectory() as folder:
            dies = FAULTS[number].dies
            with pytest.raises(RankError, match="died") if dies else contextlib.nullcontext():
                pool.run(into_file, call, number, rank, folder)
            return {int(path.name): Seen(*json.loads(path.read_text())) for path in Path(folder).iterdir()}
    finally:
        pool.close()


@pytest.fixture(scope="module")
def broken() -> Iterator[dict[tuple[int, str, int], Future[dict[int, Seen]]]]:
    """All of them, several at a time: they mostly wait."""
    with ThreadPoolExecutor(4) as executor:
        yield {one.values: executor.submit(broken_off, *one.values) for one in BREAKING}


@pytest.mark.parametrize(("number", "call", "rank"), BREAKING)
def test_who_waits_for_a_rank_is_told_within_the_timeout(broken, number, call, rank):
    fault = FAULTS[number]
    seen = broken[number, call, rank].result()
    living = set(range(WORLD)) - {rank}
    assert set(seen) == living | (set() if fault.dies else {rank})
    for other in living:
        one = seen[other]
        assert one.seconds < 4 * TIMEOUT
        assert one.untouched
        assert one.kept < SLACK
        if not one.error[0]:
            # Whoever had all that it needs before is done; whoever waits for the rank is not.
            assert rank != 0
            assert other != 0
            assert one.complete
            continue
        kind, text = one.error
        assert kind == transfer.TransferError.__name__, text
        assert re.search(r"broken off while|no agreement with|did not arrive everywhere", text), text
        assert "nothing was changed" in text or not fault.before, text
        if one.changed:
            assert_named(one.changed, text)


def assert_named(changed: list[str], text: str) -> None:
    """An error names the first and the last tensor that was written, and how many there are."""
    found = re.search(r"rank \d wrote (\S+)(?: \.\.\. (\S+) \((\d+) tensors\)|, (\S+?))?(?::|$)", text)
    assert found, text
    first, _, count, second = found.groups()
    assert first.rstrip(":") in changed or int(count or (2 if second else 1)) > len(changed), text
    assert int(count or (2 if second else 1)) >= len(changed), text


def test_the_page_is_what_is_tested():
    assert reliability.PATH.read_text() == reliability.page(), "make reliability writes it anew"


def test_a_rank_without_room_for_its_buffers_gets_smaller_ones(ranks):
    for report in ranks(short_of_memory):
        assert 0 < report.staging_bytes <= 2**20
        assert 2**20 <= report.staging_budget < 64 * 2**20


def short_of_memory(api: Any) -> transfer.Report:
    (number,) = (number for number, fault in enumerate(FAULTS) if "little memory" in fault.what)
    faults.case(api, "load", number, 0)
    return transfer.last_report()
