"""HF safetensors and ranks: the tensors of files, the blocks of each rank, and the way between them.

Knows tensors, files and process groups; must never know a model's layers.
"""

from torch_dcp_backport.hf.blocks import Part, Share, gaps, spread_of
from torch_dcp_backport.hf.export import Export, Saved, collect, export
from torch_dcp_backport.hf.filling import fill_from_first, fill_here
from torch_dcp_backport.hf.opening import opened
from torch_dcp_backport.hf.sight import Sight, look
from torch_dcp_backport.hf.source import Folder, Given, Source
from torch_dcp_backport.hf.state import Filled, load_state_dict, save_adapter, save_state_dict

__all__ = [
    "Export",
    "Filled",
    "Folder",
    "Given",
    "Part",
    "Saved",
    "Share",
    "Sight",
    "Source",
    "collect",
    "export",
    "fill_from_first",
    "fill_here",
    "gaps",
    "load_state_dict",
    "look",
    "opened",
    "save_adapter",
    "save_state_dict",
    "spread_of",
]
