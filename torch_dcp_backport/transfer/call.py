"""One collective call: what it is about, which ranks take part, and what is wrong with it so far.

A rank that fails inside it still comes to the call's agreement, and every rank hears of it there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from types import TracebackType
from typing import Optional

import torch.distributed as dist

from torch_dcp_backport import compat
from torch_dcp_backport.transfer.errors import UNCHANGED, Problem, problem_of
from torch_dcp_backport.transfer.exclusive import exclusive
from torch_dcp_backport.transfer.plan import Agreement, Key, Want, agree
from torch_dcp_backport.transfer.post import Group
from torch_dcp_backport.transfer.report import Tally


class Call:
    """A context: this thread alone transfers in the group meanwhile."""

    def __init__(self, title: str, operation: str, group: Group = None) -> None:
        """`title`: first words of every error; `operation`: the report's."""
        self.title = title
        self.group = group
        self.ranks = compat.group_ranks(group)
        self.rank = dist.get_rank()
        self.tally = Tally(operation)
        #: What is wrong on this rank, and the exception behind the last of it.
        self.problems: list[Problem] = []
        self.cause: Optional[BaseException] = None
        self._held = contextlib.ExitStack()

    def __enter__(self) -> Call:
        self._held.enter_context(exclusive(self.group, self.title))
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

    @contextlib.contextmanager
    def guard(self):  # type: ignore[no-untyped-def]
        """Turn an exception of this rank into a problem; the other ranks wait in the agreement."""
        try:
            yield
        except Exception as error:
            self.problems.append(problem_of(error))
            self.cause = error

    def agree(
        self,
        wants: Mapping[Key, Want],
        *,
        staging_bytes: Optional[int] = None,
        device: str = "",
        condition: str = "",
        note: object = None,
        so_far: str = UNCHANGED,
    ) -> Agreement:
        """As `plan.agree`: every rank's problems are raised on every rank.

        Raises:
            RuntimeError: some rank has problems.
            ValueError: nothing is wrong but some rank's staging budget.
        """
        with self.tally.phase("agree"):
            return agree(
                wants,
                self.problems,
                self.title,
                self.group,
                self.cause,
                staging_bytes,
                device,
                condition,
                note=note,
                so_far=so_far,
            )
