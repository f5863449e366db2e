"""Agreements of all ranks of a call on Python objects: the messages of `Call`'s collectives of objects.

What a rank has, or its problem, goes to the first rank, and an answer comes back to each. A rank that fails
still comes to the next agreement, with its problem. Problems of ranks, those that the first rank finds, and
ranks that are gone: one error, on every rank. Knows objects; must never move a tensor of the caller's.
"""

from __future__ import annotations

import contextlib
import hashlib
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NoReturn, Optional, Protocol, Union

import torch
import torch.distributed as dist

from torch_dcp_backport.transfer._src.attempt import Attempt, made_of
from torch_dcp_backport.transfer._src.consensus import NO_DIGEST, share_findings
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
    problem_of,
    raise_together,
    spell,
    spell_key,
)
from torch_dcp_backport.transfer._src.groups import Group, is_silent, source_of
from torch_dcp_backport.transfer._src.tree import Gathered, LostRank, Tree
from torch_dcp_backport.transfer._src.wire import (
    MOST,
    absent,
    broadcast_bytes,
    broadcast_from_first,
    check_in,
    count_agreement,
    device_for,
    gather_bytes,
    gather_rows,
    takes_collectives,
)


class Call(Protocol):
    """What an agreement needs of a call: `transfer/_src/call.py` imports this module."""

    title: str
    kind: type[Exception]
    rank: int
    groups: tuple[Group, ...]
    problems: list[Problem]
    cause: Optional[Exception]

    @property
    def group(self) -> Group: ...

    @property
    def ranks(self) -> tuple[int, ...]: ...

    @property
    def findings(self) -> list[Finding]: ...

    def guard(self) -> contextlib.AbstractContextManager[Attempt[Any]]: ...

    def problem_of(self, error: Exception) -> Problem: ...

    def raise_alone(self) -> None: ...


# --- one round of messages ---


class Round:
    """One round: what every rank has goes to the first rank, and an answer comes back to each.

    A rank that is gone costs the others no hang where messages go from rank to rank: the first rank finds
    out, and still answers the rest. In collectives it leaves all to the group's timeout: no part of one fails
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
        """As `gather`, on every rank. Only where messages are collectives; `scatter` follows."""
        return Gathered(gather_bytes(data, self.group))

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


# --- one agreement ---

#: Bytes that a message has around its content.
SPARE = 4096


def largest_answer() -> int:
    """Return the most bytes that an answer to all ranks may have, however many these are."""
    return MOST - SPARE - MOST // 1024


#: What errors say of the state of the files, within `describing_files`, in place of an agreement's own words;
#: "" for none.
_files_text: ContextVar[str] = ContextVar("files_text", default="")


@contextlib.contextmanager
def describing_files(so_far: str) -> Iterator[None]:
    """Have the errors of all calls in the context say `so_far` of the files.

    A save of a step has several calls, and each knows its own files alone. What the step's folder is, only
    the code around them knows.
    """
    token = _files_text.set(so_far)
    try:
        yield
    finally:
        _files_text.reset(token)


class Refusal(Exception):
    """The first rank refuses to go on: the findings go to every rank."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        super().__init__(compose("refused", findings))
        self.findings = list(findings)


#: Every rank's value, by global rank -> the answer to each.
Decision = Callable[[Mapping[int, Any]], Mapping[int, Any]]


