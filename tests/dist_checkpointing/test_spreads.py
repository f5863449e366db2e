"""Saved by any spread over any number of ranks, loaded by any other: bit-equal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from spreads import differences, state_of


def saved(room: Any, folder: str, seed: int, spread: int) -> None:
    state = state_of(seed, spread, True)
    before = repr(state)
    room.save(state, folder)
    assert repr(state) == before


def loaded(room: Any, folder: str, seed: int, spread: int) -> list[str]:
    state = state_of(seed, spread, False)
    before = repr(state)
    result = room.load(state, folder)
    assert repr(state) == before
    return differences(result, seed, spread)


@pytest.mark.parametrize("seed", range(8))
def test_any_spread_to_any_other(ranks: Any, tmp_path: Path, seed: int) -> None:
    old, new = [(4, 4), (4, 3), (3, 4), (4, 1), (1, 4), (4, 8), (8, 3), (4, 2)][seed]
    ranks(saved, str(tmp_path), seed, 0, world=old)
    for spread in range(3):
        assert ranks(loaded, str(tmp_path), seed, spread, world=new) == [[]] * new
