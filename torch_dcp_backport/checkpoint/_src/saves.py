"""The saves of a manager or handler, one at a time: published at once, or when the background is done.

Collective. Must never lose a save silently.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Optional

from torch_dcp_backport.checkpoint._src import together
from torch_dcp_backport.checkpoint._src.together import Begun
from torch_dcp_backport.dist_checkpointing import CheckpointingException, Worker
from torch_dcp_backport.dist_checkpointing.strategies.async_utils import (
    AsyncCallsQueue,
    AsyncRequest,
    as_exception,
)
from torch_dcp_backport.transfer import Group

logger = logging.getLogger("torch_dcp_backport.checkpoint")

# --- jobs in the background ---
#
# Jobs must never run a collective: failures are kept until the caller asks for them.


#: Returns why it failed, or ""; an exception counts as a failure, too.
Job = Callable[[], str]


class Background:
    """A queue of jobs, and the reasons of those that failed."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._failures: list[str] = []
        #: The thread that works; None where no job is left. One that was given up is not here.
        self._worker: Optional[Worker] = None

    def add(self, job: Job) -> bool:
        """Queue a job behind those added before; return whether it has to wait."""
        with self._lock:
            self._waiting.append(job)
            if self._worker is not None:
                return True
            worker = Worker(lambda: self._work(worker), self.name)
            self._worker = worker
        try:
            # The process waits for it before it ends.
            worker.start()
        except RuntimeError:
            # No thread can be started: the caller does the work.
            self._work(worker)
        return False

    def wait(self, seconds: Optional[float] = None) -> bool:
        """Wait until no job is left, for so many seconds at most; return whether none is left."""
        with self._lock:
            return self._lock.wait_for(lambda: self._worker is None, seconds)

    def give_up(self) -> int:
        """Wait no longer for the job under way, and drop those behind it; return the number of those."""
        with self._lock:
            dropped = len(self._waiting)
            self._waiting.clear()
            worker, self._worker = self._worker, None
            self._lock.notify_all()
        if worker is not None:
            worker.give_up()
        return dropped

    def failures(self) -> list[str]:
        """Return why jobs failed since the last call."""
        with self._lock:
            failures, self._failures = self._failures, []
        return failures

    def _work(self, worker: Worker) -> None:
        while True:
            with self._lock:
                if self._worker is not worker:
                    return
                if not self._waiting:
                    self._worker = None
                    self._lock.notify_all()
                    return
                job = self._waiting.popleft()
            try:
                failure = job()
            except BaseException as error:
                # BaseException includes a cancelled task of a store: if it ended this thread, `wait` would
                # never return.
                logger.exception("%s failed", self.name)
                failure = f"{type(error).__name__}: {error}"
            with self._lock:
                # Of a job that was given up the caller has heard.
                if failure and self._worker is worker:
                    self._failures.append(failure)


# --- saves ---

#: Seconds that a save may wait for the save before without a warning.
SHORT = 1.0


class Saves:
    """The saves of a manager or handler, of which at most one is under way."""

    def __init__(self, process_group: Group = None, timeout: Optional[float] = None) -> None:
        """`timeout`: the most seconds of a wait for this rank's files; None waits without end."""
        self.process_group = process_group
        self._queue = AsyncCallsQueue(process_group=process_group, timeout=timeout)
        self._final: Optional[Path] = None

    def wait_for_last(self) -> None:
        """Publish the save before, if it is under way, so that the next can begin.

        Raises:
            CheckpointingException: it failed; the same on every rank.
        """
        before, began = self._final, time.monotonic()
        self.wait()
        if before is not None:
            seconds = time.monotonic() - began
            level = logging.WARNING if seconds > SHORT else logging.INFO
            logger.log(level, "waited %.1f s for %s, the save before", seconds, before)

    def publish(self, begun: Begun, then: Sequence[Callable[[Path], None]]) -> None:
        """Publish a folder in the background, once the ranks have written it; others are published already.

        Args:
            begun: of `together.draft_of`.
            then: as of `together.finish_folder`.

        Raises:
            CheckpointingException: the same on every rank. Older checkpoints are as they were.
        """
        if not begun.writing.requests:
            return
        self._final = begun.asked.final
        _unfinished.add(self)
        self._queue.schedule_async_request(
            AsyncRequest(
                write_all,
                (begun,),
                [lambda: self._publish(begun, then)],
                abandon_fns=(lambda: abandon(begun),),
                stop_fn=lambda: stop(begun),
            )
        )

    def finish(self, blocking: bool = True) -> bool:
        """Publish the save under way once every rank has written its part; return whether none is left.

        With `blocking`, it waits for that, and frees the memory that is kept for the next copy.

        Raises:
            CheckpointingException: the save failed; the same on every rank. It is not tried again.
        """
        with self._forgetting():
            if blocking:
                self._queue.close()
            else:
                self._queue.maybe_finalize_async_calls()
        return not self._queue.get_num_unfinalized_calls()

    def wait(self) -> None:
        """Publish the save under way as `finish` does, and keep the memory.

        Raises:
            CheckpointingException: as of `finish`.
        """
        with self._forgetting():
            self._queue.maybe_finalize_async_calls(blocking=True)

    @contextlib.contextmanager
    def _forgetting(self) -> Iterator[None]:
        """Forget a save that fails: the caller hears of it."""
        try:
            yield
        except CheckpointingException:
            self._forget()
            raise

    def _forget(self) -> None:
        self._final = None
        _unfinished.discard(self)

    def _publish(self, begun: Begun, then: Sequence[Callable[[Path], None]]) -> None:
        self._forget()
        together.finish_folder(begun, then, self.process_group)

    def warn(self) -> None:
        if self._final is not None:
            logger.error("%s was never published: call finish() before the process ends", self._final)


def write_all(begun: Begun) -> None:
    """Write the parts that were left for the background, in a thread. `finish_folder` raises failures."""
    for request in begun.writing.requests:
        try:
            if request.async_fn is not None:
                request.async_fn(*request.async_fn_args, **request.async_fn_kwargs)
        except BaseException as error:
            begun.writing.failures.append(as_exception(error))


def stop(begun: Begun) -> str:
    """Wait no longer for the parts of a folder; return which are not written, and what is left behind."""
    parts = [request.stop_fn() for request in begun.writing.requests if request.stop_fn is not None]
    texts = "; ".join(part for part in parts if part) or "its parts"
    return f"{texts}; {begun.writing.outlook}; what is left is {begun.writing.draft}"


def abandon(begun: Begun) -> None:
    """Remove what a save has left that will never be published."""
    for request in begun.writing.requests:
        for abandon_fn in request.abandon_fns:
            abandon_fn()
    if begun.draft is not None:
        begun.draft.discard()


#: Held here, as their managers may be gone before.
_unfinished: set[Saves] = set()


@atexit.register
def _warn() -> None:
    for saves in list(_unfinished):
        saves.warn()
