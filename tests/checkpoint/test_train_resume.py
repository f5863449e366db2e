"""The example, killed with `kill -9` and started again: the losses of an undisturbed run, to the last bit.

More often than twice:

    RESUME_KILLS=10 python3 tools/lanes.py test 2.6 current -- tests/checkpoint/test_train_resume.py
"""

from __future__ import annotations

import functools
import os
import random
import re
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import pool
import pytest
import torch
import torch.distributed as dist

from torch_dcp_backport.checkpoint._src import store

ROOT = Path(__file__).resolve().parents[2]
STEPS = 24
# Sums over two are the same in any order.
RANKS = 4
KILLS = int(os.environ.get("RESUME_KILLS", "2"))
LINE = re.compile(r"^step (\d+) loss (\S+) (rate .*)$", re.MULTILINE)


def train(root: Path, rank: int, world: int, rendezvous: Path) -> None:
    """A rank of the example; what the first prints goes to a file."""
    output = os.open(f"{rendezvous}.out" if rank == 0 else os.devnull, os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.environ["LOCAL_RANK"] = str(rank)
    sys.argv = ["train_resume.py", "--root", str(root), "--steps", str(STEPS), "--every", "2"]
    where: dict[str, Any] = {"init_method": f"file://{rendezvous}", "rank": rank, "world_size": world}
    dist.init_process_group = functools.partial(dist.init_process_group, **where)
    runpy.run_path(str(ROOT / "examples/train_resume.py"), run_name="__main__")


class Training:
    """The example on several ranks: forks of a process that has torch, which is what a start costs."""

    def __init__(self, root: Path, ranks: int) -> None:
        root.mkdir(exist_ok=True)
        rendezvous = root.with_name(f"{root.name}-{time.monotonic_ns()}")
        self.output = Path(f"{rendezvous}.out")
        self.output.touch()
        self.processes = [
            pool.CONTEXT.Process(target=train, args=(root, rank, ranks, rendezvous), daemon=True)
            for rank in range(ranks)
        ]
        for process in self.processes:
            with pool.STARTING:
                process.start()

    def lines(self) -> dict[int, tuple[str, str]]:
        """Step -> its loss, and its learning rate and data."""
        whole_lines = self.output.read_text().rpartition("\n")[0]
        return {int(step): (loss, rest) for step, loss, rest in LINE.findall(whole_lines)}

    def wait(self, after: int) -> None:
        """Until it printed some step."""
        end = time.monotonic() + 100
        while after not in self.lines():
            assert time.monotonic() < end
            assert all(process.is_alive() for process in self.processes), "it ended before; see above"
            time.sleep(0.005)


def killed(root: Path, ranks: int, after: int) -> dict[int, tuple[str, str]]:
    """Train until some step was printed, and kill all processes; what it printed."""
    training = Training(root, ranks)
    training.wait(after)
    time.sleep(0.003 * after)
    for process in training.processes:
        process.kill()
    for process in training.processes:
        process.join()
        assert process.exitcode == -9
    return training.lines()


def finished(root: Path, ranks: int) -> dict[int, tuple[str, str]]:
    training = Training(root, ranks)
    for process in training.processes:
        process.join(100)
        assert process.exitcode == 0
    return training.lines()


def test_killed_and_resumed(tmp_path: Path) -> None:
    undisturbed = finished(tmp_path / "undisturbed", RANKS)
    assert list(undisturbed) == list(range(1, STEPS + 1))
    root, chance = tmp_path / "killed", random.Random(KILLS)
    moments = sorted(chance.sample(range(4, STEPS - 3), KILLS))
    printed = [killed(root, RANKS, after) for after in moments]
    last = finished(root, RANKS)
    assert min(last) > moments[-1] - 3
    for part in (*printed, last):
        assert part == {step: undisturbed[step] for step in part}
    assert [step.step for step in store.steps_in(root)] == [STEPS, STEPS - 2]
    assert not list(root.glob(".*"))


@pytest.mark.parametrize("ranks", [3, 2] if KILLS > 2 else [3])
def test_on_another_number_of_ranks_data_and_rates_are_the_same(tmp_path: Path, ranks: int) -> None:
    killed(tmp_path / "killed", RANKS, 7)
    resumed = finished(tmp_path / "killed", ranks)
    undisturbed = finished(tmp_path / "undisturbed", ranks)
    assert min(resumed) > 4
    assert {step: rest for step, (_, rest) in resumed.items()} == {
        step: undisturbed[step][1] for step in resumed
    }
    losses = torch.tensor([[float(part[step][0]) for step in resumed] for part in (resumed, undisturbed)])
    assert torch.allclose(losses[0], losses[1], atol=0.5)
