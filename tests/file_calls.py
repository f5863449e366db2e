"""Counts the opens, looks and listings that this process makes of the files below a folder.

Opens and listings are told by Python's audit events, of all code; looks by `os.stat` and `os.lstat`.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Optional

LISTINGS = ("os.scandir", "os.listdir")


class FileCalls(NamedTuple):
    """Path below the folder -> how often it was opened, looked at, listed."""

    opens: Counter[str]
    stats: Counter[str]
    listings: Counter[str]


_counts: Optional[tuple[str, FileCalls]] = None
_is_heard = False


def _name_of(path: object) -> Optional[str]:
    if _counts is None or not isinstance(path, (str, bytes, os.PathLike)):
        return None
    text, root = os.path.abspath(os.fsdecode(path)), _counts[0]
    return os.path.relpath(text, root) if text == root or text.startswith(root + os.sep) else None


def _hear(event: str, args: tuple[Any, ...]) -> None:
    if _counts is not None and (event == "open" or event in LISTINGS):
        name = _name_of(args[0])
        if name is not None:
            (_counts[1].opens if event == "open" else _counts[1].listings)[name] += 1


def _counting(native: Callable[..., Any]) -> Callable[..., Any]:
    def call(path: Any, *args: Any, **kwargs: Any) -> Any:
        name = _name_of(path)
        if name is not None:
            assert _counts is not None
            _counts[1].stats[name] += 1
        return native(path, *args, **kwargs)

    return call


@contextlib.contextmanager
def counted(root: Path) -> Iterator[FileCalls]:
    """Count the calls of the context, in all threads."""
    global _counts, _is_heard
    calls = FileCalls(Counter(), Counter(), Counter())
    if not _is_heard:
        # A hook stays for as long as the process lives.
        _is_heard = True
        sys.addaudithook(_hear)
    native = {name: getattr(os, name) for name in ("stat", "lstat")}
    _counts = os.path.abspath(root), calls
    try:
        for name, function in native.items():
            setattr(os, name, _counting(function))
        yield calls
    finally:
        _counts = None
        for name, function in native.items():
            setattr(os, name, function)
