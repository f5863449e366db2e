"""Decisions of a call's ranks: each sends its data, the first rank decides, and each gets an answer.

A rank's problems, those that the first rank finds, and ranks that are gone: one error, on every rank.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, NoReturn

import torch.distributed as dist

from torch_dcp_backport.dist_checkpointing.core import CheckpointingException
from torch_dcp_backport.transfer import Call, Problem, problem_of
from torch_dcp_backport.transfer.errors import UNCHANGED, compose, spell
from torch_dcp_backport.transfer.groups import Group
from torch_dcp_backport.transfer.rounds import answer, ask
from torch_dcp_backport.transfer.wire import MOST, absent

#: Bytes that a message has around its content.
SPARE = 4096
#: (global rank, its problem)
Findings = list[tuple[int, Problem]]


class Topic(NamedTuple):
    """The matter of a consultation."""

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

    def __init__(self, findings: Findings) -> None:
        super().__init__(compose("refused", findings))
        self.findings = findings


def begin(title: str, operation: str, group: Group) -> Call:
    """Begin a call over a process group; of this process alone where there is none."""
    if group is None and not dist.is_initialized():
        return Call(title, operation, ())
    return Call(title, operation, (group,))


def problem_from(error: Exception, key: str = "") -> Problem:
    """Return an error of this rank as a problem for the others; our own errors have its text already."""
    return Problem(str(error), key) if isinstance(error, CheckpointingException) else problem_of(error, key)


@contextlib.contextmanager
def guard(call: Call, key: str = "") -> Iterator[None]:
    """Turn an exception into a problem of this rank: the others wait in the next consultation.

    Raises:
        CheckpointingException: every rank has it already.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, CheckpointingException) and error.is_agreed:
            raise
        record(call, problem_from(error, key), error)


def record(call: Call, problem: Problem, cause: Exception) -> None:
    """Add a problem of this rank, and the exception behind it."""
    call.problems.append(problem)
    call.cause = cause


def is_alone(call: Call) -> bool:
    return not call.groups or len(call.ranks) == 1


def ranks_of(call: Call) -> tuple[int, ...]:
    return call.ranks if call.groups else (call.rank,)


def consult(
    call: Call,
    own: object,
    decide: Callable[[Mapping[int, Any]], Mapping[int, Any]],
    topic: Topic,
) -> Any:
    """Bring every rank's `own` to the first rank, and its decision back to each.

    Args:
        own: this rank's data; it is pickled.
        decide: called on the first rank, where no rank has a problem, with global rank -> its `own`;
            returns the answer for each. Refuses with `Refusal`; any other error is the first rank's
            problem.

    Returns:
        This rank's answer.

    Raises:
        CheckpointingException: a rank has a problem, is gone, or `decide` refused; the same on every rank.
    """
    if _outlook.get():
        topic = Topic(topic.doing, _outlook.get())
    with call.tally.phase(topic.doing):
        with guard(call):
            own = _packed(own)
        problems = list(map(tuple, call.problems))
        message = pickle.dumps((topic.doing, problems, own if not problems else b""))
        if is_alone(call):
            reply = _decision(call, {call.rank: message}, (), decide, topic.doing)[call.rank]
        else:
            reply = _exchanged(call, message, decide, topic)
    findings, result = pickle.loads(reply)
    if findings:
        fail(call, [(rank, Problem(*problem)) for rank, problem in findings], topic.so_far)
    return pickle.loads(result)


def _exchanged(call: Call, message: bytes, decide: Callable[..., Any], topic: Topic) -> bytes:
    try:
        received = ask(message, call.group)
        replies = None if received is None else _decision(call, *received, decide, topic.doing)
        return answer(replies, call.group)
    except RuntimeError as error:
        first, late = call.ranks[0], absent(call.group)
        what = f"rank {first} is gone, or too late, while {topic.doing}"
        if late and first not in late:
            what = f"no answer from rank {first} while {topic.doing}, and {spell(late)} did not come"
        raise CheckpointingException(f"{call.title}: {what}; {topic.unheard or topic.so_far}") from error


def _decision(
    call: Call, messages: Mapping[int, bytes], gone: Sequence[int], decide: Callable[..., Any], doing: str
) -> dict[int, bytes]:
    """Return the first rank's answers: the findings for every rank, or for each rank its own answer."""
    unpacked = {rank: pickle.loads(message) for rank, message in messages.items()}
    findings: Findings = [(rank, Problem(f"the rank is gone, or too late, while {doing}")) for rank in gone]
    findings += [(rank, Problem(*problem)) for rank in sorted(unpacked) for problem in unpacked[rank][1]]
    if not findings:
        # An answer to another question would be taken for the answer to this question.
        findings = [
            (rank, Problem("the rank is somewhere else in its calls", "", other, doing))
            for rank, (other, _, _) in sorted(unpacked.items())
            if other != doing
        ]
    answers: dict[int, bytes] = {}
    if not findings:
        try:
            decided = decide({rank: pickle.loads(unpacked[rank][2]) for rank in sorted(unpacked)})
            # Ranks often have the same answer.
            known = {id(value): _packed(value) for value in (*decided.values(), None)}
            answers = {rank: known[id(decided.get(rank))] for rank in messages}
        except Refusal as refusal:
            findings = refusal.findings
        except Exception as error:
            call.cause = error
            findings = [(call.rank, problem_from(error))]
    plain = [(rank, tuple(problem)) for rank, problem in findings]
    replies = {id(data): pickle.dumps((plain, data)) for data in (*answers.values(), b"")}
    return {rank: replies[id(answers.get(rank, b""))] for rank in messages}


def _packed(value: object) -> bytes:
    """Return a value as bytes that fit into a message.

    Raises:
        CheckpointingException: there are too many.
    """
    data = pickle.dumps(value)
    if len(data) > MOST - SPARE:
        raise CheckpointingException(f"a message of {len(data)} bytes, where {MOST - SPARE} are the most")
    return data


def announce(call: Call, make: Callable[[], object], doing: str) -> Any:
    """Return, on every rank, the value that the first rank makes.

    Raises:
        CheckpointingException: it cannot be made, or a rank has a problem or is gone; the same on every rank.
    """

    def decide(ranks: Mapping[int, Any]) -> Mapping[int, Any]:
        return dict.fromkeys(ranks, make())

    return consult(call, None, decide, Topic(doing))


def fail(call: Call, findings: Findings, so_far: str = UNCHANGED) -> NoReturn:
    error = CheckpointingException(compose(call.title, findings, so_far))
    error.is_agreed = True
    raise error from call.cause
