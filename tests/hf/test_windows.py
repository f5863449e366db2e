"""What the first rank reads for all is forgotten window by window."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import torch
from test_safetensors_files import model as write_model

from torch_dcp_backport.hf import Folder
from torch_dcp_backport.hf._src import filling
from torch_dcp_backport.transfer import Box

COUNT, ROWS = 24, 64
WINDOW = 4 * ROWS * 64 * 4


def most_alive(api: Any, folder: Path) -> tuple[int, bool]:
    """The most bytes of parts that were read and still there at a time, and whether all values came."""
    state = {f"layers.{number}": torch.zeros(ROWS, 64) for number in range(COUNT)}
    native, size, most = Folder.part, filling.WINDOW_BYTES, 0
    alive: dict[int, int] = {}

    def part(self: Folder, key: str, box: Box) -> torch.Tensor:
        nonlocal most
        value = native(self, key, box).clone()
        # The memory, and not the tensor: another one may keep it.
        storage = value.untyped_storage()
        alive[storage.data_ptr()] = storage.nbytes()
        weakref.finalize(storage, alive.pop, storage.data_ptr())
        most = max(most, sum(alive.values()))
        return value

    Folder.part, filling.WINDOW_BYTES = part, WINDOW  # type: ignore[method-assign]
    try:
        api.load_state_dict(state, folder, files="rank0")
    finally:
        Folder.part, filling.WINDOW_BYTES = native, size  # type: ignore[method-assign]
    return most, all(bool((value == float(key[7:])).all()) for key, value in state.items())


def test_one_window_is_in_memory_at_a_time(ranks: Any, tmp_path: Path) -> None:
    values = {f"layers.{number}": torch.full((ROWS, 64), float(number)) for number in range(COUNT)}
    write_model(tmp_path / "m", values)
    (first, same), *others = ranks(most_alive, tmp_path / "m")
    assert same
    assert 0 < first <= WINDOW < sum(value.nbytes for value in values.values())
    assert all(nothing == (0, True) for nothing in others)
