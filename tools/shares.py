"""A pytest plugin: of a folder's tests only this release's share. Loaded by tools/lanes.py.

A test's name alone decides, so that the releases which share a folder run all of it between them, and most
functions with some of their parameters each.
"""

from __future__ import annotations

import zlib

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--share",
        action="append",
        default=[],
        metavar="PATH=SHARES/N",
        help="only these of N shares of the tests in PATH, as in tests/hf=0,2/4; the first that fits counts",
    )


def is_in(nodeid: str, shares: list[str]) -> bool:
    """Whether a test is in the share of its file or folder, or in none."""
    file = nodeid.partition("::")[0]
    for share in shares:
        path, _, part = share.partition("=")
        if file == path or file.startswith(f"{path}/"):
            numbers, _, of = part.partition("/")
            return zlib.crc32(nodeid.encode()) % int(of) in map(int, numbers.split(","))
    return True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    shares: list[str] = config.getoption("--share")
    left_out = [item for item in items if not is_in(item.nodeid, shares)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        gone = set(left_out)
        items[:] = [item for item in items if item not in gone]
