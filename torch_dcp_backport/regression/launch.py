"""Groups of rank processes for the suite and for `verify`: their start, and each rank's report.

Must never wait without end (what hangs is killed, its output kept), nor decide what a result means.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

TORCHS = "torch.distributed.checkpoint.state_dict"
OURS = "torch_dcp_backport.state_dict"
SWITCH = "TORCH_DCP_BACKPORT"
IMPORT_SECONDS = 300.0  # torch without byte code on a slow disk
GRACE_SECONDS = 20.0  # how long ranks may go on once another is dead
TAIL = 4000  # characters of a rank's output that a report keeps

# One process imports and then forks the ranks: torch takes 3 s per process to import, and nothing is shared
# that a rank writes to. Its first import is the way's own, before anything else of ours or torch's.
BOOT = (
    "import importlib, sys; importlib.import_module(sys.argv[1]); "
    "from torch_dcp_backport.regression.ranks import serve; serve(sys.argv[2])"
)


@dataclass(frozen=True)
class Way:
    """A way to reach the state-dict functions."""

    name: str
    first: str  # the process's very first import
    api: str  # the module whose functions the job calls
    switch: str | None  # TORCH_DCP_BACKPORT in the ranks; None leaves the caller's


STOCK = Way("stock", first=TORCHS, api=TORCHS, switch="off")
PATCHED = Way("patched", first="torch_dcp_backport", api=TORCHS, switch=None)
DIRECT = Way("direct", first=TORCHS, api=OURS, switch="off")


@dataclass(frozen=True)
class Job:
    """A group of ranks that runs a function."""

    name: str
    target: str  # "module:function", called as function(api module, **arguments), returns what JSON can hold
    world: int
    arguments: dict[str, Any] = field(default_factory=dict)
    backend: str = "gloo"
    device: str = "cpu"  # its type; a rank on an accelerator has the device of its number, or shares one
    seconds: float = 120.0  # hard limit


@dataclass(frozen=True)
class RankReport:
    """The end of a rank, its result and its output."""

    job: str
    rank: int
    ending: str  # finished | raised | died: ... | killed: ...
    result: dict[str, Any]  # empty unless finished
    evidence: dict[str, str]  # which code it ran on; empty if it died before it could report
    error: str  # "Type: text" if raised
    output: str  # the end of its stdout and stderr

    def __str__(self) -> str:
        head = f"{self.job} rank {self.rank}: {self.ending} {self.error}".rstrip()
        return f"{head}\n{self.output}" if self.output.strip() else head


class LaunchError(RuntimeError):
    """The ranks could not be started at all."""


def run(
    way: Way,
    jobs: Sequence[Job],
    *,
    preload: Sequence[str] = (),
    environment: dict[str, str] | None = None,
    done: Callable[[Job, list[RankReport]], None] = lambda job, reports: None,
    waiting: Callable[[Job], None] = lambda job: None,
) -> dict[str, list[RankReport]]:
    """Run the jobs in sequence, in the given way; return reports by job name, one per rank.

    Args:
        done: called after each job.
        waiting: called many times a second until it is over.
    """
    if not hasattr(os, "fork"):
        raise LaunchError("the ranks are forked, which this system cannot do")
    with tempfile.TemporaryDirectory(prefix="dcp-backport-") as name:
        folder = Path(name)
        plan = folder / "plan.json"
        plan.write_text(
            json.dumps(
                {
                    "api": way.api,
                    "preload": list(preload),
                    "folder": name,
                    "grace": GRACE_SECONDS,
                    "jobs": [asdict(job) for job in jobs],
                }
            )
        )
        with open(folder / "server.log", "w") as log:
            server = subprocess.Popen(
                [sys.executable, "-c", BOOT, way.first, str(plan)],
                cwd=name,
                env=_environment(way, environment or {}),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            return _collect(server, way, jobs, folder, done, waiting)
        finally:
            _end(server)


def _environment(way: Way, extra: dict[str, str]) -> dict[str, str]:
    env = dict(os.environ)
    env["MALLOC_MMAP_THRESHOLD_"] = (
        "65536"  # a freed tensor goes back to the system, so that memory can be read
    )
    env["OMP_NUM_THREADS"] = env["OPENBLAS_NUM_THREADS"] = env["MKL_NUM_THREADS"] = "1"
    if "GLOO_SOCKET_IFNAME" not in env and os.path.exists("/sys/class/net/lo"):
        env["GLOO_SOCKET_IFNAME"] = "lo"  # all ranks are here; the host's name may not resolve
    if way.switch is not None:
        env[SWITCH] = way.switch
    paths = [os.path.abspath(p) for p in env.get("PYTHONPATH", "").split(os.pathsep) if p]
    root = str(Path(__file__).resolve().parents[2])
    # Unneeded once installed; site-packages on PYTHONPATH would hide parts of the standard library.
    installed = {os.path.realpath(sysconfig.get_path(kind)) for kind in ("purelib", "platlib")}
    if root not in paths and root not in installed:
        paths.insert(0, root)
    if paths:
        env["PYTHONPATH"] = os.pathsep.join(paths)
    env.update(extra)
    return env


def _collect(
    server: subprocess.Popen[bytes],
    way: Way,
    jobs: Sequence[Job],
    folder: Path,
    done: Callable[[Job, list[RankReport]], None],
    waiting: Callable[[Job], None],
) -> dict[str, list[RankReport]]:
    reports: dict[str, list[RankReport]] = {}
    limit = IMPORT_SECONDS
    for number, job in enumerate(jobs):
        endings = folder / f"{number}.done.json"
        deadline = time.monotonic() + limit + job.seconds + GRACE_SECONDS
        while not endings.exists():
            if server.poll() is not None and not endings.exists():
                raise LaunchError(_server_error(way, f"ended with code {server.returncode}", folder))
            if time.monotonic() > deadline:
                raise LaunchError(_server_error(way, "did not answer in time", folder))
            waiting(job)
            time.sleep(0.05)
        limit = 0.0
        reports[job.name] = [
            _report(job, rank, ending, folder / f"{number}.{rank}")
            for rank, ending in enumerate(json.loads(endings.read_text()))
        ]
        done(job, reports[job.name])
    return reports


def _report(job: Job, rank: int, ending: str, stem: Path) -> RankReport:
    try:
        content = json.loads(stem.with_name(stem.name + ".json").read_text())
    except (OSError, ValueError):
        content = {}
    try:
        output = stem.with_name(stem.name + ".log").read_text(errors="replace")[-TAIL:]
    except OSError:
        output = ""
    return RankReport(
        job=job.name,
        rank=rank,
        ending=ending,
        result=content.get("result", {}),
        evidence=content.get("evidence", {}),
        error=content.get("error", ""),
        output=output,
    )


def _server_error(way: Way, what: str, folder: Path) -> str:
    log = (folder / "server.log").read_text(errors="replace")[-TAIL:]
    return f"the process that starts the {way.name} ranks {what}:\n{log}"


def _end(server: subprocess.Popen[bytes]) -> None:
    """End the server's process group, ranks included."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.wait(timeout=5)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()
