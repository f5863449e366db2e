"""For every test: the collector waits for the imports of all tests, and passes over them from then on."""

from __future__ import annotations

import gc

gc.disable()


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()
