"""Run a function on forked ranks of the emulated accelerator, and say what each of them saw.

What ranks need is imported here, before they are forked. A rank that hangs is killed, with its stacks in the
result. The emulator itself is installed in ranks alone.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Optional, Union

import torch
import torch.distributed as dist
from emulated.build import compiled

#: What cases need, in a user's order: the package first, which patches what comes later.
for name in ("torch_dcp_backport", "torch.distributed.fsdp", "emulated.cases"):
    importlib.import_module(name)

#: A case may take so many seconds.
LIMIT = 120.0
#: Once a rank has failed, others may wait for it so long.
GRACE = 5.0
PARENT_DEATH_SIGNAL = 1
Case = Union[str, Callable[[int, int], object]]


@dataclass
class Seen:
    """By one rank."""

    error: Optional[str] = None
    violations: list[str] = field(default_factory=list)
    communicators: int = 0
    sends_to: int = 0
    receives_from: int = 0
    sent: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Setting:
    """How ranks begin."""

    backend: str = "strict"
    world: int = 4
    sets_device: bool = True
    #: Whether ranks are given a process group; a program makes its own.
    has_group: bool = True
    #: Whether ranks wait for each other at the end, as they can where the group is whole.
    ends_together: bool = True


def run(case: Case, setting: Setting, limit: float = LIMIT) -> list[Seen]:
    """What each rank saw of a function of (rank, world), or of one by its name, which ranks import."""
    compiled()
    with TemporaryDirectory() as name:
        folder = Path(name)
        sys.stdout.flush()
        sys.stderr.flush()
        ranks = {}
        for rank in range(setting.world):
            process = os.fork()
            if process == 0:
                be_rank(case, rank, setting, folder)
            ranks[process] = rank
        ends = wait_for(ranks, folder, limit)
        return [seen_by(folder, rank, ends[rank]) for rank in range(setting.world)]


def wait_for(ranks: dict[int, int], folder: Path, limit: float) -> dict[int, str]:
    """Wait for processes, by their ids; after the limit dump the stacks of those left, and kill them.

    Returns:
        How each rank ended.
    """
    began, until, ends = time.monotonic(), time.monotonic() + limit, {}
    while ranks and time.monotonic() < until:
        for process in list(ranks):
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                ends[ranks.pop(process)] = f"ended with status {status}"
                if status:
                    until = min(until, time.monotonic() + GRACE)
        time.sleep(0.01)
    for process, rank in ranks.items():
        os.kill(process, signal.SIGUSR1)
        stacks = folder / f"stacks-{rank}"
        for _ in range(300):
            if stacks.exists() and stacks.stat().st_size:
                break
            time.sleep(0.01)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        seconds = time.monotonic() - began
        ends[rank] = f"was killed after {seconds:.0f} s\n{stacks.read_text() if stacks.exists() else ''}"
    return ends


def seen_by(folder: Path, rank: int, end: str) -> Seen:
    path = folder / f"seen-{rank}"
    if not path.exists():
        return Seen(error=end)
    seen: Seen = pickle.loads(path.read_bytes())
    return seen


def be_rank(case: Case, rank: int, setting: Setting, folder: Path) -> None:
    """Run the case, leave what was seen in a file, and exit: nothing may return into the test's process."""
    seen, code = Seen(), 1
    try:
        ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)
        stacks = os.open(folder / f"stacks-{rank}", os.O_CREAT | os.O_WRONLY)
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        try:
            begin(rank, setting, folder)
            function_of(case)(rank, setting.world)
            seen = account_of_case()
            code = bool(seen.violations)
            if setting.ends_together:
                wait_for_all(setting.world)
        except BaseException:
            seen.error = traceback.format_exc()
            code = 1
        half_written = folder / f"seen-{rank}.half"
        half_written.write_bytes(pickle.dumps(seen))
        half_written.rename(folder / f"seen-{rank}")
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def function_of(case: Case) -> Callable[[int, int], object]:
    if not isinstance(case, str):
        return case
    module, _, name = case.rpartition(".")
    function: Callable[[int, int], object] = getattr(importlib.import_module(module), name)
    return function


def wait_for_all(world: int) -> None:
    """Stay until each rank has come: those that wait for one that is gone see another fault."""
    store = dist.distributed_c10d._get_default_store()
    store.add("ended", 1)
    while store.add("ended", 0) < world:
        time.sleep(0.02)


def begin(rank: int, setting: Setting, folder: Path) -> None:
    from emulated import fakegpu

    torch.set_num_threads(1)
    for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", setting.world)):
        os.environ[name] = str(value)
    os.environ["EMULATED_FOLDER"] = str(folder)
    fakegpu.install(setting.world)
    if setting.sets_device:
        fakegpu.set_device(rank)
    if not setting.has_group:
        return
    dist.init_process_group(
        setting.backend,
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=setting.world,
        timeout=timedelta(seconds=LIMIT),
    )


def account_of_case() -> Seen:
    from emulated import strict

    strict.settle()
    account = strict.account
    return Seen(
        None,
        list(dict.fromkeys(account.violations)),
        len(account.communicators),
        len(account.sends_to),
        len(account.receives_from),
        {kind: size for kind, size in sorted(account.sent.items()) if size},
    )


def problems(seen: list[Seen]) -> str:
    """The errors and violations of all ranks as a text; empty where there are none."""
    lines = []
    for rank, each in enumerate(seen):
        lines += [f"--- rank {rank}: {each.error}"] if each.error else []
        lines += [f"--- rank {rank}: {text}" for text in each.violations]
    return "\n".join(lines)
