"""The child of launch.py: imports once, forks the ranks of each job, waits, writes down their ends.

Must start no thread and touch no accelerator before it forks, and must leave no rank behind.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import inspect
import json
import os
import signal
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist


def serve(plan_file: str) -> None:
    plan = json.loads(Path(plan_file).read_text())
    for name in plan["preload"]:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    api = importlib.import_module(plan["api"])
    for job in plan["jobs"]:
        importlib.import_module(job["target"].partition(":")[0])
    for number, job in enumerate(plan["jobs"]):
        stem = f"{plan['folder']}/{number}"
        _write(Path(stem + ".done.json"), _run(job, api, stem, plan["grace"]))


def _run(job: dict[str, Any], api: ModuleType, stem: str, grace: float) -> list[str]:
    """Fork the job's ranks, wait for them, and return the ending of each."""
    running = {}
    for rank in range(job["world"]):
        pid = os.fork()
        if pid == 0:
            _rank(job, api, rank, stem)
        running[pid] = rank
    endings = [""] * job["world"]
    deadline = time.monotonic() + job["seconds"]
    why = f"killed: over {job['seconds']:.0f} s"
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in running:
            rank = running.pop(pid)
            endings[rank] = endings[rank] or _ending(status)
            if endings[rank] != "finished" and time.monotonic() + grace < deadline:
                deadline, why = (
                    time.monotonic() + grace,
                    f"killed: still waiting {grace:.0f} s after rank {rank} ended",
                )
            continue
        if time.monotonic() > deadline:
            for pid, rank in running.items():
                endings[rank] = why
                os.kill(pid, signal.SIGKILL)
            deadline = float("inf")
        time.sleep(0.02)
    return endings


def _ending(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"died: signal {os.WTERMSIG(status)}"
    code = os.WEXITSTATUS(status)
    return {0: "finished", 3: "raised"}.get(code, f"died: exit code {code}")


def _rank(job: dict[str, Any], api: ModuleType, rank: int, stem: str) -> None:
    """Run a rank from its start to its end; never return."""
    code = 4
    try:
        with open(f"{stem}.{rank}.log", "wb") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        faulthandler.enable()
        faulthandler.dump_traceback_later(max(job["seconds"] - 2, 1), exit=False)
        report: dict[str, Any] = {"evidence": evidence(api)}
        answer = Path(f"{stem}.{rank}.json")
        _write(answer, report)  # already now: a rank that is killed has evidence too
        try:
            _join(job, rank, stem)
            module, _, function = job["target"].partition(":")
            report["result"] = getattr(importlib.import_module(module), function)(api, **job["arguments"])
            code = 0
        except BaseException as error:
            report["error"] = f"{type(error).__name__}: {error}"
            traceback.print_exc()
            code = 3
        _write(answer, report)
        if code == 0:
            # A peer may still be in its last collective; leaving now would break it. It may also be dead.
            with contextlib.suppress(Exception):
                dist.barrier()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _join(job: dict[str, Any], rank: int, stem: str) -> None:
    torch.set_num_threads(1)
    if job["device"] != "cpu":
        # Only here: on the CPU stock ranks stay without our code.
        importlib.import_module("torch_dcp_backport.compat").set_device(job["device"], rank)
    dist.init_process_group(
        job["backend"],
        init_method=f"file://{stem}.store",
        rank=rank,
        world_size=job["world"],
        timeout=timedelta(seconds=job["seconds"]),
    )


def evidence(api: ModuleType) -> dict[str, str]:
    """Return evidence of the code of the api's functions: by its file, which no patching can dress up."""
    files = {
        inspect.unwrap(getattr(api, name)).__code__.co_filename
        for name in ("set_model_state_dict", "set_optimizer_state_dict", "get_optimizer_state_dict")
    }
    # Its module is a label for pickle.
    load = inspect.unwrap(api.set_model_state_dict)
    ours = str(Path(__file__).resolve().parents[1])
    torchs = str(Path(torch.__file__).resolve().parent)
    owners = {_owner(str(Path(file).resolve()), ours, torchs) for file in files}
    return {
        "torch": torch.__version__,
        "code": " and ".join(sorted(owners)),
        "function": f"{load.__globals__['__name__']}.{load.__name__}",
        **_status(),
        "fixed": _torch_is_fixed(),
    }


def _owner(file: str, ours: str, torchs: str) -> str:
    if file.startswith(ours + os.sep):
        return "torch_dcp_backport"
    return "torch" if file.startswith(torchs + os.sep) else file


def _status() -> dict[str, str]:
    status = importlib.import_module("torch_dcp_backport").status()
    return {"outcome": status.outcome, "reason": status.reason}


def _torch_is_fixed() -> str:
    """Return "yes" or "no" by the code: pre-releases and vendor builds of 2.7 vary. Once patched, void."""
    utilities = importlib.import_module("torch.distributed._state_dict_utils")
    helper = getattr(utilities, "_broadcast_state_dict", None)
    return "yes" if helper is not None and "cpu_offload" in inspect.signature(helper).parameters else "no"


def _write(path: Path, content: object) -> None:
    """Write a file that appears with its content: readers look for the name."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(content))
    part.replace(path)
