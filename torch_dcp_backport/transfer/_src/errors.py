"""Errors as data, and as the same text on every rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Optional

#: A message names at most so many problems; the rest are counted.
SHOWN = 20


class Problem(NamedTuple):
    """An error as data. Plain text only: it travels between ranks.

    Args:
        what: the error in a few words, such as "wrong shape".
        key: the name of the tensor; "" where it is not about one.
        got: the value that was found.
        expected: the value that was expected.

    Example:
        >>> from torch_dcp_backport.transfer import Problem
        >>> print(Problem("wrong shape", "w", got="(2,)", expected="(3,)"))
        wrong shape: w (expected (3,), got (2,))
    """

    what: str
    key: str = ""
    got: str = ""
    expected: str = ""

    def __str__(self) -> str:
        text = f"{self.what}: {self.key}" if self.key else self.what
        if self.expected:
            text += f" (expected {self.expected}, got {self.got})"
        elif self.got:
            text += f" ({self.got})"
        return text


class Failure(NamedTuple):
    """An error of a rank's copies.

    Args:
        error: the exception.
        key: the key of the tensor that was copied; "" where the error is not about one.
    """

    error: Exception
    key: Hashable = ""


#: A problem, and the rank that has it.
Finding = tuple[int, Problem]
Findings = list[Finding]


def problem_of(error: Exception, key: Hashable = "") -> Problem:
    """Return an exception as a problem.

    Args:
        error: the exception; its class and its text make the problem.
        key: the key of the tensor that it is about.

    Example:
        >>> from torch_dcp_backport.transfer import problem_of
        >>> print(problem_of(ValueError("no such dtype"), ("state", "w")))
        ValueError: no such dtype: state.w
    """
    try:
        text = str(error)
    except Exception:  # the other ranks wait for any text at all
        text = "it has no text"
    return Problem(f"{type(error).__name__}: {text}", spell_key(key))


UNCHANGED = "nothing was changed"
DOUBTFUL = "do not use what was being loaded"


def compose(title: str, findings: Iterable[Finding], so_far: str = UNCHANGED) -> str:
    """Return the message of all ranks' problems; the same problem of several ranks stands once.

    Args:
        title: the first words.
        findings: (rank, problem) of all ranks.
        so_far: what was changed before the error.
    """
    ranks_by_problem: dict[Problem, list[int]] = {}
    for rank, problem in findings:
        ranks_by_problem.setdefault(problem, []).append(rank)
    lines = [f"{title}: {len(ranks_by_problem)} problem(s), {so_far}."]
    for problem, ranks in list(ranks_by_problem.items())[:SHOWN]:
        lines.append(f"  {spell(ranks)}: {problem}")
    if len(ranks_by_problem) > SHOWN:
        lines.append(f"  ... and {len(ranks_by_problem) - SHOWN} more")
    return "\n".join(lines)


#: Name -> value as text; all must be the same on every rank.
Common = Mapping[str, str]
NOTHING: Common = {}


def differences(common_by_rank: Mapping[int, Common]) -> list[Finding]:
    """A finding of each rank for each value that is not the first rank's."""
    first, expected = next(iter(common_by_rank.items()))
    findings = []
    for rank, own in common_by_rank.items():
        for name in {} if own is expected or own == expected else {**expected, **own}:
            got, value = own.get(name, "nothing"), expected.get(name, "nothing")
            if got != value:
                problem = Problem("not the same on every rank", name, got, f"{value} as on rank {first}")
                findings.append((rank, problem))
    return findings


def out_of_order(expected: Iterable[Hashable], keys: Iterable[Hashable], first: int) -> Problem:
    """Return the problem of the same keys in another order than the first rank's: where that begins."""
    pairs = enumerate(zip(expected, keys), 1)
    place, (there, here) = next((place, pair) for place, pair in pairs if pair[0] != pair[1])
    text = f"{spell_key(there)} in place {place} as rank {first}"
    return Problem("the same keys in another order", got=spell_key(here), expected=text)


def spell(ranks: Sequence[int]) -> str:
    """Return ranks as text: [0, 1, 2, 5] -> "ranks 0-2, 5"."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"rank{'s' if len(set(ranks)) > 1 else ''} {text}"


def spell_key(key: Hashable) -> str:
    """Return a key as text; the parts of a tuple are joined by points.

    Args:
        key: a key of a tensor.

    Example:
        >>> from torch_dcp_backport.transfer import spell_key
        >>> spell_key(("state", "layer.weight", "step"))
        'state.layer.weight.step'
    """
    return ".".join(map(str, key)) if isinstance(key, tuple) else str(key)


def spell_doing(verb: str, keys: Iterable[Hashable]) -> str:
    """Return a step as text: ("sending", ["a", "b", "c"]) -> "sending a ... c (3 tensors)"."""
    names = [spell_key(key) for key in dict.fromkeys(keys)]
    if len(names) > 2:
        names = [f"{names[0]} ... {names[-1]} ({len(names)} tensors)"]
    return " ".join([verb, ", ".join(names)]).rstrip()


def spell_broken_off(rank: int, doing: tuple[str, Iterable[Hashable]], written: Iterable[Hashable]) -> str:
    """Return what an error says of a transfer that broke off on this rank.

    Args:
        rank: this rank.
        doing: the step that was under way: a verb, and the keys.
        written: the keys that this rank had written.
    """
    keys = list(written)
    wrote = spell_doing(f"{DOUBTFUL}: rank {rank} wrote", keys) if keys else f"rank {rank} wrote nothing"
    return f"broken off while {spell_doing(*doing)}; {wrote}"


def raise_together(
    title: str,
    findings: Sequence[Finding],
    cause: Optional[BaseException] = None,
    kind: type[Exception] = RuntimeError,
    so_far: str = UNCHANGED,
) -> None:
    """Raise one error for all findings; return where there are none.

    Args:
        title: the first words of the message.
        findings: (rank, problem) of all ranks; the same on every rank, so that the message is.
        cause: the exception of this rank that is behind one of the problems.
        kind: the class of the error.
        so_far: what the message says of what was written.

    Raises:
        kind: there are findings.

    Example:
        >>> from torch_dcp_backport.transfer import Problem, raise_together
        >>> raise_together("cannot load", [(rank, Problem("no file", "w")) for rank in (0, 1, 2)])
        Traceback (most recent call last):
            ...
        RuntimeError: cannot load: 1 problem(s), nothing was changed.
          ranks 0-2: no file: w
    """
    if findings:
        raise kind(compose(title, findings, so_far)) from cause


class CollectiveError(Exception):
    """An error whose text stands alone, the same on every rank; the base of errors of rooms above."""

    #: The global ranks on which it is raised; none where it may be another error on some of them.
    raised_on: tuple[int, ...] = ()

    @property
    def is_agreed(self) -> bool:
        """Whether it is raised on all ranks of its call."""
        return bool(self.raised_on)


class TransferError(RuntimeError):
    """An error of a transfer that broke off: a rank is gone, a collective timed out, memory ran out."""


@contextlib.contextmanager
def as_transfer_error(failure_text: Callable[[], str]) -> Iterator[None]:
    """Turn an error into a `TransferError` that begins with `failure_text()`."""
    try:
        yield
    except TransferError:
        raise
    except Exception as error:
        raise TransferError(f"{failure_text()}: {error}") from error
