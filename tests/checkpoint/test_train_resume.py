"""The example, killed with `kill -9` and started again: the losses of an undisturbed run, to the last bit."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

from torch_dcp_backport.checkpoint import store

ROOT = Path(__file__).resolve().parents[2]
STEPS = 24
LINE = re.compile(r"^step (\d+) loss (\S+) (rate .*)$", re.MULTILINE)


def start(root: Path, ranks: int, steps: int = STEPS) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["examples/train_resume.py", "--root", str(root), "--steps", str(steps), "--every", "2"]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def lines_of(output: str) -> dict[int, tuple[str, str]]:
    """Step -> its loss, and its learning rate and data."""
    return {int(step): (loss, rest) for step, loss, rest in LINE.findall(output)}


def killed(root: Path, ranks: int, after: int) -> dict[int, tuple[str, str]]:
    """Train until some step was printed, and kill all processes; what it printed."""
    process = start(root, ranks)
    output = []
    assert process.stdout is not None
    for line in process.stdout:
        output.append(line)
        if line.startswith(f"step {after} "):
            time.sleep(0.003 * after)
            break
    for path in Path("/proc").glob("[0-9]*"):
        # torchrun's processes are sessions of their own.
        with contextlib.suppress(OSError):
            if str(root).encode() in (path / "cmdline").read_bytes():
                os.kill(int(path.name), signal.SIGKILL)
    output.append(process.communicate()[0])
    return lines_of("".join(output))


def finished(root: Path, ranks: int) -> dict[int, tuple[str, str]]:
    process = start(root, ranks)
    output, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    return lines_of(output)


def test_killed_and_resumed(tmp_path: Path) -> None:
    undisturbed = finished(tmp_path / "undisturbed", 2)
    assert list(undisturbed) == list(range(1, STEPS + 1))
    root = tmp_path / "killed"
    printed = [killed(root, 2, after) for after in (6, 15)]
    last = finished(root, 2)
    assert min(last) > 12
    for part in (*printed, last):
        assert part == {step: undisturbed[step] for step in part}
    assert [step.step for step in store.steps_in(root)] == [STEPS, STEPS - 2]
    assert not list(root.glob(".*"))


def test_on_another_number_of_ranks_data_and_rates_are_the_same(tmp_path: Path) -> None:
    killed(tmp_path, 2, 7)
    resumed = finished(tmp_path, 3)
    undisturbed = finished(tmp_path / "undisturbed", 3)
    assert min(resumed) > 4
    assert {step: rest for step, (_, rest) in resumed.items()} == {
        step: undisturbed[step][1] for step in resumed
    }
    losses = torch.tensor([[float(part[step][0]) for step in resumed] for part in (resumed, undisturbed)])
    assert torch.allclose(losses[0], losses[1], atol=0.5)
