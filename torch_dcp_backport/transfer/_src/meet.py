"""The meeting: what a rank has, or its problem, goes to the first rank, and an answer comes back to each.

A rank that fails still comes to the next meeting, with its problem. Problems of ranks, those that the first
rank finds, and ranks that are gone: one error, on every rank.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator, Mapping, Sequence
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
from torch_dcp_backport.transfer._src.groups import Group, group_ranks, is_silent, source_of
from torch_dcp_backport.transfer._src.wire import (
    LENGTH,
    MOST,
    absent,
    broadcast_from_first,
    bytes_of,
    check_in,
    count_agreement,
    device_for,
    finish,
    gather_bytes,
    gather_rows,
    post,
    takes_collectives,
    tensor_of,
)

# --- messages ---
#
# A rank that is gone costs the others no hang: the first rank hears of it and can still answer the rest.


class Heard(NamedTuple):
    """The messages that the first rank received, by global rank, and the ranks that are gone or late."""

    messages: dict[int, bytes]
    gone: tuple[int, ...] = ()


def ask(data: bytes, group: Group) -> Optional[Heard]:
    """Send this rank's bytes to the first rank of the group, which gets everyone's; None on the others.

    Raises:
        RuntimeError: the first rank is gone.
    """
    ranks, rank = group_ranks(group), dist.get_rank()
    check_in(group)
    if takes_collectives(group):
        # A rank that is gone leaves all to the group's timeout: no part of a collective fails alone.
        messages = gather_bytes(data, group)
        return Heard(messages) if rank == source_of(group) else None
    if rank != ranks[0]:
        _send(data, ranks[0], group)
        return None
    others = ranks[1:]
    sizes = _receive(dict.fromkeys(others, LENGTH), group)
    lengths = {other: _length(message) for other, message in sizes.items()}
    messages = _receive(lengths, group)
    messages[rank] = data
    silent = [other for other in others if other not in messages]
    # After a timeout gloo closes all connections, also those of ranks that are not late.
    late = set(absent(group)).intersection(silent) if silent else set()
    return Heard(messages, tuple(other for other in silent if other in late or not late))


def answer(answers: Optional[dict[int, bytes]], group: Group) -> bytes:
    """Send each rank its bytes from the first rank, which passes all of them; the others pass None.

    Raises:
        RuntimeError: the first rank is gone.
    """
    ranks, rank = group_ranks(group), dist.get_rank()
    if takes_collectives(group):
        own = answer_to_all(answers, group)
        count_agreement(group)
        return own
    if rank != ranks[0]:
        size = _receive({ranks[0]: LENGTH}, group).get(ranks[0])
        message = None if size is None else _receive({ranks[0]: _length(size)}, group).get(ranks[0])
        if message is None:
            raise RuntimeError(f"no answer from rank {ranks[0]}")
        count_agreement(group)
        return message
    assert answers is not None, "the first rank answers"
    for other in ranks[1:]:
        if other in answers:
            try:
                _send(answers[other], other, group)
            except RuntimeError:
                # It is gone; the next question tells. The other ranks wait for their answers.
                continue
    count_agreement(group)
    return answers[rank]


def answer_to_all(answers: Optional[dict[int, bytes]], group: Group) -> bytes:
    """As `answer`, in one broadcast: equal answers travel once."""
    rank, data = dist.get_rank(), b""
    if answers is not None:
        distinct = dict.fromkeys(answers.values())
        number = {message: index for index, message in enumerate(distinct)}
        data = pickle.dumps((list(distinct), {other: number[text] for other, text in answers.items()}))
    messages, number_by_rank = pickle.loads(broadcast_from_first(data, group))
    return bytes(messages[number_by_rank[rank]])


def _length(message: bytes) -> int:
    length = int.from_bytes(message, "big")
    if length > MOST:
        raise ValueError(f"a message of {length} bytes, where {MOST} are the most")
    return length


def _send(data: bytes, peer: int, group: Group) -> None:
    device = device_for(group)
    for part in (len(data).to_bytes(LENGTH, "big"), data):
        if part:
            buffer = tensor_of(part).to(device)
            finish(post([(dist.isend, buffer, peer)], group))


def _receive(lengths: dict[int, int], group: Group) -> dict[int, bytes]:
    """So many bytes from each of some ranks; without those that are gone."""
    device = device_for(group)
    buffers = {
        peer: torch.empty(length, dtype=torch.uint8, device=device) for peer, length in lengths.items()
    }
    awaited = [(dist.irecv, buffer, peer) for peer, buffer in buffers.items() if buffer.numel()]
    gone: set[int] = set()
    works: list[tuple[int, Any]] = []
    for message in awaited:
        # One by one: where a peer is gone, some backends raise here, for it alone.
        try:
            works += [(message[2], work) for work in post([message], group)]
        except RuntimeError:
            gone.add(message[2])
    for peer, work in works:
        try:
            work.wait()
        except RuntimeError:
            gone.add(peer)
    return {peer: bytes_of(buffer) for peer, buffer in buffers.items() if peer not in gone}


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
    with at_first(call, topic, own, common) as meeting:
        if any(value is not None for value in meeting.heard.values()):
            meeting.answer(meeting.heard)
    return meeting.result or dict.fromkeys(call.ranks)


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
    if _outlook.get():
        topic = Topic(topic.doing, _outlook.get())
    with call.tally.phase(topic.doing):
        content = b""
        with call.guard():
            if not call.problems:
                content = _packed((made_of(common), made_of(own)))
        problems = list(map(tuple, call.problems))
        message = pickle.dumps((topic.doing, problems, content if not problems else b""))
        with _telling_who_is_gone(call, topic):
            heard = Heard({call.rank: message}) if len(call.ranks) == 1 else ask(message, call.group)
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
                # No other rank hears of it: what is inside the `with` is for the rank that decides.
                raise
            findings = _findings_of(call, error)
        # What the ranks have sent is not kept until the caller is done.
        meeting.heard, meeting._answers = {}, {}
        replies = None if heard is None else _replies(heard, findings, answers)
        with _telling_who_is_gone(call, topic):
            reply = replies[call.rank] if replies and len(call.ranks) == 1 else answer(replies, call.group)
    findings, result = pickle.loads(reply)
    if findings:
        fail(call, [(rank, Problem(*problem)) for rank, problem in findings], topic.so_far)
    meeting.result = pickle.loads(result)


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
        first, late = call.ranks[0], absent(call.group)
        what = f"rank {first} is gone, or too late, while {topic.doing}"
        if late and first not in late:
            what = f"no answer from rank {first} while {topic.doing}, and {spell(late)} did not come"
        kind = call.kind if issubclass(call.kind, CollectiveError) else TransferError
        raise kind(f"{call.title}: {what}; {topic.unheard or topic.so_far}") from error


def _values_in(heard: Heard, doing: str) -> dict[int, Any]:
    """Return every rank's value, by global rank.

    Raises:
        Refusal: ranks are gone, have problems, are somewhere else, or differ where they must not.
    """
    unpacked = {rank: pickle.loads(message) for rank, message in sorted(heard.messages.items())}
    findings = [(rank, Problem(f"the rank is gone, or too late, while {doing}")) for rank in heard.gone]
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


def _replies(heard: Heard, findings: Sequence[Finding], answers: Mapping[int, bytes]) -> dict[int, bytes]:
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
