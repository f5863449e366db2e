"""Blocks of a tensor: together they hold every element, or that is a problem."""

from __future__ import annotations

import pytest

from torch_dcp_backport.hf import gaps, spread_of
from torch_dcp_backport.transfer import Box


@pytest.mark.parametrize("missing", [0, 1, 4])
def test_a_gap_of_one_element_is_one(missing: int) -> None:
    blocks = {0: [Box((0, 0), (4, 8))], 1: [Box((4, 0), (3, 8)), Box((7, 0), (1, 8 - missing))]}
    problems = gaps("key", spread_of((8, 8), blocks))
    assert [problem.got for problem in problems] == ([f"{64 - missing} elements"] if missing else [])
