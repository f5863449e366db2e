"""status(): as data, as text, and as something to compare between ranks."""

from __future__ import annotations

import json

import pytest

from torch_dcp_backport import __version__
from torch_dcp_backport.activation.status import MEANING, BackportWarning, LateImportWarning, Status

APPLIED = Status(
    "applied",
    "torch 2.6.0 lacks it",
    "auto",
    "2.6.0",
    replaced=(("torch.a", ("f", "g")), ("torch.b", ("h",))),
    records=("0001-full-tensor-kept-alive", "0002-bad-input-loads-or-hangs"),
    late_bindings=("train.f",),
    out_of_reach=("list in train.kept",),
    overridden=("torch.a.g",),
)


def flat(text: str) -> str:
    """A text without its breaks of lines."""
    return " ".join(text.split())


def test_outcomes_are_the_documented_six() -> None:
    assert set(MEANING) == {"applied", "pending", "not-needed", "disabled", "unsupported", "conflict"}


@pytest.mark.parametrize("outcome", sorted(MEANING))
def test_text_says_what_why_and_how_to_leave(outcome: str) -> None:
    text = flat(str(Status(outcome, "because of this", "auto", "2.6.0+cu124")))
    for part in (
        f"{__version__}: {outcome}",
        MEANING[outcome],
        "2.6.0+cu124",
        "because of this",
        "=off",
        "with torch >= 2.7, unless your program imports a library of this package",
    ):
        assert part in text
    assert "replaced  " not in str(Status(outcome, "because of this", "auto", "2.6.0+cu124"))


def test_text_is_short_and_says_where_the_rest_is() -> None:
    text = flat(str(APPLIED))
    assert len(str(APPLIED).splitlines()) < 16
    assert "3 names in 2 modules, for 2 defects of torch (`status --verbose` lists them)" in text
    assert "0001" not in text


def test_full_text_lists_what_was_done() -> None:
    text = APPLIED.explain()
    for part in (
        "2 names in torch.a:",
        "f, g",
        "1 names in torch.b:",
        "defects of torch:\n               0001 every rank keeps the full model alive\n",
        "https://github.com/pytorch/pytorch/pull/142845\n               0002 bad input loads silently",
    ):
        assert part in text
    assert "train.f" in text.split("bound early")[1]
    assert "torch's own modules" not in text
    assert "still torch's own:\n               list in train.kept\n" in text
    assert "torch.a.g" in text.split("lost")[1]


def test_torchs_own_modules_are_no_reproach() -> None:
    late = APPLIED._replace(late_bindings=("torch.c.f", "train.f"))
    assert "torch.c.f" not in str(late)
    text = late.explain()
    assert "also in      torch's own modules that had them:\n               torch.c.f\n" in text
    assert "bound early  and given the replacement afterwards:\n               train.f\n" in text


def test_a_fingerprint_that_will_change_says_so() -> None:
    assert "(compare between ranks)" in str(APPLIED)
    assert "(not final: pending)" in str(APPLIED._replace(outcome="pending"))


def test_text_stays_readable_with_many_names() -> None:
    names = tuple(f"some_rather_long_function_name_{number}" for number in range(40))
    lines = APPLIED._replace(replaced=(("torch.a", names),)).explain().splitlines()
    assert max(map(len, lines)) <= 80
    for name in names:
        assert sum(name in line.replace(",", " ").split() for line in lines) == 1


def test_off_is_told_how_to_switch_on() -> None:
    text = str(Status("disabled", "TORCH_DCP_BACKPORT=off", "off", None))
    assert "unset it to switch on" in text
    assert "not looked at" in text


def test_data_survives_json() -> None:
    data = json.loads(json.dumps(APPLIED.to_dict()))
    assert data == APPLIED.to_dict()
    assert data["upstream"]["0001-full-tensor-kept-alive"] == [
        "https://github.com/pytorch/pytorch/pull/142845"
    ]
    assert data["replaced"] == {"torch.a": ["f", "g"], "torch.b": ["h"]}
    assert data["fingerprint"] == APPLIED.fingerprint
    assert data["version"] == __version__
    assert set(data) == {*Status._fields, "fingerprint", "upstream"}


def test_fingerprint_is_known_beforehand() -> None:
    # Spelled out, so that a hash that differs between processes or machines is seen.
    status = Status("not-needed", "any", "auto", "2.7.0", version="1.0")
    assert status.fingerprint == "2594a80e3fd6"


def test_fingerprint_tells_what_was_done_and_nothing_of_the_rank() -> None:
    base = APPLIED.fingerprint
    same = [
        {"late_bindings": ()},
        {"out_of_reach": ()},
        {"reason": "other words"},
        {"switch": "strict"},
        {"overridden": ()},
    ]
    other = [
        {"outcome": "pending"},
        {"torch_version": "2.5.1"},
        {"version": "9.9"},
        {"replaced": ()},
        {"records": ()},
    ]
    assert all(APPLIED._replace(**change).fingerprint == base for change in same)  # type: ignore[arg-type]
    prints = {APPLIED._replace(**change).fingerprint for change in other}  # type: ignore[arg-type]
    assert base not in prints
    assert len(prints) == len(other)


def test_status_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        APPLIED.outcome = "pending"  # type: ignore[misc]


def test_warnings_can_be_filtered_by_our_own_class() -> None:
    assert issubclass(LateImportWarning, BackportWarning)
    assert issubclass(BackportWarning, UserWarning)
