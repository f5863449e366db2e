from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from warm import Interpreters


@pytest.fixture(scope="session")
def interpreters() -> Iterator[Interpreters]:
    interpreters = Interpreters(Path(__file__).resolve().parents[2], OMP_NUM_THREADS="1")
    yield interpreters
    interpreters.close()
