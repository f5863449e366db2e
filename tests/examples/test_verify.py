"""`verify` as a user calls it; its choice of a device and its figures have tests in tests/unit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]


def test_it_says_where_it_loads_and_on_stderr_how_far_it_is(tmp_path: Path) -> None:
    where = ("--size", "tiny", "--world", "2", "--device", "cpu", "--backend", "gloo")
    done = subprocess.run(
        [sys.executable, "-m", "torch_dcp_backport", "verify", *where, "--no-plot", "--json", "found.json"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "device: cpu (as asked), backend: gloo" in done.stdout
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["device"], found["backend"], found["world"]) == ("cpu", "gloo", 2)
    if Version(torch.__version__).release < (2, 7):
        # The budget tells the two apart by the peak alone: nothing is kept by a load in place.
        stock = found["sides"]["stock"]["cases"]["load"][1]["result"]
        assert stock["storages"] == stock["shard"]
        assert stock["peak"] > stock["new"] + found["budget"]["peak_margin_bytes"]
    steps = done.stderr.splitlines()
    assert [line.partition("] ")[2].split()[0] for line in steps] == [f"{n}/8" for n in range(1, 9)]
    assert steps[-1].endswith(": optimizer finished")
