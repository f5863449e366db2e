#!/usr/bin/env python3
"""What a machine with one NVIDIA GPU can tell of this package, in one table and one JSON file.

    gpu.py [--only STEP,...] [--ranks 2,3] [--json gpu.json]
    gpu.py --old ...                          the shim on torch 2.4 to 2.6, by torch's own names

Uses the torch that is there. Several NCCL ranks on one GPU are not supported by NCCL: each says that it is
another host (NCCL_HOSTID), and they talk through sockets on lo. So these rows show right values, memory and
hangs, never the speed of a real machine. Every step runs in processes of its own, which are killed when its
time is over; a step that fails ends nothing but itself. With `--device cpu` the ranks' cases run over gloo.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Optional

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ROOT / "tools"
MIB = 2**20
STEPS = ("env", "copies", "cpu", "shipped", "self", "nccl", "fault")
#: Only if named: minutes.
MORE_STEPS = ("examples", "sanitizer")
TAIL = 16
NO_DEVICE = "no CUDA device"
#: Ranks as they start: the import of torch, and the context on the GPU.
START_SECONDS = 60.0
CASE_SECONDS = 40.0
GRACE_SECONDS = 4.0
EXAMPLE_SECONDS = 90.0

#: (name, who, size): who is "ours" or "stock".
Case = tuple[str, str, str]
COMPARED = ("load", "load-meta", "load-cuda", "load-plain", "load-offload", "get-first", "get-all")
OPTIMIZER = ("optim-load", "optim-get")
OURS = ("reshard", "errors", "dist-checkpoint", "manager")
#: Of the rooms, in tools/gpu_rooms.py; `hf-files` and those of the engine need transformers, adapters peft.
ROOMS = (
    "background",
    "handler",
    "nearby",
    "hf-files",
    "engine",
    "engine-packed",
    "engine-flex",
    "engine-ulysses",
    "engine-lora",
)
#: Of the shim on torch 2.4 to 2.6 (--old), in tools/gpu_shim.py: calls that stock torch gets as well,
SHIM_COMPARED = ("load-every", "load-every-meta", "shards", "optim-offload")
#: calls that stock torch does not get: of some it fails, for others its ranks wait for each other,
SHIM_ALONE = (
    "both",
    "both-flat",
    "files",
    "train",
    "train-product",
    "train-offload",
    "hsdp",
    "fsdp1",
    "async-save",
)
#: loads for which the GPU has no room on stock torch,
SHORT = ("short-load", "short-meta", "short-optim")
#: and both codes in turn, in one process group.
BESIDE = (
    "beside-load",
    "beside-meta",
    "beside-get-first",
    "beside-get-all",
    "beside-optim-load",
    "beside-optim-get",
)
OLD_STEPS = ("env", "nccl", "fault", "shipped", "stock")
OLD_NEEDS = "--old needs torch 2.4 to 2.6 with CUDA, one NVIDIA GPU, wrapt and packaging"
OUT_OF_MEMORY = re.compile(r"out of memory|can't allocate memory")
#: What NCCL makes of messages: in one batch on both ranks, and in two batches on one of them.
PROBES = ("messages", "messages-unlike")


@dataclass
class Row:
    """A row of the table."""

    step: str
    what: str
    seconds: Optional[float]
    #: None: nothing that could fail.
    ok: Optional[bool]
    result: str
    #: Bytes of the GPU outside torch's allocators, at the end, and what the case added.
    outside: Optional[int] = None
    added: Optional[int] = None
    details: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        seconds = "" if self.seconds is None else f"{self.seconds:.2f}"
        memory = "" if self.outside is None else f"{self.outside / MIB:.0f}"
        added = "" if self.added is None else f"{self.added / MIB:+.0f}"
        state = {True: "ok", False: "FAILED", None: "-"}[self.ok]
        numbers = f"{seconds:>7s} {state:6s} {memory:>7s} {added:>6s}"
        return f"{self.step:16s} {self.what:38s} {numbers}  {self.result}".rstrip()


HEAD = (
    f"{'step':16s} {'what':38s} {'seconds':>7s} {'':6s} {'outside':>7s} {'added':>6s}  result (memory in MiB)"
)


class Run:
    """The rows so far, and the time that is left."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args = args
        self.folder = folder
        self.rows: list[Row] = []
        self.start = time.monotonic()
        print(HEAD, flush=True)

    @property
    def left(self) -> float:
        return self.args.seconds - (time.monotonic() - self.start)

    @property
    def steps(self) -> Sequence[str]:
        only: Optional[list[str]] = self.args.only
        return (OLD_STEPS if self.args.old else STEPS) if only is None else only

    @property
    def ours(self) -> str:
        """Who is compared with stock torch."""
        return "shim" if self.args.old else "ours"

    def add(self, row: Row, log: str = "") -> None:
        """Print the row, with the end of the log if it failed, and write the file anew."""
        self.rows.append(row)
        print(row, flush=True)
        if row.ok is False and log:
            row.details["log"] = log[-20_000:]
            for line in log.splitlines()[-TAIL:]:
                print(f"    | {line[:300]}")
            sys.stdout.flush()
        content = {
            "seconds": time.monotonic() - self.start,
            "unsupported": "NCCL does not support several ranks on one GPU",
            "rows": [asdict(row) for row in self.rows],
        }
        self.args.json.write_text(json.dumps(content, indent=1))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    listed = {"type": lambda text: text.split(",")}
    parser.add_argument("--old", action="store_true", help="the shim, on torch 2.4 to 2.6")
    parser.add_argument(
        "--only",
        **listed,
        help=f"of {','.join((*STEPS, *MORE_STEPS))}; of --old {','.join(OLD_STEPS)}; nccl-2 is one part",
    )
    parser.add_argument("--ranks", **listed, help="numbers of NCCL ranks: 2,3; with --old 2,3,4")
    parser.add_argument("--cases", **listed, help="only these cases of the ranks")
    parser.add_argument("--json", type=Path, help="gpu.json, with --old gpu-old.json")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--mib", type=int, default=256, help="of the large model")
    parser.add_argument(
        "--seconds", type=float, help="570, with --old 360; what has not begun by then is not run"
    )
    args = parser.parse_args()
    # An end from outside must not leave ranks on the GPU: `finally` ends them.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    args.ranks = args.ranks or (["2", "3", "4"] if args.old else ["2", "3"])
    args.json = args.json or Path("gpu-old.json" if args.old else "gpu.json")
    args.seconds = args.seconds or (360.0 if args.old else 570.0)
    if args.old:
        lacking = lacking_for_old(args.device)
        if lacking:
            print(f"{OLD_NEEDS}; here {lacking}")
            return 2
    elif args.device == "cuda" and not has_cuda():
        print(NO_DEVICE)
        return 2
    with tempfile.TemporaryDirectory(prefix="gpu-") as folder:
        run = Run(args, Path(folder))
        steps(run)
    failed = [row for row in run.rows if row.ok is False]
    spent = time.monotonic() - run.start
    print(f"{len(run.rows)} rows, {len(failed)} failed, {spent:.0f} s; {args.json}")
    return 1 if failed else 0


