from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pool
import pytest
import torch
from packaging.version import Version
from pool import OURS, STOCK, Pools, RankError

#: The release on which stock torch must fail where we do not. A failed function costs its processes,
#: and starting others takes seconds, so that one release of the broken ones has to do.
BROKEN = Version(torch.__version__).release[:2] == (2, 6)


def two_dim_support() -> contextlib.AbstractContextManager[object]:
    """torch 2.4's FSDP2 refuses every state dict on a 2-D mesh, with or without us."""
    if Version(torch.__version__).release < (2, 5):
        return pytest.raises(RankError, match=r"NotImplementedError|AmbiguousLayout")
    return contextlib.nullcontext()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How many faults were put into a rank, and how many of these cases ended as docs/reliability.md says."""
    passed, failed = (
        sum("test_faults.py::" in one.nodeid and "[" in one.nodeid and one.when == "call" for one in reports)
        for reports in map(terminalreporter.getreports, ("passed", "failed"))
    )
    if passed or failed:
        terminalreporter.write_line(
            f"faults of one rank: {passed + failed} cases, {passed} ended as docs/reliability.md says"
        )


pools, ranks = pool.fixtures(OURS)


@pytest.fixture
def fixed(pools: Pools, ranks: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """As `ranks`, and the same function must fail with stock torch 2.6, or where `broken` says so."""

    def run(
        function: Callable[..., Any], *args: Any, world: int = 4, broken: bool = BROKEN, **kwargs: Any
    ) -> list[Any]:
        results = ranks(function, *args, world=world, **kwargs)
        if broken:
            with pytest.raises(RankError):
                pools.get(world, STOCK).run(function, *args, **kwargs)
        return results

    return run
