"""The emulator sees what NCCL or CUDA would refuse, do wrong or do at a high price."""

from __future__ import annotations

from pathlib import Path

import pytest
from emulated.record import functions_of_ranks
from emulated.runner import Setting, problems, run

#: Not imported here: it installs the device, which ranks alone may do.
CONTROLS = Path(__file__).with_name("controls.py")


@pytest.mark.parametrize("control", functions_of_ranks(CONTROLS))
def test_a_planted_fault_is_seen(control: str) -> None:
    seen = problems(run(f"emulated.controls.{control}", Setting(ends_together=False)))
    assert not seen, seen
