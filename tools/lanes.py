#!/usr/bin/env python3
"""Make the test environments ("lanes", one per torch release) and run commands in them.

    python3 tools/lanes.py list
    python3 tools/lanes.py make LANE...
    python3 tools/lanes.py run LANE -- COMMAND ARG...
    python3 tools/lanes.py test LANE... [--jobs N] [-- PYTEST-ARG...]

Needs Python >= 3.9 with venv, nothing else. Environments live in the user's cache folder
under a key made from their requirements, so that every clone shares them; this checkout is put
on PYTHONPATH, never installed into them.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import fcntl
import hashlib
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import IO, Optional

ROOT = Path(__file__).resolve().parent.parent

# What the package itself needs besides torch, here as every current environment has it.
NEEDED = ("wrapt>=1.16", "packaging>=23")
TOOLS = ("pytest>=8.3,<9", "hypothesis>=6.100,<7", "pytest-timeout>=2.3,<3", *NEEDED)
VERIFY = ("transformers>=4.51,<4.58", "safetensors>=0.4.3,<1", "matplotlib>=3.8,<4")
OLD = ("numpy<2", "setuptools<80")
# Programs that call what is patched; verl's numpy < 2 wants the older readers of files. Python 3.10 to 3.12.
CLIENTS = (
    "lightning-fabric==2.5.5",
    "accelerate==1.10.1",
    "torchtune==0.6.1",
    "torchao==0.9.0",
    "verl==0.5.0",
    "transformers>=4.51,<4.58",
    "datasets>=3.6,<4",
    "pyarrow>=19,<22",
    "pandas>=2.2,<3",
)

#: What the lane `newest` was last good with; tools/newest.py raises it, or tries others by the variable.
NEWEST = "LANES_NEWEST"
NEWEST_PINS = Path(os.environ.get(NEWEST) or ROOT / "tools" / "newest.txt")

LANES: dict[str, tuple[str, ...]] = {
    "2.4.0": ("torch==2.4.0", *OLD, *TOOLS),
    "2.4": ("torch==2.4.1", *OLD, *TOOLS),
    "2.5.0": ("torch==2.5.0", *OLD, *TOOLS),
    "2.5": ("torch==2.5.1", *OLD, *TOOLS),
    "2.6": ("torch==2.6.0", *TOOLS, *VERIFY),
    "2.7": ("torch==2.7.1", *TOOLS, *VERIFY),
    # Between the releases that CI runs; only if it is named.
    "2.14": ("torch==2.14.1", *TOOLS, *VERIFY),
    # The last torch for Python 3.9 is 2.8.
    "current": (
        "torch==2.15.0; python_version >= '3.10'",
        "torch==2.8.0; python_version < '3.10'",
        *TOOLS,
        *VERIFY,
    ),
    # The oldest and the newest Python that torch 2.6 has wheels for; see PYTHONS.
    "2.6-py3.9": ("torch==2.6.0", "importlib-metadata", *TOOLS, *VERIFY),  # torch's own `run` needs it there
    "2.6-py3.13": ("torch==2.6.0", *TOOLS, *VERIFY),
    "clients": ("torch==2.6.0", *OLD, *TOOLS, *CLIENTS),
    "clients-2.5": ("torch==2.5.1", *OLD, *TOOLS, *CLIENTS),
    # A current verl's losses and worker, which our engine runs; on a torch whose gloo averages.
    "verl": (
        "torch==2.13.0",
        "numpy<2",
        *TOOLS,
        *VERIFY,
        "tensordict>=0.10,<=0.10.0",
        "ray==2.53.0",
        "accelerate==1.10.1",
        "peft>=0.17,<0.19",
        "datasets>=3.6,<4",
        "pyarrow>=19,<22",
        "pandas>=2.2,<3",
        "pydantic>=2,<3",
        "codetiming",
        "hydra-core",
        "torchdata",
    ),
    # The newest verl: its worker, losses and SFT program run our engine. Its programs cannot be imported
    # beside transformers 5.24 (it asks for less than 5.11); the torch is newer than the one that it names.
    "verl-0.9": (
        "torch==2.15.0",
        *TOOLS,
        "transformers==5.10.4",
        "safetensors==0.8.0",
        "peft==0.21.2",
        "accelerate==1.15.0",
        "tensordict==0.15.3",
        "ray==2.53.0",
        "datasets>=3.6,<5",
        "pillow>=11,<14",
        "orjson>=3.11,<4",
        "fastapi>=0.115,<1",
        "uvicorn>=0.30,<1",
        "cachetools>=5,<8",
        "codetiming",
        "hydra-core",
        "torchdata",
    ),
    # Files between releases of transformers: the newest here, others in folders beside it (BESIDE).
    "transformers": ("torch==2.13.0", *TOOLS, "transformers==5.24.0", "safetensors>=0.4.3,<1"),
    # The newest of everything that is not pinned, together.
    "newest": (*NEWEST_PINS.read_text().split(), *TOOLS),
    # An object store in a process of its own, and what reaches it.
    "s3": ("torch==2.13.0", *TOOLS, "numpy", "s3fs>=2025.3", "moto[server]>=5.1,<6"),
    "megatron": ("torch==2.6.0", *OLD, *TOOLS, *VERIFY, "einops>=0.8", "psutil"),
    "megatron-2.4": ("torch==2.4.1", *OLD, *TOOLS, *VERIFY, "einops>=0.8", "psutil"),
    # Later releases, for checkpoints between them and this package (test_megatron_formats.py), and the newest
    # of the registry for its models as well; it needs Python 3.12, and 0.16.1 is the last one that does not.
    "megatron-0.14": ("torch==2.6.0", *OLD, *TOOLS, *VERIFY, "einops>=0.8", "psutil"),
    "megatron-0.19": ("torch==2.7.1", *OLD, *TOOLS, *VERIFY, "einops>=0.8", "psutil"),
    "lint": ("ruff==0.14.5", "mypy==1.18.2", "packaging>=23", "build==1.3.0", "hatchling>=1.26", "twine>=6"),
    # The pages and the reference (tools/docs.py): it reads the sources, and imports neither them nor torch.
    "docs": ("mkdocs==1.6.1", "mkdocs-material==9.8.2", "mkdocstrings[python]>=0.30,<2", "ruff==0.14.5"),
    # Screenshots of the site, by a Chromium that the machine has (tools/shots.py).
    "shots": ("playwright==1.65.2",),
}
# Installed without what they depend on: megatron-core asks for wandb, zarr and more, and its models use none;
# verl asks for what its rollouts need.
BARE = {
    "verl": ("verl==0.7.1",),
    "verl-0.9": ("verl==0.9.1",),
    "megatron": ("megatron-core==0.12.3",),
    "megatron-2.4": ("megatron-core==0.12.3",),
    "megatron-0.14": ("megatron-core==0.14.0",),
    "megatron-0.19": ("megatron-core==0.19.2",),
}
# Other releases of a package, each with what it needs in a folder `beside/RELEASE` of the environment. A test
# puts it first on a process's path: so they share a torch.
BESIDE = {"transformers": {"4.51.3": ("transformers==4.51.3",), "4.57.6": ("transformers==4.57.6",)}}
# Lanes that are made with another Python than the one that runs this.
PYTHONS = {"2.6-py3.9": "3.9", "2.6-py3.13": "3.13", "megatron-0.19": "3.12"}
UV = "uv>=0.9,<1"
# What a lane leaves out unless all is asked for, files and single tests: what does not depend on torch's
# release; where there is nothing to patch, what patching could break; on the releases in between, what those
# on both sides run too (scenarios, the engine's long tests). Faults run where the engine could differ, on the
# oldest and the newest, and each of those that break a group on one of them (test_faults.py).
COMMANDS = ("cli", "run", "doctor", "rooms", "plugin")
STATE = ("import_threads", "late", "options", "process_state", "reload", "switch")
EFFECTS = ("async_save", "patched_methods", "rebound")
ENGINE = ("errors", "faults", "fuzz", "round_trip", "soak", "threads", "together", "transfer")


def _files(folder: str, names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"tests/{folder}/test_{name}.py" for name in names)


# Long, and of our own rooms: what ends a process, or waits for one that is gone.
KILLS = (
    *_files("checkpoint", ("kill", "random_kills", "train_resume")),
    *_files("dist_checkpointing", ("gone",)),
    # What is done offline, in one process, too.
    *_files("megatron", ("convert", "megatron_bad_input")),
)
# Files, plans and folders of checkpoints: nothing in them is torch's but the bytes of a tensor.
WRITTEN = (
    *_files("dist_checkpointing", ("counters", "disk", "plans", "sharing")),
    *_files("checkpoint", ("latest", "power_loss", "retention", "store", "uploads")),
)
STORED = (*WRITTEN, *_files("dist_checkpointing", ("background", "commit", "damage", "integrity")))
# Of the engine, beside a training that is that of one process.
KEPT = _files("engine", ("engine_bad_input", "engine_contexts", "engine_keeps"))
# What tests stand on.
POOL = _files("unit", ("pool",))
# By file: pytest does not ignore a folder that it is told to look into.
LOADS = ("model", "model-meta", "optimizer")
REGRESSION = tuple(f"torch_dcp_backport/regression/test_{name}.py" for name in ("out_of_memory", "storages"))


def _regression(way: str) -> tuple[str, ...]:
    """The tests of one way to ours: with the shim, or its functions by name."""
    limited, looked_at = "a_shard_and_a_margin_are_enough", "no_shard_keeps_the_full_tensor_alive"
    return (
        *(f"{REGRESSION[0]}::test_{limited}[{way}-{load}]" for load in LOADS),
        *(f"{REGRESSION[1]}::test_{looked_at}[{way}-{load}]" for load in (*LOADS, "optimizer-meta")),
    )


# Several calls at once, and there and back: of the code that every release shares.
TOGETHER = _files("ranks", ("round_trip", "together"))
SAME_EVERYWHERE = _files("imports", (*COMMANDS, *STATE))
BETWEEN = (
    "tests/conformance",
    "tests/unit",
    "tests/checkpoint",
    "tests/dist_checkpointing",
    "tests/hf",
    "tests/megatron",
    *KEPT,
    *_files("engine", ("batches", "engine_parts", "engine_transformers")),
    *SAME_EVERYWHERE,
    *_files("ranks", ENGINE),
)
LEAVES_OUT = {
    "2.4": (*SAME_EVERYWHERE, *TOGETHER, *KILLS, *STORED, *KEPT, *POOL, *_regression("direct")),
    "2.5": (*BETWEEN, *REGRESSION, *_files("engine", ("engine_trains",))),
    "2.7": (*BETWEEN, *REGRESSION, *_files("imports", (*EFFECTS, "dcp_orders"))),
    "2.6": _files("ranks", ("faults",)),
    "current": (
        *_files(
            "imports",
            (*COMMANDS, *EFFECTS, *(name for name in STATE if name not in ("options", "switch"))),
        ),
        *TOGETHER,
        *POOL,
        *WRITTEN,
        *(path for path in KILLS if "train_resume" not in path),
        # Stock torch and a patched one are the same code there, torch's own.
        f"{REGRESSION[0]}::test_stock_torch_dies_unless_it_has_the_fix",
        f"{REGRESSION[1]}::test_stock_shards_pin_more_than_themselves_unless_torch_has_the_fix",
        *_regression("patched"),
    ),
}
# Of what is left, the share of tests that a lane runs, by their names (tools/shares.py). 2.6 runs all but
# the engine's, whose FSDP2 trains as it is from torch 2.7 on, and a current torch all of the shim's. So,
# where no file is left out, a test of the shim runs on three releases, one of a room on two. What is
# patched in DCP, and what meshes say of their groups, is not the same on each, and faults that break a
# group have shares of their own (test_faults.py).
ROOMS = ("checkpoint", "dist_checkpointing", "hf", "megatron")
SHARES = {
    "2.4": (
        *(
            f"{path}=0/1"
            for path in _files("ranks", ("dcp", "dcp_plans", "faults", "fuzz", "soak", "stages"))
        ),
        "tests/ranks=0/2",
        "tests/engine=0/2",
        *(f"tests/{room}=0/2" for room in ROOMS),
    ),
    "2.5": (*(f"{path}=0/1" for path in _files("ranks", ("dcp", "dcp_plans", "stages"))), "tests/ranks=1/4"),
    "2.7": ("tests/ranks=3/4",),
    "2.6": ("tests/engine=1/2",),
    "current": tuple(f"tests/{room}=1/2" for room in ROOMS),
}
# Folders that `make newest` runs: left out with --beside-newest on a lane whose torch is the same.
LEFT_TO_NEWEST = ("tests/engine", "tests/hf")
# Folders with a run of their own beside other lanes: else the longest lane ends long after them.
APART = {"2.6": ("tests/imports", "tests/unit", "tests/conformance")}
# Says to the tests that nothing is left out.
WHOLE = "TESTS_WHOLE"
# Seconds that one run of pytest may take. At nine tenths of it pytest ends by itself and shows its results; a
# run that cannot do even that says where it hangs, and is killed with all that it started.
LIMIT = "LANES_LIMIT"
LIMIT_SECONDS = 4000.0
# Where pytest writes what it has passed (tools/ran.py), of which packages, and the folder for that.
RAN, PACKAGES = "LANES_RAN", "LANES_PACKAGES"
RAN_FOLDER = ROOT / "build" / "ran"
# Where pytest writes its counts (tools/progress.py), and how often they are shown, in seconds.
PROGRESS = "LANES_PROGRESS"
EVERY = 20.0
# Between the signal that asks for the stacks and the one that ends everything.
LAST_WORDS_SECONDS = 10.0


class NoPython(Exception):
    """This machine does not have the Python of a lane."""


def cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "torch-dcp-backport"


def python_of(lane: str) -> tuple[str, str]:
    """The Python that a lane is made with, and its version.

    Raises:
        NoPython: there is none here.
    """
    wanted = PYTHONS.get(lane)
    if wanted is None:
        return sys.executable, platform.python_version()
    variable = f"LANES_PYTHON_{wanted.replace('.', '_')}"
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    found = [os.environ.get(variable), shutil.which(f"python{wanted}")]
    found += map(str, sorted(pyenv.glob(f"versions/{wanted}.*/bin/python"), reverse=True))
    code = "import platform, venv; print(platform.python_version())"
    for path in filter(None, found):
        # pyenv leaves shims on PATH of versions that are not switched on; they are there, and do not run.
        with contextlib.suppress(OSError):
            done = subprocess.run(
                [path, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            if done.stdout.startswith(f"{wanted}."):
                return path, done.stdout.strip()
    raise NoPython(f"no Python {wanted} here: put python{wanted} on PATH, or its path into {variable}")


def key(name: str, requirements: tuple[str, ...], version: str) -> str:
    text = "\n".join((version, platform.machine(), sys.platform, *sorted(requirements)))
    return f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def bin_of(env: Path, name: str) -> Path:
    return env / "bin" / name


def announced(name: str) -> None:
    """Say beforehand that a lane has to be made, and what that takes."""
    if any(requirement.startswith("torch==") for requirement in LANES[name]):
        print(
            f"=== lane {name} is made, once: torch with its CUDA packages is about 3 GB to download, 5 GB on "
            "disk, and takes 1 to 10 minutes",
            file=sys.stderr,
            flush=True,
        )


def fresh(env: Path, create: list[str], install: list[list[str]]) -> None:
    """Make `env` unless its last step was reached before; a half-made one is thrown away."""
    with locked(env.with_name(env.name + ".lock")):
        done = env / ".complete"
        if done.exists():
            return
        shutil.rmtree(env, ignore_errors=True)
        for command in (create, *install):
            print("+", " ".join(command), file=sys.stderr, flush=True)
            subprocess.run(command, check=True, stdout=sys.stderr)
        done.touch()


def packages_of(name: str) -> list[str]:
    """The packages that make a lane what it is: not those that all lanes have."""
    common = {re.split(r"[^\w.-]", each)[0] for each in (*TOOLS, *OLD)}
    names = [re.split(r"[^\w.-]", each)[0] for each in (*LANES[name], *BARE.get(name, ()))]
    return [each for each in dict.fromkeys(names) if each not in common]


def requirements_of(name: str) -> tuple[str, ...]:
    """All that is installed for a lane, in the environment and beside it."""
    beside = [each for requirements in BESIDE.get(name, {}).values() for each in requirements]
    return (*LANES[name], *BARE.get(name, ()), *beside)


def uv_made() -> str:
    """The path of uv, in an environment of its own that is made first if it is not there yet."""
    tool = cache_dir() / key("uv", (UV,), platform.python_version())
    fresh(
        tool,
        [sys.executable, "-m", "venv", str(tool)],
        [[str(bin_of(tool, "pip")), "install", "--quiet", UV]],
    )
    return str(bin_of(tool, "uv"))


def make(name: str) -> Path:
    """The lane's Python, its environment made first if it is not there yet."""
    python, version = python_of(name)
    uv = uv_made()
    bare, beside = BARE.get(name, ()), BESIDE.get(name, {})
    env = cache_dir() / key(name, requirements_of(name), version)
    install = [uv, "pip", "install", "--python", str(bin_of(env, "python"))]
    # uv does not read pip's variable.
    for place in os.environ.get("PIP_FIND_LINKS", "").split():
        install += ["--find-links", place]
    # Byte code once, at install: without it every process compiles torch anew where
    # PYTHONDONTWRITEBYTECODE is set (20 s instead of 3 s).
    install += ["--compile-bytecode"]
    if not (env / ".complete").exists():
        announced(name)
    installs = [[*install, *LANES[name]]] + ([[*install, "--no-deps", *bare]] if bare else [])
    for release, requirements in beside.items():
        installs.append([*install, "--target", str(env / "beside" / release), *requirements])
    fresh(env, [uv, "venv", "--quiet", "--python", python, str(env)], installs)
    return bin_of(env, "python")


