"""Threads that import torch's modules at the same time: as without us, no import hangs."""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from interpreters import AFFECTED, Fresh

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
# another has half executed. So errors are counted by kind, and only what stock torch never has is ours.
SOAK = """
import importlib, random, threading, time, torch
shuffle = random.Random(int(sys.argv[1]))
ours = sys.argv[2:]
names = shuffle.sample([
    A, B, "torch.distributed.checkpoint", "torch.distributed.checkpoint.staging", "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict_saver", "torch.distributed.tensor", "torch.distributed.fsdp.api",
    "torch.distributed.tensor.parallel", "torch._dynamo", "torch.distributed.algorithms", "torch.profiler",
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
tell(errors=errors, outcome=outcome, names=names, home=home("set_model_state_dict") if not errors else None)
"""
PROCESSES = int(os.environ.get("SOAK_PROCESSES", "12"))  # 200 take a quarter of an hour


def test_random_orders_in_threads_neither_hang_nor_find_a_deadlock(fresh: Fresh) -> None:
    def one(seed: int) -> tuple[int, object]:
        try:
            return seed, fresh(SOAK, str(seed), "torch_dcp_backport", timeout=180).facts
        except subprocess.TimeoutExpired:
            return seed, None

    with ThreadPoolExecutor(2) as pool:
        results = dict(pool.map(one, range(PROCESSES)))
    assert [seed for seed, facts in results.items() if facts is None] == []
    kinds = Counter(kind for facts in results.values() for kind, _ in facts["errors"])  # type: ignore[index]
    print(kinds)
    assert "_DeadlockError" not in kinds
    whole = [facts for facts in results.values() if not facts["errors"]]  # type: ignore[index]
    assert whole
    expected = ("applied", "torch_dcp_backport") if AFFECTED else ("not-needed", "torch")
    assert {(facts["outcome"], facts["home"]) for facts in whole} == {expected}  # type: ignore[index]