class ObjectCollective:
    """One collective of objects of a call, under way.

    Args:
        call: the call, with this rank's problems.
        doing: the step under way: a phase of the report, and words of errors.
        so_far: an error's words on the state of the files or tensors.
        unheard: the same, where the first rank is gone before it answered; "" for the same words.
        kind: the class of the error; None is the call's.
    """

    def __init__(
        self,
        call: Call,
        doing: str,
        so_far: str = UNCHANGED,
        unheard: str = "",
        kind: Optional[type[Exception]] = None,
    ) -> None:
        files_text = _files_text.get()
        self.call = call
        self.doing = doing
        self.kind = kind or call.kind
        self.so_far = files_text or so_far
        # Where the first rank is gone, nothing on this rank knows what is on the disk.
        self.unheard = unheard or files_text or so_far
        self._round: Optional[Round] = None
        #: On the first rank: what it received.
        self._gathered: Optional[Gathered] = None
        self._findings: Sequence[Finding] = ()

    def all_gather(self, value: object, must_agree: Union[Common, Attempt[Common]]) -> Mapping[int, Any]:
        """Return every rank's value, by global rank, on every rank; or raise every rank's problems there."""
        call = self.call
        if len(call.ranks) == 1 or not takes_collectives(call.group):
            # None from every rank needs no answer.
            received = self.gather(value, must_agree)
            return self.scatter(received, _all_to_each) or dict.fromkeys(call.ranks)
        # Every rank gets all that was sent. The answer has only problems, and comes all the same: a rank that
        # failed may be in another collective of objects than these, and each is an all-gather of heads and
        # a broadcast: it gets the others' problems there, and they get its problem here.
        message = self._message(value, must_agree)
        self._round = Round(call.group)
        with self._telling_who_is_gone():
            gathered = self._round.all_gather(message)
        values: Mapping[int, Any] = {}
        findings: Sequence[Finding] = ()
        try:
            values = self._values_in(gathered)
        except Exception as error:
            findings = self._findings_of(error)
        if call.rank == call.ranks[0]:
            self._gathered, self._findings = gathered, findings
        self.answer({})
        if findings:
            # What the first rank can read, and this one cannot.
            self._fail(findings)
        return values

    def gather(self, value: object, must_agree: Union[Common, Attempt[Common]]) -> Mapping[int, Any]:
        """Return every rank's value, by global rank, on the first rank; nothing on the others.

        Nothing on the first rank either where some rank has a problem: `scatter` follows in any case.
        """
        call = self.call
        message = self._message(value, must_agree)
        self._round = Round(call.group) if len(call.ranks) > 1 else None
        with self._telling_who_is_gone():
            self._gathered = (
                Gathered({call.rank: message}) if self._round is None else self._round.gather(message)
            )
        if self._gathered is not None:
            try:
                return self._values_in(self._gathered)
            except Exception as error:
                self._findings = self._findings_of(error)
        return {}

    def scatter(self, values: Mapping[int, Any], decide: Decision) -> Any:
        """Return this rank's answer, or raise every rank's problems on every rank.

        Args:
            values: as `gather` returned them. What the ranks have sent is not kept until the caller is done:
                no frame of this class has it.
            decide: called on the first rank where no rank has a problem; what it raises is a problem.
        """
        answers: dict[int, bytes] = {}
        if values:
            try:
                answers = _packed_each(values, decide(values))
            except Exception as error:
                self._findings = self._findings_of(error)
        del values
        return self.answer(answers)

    def answer(self, answers: Mapping[int, bytes] = {}) -> Any:
        """As `scatter`, with answers that are packed."""
        gathered, round_ = self._gathered, self._round
        replies = None if gathered is None else _replies(gathered, self._findings, answers)
        with self._telling_who_is_gone():
            reply = round_.scatter(replies) if round_ is not None else (replies or {})[self.call.rank]
        findings, result = pickle.loads(reply)
        if findings:
            self._fail([(rank, Problem(*problem)) for rank, problem in findings])
        try:
            return pickle.loads(result)
        except Exception as error:
            findings = self._findings_of(error)
        # Where each rank has an answer of its own, the others have theirs, and go on.
        self._fail(findings)

    def barrier(self, must_agree: Union[Common, Attempt[Common]]) -> None:
        """Raise every rank's problems on every rank, or what must agree and does not."""
        call = self.call
        common: Common = {}
        with call.guard():
            common = made_of(must_agree)
        # Details travel only where digests differ: what must agree may be a line for each tensor of a model.
        digest = NO_DIGEST if call.problems else _digest((self.doing, sorted(common.items())))
        if self.scatter(self.gather(digest, NOTHING), _are_unlike):
            self.scatter(self.gather(None, common), dict)

    # --- messages ---

    def _message(self, value: object, must_agree: Union[Common, Attempt[Common]]) -> bytes:
        """Return what this rank says: its problems, or what is the same on every rank and its value."""
        call, content = self.call, b""
        with call.guard():
            if not call.problems:
                content = _packed((made_of(must_agree), made_of(value)))
        problems = list(map(tuple, call.problems))
        return pickle.dumps((self.doing, problems, content if not problems else b""))

    def _values_in(self, gathered: Gathered) -> dict[int, Any]:
        """Return every rank's value, by global rank.

        Raises:
            Refusal: ranks are gone, have problems, are somewhere else, or differ where they must not.
        """
        # Ranks that say the same have sent the same bytes, which are read once.
        read = {message: pickle.loads(message) for message in set(gathered.messages.values())}
        unpacked = {rank: read[message] for rank, message in sorted(gathered.messages.items())}
        findings = gone_while(self.doing, gathered.gone)
        for rank, (_, problems, _) in unpacked.items():
            findings += [(rank, Problem(*problem)) for problem in problems]
        if findings:
            raise Refusal(findings)
        contents = {rank: (doing, *pickle.loads(content)) for rank, (doing, _, content) in unpacked.items()}
        findings = self._unlike({rank: (doing, common) for rank, (doing, common, _) in contents.items()})
        if findings:
            raise Refusal(findings)
        return {rank: value for rank, (_, _, value) in contents.items()}

    def _unlike(self, said: Mapping[int, tuple[str, Common]]) -> list[Finding]:
        """Return the findings of ranks that are somewhere else, or that differ where they must not."""
        # What is for another agreement would be taken for what is for this one.
        expected = next(doing for doing, _ in said.values())
        elsewhere = [
            (rank, Problem("the rank is somewhere else in its calls", "", doing, expected))
            for rank, (doing, _) in said.items()
            if doing != expected
        ]
        return elsewhere or differences({rank: common for rank, (_, common) in said.items()})

    # --- errors ---

    def _findings_of(self, error: Exception) -> list[Finding]:
        """Return the findings of an error of this rank in the agreement."""
        if isinstance(error, Refusal):
            return error.findings
        self.call.cause = error
        return [(self.call.rank, self.call.problem_of(error))]

    def _fail(self, findings: Sequence[Finding], so_far: str = "") -> NoReturn:
        fail(self.call, findings, so_far or self.so_far, self.kind)

    @contextlib.contextmanager
    def _telling_who_is_gone(self) -> Iterator[None]:
        """Name the ranks that did not come, in place of a backend's error."""
        call = self.call
        try:
            yield
        except RuntimeError as error:
            late = absent(call.group)
            lost = error.rank if isinstance(error, LostRank) else call.ranks[0]
            is_unheard = isinstance(error, LostRank) and error.is_unheard
            if isinstance(error, LostRank) and lost != call.ranks[0] and (is_unheard or lost in late):
                # The first rank says the same to those that it reaches. Others that have not come may yet
                # come.
                try:
                    self._fail(gone_while(self.doing, [lost]), self.so_far if is_unheard else self.unheard)
                except CollectiveError as failure:
                    if not is_unheard:
                        # This rank's message may have gone on: the others may have an answer.
                        failure.raised_on = ()
                    raise
            kind = self.kind if issubclass(self.kind, CollectiveError) else TransferError
            what = f"rank {lost} is gone, or too late, while {self.doing}"
            if late and lost not in late:
                what = f"no answer from rank {lost} while {self.doing}, and {spell(late)} did not come"
            raise kind(f"{call.title}: {what}; {self.unheard}") from error


