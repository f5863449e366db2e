"""For every test: the collector waits for the imports of all tests, and passes over them from then on."""

from __future__ import annotations

import gc
from typing import Any

import patience
import pytest

gc.disable()


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool:
    """Wait longer where the machine has much to do, as its own hook does."""
    import pytest_timeout

    longer = settings._replace(timeout=settings.timeout * patience.factor())
    return bool(pytest_timeout.pytest_timeout_set_timer(item, longer))


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()
