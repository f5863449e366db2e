"""The common state's file, by Megatron's names. `dist_checkpointing.save` and `load` do without them."""

from __future__ import annotations

from torch_dcp_backport.dist_checkpointing._src import commit
from torch_dcp_backport.dist_checkpointing._src.offers import refusing
from torch_dcp_backport.dist_checkpointing.core import Folder
from torch_dcp_backport.dist_checkpointing.mapping import StateDict
from torch_dcp_backport.dist_checkpointing.serialization import load_common_state_dict

COMMON_STATE_FNAME = commit.COMMON

__getattr__ = refusing(
    __name__, "save_common TorchCommonLoadStrategy TorchCommonSaveStrategy register_default_common_strategies"
)


def load_common(checkpoint_dir: Folder) -> StateDict:
    """Return what `dist_checkpointing.load_common_state_dict` does."""
    return load_common_state_dict(checkpoint_dir)
