"""For every test: the collector passes over what was imported before the first one, and takes less time."""

from __future__ import annotations

import gc


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
