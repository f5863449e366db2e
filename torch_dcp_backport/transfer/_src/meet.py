"""The meeting: what a rank has, or its problem, goes to the first rank, and an answer comes back to each.

A rank that fails still comes to the next meeting, with its problem. Problems of ranks, those that the first
rank finds, and ranks that are gone: one error, on every rank.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, NoReturn, Optional, Union

import torch
import torch.distributed as dist

from torch_dcp_backport.transfer._src.call import Attempt, Call, made_of
from torch_dcp_backport.transfer._src.consensus import share_findings
from torch_dcp_backport.transfer._src.errors import (
    NOTHING,
    UNCHANGED,
    CollectiveError,
    Common,
    Finding,
    Problem,
    TransferError,
    compose,
    differences,
    spell,
)
from torch_dcp_backport.transfer._src.groups import Group, is_silent, source_of
from torch_dcp_backport.transfer._src.tree import Gathered, LostRank, Tree
from torch_dcp_backport.transfer._src.wire import (
    MOST,
    absent,
    broadcast_from_first,
    check_in,
    count_agreement,
    device_for,
    gather_bytes,
    gather_rows,
    takes_collectives,
)

# --- one round of messages ---


class Round:
    """One round: what every rank has goes to the first rank, and an answer comes back to each.

    A rank that is gone costs the others no hang where messages go from rank to rank: the first rank hears of
    it and still answers the rest. In collectives it leaves all to the group's timeout: no part of one fails
    alone.
    """

    def __init__(self, group: Group) -> None:
        check_in(group)
        self.group = group
        self.tree = None if takes_collectives(group) else Tree(group)

    def gather(self, data: bytes) -> Optional[Gathered]:
        """Send this rank's bytes to the first rank of the group, which gets everyone's; None on the others.

        Raises:
            RuntimeError: a rank on the way is gone.
        """
        if self.tree is not None:
            return self.tree.gather(data)
        is_first = dist.get_rank() == source_of(self.group)
        messages = gather_bytes(data, self.group, is_kept=is_first)
        return Gathered(messages) if is_first else None

    def all_gather(self, data: bytes) -> Gathered:
        """Return every rank's bytes, on every rank, in one step. Only where messages are collectives."""
        messages = gather_bytes(data, self.group)
        count_agreement(self.group)
        return Gathered(messages)

    def scatter(self, answers: Optional[dict[int, bytes]]) -> bytes:
        """Return this rank's bytes of those that the first rank passes for each rank; the others pass None.

        Raises:
            RuntimeError: a rank on the way is gone.
        """
        own = self.tree.scatter(answers) if self.tree is not None else answer_to_all(answers, self.group)
        count_agreement(self.group)
        return own


def answer_to_all(answers: Optional[dict[int, bytes]], group: Group) -> bytes:
    """As `Round.scatter`, in one broadcast: equal answers travel once."""
    rank, data = dist.get_rank(), b""
    if answers is not None:
        distinct = dict.fromkeys(answers.values())
        number = {message: index for index, message in enumerate(distinct)}
        data = pickle.dumps((list(distinct), {other: number[text] for other, text in answers.items()}))
    messages, number_by_rank = pickle.loads(broadcast_from_first(data, group))
    return bytes(messages[number_by_rank[rank]])


# --- meetings ---

#: Bytes that a message has around its content.
SPARE = 4096


def largest_answer() -> int:
    """Return the most bytes that an answer to all ranks may have, however many these are."""
    return MOST - SPARE - MOST // 1024


class Topic(NamedTuple):
    """The matter of a meeting."""

    #: The step under way: a phase of the report, and words of errors.
    doing: str
    #: An error's words on the state of the files or tensors.
    so_far: str = UNCHANGED
    #: The same, where the first rank is gone before it answered; by default as above.
    unheard: str = ""


#: Said instead of a topic's own words on the state of the files, within `saying`; "" for none.
_outlook: ContextVar[str] = ContextVar("outlook", default="")


@contextlib.contextmanager
def saying(so_far: str) -> Iterator[None]:
    """Have errors of all calls within say this of the state of the files: together they are one save."""
    token = _outlook.set(so_far)
    try:
        yield
    finally:
        _outlook.reset(token)


