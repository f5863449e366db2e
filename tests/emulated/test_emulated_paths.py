"""The package's paths on an accelerator: right values, no broken rule, and what was promised is kept."""

from __future__ import annotations

import pytest
from emulated.promises import ALONE, BESIDE, MARGINS, OTHERWISE, PROMISED, promised
from emulated.record import CASES, functions_of_ranks, promise_of, setting_of
from emulated.runner import problems, run


def rows() -> list[object]:
    return [
        pytest.param(
            case,
            backend,
            id=f"{case}-{'alone' if backend == ALONE else 'beside'}",
        )
        for case in functions_of_ranks(CASES)
        for backend in (ALONE, BESIDE)
    ]


@pytest.mark.parametrize(("case", "backend"), rows())
def test_a_path_keeps_the_rules_and_its_promise(case: str, backend: str) -> None:
    seen = run(f"emulated.cases.{case}", setting_of(case, backend))
    assert not problems(seen), problems(seen)
    opened_and_sent, promise = promise_of(seen), promised(case, backend)
    assert promise.is_kept(opened_and_sent, MARGINS.get(case, 0)), f"{opened_and_sent}, not {promise}"


def test_every_promise_has_its_case() -> None:
    cases = set(functions_of_ranks(CASES))
    assert set(PROMISED) <= cases
    assert all(set(promises) <= cases for promises in OTHERWISE.values())
