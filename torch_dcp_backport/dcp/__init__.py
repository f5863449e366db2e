"""Corrected functions of `dcp.save` and `dcp.load`, and methods for objects of torch's classes, FSDP2's too.

The names are torch's, also that of a method's class. Knows nothing of patching, and nothing of `state_dict`
and `transfer`; must never be needed by them.
"""

from __future__ import annotations

from torch_dcp_backport.dcp.collectives import DistWrapper as _DistWrapper
from torch_dcp_backport.dcp.collectives import all_gather_keys as _all_gather_keys
from torch_dcp_backport.dcp.loader import load
from torch_dcp_backport.dcp.loader import load_state_dict_from_keys as _load_state_dict_from_keys
from torch_dcp_backport.dcp.planner import (
    DefaultLoadPlanner,
    create_default_local_load_plan,
    create_default_local_save_plan,
)
from torch_dcp_backport.dcp.planner import EmptyStateDictLoadPlanner as _EmptyStateDictLoadPlanner
from torch_dcp_backport.dcp.remote import FileSystem
from torch_dcp_backport.dcp.shards import FSDPParam
from torch_dcp_backport.dcp.traverse import traverse_state_dict, traverse_state_dict_v_2_3
from torch_dcp_backport.dcp.writer import FileSystemWriter as _FileSystemWriter

__all__ = [
    "DefaultLoadPlanner",
    "FSDPParam",
    "FileSystem",
    "_DistWrapper",
    "_EmptyStateDictLoadPlanner",
    "_FileSystemWriter",
    "_all_gather_keys",
    "_load_state_dict_from_keys",
    "create_default_local_load_plan",
    "create_default_local_save_plan",
    "load",
    "traverse_state_dict",
    "traverse_state_dict_v_2_3",
]