class Refusal(Exception):
    """The first rank refuses to go on: the findings go to every rank."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        super().__init__(compose("refused", findings))
        self.findings = list(findings)


class Meeting:
    """A meeting under way."""

    def __init__(self) -> None:
        #: On the first rank, where no rank has a problem: every rank's value, by global rank. Else empty.
        self.heard: Mapping[int, Any] = {}
        #: This rank's answer, once the meeting is over.
        self.result: Any = None
        self._answers: Mapping[int, Any] = {}

    @property
    def decides(self) -> bool:
        """Whether this rank is to answer: it is the first, and no rank has a problem."""
        return bool(self.heard)

    def answer(self, value: object) -> None:
        """Answer all ranks alike. On the first rank."""
        self._answers = dict.fromkeys(self.heard, value)

    def answer_each(self, answers: Mapping[int, Any]) -> None:
        """Give each rank its own answer, by global rank; None where it has none. On the first rank."""
        self._answers = answers


def meet(
    call: Call, topic: Topic, own: object = None, common: Union[Common, Attempt[Common]] = NOTHING
) -> Mapping[int, Any]:
    """Raise every rank's problems on every rank, or return every rank's value, by global rank.

    All that any rank has goes to every rank: for what is large, see `at_first`.

    Args:
        own: this rank's value, or the attempt to make it; it is pickled. None on every rank costs no traffic.
        common: what must be the same on every rank, or the attempt to make it.

    Raises:
        the call's kind of error: a rank has a problem or is gone; the same on every rank.
    """
    topic = _as_said(topic)
    if len(call.ranks) == 1 or not takes_collectives(call.group):
        with at_first(call, topic, own, common) as meeting:
            if any(value is not None for value in meeting.heard.values()):
                meeting.answer(meeting.heard)
        return meeting.result or dict.fromkeys(call.ranks)
    # Every rank gets all that was said, and needs no answer.
    with call.tally.phase(topic.doing):
        message = _message(call, topic, own, common)
        with _telling_who_is_gone(call, topic):
            gathered = Round(call.group).all_gather(message)
    try:
        return _values_in(gathered, topic.doing)
    except Exception as error:
        findings = _findings_of(call, error)
    fail(call, findings, topic.so_far)


def meet_numbers(call: Call, own: Attempt[Sequence[float]], count: int) -> dict[int, list[float]]:
    """Do as `meet` for so many numbers of each rank, in one small all-gather: for every step of a training.

    Problems travel only where a rank has some.
    """
    if not call.groups:
        call.raise_alone()
        return {call.rank: list(own.value)}
    numbers = [0.0] * count if own.error is not None else list(own.value)
    row = torch.tensor([*numbers, len(call.problems)], dtype=torch.float64, device="cpu")
    if is_silent(call.group):
        rows = [row.tolist()] * len(call.ranks)
    else:
        sent = row.view(torch.uint8).to(device_for(call.group))
        rows = gather_rows(sent, call.group).cpu().view(torch.float64).tolist()
    if any(problems for *_, problems in rows):
        fail(call, share_findings(call.findings, call.group))
    return {rank: numbers for rank, (*numbers, _) in zip(call.ranks, rows)}


@contextlib.contextmanager
def at_first(
    call: Call, topic: Topic, own: object = None, common: Union[Common, Attempt[Common]] = NOTHING
) -> Iterator[Meeting]:
    """Meet at the first rank, which hears every rank's value, and answers inside the `with`.

    Where a rank has a problem, no rank decides: all get to the end of the `with`, which raises.

        with at_first(call, Topic("counting"), len(parts)) as meeting:
            if meeting.decides:
                meeting.answer(sum(meeting.heard.values()))
        total = meeting.result

    Args:
        own: this rank's value, or the attempt to make it; it is pickled.
        common: what must be the same on every rank, or the attempt to make it.

    Raises:
        the call's kind of error: a rank has a problem or is gone, or what is inside the `with` failed on the
            first rank; the same on every rank. A `Refusal` has findings of several ranks.
    """
    topic = _as_said(topic)
    with call.tally.phase(topic.doing):
        message = _message(call, topic, own, common)
        round_ = Round(call.group) if len(call.ranks) > 1 else None
        with _telling_who_is_gone(call, topic):
            heard = Gathered({call.rank: message}) if round_ is None else round_.gather(message)
        meeting, findings, answers = Meeting(), list[Finding](), dict[int, bytes]()
        if heard is not None:
            try:
                meeting.heard = _values_in(heard, topic.doing)
            except Exception as error:
                findings = _findings_of(call, error)
        try:
            yield meeting
            answers = _packed_each(meeting)
        except Exception as error:
            if not meeting.decides:
                # No other rank hears of it: what is inside is for the rank that decides. Others may
                # get their answers through this one.
                if heard is None and round_ is not None:
                    round_.scatter(None)
                raise
            findings = _findings_of(call, error)
        # What the ranks have sent is not kept until the caller is done.
        meeting.heard, meeting._answers = {}, {}
        replies = None if heard is None else _replies(heard, findings, answers)
        with _telling_who_is_gone(call, topic):
            reply = round_.scatter(replies) if round_ is not None else (replies or {})[call.rank]
    findings, result = pickle.loads(reply)
    if findings:
        fail(call, [(rank, Problem(*problem)) for rank, problem in findings], topic.so_far)
    meeting.result = pickle.loads(result)


def _as_said(topic: Topic) -> Topic:
    return Topic(topic.doing, _outlook.get()) if _outlook.get() else topic


def _message(call: Call, topic: Topic, own: object, common: Union[Common, Attempt[Common]]) -> bytes:
    """Return what this rank says: its problems, or what is the same on every rank and its value."""
    content = b""
    with call.guard():
        if not call.problems:
            content = _packed((made_of(common), made_of(own)))
    problems = list(map(tuple, call.problems))
    return pickle.dumps((topic.doing, problems, content if not problems else b""))


def fail(call: Call, findings: Sequence[Finding], so_far: str = UNCHANGED) -> NoReturn:
    """Raise the findings, which every rank has, as the call's kind of error."""
    error = call.kind(compose(call.title, findings, so_far))
    if isinstance(error, CollectiveError):
        error.heard_by = call.ranks
    try:
        raise error from call.cause
    finally:
        # The error's traceback has this frame.
        del error


