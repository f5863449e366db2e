"""One collective call: its title, its ranks, and the problems so far.

A rank that fails inside it still takes part in the call's agreement, and every rank hears of it there.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Optional

import torch.distributed as dist

from torch_dcp_backport import compat
from torch_dcp_backport.transfer import settings
from torch_dcp_backport.transfer.chunks import Key
from torch_dcp_backport.transfer.consensus import Mark, agree_on_mark, agree_on_mesh, share_findings
from torch_dcp_backport.transfer.errors import UNCHANGED, Finding, Problem, problem_of, raise_together
from torch_dcp_backport.transfer.groups import Group, comm_device_type, exclusive, group_ranks
from torch_dcp_backport.transfer.plan import Agreement, Table, Terms, Want, publish, share_tables
from torch_dcp_backport.transfer.report import Tally

logger = logging.getLogger("torch_dcp_backport.transfer")

BAD_BUDGET = "not a staging budget"
NO_TERMS = Terms()


class Call:
    """One collective call; as a context, it keeps the groups for the transfers of the calling thread.

    Example:
        Within a process group:

        >>> from torch_dcp_backport.transfer import Call
        >>> with Call("cannot load", "scatter") as call:
        ...     with call.guard("w"):
        ...         raise ValueError("no such file")
        ...     call.agree({})
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
    ) -> None:
        """Begin a call without any agreement.

        Args:
            title: the first words of every error.
            operation: the operation of the report.
            groups: one process group, or those of a mesh's dimensions where only agreements are needed; none
                where no other rank takes part. None in it is the default group.
            problems: this rank's problems so far; the list is used as it is.

        Raises:
            ValueError: this rank is not in a group.
        """
        outside: Any = dist.GroupMember.NON_GROUP_MEMBER
        if any(group is outside for group in groups):
            raise ValueError(f"{title}: this rank is not in the process group")
        self.title = title
        self.groups = tuple(groups)
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.tally = Tally(operation)
        self.problems: list[Problem] = [] if problems is None else problems
        #: The exception behind the last of the problems.
        self.cause: Optional[BaseException] = None
        #: Whether code outside torch takes part in what is left to do, on any rank.
        self.user_code = False
        #: Whether all ranks are in the same collective: a failure reaches them there, or nothing could.
        self.is_settled = False
        self._held = contextlib.ExitStack()

    @property
    def group(self) -> Group:
        """The first process group."""
        return self.groups[0]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks of the group."""
        return group_ranks(self.group)

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
        # An error that its own traceback holds on to keeps alive what it touched.
        self.cause = None
        self._held.__exit__(kind, error, traceback)

    # --- what fails on this rank ---

    @contextlib.contextmanager
    def guard(self, key: Key = "") -> Iterator[None]:
        """Turn an exception into a problem: the other ranks wait in the agreement.

        Args:
            key: the key of the tensor that the code in the context is about.
        """
        try:
            yield
        except Exception as error:
            self.problems.append(problem_of(error, key))
            self.cause = error

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
        """Raise this rank's problems here, where no message follows in which all could hear of them.

        Raises:
            RuntimeError: this rank has problems.
        """
        raise_together(self.title, self.findings, self.cause)

    # --- what the ranks tell each other ---

    def publish(self, inventory: Optional[Mapping[Key, object]]) -> dict[Key, Any]:
        """Return the first rank's inventory, on every rank. Collective.

        The problems of other ranks are raised by `agree`, which every rank must call next.

        Args:
            inventory: on the first rank, key -> `TensorInfo`, or a small value itself; None on the others.

        Raises:
            RuntimeError: the first rank has problems; on every rank.
        """
        with self.tally.phase("inventory"):
            return publish(inventory, self.problems, self.title, self.group)

    def agree(
        self,
        wants: Mapping[Key, Want],
        terms: Terms = NO_TERMS,
        *,
        staging_bytes: Optional[int] = None,
        so_far: str = UNCHANGED,
    ) -> Agreement:
        """Raise every rank's problems on every rank, or return what every rank wants. Collective.

        Where nothing is wrong and all want the same, it takes one small message from and to each rank.

        Args:
            wants: key -> this rank's want.
            terms: this rank's part in the agreement besides its wants, such as its device type.
            staging_bytes: this rank's budget in bytes; None is that of the settings.
            so_far: what an error says of what was written.

        Raises:
            RuntimeError: some rank has problems; the same message on every rank.
            ValueError: nothing is wrong but some rank's budget; on every rank as well.
            TransferError: a rank is gone, or the group's timeout is over.
        """
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
            tables = [Table(wants, self.ranks, terms.relays, terms.note)]
            if common.digest != digest:
                tables = share_tables(tables[0], digest, self.title, self.group, so_far)
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

    def agree_on_problems(self, user_code: bool = False) -> None:
        """Raise the problems of all ranks of all groups, where nothing travels. Collective.

        Args:
            user_code: whether code outside torch takes part in what this rank does next.

        Raises:
            RuntimeError: some rank has problems.
        """
        findings, self.user_code = agree_on_mesh(self.findings, self.groups, user_code)
        raise_together(self.title, findings, self.cause)

    def tell(self, error: Exception, so_far: Callable[[], str]) -> None:
        """Tell the other ranks, in the last agreement, that user code failed on this one.

        Args:
            error: the exception; it gets a note that says what was written.
            so_far: returns the text of what was written on this rank.
        """
        if not self.user_code or not self.groups or self.is_settled:
            return
        problem = problem_of(error)
        # Now, in case that the other ranks never reach the agreement.
        logger.error("%s: %s", self.title, problem)
        with contextlib.suppress(Exception):
            agree_on_mesh([(self.rank, problem)], self.groups, so_far=so_far())
        compat.add_note(error, so_far())

    def settle(self, so_far: Callable[[], str]) -> None:
        """Hold the last agreement, where user code took part on any rank. Collective.

        Args:
            so_far: returns the text of what was written on this rank.

        Raises:
            RuntimeError: user code failed on another rank; says what was written on this one.
        """
        if self.user_code and self.groups:
            findings, _ = agree_on_mesh([], self.groups, so_far=so_far())
            raise_together(self.title, findings, so_far=so_far())
