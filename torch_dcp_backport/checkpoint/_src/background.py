"""Background jobs beside the training, in order, in a thread of this process.

Jobs must never run a collective: failures are kept until the caller asks for them.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Optional

logger = logging.getLogger("torch_dcp_backport.checkpoint")

#: Returns why it failed, or ""; an exception counts as a failure, too.
Job = Callable[[], str]


class Background:
    """A queue of jobs, and the reasons of those that failed."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._failures: list[str] = []
        self._is_running = False

    def add(self, job: Job) -> bool:
        """Queue a job behind those added before; return whether it has to wait."""
        with self._lock:
            self._waiting.append(job)
            if self._is_running:
                return True
            self._is_running = True
        try:
            # Not a daemon: the process waits for it before it ends.
            threading.Thread(target=self._work, name=self.name).start()
        except RuntimeError:
            # No thread can be started: the caller does the work.
            self._work()
        return False

    def wait(self, seconds: Optional[float] = None) -> bool:
        """Wait until no job is left, for so many seconds at most; return whether none is left."""
        with self._lock:
            return self._lock.wait_for(lambda: not self._is_running, seconds)

    def failures(self) -> list[str]:
        """Return why jobs failed since the last call."""
        with self._lock:
            failures, self._failures = self._failures, []
        return failures

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._is_running = False
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
            if failure:
                with self._lock:
                    self._failures.append(failure)
