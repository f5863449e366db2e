"""`import torch_dcp_backport` fixes torch.distributed.checkpoint.state_dict in place on torch >= 2.4, < 2.7.

On torch >= 2.7 it does nothing. `TORCH_DCP_BACKPORT=off|auto|strict` is the switch.
Must stay light: nothing here may import torch or importlib.metadata on the way to doing nothing.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from torch_dcp_backport._version import __version__
from torch_dcp_backport.activation import activate, deactivate
from torch_dcp_backport.activation import current as status
from torch_dcp_backport.activation.status import BackportWarning, LateImportWarning, Status

__all__ = [
    "BackportWarning",
    "LateImportWarning",
    "Status",
    "__version__",
    "activate",
    "deactivate",
    "status",
]

# The libraries beside the shim. They import torch: the first use of a name loads it.
_ROOMS = ("checkpoint", "dist_checkpointing", "engine", "hf", "megatron", "state_dict", "transfer")

if TYPE_CHECKING:
    from torch_dcp_backport import checkpoint as checkpoint
    from torch_dcp_backport import dist_checkpointing as dist_checkpointing
    from torch_dcp_backport import engine as engine
    from torch_dcp_backport import hf as hf
    from torch_dcp_backport import megatron as megatron
    from torch_dcp_backport import state_dict as state_dict
    from torch_dcp_backport import transfer as transfer
else:  # a type checker that saw this function would take every name for one of ours

    def __getattr__(name):
        # Not in dir(): a tool that asks every module for all it has would import torch.
        if name in _ROOMS:
            from importlib import import_module

            return import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _is_own_command() -> bool:
    """Whether this import is the start of `python -m torch_dcp_backport` or of `torch-dcp-backport`."""
    if os.path.basename("".join(sys.argv[:1])) == "torch-dcp-backport":
        return True
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_name != "_run_module_as_main":
        frame = frame.f_back
    return str(frame.f_locals.get("mod_name")).partition(".")[0] == __name__


# An error of activation that our own command reports, and must not end with.
_failure: Exception | None = None
try:
    activate()
except Exception as error:
    if not _is_own_command():
        raise
    _failure = error