def has_cuda() -> bool:
    code = "import torch, sys; sys.exit(not torch.cuda.is_available())"
    asked = subprocess.run([sys.executable, "-c", code], env=environment(), stderr=subprocess.DEVNULL)
    return asked.returncode == 0


def lacking_for_old(device: str) -> str:
    """Return what --old needs and this Python has not."""
    code = (
        "import torch, wrapt, packaging.version as v; cuda = torch.cuda.is_available();"
        "print(v.Version(torch.__version__).release[:2] in ((2, 4), (2, 5), (2, 6)), cuda, torch.__version__)"
    )
    # Without the package: its import would look at torch, too.
    asked = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True)
    if asked.returncode:
        return (asked.stderr.strip().splitlines() or [ended(asked.returncode)])[-1]
    is_old, has_gpu, version = asked.stdout.split()
    if is_old != "True":
        return f"is torch {version}"
    return f"torch {version} sees no GPU" if device == "cuda" and has_gpu != "True" else ""


def wanted(run: Run, *names: str) -> bool:
    return any(name in run.steps for name in names)


def steps(run: Run) -> None:
    for name, step in chosen_steps(run):
        start = time.monotonic()
        try:
            step()
        except Exception as error:
            text = f"this program failed: {type(error).__name__}: {error}"
            run.add(Row(name, "", time.monotonic() - start, False, text), traceback.format_exc())


