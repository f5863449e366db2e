"""Threads that import torch's modules at the same time: as without us, no import hangs."""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

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
#: Fresh processes without us that have to show that a deadlock of import locks is torch's own.
STOCK_TRIES = 20


def errors_of(fresh: Fresh, seed: int, *ours: str) -> dict[str, Any]:
    return fresh(SOAK, str(seed), *ours, timeout=240).facts


def is_deadlock(facts: dict[str, Any]) -> bool:
    return any(kind == "_DeadlockError" for kind, _ in facts["errors"])


@pytest.mark.skipif(not TORCH.startswith("2.6."), reason="the same on every release; a minute")
def test_random_orders_in_threads(fresh: Fresh) -> None:
    def outcome(seed: int) -> str:
        try:
            facts = errors_of(fresh, seed, "torch_dcp_backport")
        except subprocess.TimeoutExpired:
            return f"seed {seed} hangs"
        if facts["errors"]:
            texts = [text for _, text in facts["errors"] if "torch_dcp_backport" in text]
            if texts:
                return str(texts)
            return f"deadlock with seed {seed}" if is_deadlock(facts) else "torch's own"
        return f"{facts['outcome']}: {facts['home']}"

    with ThreadPoolExecutor(2) as pool:
        outcomes = Counter(pool.map(outcome, range(PROCESSES)))
    print(dict(outcomes))
    del outcomes["torch's own"]
    for text in [text for text in outcomes if text.startswith("deadlock")]:
        seed = int(text.split()[-1])
        assert any(is_deadlock(errors_of(fresh, seed)) for _ in range(STOCK_TRIES)), f"{text}, never in stock"
        del outcomes[text]
    assert set(outcomes) == {"applied: torch_dcp_backport" if AFFECTED else "not-needed: torch"}
