"""The tree of an agreement: each rank is reached once, in a number of steps that grows with the logarithm."""

from __future__ import annotations

import pytest

from torch_dcp_backport.transfer._src.tree import neighbours


@pytest.mark.parametrize("count", [*range(1, 70), 1023, 1024, 1025])
def test_every_rank_is_in_one_part_and_few_steps_away(count: int) -> None:
    parents = {}
    for place in range(count):
        parent, children = neighbours(place, count)
        assert (parent is None) == (place == 0)
        # A rank and its children's parts are what its parent counts as its part.
        below = {place}.union(*children)
        assert len(below) == 1 + sum(map(len, children))
        if parent is None:
            assert below == set(range(count))
        else:
            (part,) = [part for part in neighbours(parent, count)[1] if part[0] == place]
            assert below == set(part)
        assert len(children) <= (count - 1).bit_length()
        parents[place] = parent
    for place in range(count):
        steps, above = 0, parents[place]
        while above is not None:
            steps, above = steps + 1, parents[above]
        assert steps <= (count - 1).bit_length()