def broadcast_from_call(call: Call, value: object, check: Optional[Callable[[object], object]] = None) -> Any:
    """Return the first rank's value, or raise its problems, on every rank of a call with a group.

    Args:
        check: raises where what was received is not such a value. The first rank checks what it sent: else it
            would go on, and wait for ranks that have the error.
    """
    source = source_of(call.group)
    is_source = call.rank == source
    received = pickle.loads(
        broadcast_bytes(_value_or_problems(value, call.problems) if is_source else b"", call.group)
    )
    if isinstance(received, Problems):
        raise_together(call.title, [(source, Problem(*problem)) for problem in received])
    if check is not None:
        check(received)
    return value if is_source else received


class Problems(list[Problem]):
    """The first rank's problems, in place of its value."""


def _value_or_problems(value: object, problems: Sequence[Problem]) -> bytes:
    """Return a value, or problems, as bytes; a value that cannot be pickled is one: the other ranks wait."""
    if problems:
        return pickle.dumps(Problems(problems))
    try:
        return pickle.dumps(value)
    except Exception as error:
        parts = value if isinstance(value, Mapping) else {}
        unsendable = [_problem_of_pickling(spell_key(key), part) for key, part in parts.items()]
        found = [problem for problem in unsendable if problem]
        return pickle.dumps(Problems(found or [problem_of(error)]))


