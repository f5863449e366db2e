"""The progress of `verify` on stderr, so that stdout has nothing but the result.

On a terminal one line that is rewritten, and gone at the end; elsewhere a line for each finished step, and
one now and then while a step takes long.
"""

from __future__ import annotations

import shutil
import time
from types import TracebackType
from typing import TextIO

#: Seconds between two lines on a step that is under way.
EVERY = 20.0


class Steps:
    """The steps of a run, counted and timed."""

    def __init__(self, total: int, stream: TextIO) -> None:
        self._total = total
        self._stream = stream
        self._rewrites = stream.isatty()
        self._finished = 0
        self._began = time.monotonic()
        self._shown = ""
        self._said = self._began

    def __enter__(self) -> Steps:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._show("")

    def waiting(self, step: str) -> None:
        """Show a step that is under way; called again and again until it is finished."""
        if self._rewrites:
            self._show(f"[{self._clock()}] {self._finished + 1}/{self._total} {step} ...")
        elif time.monotonic() - self._said >= EVERY:
            self._line(f"{self._finished + 1}/{self._total} {step} ...")

    def finish(self, step: str, ending: str) -> None:
        self._finished += 1
        self._show("")
        if not self._rewrites:
            self._line(f"{self._finished}/{self._total} {step} {ending}")

    def _line(self, text: str) -> None:
        self._said = now = time.monotonic()
        print(f"[{now - self._began:3.0f} s] {text}", file=self._stream, flush=True)

    def _show(self, line: str) -> None:
        """Show a line in place of the last. No escape sequences: not every terminal has them."""
        line = line[: shutil.get_terminal_size().columns - 1]
        if line == self._shown:
            return
        blank = " " * len(self._shown)
        self._stream.write(f"\r{blank}\r{line}")
        self._stream.flush()
        self._shown = line

    def _clock(self) -> str:
        return f"{time.monotonic() - self._began:3.0f} s"