def stat_of(process: int) -> Optional[list[str]]:
    """The fields of a process's /proc/PID/stat from its state (the third) on; None where it has ended."""
    try:
        # Its name, the second field, may have blanks and brackets.
        return Path("/proc", str(process), "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def started_at(fields: list[str]) -> int:
    """When a process was started, in ticks since the machine's start; ids are given again."""
    return int(fields[22 - 3])


def descendants(process: int) -> dict[int, int]:
    """A process, all that it started and that these started, and live: id -> when it was started."""
    children: dict[int, list[int]] = {}
    starts: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        fields = stat_of(int(folder.name))
        if fields is not None:
            children.setdefault(int(fields[1]), []).append(int(folder.name))
            starts[int(folder.name)] = started_at(fields)
    all_of_them = [process]
    for parent in all_of_them:
        all_of_them += children.get(parent, [])
    return {one: starts[one] for one in all_of_them if one in starts}


def end_all(process: subprocess.Popen[bytes]) -> None:
    """Have a process say where it stands, and kill it with all that it started."""
    started = descendants(process.pid)
    process.send_signal(signal.SIGABRT)  # pytest's faulthandler writes the stacks of all threads
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(LAST_WORDS_SECONDS)
    # What was started meanwhile, too; a process whose parent has ended is on the first list alone.
    for other, start in {*started.items(), *descendants(process.pid).items()}:
        fields = stat_of(other)
        # Meanwhile an id may be that of a process that has nothing to do with this.
        if fields is not None and started_at(fields) == start:
            with contextlib.suppress(ProcessLookupError):
                os.kill(other, signal.SIGKILL)
    process.wait()


class Watch:
    """What the runs of the suite have done, on standard error: each failure, and counts now and then."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.began = time.monotonic()
        #: Label -> the file of its run, and the number of bytes of it that were read.
        self.read: dict[str, tuple[Path, int]] = {}
        self.counts: dict[str, str] = {}
        self.is_over = threading.Event()
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.lock = threading.Lock()

    def __enter__(self) -> Watch:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.is_over.set()
        self.thread.join()

    def add(self, label: str) -> Path:
        """Return the file that a run has to write its counts into."""
        with self.lock:
            path = self.folder / f"{len(self.read)}"
            self.read[label] = path, 0
        return path

    def watch(self) -> None:
        said = time.monotonic()
        while not self.is_over.wait(2.0):
            self.look()
            if time.monotonic() - said >= EVERY:
                said = time.monotonic()
                counts = "; ".join(f"{label}: {text}" for label, text in self.counts.items())
                print(f"=== {said - self.began:.0f} s: {counts or 'collecting'}", file=sys.stderr, flush=True)

    def look(self) -> None:
        with self.lock:
            known = dict(self.read)
        for label, (path, before) in known.items():
            with contextlib.suppress(OSError):
                data = path.read_bytes()[before:]
                lines = data[: data.rfind(b"\n") + 1]
                self.read[label] = path, before + len(lines)
                for line in lines.decode(errors="replace").splitlines():
                    if line.startswith("FAILED "):
                        print(f"=== lane {label}: {line}", file=sys.stderr, flush=True)
                    else:
                        done, total, failed = line.split()
                        self.counts[label] = f"{done} of {total} tests, {failed} failed"


def run(
    name: str,
    command: list[str],
    output: IO[bytes] | None = None,
    limit: Optional[float] = None,
    progress: Optional[Path] = None,
) -> int:
    """Run a command in a lane; its output goes to `output`, or to where ours goes.

    Args:
        name: The lane.
        command: The program and its arguments.
        output: A file for stdout and stderr.
        limit: Seconds after which it is killed, with all that it started.
        progress: The file that pytest writes its counts into.

    Returns:
        The exit code.
    """
    python = make(name)
    env = dict(os.environ)
    env["PATH"] = f"{python.parent}{os.pathsep}{env.get('PATH', '')}"
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), env.get("PYTHONPATH", ""))))
    env["VIRTUAL_ENV"] = str(python.parent.parent)
    if progress is not None:
        env[PROGRESS] = str(progress)
    env[RAN] = str(RAN_FOLDER / f"{name}@{hashlib.sha256(repr(command).encode()).hexdigest()[:12]}.json")
    env[PACKAGES] = " ".join(packages_of(name))
    # What mypy knows of torch takes a minute to find out, and is the same for every clone.
    env.setdefault("MYPY_CACHE_DIR", str(python.parent.parent / "mypy"))
    with subprocess.Popen(command, env=env, stdout=output, stderr=output and subprocess.STDOUT) as process:
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            end_all(process)
            print(f"=== lane {name} was killed: not done after {limit:.0f} s", file=sys.stderr, flush=True)
            return 124
        except BaseException:  # an interrupt, which the process has heard of, too
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LAST_WORDS_SECONDS)
            process.kill()
            raise


def torch_of(name: str) -> str:
    """The requirement of a lane's torch."""
    return next((each.partition(";")[0] for each in LANES[name] if each.startswith("torch==")), "")


def test(names: list[str], extra: list[str], jobs: int, whole: bool, beside_newest: bool) -> int:
    """Run the suite in each lane, `jobs` at a time; pytest has the last word.

    The lanes that leave least out begin first; what each said is shown when all before it are done, in the
    order of `names`. A lane without its Python is skipped, which is said last.
    """
    # A switch of the caller's would decide what is tested.
    os.environ.pop("TORCH_DCP_BACKPORT", None)
    # Else numpy's import starts threads that wait by turning: a tenth of what torch's import takes.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # As for the environments: hundreds of processes would compile the checkout anew. It may be read-only.
    compileall.compile_dir(str(ROOT / "torch_dcp_backport"), quiet=2)
    compileall.compile_dir(str(ROOT / "tests"), quiet=2)
    left_out, shares = ({}, {}) if extra or whole else (LEAVES_OUT, SHARES)
    if whole:
        os.environ[WHOLE] = "1"
    failed: list[str] = []
    skipped: dict[str, NoPython] = {}
    for name in names:
        try:
            python_of(name)
        except NoPython as error:
            skipped[name] = error
    # Lane, its name here and pytest's arguments, in the order of their output.
    runs: list[tuple[str, str, list[str]]] = []
    for name in names:
        arguments = [
            *extra,
            *(f"--{'deselect' if '::' in path else 'ignore'}={path}" for path in left_out.get(name, ())),
            *(f"--share={share}" for share in shares.get(name, ())),
        ]
        if beside_newest and torch_of(name) == torch_of("newest"):
            arguments += [f"--ignore={folder}" for folder in LEFT_TO_NEWEST]
        if name in APART and len(names) > 1 and not extra:
            runs.append((name, f"{name} ({', '.join(APART[name])})", [*APART[name], *arguments]))
            arguments += [f"--ignore={folder}" for folder in APART[name]]
            runs.append((name, f"{name} (all other tests)", arguments))
        else:
            runs.append((name, name, arguments))
    runs = [each for each in runs if each[0] not in skipped]

    def test_in(name: str, label: str, arguments: list[str], output: Optional[IO[bytes]]) -> int:
        make(name)
        began = time.monotonic()
        print(f"=== lane {label} begins", file=sys.stderr, flush=True)
        limit = float(os.environ.get(LIMIT, LIMIT_SECONDS))
        command = ["python", "-m", "pytest"]
        for plugin in ("seconds", "shares", "progress", "ran"):
            command += ["-p", f"tools.{plugin}"]
        command += [f"--session-timeout={0.9 * limit:.0f}", *arguments]
        # Where there is one run alone, pytest's own output is there at once.
        code = run(name, command, output, limit, None if output is None else watch.add(label))
        print(f"=== lane {label} ends after {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        return code

    with contextlib.ExitStack() as files, ThreadPoolExecutor(jobs) as executor:
        watch = files.enter_context(Watch(Path(files.enter_context(TemporaryDirectory()))))
        outputs = [None if len(runs) == 1 else files.enter_context(TemporaryFile()) for _ in runs]
        longest_first = sorted(range(len(runs)), key=lambda number: len(left_out.get(runs[number][0], ())))
        begun = {number: executor.submit(test_in, *runs[number], outputs[number]) for number in longest_first}
        for number, (name, label, arguments) in enumerate(runs):
            code, output = begun[number].result(), outputs[number]
            print(f"=== lane {label}: {' '.join([LANES[name][0], *arguments])}", flush=True)
            if output is not None:
                output.seek(0)
                shutil.copyfileobj(output, sys.stdout.buffer)
                sys.stdout.flush()
            if code:
                failed.append(name)
                print(f"=== lane {label} failed", file=sys.stderr, flush=True)
    for name, error in skipped.items():
        print(f"=== lane {name} SKIPPED, nothing was run in it: {error}", file=sys.stderr, flush=True)
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sub = parser.add_subparsers(dest="verb", required=True)
    sub.add_parser("list", help="the lanes and what they install")
    sub.add_parser("make", help="make lanes, print their Pythons").add_argument(
        "lane", nargs="+", choices=LANES
    )
    runner = sub.add_parser("run", help="run a command in a lane, this checkout on PYTHONPATH")
    runner.add_argument("lane", choices=LANES)
    runner.add_argument("command", nargs=argparse.REMAINDER, help="after --")
    tester = sub.add_parser("test", help="run the test suite in lanes; pytest's own arguments after --")
    tester.add_argument("lane", nargs="+", metavar="LANE")
    tester.add_argument("--whole", action="store_true", help="leave nothing out")
    tester.add_argument("--beside-newest", action="store_true", help="leave to `make newest` what it runs")
    tester.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="lanes at a time")
    argv = sys.argv[1:]
    extra: list[str] = []
    if argv[:1] == ["test"] and "--" in argv:
        extra, argv = argv[argv.index("--") + 1 :], argv[: argv.index("--")]
    args = parser.parse_args(argv)
    if args.verb == "list":
        for name in LANES:
            print(f"{name:12s} {' '.join(requirements_of(name))}")
        return 0
    if args.verb == "make":
        for name in args.lane:
            print(make(name))
        return 0
    if args.verb == "test":
        unknown = [name for name in args.lane if name not in LANES]
        if unknown:
            parser.error(f"no such lane: {', '.join(unknown)} (there are {', '.join(LANES)})")
        return test(args.lane, extra, args.jobs, args.whole, args.beside_newest)
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        parser.error("run needs a command")
    return run(args.lane, command)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except NoPython as error:
        sys.exit(str(error))
