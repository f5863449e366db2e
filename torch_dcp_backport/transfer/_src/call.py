"""One collective call: its title, its ranks, and the problems so far.

A rank that fails inside it still takes part in the call's agreement, and every rank gets its problem there.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Optional, TypeVar, Union

import torch.distributed as dist

from torch_dcp_backport import compat
from torch_dcp_backport.transfer._src import settings
from torch_dcp_backport.transfer._src.attempt import Attempt, made_of
from torch_dcp_backport.transfer._src.chunks import Key
from torch_dcp_backport.transfer._src.consensus import Mark, agree_on_mark, agree_on_mesh, share_findings
from torch_dcp_backport.transfer._src.errors import (
    NOTHING,
    UNCHANGED,
    CollectiveError,
    Common,
    Finding,
    Problem,
    TransferError,
    differences,
    problem_of,
    raise_together,
    spell_key,
)
from torch_dcp_backport.transfer._src.groups import Group, comm_device_type, exclusive, group_ranks, is_first
from torch_dcp_backport.transfer._src.object_collectives import (
    ObjectCollective,
    all_gather_numbers,
    broadcast_from_call,
)
from torch_dcp_backport.transfer._src.once import warn_once
from torch_dcp_backport.transfer._src.plan import Agreement, Terms, Want, checked_inventory, share_tables
from torch_dcp_backport.transfer._src.report import Tally

# --- the garbage collector ---


@contextlib.contextmanager
def gc_context() -> Iterator[None]:
    """No garbage collection meanwhile: a state dict's many small objects would trigger it over and over."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


# --- the call ---

logger = logging.getLogger("torch_dcp_backport.transfer")

BAD_BUDGET = "not a staging budget"
NO_TERMS = Terms()
NO_WANTS: Mapping[Key, Want] = {}

T = TypeVar("T")


