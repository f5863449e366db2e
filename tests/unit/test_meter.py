"""The memory meter tells the truth: what the regression suite and `verify` conclude rests on it."""

from __future__ import annotations

import gc
import sys
import time

import pytest
import torch

from torch_dcp_backport.regression import meter

BIG = 96 * meter.MIB
# Other threads and the allocator may move this much meanwhile.
NOISE = 24 * meter.MIB

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")


def touched(size: int) -> torch.Tensor:
    return torch.ones(size, dtype=torch.uint8)


@linux
def test_a_watch_sees_a_peak_that_is_gone_when_it_ends() -> None:
    with meter.Watch() as watch:
        block = touched(BIG)
        time.sleep(0.1)
        del block
        gc.collect()
        watch.stop_peak()
    assert watch.peak is not None
    assert watch.after is not None
    assert BIG - NOISE < watch.peak < BIG + NOISE
    assert watch.after < NOISE
    assert max(held for _, held in watch.history) > BIG - NOISE


@linux
def test_a_watch_forgets_what_came_before_it() -> None:
    del_me = touched(BIG)
    del del_me
    with meter.Watch() as watch:
        watch.stop_peak()
    assert watch.peak is not None
    assert watch.peak < NOISE


@linux
def test_what_comes_after_stop_peak_is_not_in_the_peak() -> None:
    with meter.Watch() as watch:
        watch.stop_peak()
        held = touched(BIG)
    assert watch.peak is not None
    assert watch.after is not None
    assert watch.peak < NOISE
    assert watch.after > BIG - NOISE
    del held


@linux
def test_the_limit_holds_inside_and_is_gone_outside() -> None:
    with meter.data_limit(BIG):
        fits = torch.empty(BIG // 2, dtype=torch.uint8)
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            torch.empty(BIG, dtype=torch.uint8)
        del fits
    assert torch.empty(BIG, dtype=torch.uint8).numel() == BIG


def test_a_view_is_weighed_with_all_that_it_keeps_alive() -> None:
    full = torch.zeros(1000)
    shard = full[:10]
    assert meter.own_bytes(shard) == 40
    assert meter.storage_bytes([shard]) == 4000
    assert meter.storage_bytes([shard.clone()]) == 40


def test_a_storage_counts_once_and_meta_counts_nothing() -> None:
    full = torch.zeros(1000)
    assert meter.storage_bytes([full, full[:10], full.view(10, 100)]) == 4000
    assert meter.storage_bytes([full, torch.zeros(1)]) == 4004
    assert meter.storage_bytes([torch.empty(1000, device="meta")]) == 0


def test_without_proc_nothing_is_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meter, "_status", lambda name: None)
    monkeypatch.setattr(meter, "forget_peak", lambda: False)
    with meter.Watch() as watch:
        watch.stop_peak()
    assert (watch.peak, watch.after, watch.history) == (None, None, [])
    with pytest.raises(RuntimeError, match="no /proc"), meter.data_limit(BIG):
        pass


class Allocator:
    """What `torch.<accelerator>` tells of memory, for device 1."""

    def __init__(self) -> None:
        self.held = self.highest = 100

    def device_count(self) -> int:
        return 2

    def current_device(self) -> int:
        return 1

    def memory_allocated(self, device: torch.device) -> int:
        return self.held * device.index

    def max_memory_allocated(self, device: torch.device) -> int:
        return self.highest * device.index

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        self.highest = self.held

    def take(self, size: int) -> None:
        self.held += size
        self.highest = max(self.highest, self.held)


def test_on_an_accelerator_its_allocator_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = Allocator()
    monkeypatch.setattr(torch, "hpu", allocator, raising=False)
    allocator.take(500)
    allocator.take(-500)
    with meter.Watch(meter.gauge("hpu")) as watch:
        allocator.take(70)
        allocator.take(-30)
        watch.stop_peak()
        allocator.take(200)
    assert (watch.peak, watch.after) == (70, 240)
    assert watch.history


@pytest.mark.parametrize("name", ["memory_allocated", "max_memory_allocated", "reset_peak_memory_stats"])
def test_an_accelerator_that_does_not_tell_is_not_guessed(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(torch, "hpu", Allocator(), raising=False)
    monkeypatch.delattr(Allocator, name)
    with meter.Watch(meter.gauge("hpu")) as watch:
        watch.stop_peak()
    assert watch.peak is None
