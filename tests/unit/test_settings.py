"""The staging budget: what is taken, and what is refused at once."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_dcp_backport.transfer import Progress, configure
from torch_dcp_backport.transfer._src import settings

MIB = 2**20


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(settings.VARIABLE, raising=False)
    yield
    configure()


def test_the_default_is_64_mib() -> None:
    assert settings.staging_bytes() == 64 * MIB


@pytest.mark.parametrize(("text", "budget"), [("16", 16 * MIB), (" 0.5 ", MIB // 2), ("", 64 * MIB)])
def test_the_environment(monkeypatch: pytest.MonkeyPatch, text: str, budget: int) -> None:
    monkeypatch.setenv(settings.VARIABLE, text)
    assert settings.staging_bytes() == budget


@pytest.mark.parametrize("text", ["a lot", "0", "-1", "nan", "inf", "1e-9", "16MiB"])
def test_an_environment_that_is_no_number_is_an_error_that_names_it(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv(settings.VARIABLE, text)
    with pytest.raises(ValueError, match=f"{settings.VARIABLE}={text!r}"):
        settings.staging_bytes()


def test_configure_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.VARIABLE, "not read")
    configure(staging_bytes=4 * MIB)
    assert settings.staging_bytes() == 4 * MIB


@pytest.mark.parametrize("budget", [0, -1, 15, 2**64, 1.5, "64", True, float("nan")])
def test_what_is_no_budget_is_refused_at_the_call(budget: object) -> None:
    with pytest.raises(ValueError, match="staging_bytes="):
        configure(staging_bytes=budget)  # type: ignore[arg-type]
    assert settings.staging_bytes() == 64 * MIB


@given(st.integers(settings.SMALLEST, 2**50))
def test_any_whole_number_from_one_element_on_is_taken(budget: int) -> None:
    configure(staging_bytes=budget)
    assert settings.staging_bytes() == budget


@pytest.mark.parametrize("progress", ["bar", 3, True])
def test_a_progress_that_cannot_be_called_is_refused(progress: object) -> None:
    with pytest.raises(ValueError, match=f"progress={progress!r}"):
        configure(progress=progress)


def test_tqdm_is_used_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[object] = []

    class Bar:
        def __init__(self, total: int, desc: str, **kwargs: object) -> None:
            self.n = 0
            shown.append((desc, total))

        def update(self, more: int) -> None:
            self.n += more
            shown.append(self.n)

        def close(self) -> None:
            shown.append("closed")

    monkeypatch.setitem(sys.modules, "tqdm", SimpleNamespace(tqdm=Bar))
    configure(progress="tqdm")
    callback = settings.progress()
    assert callback is not None
    for operation in ("scatter", "gather"):
        for done in (3, 8):
            callback(Progress(operation, done, 8))
    assert shown == [("scatter", 8), 3, 8, "closed", ("gather", 8), 3, 8, "closed"]
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with pytest.raises(ModuleNotFoundError):
        configure(progress="tqdm")