def chosen_steps(run: Run) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield the steps that are wanted, the shorter ones first."""
    on_gpu = run.args.device == "cuda"
    if on_gpu and wanted(run, "env"):
        yield "env", lambda: alone(run, "env", 60.0)
    if run.args.old:
        yield from old_steps(run)
        return
    if on_gpu and wanted(run, "copies"):
        yield "copies", lambda: alone(run, "copies", 90.0)
    if wanted(run, "cpu"):
        yield "cpu", lambda: alone(run, "cpu", 60.0)
    if on_gpu and wanted(run, "shipped"):
        yield "shipped", lambda: shipped(run)
    if on_gpu and wanted(run, "self"):
        yield "self", lambda: alone(run, "self", 60.0, unsupported_nccl(0))
    worlds = [int(world) for world in run.args.ranks if wanted(run, "nccl", f"nccl-{world}")]
    for world in worlds[:1]:
        yield f"nccl-{world}", functools.partial(run_ranks, run, world)
    if wanted(run, "fault"):
        yield "fault", lambda: fault(run, "source")
        yield "fault", lambda: fault(run, "absent")
    for world in worlds[1:]:
        yield f"nccl-{world}", functools.partial(run_ranks, run, world)
    if run.args.only and "examples" in run.args.only:
        yield "examples", lambda: examples(run)
    if on_gpu and run.args.only and "sanitizer" in run.args.only:
        yield "sanitizer", lambda: sanitizer(run)


def old_steps(run: Run) -> Iterator[tuple[str, Callable[[], None]]]:
    for world in (int(world) for world in run.args.ranks if wanted(run, "nccl", f"nccl-{world}")):
        yield f"nccl-{world}", functools.partial(run_ranks, run, world)
    if wanted(run, "fault"):
        yield "fault", lambda: fault(run, "source")
    if run.args.device == "cuda" and wanted(run, "shipped"):
        yield "shipped", lambda: shipped(run)
    if wanted(run, "stock"):
        yield "stock", lambda: stock_calls(run).run_all(run)


def sanitizer(run: Run) -> None:
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        run.add(Row("sanitizer", "", None, False, "no compute-sanitizer on PATH"))
        return
    checked = (tool, "--tool", "memcheck", "--error-exitcode", "9")
    alone(run, "self", 300.0, unsupported_nccl(0), checked)


def run_ranks(run: Run, world: int) -> None:
    for step in (old_rank_steps if run.args.old else rank_steps)(run, world):
        step.run_all(run)


# --- processes ---


def environment(**more: str) -> dict[str, str]:
    paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    fixed = {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    return {**os.environ, **fixed, **more}


def unsupported_nccl(rank: int) -> dict[str, str]:
    """What makes NCCL take a rank on a GPU that another rank has, too."""
    return {
        "NCCL_HOSTID": f"host{rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_NET": "Socket",
        "NCCL_IB_DISABLE": "1",
        "NCCL_MNNVL_ENABLE": "0",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_DEBUG": "WARN",
    }


def kill(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def ended(code: Optional[int]) -> str:
    if code is None:
        return "still running"
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def finished(
    run: Run, step: str, command: Sequence[str], seconds: float, *environments: dict[str, str]
) -> tuple[str, str]:
    """Run a command in each environment, at the same time; return the outputs and what went wrong."""
    limit = min(seconds, run.left)
    if limit < 5:
        return "", "not run: no time left"
    paths = [run.folder / f"{step}-{number}.log" for number in range(len(environments))]
    processes = []
    try:
        for path, env in zip(paths, environments):
            with open(path, "wb") as log:
                processes.append(
                    subprocess.Popen(
                        command,
                        cwd=ROOT,
                        env=env,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        problem = problem_of(processes, limit)
    finally:
        for process in processes:
            kill(process)
    return "".join(path.read_text(errors="replace") for path in paths), problem


def problem_of(processes: Sequence[subprocess.Popen[bytes]], limit: float) -> str:
    """Wait for processes; once one has failed, for the others' own errors, but not long."""
    began = time.monotonic()
    until = began + limit
    while time.monotonic() < until:
        codes = [process.poll() for process in processes]
        if None not in codes:
            break
        if any(codes):
            until = min(until, time.monotonic() + GRACE_SECONDS)
        time.sleep(0.02)
    codes = [process.poll() for process in processes]
    if any(codes):
        return ", ".join(sorted({ended(code) for code in codes if code}))
    return f"killed after {time.monotonic() - began:.0f} s" if None in codes else ""


