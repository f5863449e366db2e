"""Threads that import torch's modules at the same time: as without us, no import hangs."""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from interpreters import AFFECTED, TORCH, Fresh

TWO = """
import threading, time, torch, torch_dcp_backport
threads = []
for name in ("torch.distributed.checkpoint", B):
    threads.append(threading.Thread(target=__import__, args=(name,)))
    threads[-1].start()
    time.sleep(0.2)
[thread.join() for thread in threads]
tell(outcome=torch_dcp_backport.status().outcome)
"""


def test_a_package_and_a_module_of_it(fresh: Fresh) -> None:
    assert fresh(TWO, timeout=120).facts["outcome"] == ("applied" if AFFECTED else "not-needed")


# Two modules of torch at once break in stock torch too: its imports are circular, and one thread meets what
# another has half executed. So a thread may fail, but not on a module of ours, and no thread may hang.
SOAK = """
import importlib, random, threading, time, torch
shuffle = random.Random(int(sys.argv[1]))
ours = sys.argv[2:]
names = shuffle.sample([
    A, B, "torch.distributed.checkpoint", "torch.distributed.checkpoint.staging", "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict_saver", "torch.distributed.tensor", "torch.distributed.fsdp.api",
    "torch.distributed.tensor.parallel", "torch.distributed.algorithms", "torch.profiler",
], 6)
names.insert(shuffle.randrange(7), B)
for name in ours:
    names.insert(shuffle.choice([0, len(names) // 2, len(names)]), name)
errors = []
def work(name, delay):
    time.sleep(delay)
    try:
        importlib.import_module(name)
    except BaseException as error:
        errors.append([type(error).__name__, f"{name}: {error}"])
threads = [threading.Thread(target=work, args=(name, shuffle.random() * 0.4)) for name in names]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
outcome = None
if ours and not errors:
    import torch_dcp_backport
    outcome = torch_dcp_backport.status().outcome
tell(errors=errors, outcome=outcome, home=None if errors else home("set_model_state_dict"))
"""
PROCESSES = int(os.environ.get("SOAK_PROCESSES", "10"))  # 200 take a quarter of an hour


@pytest.mark.skipif(not TORCH.startswith("2.6."), reason="the same on every release; a minute")
def test_random_orders_in_threads(fresh: Fresh) -> None:
    def outcome(seed: int) -> str:
        try:
            facts = fresh(SOAK, str(seed), "torch_dcp_backport", timeout=240).facts
        except subprocess.TimeoutExpired:
            return "hangs"
        if facts["errors"]:
            texts = [text for _, text in facts["errors"] if "torch_dcp_backport" in text]
            return str(texts) if texts else "torch's own"
        return f"{facts['outcome']}: {facts['home']}"

    with ThreadPoolExecutor(2) as pool:
        outcomes = Counter(pool.map(outcome, range(PROCESSES)))
    del outcomes["torch's own"]
    assert set(outcomes) == {"applied: torch_dcp_backport" if AFFECTED else "not-needed: torch"}
