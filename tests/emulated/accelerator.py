"""The accelerator that cases run on, by name: the emulated one, or a real one that EMULATED_DEVICE names.

It must never import the emulator: a case that needs no more than this runs on any device.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from types import ModuleType

import torch

#: The device's type.
TYPE = os.environ.get("EMULATED_DEVICE", "fakegpu")
#: Where nothing is patched, the package's functions go by name.
IS_PATCHED = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 7)
STATE_DICT = "torch.distributed.checkpoint.state_dict" if IS_PATCHED else "torch_dcp_backport.state_dict"


def state_dict_functions() -> ModuleType:
    return importlib.import_module(os.environ.get("EMULATED_API", STATE_DICT))


def module() -> ModuleType:
    """`torch.fakegpu`, `torch.cuda`."""
    found: ModuleType = getattr(torch, TYPE)
    return found


def device() -> torch.device:
    """This rank's."""
    return torch.device(TYPE, module().current_device())


def preparation_ends() -> None:
    """What the case promises begins here, where traffic is counted."""
    getattr(module(), "reset_traffic", lambda: None)()


def limit_memory(more: int) -> None:
    """This process may have so many bytes more than it has now; without a limit, where negative."""
    _, total = module().mem_get_info()
    now = module().memory_allocated()
    module().set_per_process_memory_fraction(1.0 if more < 0 else (now + more) / total)


def copied_bytes() -> int:
    """Bytes that were copied between host and device so far; nothing where the device does not count them."""
    return int(getattr(module(), "copied_bytes", int)())


def folder() -> Path:
    """One that all ranks of a case have, and no other case."""
    return Path(os.environ["EMULATED_FOLDER"])
