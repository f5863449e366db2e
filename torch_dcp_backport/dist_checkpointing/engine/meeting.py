"""How the ranks of a call decide together: each says what it has, the first one decides, all hear the same.

A rank's problems, those that the first rank finds, and ranks that are gone: one error, on every rank.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Optional

import torch.distributed as dist

from torch_dcp_backport.dist_checkpointing.core import CheckpointingException
from torch_dcp_backport.transfer import Call, Problem, TransferError, problem_of
from torch_dcp_backport.transfer.consensus import broadcast_bytes
from torch_dcp_backport.transfer.errors import UNCHANGED, compose
from torch_dcp_backport.transfer.groups import Group
from torch_dcp_backport.transfer.rounds import answer, ask

#: (global rank, what it has a problem with)
Findings = list[tuple[int, Problem]]


class Refusal(Exception):
    """The first rank decided that it cannot be: the findings go to every rank."""

    def __init__(self, findings: Findings) -> None:
        super().__init__(compose("refused", findings))
        self.findings = findings


def begin(title: str, operation: str, group: Group) -> Call:
    """A call over a process group; of this process alone where there is none."""
    if group is None and not dist.is_initialized():
        return Call(title, operation, ())
    return Call(title, operation, (group,))


def is_alone(call: Call) -> bool:
    return not call.groups or len(call.ranks) == 1


def ranks_of(call: Call) -> tuple[int, ...]:
    return call.ranks if call.groups else (call.rank,)


def consult(
    call: Call,
    own: object,
    decide: Callable[[Mapping[int, Any]], Mapping[int, Any]],
    doing: str,
    so_far: str = UNCHANGED,
) -> Any:
    """Bring every rank's `own` to the first one, and its decision back to each.

    Args:
        own: what this rank has to say; it is pickled.
        decide: called on the first rank, where no rank has a problem, with what each rank said by global
            rank; returns the answer for each. Refuses with `Refusal`; what else it raises is the first
            rank's problem.
        doing: what is under way, for the error where a rank is gone.
        so_far: what an error says of what was written.

    Returns:
        This rank's answer.

    Raises:
        CheckpointingException: a rank has a problem, is gone, or `decide` refused; the same on every rank.
    """
    with call.tally.phase(doing):
        with call.guard():
            own = pickle.dumps(own)
        message = pickle.dumps((list(map(tuple, call.problems)), own if not call.problems else b""))
        if is_alone(call):
            reply = _decision(call, {call.rank: message}, (), decide, doing)[call.rank]
        else:
            reply = _exchanged(call, message, decide, doing, so_far)
    findings, result = pickle.loads(reply)
    if findings:
        fail(call, [(rank, Problem(*problem)) for rank, problem in findings], so_far)
    return pickle.loads(result)


def _exchanged(call: Call, message: bytes, decide: Callable[..., Any], doing: str, so_far: str) -> bytes:
    try:
        heard = ask(message, call.group)
        replies = None if heard is None else _decision(call, *heard, decide, doing)
        return answer(replies, call.group)
    except RuntimeError as error:
        text = f"{call.title}: {so_far}; rank {call.ranks[0]} did not answer while {doing}"
        raise CheckpointingException(text) from error


def _decision(
    call: Call, messages: Mapping[int, bytes], gone: Sequence[int], decide: Callable[..., Any], doing: str
) -> dict[int, bytes]:
    """The first rank's answers: to everyone the findings, or to each its own."""
    said = {rank: pickle.loads(message) for rank, message in messages.items()}
    findings: Findings = [(rank, Problem(f"the rank is gone, or too late, while {doing}")) for rank in gone]
    findings += [(rank, Problem(*problem)) for rank in sorted(said) for problem in said[rank][0]]
    answers: Mapping[int, Any] = {}
    if not findings:
        try:
            answers = decide({rank: pickle.loads(said[rank][1]) for rank in sorted(said)})
        except Refusal as refusal:
            findings = refusal.findings
        except Exception as error:
            call.cause = error
            findings = [(call.rank, problem_of(error))]
    told = [(rank, tuple(problem)) for rank, problem in findings]
    #: Ranks often have the same answer.
    packed: dict[int, bytes] = {}
    replies = {}
    for rank in messages:
        value = answers.get(rank)
        if id(value) not in packed:
            packed[id(value)] = pickle.dumps((told, pickle.dumps(value)))
        replies[rank] = packed[id(value)]
    return replies


def announce(call: Call, make: Callable[[], object], doing: str) -> Any:
    """What the first rank makes, on every rank.

    Raises:
        CheckpointingException: it cannot be made, or a rank is gone; the same on every rank.
    """
    findings: Findings = []
    sent = b""
    first = ranks_of(call)[0]
    with call.tally.phase(doing):
        if call.rank == first:
            value = None
            try:
                value = make()
            except Refusal as refusal:
                findings = refusal.findings
            except Exception as error:
                call.cause = error
                findings = [(first, problem_of(error))]
            sent = pickle.dumps(([(rank, tuple(problem)) for rank, problem in findings], value))
        if not is_alone(call):
            try:
                sent = broadcast_bytes(sent, call.group)
            except TransferError as error:
                text = f"{call.title}: {UNCHANGED}; a rank is gone, or too late, while {doing}"
                raise CheckpointingException(text) from error
    found, value = pickle.loads(sent)
    if found:
        fail(call, [(rank, Problem(*problem)) for rank, problem in found])
    return value


def fail(call: Call, findings: Findings, so_far: str = UNCHANGED) -> NoReturn:
    cause: Optional[BaseException] = call.cause
    raise CheckpointingException(compose(call.title, findings, so_far)) from cause
