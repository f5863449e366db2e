"""Bounded movement of boxes of global tensors between ranks.

Knows tensors, layouts and process groups. Must never know what a model or an optimizer is.
"""

from torch_dcp_backport.transfer.allgather import Held
from torch_dcp_backport.transfer.call import Call
from torch_dcp_backport.transfer.errors import Problem, TransferError, problem_of, raise_together, spell_key
from torch_dcp_backport.transfer.gather import gather
from torch_dcp_backport.transfer.layout import Box, Layout, Mesh, layout_of
from torch_dcp_backport.transfer.plan import Agreement, TensorInfo, Want, misfit
from torch_dcp_backport.transfer.progress import Progress
from torch_dcp_backport.transfer.report import Report, last_report
from torch_dcp_backport.transfer.reshard import reshard
from torch_dcp_backport.transfer.scatter import Target, scatter
from torch_dcp_backport.transfer.settings import configure

__all__ = [
    "Agreement",
    "Box",
    "Call",
    "Held",
    "Layout",
    "Mesh",
    "Problem",
    "Progress",
    "Report",
    "Target",
    "TensorInfo",
    "TransferError",
    "Want",
    "configure",
    "gather",
    "last_report",
    "layout_of",
    "misfit",
    "problem_of",
    "raise_together",
    "reshard",
    "scatter",
    "spell_key",
]
