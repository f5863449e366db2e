"""pytest's `dcp_memory`: there where it is asked for, and only there."""

from __future__ import annotations

from pathlib import Path

import pytest
from interpreters import Fresh

TESTS = """
import pytest, torch
KEPT = []

def test_within(dcp_memory):
    with dcp_memory(keeps=4 * 2**20, peak=64 * 2**20) as figures:
        KEPT.append(torch.zeros(2**20))
        torch.zeros(2**20)
    assert figures.kept == 4 * 2**20
    assert figures.peak >= 4 * 2**20

def test_a_view_counts_as_what_it_keeps(dcp_memory):
    with dcp_memory(keeps=2**20):
        KEPT.append(torch.zeros(2**20)[:1])

def test_nothing_of_what_was_there_counts(dcp_memory):
    with dcp_memory(keeps=0):
        KEPT.append(KEPT[0][:10])
        KEPT.append(torch.empty(2**20, device="meta"))

def test_peak(dcp_memory):
    with dcp_memory(peak=16 * 2**20):
        torch.zeros(8 * 2**20)

@pytest.mark.dcp_memory(keeps=2**20)
def test_marked():
    KEPT.append(torch.zeros(2**20))

@pytest.mark.dcp_memory(keeps=2**20)
def test_marked_and_small():
    torch.zeros(2**20)

@pytest.mark.dcp_memory(keeps=0)
def test_its_own_error_is_what_counts():
    KEPT.append(torch.zeros(2**20))
    raise ValueError("its own")
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers\n")
    (tmp_path / "test_mine.py").write_text(TESTS)
    return "test_mine.py"


def test_a_test_that_keeps_or_needs_too_much_fails(fresh: Fresh, file: str) -> None:
    # Without the short summary: it repeats the errors whole where CI is set in the environment.
    ended = fresh("", "-m", "pytest", "-q", "-rN", "-p", "torch_dcp_backport.regression.plugin", file)
    assert ended.code == 1
    assert "4 failed, 3 passed" in ended.out
    kept = "this process keeps 4194304 bytes (4.0 MiB) of tensors alive that were not before, 1048576 bytes"
    assert ended.out.count(f"AssertionError: {kept}") == 2
    assert "4194304 bytes (4.0 MiB) held by a tensor (1,) float32 on cpu" in ended.out
    assert "at its peak, 16777216 bytes (16.0 MiB) are allowed" in ended.out
    assert "ValueError: its own" in ended.out


def test_without_the_plugin_there_is_nothing_of_ours(fresh: Fresh, tmp_path: Path) -> None:
    (tmp_path / "test_nothing.py").write_text("def test_nothing(): pass\n")
    listed = fresh("", "-m", "pytest", "--fixtures", "test_nothing.py")
    assert listed.code == 0
    assert "tmp_path" in listed.out
    # Not in paths: other plugins' fixtures are listed with theirs, which may be in a folder named after ours.
    assert not [line for line in listed.out.splitlines() if "dcp" in line.partition(" -- ")[0]]
