"""A save whose files are written while training goes on: planned and copied now, committed later.

No collective runs in the background.
"""

from __future__ import annotations

import threading
from typing import Optional

from torch_dcp_backport.dist_checkpointing._src import report, saver
from torch_dcp_backport.dist_checkpointing._src.body import Output
from torch_dcp_backport.dist_checkpointing._src.calls import begin
from torch_dcp_backport.dist_checkpointing._src.save import Planned, Saving, commit_together, plan_together
from torch_dcp_backport.dist_checkpointing._src.staged import Staged, give_back, staged
from torch_dcp_backport.dist_checkpointing.core import CheckpointingException
from torch_dcp_backport.transfer import Attempt, Call, Group, Phase, Topic, meet

WRITING = "writing"
COPYING = Topic("copying", "an older checkpoint in the folder is gone")


class SaveUnderWay:
    """A rank's part of a save under way."""

    def __init__(
        self, planned: Planned, copies: Staged, call: Call, group: Group, clock: report.Clock
    ) -> None:
        """`copies`: of the share. `call`: in which it was planned. `clock`: of the caller's seconds."""
        self.planned = planned
        #: None once they are written, or never will be.
        self._copies: Optional[Staged] = copies
        self.title = call.title
        self.group = group
        self.clock = clock
        #: Its callback is called by the thread that writes.
        self.meter = call.tally.meter
        self.meter.expect(lambda: copies.nbytes)
        #: Phase -> seconds.
        self.seconds = dict(call.tally.seconds)
        self._writer = 0
        clock.stop()
        self._output: Optional[Output] = None
        self._error: Optional[Exception] = None

    def write(self) -> None:
        """Write this rank's files. Raises nothing: `commit` raises its error."""
        self._writer = threading.get_ident()
        try:
            with Phase(self.seconds, WRITING):
                self._output = self.planned.write(self.meter.add, self._copies)
        except Exception as error:
            self._error = error
        finally:
            self._give_back()

    def _give_back(self) -> None:
        """Leave the memory of the copies to the next save."""
        copies, self._copies = self._copies, None
        if copies is not None:
            give_back(copies.memory)

    def abandon(self) -> None:
        """Leave the folder to later saves, and remove this rank's file, unless a commit was tried."""
        self._give_back()
        self.planned.discard()
        self.planned.claim.end()

    def commit(self) -> None:
        """Make a checkpoint of the ranks' records. Collective.

        Raises:
            CheckpointingException: a rank could not write, or is gone; the same on every rank.
        """
        self.clock.go_on()
        with begin(self.title, "save", self.group) as call:
            call.tally.seconds.update(self.seconds)
            with call.guard(self.planned.path.name):
                if self._error is not None:
                    raise self._error
                if self._output is None:
                    raise CheckpointingException("nothing was written: its async_fn did not run to its end")
            output = self._output or self.planned.nothing()
            output = commit_together(call, self.planned, output)
            blocked, writing = self.clock.stop(), self.seconds[WRITING]
            if self._writer == threading.get_ident():
                # Nothing was hidden from a caller that wrote by itself.
                report.close_save(call.tally, output, blocked + writing)
            else:
                report.close_save(call.tally, output, blocked, writing)


def begin_save(call: Call, saving: Attempt[Saving], group: Group, clock: report.Clock) -> SaveUnderWay:
    """Plan, and copy this rank's own share; the caller's later changes of its tensors are not saved.

    Raises:
        CheckpointingException: some rank has problems; the same on every rank.
    """
    planned = plan_together(call, saving)
    with call.tally.phase("copying"):
        copies = call.attempt(copied, planned)
    meet(call, COPYING)
    return SaveUnderWay(planned, copies.value, call, group, clock)


def copied(planned: Planned) -> Staged:
    """Return copies of this rank's share, which the plan gives up.

    Raises:
        ValueError: the environment names no way to write them.
        RuntimeError: no memory for them.
    """
    saver.choice()
    copies = staged(planned.works)
    planned.works.clear()
    return copies
