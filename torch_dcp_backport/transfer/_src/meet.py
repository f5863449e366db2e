"""The names that agreements of objects had: each is one of `Call`'s collectives of objects.

For rooms that are not converted yet. Must never do anything of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Union

from torch_dcp_backport.transfer._src.attempt import Attempt
from torch_dcp_backport.transfer._src.call import Call
from torch_dcp_backport.transfer._src.errors import NOTHING, UNCHANGED, Common
from torch_dcp_backport.transfer._src.object_collectives import ObjectCollective


class Topic(NamedTuple):
    """The matter of an agreement."""

    doing: str
    so_far: str = UNCHANGED
    unheard: str = ""


def meet(
    call: Call, topic: Topic, own: object = None, common: Union[Common, Attempt[Common]] = NOTHING
) -> Mapping[int, Any]:
    """Do as `Call.all_gather_object`."""
    return call.all_gather_object(
        topic.doing, own, must_agree=common, so_far=topic.so_far, unheard=topic.unheard
    )


class Meeting:
    """An agreement under way, as `at_first` gives it."""

    def __init__(self, heard: Mapping[int, Any]) -> None:
        self.heard = heard
        self.result: Any = None
        self.answers: Mapping[int, Any] = {}

    @property
    def decides(self) -> bool:
        return bool(self.heard)

    def answer(self, value: object) -> None:
        self.answers = dict.fromkeys(self.heard, value)

    def answer_each(self, answers: Mapping[int, Any]) -> None:
        self.answers = answers


@contextlib.contextmanager
def at_first(
    call: Call, topic: Topic, own: object = None, common: Union[Common, Attempt[Common]] = NOTHING
) -> Iterator[Meeting]:
    """Do as `Call.scatter_object`, with the decision inside the `with`."""
    with call.tally.phase(topic.doing):
        collective = ObjectCollective(call, *topic)
        meeting = Meeting(collective.gather(own, common))
        failure = None
        try:
            yield meeting
        except Exception as error:
            failure = error
            if not meeting.decides:
                # No other rank hears of it. Others may get their answers through this one.
                with contextlib.suppress(Exception):
                    collective.scatter({}, dict)
                raise

        def decide(_: Mapping[int, Any]) -> Mapping[int, Any]:
            if failure is not None:
                raise failure
            return meeting.answers

        values, meeting.heard = meeting.heard, {}
        meeting.result = collective.scatter(values, decide)
