"""Where `verify` loads: what is asked for is taken or refused, the rest follows from what torch sees."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Optional

import pytest
import torch

from torch_dcp_backport import compat
from torch_dcp_backport.regression.verify.place import CannotRun, Seen, choose


def seen(**devices: int) -> Seen:
    """A torch that was built for CUDA and XPU, with Ascend's plugin; torch 2.4 has no backend for XPU."""
    return Seen(
        torch="2.4.1",
        devices=devices,
        backends={"gloo": ["cpu", "cuda"], "nccl": ["cuda"], "hccl": ["npu"]},
        defaults={"cpu": "gloo", "cuda": "nccl", "npu": "hccl"},
    )


@pytest.mark.parametrize(
    ("devices", "device", "backend", "wanted", "reason"),
    [
        ({}, None, None, ("cpu", "gloo"), "torch sees no accelerator"),
        ({"cuda": 0, "xpu": 0}, None, None, ("cpu", "gloo"), "torch sees no accelerator"),
        ({"cuda": 4}, None, None, ("cuda", "nccl"), "torch sees 4 cuda devices"),
        ({"cuda": 0, "npu": 8}, None, None, ("npu", "hccl"), "torch sees 8 npu devices"),
        ({"cuda": 1}, None, None, ("cpu", "gloo"), "4 ranks need 4 devices, and torch sees 1 cuda device"),
        ({"xpu": 4}, None, None, ("cpu", "gloo"), "torch has no own backend for xpu"),
        ({"cuda": 4}, None, "gloo", ("cuda", "gloo"), "torch sees 4 cuda devices"),
        ({"npu": 4}, None, "gloo", ("cpu", "gloo"), "--backend gloo does not serve npu"),
        ({"cuda": 8, "npu": 8}, None, "hccl", ("npu", "hccl"), "torch sees 8 npu devices"),
        ({"cuda": 8}, "cpu", None, ("cpu", "gloo"), "as asked"),
        ({"cuda": 8}, "cuda", "nccl", ("cuda", "nccl"), "as asked"),
        ({"cuda": 8}, "cuda", "cpu:gloo,cuda:nccl", ("cuda", "cpu:gloo,cuda:nccl"), "as asked"),
        ({"cuda": 8}, "cpu", "cpu:gloo,cuda:nccl", ("cpu", "cpu:gloo,cuda:nccl"), "as asked"),
        ({"cuda": 8}, "cuda", "NCCL", ("cuda", "nccl"), "as asked"),
    ],
)
def test_what_is_chosen_and_why(
    devices: dict[str, int],
    device: Optional[str],
    backend: Optional[str],
    wanted: tuple[str, str],
    reason: str,
) -> None:
    place = choose(seen(**devices), 4, device, backend)
    assert (place.device, place.backend) == wanted
    assert place.reason == reason


@pytest.mark.parametrize(
    ("devices", "device", "backend", "said"),
    [
        ({"cuda": 0}, "parrot", None, "--device parrot: torch 2.4.1 knows no such device type here"),
        ({"cuda": 8}, "cuda:0", None, "it knows cpu, cuda"),
        ({"cuda": 0}, "cuda", None, "4 ranks need 4 devices, and torch sees no cuda devices"),
        ({"cuda": 3}, "cuda", None, "4 ranks need 4 devices, and torch sees 3 cuda devices"),
        ({"cuda": 8}, None, "parrot", "--backend parrot: torch 2.4.1 has gloo, nccl, hccl here"),
        ({"cuda": 8}, None, "cpu:gloo,cuda:parrot", "torch 2.4.1 has gloo, nccl, hccl here"),
        ({"cuda": 8}, None, "gloo,nccl", "give one name, or one per device type as in cpu:gloo,cuda:nccl"),
        ({"cuda": 8}, None, "cpu:gloo,nccl", "give one name, or one per device type"),
        ({"cuda": 8}, "cpu", "cpu:nccl", "--backend cpu:nccl: nccl does not serve cpu, but cuda"),
        ({"cuda": 8}, None, "", "torch 2.4.1 has gloo, nccl, hccl here"),
        ({"cuda": 8}, "cpu", "nccl", "--backend nccl does not serve cpu"),
        ({"cuda": 0}, None, "nccl", "does not serve cpu, where the ranks would be (torch sees no acc"),
        ({"cuda": 8}, "cpu", "cuda:gloo", "--backend cuda:gloo does not serve cpu"),
        ({"xpu": 8}, "xpu", None, "no own backend for xpu: give --backend; it has gloo, nccl, hccl here"),
    ],
)
def test_what_cannot_be_had_is_refused_with_what_there_is(
    devices: dict[str, int], device: Optional[str], backend: Optional[str], said: str
) -> None:
    with pytest.raises(CannotRun) as raised:
        choose(seen(**devices), 4, device, backend)
    assert said in str(raised.value)


class Accelerator:
    """As much of `torch.<accelerator>` as is asked for here."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.mine: Optional[int] = None

    def device_count(self) -> int:
        return self.count

    def set_device(self, index: int) -> None:
        self.mine = index


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Accelerator:
    """hpu is a type that torch knows and has no module for."""
    made = Accelerator(2)
    monkeypatch.setattr(torch, "hpu", made, raising=False)
    return made


def test_devices_of_any_accelerator_are_counted(accelerator: Accelerator) -> None:
    assert compat.device_counts()["hpu"] == 2


def test_ranks_get_a_device_each_and_share_where_there_are_fewer(accelerator: Accelerator) -> None:
    compat.set_device("hpu", 3)
    assert accelerator.mine == 1


@pytest.mark.parametrize("name", ["cpu", "meta", "cuda:0", "nn", "accelerator", "parrot", ""])
def test_what_is_no_accelerators_type_has_no_module(name: str) -> None:
    assert compat.device_module(name) is None
    assert name not in compat.device_counts(name)


def test_a_plugin_that_cannot_be_imported_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """torch_npu raises a RuntimeError beside another accelerator."""
    (tmp_path / "torch_npu.py").write_text("raise RuntimeError('two accelerators')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "npu" not in compat.device_counts()


def test_backends_that_torch_lacks_are_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compat.backends()["gloo"][0] == "cpu"
    assert not {"undefined", "fake"} & set(compat.backends())
    lacks: Any = lambda: False  # noqa: E731
    monkeypatch.setattr(torch.distributed, "is_gloo_available", lacks)
    assert "gloo" not in compat.backends()
