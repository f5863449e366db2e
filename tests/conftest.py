"""For every test: the collector passes over what is imported before the first, seconds less per collection."""

from __future__ import annotations

import gc


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
