"""HF safetensors and ranks: what files hold, which rank holds which blocks, and the way between them.

Knows tensors, files and process groups; must never know a model's layers.
"""

from torch_dcp_backport.hf.blocks import Part, Share, gaps, spread_of
from torch_dcp_backport.hf.export import Export, collect, export
from torch_dcp_backport.hf.filling import fill_from_first, fill_here
from torch_dcp_backport.hf.sight import Sight, look
from torch_dcp_backport.hf.source import Folder, Given, Source

__all__ = [
    "Export",
    "Folder",
    "Given",
    "Part",
    "Share",
    "Sight",
    "Source",
    "collect",
    "export",
    "fill_from_first",
    "fill_here",
    "gaps",
    "look",
    "spread_of",
]
