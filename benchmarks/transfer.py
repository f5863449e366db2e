#!/usr/bin/env python3
"""Time and memory of the state-dict calls: stock torch 2.6, the backport on it, and torch's own fix.

    python3 benchmarks/transfer.py                  the selection that the targets and the curves need
    python3 benchmarks/transfer.py --quick          every case and way once, tiny: does it work at all?
    python3 benchmarks/transfer.py --alternatives   loaders of other projects, one model load beside the other
    python3 benchmarks/transfer.py --cases load save --models moe --worlds 2 4

Interleaves the ways on one machine: one measurement of each in turn, every one in fresh processes.
Standard library only; the environments are those of tools/lanes.py. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import json
import os
import platform
import select
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import transfer_report
from transfer_cases import (
    ALTERNATIVES,
    ALTERNATIVES_SELECTION,
    CASES,
    DEFAULT_WAYS,
    EACH_MODELS,
    MODELS,
    QUICK,
    QUICK_WAYS,
    SELECTION,
    WAYS,
    Combination,
    Way,
    unit_bytes,
)

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
SERVER = (
    "import importlib, sys; importlib.import_module(sys.argv[1]); import transfer_ranks; "
    "transfer_ranks.listen()"
)
IMPORT_SECONDS = 300.0  # torch without byte code on a slow disk
GRACE_SECONDS = 5.0  # how long ranks may go on once one of them is dead
SLOW_SECONDS = 10.0  # a call that takes longer is repeated
SLOW_REPEATS = 3  # only so often
TAIL = 2000  # characters of output that an error keeps


def main() -> int:
    options = parser().parse_args()
    chosen = combinations(options)
    out = Path(options.out or default_folder(options))
    results = Results(out / "results.json", options)
    with tempfile.TemporaryDirectory(prefix="dcp-backport-benchmark-") as folder:
        servers = [Server(WAYS[name], Path(folder), options.staging) for name in options.ways]
        try:
            for number, combination in enumerate(chosen, 1):
                head = f"[{number}/{len(chosen)}] {combination}"
                if results.has(combination):
                    print(f"{head}: already there", flush=True)
                    continue
                print(head, flush=True)
                results.add(combination, compare(servers, combination, options.repeats, options.seconds))
        finally:
            for server in servers:
                server.close()
    return publish(out)


def default_folder(options: argparse.Namespace) -> Path:
    if options.quick:
        return ROOT / "build/benchmark-quick"
    return HERE / "results" / "alternatives" if options.alternatives else HERE / "results"


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--cases", nargs="+", choices=CASES, help="with --models or --worlds: all")
    made.add_argument("--models", nargs="+", choices=MODELS, help="with --cases or --worlds: dense")
    made.add_argument("--worlds", nargs="+", type=int, metavar="N", help="ranks; with the others: 4")
    made.add_argument(
        "--ways",
        nargs="+",
        choices=WAYS,
        help=f"{' '.join(DEFAULT_WAYS)}; --quick and --alternatives: others",
    )
    made.add_argument("--repeats", type=int, help="5; --quick: 1")
    made.add_argument("--staging", type=float, default=16, metavar="MIB", help="the backport's budget (16)")
    made.add_argument("--seconds", type=float, default=180, help="hard limit of one measurement (180)")
    made.add_argument(
        "--out", metavar="FOLDER", help="benchmarks/results, or alternatives in it; --quick: build/..."
    )
    made.add_argument("--quick", action="store_true", help="a smoke test")
    made.add_argument("--alternatives", action="store_true", help="the other projects' ways and their cases")
    made.add_argument("--resume", action="store_true", help="keep what the folder has, measure what it lacks")
    return made


def combinations(options: argparse.Namespace) -> Sequence[Combination]:
    """What to measure; fills in the options that hang on --quick and --alternatives."""
    ways = ALTERNATIVES if options.alternatives else QUICK_WAYS if options.quick else DEFAULT_WAYS
    options.ways = options.ways or ways
    options.repeats = options.repeats or (1 if options.quick else 5)
    if not (options.cases or options.models or options.worlds):
        return QUICK if options.quick else ALTERNATIVES_SELECTION if options.alternatives else SELECTION
    product = itertools.product(options.cases or CASES, options.models or ["dense"], options.worlds or [4])
    chosen = []
    for combination in itertools.starmap(Combination, product):
        if combination.case == "load-each" and combination.model not in EACH_MODELS:
            print(f"left out: {combination} (load-each is only for {', '.join(EACH_MODELS)})")
        else:
            chosen.append(combination)
    if not chosen:
        raise SystemExit("nothing to measure")
    return chosen


def compare(
    servers: Sequence[Server], combination: Combination, repeats: int, seconds: float
) -> dict[str, list[dict[str, Any]]]:
    """The measurements of each way, taken in turn; what fails is not tried again."""
    found: dict[str, list[dict[str, Any]]] = {server.way.name: [] for server in servers}
    for _ in range(repeats):
        for server in servers:
            mine = found[server.way.name]
            if mine and (mine[-1]["error"] or (len(mine) >= SLOW_REPEATS and _slowest(mine) > SLOW_SECONDS)):
                continue
            mine.append(server.measure(combination, seconds))
            said = mine[-1]["error"].splitlines()[:1] or [f"{_slowest(mine[-1:]):.3f} s"]
            print(f"    {server.way.name:15s} {said[0]}", flush=True)
    return found


def _slowest(measurements: Sequence[dict[str, Any]]) -> float:
    return max(float(rank["seconds"]) for measurement in measurements for rank in measurement["ranks"])


class Server:
    """The process of one way: imports once, forks the ranks of each measurement, and waits meanwhile."""

    def __init__(self, way: Way, folder: Path, staging: float) -> None:
        self.way = way
        self._python = lane_python(way.lane)
        self._folder = folder / way.name
        self._folder.mkdir()
        self._environment = environment(way, staging)
        self._process: subprocess.Popen[bytes] | None = None
        self._count = 0

    def measure(self, combination: Combination, seconds: float) -> dict[str, Any]:
        """{"error": text or "", "torch": version, "ranks": [one result each]}."""
        folder = self._folder / str(self._count)
        self._count += 1
        folder.mkdir()
        job = {
            "name": str(combination),
            "target": "transfer_ranks:measure",
            "world": combination.world,
            "arguments": {"case": combination.case, "model": combination.model},
            "backend": "gloo",
            "device": "cpu",
            "seconds": seconds,
        }
        plan = {
            "api": self.way.api,
            "preload": [],
            "folder": str(folder),
            "grace": GRACE_SECONDS,
            "jobs": [job],
        }
        (folder / "plan.json").write_text(json.dumps(plan))
        failed = self._serve(folder / "plan.json", seconds)
        if failed:
            return {"error": failed, "torch": "", "ranks": []}
        return self._collect(folder)

    def _serve(self, plan: Path, seconds: float) -> str:
        """Have the plan run; says what went wrong if the server itself failed, and ends it."""
        limit = seconds + 2 * GRACE_SECONDS
        if self._process is None:
            limit += IMPORT_SECONDS
            self._process = self._start()
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(f"{plan}\n".encode())
            process.stdin.flush()
            said = _read_until(process.stdout.fileno(), b"done\n", time.monotonic() + limit)
        except BrokenPipeError:
            said = "ended"
        if not said:
            return ""
        self.close()
        log = (self._folder / "server.log").read_text(errors="replace")[-TAIL:]
        return f"the process that starts the ranks {said}\n{log}"

    def _start(self) -> subprocess.Popen[bytes]:
        with open(self._folder / "server.log", "ab") as log:
            return subprocess.Popen(
                [self._python, "-c", SERVER, self.way.first],
                cwd=self._folder,
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )

    def _collect(self, folder: Path) -> dict[str, Any]:
        endings = json.loads((folder / "0.done.json").read_text())
        answers = [_json(folder / f"0.{rank}.json") for rank in range(len(endings))]
        evidence = answers[0].get("evidence", {})
        errors = [
            f"rank {rank} {ending}: {answer.get('error') or _tail(folder / f'0.{rank}.log')}"
            for rank, (ending, answer) in enumerate(zip(endings, answers))
            if ending != "finished"
        ]
        # The ranks that raised say more than those that waited for them.
        errors.sort(key=lambda text: "raised" not in text)
        if evidence and not _is_code_of(self.way, evidence["code"]):
            errors = [f"ran the code of {evidence['code']}: {evidence['outcome']}, {evidence['reason']}"]
        return {
            "error": "\n".join(errors),
            "torch": evidence.get("torch", ""),
            "ranks": [] if errors else [answer["result"] for answer in answers],
        }

    def close(self) -> None:
        """The server's whole process group, ranks included."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def _is_code_of(way: Way, ran: str) -> bool:
    if way.code.endswith(".py"):
        return any(owner.endswith(way.code) for owner in ran.split(" and "))
    return ran == way.code


