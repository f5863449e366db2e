"""Storages that fail, for DCP's writers, in a chosen thread and at a chosen write."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Optional

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem


def no_space() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Storage(FileSystem):
    """Counts its writes, knows its open files and who wrote; `fails` says what a write raises."""

    def __init__(self, fails: Callable[[Storage, int], Optional[BaseException]]) -> None:
        self.fails = fails
        self.writes = 0
        self.open: set[Any] = set()
        self.caller: Optional[threading.Thread] = None  # of write_data
        self.failed = threading.Event()
        self.lock = threading.Lock()

    @property
    def is_callers(self) -> bool:
        return threading.current_thread() is self.caller

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            self.open.add(path)
            try:
                yield stream if "r" in mode or str(path).endswith("tmp") else Stream(self, stream)
            finally:
                self.open.discard(path)

    def write(self) -> None:
        with self.lock:
            self.writes += 1
            number = self.writes
        error = self.fails(self, number)
        if error is not None:
            self.failed.set()
            raise error


class Stream:
    def __init__(self, storage: Storage, stream: Any) -> None:
        self._storage, self._stream = storage, stream

    def write(self, data: Any) -> int:
        self._storage.write()
        return int(self._stream.write(data))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Writer(dcp.FileSystemWriter):
    """A subclass, as users have them, on such a storage."""

    def __init__(self, path: str, storage: Storage, **options: Any) -> None:
        super().__init__(path, sync_files=False, **options)
        self.fs = storage

    def write_data(self, plan: Any, planner: Any) -> Any:
        self.fs.caller = threading.current_thread()
        return super().write_data(plan, planner)


def in_another_thread(make: Callable[[], BaseException]) -> Callable[[Storage, int], Optional[BaseException]]:
    """The caller's thread waits until another one has failed."""

    def fails(storage: Storage, number: int) -> Optional[BaseException]:
        if not storage.is_callers:
            return make()
        assert storage.failed.wait(30), "no other thread wrote anything"
        return None

    return fails


def at_write(wanted: int) -> Callable[[Storage, int], Optional[BaseException]]:
    return lambda storage, number: no_space() if number == wanted else None
