"""What compat.py offers on every release, against the release that runs the tests."""

from __future__ import annotations

import io
import pickle
import threading
from collections import Counter
from collections.abc import Iterator

import pytest
import torch

from torch_dcp_backport import compat


class Mine:
    """A class that torch.load(weights_only=True) does not make unless it is allowed."""


class Other(Mine):
    """One more."""


@pytest.fixture(autouse=True)
def _nothing_stays_allowed() -> Iterator[None]:
    torch.serialization.clear_safe_globals()
    yield
    torch.serialization.clear_safe_globals()


def load() -> object:
    file = io.BytesIO()
    torch.save(Mine(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_classes_are_allowed_meanwhile_and_not_afterwards() -> None:
    for _ in range(2):
        with compat.allowed_globals([Mine]):
            assert isinstance(load(), Mine)
        with pytest.raises(pickle.UnpicklingError, match="Mine"):
            load()
    assert torch.serialization.get_safe_globals() == []


def test_a_failure_leaves_none_allowed() -> None:
    with pytest.raises(ZeroDivisionError), compat.allowed_globals([Mine]):
        _ = 1 / 0
    assert torch.serialization.get_safe_globals() == []


def test_what_the_user_has_allowed_stays_allowed() -> None:
    torch.serialization.add_safe_globals([Mine, Other])
    before = Counter(torch.serialization.get_safe_globals())
    with compat.allowed_globals([Mine]):
        assert isinstance(load(), Mine)
    assert Counter(torch.serialization.get_safe_globals()) == before
    assert isinstance(load(), Mine)


def test_two_threads_do_not_take_the_classes_from_each_other() -> None:
    made: list[object] = []
    entered, left = threading.Event(), threading.Event()

    def second() -> None:
        with compat.allowed_globals([Mine]):
            entered.set()
            left.wait(10)
            made.append(load())

    thread = threading.Thread(target=second)
    with compat.allowed_globals([Mine]):
        thread.start()
        entered.wait(0.5)
    left.set()
    thread.join()
    assert len(made) == 1
    assert isinstance(made[0], Mine)
