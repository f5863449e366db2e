"""Streams of the storages that fsspec knows.

Must never delete what was only read.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import IO, Any, Union


class FileSystem:
    @contextlib.contextmanager
    def create_stream(self: Any, path: Union[str, os.PathLike[str]], mode: str) -> Iterator[IO[bytes]]:
        """Open a file; where the writing of it fails, delete it.

        Without fsspec's transactions: a file system has one for all threads, and the first thread that is
        done ends it. https://github.com/pytorch/pytorch/pull/135541
        """
        name = os.fspath(path)
        file = self.fs.open(name, mode)
        try:
            with file as stream:
                yield stream
        except BaseException:
            # After the file was closed: that uploads what there is of it.
            if not set(mode).isdisjoint("wax+"):
                with contextlib.suppress(Exception):
                    self.rm_file(name)
            raise
