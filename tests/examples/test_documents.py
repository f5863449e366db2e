"""Every command and every program in README and docs runs as it stands there."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from programs import blocks, output_of_code
from warm import Interpreters

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
#: Commands that other parts of CI run.
ELSEWHERE = {
    "make demo": "with --size tiny, tools/check_wheel.py",
    "make test": ".ci/run",
    "make wheel": ".ci/run",
    "pip install .": "tools/check_wheel.py",
    "pip wheel --no-deps .": "tools/check_wheel.py",
    "pip install dist/torch_dcp_backport-*.whl": "tools/check_wheel.py",
    "pytest --pyargs torch_dcp_backport.regression": "make test",
    "python -m torch_dcp_backport verify --size tiny": "without a picture, tools/check_wheel.py",
    "python -m torch_dcp_backport verify --size tiny --no-plot": "tools/check_wheel.py",
}


COMMANDS = {
    command
    for page in PAGES
    for text in blocks(page, "bash")
    for line in text.splitlines()
    for command in [re.sub(r"\s+#.*", "", line).strip()]
    if command
}


@pytest.mark.parametrize("command", sorted(COMMANDS - set(ELSEWHERE)))
def test_a_command_does_what_it_is_shown_for(command: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import torch_dcp_backport\n")  # the reader's program
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    done = subprocess.run(
        command,
        shell=True,
        cwd=tmp_path,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stdout


def test_what_others_run_is_still_shown() -> None:
    assert set(ELSEWHERE) <= COMMANDS


TORCHRUN = f'exec {sys.executable} -m torch.distributed.run "$@"'
#: Words of programs that other lanes run: FSDP2 trains on the CPU from torch 2.7 on (test_examples.py), and
#: megatron-core has a lane of its own (tests/megatron/test_megatron_core.py).
IN_OTHER_LANES = ("FSDPEngineWithLMHead", "from megatron.core")
PROGRAMS = [
    (page.name, program)
    for page in PAGES
    if page.name != "stacks.md"  # tests/clients/test_stacks.py
    for program in blocks(page, "python")
    if not any(words in program for words in IN_OTHER_LANES)
]


@pytest.mark.parametrize(("page", "program"), PROGRAMS)
def test_a_program_runs(interpreters: Interpreters, page: str, program: str, tmp_path: Path) -> None:
    output_of_code(interpreters, program, tmp_path)


def test_the_complete_test_of_a_load_passes_with_the_fix_and_fails_without(tmp_path: Path) -> None:
    (program,) = (text for page, text in PROGRAMS if page == "in-your-ci.md")
    (tmp_path / "test_load.py").write_text(program)
    ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    tests = ["-m", "pytest", "-q", "-p", "torch_dcp_backport.regression.plugin", "test_load.py"]
    ends = {
        switch: subprocess.run(
            [*ranks, *tests],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), "TORCH_DCP_BACKPORT": switch, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for switch in ("strict", "off")
    }
    assert ends["strict"].returncode == 0, ends["strict"].stdout
    assert "14.0 MiB) are allowed" in ends["off"].stdout


def test_the_script_for_slurm_starts_its_ranks(tmp_path: Path) -> None:
    """With stand-ins for `srun` and `scontrol`, and two ranks on one machine."""
    (script,) = (text for text in blocks(ROOT / "docs" / "stacks.md", "text") if "#SBATCH" in text)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    commands = {"srun": 'exec "$@"', "scontrol": "echo 127.0.0.1", "torchrun": TORCHRUN}
    for name, command in commands.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{command}\n")
        (tmp_path / name).chmod(0o755)
    program = "import os, torch_dcp_backport as t; print('rank', os.environ['RANK'], t.status().outcome)\n"
    (tmp_path / "train.py").write_text(program)
    (tmp_path / "job.sh").write_text(script.replace("-node 8", "-node 2").replace("29500", str(port)))
    path = os.pathsep.join((str(tmp_path), os.environ["PATH"]))
    done = subprocess.run(
        ["bash", "job.sh"],
        cwd=tmp_path,
        env={
            **os.environ,
            "PATH": path,
            "PYTHONPATH": str(ROOT),
            "SLURM_NNODES": "1",
            "OMP_NUM_THREADS": "1",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=250,
    )
    said = sorted(re.findall(r"rank (\d) (\w+)", done.stdout))
    assert said == [("0", "pending"), ("1", "pending")], done.stdout


def test_the_readme_is_short_and_begins_with_the_symptom() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 100
    assert "OutOfMemoryError" in lines[2]
    headings = [line for line in lines if line.startswith("## ")]
    assert headings == [f"## {name}" for name in ("Which function do I call?", "Install", "Proof", "Limits")]


def test_files_and_functions_that_internals_name_are_there() -> None:
    package, tests = ROOT / "torch_dcp_backport", ROOT / "tests"
    page = (ROOT / "docs" / "internals.md").read_text()
    absent = []
    for path, name in re.findall(r"`([\w/.]+\.(?:py|md))(?:::(\w+))?", page.replace("`f.py::name`", "")):
        files = [folder / path for folder in (ROOT, package) if (folder / path).is_file()]
        if not files and "/" not in path:
            files = [*package.rglob(path), *tests.rglob(path)]
        pattern = rf"^\s*(?:def|class) {name}\b|^{name}\b"
        if not any(not name or re.search(pattern, file.read_text(), re.MULTILINE) for file in files):
            absent.append(f"{path}::{name}")
    assert absent == []
