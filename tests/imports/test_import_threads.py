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


ROOM = """
import importlib, threading, torch, torch_dcp_backport
thread = threading.Thread(target=importlib.import_module, args=("torch.distributed.fsdp",))
thread.start()
from torch_dcp_backport.state_dict import set_model_state_dict
thread.join()
tell(outcome=torch_dcp_backport.status().outcome)
"""


@pytest.mark.parametrize("switch", ["auto", "strict"])
def test_a_module_of_torchs_and_a_room(fresh: Fresh, switch: str) -> None:
    facts = fresh(ROOM, switch=switch, timeout=120).facts
    assert facts["outcome"] == ("applied" if AFFECTED else "not-needed")


# Every deadlock of import locks knows whether a thread of its circle is in code of ours. Our loader does not
# count: below it is what stock executes too.
WATCH = """
import importlib._bootstrap as _bootstrap, sys, threading
def circle(lock):
    # The threads from the one that raises, along what each of them waits for.
    found, due = {threading.get_ident()}, [lock]
    while due:
        owner = due.pop().owner
        if owner not in found:
            found.add(owner)
            waits = _bootstrap._blocking_on.get(owner, [])
            due += waits if isinstance(waits, list) else [waits]
    return found
def is_ours(frame):
    while frame is not None:
        home = frame.f_globals.get("__name__", "")
        if home.startswith("torch_dcp_backport") and home != "torch_dcp_backport.activation.hooks":
            return True
        frame = frame.f_back
    return False
class Watched(_bootstrap._DeadlockError):
    def __init__(self, text):
        super().__init__(text)
        stacks = sys._current_frames()
        threads = circle(sys._getframe(1).f_locals["self"])
        self.is_ours = any(is_ours(stacks.get(thread)) for thread in threads)
def circles(error):
    # Those that led to an error.
    while error is not None:
        if isinstance(error, Watched):
            yield error.is_ours
        error = error.__cause__ or error.__context__
_bootstrap._DeadlockError = Watched
"""

# Two modules of torch at once break in stock torch too: its imports are circular, and one thread meets what
# another has half executed. So a thread may fail, but not on a module of ours; a deadlock of import locks may
# be there, but without us in it; and no thread may hang.
SOAK = """
import importlib, random, time
shuffle = random.Random(int(sys.argv[1]))
names = shuffle.sample([
    A, B, "torch.distributed.checkpoint", "torch.distributed.checkpoint.staging", "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict_saver", "torch.distributed.tensor", "torch.distributed.fsdp.api",
    "torch.distributed.tensor.parallel", "torch.distributed.algorithms", "torch.profiler",
], 6)
names.insert(shuffle.randrange(7), B)
names.insert(shuffle.choice([0, len(names) // 2, len(names)]), "torch_dcp_backport")
errors, deadlocks = [], []
def work(name, delay):
    time.sleep(delay)
    try:
        importlib.import_module(name)
    except BaseException as error:
        errors.append(f"{name}: {error}")
        deadlocks.extend(circles(error))
threads = [threading.Thread(target=work, args=(name, shuffle.random() * 0.4)) for name in names]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
import torch_dcp_backport
tell(errors=errors, deadlocks=deadlocks, outcome=torch_dcp_backport.status().outcome,
     home=None if errors else home("set_model_state_dict"))
"""
PROCESSES = int(os.environ.get("SOAK_PROCESSES", "8"))  # 200 take some minutes


@pytest.mark.skipif(not TORCH.startswith("2.6."), reason="the same on every release; a minute")
def test_random_orders_in_threads(fresh: Fresh) -> None:
    def outcome(seed: int) -> str:
        try:
            facts = fresh("import torch\n" + WATCH + SOAK, str(seed), timeout=240).facts
        except subprocess.TimeoutExpired:
            return f"seed {seed} hangs"
        if any(facts["deadlocks"]):
            return f"seed {seed}: a deadlock with us in it"
        if facts["errors"]:
            texts = [text for text in facts["errors"] if "torch_dcp_backport" in text]
            return str(texts) if texts else f"torch's own, {len(facts['deadlocks'])} deadlocks"
        return f"{facts['outcome']}: {facts['home']}"

    with ThreadPoolExecutor(2) as pool:
        outcomes = Counter(pool.map(outcome, range(PROCESSES)))
    print(dict(outcomes))
    wrong = [text for text in outcomes if not text.startswith("torch's own")]
    assert wrong == ["applied: torch_dcp_backport" if AFFECTED else "not-needed: torch"]


# Two modules that import each other, each in a thread of its own, by a function of a package.
CIRCLE = """
from importlib import import_module
from pathlib import Path
sys.path.insert(0, ".")
Path(sys.argv[1]).mkdir()
Path(sys.argv[1], "__init__.py").touch()
for one, other in ("ab", "ba"):
    lines = "import time", f"from {sys.argv[1]} import helper", "time.sleep(1)", f"helper.load('{other}')"
    Path(f"{one}.py").write_text("\\n".join(lines))
Path(sys.argv[1], "helper.py").write_text(
    "from importlib import import_module\\ndef load(name):\\n    import_module(name)"
)
found = []
def work(name):
    try:
        import_module(name)
    except RuntimeError as error:
        found.extend(circles(error))
threads = [threading.Thread(target=work, args=(name,)) for name in "ab"]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
tell(found=found)
"""


@pytest.mark.parametrize("package", ["torch_dcp_backport", "somebodys"])
def test_the_watch_tells_who_is_in_a_deadlock(fresh: Fresh, package: str) -> None:
    assert fresh(WATCH + CIRCLE, package).facts["found"] == [package == "torch_dcp_backport"]
