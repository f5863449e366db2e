"""Work beside the training: one job after the other, in a thread of this process.

No collective runs in it: what failed is kept until it is asked for.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Optional

logger = logging.getLogger("torch_dcp_backport.checkpoint")

#: Returns why it failed, or ""; what it raises is a failure, too.
Job = Callable[[], str]


class Background:
    """Jobs, and why those failed that did."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._failures: list[str] = []
        self._is_running = False

    def add(self, job: Job) -> bool:
        """Do a job after those that were added before; whether it has to wait for one."""
        with self._lock:
            self._waiting.append(job)
            if self._is_running:
                return True
            self._is_running = True
        try:
            # Not a daemon: at the end of the process it is waited for.
            threading.Thread(target=self._work, name=self.name).start()
        except RuntimeError:
            # There can be no more threads.
            self._work()
        return False

    def wait(self, seconds: Optional[float] = None) -> bool:
        """Whether none is left, after so many seconds at most."""
        with self._lock:
            return self._lock.wait_for(lambda: not self._is_running, seconds)

    def failures(self) -> list[str]:
        """Why jobs failed, each once."""
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
                # Also what is no Exception, such as a cancelled task of a store: a thread that ended here
                # would be waited for without end.
                logger.exception("%s failed", self.name)
                failure = f"{type(error).__name__}: {error}"
            if failure:
                with self._lock:
                    self._failures.append(failure)
