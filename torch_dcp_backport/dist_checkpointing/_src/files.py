"""Files of records that are read: a read fills its target, or is an error."""

from __future__ import annotations

import os
from typing import Union


class Damaged(Exception):
    """A file does not hold what was saved."""


class ReadSource:
    """A file that is read from, and the count of bytes that were read."""

    def __init__(self, fd: int, name: str) -> None:
        self.fd = fd
        self.name = name
        self.nbytes = 0
        #: Bytes that were read ahead, and their offset.
        self._ahead, self._ahead_at = bytearray(), 0

    def end(self) -> int:
        return os.fstat(self.fd).st_size

    def fill(self, target: memoryview, offset: int) -> None:
        """Fill `target` with the bytes from `offset` on.

        Raises:
            Damaged: the file ends before.
        """
        self.nbytes += target.nbytes
        while target.nbytes:
            done = os.preadv(self.fd, [target], offset)
            if not done:
                raise Damaged(f"{self.name} ends at byte {offset}, where {target.nbytes} more were saved")
            target, offset = target[done:], offset + done

    def bytes_at(self, offset: int, length: int) -> bytearray:
        """Return some bytes; no memory is taken for them where the file does not have them.

        Raises:
            Damaged: the file ends before.
        """
        start = offset - self._ahead_at
        if start >= 0 and start + length <= len(self._ahead):
            return self._ahead[start : start + length]
        if offset + length > self.end():
            raise Damaged(f"{self.name} ends at byte {self.end()}, where {offset + length} were saved")
        data = bytearray(length)
        self.fill(memoryview(data), offset)
        return data

    def read_ahead(self, offset: int, length: int) -> None:
        """Read bytes that `bytes_at` will return; do nothing where the file does not have them all."""
        if length and offset + length <= self.end():
            self._ahead, self._ahead_at = self.bytes_at(offset, length), offset


class Memory(ReadSource):
    """A part of a file that was read."""

    def __init__(self, data: Union[bytes, bytearray], name: str) -> None:
        super().__init__(-1, name)
        self.data = memoryview(data)

    def end(self) -> int:
        return self.data.nbytes

    def fill(self, target: memoryview, offset: int) -> None:
        part = self.data[offset : offset + target.nbytes]
        if part.nbytes < target.nbytes:
            raise Damaged(f"{self.name}: an entry of a record is outside of it")
        target[:] = part
