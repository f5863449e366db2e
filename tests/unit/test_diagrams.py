"""The pictures that are drawn from the code's own names are those of the code as it is."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import diagrams  # noqa: E402


def test_the_pictures_are_those_of_the_code() -> None:
    for name, text in diagrams.drawn().items():
        assert (ROOT / "docs" / f"{name}.svg").read_text() == text, "make diagrams"


def test_every_library_is_in_the_picture_of_the_parts() -> None:
    import torch_dcp_backport

    text = diagrams.drawn()["parts"]
    assert [room for room in torch_dcp_backport._ROOMS if f">{room}</text>" not in text] == []


def test_a_name_that_is_gone_is_an_error() -> None:
    with pytest.raises(SystemExit, match="has no no_such_function"):
        diagrams.about_step(diagrams.Step("state_dict/api.py", "no_such_function", diagrams.EACH))
