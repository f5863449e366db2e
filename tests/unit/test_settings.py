"""The staging budget: what is taken, and what is refused at once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_dcp_backport.transfer import configure, settings

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
