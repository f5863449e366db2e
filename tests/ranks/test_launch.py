"""Rank groups end, whatever their ranks do, and what they said is kept."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from torch_dcp_backport.regression import launch, ranks

TARGETS = """
import os, signal, sys, time
import torch, torch.distributed as dist

def add(api, number):
    total = torch.tensor(number + dist.get_rank())
    dist.all_reduce(total)
    return {"total": int(total)}

def fail(api):
    if dist.get_rank() == 1:
        print("about to fail")
        raise ValueError("as asked")
    dist.barrier()

def die(api):
    if dist.get_rank() == 0:
        while not os.path.exists("arrived"):  # its group is made: a rank that still joins it would raise
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGKILL)
    open("arrived", "w").close()
    time.sleep(600)

def hang(api):
    print("now hanging", flush=True)
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[launch.RankReport]]:
    folder = tmp_path_factory.mktemp("targets")
    (folder / "launch_targets.py").write_text(TARGETS)
    root = Path(launch.__file__).parents[2]
    jobs = [
        launch.Job("add", "launch_targets:add", 2, {"number": 20}),
        launch.Job("fail", "launch_targets:fail", 2, seconds=30),
        launch.Job("die", "launch_targets:die", 2, seconds=30),
        launch.Job("hang", "launch_targets:hang", 2, seconds=12),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "GRACE_SECONDS", 8.0)
        began = time.monotonic()
        found = launch.run(
            launch.STOCK, jobs, environment={"PYTHONPATH": os.pathsep.join((str(folder), str(root)))}
        )
        assert time.monotonic() - began < 300  # not one rank slept to its end
    return found


def test_results_come_back_from_every_rank(reports: dict[str, list[launch.RankReport]]) -> None:
    assert [(r.rank, r.ending, r.result) for r in reports["add"]] == [
        (0, "finished", {"total": 41}),
        (1, "finished", {"total": 41}),
    ]


def test_stock_ranks_run_torchs_code_and_say_so(reports: dict[str, list[launch.RankReport]]) -> None:
    assert {r.evidence["code"] for r in reports["add"]} == {"torch"}
    assert {r.evidence["function"] for r in reports["add"]} == {f"{launch.TORCHS}.set_model_state_dict"}


def test_an_error_comes_back_with_the_output(reports: dict[str, list[launch.RankReport]]) -> None:
    left, failed = reports["fail"]
    assert (failed.ending, failed.error) == ("raised", "ValueError: as asked")
    assert "about to fail" in failed.output
    assert "Traceback" in failed.output
    assert left.ending != "finished"


def test_a_killed_rank_takes_its_group_along(reports: dict[str, list[launch.RankReport]]) -> None:
    killed, left = reports["die"]
    assert killed.ending == "died: signal 9"
    assert left.ending.startswith("killed: still waiting")
    assert {r.evidence["code"] for r in (killed, left)} == {"torch"}


def test_what_hangs_is_killed_and_says_where_it_hung(reports: dict[str, list[launch.RankReport]]) -> None:
    for report in reports["hang"]:
        assert report.ending == "killed: over 12 s"
        assert "now hanging" in report.output
        assert "in hang" in report.output


def test_a_first_import_that_fails_is_a_launch_error() -> None:
    way = launch.Way("broken", first="no_such_module_here", api=launch.TORCHS, switch="off")
    with pytest.raises(launch.LaunchError, match="no_such_module_here"):
        launch.run(way, [launch.Job("add", "launch_targets:add", 2)])


def test_code_is_told_apart_by_where_it_lies() -> None:
    assert ranks._owner("/site/ours/state_dict/model.py", "/site/ours", "/site/torch") == "torch_dcp_backport"
    assert ranks._owner("/site/torch/x.py", "/site/ours", "/site/torch") == "torch"
    assert ranks._owner("/elsewhere/x.py", "/site/ours", "/site/torch") == "/elsewhere/x.py"
