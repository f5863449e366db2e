"""What ranks tell each other before anything moves: every mark comes back as it was, whatever it says."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torch_dcp_backport.transfer._src.consensus import MARK_BYTES, Mark, common_mark

digests = st.binary(min_size=16, max_size=16)
names = st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=15)
marks = st.builds(Mark, digests, st.booleans(), st.booleans(), st.integers(0, 2**64 - 1), names)


@given(marks)
def test_a_mark_survives_its_journey(mark: Mark) -> None:
    data = mark.to_bytes()
    assert len(data) == MARK_BYTES
    assert Mark.from_bytes(data) == mark


@given(st.lists(marks, min_size=1, max_size=8), st.randoms())
def test_what_marks_come_to_is_what_each_says_alone(found: list[Mark], random) -> None:
    common = common_mark(found)
    assert common.troubled == any(mark.troubled for mark in found)
    assert common.user_code == any(mark.user_code for mark in found)
    assert all(common.staging_bytes <= mark.staging_bytes for mark in found)
    assert common.staging_bytes in [mark.staging_bytes for mark in found]
    if common.digest != bytes(16):
        assert all(mark.digest == common.digest for mark in found)
    if common.device:
        assert all(mark.device in ("", common.device) for mark in found)
    random.shuffle(found)
    assert common_mark(found) == common


@given(marks, st.integers(1, 8))
def test_ranks_that_say_the_same_agree(mark: Mark, count: int) -> None:
    assert common_mark([mark] * count) == mark
