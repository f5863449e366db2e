"""pytest's `dcp_memory`, loaded on request alone: `pytest -p torch_dcp_backport.regression.plugin`.

    def test_my_load(dcp_memory):
        with dcp_memory(keeps=shard_bytes + 2**20, peak=shard_bytes + 64 * 2**20):
            set_model_state_dict(model, state, options=options)

    @pytest.mark.dcp_memory(keeps=2**20)
    def test_my_save(): ...

Holds the process that runs the test to the figures of `torch_dcp_backport.regression.memory.limit`; under
`torchrun -m pytest` each rank. A rank that a test spawns itself calls `limit` itself.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable

import pytest

from torch_dcp_backport.regression import memory


def pytest_configure(config: pytest.Config) -> None:
    text = "dcp_memory(keeps=None, peak=None): most bytes that the test keeps alive, or needs at its peak"
    config.addinivalue_line("markers", text)


@pytest.fixture
def dcp_memory() -> Callable[..., contextlib.AbstractContextManager[memory.Figures]]:
    """`dcp_memory(keeps=bytes, peak=bytes)`: a block that fails if it needs more."""
    return memory.limit


def limits_of(item: pytest.Item) -> dict[str, int]:
    """Return the limits of an item's markers; the closest marker's figure counts."""
    limits: dict[str, int] = {}
    for marker in item.iter_markers("dcp_memory"):
        if marker.args or not marker.kwargs or marker.kwargs.keys() - {"keeps", "peak"}:
            raise pytest.UsageError(
                f"{item.nodeid}: dcp_memory takes keeps=bytes and peak=bytes, at least one"
            )
        limits = {**marker.kwargs, **limits}
    return limits


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if limits_of(item) and type(item) is not pytest.Function:
            raise pytest.UsageError(
                f"{item.nodeid}: dcp_memory marks functions; use memory.limit in this test"
            )


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> None:
    """Put the block around a marked test; pytest's own hook calls it then."""
    limits = limits_of(pyfuncitem)
    if not limits:
        return
    test = pyfuncitem.obj

    @functools.wraps(test)
    def held(*args: object, **kwargs: object) -> object:
        with memory.limit(**limits):
            return test(*args, **kwargs)

    pyfuncitem.obj = held
