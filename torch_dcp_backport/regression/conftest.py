"""Marker, fixture and summary for `pytest --pyargs torch_dcp_backport.regression`.

Must leave every other test of the same pytest run alone.
"""

from __future__ import annotations

import platform

import pytest

from torch_dcp_backport.regression.checks import Runs

_RUNS = Runs()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs CUDA; skipped where there is none")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not _RUNS.tested:
        return
    terminalreporter.section("torch_dcp_backport: what was tested")
    for way, seen in _RUNS.tested.items():
        native = seen["code"] == "torch" and seen["fixed"] == "yes"
        note = "native path, backport not needed" if native else f"backport: {seen['outcome']}"
        terminalreporter.write_line(
            f"torch {seen['torch']}: {way:8s} ran the code of {seen['code']} ({note})"
        )


@pytest.fixture
def runs() -> Runs:
    if platform.system() != "Linux":
        pytest.skip("rank processes are forked and measured through /proc: Linux only")
    return _RUNS