@contextlib.contextmanager
def _telling_who_is_gone(call: Call, topic: Topic) -> Iterator[None]:
    """Name the ranks that did not come, in place of a backend's error."""
    try:
        yield
    except RuntimeError as error:
        late, so_far = absent(call.group), topic.unheard or topic.so_far
        lost = error.rank if isinstance(error, LostRank) else call.ranks[0]
        is_unheard = isinstance(error, LostRank) and error.is_unheard
        if isinstance(error, LostRank) and lost != call.ranks[0] and (is_unheard or lost in late):
            # The first rank says the same to those that it reaches. Others that have not come may yet come.
            try:
                fail(call, gone_while(topic.doing, [lost]), topic.so_far if is_unheard else so_far)
            except CollectiveError as failure:
                if not is_unheard:
                    # This rank's message may have gone on: the others may have an answer.
                    failure.heard_by = ()
                raise
        kind = call.kind if issubclass(call.kind, CollectiveError) else TransferError
        what = f"rank {lost} is gone, or too late, while {topic.doing}"
        if late and lost not in late:
            what = f"no answer from rank {lost} while {topic.doing}, and {spell(late)} did not come"
        raise kind(f"{call.title}: {what}; {so_far}") from error


def gone_while(doing: str, ranks: Iterable[int]) -> list[Finding]:
    """Return the findings of ranks that did not come."""
    return [(rank, Problem(f"the rank is gone, or too late, while {doing}")) for rank in ranks]


def _values_in(heard: Gathered, doing: str) -> dict[int, Any]:
    """Return every rank's value, by global rank.

    Raises:
        Refusal: ranks are gone, have problems, are somewhere else, or differ where they must not.
    """
    unpacked = {rank: pickle.loads(message) for rank, message in sorted(heard.messages.items())}
    findings = gone_while(doing, heard.gone)
    for rank, (_, problems, _) in unpacked.items():
        findings += [(rank, Problem(*problem)) for problem in problems]
    if not findings:
        # What is for another meeting would be taken for what is for this one.
        findings = [
            (rank, Problem("the rank is somewhere else in its calls", "", other, doing))
            for rank, (other, _, _) in unpacked.items()
            if other != doing
        ]
    if findings:
        raise Refusal(findings)
    contents = {rank: pickle.loads(content) for rank, (_, _, content) in unpacked.items()}
    findings = differences({rank: common for rank, (common, _) in contents.items()})
    if findings:
        raise Refusal(findings)
    return {rank: own for rank, (_, own) in contents.items()}


def _findings_of(call: Call, error: Exception) -> list[Finding]:
    """Return the findings of an error of the first rank."""
    if isinstance(error, Refusal):
        return error.findings
    call.cause = error
    return [(call.rank, call.problem_of(error))]


def _packed_each(meeting: Meeting) -> dict[int, bytes]:
    """Return the bytes of each rank's answer; ranks often have the same one."""
    answers = {rank: meeting._answers.get(rank) for rank in meeting.heard}
    packed = {id(value): _packed(value) for value in answers.values()}
    return {rank: packed[id(value)] for rank, value in answers.items()}


def _replies(heard: Gathered, findings: Sequence[Finding], answers: Mapping[int, bytes]) -> dict[int, bytes]:
    """Return the message to each rank: the findings for every rank, or its own answer."""
    plain = [(rank, tuple(problem)) for rank, problem in findings]
    replies = {id(data): pickle.dumps((plain, data)) for data in (*answers.values(), b"")}
    return {rank: replies[id(answers.get(rank, b""))] for rank in heard.messages}


def _packed(value: object) -> bytes:
    """Return a value as bytes that fit into a message.

    Raises:
        CollectiveError: there are too many.
    """
    data = pickle.dumps(value)
    if len(data) > MOST - SPARE:
        raise CollectiveError(f"a message of {len(data)} bytes, where {MOST - SPARE} are the most")
    return data
