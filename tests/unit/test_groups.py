"""Facts about process groups: one object for each, whoever asks first."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch

from torch_dcp_backport import compat
from torch_dcp_backport.transfer._src import groups


class Slow:
    """In place of GroupInfo: both threads have looked for the group's before either has made it."""

    both = threading.Barrier(2)

    def __init__(self, group: object) -> None:
        self.both.wait(10)


class FakeGroup:
    pass


def test_two_threads_that_come_first_share_what_is_known_of_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each would have a claim of its own, and both would transfer at once."""
    monkeypatch.setattr(groups, "GroupInfo", Slow)
    group: Any = FakeGroup()
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(groups.info_of, [group, group])
    assert first is second
    assert groups.info_of(group) is first


class Info:
    """In place of GroupInfo: a group that was made without a process group behind it."""

    def __init__(self, group: object) -> None:
        self.devices: dict[str, torch.device] = {}


class Bound(FakeGroup):
    bound_device_id = torch.device("cuda", 5)


def test_the_device_is_that_of_the_tensors_then_the_groups_then_the_current(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process may use several, and nobody needs to have set one."""
    monkeypatch.setattr(groups, "GroupInfo", Info)
    monkeypatch.setattr(compat, "current_device", lambda kind: torch.device(kind, 7))
    free: Any = FakeGroup()
    bound: Any = Bound()
    assert groups.device_in(free, "cuda") == torch.device("cuda", 7)
    assert groups.device_in(bound, "cuda") == torch.device("cuda", 5)
    assert groups.device_in(bound, "xpu") == torch.device("xpu", 7)
    for index in (3, 1):
        # Looked at only: without a GPU there is no such tensor.
        on_gpu = mock.create_autospec(torch.Tensor, instance=True)
        on_gpu.device = torch.device("cuda", index)
        groups.note_device(bound, [torch.zeros(1), torch.zeros(1, device="meta"), "text", on_gpu])
        assert groups.device_in(bound, "cuda") == torch.device("cuda", index)
    groups.note_device(bound, [torch.zeros(1)])
    assert groups.device_in(bound, "cuda") == torch.device("cuda", 1)
    assert groups.device_in(bound, "cpu") == torch.device("cpu")