class Call:
    """One collective call; as a context, it keeps the groups for the transfers of the calling thread.

    Example:
        Within a process group:

        >>> from torch_dcp_backport.transfer import Call
        >>> with Call("cannot load", "scatter") as call:
        ...     with call.guard("w"):
        ...         raise ValueError("no such file")
        ...     call.agree_on_wants()
        Traceback (most recent call last):
            ...
        RuntimeError: cannot load: 1 problem(s), nothing was changed.
          rank 0: ValueError: no such file: w
    """

    def __init__(
        self,
        title: str,
        operation: str,
        groups: Sequence[Group] = (None,),
        problems: Optional[list[Problem]] = None,
        kind: type[Exception] = RuntimeError,
        plain: tuple[type[Exception], ...] = (),
    ) -> None:
        """Begin a call without any agreement.

        Args:
            title: the first words of every error.
            operation: the operation of the report.
            groups: one process group, or those of a mesh's dimensions where only agreements are needed; none
                where no other rank takes part. None in it is the default group.
            problems: this rank's problems so far; the list is used as it is.
            kind: the class of the errors that collectives of objects raise.
            plain: errors whose text stands alone in a problem, without their type; of a kind that is a
                `CollectiveError` these as well.

        Raises:
            ValueError: this rank is not in a group.
        """
        outside: Any = dist.GroupMember.NON_GROUP_MEMBER
        if any(group is outside for group in groups):
            raise ValueError(f"{title}: this rank is not in the process group")
        self.title = title
        self.kind = kind
        self.plain = (*plain, CollectiveError) if issubclass(kind, CollectiveError) else plain
        self.groups = tuple(groups)
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.tally = Tally(operation)
        self.problems: list[Problem] = [] if problems is None else problems
        #: The exception behind the last of the problems.
        self.cause: Optional[Exception] = None
        #: Those that are still held: an error keeps alive what it touched, and thousands of keys may fail.
        self._failed: weakref.WeakSet[Attempt[Any]] = weakref.WeakSet()
        #: Whether code outside torch takes part in what is left to do, on any rank.
        self.user_code = False
        #: Whether all ranks are in the same collective: a failure reaches the others there. This rank must
        #: not begin another agreement then: it would wait for ranks that never come to it.
        self.is_in_collective = False
        self._held = contextlib.ExitStack()

    @property
    def group(self) -> Group:
        """The first process group."""
        return self.groups[0]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks of the group; this one alone where there is none."""
        return group_ranks(self.group) if self.groups else (self.rank,)

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first of the group; so is a rank whose call has no group."""
        return not self.groups or is_first(self.group)

    @property
    def findings(self) -> list[Finding]:
        """This rank's problems, each with the rank: the form in which the other ranks get them."""
        return [(self.rank, problem) for problem in self.problems]

    def __enter__(self) -> Call:
        with contextlib.ExitStack() as stack:
            for group in self.groups:
                stack.enter_context(exclusive(group, self.title))
            # All of them, or none.
            self._held = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        # An error that its own traceback holds on to keeps alive what it touched, until the collector runs.
        # Its frames have this call, and attempts with that error, which nothing reads after an error.
        self.cause = None
        for attempt in list(self._failed) if error is not None else ():
            attempt.error = None
        self._held.__exit__(kind, error, traceback)

    # --- what fails on this rank ---

    @contextlib.contextmanager
    def guard(self, key: Key = "") -> Iterator[Attempt[Any]]:
        """Turn an exception into a problem: the other ranks wait in the agreement.

        What the next agreement takes is set on the attempt that the context gives:

            with call.guard() as own:
                own.set(len(parts.value))
            counts = call.all_gather_object("counting", own)

        Where an attempt whose value is read in the context failed, so does this, and there is no second
        problem.

        Args:
            key: the key of the tensor that the code in the context is about.

        Raises:
            CollectiveError: every rank of this call has it already. One that a narrower group agreed on is a
                problem of its ranks: the others wait in the agreement.
        """
        made: Attempt[Any] = Attempt()
        try:
            yield made
        except Exception as error:
            is_known = any(error is attempt.error for attempt in self._failed)
            # Without this frame: since Python 3.12 the frame before it is contextlib's, which has the error.
            made.error = error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)
            self._failed.add(made)
            if is_known:
                return
            raised_on = getattr(error, "raised_on", ())
            if raised_on and isinstance(error, self.kind) and set(self.ranks) <= set(raised_on):
                raise
            self.record(self.problem_of(error, key), error)
        finally:
            # The error's traceback has this frame.
            del made

    def attempt(self, function: Callable[..., T], *args: Any, key: Key = "") -> Attempt[T]:
        """Call a function; its error is a problem, as within `guard`.

        Args:
            function: makes this rank's value.
            key: the key of the tensor that the function is about.
            args: its arguments; an attempt among them stands for its value.
        """
        with self.guard(key) as made:
            # A list: of an iterator, a StopIteration that user code raised would be the end.
            made.set(function(*[made_of(arg) for arg in args]))
        try:
            return made
        finally:
            # The error's traceback has this frame, too.
            del made

    def problem_of(self, error: Exception, key: Key = "") -> Problem:
        """Return an error of this rank as a problem.

        Args:
            error: the exception.
            key: the key of the tensor that it is about.
        """
        if isinstance(error, self.plain):
            return Problem(str(error), spell_key(key))
        return problem_of(error, key)

    def record(self, problem: Problem, cause: Exception) -> None:
        """Add a problem of this rank.

        Args:
            problem: the problem, as the other ranks get it.
            cause: the exception behind it.
        """
        self.problems.append(problem)
        self.cause = cause

    @contextlib.contextmanager
    def room_for(self, what: str) -> Iterator[None]:
        """Turn a lack of memory into a problem: the other ranks wait where all have theirs.

        Args:
            what: what is allocated in the context, for the problem.
        """
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            self.problems.append(Problem("could not allocate", what, got=str(error).partition("\n")[0]))
            self.cause = error

    def raise_alone(self) -> None:
        """Raise this rank's problems here, where no message follows that could bring them to the others.

        Raises:
            RuntimeError: this rank has problems.
        """
        raise_together(self.title, self.findings, self.cause)

    def warn_once(self, log: logging.Logger, text: str, about: Optional[Hashable] = None) -> None:
        """Log a warning on the first rank alone, once in its process; what it is of concerns every rank.

        Args:
            log: the logger.
            text: the warning.
            about: what the warning is of, where its text differs from time to time.
        """
        if self.is_first:
            warn_once(log, text, about)

    # --- collectives of objects: one agreement in torch's words ---

    def barrier(
        self,
        doing: str,
        *,
        must_agree: Union[Common, Attempt[Common]] = NOTHING,
        so_far: str = UNCHANGED,
        unheard: str = "",
        kind: Optional[type[Exception]] = None,
    ) -> None:
        """Raise every rank's problems on every rank, or return once all ranks are here. Collective.

        Takes one small message up and one down the tree of the ranks, or a small all-gather and a broadcast.

        Args:
            doing: the step under way: a phase of the report, and words of errors.
            must_agree: name -> text, which must be the same on every rank; or the attempt to make it.
            so_far: an error's words on the state of the files or tensors.
            unheard: the same, where the first rank is gone before it answered; "" for the same words.
            kind: the class of the error; None is the call's.

        Raises:
            kind: a rank has a problem or is gone, or differs in `must_agree`; the same on every rank.

        Example:
            >>> from torch_dcp_backport.transfer import Call
            >>> with Call("cannot write", "save", ()) as call:
            ...     with call.guard("w"):
            ...         raise OSError("the disk is full")
            ...     call.barrier("writing")
            Traceback (most recent call last):
                ...
            RuntimeError: cannot write: 1 problem(s), nothing was changed.
              rank 0: OSError: the disk is full: w
        """
        with self.tally.phase(doing):
            ObjectCollective(self, doing, so_far, unheard, kind).barrier(must_agree)

    def all_gather_object(
        self,
        doing: str,
        value: object = None,
        *,
        must_agree: Union[Common, Attempt[Common]] = NOTHING,
        so_far: str = UNCHANGED,
        unheard: str = "",
    ) -> Mapping[int, Any]:
        """Return every rank's value, by global rank, or raise every rank's problems. Collective.

        All that any rank has goes to every rank. What only the first rank needs is for `gather_object`.

        Args:
            doing: as of `barrier`.
            value: this rank's value, or the attempt to make it; it is pickled.
            must_agree: as of `barrier`.
            so_far: as of `barrier`.
            unheard: as of `barrier`.

        Raises:
            the call's kind of error: as of `barrier`.

        Example:
            >>> from torch_dcp_backport.transfer import Call
            >>> with Call("cannot count", "count", ()) as call:
            ...     call.all_gather_object("counting", 7)
            {0: 7}
        """
        with self.tally.phase(doing):
            return ObjectCollective(self, doing, so_far, unheard).all_gather(value, must_agree)

    def gather_object(
        self,
        doing: str,
        value: object,
        decide: Callable[[Mapping[int, Any]], T],
        *,
        must_agree: Union[Common, Attempt[Common]] = NOTHING,
        so_far: str = UNCHANGED,
        unheard: str = "",
    ) -> T:
        """Return, on every rank, what the first rank makes of all ranks' values. Collective.

        The values go to the first rank alone, and its answer to every rank. Where a rank has a problem,
        nothing is decided.

        Args:
            doing: as of `barrier`.
            value: this rank's value, or the attempt to make it; it is pickled.
            decide: every rank's value, by global rank -> the answer. Called on the first rank alone. What it
                raises is a problem; a `Refusal` has problems of several ranks.
            must_agree: as of `barrier`.
            so_far: as of `barrier`.
            unheard: as of `barrier`.

        Raises:
            the call's kind of error: as of `barrier`; or `decide` failed.

        Example:
            >>> from torch_dcp_backport.transfer import Call
            >>> with Call("cannot count", "count", ()) as call:
            ...     call.gather_object("counting", 7, lambda counts: sum(counts.values()))
            7
        """

        def same_for_each(values: Mapping[int, Any]) -> Mapping[int, T]:
            return dict.fromkeys(values, decide(values))

        result: T = self.scatter_object(
            doing, value, same_for_each, must_agree=must_agree, so_far=so_far, unheard=unheard
        )
        return result

    def scatter_object(
        self,
        doing: str,
        value: object,
        decide: Callable[[Mapping[int, Any]], Mapping[int, Any]],
        *,
        must_agree: Union[Common, Attempt[Common]] = NOTHING,
        so_far: str = UNCHANGED,
        unheard: str = "",
    ) -> Any:
        """Return this rank's answer of those that the first rank makes of all ranks' values. Collective.

        Equal answers travel once.

        Args:
            doing: as of `barrier`.
            value: this rank's value, or the attempt to make it; it is pickled.
            decide: every rank's value, by global rank -> the answer to each rank, by global rank; None where
                a rank has none. Called on the first rank alone, as that of `gather_object`.
            must_agree: as of `barrier`.
            so_far: as of `barrier`.
            unheard: as of `barrier`.

        Raises:
            the call's kind of error: as of `gather_object`.

        Example:
            >>> from torch_dcp_backport.transfer import Call
            >>> with Call("cannot share out", "share", ()) as call:
            ...     call.scatter_object("sharing out", 7, lambda counts: {rank: "all" for rank in counts})
            'all'
        """
        with self.tally.phase(doing):
            collective = ObjectCollective(self, doing, so_far, unheard)
            return collective.scatter(collective.gather(value, must_agree), decide)

    def broadcast_object(self, doing: str, value: object = None) -> Any:
        """Return the first rank's value, on every rank. Collective.

        The problems of the other ranks are raised by the next agreement, which every rank must come to.

        Args:
            doing: as of `barrier`.
            value: on the first rank, the value; the others' does not count.

        Raises:
            RuntimeError: the first rank has problems; on every rank.

        Example:
            >>> from torch_dcp_backport.transfer import Call
            >>> with Call("cannot tell", "tell", ()) as call:
            ...     call.broadcast_object("telling", {"w": (2, 2)})
            {'w': (2, 2)}
        """
        if not self.groups:
            self.raise_alone()
            return value
        with self.tally.phase(doing):
            return broadcast_from_call(self, value)

    def all_gather_numbers(
        self, numbers: Union[Sequence[float], Attempt[Sequence[float]]], count: int
    ) -> dict[int, list[float]]:
        """Do as `all_gather_object` for a few numbers, in one small all-gather: for every step of a training.

        Args:
            numbers: this rank's numbers, or the attempt to make them.
            count: how many there are; the same on every rank.

        Raises:
            the call's kind of error: a rank has problems; the same on every rank.
        """
        return all_gather_numbers(self, numbers, count)

    # --- around a move of tensors: a mark of one size from each rank, and details where marks differ ---

    def publish(self, inventory: Optional[Mapping[Any, object]]) -> dict[Any, Any]:
        """Return the first rank's inventory, on every rank. Collective.

        The problems of other ranks are raised by `agree_on_wants`, which every rank must call next.

        Args:
            inventory: on the first rank, key -> `TensorInfo`, or a small value itself; None on the others.

        Raises:
            RuntimeError: the first rank has problems; on every rank.
        """
        value = dict(inventory or {})
        if not self.groups:
            self.raise_alone()
            return value
        with self.tally.phase("inventory"):
            inventory_of_first: dict[Any, Any] = broadcast_from_call(
                self, value, lambda received: checked_inventory(received, self.title, self.ranks[0])
            )
        return inventory_of_first

    def agree_on_wants(
        self,
        wants: Mapping[Key, Want] = NO_WANTS,
        terms: Union[Terms, Attempt[Terms]] = NO_TERMS,
        *,
        staging_bytes: Optional[int] = None,
        so_far: str = UNCHANGED,
    ) -> Agreement:
        """Raise every rank's problems on every rank, or return what every rank wants. Collective.

        Where nothing is wrong and all want the same, it takes one small message up and one down
        the tree of the ranks, or one small all-gather.

        Args:
            wants: key -> this rank's want.
            terms: this rank's part in the agreement besides its wants, such as its device type; or the
                attempt to make it.
            staging_bytes: this rank's budget in bytes; None is that of the settings.
            so_far: what an error says of what was written.

        Raises:
            RuntimeError: some rank has problems, or another value in the terms' `common`; the same message on
                every rank.
            ValueError: nothing is wrong but some rank's budget; on every rank as well.
            TransferError: a rank is gone, or the group's timeout is over.
        """
        if isinstance(terms, Attempt):
            terms = NO_TERMS if terms.error is not None else terms.value
        if not self.groups:
            self.raise_alone()
            return Agreement([terms.table(wants, self.ranks)], 0, terms.device or "cpu")
        with self.tally.phase("agree"):
            budget, findings = settings.DEFAULT, self.findings
            try:
                budget = (
                    settings.staging_bytes() if staging_bytes is None else settings.checked(staging_bytes)
                )
            except ValueError as error:
                # The other ranks wait in the collective below.
                findings.append((self.rank, Problem(BAD_BUDGET, got=str(error))))
            digest = terms.digest(wants)
            mark = Mark(digest, bool(findings), terms.user_code, budget, terms.device)
            common = self.compare(mark, findings, so_far)
            tables = [terms.table(wants, self.ranks)]
            if common.digest != digest:
                tables = share_tables(tables[0], digest, self.title, self.group, so_far)
        if len(tables) > 1:
            # Every rank computes the same findings from the same tables.
            common_by_rank = {rank: table.common for table in tables for rank in table.ranks}
            raise_together(self.title, differences(common_by_rank))
        self.user_code = common.user_code
        device = comm_device_type(self.group, common.device or "cpu")
        return Agreement(tables, common.staging_bytes, device)

    def compare(self, mark: Mark, findings: Sequence[Finding], so_far: str = UNCHANGED) -> Mark:
        """Return the common mark of all ranks. Collective.

        Args:
            mark: this rank's mark; `troubled` where it has findings.
            findings: this rank's problems, with the rank.
            so_far: what an error says of what was written.

        Raises:
            RuntimeError: some rank has findings; on every rank.
            ValueError: all findings are of budgets.
        """
        common = agree_on_mark(mark, self.group, so_far)
        if common.troubled:
            findings = share_findings(findings, self.group)
            is_budget = all(problem.what == BAD_BUDGET for _, problem in findings)
            raise_together(
                self.title, findings, self.cause, ValueError if is_budget else RuntimeError, so_far
            )
        return common

    def agree_on_outcome(
        self,
        so_far: str = UNCHANGED,
        *,
        lost: str = "",
        kind: Optional[type[Exception]] = None,
        user_code: bool = False,
    ) -> None:
        """Raise the problems that came up on any rank of all groups, on every rank. Collective.

        Args:
            so_far: a text about what was written on some rank; the same on every rank.
            lost: the text to use instead if a rank is gone; "" uses `so_far`.
            kind: the class of the error; by default as below.
            user_code: whether code outside torch takes part in what this rank does next.

        Raises:
            RuntimeError: some rank has problems, and nothing was changed.
            TransferError: some rank has problems after something was written; or a rank is gone.
        """
        findings, self.user_code = agree_on_mesh(self.findings, self.groups, user_code, so_far=lost or so_far)
        kind = kind or (RuntimeError if so_far == UNCHANGED else TransferError)
        raise_together(self.title, findings, self.cause, kind, so_far)

    def tell(self, error: Exception, so_far: Callable[[], str]) -> None:
        """Tell the other ranks, in the last agreement, that user code failed on this one.

        Args:
            error: the exception; it gets a note that says what was written.
            so_far: returns the text of what was written on this rank.
        """
        if not self.user_code or not self.groups or self.is_in_collective:
            return
        problem = problem_of(error)
        # Now, in case that the other ranks never reach the agreement.
        logger.error("%s: %s", self.title, problem)
        with contextlib.suppress(Exception):
            agree_on_mesh([(self.rank, problem)], self.groups, so_far=so_far())
        compat.add_note(error, so_far())
