"""Facts about process groups: one object for each, whoever asks first."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from torch_dcp_backport.transfer import groups


class Slow:
    """In place of GroupInfo: both threads have looked for the group's before either has made it."""

    both = threading.Barrier(2)

    def __init__(self, group: object) -> None:
        self.both.wait(10)


class FakeGroup:
    pass


def test_two_threads_that_come_first_share_what_is_known_of_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each would have a claim of its own, and both would transfer at once."""
    monkeypatch.setattr(groups, "GroupInfo", Slow)
    group: Any = FakeGroup()
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(groups.info_of, [group, group])
    assert first is second
    assert groups.info_of(group) is first