def _problem_of_pickling(key: str, value: object) -> Optional[Problem]:
    try:
        pickle.dumps(value)
    except Exception as error:
        return Problem("a value that cannot be pickled for the other ranks", key, got=str(error))
    return None


def all_gather_numbers(
    call: Call, numbers: Union[Sequence[float], Attempt[Sequence[float]]], count: int
) -> dict[int, list[float]]:
    """Return every rank's numbers, by global rank. Problems travel only where a rank has some."""
    own = numbers if isinstance(numbers, Attempt) else Attempt(numbers)
    if not call.groups:
        call.raise_alone()
        return {call.rank: list(own.value)}
    sent = [0.0] * count if own.error is not None else list(own.value)
    row = torch.tensor([*sent, len(call.problems)], dtype=torch.float64, device="cpu")
    if is_silent(call.group):
        rows = [row.tolist()] * len(call.ranks)
    else:
        data = row.view(torch.uint8).to(device_for(call.group))
        rows = gather_rows(data, call.group).cpu().view(torch.float64).tolist()
    if any(problems for *_, problems in rows):
        fail(call, share_findings(call.findings, call.group))
    return {rank: received for rank, (*received, _) in zip(call.ranks, rows)}


def fail(
    call: Call,
    findings: Sequence[Finding],
    so_far: str = UNCHANGED,
    kind: Optional[type[Exception]] = None,
) -> NoReturn:
    """Raise the findings, which every rank has, as the call's kind of error, or as another kind."""
    error = (kind or call.kind)(compose(call.title, findings, so_far))
    if isinstance(error, CollectiveError):
        error.raised_on = call.ranks
    try:
        raise error from call.cause
    finally:
        # The error's traceback has this frame.
        del error


def gone_while(doing: str, ranks: Iterable[int]) -> list[Finding]:
    """Return the findings of ranks that did not come."""
    return [(rank, Problem(f"the rank is gone, or too late, while {doing}")) for rank in ranks]


# --- bytes ---


def _all_to_each(values: Mapping[int, Any]) -> Mapping[int, Any]:
    """Decide that each rank gets every rank's value; nothing where there are none."""
    return {} if all(value is None for value in values.values()) else dict.fromkeys(values, values)


def _are_unlike(digests: Mapping[int, bytes]) -> Mapping[int, bool]:
    """Decide that each rank gets whether the ranks' digests differ."""
    return dict.fromkeys(digests, len(set(digests.values())) > 1)


def _packed_each(ranks: Iterable[int], answers: Mapping[int, Any]) -> dict[int, bytes]:
    """Return the bytes of each rank's answer; ranks often have the same one."""
    by_rank = {rank: answers.get(rank) for rank in ranks}
    packed = {id(value): _packed(value) for value in by_rank.values()}
    return {rank: packed[id(value)] for rank, value in by_rank.items()}


def _replies(
    gathered: Gathered, findings: Sequence[Finding], answers: Mapping[int, bytes]
) -> dict[int, bytes]:
    """Return the message to each rank: the findings for every rank, or its own answer."""
    plain, none = [(rank, tuple(problem)) for rank, problem in findings], pickle.dumps(None)
    replies = {id(data): pickle.dumps((plain, data)) for data in (*answers.values(), none)}
    return {rank: replies[id(answers.get(rank, none))] for rank in gathered.messages}


def _packed(value: object) -> bytes:
    """Return a value as bytes that fit into a message.

    Raises:
        CollectiveError: there are too many.
    """
    data = pickle.dumps(value)
    if len(data) > MOST - SPARE:
        raise CollectiveError(f"a message of {len(data)} bytes, where {MOST - SPARE} are the most")
    return data


def _digest(value: object) -> bytes:
    return hashlib.blake2b(repr(value).encode(), digest_size=16).digest()
