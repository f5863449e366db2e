"""Forks of this process that do something until they are killed; the first of them tells what it does.

Imports neither torch nor this package: the demo of benchmarks/resume.py has forks of this kind, too.
"""

from __future__ import annotations

import json
import os
import select
import signal
import traceback
from collections.abc import Callable
from typing import Any, Optional

#: Sends a message: anything that JSON has.
Tell = Callable[..., None]


class Forks:
    """So many forks, numbered from 0, and a pipe that number 0 writes messages to."""

    def __init__(self, count: int, work: Callable[[int, Tell], None]) -> None:
        """Start them all.

        Args:
            count: the number of forks.
            work: called in each fork with its number and `tell(*words)`, which sends a list of words; the
                fork ends with it.
        """
        self.pipe, writes = os.pipe()
        self.rest = b""
        self.children: list[int] = []
        for number in range(count):
            child = os.fork()
            if not child:
                code = 1
                try:
                    os.close(self.pipe)

                    def tell(*words: Any, is_first: bool = not number) -> None:
                        if is_first:
                            os.write(writes, json.dumps(words).encode() + b"\n")

                    work(number, tell)
                    code = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(code)
            self.children.append(child)
        os.close(writes)

    def heard(self, seconds: float) -> Optional[list[Any]]:
        """Return the messages that come next; [] at the pipe's end, None if none come in time."""
        while select.select([self.pipe], [], [], max(0.0, seconds))[0]:
            data = os.read(self.pipe, 2**16)
            *lines, self.rest = (self.rest + data).split(b"\n")
            if lines or not data:
                return [json.loads(line) for line in lines]
        return None

    def kill(self) -> None:
        """Send SIGKILL to all of them."""
        for child in self.children:
            os.kill(child, signal.SIGKILL)

    def end(self) -> tuple[list[int], list[Any]]:
        """Wait for all of them; return the status of each, and what the first had told and was not read."""
        statuses = [os.waitpid(child, 0)[1] for child in self.children]
        with os.fdopen(self.pipe, "rb") as file:
            lines = (self.rest + file.read()).split(b"\n")[:-1]
        return statuses, [json.loads(line) for line in lines]