def alone(
    run: Run, name: str, seconds: float, more: Optional[dict[str, str]] = None, before: Sequence[str] = ()
) -> None:
    """A step that takes one process: its rows, and one more if it ended badly."""
    step = "sanitizer" if before else name
    start = time.monotonic()
    command = [*before, sys.executable, str(TOOLS / "gpu_alone.py"), name]
    output, problem = finished(run, step, command, seconds, environment(**(more or {})))
    for line in output.splitlines():
        if line.startswith("ROW "):
            found = json.loads(line[4:])
            known = {key: found.pop(key, None) for key in ("seconds", "outside", "added")}
            run.add(Row(step, found["what"], known.pop("seconds"), found["ok"], found["result"], **known))
    spent = time.monotonic() - start
    run.add(Row(step, "all of it", spent, not problem, problem), output)


def shipped(run: Run) -> None:
    """The package's own GPU tests: 4 ranks share the GPU over gloo."""
    start = time.monotonic()
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command = [*pytest, "--pyargs", "torch_dcp_backport.regression", "-m", "gpu"]
    # The way that is not this run's, on an old torch, takes as long again.
    command += ["-k", "patched or stock" if run.args.old else "direct"]
    output, problem = finished(run, "shipped", command, 150.0, environment())
    counts = {
        word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|errors?)\b", output)
    }
    text = ", ".join(f"{number} {word}" for word, number in counts.items()) or "no summary"
    # Of stock torch some say that there is nothing to see.
    ok = not problem and bool(counts.get("passed")) and (run.args.old or not counts.get("skipped"))
    run.add(
        Row("shipped", "4 ranks over gloo", time.monotonic() - start, ok, f"{text}; {problem}".rstrip("; ")),
        output,
    )


def examples(run: Run) -> None:
    """The programs of examples/ as their first lines say, all ranks on one GPU; the tour, as it is."""
    for path in sorted((ROOT / "examples").glob("*.py")):
        start = time.monotonic()
        (command,) = re.findall(r"^    ((?:torchrun|python) .*)$", path.read_text(), re.MULTILINE)
        words = command.split()
        world = int(words[words.index("--nproc-per-node") + 1]) if words[0] == "torchrun" else 0
        arguments = words[words.index(f"examples/{path.name}") + 1 :]
        port = free_port()
        ranks = [environment(**rank_of(run, rank, world, port)) for rank in range(max(1, world))]
        output, problem = finished(
            run, f"examples-{path.stem}", [sys.executable, str(path), *arguments], EXAMPLE_SECONDS, *ranks
        )
        what = f"{path.name}, {world or 'its own'} ranks"
        run.add(Row("examples", what, time.monotonic() - start, not problem, problem), output)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def rank_of(run: Run, rank: int, world: int, port: int) -> dict[str, str]:
    """What torchrun says to a rank, but all have the first GPU; nothing to a program without a world."""
    on_gpu = run.args.device == "cuda"
    if not world:
        return {} if on_gpu else {"CUDA_VISIBLE_DEVICES": ""}
    return {
        "RANK": str(rank),
        "LOCAL_RANK": "0" if on_gpu else str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        **(unsupported_nccl(rank) if on_gpu else {"CUDA_VISIBLE_DEVICES": ""}),
    }


# --- ranks ---


