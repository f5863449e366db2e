"""Damage that a disk does to files."""

from __future__ import annotations

from pathlib import Path


def flip(path: Path) -> None:
    """Turn one bit in the middle of a file around; a second time it is as it was."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