def _read_until(handle: int, end: bytes, deadline: float) -> str:
    """Nothing once `end` was read; else why not."""
    data = b""
    while not data.endswith(end):
        if not select.select([handle], [], [], max(deadline - time.monotonic(), 0))[0]:
            return "did not answer in time"
        more = os.read(handle, 4096)
        if not more:
            return "ended"
        data += more
    return ""


def _json(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found


def _tail(path: Path) -> str:
    try:
        return path.read_text(errors="replace")[-TAIL:].strip()
    except OSError:
        return ""


def lane_python(lane: str) -> str:
    command = [sys.executable, str(ROOT / "tools/lanes.py"), "make", lane]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def environment(way: Way, staging: float) -> dict[str, str]:
    env = {name: text for name, text in os.environ.items() if not name.startswith("TORCH_DCP_BACKPORT")}
    env["MALLOC_MMAP_THRESHOLD_"] = "65536"  # a freed tensor goes back to the system: memory can be read
    env["OMP_NUM_THREADS"] = env["OPENBLAS_NUM_THREADS"] = env["MKL_NUM_THREADS"] = "1"
    if os.path.exists("/sys/class/net/lo"):
        env["GLOO_SOCKET_IFNAME"] = "lo"  # all ranks are here; the host's name may not resolve
    env["PYTHONPATH"] = os.pathsep.join((str(ROOT), str(HERE)))
    env["TORCH_DCP_BACKPORT_STAGING_MIB"] = f"{staging:g}"
    if way.switch is not None:
        env["TORCH_DCP_BACKPORT"] = way.switch
    return env


class Results:
    """results.json: rewritten after each combination, so that a long run can be made in pieces."""

    def __init__(self, path: Path, options: argparse.Namespace) -> None:
        self._path = path
        kept = _json(path) if options.resume else {}
        for name, wanted in (("staging_mib", options.staging), ("ways", list(options.ways))):
            if kept and kept[name] != wanted:
                raise SystemExit(f"{path} was measured with {name} {kept[name]}, not {wanted}: see --out")
        self._combinations: dict[str, dict[str, Any]] = kept.get("combinations", {})
        self._about = {
            "staging_mib": options.staging,
            "ways": list(options.ways),
            "machine": machine(),
            "runs": [*kept.get("runs", []), this_run(options)],
        }

    def has(self, combination: Combination) -> bool:
        return str(combination) in self._combinations

    def add(self, combination: Combination, found: dict[str, list[dict[str, Any]]]) -> None:
        self._combinations[str(combination)] = {
            **vars(combination),
            "unit": unit_bytes(CASES[combination.case], MODELS[combination.model]),
            "ways": found,
        }
        self._write()

    def _write(self) -> None:
        """A line for each combination."""
        lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(c)}" for key, c in self._combinations.items())
        about = json.dumps(self._about, indent=1)[:-2]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        part = self._path.with_name(self._path.name + ".part")
        part.write_text(f'{about},\n "combinations": {{\n{lines}\n}}}}\n')
        part.replace(self._path)


def machine() -> dict[str, Any]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**30, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def _cpu_name() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def this_run(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": shlex.join(["python3", *sys.argv]),
        "commit": commit(),
        "repeats": options.repeats,
        "load_average": os.getloadavg()[0],
    }


def commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=10"]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        return subprocess.run(
            command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ).stdout.strip()
    return ""


def publish(out: Path) -> int:
    """The tables, and the picture by the current lane's matplotlib."""
    if not transfer_report.write(out):
        print(f"{out}: results.json, results.md")
        return 0
    command = [lane_python("current"), str(HERE / "transfer_plot.py"), str(out)]
    code = subprocess.run(command, env={**os.environ, "TORCH_DCP_BACKPORT": "off"}).returncode
    print(f"{out}: results.json, results.md{', results.png' if code == 0 else '; no picture, see above'}")
    return code


if __name__ == "__main__":
    sys.exit(main())