@dataclass
class Ranks:
    """Rank processes that run cases in turn, each in a process group of its own.

    A case that fails ends its ranks; new ones go on with the next case.
    """

    name: str
    world: int
    backend: str
    cases: Sequence[Case]
    timeout: float = 60.0
    case_seconds: float = CASE_SECONDS
    set_device: bool = True
    #: Seconds for which a rank stays after its last case, so that only others' own timeouts end them.
    linger: float = 0.0
    starts: int = 0

    def run_all(self, run: Run) -> None:
        first = 0
        while first < len(self.cases):
            if run.left < 15:
                for case in self.cases[first:]:
                    ok = None if case[1] == "stock" else False
                    run.add(Row(self.name, spell(case), None, ok, "not run: no time left"))
                return
            first = self.run_from(run, first)

    @contextlib.contextmanager
    def started(self, run: Run, first: int) -> Iterator[tuple[Path, list[subprocess.Popen[bytes]]]]:
        self.starts += 1
        folder = run.folder / f"{self.name}-{self.backend.replace(':', '-')}-{self.starts}"
        folder.mkdir()
        plan = {
            "folder": str(folder),
            "world": self.world,
            "backend": self.backend,
            "device": run.args.device,
            "mib": run.args.mib,
            "cases": self.cases,
            "first": first,
            "timeout": self.timeout,
            "case_seconds": self.case_seconds,
            "set_device": self.set_device,
            "linger": self.linger,
            "fraction": 0.2,
            "threads": max(1, min(4, (os.cpu_count() or 1) // self.world)),
        }
        (folder / "plan.json").write_text(json.dumps(plan))
        processes = []
        try:
            for rank in range(self.world):
                # Stock torch stays stock on the releases that the package patches, but for --old.
                more = {"TORCH_DCP_BACKPORT": "auto" if run.args.old else "off"}
                if run.args.device == "cuda":
                    more.update(unsupported_nccl(rank))
                with open(folder / f"{rank}.log", "wb") as log:
                    processes.append(
                        subprocess.Popen(
                            [
                                sys.executable,
                                str(TOOLS / "gpu_ranks.py"),
                                str(folder / "plan.json"),
                                str(rank),
                            ],
                            cwd=ROOT,
                            env=environment(**more),
                            stdout=log,
                            stderr=subprocess.STDOUT,
                            start_new_session=True,
                        )
                    )
            yield folder, processes
        finally:
            for process in processes:
                kill(process)

    def run_from(self, run: Run, first: int) -> int:
        """Run cases until one fails or all are done; return the number of the next."""
        with self.started(run, first) as (folder, processes):
            for number in range(first, len(self.cases)):
                limit = self.case_seconds + (START_SECONDS if number == first else 0.0)
                problem = self.wait_for(folder, processes, number, min(limit, max(run.left, 1.0)))
                # The case is not to blame for what is over.
                problem = (
                    "not run: no time left" if problem.startswith("killed") and run.left <= 0 else problem
                )
                logs = self.logs(folder, number) if problem else ""
                run.add(self.row(number, events(folder, self.world, number), problem), logs)
                if problem:
                    return number + 1
        return len(self.cases)

    def wait_for(
        self, folder: Path, processes: Sequence[subprocess.Popen[bytes]], number: int, seconds: float
    ) -> str:
        """Wait for a case on all ranks; return what went wrong."""
        until, problem = time.monotonic() + seconds, ""
        while time.monotonic() < until:
            # Before the events: a rank may end right after it has written.
            codes = [process.poll() for process in processes]
            found = events(folder, self.world, number)
            if all(event is not None and event["event"] == "done" for event in found):
                return ""
            failed = {
                rank: e["error"] for rank, e in enumerate(found) if e is not None and e["event"] == "failed"
            }
            for rank, code in enumerate(codes):
                event = found[rank]
                if code is not None and (event is None or event["event"] == "start"):
                    failed[rank] = f"ended: {ended(code)}"
            if failed and not problem:
                until = min(until, time.monotonic() + GRACE_SECONDS)
            if failed:
                problem = "; ".join(f"rank {rank}: {said}" for rank, said in sorted(failed.items()))
                if len(failed) == self.world:
                    return problem
            time.sleep(0.02)
        return problem or f"killed after {seconds:.0f} s"

    def logs(self, folder: Path, number: int) -> str:
        """The end of each rank's output since the case began."""
        text = ""
        for rank in range(self.world):
            whole = (folder / f"{rank}.log").read_text(errors="replace")
            lines = whole.rpartition("\n--- ")[2].splitlines()
            text += "\n".join([f"rank {rank}:", *lines[-(TAIL // self.world - 1) :], ""])
        return text

    def row(self, number: int, found: Sequence[Optional[dict[str, Any]]], problem: str) -> Row:
        case = self.cases[number]
        done = [event for event in found if event is not None and event["event"] == "done"]
        # Stock torch is the comparison: it is not ours to mend.
        ok = None if problem and case[1] == "stock" else not problem
        if case[1] == "stock" and case[0] in SHORT:
            # That is what it is to show; that it fails otherwise, or not at all, says nothing of us.
            ok = True if OUT_OF_MEMORY.search(problem) else None
        row = Row(
            self.name,
            spell(case),
            None,
            ok,
            " ".join(problem.split())[:300],
            details={"ranks": found, "backend": self.backend},
        )
        if not done:
            return row
        row.seconds = max((event["seconds"] for event in done if "seconds" in event), default=None)
        row.outside = max((event["outside"] for event in done if "outside" in event), default=None)
        row.added = max((event["added"] for event in done if "added" in event), default=None)
        if problem:
            return row
        parts = ["it had room enough"] if ok is None else []
        parts += [done[0]["note"]] if done[0].get("note") else []
        if "peak" in done[0]:
            parts.append("torch's peak " + "/".join(f"{event['peak'] / MIB:.1f}" for event in done))
        reports = [event["report"] for event in done if "report" in event]
        if reports:
            sent, received = (
                sum(report[key] for report in reports) for key in ("bytes_sent", "bytes_received")
            )
            chunks, rounds = (max(report[key] for report in reports) for key in ("chunks", "rounds"))
            parts.append(
                f"sent {sent / MIB:.2f}, received {received / MIB:.2f}, chunks {chunks}, rounds {rounds}"
            )
        row.result = "; ".join(parts)
        return row


def spell(case: Case) -> str:
    return " ".join(case)


def events(folder: Path, world: int, number: int) -> list[Optional[dict[str, Any]]]:
    """What each rank last said of a case."""
    found: list[Optional[dict[str, Any]]] = []
    for rank in range(world):
        last = None
        with contextlib.suppress(OSError):
            for line in (folder / f"{rank}.jsonl").read_text().splitlines():
                with contextlib.suppress(ValueError):  # half a line
                    event = json.loads(line)
                    last = event if event["case"] == number else last
        found.append(last)
    return found


def rank_steps(run: Run, world: int) -> list[Ranks]:
    """The cases for a number of ranks: most for two, on both kinds of groups."""
    on_gpu = run.args.device == "cuda"
    name = f"{'nccl' if on_gpu else 'gloo'}-{world}"
    first, both = ("nccl", "cpu:gloo,cuda:nccl") if on_gpu else ("gloo", "cpu:gloo,cuda:gloo")
    small = [*pairs((*COMPARED, *OPTIMIZER), "small"), *((case, "ours", "small") for case in OURS)]
    large = [*pairs(("load", "load-plain", "get-first", *OPTIMIZER), "large")]
    if world > 2:
        less = pairs(("load-meta", "get-first", "optim-load"), "large")
        only_ours = [case for case in small if case[1] == "ours"]
        return [Ranks(name, world, first, chosen(run, [*only_ours, *less]))]
    mixed = [case for case in small if case[1] == "ours"] + pairs(("load", "get-first"), "large")
    rooms = [(case, "ours", "small") for case in ROOMS]
    steps = [
        Ranks(name, world, first, chosen(run, [*small, *large, ("reshard", "ours", "large")])),
        Ranks(f"{name} rooms", world, first, chosen(run, rooms), case_seconds=90.0),
        Ranks(f"{name} {'mixed' if on_gpu else 'both'}", world, both, chosen(run, mixed)),
    ]
    if on_gpu:
        bare = [("load", "ours", "small"), ("load-plain", "ours", "small"), ("optim-load", "ours", "small")]
        steps.append(Ranks(f"{name} no device", world, first, chosen(run, bare), set_device=False))
        probes = [(case, "stock", size) for size in ("small", "large") for case in PROBES]
        steps.append(Ranks(f"{name} messages", world, first, chosen(run, probes)))
    return steps


def old_rank_steps(run: Run, world: int) -> list[Ranks]:
    """The cases of the shim, those first that say most; they share processes, for a start takes seconds."""
    on_gpu = run.args.device == "cuda"
    name = f"{'nccl' if on_gpu else 'gloo'}-{world}"
    first, both = ("nccl", "cpu:gloo,cuda:nccl") if on_gpu else ("gloo", "cpu:gloo,cuda:gloo")
    calls = (*COMPARED, *OPTIMIZER, *SHIM_COMPARED)

    def of_shim(names: Sequence[str], size: str) -> list[Case]:
        return chosen(run, [(case, "shim", size) for case in names])

    # An asynchronous save needs a group for tensors on the host.
    alone = [case for case in SHIM_ALONE if case != "async-save"]
    if world > 3:
        return [Ranks(name, world, first, of_shim(("load", "get-first", "hsdp"), "small"))]
    if world > 2:
        small = of_shim(("load-meta", "get-all", "errors", *alone), "small")
        large = of_shim(("short-load", "beside-meta", "beside-get-first", "beside-optim-load"), "large")
        return [Ranks(name, world, first, [*small, *large])]
    mixed = ("load", "get-first", *OPTIMIZER, "both", "files", "async-save")
    large = of_shim((*SHORT, *BESIDE), "large")
    steps = [
        Ranks(name, world, first, [*of_shim((*calls, "errors", *alone), "small"), *large], case_seconds=60.0),
        # Each ends its ranks.
        Ranks(f"{name} stock", world, first, chosen(run, [(case, "stock", "large") for case in SHORT])),
        Ranks(f"{name} {'mixed' if on_gpu else 'both'}", world, both, of_shim(mixed, "small")),
    ]
    if on_gpu:
        bare = of_shim(("load", "load-plain", "optim-load"), "small")
        steps.append(Ranks(f"{name} no device", world, first, bare, set_device=False))
    return steps


def stock_calls(run: Run) -> Ranks:
    """What stock torch makes of the same calls. Some fail, and some wait for ever: so they come last."""
    backend = "nccl" if run.args.device == "cuda" else "gloo"
    cases = [(case, "stock", "small") for case in (*COMPARED, *OPTIMIZER, *SHIM_COMPARED)]
    return Ranks(f"{backend}-2 calls", 2, backend, chosen(run, cases), case_seconds=20.0)


def pairs(names: Sequence[str], size: str) -> list[Case]:
    return [(name, who, size) for name in names for who in ("ours", "stock")]


def chosen(run: Run, cases: Sequence[Case]) -> list[Case]:
    only = run.args.cases
    return [case for case in cases if only is None or case[0] in only]


def fault(run: Run, name: str) -> None:
    """Two ranks, a group timeout of 10 s: what each rank sees, and when."""
    backend = "nccl" if run.args.device == "cuda" else "gloo"
    case = (f"fault-{name}", run.ours, "large")
    ranks = Ranks(f"fault-{name}", 2, backend, [case], timeout=10.0, case_seconds=60.0, linger=25.0)
    if run.left < 30:
        run.add(Row("fault", name, None, False, "not run: no time left"))
        return
    # The rank that never calls has nothing to tell.
    watched = (0,) if name == "absent" else (0, 1)
    with ranks.started(run, 0) as (folder, processes):
        began: dict[int, float] = {}
        gone: dict[int, float] = {}
        until = time.monotonic() + min(START_SECONDS + 45, run.left)
        while time.monotonic() < until:
            codes, found = [process.poll() for process in processes], events(folder, 2, 0)
            now = time.monotonic()
            for rank in watched:
                if found[rank] is not None:
                    began.setdefault(rank, now)
                if codes[rank] is not None:
                    gone.setdefault(rank, now)
            if all(rank in gone or is_over(found[rank]) for rank in watched):
                break
            time.sleep(0.05)
        for rank in watched:
            event, log = found[rank], (folder / f"{rank}.log").read_text(errors="replace")
            is_heard = is_over(event)
            if is_heard:
                assert event is not None
                text, seconds = (
                    str(event.get("note") or event.get("error")).replace("\n", " "),
                    event.get("seconds"),
                )
            elif codes[rank] is not None:
                said = re.search(r".*(Watchdog caught[^\n]{0,160}|terminate called[^\n]{0,160})", log)
                text = f"{ended(codes[rank])}; {said.group(1) if said else 'no word'}"
                seconds = gone[rank] - began.get(rank, gone[rank])
            else:
                text, seconds = "still waiting when the time was over: killed", None
            # An end is what is promised, of whichever kind.
            ok = (is_heard or codes[rank] is not None) and "no error" not in text
            run.add(Row("fault", f"{name}, rank {rank}", seconds, ok, text[:300]), log)


def is_over(event: Optional[dict[str, Any]]) -> bool:
    return event is not None and event["event"] != "start"


if __name__ == "__main__":
    sys.exit(main())
