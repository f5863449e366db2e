"""`import torch_dcp_backport` fixes torch.distributed.checkpoint.state_dict in place on torch >= 2.4, < 2.7.

On torch >= 2.7 it does nothing. `TORCH_DCP_BACKPORT=off|auto|strict` is the switch.
Must stay light: nothing here may import torch, wrapt or importlib.metadata on the way to doing nothing.
"""

from __future__ import annotations

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

activate()
