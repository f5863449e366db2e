"""What compat.py offers on every release, against the release that runs the tests."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from typing import IO, Any

import pytest
import torch

from torch_dcp_backport import compat

#: What torch refuses with; a RuntimeError up to 2.4.
REFUSED = (pickle.UnpicklingError, RuntimeError)


class Mine:
    """A class that torch.load(weights_only=True) does not make unless it is allowed."""


class Other(Mine):
    """One more."""


@pytest.fixture(autouse=True)
def _nothing_stays_allowed() -> Iterator[None]:
    torch.serialization.clear_safe_globals()
    yield
    torch.serialization.clear_safe_globals()


def saved(value: object) -> IO[bytes]:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


def test_tensors_on_the_cpu_and_what_is_allowed() -> None:
    tensor = torch.arange(4.0)[1:3].requires_grad_()
    made = compat.load_values(saved([tensor, Mine(), {"a": (1, None)}]), (Mine,))
    assert torch.equal(made[0], tensor)
    assert made[0].requires_grad
    assert type(made[1]) is Mine
    assert made[2] == {"a": (1, None)}


def test_nothing_else_is_made() -> None:
    with pytest.raises(REFUSED, match="Other"):
        compat.load_values(saved(Other()), (Mine,))
    # What one call allows is not allowed for the next.
    with pytest.raises(REFUSED, match="Mine"):
        compat.load_values(saved(Mine()), (Other,))


def test_torchs_list_stays_as_it_is_meanwhile_too() -> None:
    # Else what another thread loads meanwhile gets these classes, and what it allows is lost.
    torch.serialization.add_safe_globals([Other])
    seen: list[Any] = []

    class Watched:
        def __setstate__(self, state: object) -> None:
            seen.append(torch.serialization.get_safe_globals())
            torch.serialization.add_safe_globals([dict])

    Watched.__module__, Watched.__name__, Watched.__qualname__ = Mine.__module__, "Mine", "Mine"
    mine = Mine()
    mine.a = 1  # type: ignore[attr-defined]
    assert type(compat.load_values(saved(mine), (Watched,))) is Watched
    assert [list(each) for each in seen] in ([[Other]], [[Other, dict]])  # torch 2.4 gives its list itself
    assert set(torch.serialization.get_safe_globals()) == {Other, dict}


def test_what_the_user_has_allowed_is_made() -> None:
    torch.serialization.add_safe_globals([Other])
    assert type(compat.load_values(saved(Other()), (Mine,))) is Other


def test_of_two_classes_with_one_name_ours_is_made() -> None:
    for _ in range(20):  # in a set the order is that of addresses
        stand_in = type("Mine", (), {"__module__": Mine.__module__})
        torch.serialization.add_safe_globals([Mine])
        assert type(compat.load_values(saved(Mine()), (stand_in,))) is stand_in
        assert type(torch.load(saved(Mine()), weights_only=True)) is Mine


@pytest.mark.parametrize("is_in_use", [False, True])
def test_host_memory_is_pinned_only_for_an_accelerator_in_use(
    monkeypatch: pytest.MonkeyPatch, is_in_use: bool
) -> None:
    """Pinning begins to use one: a context takes 0.5 GiB of the first GPU."""
    asked: list[bool] = []
    empty = torch.empty

    def without_gpu(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        asked.append(pin_memory)
        if pin_memory:
            raise RuntimeError("Cannot access accelerator device when none is available.")
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: is_in_use)
    monkeypatch.setattr(torch, "empty", without_gpu)
    assert compat.host_buffer(16).numel() == 16
    assert asked == ([True, False] if is_in_use else [False])
