"""One collective call: what it is about, which ranks take part, and what is wrong with it so far.

A rank that fails inside it still comes to the call's agreement, and every rank hears of it there.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Optional

import torch.distributed as dist

from torch_dcp_backport import compat
from torch_dcp_backport.transfer.chunks import Key
from torch_dcp_backport.transfer.errors import UNCHANGED, Problem, problem_of, raise_together
from torch_dcp_backport.transfer.exclusive import exclusive
from torch_dcp_backport.transfer.groups import Group, group_ranks
from torch_dcp_backport.transfer.plan import Agreement, Want, agree, agree_on_mesh, no_room, publish
from torch_dcp_backport.transfer.report import Tally

logger = logging.getLogger("torch_dcp_backport.transfer")


class Call:
    """A context: the calling thread alone transfers in the groups meanwhile."""

    def __init__(
        self,
        title: str,
        operation: str,
        groups: Sequence[Group] = (None,),
        problems: Optional[list[Problem]] = None,
    ) -> None:
        """Begin a call that nothing was agreed on yet.

        Args:
            title: first words of every error.
            operation: the report's.
            groups: one process group, or those of a mesh's dimensions where only agreements are needed; none
                where no other rank takes part.
            problems: what is known to be wrong on this rank; the list is used as it is.
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
        return self.groups[0]

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks of the group."""
        return group_ranks(self.group)

    def __enter__(self) -> Call:
        with contextlib.ExitStack() as taken:
            for group in self.groups:
                taken.enter_context(exclusive(group, self.title))
            # All of them, or none.
            self._held = taken.pop_all()
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
        """Turn an exception into a problem, of a key: the other ranks wait in the agreement."""
        try:
            yield
        except Exception as error:
            self.fail(problem_of(error, key), error)

    @contextlib.contextmanager
    def room_for(self, what: str) -> Iterator[None]:
        """Turn a want of memory into a problem: the other ranks wait where all have theirs."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            self.fail(no_room(what, error), error)

    def fail(self, problem: Problem, cause: BaseException) -> None:
        self.problems.append(problem)
        self.cause = cause

    def raise_alone(self) -> None:
        """Raise this rank's problems here, where no message follows in which all could hear of them.

        Raises:
            RuntimeError: this rank has problems.
        """
        raise_together(self.title, [(self.rank, problem) for problem in self.problems], self.cause)

    # --- what the ranks tell each other ---

    def publish(self, inventory: Optional[Mapping[Key, object]]) -> dict[Key, Any]:
        """As `plan.publish`: the first rank's inventory, on every rank.

        Raises:
            RuntimeError: the first rank has problems; on every rank.
        """
        with self.tally.phase("inventory"):
            return publish(inventory, self.problems, self.title, self.group)

    def agree(
        self,
        wants: Mapping[Key, Want],
        *,
        staging_bytes: Optional[int] = None,
        device: str = "",
        condition: str = "",
        user_code: bool = False,
        relays: bool = False,
        note: object = None,
        so_far: str = UNCHANGED,
    ) -> Agreement:
        """As `plan.agree`: raise every rank's problems on every rank, or learn what everyone wants.

        Raises:
            RuntimeError: some rank has problems.
            ValueError: nothing is wrong but some rank's staging budget.
        """
        with self.tally.phase("agree"):
            agreement = agree(
                wants,
                self.problems,
                self.title,
                self.group,
                self.cause,
                staging_bytes=staging_bytes,
                device=device,
                condition=condition,
                custom=user_code,
                relays=relays,
                note=note,
                so_far=so_far,
            )
        self.user_code = agreement.custom
        return agreement

    def agree_on_problems(self, user_code: bool = False) -> None:
        """Raise the problems of all ranks of all groups, where nothing travels.

        Raises:
            RuntimeError: some rank has problems.
        """
        found = [(self.rank, problem) for problem in self.problems]
        self.user_code = user_code
        if self.groups:
            found, self.user_code = agree_on_mesh(self.problems, self.groups, user_code)
        raise_together(self.title, found, self.cause)

    def tell(self, error: Exception, so_far: Callable[[], str]) -> None:
        """Tell the other ranks, in the last agreement, that user's code failed on this one."""
        if not self.user_code or not self.groups or self.is_settled:
            return
        # Now, in case that the others never come to the agreement.
        logger.error("%s: %s", self.title, problem_of(error))
        with contextlib.suppress(Exception):
            agree_on_mesh([problem_of(error)], self.groups, so_far=so_far())
        compat.add_note(error, so_far())

    def settle(self, so_far: Callable[[], str]) -> None:
        """The last agreement, where user's code took part on any rank.

        Raises:
            RuntimeError: it failed on another rank; says what was written on this one.
        """
        if self.user_code and self.groups:
            found, _ = agree_on_mesh([], self.groups, so_far=so_far())
            raise_together(self.title, found, so_far=so_far())
